"""Evaluation: validation loss, samples and multiple-choice scoring."""

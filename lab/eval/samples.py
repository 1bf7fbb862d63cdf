"""Callbacks that log samples during training: generated texts, or BERT's predictions for [MASK]."""

import re
from typing import Any

import numpy as np
import torch

from lab.data.tokenizers import END_OF_TEXT, Tokenizer, printable
from lab.inference.generate import generate
from lab.inference.streaming import IncrementalDetokenizer
from lab.inference.token_logprobs import token_logprobs
from lab.trainer.callbacks import PeriodicCallback

SEPARATOR = f"\n{END_OF_TEXT}\n"  # on its own line


class MaskedLMSamples(PeriodicCallback):
    """Logs the most probable tokens for each [MASK].

    texts: pairs of arrays (T,), the token ids and the masked tokens (-1: not masked).
    """

    def __init__(self, trainer, tokenizer, texts: list[tuple[np.ndarray, np.ndarray]]):
        super().__init__("sample", trainer.cfg.sample_every)
        self.tokenizer, self.texts = tokenizer, texts

    @torch.no_grad()
    def __call__(self, trainer) -> dict[str, list]:
        """{"texts": printable tables, "words": masked tokens and their most probable ones}."""
        texts, words, pieces = [], [], self.tokenizer.pieces
        for ids, masked in self.texts:
            with trainer.precision.autocast():
                logits, _ = trainer.raw_model(torch.tensor(ids[None], device=trainer.world.device))
            probs, guesses = logits[0].float().softmax(-1).topk(3)  # (T, 3)
            lines = [self.tokenizer.decode(ids), "    masked       predictions"]
            for t in np.flatnonzero(masked >= 0):
                guess = [[pieces[i], p] for i, p in zip(guesses[t].tolist(), probs[t].tolist())]
                words.append({"was": pieces[masked[t]], "guesses": guess})
                shown = "  ".join(f'"{piece}" {p:.0%}' for piece, p in guess)
                # "?": the text itself has [MASK] here, so the word is unknown
                was = "?" if masked[t] == ids[t] else pieces[masked[t]]
                lines.append(f"    {was:12} {shown}")
            texts.append("\n".join(lines))
        return {"texts": texts, "words": words}


class TextSamples(PeriodicCallback):
    """Logs two short texts. They have their own random generator, so training is unaffected."""

    def __init__(self, trainer, tokenizer: Tokenizer | None):
        super().__init__("sample", trainer.cfg.sample_every if tokenizer else 0)
        self.tokenizer = tokenizer

    def __call__(self, trainer) -> dict[str, list]:
        """{"texts": ..., "shaded": prompt and token_logprobs of the first, for lab.tools.report}.
        All ranks generate the same texts, because with FSDP2 each has only a shard of the weights."""
        cfg = trainer.cfg
        with trainer.precision.autocast():
            texts, tokens = generate_samples(
                trainer.raw_model, self.tokenizer, cfg.sample_prompt, cfg.sample_tokens, cfg.seed
            )
        return {"texts": texts, "shaded": [cfg.sample_prompt, tokens]}


def generate_samples(
    model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, seed: int
) -> tuple[list[str], list[dict]]:
    """(two texts that start with the prompt, token_logprobs of the first text's new tokens)."""
    device = model.lm_head.weight.device
    ids = [tokenizer.eot] + tokenizer.encode(prompt)  # a document starts with end-of-text
    idx = torch.tensor([ids[-model.config.block_size :]] * 2, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    detokenizers = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer)
    texts, tokens = [prompt, prompt], []
    for new, logits in generate(model, idx, max_new_tokens, 0.8, 50, generator=generator):
        for i, token in enumerate(new.tolist()):
            piece = detokenizers[i].add(token) + SEPARATOR * (token == tokenizer.eot)
            texts[i] += piece
            if i == 0:
                tokens.append(token_logprobs(token, logits[0], printable(piece), tokenizer))
    texts = [text + detokenizer.end() for text, detokenizer in zip(texts, detokenizers)]
    return [re.sub(f"({re.escape(SEPARATOR)})+\\Z", "", text) for text in texts], tokens

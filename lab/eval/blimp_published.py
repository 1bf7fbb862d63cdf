"""BLiMP's 12 phenomena and its authors' accuracies. Used by blimp.py, lab plot and lab report.

Source: raw_results/summary/models_summary.jsonl of github.com/alexwarstadt/blimp at 3e56b06. There, as
in Warstadt et al. 2020 (table 3), each number is the mean of a phenomenon's paradigms.
"""

MODELS = ("n-gram", "LSTM", "Transformer-XL", "GPT-2 large")  # the order of the numbers below
SHORT = ("n-gram", "LSTM", "TXL", "GPT-2")  # for a table
TOTAL = (0.6124, 0.6981, 0.6963, 0.8302)  # mean of the 67 paradigms
PUBLISHED = {
    "anaphor_agreement": (0.4790, 0.9170, 0.9410, 0.9930),
    "argument_structure": (0.7189, 0.7317, 0.7216, 0.8178),
    "binding": (0.6441, 0.7347, 0.7469, 0.8094),
    "control_raising": (0.6848, 0.6700, 0.7148, 0.8192),
    "determiner_noun_agreement": (0.7005, 0.8540, 0.8301, 0.9583),
    "ellipsis": (0.3690, 0.6760, 0.7715, 0.8935),
    "filler_gap_dependency": (0.6020, 0.7389, 0.6660, 0.8127),
    "irregular_forms": (0.7950, 0.8905, 0.7815, 0.9190),
    "island_effects": (0.5724, 0.4658, 0.4834, 0.7273),
    "npi_licensing": (0.4553, 0.5166, 0.5523, 0.7683),
    "quantifiers": (0.5350, 0.6448, 0.6930, 0.7903),
    "subject_verb_agreement": (0.6030, 0.8007, 0.7595, 0.8635),
}


def label(phenomenon: str) -> str:
    """A phenomenon's name as text."""
    return phenomenon.replace("_", " ").replace("npi", "NPI")

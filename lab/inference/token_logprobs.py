"""Token probabilities, for pages that shade text by probability.

Used by sample.py --html, lab serve, and the samples that a run logs for lab report.
"""

import json

import torch
from torch import Tensor

from lab.data.tokenizers import Tokenizer


def token_logprobs(
    token: int, logits: Tensor, text: str, tokenizer: Tokenizer, top_logprobs: int = 5
) -> dict:
    """Record of one token: {"id", "text", "name", "p", "likeliest": [(id, name, p), ...]}.

    logits (V,): those the token was sampled from. text: the characters that it completes. name: see
    token_label. p: probability, with five digits. likeliest: the top_logprobs most probable tokens.
    """

    def rounded(p: float) -> float:
        return float(f"{p:.5g}")

    probs = logits.float().softmax(-1)
    top_p, top_ids = torch.topk(probs, min(top_logprobs, len(probs)))
    likeliest = [
        (i, token_label(i, tokenizer), rounded(p)) for i, p in zip(top_ids.tolist(), top_p.tolist())
    ]
    return {
        "id": token, "text": text, "name": token_label(token, tokenizer),
        "p": rounded(probs[token].item()), "likeliest": likeliest,
    }  # fmt: skip


def token_label(token: int, tokenizer: Tokenizer) -> str:
    """A token as a JSON string, which shows spaces, line ends and incomplete UTF-8 bytes."""
    text = tokenizer.bytes_of(token).decode("utf-8", errors="backslashreplace")
    return json.dumps(text, ensure_ascii=False)

"""documents.py: what attention may look at, and that a model keeps to it however it is called.

That no output sees another document: test_model.py."""

import copy

import torch
from conftest import VOCAB
from test_model import noisy

from lab.data.documents import document_mask, hide_other_documents
from train_gpt2 import GPT

EOT = VOCAB - 1


def test_the_mask_by_hand():
    idx = torch.tensor([[7, EOT, 5, 6, EOT, 8]])
    wanted = ["100000", "010000", "011000", "011100", "000010", "000011"]
    mask = document_mask(idx, EOT)[0, 0].int().tolist()
    assert ["".join(map(str, row)) for row in mask] == wanted
    for past in (1, 3, 5):  # with so many tokens in a cache, the rest are queries
        assert torch.equal(document_mask(idx, EOT, past), document_mask(idx, EOT)[:, :, past:])


def test_all_that_a_model_gives_and_what_is_made_of_it_keeps_to_the_mask(tiny_config):
    """Logits, losses, hidden states; a copy, which has weights of its own, and a compiled model."""
    plain = noisy(tiny_config).eval()
    model = hide_other_documents(copy.deepcopy(plain))
    twin = copy.deepcopy(model)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    idx = torch.randint(0, EOT, (2, 20))
    idx[:, 9] = idx[:, 14] = EOT
    mask, targets = document_mask(idx, EOT), idx.roll(-1, 1)
    causal = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    logits = plain(idx, mask=mask)[0]
    losses = plain(idx, targets, reduction="none", mask=mask)[1]
    assert (plain(idx)[0] - logits).abs().max() > 1e-3, "plain attention crosses end-of-text"
    close = torch.testing.assert_close
    close(model.hidden(idx, mask=causal), plain.hidden(idx))  # who passes a mask gets that one
    close(model.hidden(idx), plain.hidden(idx, mask=mask))
    for p in model.parameters():
        p.data.zero_()
    close(compiled(idx)[0], logits)
    close(twin(idx)[0], logits)
    close(twin(idx, targets, reduction="none")[1], losses)
    assert isinstance(twin, GPT) and list(twin.state_dict()) == list(plain.state_dict())

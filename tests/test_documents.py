"""documents.py: what attention may look at, and that a model keeps to it however it is called."""

import copy

import pytest
import torch
from conftest import TINY_MODEL, VOCAB

from lab.data.documents import document_mask, hide_other_documents
from train_gpt2 import GPT, GPTConfig

EOT = VOCAB - 1


@pytest.fixture
def model():
    model = GPT(GPTConfig(**TINY_MODEL)).eval()
    for p in model.parameters():  # fresh weights hardly look at other tokens
        p.data += 0.1 * torch.randn_like(p)
    return hide_other_documents(model)


def test_the_mask_by_hand():
    idx = torch.tensor([[7, EOT, 5, 6, EOT, 8]])
    wanted = ["100000", "010000", "011000", "011100", "000010", "000011"]
    mask = document_mask(idx, EOT)[0, 0].int().tolist()
    assert ["".join(map(str, row)) for row in mask] == wanted
    for past in (1, 3, 5):  # with so many tokens in a cache, the rest are queries
        assert torch.equal(document_mask(idx, EOT, past), document_mask(idx, EOT)[:, :, past:])


def test_a_document_is_read_as_if_it_stood_alone(model):
    """But for its positions, which go on: so what lies before is exchanged, not left out."""
    one, other = torch.randint(0, EOT, (2, 2, 20))
    one[:, 9] = one[:, 14] = EOT
    other[:, 9:] = one[:, 9:]
    targets = one.roll(-1, 1)
    plain = GPT(model.config).eval()
    plain.load_state_dict(model.state_dict())

    def read(m, idx):
        losses = m(idx, targets, reduction="none")[1]
        return m(idx)[0][:, 9:], losses[:, 9:], m.hidden(idx)[:, 9:]

    for a, b, c, d in zip(*(read(m, idx) for m in (model, plain) for idx in (one, other))):
        torch.testing.assert_close(a, b)
        assert (c - d).abs().max() > 1e-3, "plain attention crosses end-of-text"
    mine = document_mask(one, EOT)
    torch.testing.assert_close(plain.hidden(one, mask=mine), model.hidden(one))
    causal = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()  # who passes a mask gets that one
    torch.testing.assert_close(model.hidden(one, mask=causal), plain.hidden(one))


def test_a_copy_and_a_compiled_model_keep_to_it(model):
    idx = torch.randint(0, EOT, (2, 20))
    idx[:, 9] = EOT
    wanted = model(idx)[0]
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(idx)[0], wanted)
    for p in model.parameters():
        p.data.zero_()
    torch.testing.assert_close(twin(idx)[0], wanted)  # the copy has weights of its own
    assert isinstance(twin, GPT) and list(twin.state_dict()) == list(model.state_dict())

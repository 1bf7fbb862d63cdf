"""Gradients of q, k and v written into one tensor (bench/packed_attention.py)."""

import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run_python

sys.path.insert(0, str(ROOT / "bench"))

import ladder  # noqa: E402
import packed_attention  # noqa: E402
import rungs  # noqa: E402

from train_gpt2 import GPT, GPTConfig, World  # noqa: E402


@pytest.mark.parametrize("script, group", [("packed_attention", "qkv_gradients"), ("fp8_attention", "attention_8_bits")])
def test_as_a_command_it_names_what_measures_it(tmp_path, script, group):
    assert group in rungs.GROUPS
    done = run_python(ROOT / "bench" / f"{script}.py", "--help", cwd=tmp_path)
    assert done.returncode == 2 and f"`python bench/ladder.py --groups {group}` measures it\n" in done.stderr
    assert done.stderr.count("\n") == 1


def gradients(function, qkv, dy):
    qkv = qkv.clone().requires_grad_()
    y = function(qkv)
    y.backward(dy)
    return y.detach(), qkv.grad


def three(qkv, n_head):
    q, k, v = (packed_attention.heads(part, n_head) for part in qkv.split(qkv.size(2) // 3, dim=2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: torch.compile(f, fullgraph=True, dynamic=False)])
def test_same_as_three_tensors(wrap):
    torch.manual_seed(0)
    qkv, dy = torch.randn(2, 16, 3 * 32), torch.randn(2, 16, 32)
    y, grad = gradients(wrap(lambda x: packed_attention.attention(x, 4)[0]), qkv, dy)
    expected, expected_grad = gradients(lambda x: three(x, 4), qkv, dy)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grad, expected_grad, atol=1e-6, rtol=1e-5)
    assert grad.is_contiguous()


@pytest.mark.gpu
def test_cudnn_writes_the_same_into_one_tensor():
    pytest.importorskip("cudnn")
    torch.manual_seed(0)
    qkv = torch.randn(2, 256, 3 * 128, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(2, 256, 128, device="cuda", dtype=torch.bfloat16)
    exact = gradients(lambda x: three(x, 2), qkv.float(), dy.float())
    ours = gradients(lambda x: packed_attention.attention(x, 2)[0], qkv, dy)
    theirs = gradients(lambda x: three(x, 2), qkv, dy)
    for a, b, c in zip(ours, theirs, exact):
        assert (a.float() - c).norm() < 1.1 * (b.float() - c).norm() + 1e-4 * c.norm()


def test_the_model_trains_the_same(tmp_path):
    ladder.random_shards(tmp_path, 257)
    args = ladder.parse_args(["--shapes", "tiny", "--device", "cpu", "--data", str(tmp_path)])
    losses = {}
    for kind in ("three", "packed"):
        settings = dict(compile_mode="none", precision="fp32", lr=1e-2, warmup_steps=0, qkv_gradients=kind)
        with ladder.Run(rungs.Case("qkv_gradients", "tiny", kind, settings, 1337), 4, args, World("cpu")) as run:
            used = {type(block.attn).__name__ for block in run.raw_model.transformer.h}
            losses[kind] = [run.step().item() for _ in range(6)]
        assert used == {"PackedAttention" if kind == "packed" else "CausalSelfAttention"}
    assert losses["packed"] == pytest.approx(losses["three"], abs=1e-5) and len(set(losses["packed"])) == 6


def test_refused_with_a_mask():
    model = GPT(GPTConfig(1, 2, 8, 8, vocab_size=11))
    packed_attention.pack_gradients(model)
    with pytest.raises(ValueError, match="neither masks nor caches"):
        model.transformer.h[0](torch.zeros(1, 4, 8), mask=torch.ones(4, 4, dtype=torch.bool))

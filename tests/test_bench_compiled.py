"""bench/compiled.py on the CPU: a compiler that errs shows, one that does not leaves no difference, biases come back."""

import sys

import pytest
import torch
from conftest import ROOT, run_python

sys.path.insert(0, str(ROOT / "bench"))

import compiled  # noqa: E402
from records import read_records  # noqa: E402
from test_train import compiler_that_errs  # noqa: E402

SMALL = ["--preset", "laptop", "--n_layer", "1", "--batch_size", "2", "--device", "cpu"]


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_what_the_compiler_changes_is_seen(tmp_path, monkeypatch, capsys, factor):
    compiler_that_errs(monkeypatch, factor)
    monkeypatch.setattr(compiled, "why_no_compile", lambda device: "")
    compiled.run([*SMALL, "--out", str(tmp_path / "out.jsonl"), "--commit", "abc"])
    (record,) = read_records(tmp_path / "out.jsonl")
    names, with_compiler, plain, exact = zip(*record["losses"])
    assert names[:2] == ("as training starts", "after 1 update") and len(names) == 6
    assert with_compiler == pytest.approx([factor * loss for loss in plain], abs=2e-4)
    assert plain == pytest.approx(exact, abs=1e-3) and plain[0] != exact[0], "16 bits round"
    assert len(set(plain)) == 6, "every row is of other weights"
    assert record["gradients"]["uncompiled"] < 0.01 and (record["gradients"]["compiled"] > 0.01) == (factor > 1)
    assert record["commit"] == "abc" and record["n_layer"] == 1
    assert f"{1000 * (with_compiler[1] - plain[1]):+.2f}" in capsys.readouterr().out


def test_biases_come_back():
    model = torch.nn.ModuleDict({"c_proj": torch.nn.Linear(2, 2), "c_fc": torch.nn.Linear(2, 2)})
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt), compiled.without(model, "c_proj.bias"):
        assert not model["c_proj"].bias.any() and model["c_fc"].bias.all() and model["c_proj"].weight.all()
        assert torch.is_grad_enabled(), "or the model would be compiled anew, as another one"
        raise KeyboardInterrupt
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before))


@pytest.mark.parametrize("flags, sentence", [
    (["--batch_size", "0"], "batch_size=0 must be at least 1"), (["--device", "tpu"], "device=tpu is not one of"),
    (["--data", "nowhere"], "no train shards in nowhere"), (["--out", "."], "out=. cannot be written (Is a directory)"),
])  # fmt: skip
def test_a_flag_that_cannot_work_is_one_sentence(tmp_path, flags, sentence):
    done = run_python(ROOT / "bench" / "compiled.py", *SMALL, *flags, cwd=tmp_path)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1

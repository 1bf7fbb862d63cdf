"""Each module can be imported before the others, so there are no import cycles."""

import pytest
from conftest import ROOT, run_code, run_python

MODULES = (
    "lab.config lab.registry lab.trainer.checkpoint lab.eval.validation lab.data.loader "
    "lab.data.manifest lab.data.shards lab.data.sources lab.data.tokenizers lab.data.chat"
).split()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_can_be_imported_alone(module):
    got = run_code(f"import {module}", cwd=ROOT)
    assert (got.returncode, got.stdout, got.stderr) == (0, "", "")


def test_tokenizing_does_not_import_torch():
    """Otherwise each worker process would import it."""
    code = "import sys, lab.data.workers, lab.data.build; assert 'torch' not in sys.modules"
    got = run_python("-c", code, cwd=ROOT)
    assert got.returncode == 0, got.stderr

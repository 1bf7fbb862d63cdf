"""pyproject.toml, the requirements files and uv.lock describe the same project."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILES = {  # requirements file: extra of pyproject.toml
    "requirements.txt": None, "requirements-serve.txt": "serve", "requirements-notebook.txt": "notebook",
    "requirements-browser.txt": "browser", "requirements-test.txt": "dev",
}  # fmt: skip


def pins(file):
    """{name: version} of a requirements file, without the files that it includes."""
    lines = [re.sub(r"#.*", "", line).strip() for line in (ROOT / file).read_text().splitlines()]
    found = [line.split("==") for line in lines if line and not line.startswith("-r")]
    return {canonicalize_name(name): version for name, version in found}


def declared(extra):
    """{name: Requirement} of pyproject.toml's dependencies, or of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    found = map(Requirement, lines)
    return {canonicalize_name(r.name): r for r in found if r.name != project["name"]}


@pytest.mark.parametrize("file", FILES)
def test_pins_are_the_declared_dependencies(file):
    """The same names, and every pinned version satisfies the declared bound."""
    declares, pinned = declared(FILES[file]), pins(file)
    assert pinned.keys() == declares.keys()
    for name, version in pinned.items():
        assert declares[name].specifier.contains(version), (name, version)


def test_lock_file_has_hashes_of_all_dependencies():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    packages = {package["name"]: package for package in lock["package"]}
    for extra in FILES.values():
        assert declared(extra).keys() <= packages.keys()
    for name, package in packages.items():
        files = package.get("wheels", []) + ([package["sdist"]] if "sdist" in package else [])
        assert name == "gpt2-lab" or files and all(f["hash"].startswith("sha256:") for f in files)
    assert lock["requires-python"] == ">=3.11"


def test_every_program_and_package_is_listed():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    tracked = subprocess.run(["git", "ls-files", ":(glob)*.py"], cwd=ROOT, capture_output=True)
    programs = sorted(Path(name).stem for name in tracked.stdout.decode().split())
    assert setup["py-modules"] == programs  # a user's copies beside them do not count
    others = {p.suffix for p in (ROOT / "lab").rglob("*.*") if p.is_file()} - {".py", ".pyc"}
    assert {f"**/*{suffix}" for suffix in others} <= set(setup["package-data"]["lab"])

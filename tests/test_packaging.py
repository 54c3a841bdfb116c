"""What is installed is what is in the folders, and importing it is cheap."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import subprocess
import sys
import tomllib

import pytest

import gmm

pytestmark = pytest.mark.second_interpreter

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Folders that are packages under another name.
MAPPED = {"gmm.reference": ROOT / "reference", "gmm.pallas": ROOT / "pallas"}


def test_package_list_is_the_folders():
  """A folder that is not listed works in the checkout and is missing from the wheel."""
  found = {"gmm", *MAPPED}
  found |= {f"gmm.{p.parent.name}" for p in (ROOT / "gmm").glob("*/__init__.py") if not p.parent.is_symlink()}
  setuptools = PROJECT["tool"]["setuptools"]
  assert set(setuptools["packages"]) == found
  assert setuptools["package-dir"] == {"gmm": "gmm", "gmm.pallas": "pallas", "gmm.reference": "reference"}
  # The mapped folders are flat: a folder inside them would need a name in both lists.
  assert not [p for folder in MAPPED.values() for p in folder.rglob("*/__init__.py")]


def test_links_are_relative_and_committed():
  """They make pyright and a checkout see the mapped packages; an absolute one breaks in every clone."""
  for name, folder in MAPPED.items():
    link = ROOT / "gmm" / name.rpartition(".")[2]
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder.name}"
    assert link.resolve() == folder
  listed = subprocess.run(
    ["git", "ls-files", "-s", "gmm/reference", "gmm/pallas"], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout
  assert [line.split()[0] for line in listed.splitlines()] == ["120000", "120000"]


def test_entry_points_are_the_declared_ones():
  """The installed package is this checkout's, with its four backends and its command."""
  declared = PROJECT["project"]["entry-points"]["gmm.backends"]
  assert {e.name: e.value for e in importlib.metadata.entry_points(group="gmm.backends")} == declared
  assert importlib.metadata.version("gmm") == PROJECT["project"]["version"]


def test_import_is_light():
  """`import gmm` loads none of what only some users need."""
  program = "import json, sys, gmm; print(json.dumps(sorted(sys.modules)))"
  loaded = json.loads(
    subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
  )
  heavy = ("tokamax", "qwix", "flax", "matplotlib", "hypothesis", "rich", "chex", "jax.experimental.pallas")
  assert not [m for m in loaded if m in heavy or m.startswith(tuple(f"{h}." for h in heavy))]


def test_public_names_have_docstrings():
  """Each name of the package says what it is."""
  public = [n for n in dir(gmm) if not n.startswith("_")]
  undocumented = [n for n in public if not getattr(getattr(gmm, n), "__doc__", None)]
  assert not undocumented


def test_files_are_short():
  """One idea per file; a file past 400 lines has two."""
  folders = ("gmm", "reference", "pallas")
  long = {
    str(p.relative_to(ROOT)): lines
    for folder in folders
    for p in (ROOT / folder).rglob("*.py")
    if not p.parent.is_symlink() and (lines := len(p.read_text().splitlines())) > 400
  }
  assert not long

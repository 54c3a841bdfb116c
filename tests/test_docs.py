"""README.md is true: its code runs, its commands exist, its tables list what there is."""

from __future__ import annotations

import pathlib
import re
import shlex
import tomllib

import pytest

import gmm
from gmm import cli

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _table(heading: str) -> list[list[str]]:
  """Cells of the first table under a heading, without its header."""
  section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
  rows = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
  ]
  return rows[2:]


def _names(heading: str) -> list[str]:
  return [row[0].strip("`") for row in _table(heading)]


def test_code_blocks_run(capsys):
  """In order, in one namespace, as a reader pastes them; nothing stays registered."""
  assert len(BLOCKS) == 3
  before = set(gmm.backends())
  namespace: dict = {"__name__": "readme"}
  for i, block in enumerate(BLOCKS):
    exec(compile(block, f"README.md, python block {i + 1}", "exec"), namespace)
  assert set(gmm.backends()) == before
  assert namespace["out"].shape == (2, 8, 32)
  assert namespace["report"].conforms
  assert any(result.ran for result in namespace["report"].results)
  capsys.readouterr()


def test_readme_backend_conforms_where_it_does_not_decline():
  """The example to copy is held to more than the one clause that it shows."""
  namespace: dict = {}
  exec(BLOCKS[0] + BLOCKS[2], namespace)
  for clauses in ("GMM-[14]", "REG-[15]"):
    report = namespace["check_backend"](namespace["mine"], clauses, profile="quick")
    assert report.conforms, report.failures
    assert all(result.status == "passed" for result in report.results), report.results


def test_recipes_are_those_that_exist():
  assert _names("Recipes") == list(gmm.recipe_names())


def test_recipe_table_names_the_code_dtypes():
  """Activations, weights, gradients: "as given" where nothing is quantized, the format's name where it is."""
  for name, *cells in _table("Recipes"):
    recipe = gmm.recipe(name.strip("`"))
    for cell, quant in zip(cells, (recipe.lhs, recipe.rhs, recipe.dout), strict=True):
      if quant is None:
        assert cell == "as given"
      else:
        assert cell.startswith(quant.qtype.removeprefix("float8_"))
        assert ("range" in cell) == (quant.fixed_range is not None)
        assert ("per tensor" in cell or "range" in cell) == quant.one_scale


def test_backends_are_those_of_the_entry_points():
  assert sorted(_names("Backends")) == sorted(PYPROJECT["project"]["entry-points"]["gmm.backends"])


@pytest.mark.parametrize("command", sorted({*re.findall(r"`(gmm [^`]+)`", README)}))
def test_commands_parse(command, capsys):
  """Each `gmm …` in the text is one that the command line takes, down to its options."""
  words = [w for w in shlex.split(command)[1:] if w != "mine"]
  with pytest.raises(SystemExit) as stopped:
    cli.main([*words, "--help"])
  assert stopped.value.code == 0
  shown = capsys.readouterr().out
  for option in (w for w in words if w.startswith("--")):
    assert option in shown, f"{command}: no {option}"


def test_two_commands_are_first_and_alike():
  """The two commands are the README's promise, before any other."""
  first = re.search(r"^```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
  assert first is not None
  lines = [line.split("#")[0].strip() for line in first[1].splitlines()]
  assert lines == ["pip install uv && uv run gmm check", "pip install uv && uv run pytest"]
  assert PYPROJECT["project"]["scripts"]["gmm"] == "gmm.cli:main"


@pytest.mark.parametrize("page", ["README.md", "SPEC.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page):
  """Relative links point at files of the repository."""
  targets = re.findall(r"\]\((?!https?://)([^)#]+)\)", (ROOT / page).read_text())
  missing = [t for t in targets if not (ROOT / t).exists()]
  assert not missing


def test_readme_is_short():
  assert len(README.splitlines()) < 150


def test_changelog_has_what_is_not_released():
  """Keep a Changelog: the first section is Unreleased."""
  sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
  assert sections[0] == "[Unreleased]"


def test_licence_is_the_declared_one():
  text = (ROOT / "LICENSE").read_text()
  assert "Apache License" in text
  assert "Version 2.0, January 2004" in text
  assert PYPROJECT["project"]["license"] == "Apache-2.0"

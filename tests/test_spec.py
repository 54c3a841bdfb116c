"""SPEC.md, the checks and the docstrings name the same clauses."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

import gmm
from gmm.conformance import checks

ROOT = pathlib.Path(__file__).parent.parent
SPEC = (ROOT / "SPEC.md").read_text()
CHAPTERS = ("GMM", "TGMM", "VJP", "QNT", "REG")
HEADING = re.compile(r"^### ([A-Z]+)-(\d+) \S.*$", re.MULTILINE)
CLAUSES = [f"{chapter}-{number}" for chapter, number in HEADING.findall(SPEC)]
# "SPEC GMM-5", "SPEC GMM-1, GMM-5 and GMM-6", "SPEC QNT-2 to QNT-9", "SPEC VJP-1 to 8"
CLAUSE = r"[A-Z]+-\d+"
MENTION = re.compile(rf"SPEC(?:'s)?\s+({CLAUSE}(?:(?:,\s+|\s+and\s+|\s+to\s+)(?:{CLAUSE}|\d+\b))*)")


def _sources() -> list[pathlib.Path]:
  """Every Python file of the package, once: gmm/reference and gmm/pallas are links to folders beside it."""
  files = [f for folder in ("gmm", "reference", "pallas") for f in sorted((ROOT / folder).rglob("*.py"))]
  return list({f.resolve(): f for f in files}.values())


def _docstrings(source: str) -> list[str]:
  nodes = ast.walk(ast.parse(source))
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  return [doc for node in nodes if isinstance(node, kinds) and (doc := ast.get_docstring(node))]


def _mentioned(text: str) -> set[str]:
  """Clause ids that a text refers to; "A-1 to A-3" names all three."""
  found: set[str] = set()
  for phrase in MENTION.findall(text):
    words = re.findall(rf"{CLAUSE}|\d+|to", phrase)
    previous = ""
    for i, word in enumerate(words):
      if word == "to":
        continue
      name = word if "-" in word else f"{previous.partition('-')[0]}-{word}"
      if i and words[i - 1] == "to":
        chapter, _, last = name.partition("-")
        found |= {f"{chapter}-{j}" for j in range(int(previous.partition("-")[2]), int(last) + 1)}
      found.add(name)
      previous = name
  return found


def test_clauses_and_checks_are_the_same_set():
  """A clause without a check is a promise nobody keeps; a check without a clause a rule nobody can read."""
  checked = {c.clause for c in checks()}
  assert not set(CLAUSES) - checked, "clauses of SPEC.md without a check"
  assert not checked - set(CLAUSES), "checks of clauses that SPEC.md does not have"


def test_clauses_are_numbered_in_order():
  """No id twice, no gap, chapters in the order of the checks: reports and SPEC.md read alike."""
  expected = [f"{c}-{i + 1}" for c in CHAPTERS for i in range(sum(x.startswith(f"{c}-") for x in CLAUSES))]
  assert expected == CLAUSES
  # dict.fromkeys: unique, in order of appearance.
  assert list(dict.fromkeys(c.clause for c in checks())) == CLAUSES


def test_every_clause_says_something():
  """Each heading is followed by a rule, not by the next heading."""
  bodies = HEADING.split(SPEC)[3::3]
  assert len(bodies) == len(CLAUSES)
  for clause, body in zip(CLAUSES, bodies, strict=True):
    assert len(body.split("\n## ")[0].split()) >= 15, f"{clause} is empty"


def test_docstrings_mention_existing_clauses():
  """A reader who follows a docstring to SPEC.md finds the clause there."""
  files = _sources()
  unknown = {
    f"{path.relative_to(ROOT)}: {clause}"
    for path in files
    for doc in _docstrings(path.read_text())
    for clause in _mentioned(doc) - set(CLAUSES)
  }
  assert not unknown
  mentioned = {c for path in files for doc in _docstrings(path.read_text()) for c in _mentioned(doc)}
  assert mentioned, "the pattern matches nothing: it no longer fits how docstrings refer to clauses"


def test_every_public_name_names_its_clause():
  """`gmm.gmm.__doc__` and its neighbours lead into SPEC.md."""
  for fn in (gmm.gmm, gmm.tgmm, gmm.ragged_dot, gmm.quantize, gmm.recipe, gmm.calibrate, gmm.register_backend):
    assert _mentioned(fn.__doc__ or ""), f"{fn.__name__} mentions no clause"


@pytest.mark.parametrize(
  ("text", "clauses"),
  [
    ("(SPEC GMM-5)", {"GMM-5"}),
    ("(SPEC GMM-1, GMM-5 and GMM-6)", {"GMM-1", "GMM-5", "GMM-6"}),
    ("(SPEC QNT-2 to QNT-4, REG-1)", {"QNT-2", "QNT-3", "QNT-4", "REG-1"}),
    ("SPEC GMM-7's default; SPEC.md; SPEC appendix A", {"GMM-7"}),
  ],
)
def test_mentions_are_read(text, clauses):
  """The reader of docstrings reads lists and ranges."""
  assert _mentioned(text) == clauses


def test_recipes_of_the_tables_exist():
  """QNT-10 lists the named recipes, all of them, and VJP-2's table has a row for each."""
  bodies = HEADING.split(SPEC)
  of = {f"{c}-{n}": body for c, n, body in zip(bodies[1::3], bodies[2::3], bodies[3::3], strict=True)}
  assert re.findall(r"^\| `(\w+)` \|", of["QNT-10"], re.MULTILINE) == list(gmm.recipe_names())
  rows = [line.split("|")[1] for line in of["VJP-2"].splitlines() if line.startswith("| ")]
  assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(gmm.recipe_names())

"""`gmm check` and the pytest decorator as a third party uses them: a module in a folder of its own."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from gmm import cli, conformance
from gmm.conformance import Case, Violation

MODULE = """
import jax.numpy as jnp
import gmm

reference = gmm.get_backend("reference")


def late_border(lhs, rhs, sizes, **options):
  move = jnp.minimum(sizes[0], 1)
  return reference.gmm(lhs, rhs, sizes.at[0].add(-move).at[1].add(move), **options)


def no_transpose(problem):
  if problem.transpose_rhs and problem.pass_ == "fwd":
    return "It reads rhs as [g, k, n] only; transpose it first."


def make():
  return gmm.Backend(name="kit_good", gmm=reference.gmm, tgmm=reference.tgmm, supports=no_transpose)


faulty = gmm.Backend(name="kit_faulty", gmm=late_border, tgmm=reference.tgmm, supports=no_transpose)
idle = gmm.Backend(name="kit_idle", gmm=reference.gmm, tgmm=reference.tgmm, supports=lambda p: "It is switched off.")
number = 3


def broken():
  raise RuntimeError("no such device")
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
  """A folder with kit_kernels.py, which is the working directory and not yet on sys.path."""
  (tmp_path / "kit_kernels.py").write_text(MODULE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.delitem(sys.modules, "kit_kernels", raising=False)
  yield tmp_path
  sys.modules.pop("kit_kernels", None)


def test_conforming_backend(kernels, capsys):
  """0, and what was declined is named beside what passed; the table is for installed backends only."""
  assert cli.main(["check", "kit_kernels:make", "--clause", "GMM-1*:*[se]_*r*s", "--profile", "quick"]) == cli.CONFORMS
  shown = capsys.readouterr().out
  assert "passed" in shown
  assert "kit_good declines GMM-10 transpose_rhs: It reads rhs as [g, k, n] only" in " ".join(shown.split())
  assert "MoE" not in shown


def test_failing_backend(kernels, capsys):
  """1; the report has rule, smallest case, first element, diagnosis; script and command lead back to the failure."""
  files = kernels / "r.json", kernels / "r.html"
  words = ["check", "kit_kernels:faulty", "--clause", "GMM-1:*", "--profile", "quick"]
  assert cli.main([*words, "--json", str(files[0]), "--html", str(files[1])]) == cli.FAILS
  shown = capsys.readouterr().out
  for part in ("rule", "smallest case", "found", "first element", "wrong group at an edge", "does not conform"):
    assert part in shown
  (result,) = json.loads(files[0].read_text())["conformance"]["results"]
  assert result["status"] == "failed"
  assert result["looks_like"].startswith("wrong group at an edge")
  case = conformance.parse_case(result["case"])
  assert case.m <= 16
  assert case.g <= 3
  assert "<svg" in files[1].read_text()
  # The script as it is pasted.
  assert "kit_kernels:faulty" in result["reproduce"]
  with pytest.raises(Violation, match="out"):
    exec(result["reproduce"], {})
  # The case from the command line: of the fault, and none where there is none.
  again = ["check", "kit_kernels:faulty", "--clause", "GMM-1:*"]
  assert cli.main([*again, "--case", result["case"]]) == cli.FAILS
  assert cli.main([*again, "--case", "Case(m=4, k=2, n=2, group_sizes=(0, 3))"]) == cli.CONFORMS


def test_nothing_ran(kernels, capsys):
  """3: a backend that declines everything has passed nothing."""
  words = ["check", "kit_kernels:idle", "--clause", "GMM-2", "--case", "Case(m=4, k=2, n=2, group_sizes=(0, 3))"]
  assert cli.main(words) == cli.NOTHING_RAN
  assert "It is switched off." in capsys.readouterr().out


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["kit_kernels:fautly"], "has the backends reference, faulty, idle"),
    (["kit_kernels:number"], "is a int, must be a gmm.Backend"),
    (["kit_kernels:broken"], "no such device"),
    (["kit_kernel:faulty"], "No module named 'kit_kernel'"),
    (["kit_kernels:"], "not of the form 'package.module:object'"),
    (["referense"], "Did you mean 'reference'?"),
    (["reference", "--clause", "GMN-1"], "No clause matches 'GMN-1'"),
    (["reference", "--clause", "GMM-1", "--case", "Case(m=4, k=2, n=2, group_sizes=(3, 2))"], "add up to at most m"),
    (["reference", "--clause", "GMM-1", "--case", "Case(m=__import__('os'), k=2)"], "is no case"),
  ],
)
def test_cannot_load(kernels, capsys, words, said):
  """2, with what was received and the way out."""
  assert cli.main(["check", *words]) == cli.CANNOT_LOAD
  assert said in capsys.readouterr().err


def test_arguments_that_contradict(capsys):
  """A case belongs to a check; a file needs its folder."""
  for words in (["--case", "Case(m=1)"], ["--html", "/no/such/folder/x.html"], ["--json", "/no/such/folder/x.json"]):
    with pytest.raises(SystemExit) as stopped:
      cli.main(["check", *words])
    assert stopped.value.code == cli.CANNOT_LOAD
  assert "/no/such/folder" in capsys.readouterr().err


def test_a_bug_of_the_kit_is_not_hidden(monkeypatch):
  """A ValueError that no argument caused is raised with its traceback, not turned into exit code 2."""

  def bug(*args, **kwargs):
    raise ValueError("a bug")

  monkeypatch.setattr(conformance, "check_in_processes", bug)
  with pytest.raises(ValueError, match="a bug"):
    cli.main(["check", "reference", "--clause", "GMM-1"])


def test_parse_case():
  """A repr comes back as the same case; nothing else is taken."""
  case = Case(5, 4, 3, (2, 0), "bfloat16", "real", 7, "fp8_dynamic")
  assert conformance.parse_case(repr(case)) == case
  for text in ("3", "Case(", "Case()", "Kase(m=1)", "Case(m=-1, k=1, n=1, group_sizes=())", f"{case!r}.m"):
    with pytest.raises(ValueError, match="is no case"):
      conformance.parse_case(text)
  for change in ("dtype='int8'", "data='none'", "recipe='fp9'", "group_sizes=[1]", "seed='0'"):
    name = change.split("=")[0]
    with pytest.raises(ValueError, match=name):
      conformance.parse_case(f"Case(m=4, k=1, n=1, {'' if 'group' in change else 'group_sizes=(1,), '}{change})")


TESTS = """
from gmm.conformance import parametrize_with_checks

EXPECTED = {"GMM-1:rows_of_groups": "borders are late, issue 7", "GMM-6:sizes_of_any_dtype": "no longer true"}

@parametrize_with_checks("kit_kernels:faulty", "GMM-1:*", EXPECTED, profile="quick")
def test_expected(check):
  check()

@parametrize_with_checks("kit_kernels:faulty", "GMM-[2]*", profile="quick")
def test_failing(check):
  check()

@parametrize_with_checks("kit_kernels:make", "GMM-10", profile="quick")
def test_declined(check):
  check()

@parametrize_with_checks("kit_kernels:make", "GMM-2", profile="quick")
def test_passing(check):
  check()

@parametrize_with_checks("kit_kernels:make", "GMM-2", {"GMM-2": "no longer true"}, profile="quick")
def test_out_of_date(check):
  check()
"""


def test_decorator_in_another_suite(kernels):
  """Ids are the checks'; passed, failed, skipped with the reason, xfailed; an entry out of date fails."""
  (kernels / "test_theirs.py").write_text(TESTS)
  environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(cli.__file__).parent.parent)}
  run = subprocess.run(
    [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", "test_theirs.py"],
    cwd=kernels,
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  shown = run.stdout
  assert run.returncode == 1, shown + run.stderr
  assert "2 failed, 1 passed, 1 skipped, 1 xfailed" in shown
  assert "XFAIL test_theirs.py::test_expected[GMM-1:rows_of_groups] - borders are late, issue 7" in shown
  assert "FAILED test_theirs.py::test_failing[GMM-2:uncovered_rows]" in shown
  assert "smallest case  Case(" in shown
  assert "declined: It reads rhs as [g, k, n] only" in shown
  assert "FAILED test_theirs.py::test_out_of_date[GMM-2:uncovered_rows] - [XPASS(strict" in shown


def test_guide_is_true(capsys):
  """docs/conformance.md: its commands parse, its links lead somewhere, its statuses are those that exist."""
  page = pathlib.Path(cli.__file__).parent.parent / "docs" / "conformance.md"
  text = page.read_text()
  commands = re.findall(r"^(gmm .*)$", text, re.MULTILINE)
  assert len(commands) == 3
  for command in commands:
    with pytest.raises(SystemExit) as stopped:
      cli.main([*shlex.split(command)[1:], "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in re.findall(r"--\w+", command))
  case = re.search(r'--case "(Case.*?)"', text)
  assert case is not None
  assert conformance.parse_case(case[1]).m == 4
  targets = re.findall(r"\]\((?!https?://)([^)#]+)", text)
  assert targets
  assert all((page.parent / t).exists() for t in targets)
  assert re.findall(r"^\| ([a-z ]+) \|", text, re.MULTILINE)[1:] == [
    "passed",
    "failed",
    "declined",
    "expected failure",
    "unexpected pass",
    "suite error",
  ]

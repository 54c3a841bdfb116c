"""The kit catches faults and leaves correct backends alone: a check that never fails is worth nothing."""

import dataclasses

import pytest

from gmm import conformance
from gmm.conformance import _selftest

mutants = _selftest.load_mutants()


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_a_mutant_is_killed(mutant):
  """Each is one small change to a correct backend; the kit needs no more than its default cases."""
  with mutant.applied() as backend:
    verdict = _selftest._first_failure(backend, mutant.clause, "default", seed=0, explain=False)
  assert verdict.killed_by, f"{mutant.name} survives every check"
  assert "suite error" not in verdict.killed_by, verdict.message


@pytest.mark.slow
@pytest.mark.parametrize("variant", mutants.VARIANTS, ids=lambda b: b.name)
def test_no_false_alarm(variant):
  """Another order of sums and other tiles are no fault."""
  conformance.check_backend(variant)


def test_there_are_mutants_of_every_kind():
  """60 at least, each with a name and a backend of its own, in every family of clauses."""
  assert len(mutants.MUTANTS) >= 60
  assert len({m.name for m in mutants.MUTANTS}) == len(mutants.MUTANTS) == len({m.backend for m in mutants.MUTANTS})
  assert {m.clause.split("-")[0] for m in mutants.MUTANTS} == {"GMM", "TGMM", "VJP", "QNT", "REG"}
  known = {c.clause for c in conformance.checks()}
  assert {m.clause for m in mutants.MUTANTS} <= known


def test_self_test_counts(capsys):
  """A survivor and a false alarm both fail the self-test."""
  import rich.console

  killed = _selftest.Verdict("mutant", "GMM-1", "GMM-1:rows_of_groups")
  passed = _selftest.Verdict("variant", "")
  console = rich.console.Console(width=120)
  assert conformance.print_verdicts((killed, passed), console)
  assert "1 of 1 mutants killed" in capsys.readouterr().out
  assert not conformance.print_verdicts((dataclasses.replace(killed, killed_by=""), passed), console)
  assert not conformance.print_verdicts((killed, dataclasses.replace(passed, killed_by="GMM-1:x")), console)


def test_self_test_runs_in_processes():
  """One mutant by name, through the command's own path."""
  (verdict,) = conformance.self_test(profile="quick", only="clip_mask_forgotten", jobs=1)
  assert verdict.right
  assert verdict.killed_by == "VJP-7:clip_gradient"

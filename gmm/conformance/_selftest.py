"""The kit held to its own purpose: faulty backends are caught, correct ones are left alone."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from gmm.conformance._case import Case
from gmm.conformance._registry import Check
from gmm.conformance._result import Profile, Result
from gmm.conformance._run import checks, run_check


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What became of one mutant or correct variant.

  Attributes:
    name: of the mutant or variant.
    clause: the clause that the mutant was written for; "" of a correct variant.
    killed_by: id of the check that failed, "" when all passed.
    message: what that check found.
    looks_like: the diagnosis, "" where none was asked for or found.
    named: whether the diagnosis has one of the mutant's words.
    small: whether the failing case has at most 3 groups and 16 rows.
    seconds: wall time.
  """

  name: str
  clause: str
  killed_by: str = ""
  message: str = ""
  looks_like: str = ""
  named: bool = False
  small: bool = False
  seconds: float = 0.0

  @property
  def right(self) -> bool:
    """Whether a mutant was killed, or a correct variant was not; a suite error proves nothing."""
    return bool(self.killed_by) == bool(self.clause) and not self.killed_by.endswith("(suite error)")


def self_test(
  *,
  profile: Profile = "default",
  seed: int = 0,
  explain: bool = False,
  only: str = "",
  on_verdict: Callable[[Verdict], None] | None = None,
  jobs: int | None = None,
) -> tuple[Verdict, ...]:
  """Runs the checks on every mutant until one fails, and all checks on every correct variant.

  Args:
    profile, seed: as in `check_backend`.
    explain: also shrink and diagnose each failure, which takes some seconds each.
    only: run only those whose name contains this.
    on_verdict: called with each verdict as it comes.
    jobs: number of processes; None for one per core.

  Returns:
    Verdicts, mutants first; `verdict.right` says whether it is as it must be.

  Raises:
    ImportError: there is no checkout with tests/mutants around this file or the current folder.
    ValueError: `only` matches nothing.
  """
  mutants = load_mutants()
  names = [(kind, x.name) for kind in ("MUTANTS", "VARIANTS") for x in getattr(mutants, kind) if only in x.name]
  if not names:
    raise ValueError(f"No mutant and no variant has {only!r} in its name.")
  context = multiprocessing.get_context("spawn")  # JAX's threads do not survive a fork
  jobs = jobs or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else jobs or os.cpu_count()
  verdicts = {}
  with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
    running = {pool.submit(_judge, kind, name, profile, seed, explain): name for kind, name in names}
    for done in concurrent.futures.as_completed(running):
      verdict = verdicts[running[done]] = done.result()
      if on_verdict is not None:
        on_verdict(verdict)
  return tuple(verdicts[name] for _, name in names)


def load_mutants() -> Any:
  """The package tests/mutants of this checkout."""
  for root in (pathlib.Path(__file__).resolve().parents[2], pathlib.Path.cwd()):
    folder = root / "tests"
    if (folder / "mutants" / "__init__.py").is_file():
      if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
      return importlib.import_module("mutants")
  raise ImportError("The mutants are in tests/mutants of gmm's repository: run the self-test in a checkout of it.")


def _judge(kind: str, name: str, profile: Profile, seed: int, explain: bool) -> Verdict:
  """One mutant or variant, in this process."""
  begun = time.monotonic()
  found = next(x for x in getattr(load_mutants(), kind) if x.name == name)
  if kind == "VARIANTS":
    verdict = _first_failure(found, "", profile, seed, explain)
  else:
    with found.applied() as backend:
      verdict = _first_failure(backend, found.clause, profile, seed, explain)
    said = verdict.looks_like.lower()
    verdict = dataclasses.replace(verdict, named=any(word.lower() in said for word in found.kind))
  jax.clear_caches()  # Linux gives a process 65530 memory maps; each program holds some
  return dataclasses.replace(verdict, seconds=time.monotonic() - begun)


def _first_failure(backend: Any, clause: str, profile: Profile, seed: int, explain: bool) -> Verdict:
  verdict = Verdict(backend.name, clause)
  for check in _likely_first(clause):
    result = run_check(check, backend, profile=profile, seed=seed, explain=explain)
    if result.status in ("failed", "suite error"):
      return dataclasses.replace(
        verdict,
        killed_by=check.id if result.status == "failed" else f"{check.id} (suite error)",
        message=result.message,
        looks_like=result.looks_like,
        small=_is_small(result),
      )
  return verdict


def _likely_first(clause: str) -> list[Check]:
  """All checks of a backend: the clause's own, then those of its family, then the others."""
  family = clause.split("-")[0]
  return sorted(
    (c for c in checks() if c.scope == "backend"), key=lambda c: (c.clause != clause, not c.clause.startswith(family))
  )


def _is_small(result: Result) -> bool:
  """Whether the failing case has at most 3 groups and 16 rows; a fixed case counts as it is."""
  case = result.case
  return not isinstance(case, Case) or not isinstance(result.check.draws, str) or (case.g <= 3 and case.m <= 16)


def print_verdicts(verdicts: tuple[Verdict, ...], console: Any) -> bool:
  """Prints which clause killed which mutant; returns whether every verdict is right."""
  import rich.box
  import rich.table

  mutants, variants = ([v for v in verdicts if bool(v.clause) == faulty] for faulty in (True, False))
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
  for title in ("mutant", "killed by", "found", "looks like"):
    table.add_column(title, overflow="fold")
  for v in mutants:
    table.add_row(v.name, v.killed_by or "[bold red]survived[/]", v.message.split("\n")[0][:90], v.looks_like)
  for v in variants:
    table.add_row(
      v.name, f"[bold red]false alarm[/] {v.killed_by}" if v.killed_by else "", v.message[:90], v.looks_like
    )
  console.print(table)
  killed = [v for v in mutants if v.killed_by]
  console.print(f"{len(killed)} of {len(mutants)} mutants killed, {_share(killed)}", highlight=False)
  alarms = sum(bool(v.killed_by) for v in variants)
  console.print(f"{alarms} false alarms on {len(variants)} correct variants", highlight=False)
  return all(v.right for v in verdicts)


def _share(killed: list[Verdict]) -> str:
  own = sum(v.killed_by.startswith(v.clause + ":") for v in killed)
  said = f"{own} of them by their own clause"
  if any(v.looks_like for v in killed):
    named, small = sum(v.named for v in killed), sum(v.small for v in killed)
    said += f"; {named} named by the diagnosis, {small} with a case of at most 3 groups and 16 rows"
  return said

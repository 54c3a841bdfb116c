"""A report on a terminal and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gmm.conformance._result import Report, Result
from gmm.conformance._run import checks

if TYPE_CHECKING:
  import rich.console
  import rich.table

_STYLE = {"passed": "green", "failed": "bold red", "declined": "yellow", "suite error": "bold magenta"}
_RANK = ("suite error", "failed", "declined", "passed")  # worst first


def print_report(report: Report, console: rich.console.Console) -> None:
  """Prints clause x backend, what was declined and why, and each failure with its smallest case."""
  console.print("[bold]SPEC clauses[/] (with the worst error / bound where there is one; the others are exact)")
  console.print(_clause_table(report))
  for backend in _backends(report):
    for reason, clauses in _declined(report, backend).items():
      console.print(f"[yellow]{backend} declines {', '.join(clauses)}[/]: ", end="")
      console.print(reason, markup=False, highlight=False)
  for result in report.failures:
    print_failure(result, console)
  console.print(summary(report), highlight=False)


def print_failure(result: Result, console: rich.console.Console) -> None:
  """Prints one failure: the rule, the smallest case, what is wrong there."""
  check = result.check
  console.print(
    f"\n[bold red]{check.clause}[/] {result.backend} {result.status} after {result.ran} cases", highlight=False
  )
  for name, text in (
    ("rule", check.rule),
    ("check", check.run.__name__),
    ("smallest case", result.case),
    ("found", result.message),
  ):
    if text is not None:
      console.print(f"  {name:14s} {text}", markup=False, highlight=False)


def summary(report: Report) -> str:
  """One line: how many checks of each status, how long."""
  counts = {s: sum(r.status == s for r in report.results) for s in _RANK}
  said = ", ".join(f"{n} {s}" for s, n in reversed(counts.items()) if n or s == "passed")
  cases = sum(r.ran for r in report.results)
  return f"{said}; {cases} cases in {report.seconds:.0f} s (profile {report.profile}, seed {report.seed})"


def as_json(report: Report) -> dict[str, Any]:
  """The report as plain data."""
  return {
    "conforms": report.conforms,
    "profile": report.profile,
    "seed": report.seed,
    "seconds": report.seconds,
    "results": [
      {
        "clause": r.check.clause,
        "check": r.check.run.__name__,
        "rule": r.check.rule,
        "backend": r.backend,
        "status": r.status,
        "ran": r.ran,
        "declined": r.declined,
        "reasons": list(r.reasons),
        "worst_ratio": r.ratio,
        "case": None if r.case is None else repr(r.case),
        "message": r.message,
        "seconds": r.seconds,
      }
      for r in report.results
    ],
  }


def _backends(report: Report) -> list[str]:
  return list(dict.fromkeys(r.backend for r in report.results))


def _clause_table(report: Report) -> rich.table.Table:
  import rich.box
  import rich.table

  view = rich.table.Table(
    box=rich.box.SIMPLE_HEAD,
    padding=(0, 1, 0, 0),
  )
  backends = [b for b in _backends(report) if b != "(library)"] or ["(library)"]
  view.add_column("clause", no_wrap=True)
  for backend in backends:
    view.add_column(backend, no_wrap=True)
  view.add_column("seconds", justify="right")
  seen = {r.check.clause for r in report.results}
  for clause in dict.fromkeys(c.clause for c in checks() if c.clause in seen):  # in the order of SPEC.md
    rows = [r for r in report.results if r.check.clause == clause]
    # A check of the library itself counts in every column.
    shared = [r for r in rows if r.backend == "(library)"]
    cells = [_cell([*shared, *(r for r in rows if r.backend == b and b != "(library)")]) for b in backends]
    view.add_row(clause, *cells, f"{sum(r.seconds for r in rows):.1f}")
  return view


def _cell(results: Sequence[Result]) -> str:
  """The worst status of a clause's checks; a declined part beside passed ones is said."""
  if not results:
    return "-"
  statuses = {r.status for r in results}
  worst = next(s for s in _RANK if s in statuses)
  ratios = [r.ratio for r in results if r.ratio is not None]
  text = f"[{_STYLE[worst]}]{worst}[/]"
  if worst == "declined" and "passed" in statuses:
    text = "[green]passed[/], [yellow]part declined[/]"
  return f"{text} {max(ratios):.2f}" if ratios else text


def _declined(report: Report, backend: str) -> dict[str, list[str]]:
  """reason -> checks that met it."""
  found: dict[str, list[str]] = {}
  for r in report.results:
    if r.backend == backend:
      for reason in r.reasons:
        share = "" if r.status == "declined" else f" ({r.declined} of {r.declined + r.ran} cases)"
        found.setdefault(reason, []).append(f"{r.check.clause} {r.check.run.__name__}{share}")
  return found

"""A report on a terminal and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gmm.conformance._evidence import Evidence
from gmm.conformance._reproduce import command, script
from gmm.conformance._result import Report, Result
from gmm.conformance._run import checks

if TYPE_CHECKING:
  import rich.console
  import rich.table

_NONE: Mapping[str, str] = MappingProxyType({})
_STYLE = {
  "suite error": "bold magenta",
  "failed": "bold red",
  "unexpected pass": "bold red",
  "expected failure": "cyan",
  "declined": "yellow",
  "passed": "green",
}
RANK = tuple(_STYLE)  # worst first


def print_report(report: Report, console: rich.console.Console, found_by: Mapping[str, str] = _NONE) -> None:
  """Prints clause x backend, what was declined and why, and each failure with its smallest case.

  Args:
    report, console: what is printed, and where.
    found_by: name of a backend -> what `load_backend` finds it by, where that is not its name.
  """
  console.print("[bold]SPEC clauses[/] (with the worst error / bound where there is one; the others are exact)")
  console.print(_clause_table(report))
  for backend in backend_names(report):
    for reason, clauses in declined(report, backend).items():
      console.print(f"[yellow]{backend} declines {', '.join(clauses)}[/]: ", end="")
      console.print(reason, markup=False, highlight=False)
  for result in report.results:
    if result.status == "expected failure":
      console.print(f"[cyan]{result.backend} {result.check.id} fails as expected[/]: ", end="")
      console.print(result.expected, markup=False, highlight=False)
  for result in report.failures:
    print_failure(result, console, found_by.get(result.backend))
  console.print(summary(report), highlight=False)


def print_failure(result: Result, console: rich.console.Console, backend: str | None = None) -> None:
  """Prints one failure: the rule, the smallest case, what is wrong there, how to run it again."""
  check = result.check
  console.print(
    f"\n[bold red]{check.clause}[/] {result.backend} {result.status} after {result.ran} cases", highlight=False
  )
  for name, text in failure_lines(result):
    console.print(f"  {name:14s} {text}", markup=False, highlight=False)
  if result.status == "suite error":
    console.print("  An error of the kit itself, not of the backend:", highlight=False)
    console.print(result.traceback, markup=False, highlight=False)
  if result.case is not None and result.status != "unexpected pass":
    console.print("  to run it again", highlight=False)
    for line in script(result, backend).splitlines():
      console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)
    if command(result, backend):
      console.print(f"  or  {command(result, backend)}", markup=False, highlight=False, soft_wrap=True)


def failure_lines(result: Result) -> list[tuple[str, str]]:
  """(title, text) of what is known of a failure; empty texts are left out."""
  lines = [
    ("rule", result.check.rule),
    ("check", result.check.run.__name__),
    ("smallest case", "" if result.case is None else repr(result.case)),
    ("found", result.message),
    ("first element", "" if result.evidence is None else first_element(result.evidence, result.tile)),
    ("looks like", result.looks_like),
    ("expected", result.expected and f"to fail: {result.expected}"),
  ]
  return [(title, text) for title, text in lines if text]


def first_element(evidence: Evidence, tile: tuple[int, int] | None) -> str:
  """The first bad element: where it lies, what came, what must come, how far apart the two may be."""
  at = evidence.first_bad
  if at is None:
    return ""
  group = evidence.group_of(at)
  where = f"{evidence.what.split()[0].rstrip(',')}[{', '.join(map(str, at))}]"
  if group is not None:
    where += f" of group {group}" if group >= 0 else " of no group"
  if tile is not None:
    where += f" in tile {at[-2] // tile[0]}, {at[-1] // tile[1]} of {tile[0]}x{tile[1]}"
  allowed = "exactly" if evidence.bound is None else f"within {evidence.bound[at]:.3g}"
  return f"{where}: got {evidence.got[at]:.9g}, expected {evidence.expected[at]:.9g} {allowed}"


def summary(report: Report) -> str:
  """One line: how many checks of each status, how long."""
  counts = {s: sum(r.status == s for r in report.results) for s in RANK}
  said = ", ".join(f"{n} {s}" for s, n in reversed(counts.items()) if n or s == "passed")
  cases = sum(r.ran for r in report.results)
  return f"{said}; {cases} cases in {report.seconds:.0f} s (profile {report.profile}, seed {report.seed})"


def as_json(report: Report, found_by: Mapping[str, str] = _NONE) -> dict[str, Any]:
  """The report as plain data; `found_by` as in `print_report`."""
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
        "looks_like": r.looks_like,
        "first_element": None if r.evidence is None else first_element(r.evidence, r.tile),
        "expected": r.expected,
        "reproduce": None if r.case is None else script(r, found_by.get(r.backend)),
        "seconds": r.seconds,
      }
      for r in report.results
    ],
  }


def backend_names(report: Report) -> list[str]:
  """Names in the order of the report."""
  return list(dict.fromkeys(r.backend for r in report.results))


def _clause_table(report: Report) -> rich.table.Table:
  import rich.box
  import rich.table

  view = rich.table.Table(
    box=rich.box.SIMPLE_HEAD,
    padding=(0, 1, 0, 0),
  )
  backends = [b for b in backend_names(report) if b != "(library)"] or ["(library)"]
  view.add_column("clause", no_wrap=True)
  for backend in backends:
    view.add_column(backend, no_wrap=True)
  view.add_column("seconds", justify="right")
  seen = {r.check.clause for r in report.results}
  in_spec = dict.fromkeys(c.clause for c in checks() if c.clause in seen)  # in the order of SPEC.md
  for clause in (*in_spec, *sorted(seen - set(in_spec))):
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
  worst = next(s for s in RANK if s in statuses)
  ratios = [r.ratio for r in results if r.ratio is not None]
  text = f"[{_STYLE[worst]}]{worst}[/]"
  if worst == "declined" and "passed" in statuses:
    text = "[green]passed[/], [yellow]part declined[/]"
  return f"{text} {max(ratios):.2f}" if ratios else text


def declined(report: Report, backend: str) -> dict[str, list[str]]:
  """Reason -> checks that met it."""
  found: dict[str, list[str]] = {}
  for r in report.results:
    if r.backend == backend:
      for reason in r.reasons:
        share = "" if r.status == "declined" else f" ({r.declined} of {r.declined + r.ran} cases)"
        found.setdefault(reason, []).append(f"{r.check.clause} {r.check.run.__name__}{share}")
  return found

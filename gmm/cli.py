"""The command `gmm`."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

CONFORMS, FAILS, CANNOT_LOAD, NOTHING_RAN = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
  """Runs `gmm check`, `gmm table`, `gmm bench` or `gmm backends`.

  Args:
    argv: the command line after `gmm`; None for the process's own.

  Returns:
    0 when all that ran conforms, 1 when something fails, 2 when a backend, recipe or argument
    is unknown or cannot be loaded, 3 when nothing ran. An error of the kit itself is raised.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  if argv and argv[0] == "table":
    from gmm import table

    return table.main(argv[1:])
  if argv and argv[0] == "bench":
    from gmm import bench

    return bench.main(argv[1:])
  parser = _parser()
  options = parser.parse_args(argv)
  if options.command == "backends":
    return _list_backends()
  for name in ("json", "html"):
    path = getattr(options, name)
    if path is not None and not path.parent.is_dir():
      parser.error(f"--{name} {path}: the folder {path.parent} does not exist.")
  if options.self_test:
    return _self_test(options)
  if options.case is not None and options.clause == "*":
    parser.error("--case needs --clause as well: which check shall run on that case?")
  return _check(options)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog="gmm", description="Grouped matrix multiplication, held to one specification.")
  commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
  check = commands.add_parser(
    "check",
    help="hold backends to SPEC.md, then compute the published MoE table",
    epilog="Exit codes: 0 conforms, 1 does not, 2 a backend or an argument cannot be loaded, 3 nothing ran.",
  )
  check.add_argument(
    "backend",
    nargs="*",
    metavar="BACKEND",
    help="names, or package.module:object for a gmm.Backend of yours (default: every backend that loads)",
  )
  check.add_argument("--clause", default="*", metavar="GLOB", help="only clauses or checks that match: 'VJP-*'")
  check.add_argument("--profile", choices=("quick", "default", "thorough"), default="default", help="how many cases")
  check.add_argument("--seed", type=int, default=0, help="another seed draws other cases")
  check.add_argument("--case", metavar="CASE", help="only this case, as a report prints it: 'Case(m=4, …)'")
  check.add_argument(
    "--sanitize",
    action="store_true",
    help="run Pallas kernels in JAX's simulation of a TPU: uninitialized memory, bad reads, races; nothing else",
  )
  check.add_argument(
    "--self-test", action="store_true", help="check the checks: faulty backends must be caught (needs the repository)"
  )
  check.add_argument("--explain", action="store_true", help="with --self-test: shrink and diagnose each failure too")
  check.add_argument("--jobs", type=int, default=None, help="processes (default: one per core)")
  check.add_argument("--no-table", action="store_true", help="leave the MoE table out")
  check.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write everything as JSON")
  check.add_argument("--html", type=pathlib.Path, metavar="FILE", help="also write one page with a picture per failure")
  commands.add_parser("table", help="the published MoE table (gmm table --help)")
  commands.add_parser("bench", help="benchmarks (gmm bench --help)")
  commands.add_parser("backends", help="list the backends and whether they load")
  return parser


def _list_backends() -> int:
  import gmm

  for name, problem in gmm.backends().items():
    print(f"{name:14s} {'ok' if problem is None else problem}")
  return CONFORMS


def _check(options: argparse.Namespace) -> int:
  import rich.console

  import gmm
  from gmm import conformance

  console = rich.console.Console()
  if not console.is_terminal:
    console.width = 120  # rather than rich's 80 for a file or a pipe
  listed = gmm.backends()
  names = options.backend or [name for name, problem in listed.items() if problem is None]
  # 1. Whatever is unknown or broken in the arguments is said before anything runs.
  try:
    for name in names:
      conformance.load_backend(name)
    conformance.select(options.clause, options.profile)
    case = None if options.case is None else conformance.parse_case(options.case)
  except (ValueError, ImportError) as error:
    _print_cannot_load(error)
    return CANNOT_LOAD
  if not options.backend:
    for problem in listed.values():
      if problem is not None:
        console.print(f"[yellow]left out[/] {problem}", highlight=False)
  # 2. The clauses.
  if options.sanitize:
    report = _sanitize(names, options)
  else:
    report = _run_checks(names, options, console) if case is None else _run_one_case(names, options, case)
  found_by = dict(zip((conformance.load_backend(n).name for n in names), names, strict=True))
  conformance.print_report(report, console, found_by)
  found: dict[str, Any] = {"conformance": conformance.as_json(report, found_by)}
  holds = report.conforms
  # 3. The MoE table, of installed backends: it says how accurate a whole layer is, not whether a kernel conforms.
  is_whole = options.clause == "*" and not options.sanitize
  if is_whole and not options.no_table and not any(":" in name for name in names):
    table_holds, found["tables"] = _run_tables(names, console)
    holds = holds and table_holds
  if options.json is not None:
    options.json.write_text(json.dumps(found, indent=2) + "\n")
  if options.html is not None:
    conformance.write_html(report, options.html, found_by)
    console.print(f"written: {options.html}", highlight=False)
  if not any(r.ran for r in report.results):
    console.print("[bold yellow]nothing ran[/]: every case was declined")
    return NOTHING_RAN
  console.print("[bold green]conforms[/]" if holds else "[bold red]does not conform[/]")
  return CONFORMS if holds else FAILS


def _self_test(options: argparse.Namespace) -> int:
  """The mutants and the correct variants of the repository; names on the command line select some."""
  import rich.console

  from gmm import conformance

  console = rich.console.Console()
  if not console.is_terminal:
    console.width = 120
  try:
    with _progress(console) as bar:
      task = bar.add_task("mutants", total=None)
      verdicts = conformance.self_test(
        profile=options.profile,
        seed=options.seed,
        explain=options.explain,
        only=options.backend[0] if options.backend else "",
        on_verdict=lambda v: bar.update(task, advance=1, description=v.name),
        jobs=options.jobs,
      )
  except (ValueError, ImportError) as error:
    _print_cannot_load(error)
    return CANNOT_LOAD
  return CONFORMS if conformance.print_verdicts(verdicts, console) else FAILS


def _print_cannot_load(error: Exception) -> None:
  """The sentence, below the traceback of what it was raised from: a third party's module, for example."""
  if error.__cause__ is not None:
    traceback.print_exception(error.__cause__)
  print(f"gmm check: {error}", file=sys.stderr)


def _sanitize(names, options):
  """The sanitizers on each backend, in this process: the simulation has one state."""
  from gmm import conformance

  begun = time.monotonic()
  results = [r for name in names for r in conformance.sanitize(conformance.load_backend(name))]
  return conformance.Report(tuple(results), options.profile, options.seed, time.monotonic() - begun)


def _run_one_case(names, options, case):
  """The checks that --clause names on the one case, in this process."""
  from gmm import conformance

  begun = time.monotonic()
  results = [
    conformance.run_check(check, conformance.load_backend(name), profile=options.profile, case=case)
    for name in names
    for check in conformance.checks(options.clause)
    if check.scope == "backend"
  ]
  return conformance.Report(tuple(results), options.profile, options.seed, time.monotonic() - begun)


def _run_checks(names, options, console):
  from gmm import conformance

  total = sum(c.scope == "library" for c in conformance.checks(options.clause))
  total += len(names) * sum(c.scope == "backend" for c in conformance.checks(options.clause))
  with _progress(console) as bar:
    task = bar.add_task("checking", total=total)

    def on_result(result: conformance.Result) -> None:
      bar.update(task, advance=1, description=f"{result.backend} {result.check.clause}")
      if result.status not in ("passed", "declined"):
        bar.console.print(f"[bold red]{result.status}[/] {result.backend} {result.check.id}", highlight=False)

    return conformance.check_in_processes(
      names, options.clause, profile=options.profile, seed=options.seed, on_result=on_result, jobs=options.jobs
    )


def _run_tables(names, console):
  """The MoE table: `small` for compiled backends, `tiny` for interpreted ones beside the reference."""
  import concurrent.futures
  import multiprocessing

  import gmm
  from gmm import table

  interpreted = [n for n in names if gmm.get_backend(n).interpreted()]
  compiled = [n for n in names if n not in interpreted]
  runs = [("small", compiled)] if compiled else []
  if interpreted:
    runs.append(("tiny", list(dict.fromkeys(["reference", *interpreted]))))
  holds, found = True, []
  # Each table compiles on one core; processes of their own, as JAX's threads do not survive a fork.
  spawn = multiprocessing.get_context("spawn")
  with _progress(console) as bar, concurrent.futures.ProcessPoolExecutor(len(runs), spawn) as pool:
    task = bar.add_task(f"MoE tables: {', '.join(config for config, _ in runs)}", total=len(runs))
    for computed in pool.map(table.compute, [table.CONFIGS[c] for c, _ in runs], [b for _, b in runs]):
      bar.update(task, advance=1)
      judged = table.criteria(computed)
      table.print_table(computed, judged, bar.console)
      holds = holds and all(c.ok for c in judged)
      found.append(table.as_json(computed, judged))
  return holds, found


def _progress(console):
  import rich.progress

  columns = (*rich.progress.Progress.get_default_columns(), rich.progress.TimeElapsedColumn())
  return rich.progress.Progress(*columns, console=console, transient=True)

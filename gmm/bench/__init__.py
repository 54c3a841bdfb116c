"""Benchmarks: `gmm bench cpu`, in ratios of interleaved runs."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence

from gmm.bench._cpu import distributions, run_cpu
from gmm.bench._figures import Figure, table

__all__ = ["Figure", "distributions", "main", "run_cpu", "table"]


def main(args: Sequence[str]) -> int:
  """Runs `gmm bench`.

  Args:
    args: command line after `gmm bench`.

  Returns:
    Exit code: 0 when every figure keeps its target, 1 otherwise.
  """
  parser = argparse.ArgumentParser(prog="gmm bench", description="Time the backends, in ratios of interleaved runs.")
  benches = parser.add_subparsers(dest="bench", required=True)
  cpu = benches.add_parser("cpu", help="the reference against jax.lax.ragged_dot and a dense matmul, on this CPU")
  cpu.add_argument("--quick", action="store_true", help="small shapes without targets, in seconds")
  cpu.add_argument("--rounds", type=int, default=9, help="samples of each function (default 9)")
  cpu.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures there too")
  options = parser.parse_args(args)
  if options.rounds < 1:
    parser.error(f"--rounds must be at least 1, got {options.rounds}.")

  import jax
  import rich.console

  console = rich.console.Console()
  with jax.default_device(jax.devices("cpu")[0]), console.status("compiling") as status:
    figures = run_cpu(quick=options.quick, rounds=options.rounds, progress=status.update)
  console.print(table(figures, f"gmm bench cpu, float32, medians of up to {options.rounds} interleaved rounds"))
  if options.json is not None:
    options.json.write_text(json.dumps([f.as_dict() for f in figures], indent=2) + "\n")
  missed = [f for f in figures if f.met is False]
  if missed:
    console.print(f"{len(missed)} of {len(figures)} figures miss their target.")
  return 1 if missed else 0

"""The command `gmm table`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

import gmm
from gmm.table._config import CONFIGS, NUMERICS, SCHEMES, Numerics, TableConfig
from gmm.table._criteria import criteria
from gmm.table._measure import Table, compute
from gmm.table._report import as_json, print_table

if TYPE_CHECKING:
  import rich.console


def main(args: Sequence[str]) -> int:
  """Runs `gmm table`.

  Args:
    args: the command line after `gmm table`.

  Returns:
    0 when every criterion that could be judged holds, 1 when one fails, 2 for a backend or
    recipe that is unknown or cannot be loaded, 3 when nothing ran (every row was declined).
  """
  import rich.console

  options = _parser().parse_args(list(args))
  config = CONFIGS[options.config]
  console = rich.console.Console()
  if not console.is_terminal:
    console.width = 100  # rather than rich's 80 for a file or a pipe
  try:
    table = _compute(config, options, console)
  except (ValueError, ImportError) as error:
    print(f"gmm table: {error}", file=sys.stderr)
    return 2
  judged = criteria(table)
  print_table(table, judged, console)
  if options.json is not None:
    options.json.write_text(json.dumps(as_json(table, judged), indent=2) + "\n")
  if all(row.declined is not None for row in table.rows):
    return 3
  return 0 if all(c.ok for c in judged) else 1


def default_backends(config: TableConfig) -> list[str]:
  """Returns the backends that `gmm table` runs when none is named.

  Args:
    config: the published size is too much for an interpreted kernel, and XLA's ragged_dot on CPU
      multiplies every row with every expert, so that on CPU only the reference runs it.
  """
  if config.is_published_size and jax.default_backend() == "cpu":
    return ["reference"]
  usable = [name for name, problem in gmm.backends().items() if problem is None]
  return sorted(usable, key=lambda name: (name != "reference", name))  # what the others are compared with, first


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="gmm table",
    description="A quantized MoE layer against its dense bfloat16 counterpart, beside the published figures.",
  )
  parser.add_argument("--config", choices=list(CONFIGS), default="small", help="size of the layer (default: small)")
  parser.add_argument("--backend", nargs="+", metavar="NAME", help="backends to run (default: all usable)")
  parser.add_argument("--recipe", nargs="+", metavar="NAME", default=list(SCHEMES), help="recipes to run")
  parser.add_argument(
    "--numerics",
    choices=list(NUMERICS),
    default="ours",
    help="'published' has qwix's cutoff of tiny scales and a bfloat16 softmax in the router, as the published run",
  )
  parser.add_argument("--tiny-scale", choices=("clamp", "qwix"), help="what becomes of tiny scales, alone")
  parser.add_argument(
    "--recipe-bits", action="store_true", help="scales in the operand's dtype: the named recipe's own bits"
  )
  parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write everything as JSON")
  return parser


def _numerics(options: argparse.Namespace) -> Numerics:
  """The named choice, with what the command line changes of it."""
  base = NUMERICS[options.numerics]
  chosen = dataclasses.replace(
    base,
    tiny_scale=options.tiny_scale or base.tiny_scale,
    scale_dtype=None if options.recipe_bits else base.scale_dtype,
  )
  return chosen if chosen == base else dataclasses.replace(chosen, name="custom")


def _compute(config: TableConfig, options: argparse.Namespace, console: rich.console.Console) -> Table:
  import rich.progress

  backends = options.backend or default_backends(config)
  with rich.progress.Progress(
    *rich.progress.Progress.get_default_columns(),
    rich.progress.TimeElapsedColumn(),
    console=console,
    transient=True,
  ) as bar:
    task = bar.add_task("starting", total=1 + len(backends) * len(options.recipe))
    done = -1

    def progress(step: str) -> None:
      nonlocal done
      done += 1
      bar.update(task, completed=done, description=step)

    return compute(
      config,
      backends,
      options.recipe,
      seed=options.seed,
      numerics=_numerics(options),
      progress=progress,
    )

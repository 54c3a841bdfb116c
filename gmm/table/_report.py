"""The table on a terminal and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from gmm.table._criteria import Criterion
from gmm.table._measure import Row, Table
from gmm.table._published import METRICS, QUANTITIES, published

if TYPE_CHECKING:
  import rich.console
  import rich.table

_FORMATS = {"relative_norm_diff": "{:.6f}", "max_abs_diff": "{:.2e}"}


def print_table(table: Table, judged: Sequence[Criterion], console: rich.console.Console) -> None:
  """Prints both metrics, the criteria and what the run cost; fits 100 columns.

  Args:
    table: from `compute`.
    judged: from `criteria`.
    console: where to.
  """
  config, numerics = table.config, table.numerics
  console.print(
    f"[bold]MoE layer {config.name}[/]: {config.embed} x {config.mlp}, 8 experts, top-2, {config.tokens} tokens, "
    f"seed {table.seed}\n"
    f"against the dense bfloat16 layer; fixed range of fp8_static 224, weights {config.weight_range:.1f}\n"
    f"numerics {numerics.name!r}: tiny_scale {numerics.tiny_scale}, softmax {numerics.softmax_dtype}, "
    f"scales {numerics.scale_dtype or 'in the dtype of the operand'}",
    highlight=False,
  )
  for metric in METRICS:
    # At another size max_abs_diff has another scale: no published figure stands beside it.
    with_published = metric == "relative_norm_diff" or config.is_published_size
    console.print(_metric_table(table.rows, metric, with_published))
  if any(row.interpreted for row in table.rows):
    console.print("* interpreted on this machine")
  for row in table.rows:
    if row.declined is not None:
      console.print(f"{row.backend} declined {row.scheme}: {row.declined}", markup=False)
  console.print(_criteria_table(judged))
  for c in judged:
    if not c.ok:
      console.print(f"FAIL: {c.backend}, {c.text}: {c.cell} {_number(c.figure, c.unit)}", style="red", markup=False)
  console.print(f"{table.seconds:.0f} s, peak memory {table.peak_rss / 2**30:.1f} GiB")


def _look() -> dict[str, Any]:
  import rich.box

  return {"box": rich.box.SIMPLE_HEAD, "title_justify": "left", "title_style": "bold", "padding": (0, 1, 0, 0)}


def _metric_table(rows: Sequence[Row], metric: str, with_published: bool) -> rich.table.Table:
  import rich.table

  view = rich.table.Table(title=metric, **_look())
  view.add_column("recipe and backend", no_wrap=True)
  for quantity in QUANTITIES:
    view.add_column(quantity, justify="right", no_wrap=True)
  show = _FORMATS[metric].format
  for scheme in dict.fromkeys(row.scheme for row in rows):
    view.add_row(f"[bold]{scheme}[/]")
    for row in (r for r in rows if r.scheme == scheme):
      name = f"  {row.backend}{'*' if row.interpreted else ''}"
      if row.declined is not None:
        view.add_row(name, "declined")
        continue
      view.add_row(name, *(show(row.figures[metric][q]) for q in QUANTITIES))
      beside = [published(row.backend, scheme, metric, q) for q in QUANTITIES]
      if with_published and all(beside):
        view.add_row("    published", *(show(p.value) for p in beside if p), style="dim")
  return view


def _criteria_table(judged: Sequence[Criterion]) -> rich.table.Table:
  """One line per statement, one column per backend: the figure of its worst cell."""
  import rich.table

  view = rich.table.Table(title="criteria", **_look())
  view.add_column("worst cell of")
  view.add_column("at most", justify="right", no_wrap=True)
  backends = list(dict.fromkeys(c.backend for c in judged))
  for backend in backends:
    view.add_column(backend, justify="right", no_wrap=True)
  by_text: dict[str, dict[str, Criterion]] = {}
  for c in judged:
    by_text.setdefault(c.text, {})[c.backend] = c
  for text, by_backend in by_text.items():
    first = next(iter(by_backend.values()))
    cells = [_verdict(by_backend.get(backend)) for backend in backends]
    view.add_row(text, _number(first.limit, first.unit), *cells)
  return view


def _verdict(c: Criterion | None) -> str:
  if c is None:
    return ""
  return f"{_number(c.figure, c.unit)} " + ("[green]ok[/]" if c.ok else "[red bold]FAIL[/]")


def _number(value: float, unit: str) -> str:
  return {"%": f"{value:.2%}", "x": f"{value:.3f} x", "": f"{value:.4f}"}[unit]


def as_json(table: Table, judged: Sequence[Criterion]) -> dict[str, Any]:
  """Returns the run as plain data: settings, rows with the published figures, criteria, cost.

  Args:
    table: from `compute`.
    judged: from `criteria`.
  """
  return {
    "config": dataclasses.asdict(table.config),
    "weight_range": table.config.weight_range,
    "seed": table.seed,
    "numerics": dataclasses.asdict(table.numerics),
    "jax": jax.__version__,
    "platform": jax.default_backend(),
    "rows": [{**dataclasses.asdict(row), "published": _published_figures(row)} for row in table.rows],
    "criteria": [{**dataclasses.asdict(c), "ok": c.ok} for c in judged],
    "seconds": table.seconds,
    "peak_rss": table.peak_rss,
  }


def _published_figures(row: Row) -> dict[str, dict[str, float]]:
  """metric -> quantity -> figure, at the published size; empty for a recipe that was not published."""
  found = {m: {q: published(row.backend, row.scheme, m, q) for q in QUANTITIES} for m in METRICS}
  return {m: {q: p.value for q, p in by_quantity.items() if p is not None} for m, by_quantity in found.items()}

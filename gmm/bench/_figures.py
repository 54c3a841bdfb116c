"""A measured figure with its target, and how a list of them is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """One measured figure.

  Attributes:
    part: heading that it is shown under.
    name: what was measured.
    value: the figure.
    unit: "x" for a ratio, "MiB", "ms".
    target: bound that the figure must keep, or None when it is only shown.
    sense: whether the target is the least or the most that is allowed.
  """

  part: str
  name: str
  value: float
  unit: str
  target: float | None = None
  sense: Literal["at least", "at most"] = "at most"

  @property
  def met(self) -> bool | None:
    """Whether the target is kept; None without one. NaN keeps none."""
    if self.target is None:
      return None
    return bool(self.value >= self.target if self.sense == "at least" else self.value <= self.target)

  def as_dict(self) -> dict[str, Any]:
    return {**dataclasses.asdict(self), "met": self.met}


def table(figures: Sequence[Figure], title: str) -> Any:
  """A `rich.table.Table` with one row per figure, grouped by part."""
  import rich.table

  shown = rich.table.Table(title=title)
  shown.add_column()
  shown.add_column("measured", justify="right")
  shown.add_column("target", justify="right")
  shown.add_column()
  part = None
  for figure in figures:
    if figure.part != part:
      part = figure.part
      shown.add_section()
      shown.add_row(f"[bold]{part}[/bold]", "", "", "")
    target = "" if figure.target is None else f"{figure.sense} {_number(figure.target)} {figure.unit}"
    verdict = {None: "", True: "[green]met[/green]", False: "[red]missed[/red]"}[figure.met]
    shown.add_row(f"  {figure.name}", f"{_number(figure.value)} {figure.unit}", target, verdict)
  return shown


def _number(value: float) -> str:
  return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"

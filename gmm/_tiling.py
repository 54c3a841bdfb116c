"""Tile sizes per pass (SPEC REG-7)."""

from __future__ import annotations

import dataclasses
from typing import Any

from gmm._protocol import Tile

_FORM = (
  "tiling is None, three positive ints (tile_m, tile_k, tile_n) for every pass, nine (fwd, then dlhs, then drhs), "
  "or gmm.Tiling(fwd=…, dlhs=…, drhs=…)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """Tiles of each pass; None leaves a pass to the backend.

  A tile is (tile_m, tile_k, tile_n) of that pass as its kernel sees it: rows, contracting
  size and output size in "fwd" and "dlhs" (which contracts over n), rows and the two output
  sizes k and n in "drhs".
  """

  fwd: Tile | None = None
  dlhs: Tile | None = None
  drhs: Tile | None = None

  def __post_init__(self):
    for pass_ in ("fwd", "dlhs", "drhs"):
      tile = getattr(self, pass_)
      if tile is not None:
        object.__setattr__(self, pass_, _tile(tile, f"Tiling.{pass_}"))


def as_tiling(tiling: Any) -> Tiling:
  """Normalises the `tiling` argument of the op.

  Raises:
    ValueError: any other form; the message states the accepted ones.
  """
  if tiling is None:
    return Tiling()
  if isinstance(tiling, Tiling):
    return tiling
  if isinstance(tiling, (tuple, list)):
    if len(tiling) == 3:
      return Tiling(fwd=_tile(tiling), dlhs=_tile(tiling), drhs=_tile(tiling))
    if len(tiling) == 9:
      return Tiling(fwd=_tile(tiling[:3]), dlhs=_tile(tiling[3:6]), drhs=_tile(tiling[6:]))
  raise ValueError(f"{_FORM}; got {tiling!r}.")


def _tile(tile: Any, name: str = "tiling") -> Tile:
  ok = isinstance(tile, (tuple, list)) and len(tile) == 3
  if not ok or not all(isinstance(t, int) and not isinstance(t, bool) and t > 0 for t in tile):
    raise ValueError(f"{_FORM}; {name} got {tile!r}.")
  return (tile[0], tile[1], tile[2])

"""Which rows a grid step works on: runs of rows that lie in one row tile and in one group."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segments(starts: jax.Array, ends: jax.Array, rows: int, tile_m: int) -> jax.Array:
  """Cuts the rows at every tile and every group border.

  Args:
    starts, ends: int32 [g], the rows [starts[j], ends[j]) of group j; consecutive, within `rows`.
    rows: a multiple of tile_m.
    tile_m: rows of a tile.

  Returns:
    int32 [4, rows / tile_m + g + 1]: for each segment, in order, its row tile, its group (-1 before
    the first group, g after the last), its first row and the row after its last. Every row is in exactly
    one segment, every tile in at least one that is not empty, and every group has at least one,
    empty where it has no rows.
  """
  tiles, g = rows // tile_m, starts.shape[0]
  # 1. The cuts: the first row of every tile and of every group, and the end of the last group.
  cuts = jnp.concatenate([jnp.arange(tiles, dtype=jnp.int32) * tile_m, starts, ends[-1:]])
  of_group = jnp.arange(tiles + g + 1, dtype=jnp.int32) >= tiles
  # 2. In order. A segment reaches from one cut to the next; row 0 is a cut, so no row is left out.
  order = jnp.argsort(cuts, stable=True)
  first = cuts[order]
  last = jnp.concatenate([first[1:], jnp.full((1,), rows, jnp.int32)])
  # 3. As many group cuts as have passed say which group it is. Where several cuts coincide, all
  #    segments between them are empty, and each group that starts there gets one.
  group = jnp.cumsum(of_group[order], dtype=jnp.int32) - 1
  # 4. A cut at the very end is in no tile: it stays with the last one, and is empty.
  tile = jnp.minimum(first // tile_m, tiles - 1)
  return jnp.stack([tile, group, first, last])

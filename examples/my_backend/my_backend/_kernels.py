"""The two Pallas kernels: float32 or bfloat16 in, float32 out, every size a multiple of its tile.

Both walk over the segments of `_segments`, whose table is prefetched into scalar memory, where the
index maps read which block a grid step needs. Consecutive steps with the same output block
keep it in fast memory, so a block is complete when the grid leaves it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_TILE, _GROUP, _FIRST, _LAST = range(4)


def gmm(
  lhs: jax.Array,
  rhs: jax.Array,
  table: jax.Array,
  *,
  tile: tuple[int, int, int],
  transpose_rhs: bool,
  precision: Any,
  interpret: bool,
) -> jax.Array:
  """lhs [m, k] times each row's own weights; zero for rows of no group.

  Args:
    lhs: [m, k].
    rhs: [g, k, n], or [g, n, k] with transpose_rhs.
    table: from `segments`.
    tile: (tile_m, tile_k, tile_n), each divides its dimension.
    precision: of the dot.
    interpret: run in one of Pallas's interpreters.

  Returns:
    float32 [m, n].
  """
  (m, k), g, n = lhs.shape, rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
  tile_m, tile_k, tile_n = tile
  # 1. k innermost: the sum over k stays in `total`. Segments next: those of one row tile follow one
  #    another and fill its rows of the output block in turn.
  grid = (n // tile_n, table.shape[1], k // tile_k)
  # 2. A segment of no group reads some weights, and does not use them.
  group = lambda table, s: jnp.clip(table[_GROUP, s], 0, g - 1)
  rhs_block = (None, tile_n, tile_k) if transpose_rhs else (None, tile_k, tile_n)
  rhs_index = lambda j, s, c, table: (group(table, s), j, c) if transpose_rhs else (group(table, s), c, j)
  return pl.pallas_call(
    functools.partial(_gmm_kernel, tile_m, g, transpose_rhs, precision),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=grid,
      in_specs=[
        pl.BlockSpec((tile_m, tile_k), lambda j, s, c, table: (table[_TILE, s], c)),
        pl.BlockSpec(rhs_block, rhs_index),
      ],
      out_specs=pl.BlockSpec((tile_m, tile_n), lambda j, s, c, table: (table[_TILE, s], j)),
      scratch_shapes=[pltpu.VMEM((tile_m, tile_n), jnp.float32)],
    ),
    out_shape=_result((m, n), lhs),
    interpret=_interpreter(interpret, lhs),
    name="my_gmm",
  )(table, lhs, rhs)


def _gmm_kernel(tile_m, g, transpose_rhs, precision, table, lhs, rhs, out, total):
  s, c = pl.program_id(1), pl.program_id(2)
  first, last, group = table[_FIRST, s], table[_LAST, s], table[_GROUP, s]
  used = (last > first) & (group >= 0) & (group < g)

  @pl.when(c == 0)
  def _start():
    total[...] = jnp.zeros_like(total)

  @pl.when(used)
  def _add():
    contract = ((1,), (1 if transpose_rhs else 0,))
    dims = (contract, ((), ()))
    total[...] += jax.lax.dot_general(lhs[...], rhs[...], dims, precision=precision, preferred_element_type=jnp.float32)

  @pl.when((c == pl.num_programs(2) - 1) & (last > first))
  def _store():
    # The rows of other segments hold what those wrote, or will be written by them. They are selected,
    # never multiplied by zero: they may be NaN.
    mine = _rows_of(table, s, tile_m, out.shape)
    out[...] = jnp.where(mine, total[...], out[...])


def tgmm(
  lhs: jax.Array,
  dout: jax.Array,
  table: jax.Array,
  *,
  num_groups: int,
  tile: tuple[int, int, int],
  precision: Any,
  interpret: bool,
) -> jax.Array:
  """lhs_g^T @ dout_g for each group g; zero for one of no rows.

  Args:
    lhs, dout: [m, k] and [m, n].
    table, tile, precision, interpret: as in `gmm`.
    num_groups: g.

  Returns:
    float32 [g, k, n].
  """
  (m, k), n, g = lhs.shape, dout.shape[1], num_groups
  del m
  tile_m, tile_k, tile_n = tile
  # Segments innermost: those of one group follow one another and add to its output block.
  group = lambda table, s: jnp.clip(table[_GROUP, s], 0, g - 1)
  return pl.pallas_call(
    functools.partial(_tgmm_kernel, tile_m, g, precision),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(k // tile_k, n // tile_n, table.shape[1]),
      in_specs=[
        pl.BlockSpec((tile_m, tile_k), lambda i, j, s, table: (table[_TILE, s], i)),
        pl.BlockSpec((tile_m, tile_n), lambda i, j, s, table: (table[_TILE, s], j)),
      ],
      out_specs=pl.BlockSpec((None, tile_k, tile_n), lambda i, j, s, table: (group(table, s), i, j)),
    ),
    out_shape=_result((g, k, n), lhs),
    interpret=_interpreter(interpret, lhs),
    name="my_tgmm",
  )(table, lhs, dout)


def _tgmm_kernel(tile_m, g, precision, table, lhs, dout, out):
  s = pl.program_id(2)
  group, before = table[_GROUP, s], table[_GROUP, jnp.maximum(s - 1, 0)]
  used = (table[_LAST, s] > table[_FIRST, s]) & (group >= 0) & (group < g)
  block = lambda group: jnp.clip(group, 0, g - 1)

  @pl.when((s == 0) | (block(group) != block(before)))
  def _start():
    out[...] = jnp.zeros_like(out)

  @pl.when(used)
  def _add():
    # Rows of other groups are cleared in both: zero times NaN would be NaN. In float32, as not every
    # TPU selects bfloat16.
    own = lambda x: jnp.where(_rows_of(table, s, tile_m, x.shape), x.astype(jnp.float32), 0.0).astype(x.dtype)
    dims = (((0,), (0,)), ((), ()))
    out[...] += jax.lax.dot_general(
      own(lhs[...]), own(dout[...]), dims, precision=precision, preferred_element_type=jnp.float32
    )


def _rows_of(table, s, tile_m: int, shape: tuple[int, ...]) -> jax.Array:
  """bool of a block's shape: the rows of its tile that are in segment s."""
  row = table[_TILE, s] * tile_m + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  return (row >= table[_FIRST, s]) & (row < table[_LAST, s])


def _result(shape: tuple[int, ...], x: jax.Array) -> jax.ShapeDtypeStruct:
  """float32 of that shape; inside a shard_map it differs over the mesh axes that all operands differ over."""
  return jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=jax.typeof(x).manual_axis_type)


def _interpreter(interpret: bool, x: jax.Array) -> Any:
  """The plain interpreter; in a checked shard_map, which does not take it, that of TPUs, which remat does not take."""
  if not interpret:
    return False
  return pltpu.InterpretParams() if jax.typeof(x).manual_axis_type.varying else True

"""tgmm with scales of row blocks: each block's partial sum takes its scale (SPEC QNT-1, TGMM-1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gmm._manual_axes import vary_over, varying_axes
from gmm._qarray import Operand, QArray
from gmm._row_blocks import first_row_blocks
from gmm.reference._dots import dot, product_dtype
from gmm.reference._scales import split


def block_sums(
  lhs: Operand,
  dout: Operand,
  starts: jax.Array,
  ends: jax.Array,
  *,
  precision: Any,
  wide: Any,
  finish: Callable[[jax.Array], jax.Array],
  out_dtype: Any,
) -> jax.Array:
  """Sums (lhs_block^T @ dout_block · lhs scale) · dout scale over the row blocks of each range.

  The cost is O(m·k·n + g·k·n), one [k, n] sum and one partial sum are held; blocks of the two
  operands may differ in size, and one of them may have none.

  Args:
    lhs, dout: [m, k] and [m, n]; at least one is a `QArray` with `row_block`. Other scales
      are left to `finish`.
    starts, ends: int32 [g], row range of each group, inside [0, m].
    precision: of the products.
    wide: dtype in which scales are multiplied and partial sums added.
    finish: sum of one group [k, n] in `wide` -> its result [k, n] in out_dtype.
    out_dtype: dtype of the result.

  Returns:
    [g, k, n]; exactly zero for an empty range, and no other row or block reaches a group.
  """
  (x, _), (d, _) = split(lhs), split(dout)
  (m, k), n, g = x.shape, d.shape[1], starts.shape[0]
  axes = varying_axes(lhs, dout, starts, ends)
  out = vary_over(axes, jnp.zeros((g, k, n), out_dtype))
  if 0 in (m, k, n, g):
    return out
  dtype = product_dtype(x.dtype, d.dtype)
  # Steps that straddle no block of either operand: both count from the group's first row.
  blocks = [y.row_block for y in (lhs, dout) if isinstance(y, QArray) and y.row_block is not None]
  step = math.gcd(*blocks)
  size = min(step, m)
  lhs_scale, dout_scale = _scale_at(lhs, starts, ends), _scale_at(dout, starts, ends)

  def group(j: jax.Array, out: jax.Array) -> jax.Array:
    def partial(i: jax.Array, acc: jax.Array) -> jax.Array:
      # 1. The step's rows are [at, end), at most `size`; it is not empty.
      at = starts[j] + i * step
      end = jnp.minimum(at + step, ends[j])
      # 2. A window that would pass row m is moved up: it lies in [0, m) and holds all of them.
      first = jnp.minimum(at, m - size)
      row = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
      own = (row >= at) & (row < end)
      # 3. Rows of others become zero in both operands: 0 · NaN would still be NaN.
      rows = lambda y: jnp.where(own, lax.dynamic_slice_in_dim(y, first, size), jnp.zeros((), y.dtype))
      part = dot(rows(x), rows(d), (0, 0), precision, dtype).astype(wide)
      # 4. One factor after the other.
      if lhs_scale is not None:
        part = part * lhs_scale(j, i * step).astype(wide)[:, None]
      if dout_scale is not None:
        part = part * dout_scale(j, i * step).astype(wide)[None, :]
      return acc + part

    def used(out: jax.Array) -> jax.Array:
      rows = ends[j] - starts[j]
      turns = rows // step + (rows % step > 0).astype(jnp.int32)
      total = lax.fori_loop(jnp.int32(0), turns, partial, vary_over(axes, jnp.zeros((k, n), wide)))
      return lax.dynamic_update_index_in_dim(out, finish(total), j, axis=0)

    return lax.cond(ends[j] > starts[j], used, lambda out: out, out)

  return lax.fori_loop(0, g, group, out)


def _scale_at(x: Operand, starts: jax.Array, ends: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
  """(group, row within it) -> scale [columns] of the block that holds the row; None without row blocks."""
  if not isinstance(x, QArray) or x.row_block is None:
    return None
  scale, block = x.scale, x.row_block
  first = first_row_blocks(starts, ends, block)
  return lambda group, place: lax.dynamic_index_in_dim(scale, first[group] + place // block, keepdims=False)

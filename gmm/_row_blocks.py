"""Blocks of rows that straddle no group: counted from each group's first row, the last one short (SPEC QNT-3).

A scale of such blocks is [num_row_blocks, columns]: the blocks of the first local group in
order, then those of the next. How many there are depends on the group sizes, which are data;
the array has room for the most there can be.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gmm._absmax import absmax
from gmm._groups import row_groups


def num_row_blocks(m: int, num_groups: int, block: int) -> int:
  """The most blocks that m rows in that many groups can have."""
  # ceil(r / b) <= (r + b - 1) / b for each group, summed; and a block holds at least one row.
  return min(m, (m + num_groups * (block - 1)) // block)


def first_row_blocks(starts: jax.Array, ends: jax.Array, block: int) -> jax.Array:
  """int32 [g]: index of each group's first block."""
  counts = _counts(starts, ends, block)
  return jnp.cumsum(counts, dtype=jnp.int32) - counts


def block_of_rows(starts: jax.Array, ends: jax.Array, m: int, block: int) -> jax.Array:
  """int32 [m]: the block of each covered row; rows of no group get some valid index."""
  g = starts.shape[0]
  if 0 in (m, g):
    return jnp.zeros((m,), jnp.int32)
  # 1. The group, and the row's place in it.
  group = row_groups(starts, ends, m)
  place = jnp.arange(m, dtype=jnp.int32) - starts[group]
  # 2. Blocks of earlier groups, then blocks of this one. Only rows of no group can be out of range.
  index = first_row_blocks(starts, ends, block)[group] + place // block
  return jnp.clip(index, 0, num_row_blocks(m, g, block) - 1)


def expand_row_blocks(scale: jax.Array, starts: jax.Array, ends: jax.Array, m: int, block: int) -> jax.Array:
  """Repeats a scale [num_row_blocks, columns] to [m, columns]; rows of no group get some row of it."""
  return scale[block_of_rows(starts, ends, m, block)] if m else scale[:0]


def row_block_absmax(x: jax.Array, starts: jax.Array, ends: jax.Array, block: int) -> jax.Array:
  """max |x| of each block and column, [num_row_blocks, columns]; 0 where there is no block.

  Args:
    x: [m, columns].
    starts, ends: int32 [g], row ranges of the local groups.
    block: rows of a block.
  """
  (m, columns), g = x.shape, starts.shape[0]
  blocks = num_row_blocks(m, g, block)
  if 0 in (blocks, columns, g):
    return jnp.zeros((blocks, columns), x.dtype)
  # 1. The group of each block: the first whose blocks end past it.
  first, counts = first_row_blocks(starts, ends, block), _counts(starts, ends, block)
  index = jnp.arange(blocks, dtype=jnp.int32)
  group = jnp.searchsorted(first + counts, index, side="right").astype(jnp.int32).clip(0, g - 1)
  # 2. Its rows [at, end): at most `block`, none for a block past the last one.
  at = starts[group] + (index - first[group]) * block
  rows = at[:, None] + jnp.arange(min(block, m), dtype=jnp.int32)  # [blocks, rows of a block]
  own = (rows < ends[group][:, None]) & (rows < (at + block)[:, None])
  # 3. A maximum over gathered rows and not a scatter, which may lose a NaN on a GPU.
  values = x[rows.clip(0, m - 1)]
  return absmax(jnp.where(own[:, :, None], values, jnp.zeros((), x.dtype)), 1)


def _counts(starts: jax.Array, ends: jax.Array, block: int) -> jax.Array:
  """int32 [g]: blocks of each group."""
  rows = ends - starts
  return rows // block + (rows % block > 0).astype(jnp.int32)  # never forms rows + block, which may overflow

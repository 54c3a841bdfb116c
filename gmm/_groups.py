"""Group sizes: what they mean, for any integer dtype, sum and offset (SPEC GMM-1, GMM-5, GMM-6)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def canonical_sizes(group_sizes: jax.Array, m: int) -> jax.Array:
  """Returns int32 sizes that are never negative and whose sum is at most m.

  Negative sizes count as 0 and rows are cut at m (SPEC GMM-6).
  """
  # 1. Clamp in the given dtype, so that no size wraps when it is narrowed: sizes in [0, m].
  high = min(m, jnp.iinfo(group_sizes.dtype).max)
  sizes = jnp.clip(group_sizes, 0, high).astype(jnp.int32)
  # 2. Saturating sum in uint32: both terms are below 2^31, so no sum wraps and ends <= m.
  ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, jnp.uint32(m)), sizes.astype(jnp.uint32))
  # 3. Differences of ends that never fall: each size >= 0, their sum = ends[-1] <= m.
  return jnp.diff(ends.astype(jnp.int32), prepend=jnp.int32(0))


def local_ranges(sizes: jax.Array, group_offset: Any, num_groups: int) -> tuple[jax.Array, jax.Array]:
  """Row ranges of the local groups.

  Args:
    sizes: canonical int32 sizes of all groups, [num_global_groups].
    group_offset: None or an int32 scalar; local group j is global group group_offset + j.
    num_groups: number of local groups, g.

  Returns:
    (starts, ends), int32 [g], neither ever falling: rows [starts[j], ends[j]) belong to
    local group j; a local group outside the global ones is empty.
  """
  ends = jnp.cumsum(sizes, dtype=jnp.int32)
  starts = ends - sizes
  if group_offset is None and sizes.shape[0] == num_groups:
    return starts, ends
  if sizes.shape[0] == 0 or num_groups == 0:
    zeros = jnp.zeros((num_groups,), jnp.int32)
    return zeros, zeros
  index = jnp.arange(num_groups, dtype=jnp.int32) + jnp.int32(0 if group_offset is None else group_offset)
  # Before the first global group everything is 0, past the last everything is the total.
  at = lambda x, before: jnp.where(
    index < 0, 0, jnp.where(index < sizes.shape[0], x[index.clip(0, sizes.shape[0] - 1)], before)
  )
  return at(starts, ends[-1]), at(ends, ends[-1])


def covered_rows(starts: jax.Array, ends: jax.Array, m: int) -> jax.Array:
  """bool [m]: whether the row belongs to a local group.

  Local groups are consecutive, so their rows are one range.
  """
  if starts.shape[0] == 0:
    return jnp.zeros((m,), bool)
  row = jnp.arange(m, dtype=jnp.int32)
  used = ends > starts
  first = jnp.min(jnp.where(used, starts, m))
  last = jnp.max(jnp.where(used, ends, 0))
  return (row >= first) & (row < last)


def row_groups(starts: jax.Array, ends: jax.Array, m: int) -> jax.Array:
  """int32 [m]: the local group of each covered row; rows of none get some valid index."""
  del starts  # of consecutive groups, the ends alone tell
  row = jnp.arange(m, dtype=jnp.int32)
  # ends never falls, so the number of ends <= row is the first group that ends past it.
  group = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
  return jnp.minimum(group, max(ends.shape[0] - 1, 0))


def group_sizes_from_ids(expert_ids: jax.Array, num_groups: int) -> jax.Array:
  """Counts tokens per expert (SPEC GMM-6).

  Args:
    expert_ids: integer array of any shape; ids outside [0, num_groups) count for no group.
    num_groups: number of experts.

  Returns:
    int32 [num_groups].
  """
  ids = expert_ids.reshape(-1)
  if ids.dtype.itemsize < 4:
    ids = ids.astype(jnp.int32)  # so that num_groups itself fits
  valid = (ids >= 0) & (ids < num_groups)
  ids = jnp.where(valid, ids, num_groups).astype(jnp.int32)
  return jnp.zeros((num_groups + 1,), jnp.int32).at[ids].add(1)[:num_groups]

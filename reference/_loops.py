"""Grouped matmuls over row ranges: one weight slice per group, row windows of falling size.

The cost is O(m·k·n + g·k·n) whatever the skew of the group sizes: a group of r rows takes
full windows and one more, the smallest that covers what is left, so at most twice its rows
(or the smallest window) are multiplied. Empty groups cost one comparison.

`lhs`, `rhs` and `dout` may be any pytrees of arrays: leaves of lhs and dout share their
first axis (m rows), leaves of rhs theirs (g groups). So codes travel with their scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gmm._manual_axes import vary_over, varying_axes

# Rows of a window, falling; chosen by measurement on a CPU. Whole windows are as large as pays
# off. A tail takes the smallest window that covers it; steps are small where a matmul's time is
# mostly rows (above 64) and where groups are many and short (below 32).
_GMM_WHOLE, _GMM_TAIL = (512,), (256, 192, 128, 96, 64, 32, 24, 16, 8)
_TGMM_WHOLE, _TGMM_TAIL = (), (512, 384, 256, 192, 128, 64, 32, 16)


def gmm_ranges(
  lhs: Any,
  rhs: Any,
  starts: jax.Array,
  ends: jax.Array,
  *,
  multiply: Callable[[Any, Any], jax.Array],
  prepare: Callable[[Any], Any] = lambda w: w,
  n: int,
  acc_dtype: Any,
) -> jax.Array:
  """Multiplies the rows of each range with the weights of its group (SPEC GMM-1 to GMM-4).

  Args:
    lhs: pytree of arrays [m, ...].
    rhs: pytree of arrays [g, ...].
    starts, ends: int32 [g], row range of each group, inside [0, m], ranges in order and
      disjoint.
    multiply: (rows of lhs [t, ...], one prepared slice of rhs) -> [t, n] in acc_dtype.
    prepare: done once to each slice of rhs [...] before its windows.
    n: columns of the result.
    acc_dtype: dtype of the result.

  Returns:
    [m, n]; rows in no range are exactly zero, and no other row or slice reaches a row.
  """
  m, g = _length(lhs), _length(rhs)
  axes = varying_axes(lhs, rhs, starts, ends)
  out = vary_over(axes, jnp.zeros((m, n), acc_dtype))
  if 0 in (m, n, g):
    return out

  def window(out: jax.Array, weights: Any, size: int, at: jax.Array, end: jax.Array, is_full: bool) -> jax.Array:
    # 1. A window that would pass row m is moved up: [first, first + size) lies in [0, m)
    #    and still holds all of [at, end), since size >= end - at.
    first = at if is_full else jnp.minimum(at, m - size)
    rows = multiply(_rows(lhs, first, size), weights)
    # 2. It writes its own rows only; select, since the others may be NaN.
    if not is_full:
      own = _own_rows(first, size, at, end)
      rows = jnp.where(own, rows, lax.dynamic_slice_in_dim(out, first, size))
    return lax.dynamic_update_slice_in_dim(out, rows, first, axis=0)

  def group(j: jax.Array, out: jax.Array) -> jax.Array:
    def used(out: jax.Array) -> jax.Array:
      weights = prepare(jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, j, keepdims=False), rhs))
      step = lambda out, *where: window(out, weights, *where)
      return _over_windows(step, out, starts[j], ends[j], *_windows(_GMM_WHOLE, _GMM_TAIL, m))

    return lax.cond(ends[j] > starts[j], used, lambda out: out, out)

  return lax.fori_loop(0, g, group, out)


def tgmm_ranges(
  lhs: Any,
  dout: Any,
  starts: jax.Array,
  ends: jax.Array,
  *,
  multiply: Callable[[Any, Any], jax.Array],
  finish: Callable[[jax.Array], jax.Array],
  k: int,
  n: int,
  acc_dtype: Any,
  out_dtype: Any,
) -> jax.Array:
  """Sums lhs_row^T @ dout_row over the rows of each range (SPEC TGMM-1 to TGMM-4).

  Args:
    lhs, dout: pytrees of arrays [m, ...].
    starts, ends: int32 [g], row range of each group, inside [0, m].
    multiply: (rows of lhs [t, ...], rows of dout [t, ...]) -> [k, n] in acc_dtype; rows of
      zeros must add nothing.
    finish: sum of one group [k, n] in acc_dtype -> its result [k, n] in out_dtype. Group by
      group, so that only one sum is held in acc_dtype.
    k, n: rows and columns of the result of one group.
    acc_dtype, out_dtype: dtypes of the sum and of the result.

  Returns:
    [g, k, n]; exactly zero for an empty range, and no other row reaches a group.
  """
  m, g = _length(lhs), starts.shape[0]
  axes = varying_axes(lhs, dout, starts, ends)
  out = vary_over(axes, jnp.zeros((g, k, n), out_dtype))
  if 0 in (m, k, n, g):
    return out

  def window(acc: jax.Array, size: int, at: jax.Array, end: jax.Array, is_full: bool) -> jax.Array:
    # 1. As in gmm: the window lies in [0, m) and holds all of [at, end).
    first = at if is_full else jnp.minimum(at, m - size)
    rows = (_rows(lhs, first, size), _rows(dout, first, size))
    # 2. Rows of others become zero in both operands: 0 · NaN would still be NaN.
    if not is_full:
      own = _own_rows(first, size, at, end)
      rows = jax.tree.map(lambda x: jnp.where(own, x, jnp.zeros((), x.dtype)), rows)
    return acc + multiply(*rows)

  def group(j: jax.Array, out: jax.Array) -> jax.Array:
    def used(out: jax.Array) -> jax.Array:
      nothing = vary_over(axes, jnp.zeros((k, n), acc_dtype))
      total = _over_windows(window, nothing, starts[j], ends[j], *_windows(_TGMM_WHOLE, _TGMM_TAIL, m))
      return lax.dynamic_update_index_in_dim(out, finish(total), j, axis=0)

    return lax.cond(ends[j] > starts[j], used, lambda out: out, out)

  return lax.fori_loop(0, g, group, out)


def _over_windows(
  step: Callable[..., jax.Array],
  out: jax.Array,
  start: jax.Array,
  end: jax.Array,
  whole: tuple[int, ...],
  tail: tuple[int, ...],
) -> jax.Array:
  """Carries out = step(out, size, at, end, is_full) over windows that cover [start, end) once."""
  # Positions are written `at + i * size` even where i can only be 0: XLA would hoist a
  # product that does not depend on the loop's counter out of it, and do it always.
  # 1. Full windows: all their rows are the group's own. After each size fewer rows are left.
  at = start
  for size in (*whole, tail[0]):
    turns = (end - at) // size
    out = _loop(turns, lambda i, out, size=size, at=at: step(out, size, at + i * size, end, True), out)
    at = at + turns * size
  # 2. What is left is [at, end), fewer than tail[0] rows: the smallest window that covers it,
  #    and none when nothing is left. Loops of at most one turn, not a switch: XLA copies `out`
  #    into and out of a switch.
  left = end - at
  for size, next_smaller in zip(tail, (*tail[1:], 0), strict=True):
    turns = ((left > next_smaller) & (left <= size)).astype(jnp.int32)
    out = _loop(turns, lambda i, out, size=size: step(out, size, at + i * size, end, False), out)
  return out


def _loop(turns: jax.Array, body: Callable[[jax.Array, jax.Array], jax.Array], init: jax.Array) -> jax.Array:
  return lax.fori_loop(jnp.int32(0), turns, body, init)


def _windows(whole: tuple[int, ...], tail: tuple[int, ...], m: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The sizes that fit m rows; few rows take one window of them all, which compiles faster."""
  if m <= 32:
    return (), (m,)
  return tuple(s for s in whole if s <= m), tuple(s for s in tail if s <= m)


def _length(tree: Any) -> int:
  return jax.tree.leaves(tree)[0].shape[0]


def _rows(tree: Any, first: jax.Array, size: int) -> Any:
  return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size), tree)


def _own_rows(first: jax.Array, size: int, at: jax.Array, end: jax.Array) -> jax.Array:
  """bool [size, 1]: which rows of the window at `first` lie in [at, end)."""
  row = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
  return (row >= at) & (row < end)

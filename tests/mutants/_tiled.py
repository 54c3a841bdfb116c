"""The core that works as kernels do: visits of (row tile, group), tiles along k, masked stores.

A tile of rows with a group border inside is visited once by each of its groups.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from gmm._manual_axes import vary_over, varying_axes

_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Gmm:
  """gmm in tiles of that many rows and steps along k; a call's own tiling gives the rows."""

  rows: int = 8
  step: int = 8

  def __call__(self, hook, x, w, starts, ends, tiling):
    (m, k), (g, _, n) = x.shape, w.shape
    tm, tk = hook("tile", tiling[0] if tiling else self.rows, m), self.step
    axes = varying_axes(x, w, starts, ends)
    if 0 in (m, k, n, g):
      return vary_over(axes, jnp.zeros((m, n), jnp.float32))
    # 1. Whole tiles; what is added along k must add nothing.
    steps = hook("steps", -(-k // tk), k // tk)
    x = jnp.pad(x, ((0, -m % tm), (0, -k % tk)), constant_values=hook("k_fill", 0.0))
    w = jnp.pad(w, ((0, 0), (0, -k % tk), (0, 0)), constant_values=hook("k_fill", 0.0))
    group, tile, active, _ = _visits(hook, starts, ends, x.shape[0] // tm, tm)

    def visit(v, carry):
      out, last = carry
      j, at = group[v], tile[v] * tm
      rows = lax.dynamic_slice_in_dim(x, at, tm)

      def step(i, acc):
        a = lax.dynamic_slice_in_dim(rows, i * tk, tk, axis=1)
        b = lax.dynamic_slice(w, (j, hook("k_block", i, steps) * tk, 0), (1, tk, n))[0]
        return hook("partial_acc", acc + jnp.dot(a, b, precision=_EXACT))

      # 2. One sum per visit, from zero.
      first = hook("acc_init", vary_over(axes, jnp.zeros((tm, n), jnp.float32)), last)
      acc = lax.fori_loop(0, steps, step, first)
      # 3. Rows of other groups in the tile stay as they are.
      row = at + jnp.arange(tm, dtype=jnp.int32)
      mask = hook("store_mask", (row >= starts[j]) & (row < ends[j]), (row, starts[j], ends[j])) & active[v]
      old = lax.dynamic_slice_in_dim(out, at, tm)
      new = hook("merge", jnp.where(mask[:, None], acc, old), (mask[:, None], acc, active[v], old))
      return lax.dynamic_update_slice_in_dim(out, new, at, axis=0), acc

    zeros = vary_over(axes, jnp.zeros((x.shape[0], n), jnp.float32))
    out, _ = lax.fori_loop(0, group.shape[0], visit, (zeros, zeros[:tm]))
    return hook("columns", out[:m])


@dataclasses.dataclass(frozen=True)
class Tgmm:
  """tgmm in tiles of that many rows; the sum of a group is carried from visit to visit."""

  rows: int = 8

  def __call__(self, hook, x, d, starts, ends, tiling):
    (m, k), n, g, tm = x.shape, d.shape[1], starts.shape[0], tiling[0] if tiling else self.rows
    axes = varying_axes(x, d, starts, ends)
    out = vary_over(axes, jnp.zeros((g, k, n), jnp.float32))
    if 0 in (m, k, n, g):
      return out
    x, d = (jnp.pad(a, ((0, -m % tm), (0, 0))) for a in (x, d))
    group, tile, active, first = _visits(hook, starts, ends, x.shape[0] // tm, tm)

    def visit(v, carry):
      out, acc = carry
      j, at = group[v], tile[v] * tm
      row = at + jnp.arange(tm, dtype=jnp.int32)
      mask = hook("row_mask", (row >= starts[j]) & (row < ends[j]), (row, starts[j], ends[j])) & active[v]
      own = lambda a: jnp.where(mask[:, None], lax.dynamic_slice_in_dim(a, at, tm), 0.0)
      acc = hook("acc_init", jnp.where(v == first[j], 0.0, acc), (acc, v == first[j]))
      acc = hook("partial_acc", acc + jnp.dot(own(x).T, own(d), precision=_EXACT))
      # Every visit stores; the last one of a group has it all.
      stored = jnp.where(active[v], acc, lax.dynamic_index_in_dim(out, j, keepdims=False))
      return lax.dynamic_update_index_in_dim(out, stored, j, 0), acc

    out, _ = lax.fori_loop(0, group.shape[0], visit, (out, out[0]))
    return out


def _visits(hook, starts, ends, tiles, tm):
  """(group, tile, active) of each visit, and the first visit of each group."""
  # 1. A group with rows visits the tiles from its first row's to its last row's.
  counts = jnp.where(ends > starts, (ends - 1) // tm - starts // tm + 1, 0)
  counts = hook("visit_counts", counts, (starts, ends, tm))
  last = jnp.cumsum(counts)
  first = last - counts
  # 2. Each border inside a tile adds one visit, so there are fewer than tiles + g.
  v = jnp.arange(tiles + starts.shape[0], dtype=jnp.int32)
  active = v < last[-1]
  group = jnp.minimum(jnp.searchsorted(last, v, side="right"), starts.shape[0] - 1).astype(jnp.int32)
  group = hook("visit_group", group, starts.shape[0])
  tile = jnp.clip(starts[group] // tm + v - first[group], 0, tiles - 1)
  return group, hook("visit_tile", tile, (starts[group], tm, tiles)), active, first

"""The core that hides nothing: every group multiplies every row, and a mask keeps what is its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_EXACT = jax.lax.Precision.HIGHEST


def gmm(hook, x, w, starts, ends, tiling):
  """[m, k] x [g, k, n] -> float32 [m, n]."""
  del tiling
  mask = hook("mask", _members(starts, ends, x.shape[0]))
  products = hook("products", jnp.einsum("mk,gkn->gmn", x, w, precision=_EXACT), mask)
  return jnp.sum(hook("kept", jnp.where(mask[:, :, None], products, 0.0), (products, mask)), axis=0)


def tgmm(hook, x, d, starts, ends, tiling):
  """[m, k] x [m, n] -> float32 [g, k, n]."""
  del tiling
  mask = hook("mask", _members(starts, ends, x.shape[0]))
  own = lambda a: hook("kept", jnp.where(mask[:, :, None], a[None], 0.0), (a[None], mask))
  return jnp.einsum("gmk,gmn->gkn", own(x), own(d), precision=_EXACT)


def _members(starts, ends, m):
  """bool [g, m]."""
  row = jnp.arange(m, dtype=jnp.int32)
  return (row >= starts[:, None]) & (row < ends[:, None])

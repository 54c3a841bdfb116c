"""Scales of quantized operands: which travel with the products, which wait for the result (SPEC QNT-1)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from gmm._groups import row_groups
from gmm._qarray import Operand, QArray, expand_scale


def split(x: Operand) -> tuple[jax.Array, jax.Array | None]:
  """The array that is multiplied, and its scale or None."""
  return (x.qvalue, x.scale) if isinstance(x, QArray) else (x, None)


def has_row_blocks(x: Operand) -> bool:
  """Whether an operand of tgmm has scales of blocks of rows."""
  return isinstance(x, QArray) and x.row_block is not None


def wide_dtype(*dtypes: Any) -> jnp.dtype:
  """float32, in which scales are multiplied, or float64 when one of the dtypes is."""
  return jnp.dtype(jnp.float64 if any(jnp.dtype(d) == jnp.float64 for d in dtypes) else jnp.float32)


def common_blocks(k: int, lhs_scale: jax.Array | None, rhs_scale: jax.Array | None) -> int:
  """The fewest equal blocks of the contracting dimension that straddle no block of either scale.

  Args:
    k: contracting size.
    lhs_scale: [., blocks] or None.
    rhs_scale: [., blocks, .] or None.
  """
  counts = [s.shape[1] for s in (lhs_scale, rhs_scale) if s is not None]
  # Equal blocks of size gcd(k / a, k / b): each divides both block sizes.
  return k // math.gcd(k, *(k // c for c in counts)) if k else 1


def scale_rows(x: jax.Array, scale: jax.Array | None) -> jax.Array:
  """x [m, n] times a scale [1 or m or m / b, 1] of its rows."""
  return x if scale is None else x * expand_scale(scale, (x.shape[0], 1), x.dtype)


def scale_groups(x: jax.Array, scale: jax.Array | None, starts: jax.Array, ends: jax.Array) -> jax.Array:
  """x [m, n] times a scale [1 or g, 1, 1 or n or n / b] of each row's own group."""
  if scale is None:
    return x
  factors = expand_scale(scale, (scale.shape[0], 1, x.shape[1]), x.dtype)[:, 0]
  return x * (factors if factors.shape[0] == 1 else factors[row_groups(starts, ends, x.shape[0])])


def scale_columns(x: jax.Array, scale: jax.Array | None, axis: int) -> jax.Array:
  """x [..., k, n] times a scale [1, 1 or columns or columns / b] along k (axis 0) or n (axis 1)."""
  if scale is None:
    return x
  columns = expand_scale(scale, (1, x.shape[axis - 2]), x.dtype)
  return x * (columns.reshape(-1, 1) if axis == 0 else columns.reshape(1, -1))


def unscaled_rows(x: Operand, wide: Any) -> tuple[jax.Array, jax.Array | None]:
  """x without a scale that varies along its rows: (array, scale of its columns or None)."""
  values, scale = split(x)
  if scale is None or scale.shape[0] == 1:
    return values, scale
  return values.astype(wide) * expand_scale(scale, x.shape, wide), None

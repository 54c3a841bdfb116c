"""The largest magnitude of an array, NaN included (SPEC QNT-5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def absmax(x: jax.Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> jax.Array:
  """max |x| along axes, in x's dtype; NaN where one is, 0 where there is nothing.

  Taken over bits: without their sign, floats order as integers do, and NaN stands above Inf.
  XLA's maximum of floats loses NaNs (JAX 0.10.2 on CPU, jitted, from some thousand elements on).
  """
  bits = jnp.max(magnitude_bits(x), axis=axis, keepdims=keepdims, initial=0)
  return lax.bitcast_convert_type(bits, x.dtype)


def magnitude_bits(x: jax.Array) -> jax.Array:
  """|x| as a non-negative integer of the same width, in the same order."""
  bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
  return bits & jnp.asarray(jnp.iinfo(bits.dtype).max, bits.dtype)

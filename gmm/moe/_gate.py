"""The gated activation between the two halves of an expert, and the rounding around it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


@jax.checkpoint  # Keeps the two inputs in their own dtype, not the float32 values between.
def silu_gate(h0: jax.Array, h1: jax.Array) -> jax.Array:
  """silu(h0) * h1, computed in float32 and rounded once to the inputs' dtype."""
  return rounded(jax.nn.silu(h0.astype(jnp.float32)) * h1.astype(jnp.float32), h0.dtype)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
  """Casts x to a narrower float dtype by a rounding that XLA may not skip.

  Under jit XLA removes a cast to bfloat16 and back, so that a value would be rounded or not
  depending on what is fused with what. Here both layers must round at the same places.
  """
  # 8 exponent bits, those of float32: the cast itself deals with the range of float16.
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=jnp.finfo(dtype).nmant).astype(dtype)

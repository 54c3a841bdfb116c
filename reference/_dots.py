"""In which dtype two operands are multiplied, and the product itself (SPEC GMM-7, TGMM-6)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# All their values are bfloat16 values, so casting loses nothing.
_EXACT_IN_BF16 = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")


def product_dtype(a: Any, b: Any) -> jnp.dtype:
  """The narrowest dtype that holds every value of both operands and has a fast dot."""
  a, b = jnp.dtype(a), jnp.dtype(b)
  if all(jnp.issubdtype(d, jnp.integer) for d in (a, b)):
    return jnp.dtype(jnp.int8 if {a.name, b.name} <= {"int4", "int8"} else jnp.int32)
  if "float64" in (a.name, b.name):
    return jnp.dtype(jnp.float64)
  if a.name in _EXACT_IN_BF16 and b.name in _EXACT_IN_BF16:
    return jnp.dtype(jnp.bfloat16)
  return jnp.dtype(jnp.float32)


def acc_dtype(dtype: Any) -> jnp.dtype:
  """Dtype that products of `product_dtype` are summed in: int32 for integers, at least float32."""
  if jnp.issubdtype(dtype, jnp.integer):
    return jnp.dtype(jnp.int32)
  return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def dot(x: jax.Array, y: jax.Array, contract: tuple[int, int], precision: Any, dtype: Any) -> jax.Array:
  """x and y of rank 2, cast to `dtype`, contracted over axes `contract`, in `acc_dtype(dtype)`."""
  return lax.dot_general(
    x.astype(dtype),
    y.astype(dtype),
    (((contract[0],), (contract[1],)), ((), ())),
    precision=used_precision(precision, dtype),
    preferred_element_type=acc_dtype(dtype),
  )


def used_precision(precision: Any, dtype: Any) -> Any:
  """Products of 16-bit floats and integers are exact already; float32 is multiplied as float32 by default."""
  if jnp.dtype(dtype).name not in ("float32", "float64"):
    return None
  return lax.Precision.HIGHEST if precision is None else precision

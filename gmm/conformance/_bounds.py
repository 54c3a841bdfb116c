"""How far a correct result may lie from the exact one, element by element (SPEC appendix A).

Every rounding multiplies what it rounds by 1 + d, |d| <= u, and t of them in a row by at most
(1 + u)^t. So a sum in any order, each term of which passes at most t roundings, is off by at most
(1 + u)^t - 1 times the sum of the terms' magnitudes (N. Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., sections 3.1 and 4.2; his gamma_t = t·u / (1 - t·u) is a little
larger, and useless from t·u = 1 on). The bound grows with the length and is sharp only for short
sums: checks run on k <= 16 and on data of one sign as well.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from gmm._protocol import Backend
from gmm.conformance._oracle import Exact

# What a platform may turn into zero: anything below the smallest normal float32.
_FLUSHED = 2.0**-126


def unit_roundoff(dtype: str) -> float:
  """Half the distance from 1 to the next number of the dtype."""
  if dtype in ("int32", "int64"):
    return 0.0
  return float(jnp.finfo(dtype).eps) / 2


def error_bound(
  exact: Exact,
  out_dtype: str,
  *,
  accumulator: str = "float32",
  inexact_products: bool = False,
  extra_roundings: int = 0,
  extra_magnitude: np.ndarray | float = 0.0,
  out_roundings: int = 1,
) -> np.ndarray:
  """The largest |got - exact| of a correct backend, per element.

  Args:
    exact: the result in float64, from `gmm.conformance` on the same quantized operands.
    out_dtype: dtype of the result.
    accumulator: dtype of the running sum; an integer sum does not round.
    inexact_products: whether a single product rounds too (float32 operands).
    extra_roundings: float32 roundings after the sum besides the scales (partial_sum: 1).
    extra_magnitude: |partial_sum|, which those roundings see as well.
    out_roundings: how often the result is rounded to out_dtype.

  Returns:
    float64, the shape of exact.value.
  """
  # 1. The sum: t terms take t - 1 additions, and a rounding each where products are inexact.
  #    float32 is the narrowest that holds every product of 16-bit operands.
  inexact_products = inexact_products or unit_roundoff(accumulator) > unit_roundoff("float32")
  adds = np.maximum(exact.terms - 1, 0) + inexact_products
  error = _growth(adds, unit_roundoff(accumulator)) * exact.magnitude
  # 2. Then a conversion of an integer sum, the scales, and what is added, in float32. Of blocks
  #    that are scaled one by one the float sum above has the additions already (b - 1 inside of
  #    t / b blocks and t / b - 1 between them are fewer than t - 1); integer sums end inside them.
  after = exact.scaled + extra_roundings + (accumulator == "int32") * exact.blocks
  size = exact.magnitude + extra_magnitude
  error = error + _growth(after, unit_roundoff("float32")) * (size + error)
  # 3. Products and sums that a platform flushes to zero.
  error = error + (exact.terms + after * exact.blocks) * _FLUSHED
  # 4. The result's own rounding, of the exact value plus the error so far.
  #    A result in the dtype that was computed in, or a wider one, is not rounded again.
  last = unit_roundoff("float32" if np.any(after) else accumulator)
  out_unit = unit_roundoff(out_dtype)
  out_unit = out_unit if out_unit > last else 0.0
  for _ in range(out_roundings):
    error = error + out_unit * (np.abs(exact.value) + error) + max(float(jnp.finfo(out_dtype).tiny), _FLUSHED)
  return error


def backend_bound(backend: Backend, exact: Exact, out_dtype: str, operands: tuple[str, str], **kwargs) -> np.ndarray:
  """`error_bound` for what a backend declares, operands given by the dtype they are multiplied in."""
  integers = all(o.startswith("int") for o in operands)
  return error_bound(
    exact,
    out_dtype,
    accumulator=backend.int_accumulator if integers else backend.accumulator,
    inexact_products="float32" in operands,
    out_roundings=backend.out_roundings,
    **kwargs,
  )


def _growth(roundings, unit: float) -> np.ndarray:
  """(1 + unit)^roundings - 1, without cancellation."""
  return np.expm1(np.asarray(roundings, np.float64) * np.log1p(unit))

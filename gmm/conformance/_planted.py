"""Operands that a recipe quantizes without loss, so that quantized results are exact as well.

In every slice that shares a scale stands an element of magnitude qmax · 2^j, which makes that
scale 2^j; the rest are small integers times a power of two, and are their own codes. All sums
are then exact in float32, whatever their order, and equal those of the operands themselves.

Recipes of blocks have slices of every shape, forward and backward. There all elements are 7 times a
power of two: then the absmax of any slice is, and every scale is a power of two.

int8 has one exception: qmax is 127.5, which no code has. Its planted elements get the codes 127
and -128 (QNT-5), and `*_value` says what those are worth.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gmm._recipe import Quant
from gmm.conformance import _oracle
from gmm.conformance._case import Case, numpy_dtype

_PEAK = 7  # 448 = 7 · 2^6 and 57344 = 7 · 2^13: a peak beside -3..3 in units of the largest code / 7


@dataclasses.dataclass(frozen=True)
class Lossless:
  """Operands as given, and what the codes of lhs and rhs are worth (the same but for int8 peaks)."""

  lhs: np.ndarray
  rhs: np.ndarray
  dout: np.ndarray
  lhs_value: np.ndarray
  rhs_value: np.ndarray


def lossless(case: Case) -> Lossless:
  """Draws them by the case's seed, for the case's recipe."""
  rule, rng = case.rule, np.random.default_rng([case.seed, 5])
  m, k, n, g = case.m, case.k, case.n, case.g
  if rule.lhs is not None and rule.lhs.block:
    return _all_peaks(case, rng)
  integers = lambda *shape: rng.integers(-3, 4, shape).astype(np.float64)
  peaks = lambda *shape: _PEAK * rng.choice([-1.0, 1.0], shape)
  rows = np.arange(m)

  # 1. lhs: a peak in every row; one scale per row, or one for all.
  x = integers(m, k)
  x[rows, rows % k] = peaks(m)
  x_scale = _scales(rule.lhs, (m, 1), rng)
  lhs, lhs_value = _scaled(x, x_scale, rule.lhs)

  # 2. rhs: a peak in every column of every group.
  w = integers(g, k, n)
  w[:, 0] = peaks(g, n)
  w_scale = _scales(rule.rhs, (1, 1, n), rng)
  rhs, rhs_value = _scaled(w, w_scale, rule.rhs)

  # 3. dout: a peak in every row, and in every column within a used row. The backward multiplies one
  #    forward scale into it: divided by both, dout · rs has one power of two per row, dout · ls one per column.
  d = integers(m, n)
  d[rows, rows % n] = peaks(m)
  first = next((start for start, end in _oracle.ranges(case.sizes) if end > start), 0)
  d[first] = peaks(n)
  dout, _ = _scaled(d, 1 / (x_scale * w_scale[0]), rule.dout)

  dtype = numpy_dtype(case.dtype)
  return Lossless(lhs.astype(dtype), rhs.astype(dtype), dout.astype(dtype), lhs_value, rhs_value)


def _all_peaks(case: Case, rng: np.random.Generator) -> Lossless:
  """Operands of peaks: the exponent varies from element to element, and from block to block."""

  def peaks(*shape: int) -> np.ndarray:
    exponents = rng.integers(0, 2, shape)
    for axis in (-1, -2):
      by_block = rng.integers(-1, 2, -(-shape[axis] // 4)).repeat(4)[: shape[axis]]
      exponents = exponents + (by_block if axis == -1 else by_block[:, None])
    return _PEAK * rng.choice([-1.0, 1.0], shape) * 2.0**exponents

  dtype = numpy_dtype(case.dtype)
  lhs, rhs, dout = peaks(case.m, case.k), peaks(case.g, case.k, case.n), peaks(case.m, case.n)
  return Lossless(lhs.astype(dtype), rhs.astype(dtype), dout.astype(dtype), lhs, rhs)


def _scales(quant: Quant | None, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
  """The powers of two that the operand's scales shall be, 1 where it is not quantized."""
  if quant is None:
    return np.ones((1,) * len(shape))
  if quant.fixed_range is not None:
    return np.full((1,) * len(shape), quant.fixed_range / quant.qmax)
  return 2.0 ** rng.integers(-3, 4, (1,) * len(shape) if quant.one_scale else shape)


def _scaled(units: np.ndarray, scale: np.ndarray, quant: Quant | None) -> tuple[np.ndarray, np.ndarray]:
  """(operand, value of its codes): units times the scale, with the peak at qmax times the scale."""
  if quant is None:
    return units * scale, units * scale
  if quant.is_integer:
    peak = np.abs(units) == _PEAK
    code = np.where(units > 0, quant.qmax - 0.5, -quant.qmax - 0.5)
    return np.where(peak, np.sign(units) * quant.qmax, units) * scale, np.where(peak, code, units) * scale
  operand = units * (quant.qmax / _PEAK) * scale
  return operand, operand

"""Checks of the clauses QNT-1 to QNT-12 on a backend: what codes and scales mean in a matmul."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from gmm._protocol import Backend
from gmm._qarray import QArray
from gmm._recipe import QMAX
from gmm._row_blocks import num_row_blocks
from gmm.conformance import _oracle
from gmm.conformance._bounds import backend_bound
from gmm.conformance._case import Case
from gmm.conformance._operands import dtype_of, forward_operands
from gmm.conformance._programs import both_ways, forward, transposed
from gmm.conformance._registry import check, expect, expect_equal, expect_within


def _codes(case: Case, salt: int, shape: tuple[int, ...], qtype: str) -> jnp.ndarray:
  rng = np.random.default_rng([case.seed, salt])
  return jnp.asarray(rng.integers(-3, 4, shape), jnp.int8).astype(qtype)


def _powers(case: Case, salt: int, shape: tuple[int, ...]) -> jnp.ndarray:
  """Scales that are powers of two: with integer codes every result is exact."""
  return jnp.asarray(2.0 ** np.random.default_rng([case.seed, salt]).integers(-3, 3, shape), jnp.bfloat16)


def _exact_product(backend: Backend, case: Case, lhs, rhs, transpose_rhs: bool = False) -> None:
  rows = _oracle.ranges(case.sizes)
  exact = _oracle.gmm(lhs, rhs, rows, transpose_rhs).value
  got = forward(backend, transpose_rhs=transpose_rhs, preferred_element_type="float32")(lhs, rhs, case.sizes)
  what = f"out of {dtype_of(lhs)} scale {_shape(lhs)} x {dtype_of(rhs)} scale {_shape(rhs)}"
  expect_equal(got, exact.astype(np.float32), what, _oracle.owner_of_rows(rows, case.m))


def _shape(x) -> tuple[int, ...] | None:
  return x.scale.shape if isinstance(x, QArray) else None


_PAIRS = (("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn"), ("int8", "int8"), ("bfloat16", "int8"))


@check("QNT-1", "codes times codes, times lhs scale, times rhs scale; exact on integer codes", "short", weight=0.35)
def quantized_operands(backend: Backend, case: Case) -> None:
  """Each pair of dtypes, each granularity of a scale, both layouts of rhs."""
  m, k, n, g = case.m, case.k, case.n, case.g
  lhs_scales, rhs_scales = ((m, 1), (1, 1)), ((1, 1, n), (g, 1, n), (1, 1, 1))
  for i, (lhs_type, rhs_type) in enumerate(_PAIRS):
    lhs_scale, rhs_scale = lhs_scales[i % 2], rhs_scales[i % 3]
    lhs = _codes(case, 1, (m, k), "int8" if lhs_type == "bfloat16" else lhs_type)
    lhs = lhs.astype(jnp.bfloat16) if lhs_type == "bfloat16" else QArray(lhs, _powers(case, 3, lhs_scale))
    rhs = QArray(_codes(case, 2, (g, k, n), rhs_type), _powers(case, 4, rhs_scale))
    _exact_product(backend, case, lhs, rhs)
    if i % 2:
      _exact_product(backend, case, lhs, rhs.swapaxes(1, 2), transpose_rhs=True)


@check("QNT-1", "scales per block along k, and 2-D blocks of rhs", "short", weight=0.3)
def block_scales(backend: Backend, case: Case) -> None:
  """Each block's partial sum is scaled; blocks of different size on the two sides."""
  m, k, n, g = case.m, case.k, case.n, case.g
  rhs = _codes(case, 2, (g, k, n), "int8")
  for lhs_blocks, rhs_blocks in (((m, k // 4), (g, k // 8, n)), ((m, 1), (1, k // 4, n // 4))):
    lhs = QArray(_codes(case, 1, (m, k), "int8"), _powers(case, 3, lhs_blocks))
    _exact_product(backend, case, lhs, QArray(rhs, _powers(case, 4, rhs_blocks)))


@check("QNT-1", "codes times codes in tgmm, times a scale per column of each operand", "short", weight=0.35)
def quantized_columns(backend: Backend, case: Case) -> None:
  """fp8 and int8 pairs; exact on integer codes."""
  rows = _oracle.ranges(case.sizes)
  for qtype in ("float8_e4m3fn", "int8"):
    lhs = QArray(_codes(case, 1, (case.m, case.k), qtype), _powers(case, 3, (1, case.k)))
    dout = QArray(_codes(case, 2, (case.m, case.n), qtype), _powers(case, 4, (1, case.n)))
    got = transposed(backend, preferred_element_type="float32")(lhs, dout, case.sizes)
    expected = _oracle.tgmm(lhs, dout, rows).value.astype(np.float32)
    expect_equal(got, expected, f"drhs of {qtype} codes", np.arange(case.g))


@check("QNT-1", "scales per block of rows in tgmm, counted from each group's first row", "short", weight=0.3)
def row_block_scales(backend: Backend, case: Case) -> None:
  """Blocks of different size on the two sides; the last of a group is short."""
  operands = []
  for salt, (columns, block) in enumerate(((case.k, 4), (case.n, 8))):
    scale = _powers(case, 3 + salt, (num_row_blocks(case.m, case.g, block), columns))
    operands.append(QArray(_codes(case, 1 + salt, (case.m, columns), "int8"), scale, block))
  lhs, dout = operands
  exact = _oracle.tgmm(lhs, dout, _oracle.ranges(case.sizes)).value
  got = transposed(backend, preferred_element_type="float32")(lhs, dout, case.sizes)
  expect_equal(got, exact.astype(np.float32), "drhs of blocks of 4 and 8 rows", np.arange(case.g))


@check("QNT-1", "int4 weights", "short", weight=0.3)
def int4_weights(backend: Backend, case: Case) -> None:
  """Against bfloat16 activations, one scale per output column."""
  lhs = _codes(case, 1, (case.m, case.k), "int8").astype(jnp.bfloat16)
  rhs = QArray(_codes(case, 2, (case.g, case.k, case.n), "int4"), _powers(case, 4, (1, 1, case.n)))
  _exact_product(backend, case, lhs, rhs)


@check("QNT-6", "unused rows and groups reach no scale, forward or backward", "quantized_short", weight=0.7)
def unused_reach_no_scale(backend: Backend, case: Case) -> None:
  """Inf and NaN there change no bit of the result or of a gradient."""
  run = both_ways(backend, recipe=case.rule)
  clean, poisoned = [], []
  for fill, results in ((0.0, clean), (np.inf, poisoned), (np.nan, poisoned)):
    lhs, rhs, dout = case.lhs, case.rhs, case.dout
    lhs[case.used :], dout[case.used :] = fill, fill
    rhs[case.sizes == 0] = fill
    results.append(run(lhs, rhs, case.sizes, dout))
  for got in poisoned:
    for name, a, b in zip(("out", "dlhs", "drhs"), got, clean[0], strict=True):
      expect_equal(a, np.asarray(b), f"{name} of {case.recipe} with NaN or Inf in unused rows and groups")


@check(
  "QNT-8", "quantizing in the op or in the backend is multiplying the recipe's codes", "quantized_short", weight=2.5
)
def recipe_is_its_codes(backend: Backend, case: Case) -> None:
  """gmm(lhs, rhs, recipe) has the bits of gmm of the two QArrays."""
  lhs, rhs = forward_operands(case)
  got = forward(backend, recipe=case.rule)(case.lhs, case.rhs, case.sizes)
  on_codes = forward(backend, preferred_element_type=case.dtype)(lhs, rhs, case.sizes)
  expect_equal(got, np.asarray(on_codes), f"out of {case.recipe}")


@check("QNT-9", "a float32 scale of bfloat16 operands is used unrounded", "quantized_short", weight=0.5)
def float32_scales(backend: Backend, case: Case) -> float:
  """Within the bound of the exact product; rounding the scale to bfloat16 would be far outside."""
  rows = _oracle.ranges(case.sizes)
  scale = jnp.asarray(1 + 2.0**-12 + np.zeros((1, 1, case.n)), jnp.float32)
  rhs = QArray(_codes(case, 2, (case.g, case.k, case.n), "int8"), scale)
  lhs = jnp.asarray(case.lhs)
  exact = _oracle.gmm(lhs, rhs, rows)
  got = forward(backend, preferred_element_type="float32")(lhs, rhs, case.sizes)
  return expect_within(got, exact.value, backend_bound(backend, exact, "float32", (case.dtype, "int8")), "out")


@check("QNT-12", "the distance to the unquantized result is what the quantization steps allow", "quantized_short")
def distance(backend: Backend, case: Case) -> float | None:
  """|q·s - x| of both operands bounds the product's change; a lost scale would not."""
  rows, rule = _oracle.ranges(case.sizes), case.rule
  lhs, rhs = forward_operands(case)
  # 1. The step of each operand, from the format alone.
  plain = _oracle.gmm(case.lhs, case.rhs, rows)
  d_lhs, d_rhs = _step(case.lhs, lhs, rule.lhs), _step(case.rhs, rhs, rule.rhs)
  # 2. (l + dl)(r + dr) - l r = l dr + dl r + dl dr.
  wide = np.abs(case.lhs.astype(np.float64)), np.abs(case.rhs.astype(np.float64))
  moved = sum(_oracle.gmm(a, b, rows).value for a, b in ((wide[0], d_rhs), (d_lhs, wide[1]), (d_lhs, d_rhs)))
  # 3. On top, the rounding of the computation itself.
  exact = _oracle.gmm(lhs, rhs, rows)
  bound = moved + backend_bound(backend, exact, case.dtype, (dtype_of(lhs), dtype_of(rhs)))
  got = forward(backend, recipe=case.rule)(case.lhs, case.rhs, case.sizes)
  return expect_within(got, plain.value, bound, f"out of {case.recipe}", _oracle.owner_of_rows(rows, case.m))


def _step(x: np.ndarray, quantized, quant) -> np.ndarray:
  """Largest |qvalue · scale - x| that the code format allows, per element."""
  wide = np.abs(x.astype(np.float64))
  if quant is None:
    return np.zeros_like(wide)
  scale = _oracle.expanded_scale(quantized)
  # The quotient is rounded to bfloat16 before the code's own rounding; the scale is the stored one.
  relative = 2.0**-8
  if quant.is_integer:
    # Half a step; the largest code is half a step below its bound, and the roundings before move it.
    return scale * (0.5 + QMAX[quant.qtype] * relative)
  finfo = jnp.finfo(quant.qtype)
  half_ulp = float(finfo.eps) / 2
  beyond = np.maximum(wide - float(finfo.max) * scale, 0)  # a static range saturates
  return (half_ulp * (1 + relative) + relative) * wide + scale * float(finfo.smallest_subnormal) + beyond


@check("QNT-5", "a NaN in a used row reaches that row's output, never zero", "quantized_short", weight=0.7)
def nan_is_honest(backend: Backend, case: Case) -> None:
  """Whatever carries it, the scale or the code; rows of other groups stay finite unless the scale is shared."""
  sizes = np.array([case.m - 2, 0, 1], np.int32)
  lhs = case.lhs
  lhs[0, 0] = np.nan
  rule = case.rule
  out = np.asarray(forward(backend, recipe=rule)(lhs, case.rhs, sizes)).astype(np.float64)
  expect(bool(np.isnan(out[0]).all()), f"out[0] of {case.recipe} must be NaN, lhs[0, 0] is")
  spreads = rule.lhs is not None and rule.lhs.one_scale and (rule.lhs.fixed_range is None or rule.lhs.is_integer)
  if not spreads:
    expect(bool(np.isfinite(out[1:]).all()), f"a NaN in lhs[0] reached other rows of {case.recipe}")
  expect(not out[case.m - 1 :].any(), f"the slack row of {case.recipe} must stay zero")


CHECKS = (
  quantized_operands,
  quantized_columns,
  block_scales,
  row_block_scales,
  int4_weights,
  nan_is_honest,
  unused_reach_no_scale,
  recipe_is_its_codes,
  float32_scales,
  distance,
)

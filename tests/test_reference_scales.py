"""Scales in the reference and xla backends: every granularity hits the right element, nothing else.

Scales are powers of two and codes small integers, so results are exact and compared with
tolerance zero; the oracle is numpy on the dequantized operands.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gmm._groups import local_ranges
from gmm._protocol import Problem, Unsupported, operand_spec
from gmm._qarray import QArray
from gmm._quantize import quantize
from gmm._recipe import Quant
from gmm.reference import backend as reference
from gmm.reference.xla import backend as xla

BACKENDS = pytest.mark.parametrize("backend", [reference, xla], ids=lambda b: b.name)


def ranges(sizes: np.ndarray) -> list[tuple[int, int]]:
  ends = np.cumsum(sizes)
  return [(int(e - s), int(e)) for s, e in zip(sizes, ends, strict=True)]


@np.errstate(invalid="ignore")  # NaN and Inf are among the cases
def oracle_gmm(x: np.ndarray, w: np.ndarray, sizes: np.ndarray) -> np.ndarray:
  out = np.zeros((x.shape[0], w.shape[2]), np.float64)
  for j, (start, end) in enumerate(ranges(sizes)):
    out[start:end] = x[start:end] @ w[j]
  return out


@np.errstate(invalid="ignore")  # NaN and Inf are among the cases
def oracle_tgmm(x: np.ndarray, d: np.ndarray, sizes: np.ndarray) -> np.ndarray:
  return np.stack([x[a:b].T @ d[a:b] for a, b in ranges(sizes)]).astype(np.float64)


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
  return rng.integers(-3, 4, shape).astype(np.float64)


@functools.cache
def jitted(backend, op: str, out: str, transpose_rhs: bool = False, num_groups: int | None = None):
  """Compiled once per shape and option: new group sizes do not compile again."""
  options = {"transpose_rhs": transpose_rhs} if op == "gmm" else {"num_groups": num_groups}
  return jax.jit(functools.partial(getattr(backend, op), preferred_element_type=out, **options))


def run_gmm(backend, x, w, sizes, out="float32", transpose_rhs=False, **arrays):
  return np.asarray(jitted(backend, "gmm", out, transpose_rhs)(x, w, jnp.asarray(sizes, jnp.int32), **arrays))


def run_tgmm(backend, x, d, sizes, out="float32", num_groups=None, **arrays):
  run = jitted(backend, "tgmm", out, num_groups=len(sizes) if num_groups is None else num_groups)
  return np.asarray(run(x, d, jnp.asarray(sizes, jnp.int32), **arrays))


def powers(rng: np.random.Generator, shape: Any, **sizes: Any) -> Any:
  """Powers of two of that shape, in which names stand for sizes."""
  return None if shape is None else 2.0 ** rng.integers(-2, 3, [sizes.get(d, d) for d in shape])


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  for axis, (have, want) in enumerate(zip(scale.shape, shape, strict=True)):
    scale = scale if have in (1, want) else np.repeat(scale, want // have, axis)
  return scale


GMM_SCALES = {
  "none": (None, None),
  "weights only, per column": (None, (1, 1, "n")),
  "tensor": ((1, 1), (1, 1, 1)),
  "channel": (("m", 1), (1, 1, "n")),
  "channel per group": (("m", 1), ("g", 1, "n")),
  "blocks of lhs": (("m", 4), (1, 1, "n")),
  "blocks of weights": (("m", 1), ("g", 4, "n")),
  "equal blocks": (("m", 4), ("g", 4, "n")),
  "unequal blocks": (("m", 6), ("g", 4, "n")),
  "2-D blocks": (("m", 4), ("g", 4, 2)),
  "2-D blocks shared by groups": (None, (1, 4, 2)),
  "blocks of one": (("m", 24), (1, 24, 1)),
}


@pytest.mark.parametrize("scales", GMM_SCALES.values(), ids=list(GMM_SCALES))
@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("float8_e4m3fn", "int4")], ids=str)
def test_scales_of_gmm(scales, dtypes):
  """Power-of-two scales keep integers exact, so each granularity must hit the right element (QNT-1).

  An operand without a scale is given as float. NaN scales of unused rows and groups must not show.
  """
  m, k, n, g = 70, 24, 6, 3
  rng = np.random.default_rng(2)
  sizes = np.array([37, 0, 20])
  x, w = integers(rng, m, k), integers(rng, g, k, n)
  x_scale, w_scale = (powers(rng, shape, m=m, n=n, g=g) for shape in scales)
  want = oracle_gmm(
    x if x_scale is None else x * spread(x_scale, x.shape),
    w if w_scale is None else w * spread(w_scale, w.shape),
    sizes,
  )
  if x_scale is not None and x_scale.shape[0] == m:
    x_scale[sizes.sum() :] = np.nan
  if w_scale is not None and w_scale.shape[0] == g:
    w_scale[1] = np.nan

  def operand(values, scale, dtype):
    if scale is None:
      return jnp.asarray(values, jnp.bfloat16)
    return QArray(jnp.asarray(values, jnp.float32).astype(dtype), jnp.asarray(scale, jnp.float32))

  lhs, rhs = operand(x, x_scale, dtypes[0]), operand(w, w_scale, dtypes[1])
  np.testing.assert_array_equal(run_gmm(reference, lhs, rhs, sizes), want)
  np.testing.assert_array_equal(run_gmm(reference, lhs, rhs.swapaxes(1, 2), sizes, transpose_rhs=True), want)
  along_k = any(s is not None and s.shape[1] > 1 for s in (x_scale, w_scale))
  if not along_k:
    np.testing.assert_array_equal(run_gmm(xla, lhs, rhs, sizes), want)
    np.testing.assert_array_equal(run_gmm(xla, lhs, rhs.swapaxes(1, 2), sizes, transpose_rhs=True), want)


TGMM_SCALES = {
  "none": (None, None),
  "tensor": ((1, 1), (1, 1)),
  "columns": ((1, "k"), (1, "n")),
  "column blocks": ((1, 4), (1, 2)),
  "rows": (("m", 1), None),
  "rows and columns": (("m", 1), (1, "n")),
  "row blocks": ((7, "k"), (10, "n")),
}


@BACKENDS
@pytest.mark.parametrize("scales", TGMM_SCALES.values(), ids=list(TGMM_SCALES))
@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2"])
def test_scales_of_tgmm(backend, scales, dtype):
  """As for gmm; a scale that varies along the contracted rows goes into its operand."""
  m, k, n = 70, 8, 6
  rng = np.random.default_rng(3)
  sizes = np.array([37, 0, 20])
  x, d = integers(rng, m, k), integers(rng, m, n)
  x_scale, d_scale = (powers(rng, shape, m=m, k=k, n=n) for shape in scales)
  scaled = lambda a, scale: a if scale is None else a * spread(scale, a.shape)
  want = oracle_tgmm(scaled(x, x_scale), scaled(d, d_scale), sizes)
  if x_scale is not None and x_scale.shape[0] == m:
    x_scale[sizes.sum() :] = np.nan

  def operand(values, scale):
    if scale is None:
      return jnp.asarray(values, jnp.bfloat16)
    return QArray(jnp.asarray(values, jnp.float32).astype(dtype), jnp.asarray(scale, jnp.float32))

  np.testing.assert_array_equal(run_tgmm(backend, operand(x, x_scale), operand(d, d_scale), sizes), want)


@BACKENDS
def test_nan_scale_of_all_leaves_unused_rows_and_groups_zero(backend):
  """A shared scale that is NaN spreads over what is used, and no further (GMM-3)."""
  sizes = np.array([3, 0])
  codes, scale = jnp.ones((5, 2), jnp.int8), jnp.full((1, 1), jnp.nan)
  out = run_gmm(backend, QArray(codes, scale), jnp.ones((2, 2, 4)), sizes)
  assert np.isnan(out[:3]).all()
  np.testing.assert_array_equal(out[3:], 0)
  grad = run_tgmm(backend, QArray(codes, scale), jnp.ones((5, 4)), sizes)
  assert np.isnan(grad[0]).all()
  np.testing.assert_array_equal(grad[1], 0)


FUSED = {
  "fp8 rows": Quant(qtype="float8_e4m3fn"),
  "int8 rows": Quant(qtype="int8"),
  "int8 blocks": Quant(qtype="int8", granularity=4),
  "one scale": Quant(qtype="float8_e5m2", granularity="tensor"),
}
PRESCALED = pytest.mark.parametrize("prescaled", [False, True], ids=["plain", "prescaled"])


def normal(rng: np.random.Generator, m: int, n: int) -> jax.Array:
  """Rows past 50 belong to no group and are NaN: they must not reach a scale."""
  return jnp.asarray(rng.standard_normal((m, n)), jnp.bfloat16).at[50:].set(jnp.nan)


@PRESCALED
@pytest.mark.parametrize("quant", FUSED.values(), ids=list(FUSED))
def test_gmm_that_quantizes_equals_quantizing_before(quant, prescaled):
  """Same codes, same product: what a kernel that quantizes inside is held to (QNT-8)."""
  m, k, n, g = 60, 8, 5, 3
  rng = np.random.default_rng(5)
  x, sizes = normal(rng, m, k), jnp.asarray([20, 0, 30], jnp.int32)
  w = QArray(jnp.asarray(integers(rng, g, k, n), jnp.int8), jnp.asarray(powers(rng, (g, 1, n)), jnp.float32))
  prescale = jnp.asarray(rng.uniform(0.5, 2, (g, k)), jnp.float32) if prescaled else None
  starts, ends = local_ranges(sizes, None, g)
  codes = quantize(x, quant, "rows", starts=starts, ends=ends, prescale=prescale)
  run = functools.partial(reference.gmm, preferred_element_type="float32")
  inside = jax.jit(lambda x, prescale: run(x, w, sizes, lhs_quant=quant, lhs_prescale=prescale))
  np.testing.assert_array_equal(inside(x, prescale), jax.jit(run)(codes, w, sizes))


@PRESCALED
@pytest.mark.parametrize("quant", [q for q in FUSED.values() if q.granularity != 4], ids=lambda q: q.qtype)
def test_tgmm_that_quantizes_equals_quantizing_before(quant, prescaled):
  """As for gmm, for both operands; blocks of rows come with the recipes that have them."""
  m, k, n, g = 60, 8, 5, 3
  rng = np.random.default_rng(6)
  x, d, sizes = normal(rng, m, k), normal(rng, m, n), jnp.asarray([20, 0, 30], jnp.int32)
  prescale = jnp.asarray(rng.uniform(0.5, 2, (m, 1)), jnp.float32) if prescaled else None
  starts, ends = local_ranges(sizes, None, g)
  x_codes = quantize(x, quant, "cols", starts=starts, ends=ends)
  d_codes = quantize(d, quant, "cols", starts=starts, ends=ends, prescale=prescale)
  run = functools.partial(reference.tgmm, num_groups=g, preferred_element_type="float32")
  inside = jax.jit(lambda x, d, p: run(x, d, sizes, lhs_quant=quant, dout_quant=quant, dout_prescale=p))
  np.testing.assert_array_equal(inside(x, d, prescale), jax.jit(run)(x_codes, d_codes, sizes))


def test_xla_declines_what_it_says():
  """supports and the functions agree: blocks along k and steps inside are refused, with the way out (REG-5)."""
  codes, sizes = jnp.ones((4, 8), jnp.int8), jnp.asarray([4], jnp.int32)
  w = jnp.ones((1, 8, 2), jnp.bfloat16)
  blocks = QArray(codes, jnp.ones((4, 2)))
  problem = Problem(
    pass_="fwd",
    m=4,
    k=8,
    n=2,
    num_groups=1,
    num_global_groups=1,
    lhs=operand_spec(blocks),
    rhs=operand_spec(w),
    out_dtype="float32",
  )
  steps = dataclasses.replace(problem, lhs=operand_spec(w[0], Quant(qtype="int8")))
  for refused, arguments in (
    (problem, {"lhs": blocks}),
    (steps, {"lhs": jnp.ones((4, 8)), "lhs_quant": Quant(qtype="int8")}),
  ):
    reason = xla.supports(refused)
    assert reason is not None
    assert "backend='reference'" in reason
    with pytest.raises(Unsupported, match="backend='reference'"):
      xla.gmm(rhs=w, group_sizes=sizes, preferred_element_type="float32", **arguments)
    assert reference.supports(refused) is None

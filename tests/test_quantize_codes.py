"""Codes and scales are fixed bit for bit by the recipe (SPEC QNT-2 to QNT-6, QNT-9).

Two independent judges: qwix, whose formula it is (`tiny_scale="qwix"` must give its bits), and
the formula written out in numpy, which also covers the one deliberate difference, scales
below 2^-63. bfloat16 has 65536 values, so most of this is exhaustive rather than drawn.

NaNs count as equal whatever their bits: a NaN code has no other meaning.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import qwix.pallas
from hypothesis import given, settings
from hypothesis import strategies as st

import gmm

BF16 = ml_dtypes.bfloat16
QTYPES = ("float8_e4m3fn", "float8_e5m2", "int8", "int4")
ALL_BF16 = np.arange(2**16, dtype=np.uint16).view(BF16)
FINITE_BF16 = ALL_BF16[np.isfinite(ALL_BF16.astype(np.float32))]
TINY = 2.0**-126  # the smallest normal number
CUTOFF = 2.0**-63  # qwix replaces scales below by 1

each_qtype = pytest.mark.parametrize("qtype", QTYPES)
eager_and_jit = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


def bits(x: Any) -> np.ndarray:
  """Integers that are equal where the arrays are bitwise equal or both NaN."""
  x = np.asarray(x)
  if jnp.issubdtype(x.dtype, jnp.integer):
    return x.astype(np.int64)
  unsigned = x.view(f"uint{8 * x.dtype.itemsize}").astype(np.int64)
  return np.where(np.isnan(x.astype(np.float32)), -1, unsigned)


def assert_same(got, want, *, name="", x=None):
  """Codes and scale are bitwise those of `want`; otherwise names the first element that differs."""
  assert got.scale.shape == want.scale.shape, f"{name}: scale shapes {got.scale.shape} and {want.scale.shape}"
  assert got.scale.dtype == want.scale.dtype
  assert got.qvalue.dtype == want.qvalue.dtype
  for part in ("scale", "qvalue"):
    a, b = getattr(got, part), getattr(want, part)
    differs = bits(a) != bits(b)
    if differs.any():
      at = tuple(int(i) for i in np.argwhere(differs)[0])
      of = f" of x = {np.asarray(x)[at]!r}" if x is not None and part == "qvalue" else ""
      raise AssertionError(
        f"{name}: {part}{list(at)}{of} is {np.asarray(a)[at]!r}, must be {np.asarray(b)[at]!r}; "
        f"{differs.sum()} of {differs.size} differ"
      )


def flushed(x: np.ndarray) -> np.ndarray:
  """x as float32 with subnormal numbers as zeros of their sign."""
  x = x.astype(np.float32)
  return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def to_bf16(x: np.ndarray) -> np.ndarray:
  """x rounded to bfloat16, as float32."""
  return x.astype(BF16).astype(np.float32)


def by_formula(x: np.ndarray, quant: gmm.Quant, absmax: np.ndarray):
  """The formula of SPEC QNT-2 and QNT-4 for bfloat16 x in numpy; absmax has the scale's shape."""
  with np.errstate(all="ignore"):
    scale = to_bf16(flushed(absmax) / np.float32(quant.qmax))
    if quant.tiny_scale == "qwix":
      scale = np.where(scale < CUTOFF, np.float32(1), scale)
    else:
      scale = np.where(flushed(absmax) == 0, np.float32(1), np.where(scale < TINY, np.float32(TINY), scale))
    quotient = to_bf16(flushed(x) / scale)
    if not quant.is_integer:
      codes = np.clip(quotient, -quant.qmax, quant.qmax).astype(jnp.dtype(quant.qtype))
    else:
      high = int(quant.qmax)
      codes = np.clip(np.nan_to_num(np.round(quotient), nan=0.0, posinf=high), -high - 1, high).astype(quant.qtype)
  return gmm.QArray(codes, scale.astype(BF16))


def in_qwix(x, quant: gmm.Quant, channelwise: tuple[int, ...], tiled: dict[int, int] | None = None):
  # qwix multiplies float32 factors into bfloat16 arrays and the like.
  with jax.numpy_dtype_promotion("standard"):
    return qwix.pallas.quantize(
      x, quant.qtype, channelwise_axes=channelwise, tiled_axes=tiled, calibration_method=quant.calibration
    )


# ---- exhaustive over bfloat16 ----------------------------------------------------------


@each_qtype
@eager_and_jit
@pytest.mark.parametrize("calibration", ["absmax", "absmax,0.9", "absmax,3"])
def test_every_absmax_gives_the_scale_of_qwix(qtype, wrap, calibration):
  """All 65536 values as a row of their own: its scale and code, NaN, Inf, zeros and subnormals included."""
  quant = gmm.Quant(qtype=qtype, calibration=calibration, tiny_scale="qwix")
  x = jnp.asarray(ALL_BF16[:, None])
  got = wrap(lambda x: gmm.quantize(x, quant, "rows"))(x)
  assert_same(got, wrap(lambda x: in_qwix(x, quant, (0,)))(x), x=x)


@each_qtype
@eager_and_jit
@pytest.mark.parametrize("limit", ["224", "3.3", "1e-18", "1e-20", "3e38"])
def test_every_code_of_a_fixed_range_is_that_of_qwix(qtype, wrap, limit):
  """All 65536 values in one fixed range (all finite ones for integers: qwix turns a NaN into 0 there, we do not)."""
  quant = gmm.Quant(qtype=qtype, calibration=f"fixed,-{limit},{limit}", tiny_scale="qwix")
  values = ALL_BF16[~np.isnan(ALL_BF16.astype(np.float32))] if quant.is_integer else ALL_BF16
  x = jnp.asarray(values[None])
  got = wrap(lambda x: gmm.quantize(x, quant, "rows"))(x)
  assert_same(got, wrap(lambda x: in_qwix(x, quant, ()))(x), x=x)


def rows_of_every_value(absmax: np.ndarray) -> np.ndarray:
  """One row per absmax: it, and every finite value that is not larger (0 in place of the others)."""
  fits = np.abs(FINITE_BF16.astype(np.float32)) <= absmax.astype(np.float32)[:, None]
  rows = np.where(fits, FINITE_BF16, np.zeros((), BF16))
  return np.concatenate([absmax[:, None], rows], axis=1)


# Significands that make ties, bf16 scales that are exact, rounded up and rounded down; and the ends of the range.
ABSMAX = np.array([1, 1.75, 1.9921875, 1.3984375, 1.1015625, 127.5, 448, 57344, 3.3895e38, 2.0**-56, 2.0**-51], BF16)


@each_qtype
@eager_and_jit
def test_every_code_of_a_dynamic_range_is_that_of_qwix(qtype, wrap):
  """For absmax of all kinds, all values up to it: 700,000 codes per dtype."""
  quant = gmm.Quant(qtype=qtype, tiny_scale="qwix")
  x = jnp.asarray(rows_of_every_value(ABSMAX))
  got = wrap(lambda x: gmm.quantize(x, quant, "rows"))(x)
  assert_same(got, wrap(lambda x: in_qwix(x, quant, (0,)))(x), x=x)


@each_qtype
@eager_and_jit
@pytest.mark.parametrize("tiny_scale", ["clamp", "qwix"])
def test_the_formula(qtype, wrap, tiny_scale):
  """The same, and every tiny absmax, against the formula in numpy, which knows both rules for tiny scales."""
  quant = gmm.Quant(qtype=qtype, tiny_scale=tiny_scale)
  quantize = wrap(lambda x: gmm.quantize(x, quant, "rows"))
  tiny = np.array([2.0**e * f for e in range(-133, -50, 6) for f in (1, 1.4, 1.9921875)], BF16)
  for absmax in (ABSMAX, tiny):
    x = rows_of_every_value(absmax)
    assert_same(quantize(jnp.asarray(x)), by_formula(x, quant, absmax[:, None]), x=x)


@each_qtype
def test_clamp_and_qwix_differ_below_the_cutoff_only(qtype):
  """Over every absmax: the same bits from 2^-63 on, another scale for every non-zero absmax below."""
  x = jnp.asarray(ALL_BF16[:, None])
  clamp = gmm.quantize(x, gmm.Quant(qtype=qtype), "rows")
  qwix_ = gmm.quantize(x, gmm.Quant(qtype=qtype, tiny_scale="qwix"), "rows")
  absmax = np.abs(flushed(ALL_BF16))
  with np.errstate(invalid="ignore"):
    below = (absmax > 0) & (to_bf16(absmax / np.float32(gmm.Quant(qtype=qtype).qmax)) < CUTOFF)
  assert below.sum() > 2 * 60 * 128  # both signs, at least 60 exponents of 128 significands
  np.testing.assert_array_equal((bits(clamp.scale) != bits(qwix_.scale))[:, 0], below)
  np.testing.assert_array_equal((bits(clamp.qvalue) != bits(qwix_.qvalue))[:, 0], below)
  assert (np.asarray(qwix_.qvalue)[below].astype(np.float32) == 0).all()  # flushed
  assert (np.asarray(clamp.qvalue)[below].astype(np.float32) != 0).all()


# ---- granularity -----------------------------------------------------------------------

# kind, granularity, and how qwix says it: channelwise axes, tiled axes.
GRANULARITIES = {
  "rows tensor": ("rows", "tensor", (), {}),
  "rows channel": ("rows", "channel", (0,), {}),
  "rows blocks": ("rows", 4, (0,), {1: 4}),
  "cols tensor": ("cols", "tensor", (), {}),
  "cols channel": ("cols", "channel", (1,), {}),
  "cols blocks": ("cols", 4, (1,), {0: 4}),
  "rhs tensor": ("rhs", "tensor", (), {}),
  "rhs channel": ("rhs", "channel", (2,), {}),
  "rhs channel_per_group": ("rhs", "channel_per_group", (0, 2), {}),
  "rhs blocks": ("rhs", 4, (0, 2), {1: 4}),
  "rhs 2-D blocks": ("rhs", (4, 3), (0,), {1: 4, 2: 3}),
  "rhs_t channel": ("rhs_t", "channel", (1,), {}),
  "rhs_t channel_per_group": ("rhs_t", "channel_per_group", (0, 1), {}),
  "rhs_t blocks": ("rhs_t", 4, (0, 1), {2: 4}),
  "rhs_t 2-D blocks": ("rhs_t", (4, 3), (0,), {2: 4, 1: 3}),
}
SHAPES = {"rows": (6, 8), "cols": (8, 6), "rhs": (3, 8, 6), "rhs_t": (3, 6, 8)}
# NaN, Inf, zeros, subnormals, the ends of the range, values that round to 2^-63 and past 448.
EDGES = [0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x2000, 0x2461, 0xC3E8]


@st.composite
def bf16_arrays(draw, shape: tuple[int, ...]) -> np.ndarray:
  """Bit patterns: all exponents or a narrow band of them, with a few edge values planted; shrinks to zeros."""
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
  low = draw(st.integers(0, 254), label="lowest exponent")
  high = min(254, low + draw(st.integers(0, 254), label="exponents above it"))
  exponent = rng.integers(low, high, shape, endpoint=True)
  pattern = (rng.integers(0, 2, shape) << 15) | (exponent << 7) | rng.integers(0, 128, shape)
  size = int(np.prod(shape))
  plant = st.tuples(st.integers(0, size - 1), st.sampled_from(EDGES))
  for at, edge in draw(st.lists(plant, max_size=4), label="edges"):
    pattern.reshape(-1)[at] = edge
  return pattern.astype(np.uint16).view(BF16)


@functools.cache
def _both(name: str):
  """Jitted (x -> ours, x -> qwix's), each for every dtype and calibration at once: two compiles per granularity."""
  kind, granularity, channelwise, tiled = GRANULARITIES[name]
  quants = {q: gmm.Quant(qtype=q, granularity=granularity, tiny_scale="qwix") for q in QTYPES}
  for calibration in ("absmax,0.7", "fixed,-2.5,2.5"):
    quants["float8_e4m3fn " + calibration] = gmm.Quant(
      qtype="float8_e4m3fn", granularity=granularity, tiny_scale="qwix", calibration=calibration
    )
  ours = jax.jit(lambda x: {name: gmm.quantize(x, quant, kind) for name, quant in quants.items()})
  theirs = jax.jit(lambda x: {name: in_qwix(x, quant, channelwise, tiled) for name, quant in quants.items()})
  return ours, theirs


@pytest.mark.parametrize("name", GRANULARITIES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_granularities_are_those_of_qwix(name, data):
  """Scale shapes (QNT-3), scales and codes for every operand, granularity and dtype, on drawn bit patterns."""
  x = data.draw(bf16_arrays(SHAPES[GRANULARITIES[name][0]]), label="x")
  ours, theirs = _both(name)
  want = theirs(jnp.asarray(x))
  for variant, got in ours(jnp.asarray(x)).items():
    assert_same(got, want[variant], name=variant, x=x)


# ---- float32 ---------------------------------------------------------------------------


@each_qtype
@eager_and_jit
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-40, 100))
def test_float32(qtype, wrap, granularity, seed, exponent):
  """float32 codes and scales are those of a division whose result is off by at most one rounding.

  XLA turns x / s, s shared by many x, into x * (1 / s). So: the scale is one of the (at most)
  three floats next to absmax / qmax, and a code is a rounding of x / scale times (1 + d),
  |d| <= (1 + 2^-24)^2 - 1, two roundings. Only a code that such a d decides may differ from qwix.
  """
  quant = gmm.Quant(qtype=qtype, granularity=granularity, tiny_scale="qwix")
  x = np.ldexp(np.random.default_rng(seed).standard_normal((8, 16)), exponent).astype(np.float32)
  got = _float32_ours(quant, wrap)(x)
  theirs = _float32_qwix(quant, wrap)(x)
  absmax = np.abs(x).max(axis=1 if granularity == "channel" else None, keepdims=True)
  exact = absmax / np.float32(quant.qmax)
  for result in (got, theirs):
    scale = np.asarray(result.scale)
    assert (np.abs(scale.view(np.int32) - exact.view(np.int32)) <= 1).all()
    low, high = _codes_between(x, scale, quant)
    codes = np.asarray(result.qvalue).astype(np.float64)
    assert ((low <= codes) & (codes <= high)).all()
    decided = (low == high) & (np.asarray(got.scale) == np.asarray(theirs.scale))
    np.testing.assert_array_equal(bits(got.qvalue)[decided], bits(theirs.qvalue)[decided])


@functools.cache
def _float32_ours(quant, wrap):
  return wrap(lambda x: gmm.quantize(jnp.asarray(x), quant, "rows"))


@functools.cache
def _float32_qwix(quant, wrap):
  return wrap(lambda x: in_qwix(jnp.asarray(x), quant, (0,) if quant.granularity == "channel" else ()))


def _codes_between(x, scale, quant):
  """Smallest and largest code that two float32 roundings of x / scale allow, as float64."""
  quotient, wide = x.astype(np.float64) / scale.astype(np.float64), (1 + 2.0**-24) ** 2
  ends = np.sort(np.stack([quotient * wide, quotient / wide]), axis=0)
  if quant.is_integer:
    return np.clip(np.round(ends), -int(quant.qmax) - 1, int(quant.qmax))
  return np.clip(ends, -quant.qmax, quant.qmax).astype(jnp.dtype(quant.qtype)).astype(np.float64)


def test_scale_dtype():
  """The scale has the operand's dtype, float32 for float16 (too few exponents), float32 on request (QNT-9)."""
  quant = gmm.Quant(qtype="float8_e4m3fn")
  wide = gmm.Quant(qtype="float8_e4m3fn", scale_dtype="float32")
  x = np.array([[1.1015625, 1.1015625 / 2]])
  for dtype, q, want in (
    (jnp.bfloat16, quant, jnp.bfloat16),
    (jnp.float32, quant, jnp.float32),
    (jnp.float16, quant, jnp.float32),
    (jnp.bfloat16, wide, jnp.float32),
    (jnp.float32, wide, jnp.float32),
  ):
    got = gmm.quantize(jnp.asarray(x, dtype), q, "rows")
    assert got.scale.dtype == want
    rounded = float(jnp.asarray(np.float32(1.1015625) / np.float32(448), want))
    assert float(got.scale[0, 0]) == rounded


# ---- the named edges: SPEC QNT-4, QNT-5 --------------------------------------------------


def codes_of(values, quant: gmm.Quant, dtype=jnp.bfloat16):
  """(codes, scale) of one row as lists of floats."""
  got = gmm.quantize(jnp.asarray([values], dtype), quant, "rows")
  return np.asarray(got.qvalue[0]).astype(np.float32).tolist(), float(got.scale[0, 0])


FIXED = {
  "float8_e4m3fn": gmm.Quant(qtype="float8_e4m3fn", calibration="fixed,-448,448"),  # each range makes the scale 1
  "float8_e5m2": gmm.Quant(qtype="float8_e5m2", calibration="fixed,-57344,57344"),
  "int8": gmm.Quant(qtype="int8", calibration="fixed,-127.5,127.5"),
  "int4": gmm.Quant(qtype="int4", calibration="fixed,-7.5,7.5"),
}


@each_qtype
def test_a_zero_slice_has_scale_one(qtype):
  """No division by zero: codes are 0 and the scale 1, also where subnormals count as zero (QNT-4)."""
  quant = gmm.Quant(qtype=qtype)
  assert codes_of([0.0, -0.0, 0.0], quant) == ([0, 0, 0], 1)
  assert codes_of([2.0**-130, -(2.0**-127), 2.0**-133], quant) == ([0, 0, 0], 1)
  assert codes_of([], quant) == ([], 1)


@each_qtype
def test_a_tiny_slice_keeps_its_values(qtype):
  """The smallest scale is 2^-126: below absmax = qmax * 2^-126 codes shrink instead of the scale (QNT-4).

  qwix would make all of these 0 (scale 1).
  """
  quant = gmm.Quant(qtype=qtype)
  assert codes_of([TINY, -TINY], quant) == ([1, -1], TINY)
  assert codes_of([4 * TINY, -TINY, 0], quant) == ([4, -1, 0], TINY)
  top = float(int(quant.qmax)) * TINY
  assert codes_of([top, -top], quant) == ([int(quant.qmax), -int(quant.qmax)], TINY)
  cutoff = gmm.Quant(qtype=qtype, tiny_scale="qwix")
  assert codes_of([4 * TINY, -TINY, 0], cutoff) == ([0, 0, 0], 1)
  assert codes_of([top, -top], cutoff) == ([0, 0], 1)


@each_qtype
def test_the_cutoff_itself_is_kept(qtype):
  """A scale of exactly 2^-63 is not replaced, under either rule; the float below it is, under qwix's (QNT-4)."""
  qmax = gmm.Quant(qtype=qtype).qmax
  for tiny_scale in ("clamp", "qwix"):
    assert codes_of([qmax * CUTOFF, 0], gmm.Quant(qtype=qtype, tiny_scale=tiny_scale))[1] == CUTOFF
  below = qmax * CUTOFF * (1 - 2.0**-8)
  assert codes_of([below, 0], gmm.Quant(qtype=qtype, tiny_scale="qwix"), jnp.float32)[1] == 1
  assert codes_of([below, 0], gmm.Quant(qtype=qtype), jnp.float32)[1] == pytest.approx(below / qmax, rel=2.0**-23)


# What a value in units of the scale becomes.
SATURATED = {
  "float8_e4m3fn": {448: 448, -448: -448, 464: 448, 480: 448, -512: -448, 3e38: 448, np.inf: 448, -np.inf: -448},
  "float8_e5m2": {57344: 57344, 61440: 57344, -65536: -57344, 3e38: 57344, np.inf: 57344, -np.inf: -57344},
  "int8": {127: 127, 127.5: 127, 128: 127, -127.5: -128, -128: -128, -129: -128, np.inf: 127, -np.inf: -128},
  "int4": {7: 7, 7.5: 7, 8: 7, -7.5: -8, -8: -8, -9: -8, np.inf: 7, -np.inf: -8},
}
TIES = {
  "float8_e4m3fn": {432: 448, 400: 384, 17: 16, 19: 20, 2.0**-10: 0, 3 * 2.0**-10: 2.0**-8, 2.0**-9: 2.0**-9, -17: -16},
  "float8_e5m2": {53248: 49152, 4.5: 4, 5.5: 6, 2.0**-17: 0, 3 * 2.0**-17: 2.0**-15, 2.0**-16: 2.0**-16},
  "int8": {0.5: 0, 1.5: 2, 2.5: 2, -0.5: 0, -1.5: -2, 126.5: 126, -126.5: -126, 0.50390625: 1},
  "int4": {0.5: 0, 1.5: 2, 6.5: 6, -0.5: 0, -6.5: -6, 6.53125: 7},
}


@each_qtype
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("table", [SATURATED, TIES], ids=["saturation", "ties"])
def test_saturation_and_ties(qtype, dtype, table):
  """Never a NaN or a wrap for a large value (464 cast to e4m3fn is NaN, 128 wraps); ties go to even (QNT-2, QNT-5)."""
  want = table[qtype]
  assert codes_of(list(want), FIXED[qtype], dtype) == ([float(v) for v in want.values()], 1)


@pytest.mark.parametrize(("qtype", "low"), [("int8", -128), ("int4", -8)])
def test_the_absmax_of_integers(qtype, low):
  """absmax maps to qmax + 1/2: half to even and saturation leave +absmax one code short of -absmax (QNT-5)."""
  absmax = 4 * (-low - 0.5)  # the scale is exactly 4
  assert codes_of([absmax, -absmax], gmm.Quant(qtype=qtype)) == ([-low - 1, low], 4)


def test_a_rounded_scale_may_not_overflow_a_code():
  """A bfloat16 scale that was rounded down makes absmax / scale exceed 448 (up to 449.5): it saturates (QNT-5)."""
  absmax = (1 + np.arange(128) / 128).astype(np.float32)
  past = absmax / to_bf16(absmax / np.float32(448)) > 449
  assert past.any()
  x = jnp.asarray(absmax[past, None] * np.array([1, -1], np.float32), jnp.bfloat16)
  codes = gmm.quantize(x, gmm.Quant(qtype="float8_e4m3fn"), "rows").qvalue
  np.testing.assert_array_equal(np.asarray(codes).astype(np.float32), np.tile([448, -448], (past.sum(), 1)))


@each_qtype
def test_nan_and_inf_of_a_dynamic_range(qtype):
  """They spoil the slice that shares their scale, visibly, and no other (QNT-5)."""
  quant = gmm.Quant(qtype=qtype)
  x = jnp.asarray([[1, np.nan, 0.5], [1, np.inf, 0.5], [1, -np.inf, 0], [1, -1, 0]], jnp.bfloat16)
  got = gmm.quantize(x, quant, "rows")
  scale = np.asarray(got.scale, np.float32)[:, 0]
  np.testing.assert_array_equal(np.isnan(scale), [True, False, False, False])
  np.testing.assert_array_equal(np.isinf(scale), [False, True, True, False])
  codes = np.asarray(got.qvalue).astype(np.float32)
  if quant.is_integer:  # no NaN code: 0, and the scale tells
    np.testing.assert_array_equal(codes[:3], 0)
  else:
    inf_only = [False, True, False]
    np.testing.assert_array_equal(np.isnan(codes), [[True] * 3, inf_only, inf_only, [False] * 3])
  # Read back: the row of the NaN is NaN, an Inf is NaN with the zeros next to it (0 * Inf).
  assert np.isnan(gmm.dequantize(got)[:3]).all()
  assert_same(gmm.QArray(got.qvalue[3:], got.scale[3:]), gmm.quantize(x[3:], quant, "rows"))


@each_qtype
def test_nan_in_a_fixed_range(qtype):
  """fp8 codes carry a NaN themselves; for integers it goes into the one scale, so that it is never lost (QNT-5)."""
  codes, scale = codes_of([1.0, np.nan, -2.0], FIXED[qtype])
  if qtype.startswith("int"):
    assert np.isnan(scale)
  else:
    np.testing.assert_array_equal(codes, [1, np.nan, -2])
    assert scale == 1
  read = gmm.dequantize(gmm.quantize(jnp.asarray([[1.0, np.nan, -2.0]]), FIXED[qtype], "rows"))
  assert np.isnan(read[0, 1])


# ---- what is not used (QNT-6) ------------------------------------------------------------

ENDS = jnp.array([2, 2, 5], jnp.int32)
USED: Any = {"starts": jnp.array([0, 2, 2], jnp.int32), "ends": ENDS}  # rows 5 to 7 and group 1 are unused


@each_qtype
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("name", ["rows tensor", "rows channel", "rows blocks", "cols tensor", "cols channel"])
def test_unused_rows_reach_no_scale(qtype, garbage, name):
  """Garbage in unused rows changes no bit; their codes are 0, and their own scales, where they have one, 1."""
  kind, granularity, *_ = GRANULARITIES[name]
  quant = gmm.Quant(qtype=qtype, granularity=granularity)
  x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)), jnp.bfloat16)
  clean = gmm.quantize(x.at[5:].set(0), quant, kind, **USED)
  got = gmm.quantize(x.at[5:].set(garbage), quant, kind, **USED)
  assert_same(got, clean)
  assert not np.asarray(got.qvalue[5:]).astype(np.float32).any()
  if kind == "rows" and granularity != "tensor":
    assert (np.asarray(got.scale[5:]).astype(np.float32) == 1).all()


@each_qtype
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize(
  "name", ["rhs tensor", "rhs channel", "rhs channel_per_group", "rhs 2-D blocks", "rhs_t channel"]
)
def test_groups_without_rows_reach_no_shared_scale(qtype, garbage, name):
  """Garbage in the weights of a group without rows changes no bit of the others'."""
  kind, granularity, *_ = GRANULARITIES[name]
  quant = gmm.Quant(qtype=qtype, granularity=granularity)
  x = jnp.asarray(np.random.default_rng(0).standard_normal(SHAPES[kind]), jnp.bfloat16)
  clean = gmm.quantize(x.at[1].set(0), quant, kind, **USED)
  got = gmm.quantize(x.at[1].set(garbage), quant, kind, **USED)
  used = lambda q: gmm.QArray(*(v[jnp.array([0, 2])] if v.shape[0] == 3 else v for v in (q.qvalue, q.scale)))
  assert_same(used(got), used(clean))

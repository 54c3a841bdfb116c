"""Public faults about codes and scales: range, saturation, zero and tiny slices, blocks, shapes, what travels.

One test for each case of tests/data/faults.json; `fault` holds its sizes, data and seed. Codes
are small integers and scales powers of two where the result must be exact; the rest is held to
the derived bound on the same codes.
"""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes  # installed with JAX
import numpy as np
import pytest

import gmm
from gmm.conformance import _oracle
from gmm.conformance._bounds import backend_bound
from gmm.conformance._programs import both_ways, forward
from gmm.conformance._registry import expect_equal, expect_within

every_backend = pytest.mark.parametrize(
  "backend", ["reference", "xla", "megablox", pytest.param("tokamax_v1", marks=pytest.mark.slow)]
)
without_kernels = pytest.mark.parametrize("backend", ["reference", "xla"])
kernels = pytest.mark.parametrize("backend", ["megablox", pytest.param("tokamax_v1", marks=pytest.mark.slow)])
E4M3, E5M2 = gmm.Quant(qtype="float8_e4m3fn"), gmm.Quant(qtype="float8_e5m2")
FP8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def _both(quant):
  return gmm.Recipe(lhs=quant, rhs=quant)


def _codes(rng, shape, qtype, low=-3, high=3):
  codes = rng.integers(low, high + 1, shape).astype(np.float32)
  return jnp.asarray(codes).astype(qtype)


def _powers(shape, axis, spread):
  """Scales 2^(block index mod spread) along an axis."""
  index = np.arange(shape[axis]) % spread
  return jnp.asarray(
    np.broadcast_to(2.0 ** index.reshape([-1 if a == axis else 1 for a in range(len(shape))]), shape), jnp.float32
  )


def _identity(qtype, size=4):
  return gmm.QArray(jnp.eye(size)[None].astype(qtype), jnp.ones((1, 1, 1)))


# ---- range and saturation --------------------------------------------------------------


@without_kernels
@pytest.mark.parametrize("qtype", ["float8_e4m3fn", "float8_e5m2", "int8", "int4"])
@pytest.mark.parametrize("granularity", ["channel", "tensor", "channel_per_group", 8])
def test_qr01_zero_slices(fault, backend, qtype, granularity):
  """A row, a column and everything zero: 0/0 must not make a NaN scale; zeros give zeros, forward and backward."""
  rhs = fault.rhs
  rhs[0, :, 2] = 0
  lhs = fault.lhs
  lhs[1] = 0
  quant = gmm.Quant(qtype=qtype, granularity=granularity)
  for a, b in ((lhs, rhs), (np.zeros_like(lhs), np.zeros_like(rhs))):
    q = gmm.quantize(jnp.asarray(a), quant)
    assert np.isfinite(q.scale).all()
    assert (q.scale > 0).all()
    assert not np.any(q.qvalue[1].astype(jnp.float32))
    if granularity == 8 and backend == "xla":
      with pytest.raises(gmm.Unsupported, match="reference"):
        gmm.gmm(a, b, fault.sizes, backend=backend, recipe=_both(quant))
      continue
    run = both_ways(gmm.get_backend(backend), recipe=gmm.Recipe(lhs=quant, rhs=quant, dout=quant))
    out, *gradients = run(a, b, fault.sizes, fault.dout)
    assert all(np.isfinite(x).all() for x in (out, *gradients))
    assert not np.any(out[1])
    assert not np.any(out[:4, 2])
    assert np.any(out) == np.any(a)


@every_backend
def test_qr03_tiny_rows(fault, backend):
  """Rows whose absmax / 448 is subnormal: no NaN or Inf from a flushed scale, and what is normal stays accurate."""
  amax = np.array([1e-35, 1.2e-36, 6.3e-38, 1.2e-38, 1e-40, 9.2e-41, 0, 1])
  weights = gmm.QArray(jnp.eye(32, 8)[None].astype("float8_e4m3fn"), jnp.ones((1, 1, 1)))
  for dtype in ("float32", "bfloat16"):
    lhs = fault.lhs.astype(np.float64)
    lhs = jnp.asarray(lhs / np.abs(lhs).max(1, keepdims=True) * amax[:, None], dtype)
    q = gmm.quantize(lhs, E4M3)
    assert np.isfinite(q.scale).all()
    assert (q.scale >= 2.0**-126).all()
    wide, scale = np.asarray(lhs).astype(np.float64), np.asarray(q.scale).astype(np.float64)
    error = np.abs(np.asarray(q.qvalue).astype(np.float64) * scale - wide)
    assert (error <= _step(wide, scale)).all()
    out = gmm.gmm(lhs, weights, fault.sizes, backend=backend, recipe=gmm.Recipe(lhs=E4M3, rhs=E4M3))
    # An identity as weights: out is the dequantized lhs, or zero where it is subnormal.
    exact = (np.asarray(q.qvalue).astype(np.float64) * scale)[:, :8]
    got = np.asarray(out).astype(np.float64)
    flushed = (got == 0) & (np.abs(exact) < 2.0**-125)
    rounded = np.asarray(jnp.asarray(exact, jnp.float32).astype(dtype)).astype(np.float64)
    np.testing.assert_array_equal(got[~flushed], rounded[~flushed])


def _step(x, scale):
  """SPEC QNT-12: the largest |codes * scale - x| of e4m3fn, plus what a platform flushes."""
  h, smallest, most = 2.0**-4, 2.0**-9, 448.0
  saturated = np.maximum(np.abs(x) - most * scale, 0)
  return np.abs(x) * (h * (1 + 2.0**-8) + 2.0**-8) + scale * smallest + saturated + 2.0**-126


@every_backend
def test_qr05_saturates_before_the_cast(fault, backend):
  """Values past a fixed range become its ends: a plain cast to e4m3fn makes them NaN."""
  values = np.array(
    [[0.5, 1.0, 1.04, 2.0], [1e4, -1e4, -0.5, -1.0], [0, 1, 464, 465], [1e30, -1e30, 3, -3]], np.float32
  )
  recipe = _both(gmm.Quant(qtype="float8_e4m3fn", calibration="fixed,-1,1"))
  out = gmm.gmm(
    values,
    np.eye(4, dtype=np.float32)[None],
    fault.sizes,
    backend=backend,
    recipe=recipe,
    preferred_element_type="bfloat16",
  )
  expect_equal(out.astype(jnp.float32), values.clip(-1, 1), "out")


@every_backend
def test_qr06_e5m2_saturates_below_inf(fault, backend):
  """e5m2 has an Inf, which a gradient past the range would become: it is 57344 instead."""
  row = np.array([57344, 61439, 61440, 1e6], np.float32)
  values = np.stack([row, -row, row, row])
  recipe = _both(gmm.Quant(qtype="float8_e5m2", calibration="fixed,-57344,57344"))
  out = gmm.gmm(values, _identity("float8_e5m2"), fault.sizes, backend=backend, recipe=recipe)
  expect_equal(out, np.sign(values) * np.float32(57344), "out")


@without_kernels
def test_qr08_int8_ends(fault, backend):
  """int8 is asymmetric by design: -128 and 127 at the ends, ties to even, saturation and never a wrap."""
  half = np.array([127.5, 127.49, 126.5, 1.5, 0.5, 2.5, 100, 3 * 127.5], np.float32)
  lhs = np.stack([half, -half, half, -half])
  lhs[:2, -1] = 1  # absmax of these rows is 127.5
  codes = np.array([127, 127, 126, 2, 0, 2, 100, 127], np.int8)
  expected = np.stack([codes, np.where(codes == 127, [-128, -127, 0, 0, 0, 0, 0, -128], -codes)] * 2).astype(np.int8)
  expected[:2, -1] = [1, 1]
  dynamic, fixed = gmm.Quant(qtype="int8"), gmm.Quant(qtype="int8", calibration="fixed,-127.5,127.5")
  expect_equal(gmm.quantize(jnp.asarray(lhs[:2]), dynamic).qvalue, expected[:2], "codes of absmax")
  expect_equal(gmm.quantize(jnp.asarray(lhs), fixed).qvalue, expected, "codes of a fixed range")
  weights = gmm.QArray(jnp.eye(8, 4)[None].astype(jnp.int8), jnp.ones((1, 1, 1)))
  out = gmm.gmm(lhs, weights, fault.sizes, backend=backend, recipe=_both(fixed))
  expect_equal(out, expected[:, :4].astype(np.float32), "out")


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  x=hypothesis.extra.numpy.arrays(
    np.float32, (2, 64), elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
  )
)
def test_qr11_round_trip(x):
  """Any finite float32, huge and subnormal: a code within the range, a finite positive scale, one step of error."""
  q = _QUANTIZE(x)
  codes, scale = np.asarray(q.qvalue).astype(np.float64), np.asarray(q.scale).astype(np.float64)
  assert np.isfinite(scale).all()
  assert (scale > 0).all()
  assert (np.abs(codes) <= 448).all()
  wide = x.astype(np.float64)
  assert (np.abs(codes * scale - wide) <= _step(wide, scale)).all()


_QUANTIZE = jax.jit(lambda x: gmm.quantize(x, E4M3))


def test_qs05_divisor_of_each_format():
  """The largest number of a format has scale one and comes back exactly: the divisor belongs to the dtype."""
  for qtype, dtype in FP8.items():
    most = float(ml_dtypes.finfo(dtype).max)
    q = gmm.quantize(jnp.array([[most, 1.0, -most / 2, 0]], jnp.float32), gmm.Quant(qtype=qtype))
    assert q.scale == 1
    np.testing.assert_array_equal(gmm.dequantize(q), [[most, 1.0, -most / 2, 0]])
  for qtype, most in (("int8", 127.5), ("int4", 7.5)):
    q = gmm.quantize(jnp.array([[-most, 1.0, 2.0, 0]], jnp.float32), gmm.Quant(qtype=qtype))
    assert q.scale == 1
    np.testing.assert_array_equal(q.qvalue.astype(jnp.int8), [[-most - 0.5, 1, 2, 0]])
  for qtype in ("float8_e4m3fnuz", "float8_e4m3b11fnuz"):
    with pytest.raises(ValueError, match="is not one of float8_e4m3fn, float8_e5m2, int8, int4"):
      gmm.Quant(qtype=qtype)


# ---- blocks ----------------------------------------------------------------------------


def _refused_elsewhere(lhs, rhs, sizes, word):
  """The other backends say which condition they cannot meet, and that the reference can."""
  for backend in ("xla", "megablox", "tokamax_v1"):
    with pytest.raises(gmm.Unsupported, match=rf"{word}.*reference"):
      gmm.gmm(lhs, rhs, sizes, backend=backend)


def test_dt08_int8_blocks(fault):
  """Each block of 128 is summed as integers, scaled, and added in float32: exact on these codes."""
  rng = np.random.default_rng(0)
  lhs = gmm.QArray(_codes(rng, (32, 2048), "int8", -8, 7), _powers((32, 16), 1, 4))
  rhs = gmm.QArray(_codes(rng, (2, 2048, 32), "int8", -8, 7), _powers((2, 16, 32), 1, 3))
  exact = _oracle.gmm(lhs, rhs, _oracle.ranges(fault.sizes)).value
  out = gmm.gmm(lhs, rhs, fault.sizes, backend="reference", preferred_element_type="float32")
  expect_equal(out, exact.astype(np.float32), "out")
  _refused_elsewhere(lhs, rhs, fault.sizes, "along")


@pytest.mark.parametrize("rhs_block", [1, 128, 256, 512, 1024])
def test_qs01_nested_blocks(fault, rhs_block):
  """Blocks of the two operands nest either way round; every block has another scale, so a shared one is far off."""
  rng = np.random.default_rng(0)
  codes = _codes(rng, (64, 1024), "float8_e4m3fn"), _codes(rng, (3, 1024, 128), "float8_e4m3fn")
  rhs = gmm.QArray(codes[1], _powers((3, 1024 // rhs_block, 128), 1, 8))
  for lhs_block in (128, 1024):
    lhs = gmm.QArray(codes[0], _powers((64, 1024 // lhs_block), 1, 2))
    exact = _oracle.gmm(lhs, rhs, _oracle.ranges(fault.sizes)).value.astype(np.float32)
    expect_equal(gmm.gmm(lhs, rhs, fault.sizes, backend="reference"), exact, f"out with lhs blocks of {lhs_block}")
    if (lhs_block, rhs_block) == (1024, 1024):
      for backend in ("xla", "megablox", "tokamax_v1"):
        expect_equal(gmm.gmm(lhs, rhs, fault.sizes, backend=backend), exact, f"out of {backend}")
    else:
      _refused_elsewhere(lhs, rhs, fault.sizes, "along")


def test_qs06_int4_blocks_with_row_sums(fault):
  """Rows of ones make any correction that is added per tile instead of per block visible."""
  rng = np.random.default_rng(0)
  lhs = gmm.QArray(jnp.ones((64, 1024)).astype("float8_e4m3fn"), jnp.ones((64, 1)))
  rhs = gmm.QArray(_codes(rng, (3, 1024, 64), "int4", -8, 7), _powers((3, 2, 64), 1, 2))
  exact = _oracle.gmm(lhs, rhs, _oracle.ranges(fault.sizes)).value.astype(np.float32)
  for tile_k in (128, 256, 512):
    out = gmm.gmm(lhs, rhs, fault.sizes, backend="reference", tiling=(64, tile_k, 64))
    expect_equal(out, exact, f"out with tile_k={tile_k}")
  _refused_elsewhere(lhs, rhs, fault.sizes, "int4|along")


# ---- shapes of scales, and scales that travel ------------------------------------------


@every_backend
def test_qs03_scale_shapes_are_not_guessed(fault, backend):
  """A scale has the rank of its codes and each axis means one thing, also where m, n and g are equal."""
  rng = np.random.default_rng(0)
  codes, lhs = _codes(rng, (2, 64, 32), "int8"), jnp.asarray(rng.integers(-3, 4, (32, 64)), jnp.bfloat16)
  scale = _powers((2, 1, 32), 2, 5) * jnp.array([1.0, 32.0]).reshape(2, 1, 1)
  run = forward(gmm.get_backend(backend), preferred_element_type="float32")
  for good in (scale, scale[:1], scale[:1, :, :1]):
    rhs = gmm.QArray(codes, good)
    exact = _oracle.gmm(np.asarray(lhs), rhs, _oracle.ranges(fault.sizes)).value.astype(np.float32)
    expect_equal(run(lhs, rhs, fault.sizes), exact, f"out with a scale {good.shape}")
  call = lambda rhs: gmm.gmm(lhs, rhs, fault.sizes, backend=backend)
  with pytest.raises(ValueError, match=r"int8: codes without their scale.*gmm\.QArray"):
    call(codes)
  for bad in (scale[0], scale[:, 0], scale.transpose(2, 1, 0)):
    with pytest.raises(ValueError, match=rf"rhs\.scale has shape \({bad.shape[0]}, .*\(2, 64, 32\)|first dimension"):
      call(gmm.QArray(codes, bad))
  with pytest.raises(TypeError, match=r"rhs\.scale has dtype int32"):
    call(gmm.QArray(codes, jnp.ones((2, 1, 32), jnp.int32)))
  if backend in ("reference", "xla"):
    # m == k == n == g: a scale (g, 1, n) stays "group, column", and two dimensions stay an error.
    codes, lhs, sizes = _codes(rng, (8, 8, 8), "int8"), lhs[:8, :8], np.ones(8, np.int32)
    square = jnp.asarray(2.0 ** rng.integers(0, 6, (8, 1, 8)), jnp.float32)
    rhs = gmm.QArray(codes, square)
    exact = _oracle.gmm(np.asarray(lhs), rhs, _oracle.ranges(sizes)).value.astype(np.float32)
    expect_equal(run(lhs, rhs, sizes), exact, "out where m == k == n == g")
    with pytest.raises(ValueError, match=r"\(8, 8\)"):
      gmm.gmm(lhs, gmm.QArray(codes, square[:, 0]), sizes, backend=backend)


@without_kernels
def test_qs08_scales_travel_with_the_rows(fault, backend):
  """Rows quantized on two devices and gathered keep each device's scale; one scale for all needs the global maximum."""
  factor = np.where(np.arange(64) < 32, 100, 1)[:, None]
  lhs = jnp.asarray(fault.lhs.astype(np.float32) * factor, jnp.bfloat16)
  tensor = dataclasses.replace(E4M3, granularity="tensor")
  rhs = gmm.quantize(jnp.asarray(fault.rhs), tensor, "rhs")
  mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",)), jax.sharding.PartitionSpec

  def local(x):
    q = gmm.quantize(x, tensor)
    return q.qvalue, jnp.broadcast_to(q.scale, (32, 1))

  def shared(x):
    q = gmm.quantize(x, tensor, scale_axes=("x",))
    return q.qvalue, jnp.broadcast_to(q.scale, (32, 1))

  on_mesh = lambda f: gmm.QArray(
    *jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec("x"), out_specs=(spec("x"), spec("x")), check_vma=True))(lhs)
  )
  own, one, whole = on_mesh(local), on_mesh(shared), gmm.quantize(lhs, tensor)
  assert own.scale[0] > 10 * own.scale[-1]
  expect_equal(one.qvalue, whole.qvalue, "codes under the global maximum")
  expect_equal(one.scale, jnp.broadcast_to(whole.scale, (64, 1)), "the global scale")
  for q in (own, whole):
    q = gmm.QArray(jnp.asarray(np.asarray(q.qvalue)), jnp.asarray(np.asarray(q.scale)))
    exact = _oracle.gmm(q, rhs, _oracle.ranges(fault.sizes))
    bound = backend_bound(gmm.get_backend(backend), exact, "bfloat16", ("float8_e4m3fn", "float8_e4m3fn"))
    expect_within(gmm.gmm(q, rhs, fault.sizes, backend=backend), exact.value, bound, "out")
  with pytest.raises(ValueError, match="codes without their scale"):
    gmm.gmm(own.qvalue, rhs, fault.sizes, backend=backend)


# ---- unused rows -----------------------------------------------------------------------


@kernels
def test_tr06_rows_that_share_a_tile(fault, backend):
  """NaN rows in the same tile as used ones change no bit of these, nor their scales."""
  run = forward(gmm.get_backend(backend), recipe="fp8_dynamic", tiling=(64, 128, 128))
  poisoned, clean = fault.lhs, fault.lhs
  poisoned[64:], clean[64:] = np.nan, 0
  got = run(poisoned, fault.rhs, fault.sizes)
  expect_equal(got, run(clean, fault.rhs, fault.sizes), "out")
  assert np.any(got[:64].astype(jnp.float32))
  assert not np.any(got[64:].astype(jnp.float32))

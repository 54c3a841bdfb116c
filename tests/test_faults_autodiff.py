"""Public faults about gradients: straight-through and clipping, formats of dout, NaN, and what goes missing.

One test for each case of tests/data/faults.json; `fault` holds its sizes, data and seed.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gmm
from gmm import _calibrate
from gmm.conformance import _oracle
from gmm.conformance._bounds import backend_bound
from gmm.conformance._operands import backward_operands, dtype_of
from gmm.conformance._programs import both_ways
from gmm.conformance._registry import expect_equal, expect_within
from gmm.conformance._short_blocks import short_blocks

every_backend = pytest.mark.parametrize(
  "backend", ["reference", "xla", "megablox", pytest.param("tokamax_v1", marks=pytest.mark.slow)]
)
without_kernels = pytest.mark.parametrize("backend", ["reference", "xla"])
E4M3, E5M2 = gmm.Quant(qtype="float8_e4m3fn"), gmm.Quant(qtype="float8_e5m2")


def _clipped(quant, clip=True):
  """Both operands quantized so, and the gradient outside the range zeroed or not."""
  quant = dataclasses.replace(quant, clip_gradient=clip)
  return gmm.Recipe(lhs=quant, rhs=quant)


# ---- straight-through and clipping -----------------------------------------------------


@without_kernels
def test_qb01_range_mask(fault, backend):
  """With clip_gradient a fixed range masks what lies outside, bounds included in it; without, nothing is masked."""
  lhs = np.zeros((8, 16), np.float32)
  lhs[:, :7] = [-3, -2, -1.5, 0, 2, 2.0001, 5]
  args = lhs, fault.rhs.astype(np.float32), fault.sizes, fault.dout.astype(np.float32)
  quant = dataclasses.replace(E4M3, calibration="fixed,-2,2")
  plain, masked = (
    both_ways(gmm.get_backend(backend), recipe=_clipped(quant, clip))(*args)[1] for clip in (False, True)
  )
  assert np.all(plain)  # straight through, outside the range too
  expect_equal(masked, np.where(np.abs(lhs) <= 2, plain, 0), "dlhs with clip_gradient")


@without_kernels
def test_qb11_partial_range_mask(fault, backend):
  """A range of 0.9 times the data's clips the largest elements of each slice by the same rule."""
  args = fault.lhs.astype(np.float32), fault.rhs.astype(np.float32), fault.sizes, fault.dout.astype(np.float32)
  quant = dataclasses.replace(E4M3, calibration="absmax,0.9")
  plain, masked = (both_ways(gmm.get_backend(backend), recipe=_clipped(quant, clip))(*args) for clip in (False, True))
  for name, i, axis in (("dlhs", 1, 1), ("drhs", 2, 1)):
    x = np.abs(args[i - 1])
    inside = x <= x.max(axis, keepdims=True) * np.float32(0.9)
    assert 0 < inside.sum() < x.size
    expect_equal(masked[i], np.where(inside, plain[i], 0), f"{name} with clip_gradient")


@without_kernels
def test_qb03_scale_is_a_constant(fault, backend):
  """Under absmax the scale depends on the data, and the gradient has no term of it: it is that of the dequantized."""
  b = gmm.get_backend(backend)
  lhs, rhs, dout = (x.astype(np.float32) for x in (fault.lhs, fault.rhs, fault.dout))
  _, dlhs, drhs = both_ways(b, recipe=gmm.Recipe(lhs=E4M3, rhs=E4M3))(lhs, rhs, fault.sizes, dout)
  rows = _oracle.ranges(fault.sizes)
  for name, got, exact in (
    ("dlhs", dlhs, _oracle.gmm(dout, gmm.quantize(jnp.asarray(rhs), E4M3, "rhs"), rows, transpose_rhs=True)),
    ("drhs", drhs, _oracle.tgmm(gmm.quantize(jnp.asarray(lhs), E4M3), dout, rows)),
  ):
    # The one scale counts as a rounding: of the product that moves it into dout (SPEC VJP-2).
    expect_within(got, exact.value, backend_bound(b, exact, "float32", ("float32", "float32")), name)


# ---- what dout is quantized to ---------------------------------------------------------


@without_kernels
def test_qb05_no_block_spans_two_groups(fault, backend):
  """dout in blocks of rows, were they counted from row 0, would put a small group under a large one's scale."""
  lhs, dout = (np.array(x, np.float32) for x in (fault.lhs, fault.dout))
  lhs[:10] *= 1e4
  lhs[10:32] *= 1e-4
  lhs, dout = jnp.asarray(lhs, jnp.bfloat16), jnp.asarray(dout, jnp.bfloat16)
  of_dout = dataclasses.replace(E5M2, granularity=32)
  blocks = gmm.Recipe(lhs=E4M3, rhs=E4M3, dout=of_dout)
  if backend == "xla":
    with pytest.raises(gmm.Unsupported, match="one per 32 rows"):
      gmm.tgmm(lhs, dout, fault.sizes, backend=backend, recipe=blocks)
  else:
    acts, rows = gmm.quantize(lhs, E4M3), _oracle.ranges(fault.sizes)
    starts, ends = jnp.asarray(np.array(rows, np.int32).T)
    options = {"prescale": acts.scale.astype(jnp.float32), "starts": starts, "ends": ends}
    exact = _oracle.tgmm(acts.qvalue, gmm.quantize(dout, of_dout, "cols", **options), rows)
    got = gmm.tgmm(lhs, dout, fault.sizes, backend=backend, recipe=blocks)
    bound = backend_bound(gmm.get_backend(backend), exact, "bfloat16", ("float8_e4m3fn", "float8_e5m2"))
    expect_within(got, exact.value, bound, "drhs")
  got = gmm.tgmm(lhs, dout, fault.sizes, backend=backend, recipe="fp8_dynamic")
  acts = gmm.quantize(lhs, E4M3)
  columns = gmm.quantize(dout, E5M2, "cols", prescale=acts.scale.astype(jnp.float32))
  exact = _oracle.tgmm(acts.qvalue, columns, _oracle.ranges(fault.sizes))
  types = dtype_of(acts), dtype_of(columns)
  expect_within(got, exact.value, backend_bound(gmm.get_backend(backend), exact, "bfloat16", types), "drhs")
  assert np.any(got[1].astype(jnp.float32))


@every_backend
def test_qb06_e5m2_gradients(fault, backend):
  """e5m2 codes of dout meet e4m3 codes of the weights: read in the other format they would be off by powers of two."""
  b, case = gmm.get_backend(backend), dataclasses.replace(fault, recipe="fp8_dynamic")
  small = (case.dout.astype(np.float32) * 2.0**-6).astype(case.dout.dtype)
  run = both_ways(b, recipe="fp8_dynamic")
  _, dlhs, drhs = run(case.lhs, case.rhs, case.sizes, case.dout)
  _, dlhs_small, drhs_small = run(case.lhs, case.rhs, case.sizes, small)
  rows, ((d_rows, weights), (acts, d_cols)) = _oracle.ranges(case.sizes), backward_operands(case)
  assert (dtype_of(d_rows), dtype_of(weights)) == ("float8_e5m2", "float8_e4m3fn")
  for name, got, got_small, exact, types in (
    ("dlhs", dlhs, dlhs_small, _oracle.gmm(d_rows, weights, rows, transpose_rhs=True), (d_rows, weights)),
    ("drhs", drhs, drhs_small, _oracle.tgmm(acts, d_cols, rows), (acts, d_cols)),
  ):
    bound = backend_bound(b, exact, "bfloat16", (dtype_of(types[0]), dtype_of(types[1])))
    expect_within(got, exact.value, bound, name)
    expect_equal(got_small, (got.astype(jnp.float32) * 2.0**-6).astype(got.dtype), f"{name} of 2^-6 dout")


@every_backend
def test_qb08_no_gradient_goes_missing(fault, backend):
  """Under every recipe drhs is there, in the weights' shape and dtype, not zero; codes have no gradient and say so."""
  recipes = gmm.recipe_names() if backend == "reference" else ("fp8_static", "int8_dynamic")
  for recipe in recipes if backend in ("reference", "xla") else recipes[:1]:
    rule = short_blocks(recipe, *fault.rhs.shape[1:])
    drhs = both_ways(gmm.get_backend(backend), recipe=rule)(fault.lhs, fault.rhs, fault.sizes, fault.dout)[2]
    assert (drhs.shape, drhs.dtype) == (fault.rhs.shape, fault.rhs.dtype), recipe
    assert all(np.mean(np.asarray(g) != 0) > 0.9 for g in drhs), recipe
  codes = gmm.quantize(jnp.asarray(fault.rhs), gmm.Quant(qtype="int8"), "rhs")
  loss = lambda q: gmm.gmm(fault.lhs, q, fault.sizes, backend=backend).astype(jnp.float32).sum()
  dcodes = jax.grad(loss, allow_int=True)(codes)
  assert dcodes.qvalue.dtype == jax.dtypes.float0
  assert not np.any(dcodes.scale)


# ---- NaN and zero in dout --------------------------------------------------------------


@without_kernels
def test_qb10_honest_nan(fault, backend):
  """A NaN in dout is never replaced: it takes its row of dlhs, and what shares its scale in drhs, here its column."""
  poisoned = fault.dout
  poisoned[0, 0] = np.nan
  for recipe in ("bf16", "fp8_dynamic"):
    run = both_ways(gmm.get_backend(backend), recipe=recipe)
    clean = run(fault.lhs, fault.rhs, fault.sizes, fault.dout)
    got = run(fault.lhs, fault.rhs, fault.sizes, poisoned)
    dlhs, drhs = (np.array(x, np.float32) for x in clean[1:])
    dlhs[0] = np.nan
    # One scale for each column of dout, shared by the groups: the column is NaN in all of them.
    drhs[slice(0, 1) if recipe == "bf16" else slice(None), :, 0] = np.nan
    expect_equal(got[0], clean[0], f"out of {recipe}")
    expect_equal(got[1].astype(jnp.float32), dlhs, f"dlhs of {recipe}")
    expect_equal(got[2].astype(jnp.float32), drhs, f"drhs of {recipe}")


@without_kernels
def test_qr10_zero_rows_of_dout(fault, backend):
  """A masked loss has whole rows of zero gradient, whose absmax is 0: three steps of training stay finite."""
  lhs, rhs = jnp.asarray(fault.lhs), jnp.asarray(fault.rhs)
  masked = (np.arange(64) % 4 != 0)[:, None]
  masked[16:32] = True  # and a whole group
  dout = np.where(masked, np.zeros((), fault.dout.dtype), fault.dout)
  run = both_ways(gmm.get_backend(backend), recipe="fp8_dynamic")
  for step in range(3):
    out, dlhs, drhs = run(lhs, rhs, fault.sizes, dout)
    assert all(np.isfinite(x.astype(jnp.float32)).all() for x in (out, dlhs, drhs)), step
    assert not np.any(dlhs.astype(jnp.float32)[masked[:, 0]])
    assert not np.any(drhs[1].astype(jnp.float32))
    assert np.any(drhs[0].astype(jnp.float32))
    lhs, rhs = (x - jnp.asarray(0.125, x.dtype) * d for x, d in ((lhs, dlhs), (rhs, drhs)))


# ---- unused rows -----------------------------------------------------------------------


@every_backend
def test_tr03_two_layers_and_a_router(fault, backend):
  """NaN in rows of no expert reaches no gradient of an MoE layer; a routing weight of zero would not stop it."""
  w1, w2 = jnp.asarray(fault.rhs), jnp.asarray(fault.array(4, fault.rhs.shape))
  x, weight = fault.lhs, np.abs(fault.array(5, (64,)))
  x[40:], weight[40:] = np.nan, 0

  def loss(x, w1, w2, weight):
    hidden = jax.nn.gelu(gmm.gmm(x, w1, fault.sizes, backend=backend))
    return (weight[:, None] * gmm.gmm(hidden, w2, fault.sizes, backend=backend)).sum()

  dx, dw1, dw2, dweight = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(jnp.asarray(x), w1, w2, jnp.asarray(weight))
  assert all(np.isfinite(d).all() for d in (dx, dw1, dw2, dweight))
  assert not np.any(dx[40:])
  assert not np.any(dweight[40:])
  assert np.any(dx[:40], axis=1).all()
  for d in (dw1, dw2):
    np.testing.assert_array_equal(np.any(d, axis=(1, 2)), fault.sizes > 0)


@without_kernels
@pytest.mark.parametrize("recipe", ["fp8_dynamic", "fp8_calibrated"])
def test_tr05_unused_rows_reach_no_scale(fault, backend, recipe):
  """Inf in rows of no group, of lhs and of dout, changes no scale and no bit, forward or backward."""
  results, scales = [], []
  for filler in (np.inf, 0):
    lhs, dout = fault.lhs, fault.dout
    lhs[80:], dout[80:] = filler, filler
    results.append(both_ways(gmm.get_backend(backend), recipe=recipe)(lhs, fault.rhs, fault.sizes, dout))
    ends = jnp.cumsum(jnp.asarray(fault.sizes))
    codes = functools.partial(gmm.quantize, starts=ends - 20, ends=ends)
    rule = gmm.recipe(recipe)
    assert rule.lhs is not None
    assert rule.dout is not None
    scales.append([codes(jnp.asarray(lhs), rule.lhs, "rows").scale])
    scales[-1] += [codes(jnp.asarray(dout), rule.dout, "rows").scale, codes(jnp.asarray(dout), rule.dout, "cols").scale]
  for name, dirty, clean in zip(("out", "dlhs", "drhs"), *results, strict=True):
    expect_equal(dirty, clean, name)
    assert np.any(clean.astype(jnp.float32))
  for dirty, clean in zip(*scales, strict=True):
    expect_equal(dirty, clean, "scale")


# ---- calibration -----------------------------------------------------------------------


@without_kernels
def test_tf05_calibration_inside_a_gradient(fault, backend, monkeypatch):
  """Ranges found while jit(grad) runs are those found outside, each operand reported once a call."""
  seen = []
  record = _calibrate._Watcher.record

  def counted(self, name, absmax):
    seen.append(name)
    record(self, name, absmax)

  monkeypatch.setattr(_calibrate._Watcher, "record", counted)
  rhs = jnp.asarray(fault.rhs)
  batches = [jnp.asarray(fault.lhs), jnp.asarray(fault.array(4, fault.lhs.shape))]
  loss = lambda w, x, recipe="bf16": (
    gmm.gmm(x, w, fault.sizes, backend=backend, recipe=recipe).astype(jnp.float32).sum()
  )
  inside = gmm.calibrate(lambda x: jax.jit(jax.grad(loss))(rhs, x), batches)
  assert sorted(seen) == ["lhs", "lhs", "rhs", "rhs"]
  outside = gmm.calibrate(lambda x: loss(rhs, x), batches)
  assert inside == outside
  assert inside.lhs is not None
  assert inside.rhs is not None
  assert inside.lhs.fixed_range == max(float(jnp.abs(x).max()) for x in batches)
  assert inside.rhs.fixed_range == float(jnp.abs(rhs).max())
  one, two = (jax.jit(jax.grad(loss), static_argnums=2)(rhs, batches[0], recipe) for recipe in (inside, outside))
  expect_equal(one, two, "drhs under the calibrated recipe")

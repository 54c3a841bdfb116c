"""Public faults about tiles, accumulation and layout: what a kernel does at the end of a tile, and how it rounds.

One test for each case of tests/data/faults.json; `fault` holds its sizes, data and seed.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gmm
from gmm.conformance import _oracle
from gmm.conformance._bounds import backend_bound
from gmm.conformance._case import numpy_dtype
from gmm.conformance._programs import both_ways, forward, transposed
from gmm.conformance._registry import expect_equal, expect_within

every_backend = pytest.mark.parametrize(
  "backend", ["reference", "xla", "megablox", pytest.param("tokamax_v1", marks=pytest.mark.slow)]
)
without_kernels = pytest.mark.parametrize("backend", ["reference", "xla"])
kernels = pytest.mark.parametrize("backend", ["megablox", pytest.param("tokamax_v1", marks=pytest.mark.slow)])


def _out(case):
  return _oracle.gmm(case.lhs, case.rhs, _oracle.ranges(case.sizes))


def _drhs(case):
  return _oracle.tgmm(case.lhs, case.dout, _oracle.ranges(case.sizes))


# ---- the ends of tiles -----------------------------------------------------------------


@every_backend
def test_tl01_rows_off_the_tile(fault, backend):
  """200 rows and a row tile of 128: a token count divides no tile, so the public op may not ask for it."""
  for tiling in (None, (128, 128, 128)) if backend in ("megablox", "tokamax_v1") else (None,):
    got = forward(gmm.get_backend(backend), preferred_element_type="float32", tiling=tiling)(
      fault.lhs, fault.rhs, fault.sizes
    )
    expect_equal(got, _out(fault).value.astype(np.float32), f"out with tiling={tiling}")


@every_backend
def test_tl03_every_row_count_below_a_tile(fault, backend):
  """Below one row tile all groups end inside it: counts from 1 to 33 of 33 rows, and 7 of 7."""
  backend, rng = gmm.get_backend(backend), np.random.default_rng(fault.seed)
  for m, total in (*((33, total) for total in range(1, 34)), (7, 7)):
    cuts = np.sort(rng.integers(0, total + 1, 2))
    # Small k and n: it is the rows that are off the tile.
    case = dataclasses.replace(fault, m=m, k=16, n=16, group_sizes=tuple(np.diff([0, *cuts, total]).tolist()))
    out = forward(backend, preferred_element_type="float32")(case.lhs, case.rhs, case.sizes)
    expect_equal(out, _out(case).value.astype(np.float32), f"out of {total} of {m} rows")
    drhs = transposed(backend, preferred_element_type="float32")(case.lhs, case.dout, case.sizes)
    expect_equal(drhs, _drhs(case).value.astype(np.float32), f"drhs of {total} of {m} rows")


@kernels
def test_tl05_fractions_in_the_k_tail(fault, backend):
  """160 products of 0.4 * 0.4 with tile_k = 128: a tail that is masked through an integer type drops to 20.48."""
  lhs, rhs = (np.full(x.shape, 0.4, np.float32) for x in (fault.lhs, fault.rhs))
  run = forward(gmm.get_backend(backend), tiling=(64, 128, 128))
  exact = _oracle.gmm(lhs, rhs, _oracle.ranges(fault.sizes))
  bound = backend_bound(gmm.get_backend(backend), exact, "float32", ("float32", "float32"))
  expect_within(run(lhs, rhs, fault.sizes), exact.value, bound, "out")
  np.testing.assert_allclose(exact.value, 25.6, rtol=1e-6)  # 0.4 as a float32


@kernels
def test_tl06_k_one_short_of_the_tile(fault, backend):
  """k = 511: the last tile lacks one element, whatever the tile; one that a TPU cannot take is declined."""
  for tile_k in (128, 256, 511):
    run = forward(gmm.get_backend(backend), preferred_element_type="float32", tiling=(64, tile_k, 128))
    got = run(fault.lhs, fault.rhs, fault.sizes)
    expect_equal(got, _out(fault).value.astype(np.float32), f"out with tile_k={tile_k}")
  with pytest.raises(gmm.Unsupported, match="tile_k = 64"):
    gmm.gmm(fault.lhs, fault.rhs, fault.sizes, backend=backend, tiling=(64, 64, 128))


@every_backend
def test_tl08_single_k_step_repeats(fault, backend):
  """One k step, 50 runs, the same exact result: the step that is first and last at once has raced in a kernel."""
  tiling = (128, 128, 128) if backend in ("megablox", "tokamax_v1") else None
  run = forward(gmm.get_backend(backend), preferred_element_type="float32", tiling=tiling)
  for _ in range(50):
    got = run(fault.lhs, fault.rhs, fault.sizes)
    expect_equal(got, _out(fault).value.astype(np.float32), "out")


@kernels
def test_tl10_small_outputs_are_judged_by_their_own_size(fault, backend):
  """Results of 1e-3 pass any check with an absolute tolerance: each element is held to the bound of its own terms."""
  case = dataclasses.replace(fault, group_sizes=(17, 0, 30, 11))
  lhs, rhs = ((x.astype(np.float32) * 1e-3).astype(x.dtype) for x in (case.lhs, case.rhs))
  exact = _oracle.gmm(lhs, rhs, _oracle.ranges(case.sizes))
  bound = backend_bound(gmm.get_backend(backend), exact, "bfloat16", ("bfloat16", "bfloat16"))
  assert bound.max() < 1e-6  # a zero, or another group's row, would be far outside
  for tiling in ((16, 128, 128), (64, 256, 192), (128, 128, 192), None):
    got = forward(gmm.get_backend(backend), tiling=tiling)(lhs, rhs, case.sizes)
    expect_within(got, exact.value, bound, f"out with tiling={tiling}")


# ---- accumulation and dtypes -----------------------------------------------------------


@every_backend
def test_dt01_sums_do_not_stall(fault, backend):
  """4096 ones in bfloat16 are 4096: a bfloat16 running sum stops growing at 256."""
  lhs, rhs = np.ones_like(fault.lhs), np.ones_like(fault.rhs)
  expect_equal(forward(gmm.get_backend(backend))(lhs, rhs, fault.sizes), np.full((32, 8), 4096, lhs.dtype), "out")


@kernels
def test_dt03_partial_sums_stay_float32(fault, backend):
  """Sums pass from tile to tile in float32: each tiling is within the bound of one bfloat16 rounding, so they agree."""
  b, types = gmm.get_backend(backend), ("bfloat16", "bfloat16")
  for tile_k in (128, 256, 1024):
    got = forward(b, tiling=(64, tile_k, 128))(fault.lhs, fault.rhs, fault.sizes)
    exact = _out(fault)
    expect_within(got, exact.value, backend_bound(b, exact, "bfloat16", types), f"out with tile_k={tile_k}")
  for tile_m in (8, 64):
    got = transposed(b, tiling=(tile_m, 1024, 128))(fault.lhs, fault.dout, fault.sizes)
    exact = _drhs(fault)
    expect_within(got, exact.value, backend_bound(b, exact, "bfloat16", types), f"drhs with tile_m={tile_m}")


@without_kernels
@pytest.mark.parametrize(
  ("lhs_dtype", "rhs_dtype"),
  [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float64", "float64")],
)
def test_dt05_mixed_dtypes(fault, backend, lhs_dtype, rhs_dtype):
  """gmm's result follows lhs, ragged_dot's follows both; each gradient has its own operand's dtype."""
  with jax.enable_x64(lhs_dtype == "float64"):
    lhs, rhs = jnp.asarray(fault.lhs, lhs_dtype), jnp.asarray(fault.rhs, rhs_dtype)
    out, pullback = jax.vjp(lambda a, b: gmm.gmm(a, b, fault.sizes, backend=backend), lhs, rhs)
    dlhs, drhs = pullback(jnp.ones_like(out))
    assert (out.dtype, dlhs.dtype, drhs.dtype) == (lhs.dtype, lhs.dtype, rhs.dtype)
    both = gmm.ragged_dot(lhs, rhs, fault.sizes, backend=backend)
    with jax.numpy_dtype_promotion("standard"):
      assert both.dtype == jnp.result_type(lhs, rhs)
    for got in (out, both):
      exact = _oracle.gmm(np.asarray(lhs), np.asarray(rhs), _oracle.ranges(fault.sizes))
      wide = "float64" if lhs_dtype == "float64" else "float32" if lhs_dtype != rhs_dtype else lhs_dtype
      bound = backend_bound(gmm.get_backend(backend), exact, got.dtype.name, (wide, wide))
      expect_within(got, exact.value, bound, f"out of {lhs_dtype} and {rhs_dtype}")
  with pytest.raises(ValueError, match=r"float8_e4m3fn: codes without their scale.*gmm\.QArray"):
    gmm.gmm(jnp.asarray(fault.lhs, jnp.float8_e4m3fn), jnp.asarray(fault.rhs), fault.sizes, backend=backend)


@kernels
def test_dt05_kernels_refuse_float64(fault, backend):
  """A kernel that multiplies float32 at most says so, instead of rounding float64 operands."""
  with jax.enable_x64(True), pytest.raises(gmm.Unsupported, match="float64"):
    gmm.gmm(fault.lhs.astype(np.float64), fault.rhs.astype(np.float64), fault.sizes, backend=backend)


# ---- layout and tile arguments ---------------------------------------------------------


@every_backend
def test_tp01_transposed_storage(fault, backend):
  """rhs stored [g, n, k] gives the same bits, and its gradient in that layout; k != n shows a swapped axis."""
  backend = gmm.get_backend(backend)
  args = fault.sizes, fault.dout
  plain = both_ways(backend, preferred_element_type="float32")(fault.lhs, fault.rhs, *args)
  stored = np.ascontiguousarray(fault.rhs.swapaxes(1, 2))
  other = both_ways(backend, preferred_element_type="float32", transpose_rhs=True)(fault.lhs, stored, *args)
  expect_equal(plain[0], _out(fault).value.astype(np.float32), "out")
  expect_equal(plain[2], _drhs(fault).value.astype(numpy_dtype("bfloat16")), "drhs")
  for name, one, two in zip(("out", "dlhs", "drhs"), plain, (*other[:2], other[2].swapaxes(1, 2)), strict=True):
    expect_equal(two, one, f"{name} with transpose_rhs")


@without_kernels
def test_tp03_views(fault, backend):
  """How the weights lie in memory (transposed, strided, broadcast, reversed) never shows."""
  rhs = fault.rhs
  strided = np.zeros((4, *rhs.shape[1:]), rhs.dtype)[::2]
  strided[:] = rhs
  views = {
    "swapaxes": np.ascontiguousarray(rhs.swapaxes(1, 2)).swapaxes(1, 2),
    "stride 2": strided,
    "broadcast": np.broadcast_to(rhs[:1], rhs.shape),
    "reversed": rhs[::-1, ::-1],
  }
  for name, view in views.items():
    exact = _oracle.gmm(fault.lhs, view.copy(), _oracle.ranges(fault.sizes)).value.astype(np.float32)
    for weights in (view, jnp.asarray(view)):
      expect_equal(gmm.gmm(fault.lhs, weights, fault.sizes, backend=backend), exact, f"out of {name} weights")
  # The same views made by XLA, where the layout is the compiler's to choose.
  run = jax.jit(lambda w: gmm.gmm(fault.lhs, w.swapaxes(1, 2)[::-1], fault.sizes, backend=backend))
  exact = _oracle.gmm(fault.lhs, rhs[::-1], _oracle.ranges(fault.sizes)).value.astype(np.float32)
  expect_equal(run(np.ascontiguousarray(rhs.swapaxes(1, 2))), exact, "out of views under jit")


@kernels
def test_vm03_each_pass_gets_its_own_tile(fault, backend):
  """Tiles given for one pass are that pass's grid and no other's, seen in the jaxpr; a wrong form is an error."""
  lhs, rhs, sizes = fault.lhs, fault.rhs, fault.sizes
  fwd, dlhs, drhs = (8, 128, 128), (16, 128, 256), (32, 256, 128)

  def tiles(tiling):
    op = lambda a, b: gmm.gmm(a, b, sizes, backend=backend, tiling=tiling).astype(jnp.float32).sum()
    text = str(jax.make_jaxpr(jax.grad(op, (0, 1)))(lhs, rhs))
    return [tile for tile in (fwd, dlhs, drhs) if f"tile={tile}" in text]

  assert tiles((*fwd, *dlhs, *drhs)) == [fwd, dlhs, drhs]
  assert tiles(gmm.Tiling(fwd=fwd)) == [fwd]
  assert tiles(gmm.Tiling(drhs=drhs)) == [drhs]
  assert tiles(None) == []
  for wrong in ((128, 128), (8, 128, 128, 8), "128"):
    with pytest.raises(ValueError, match=r"\(tile_m, tile_k, tile_n\).*nine"):
      gmm.gmm(lhs, rhs, sizes, backend=backend, tiling=wrong)

"""Public faults about groups, rows and NaN: which rows a group owns, and what nobody owns.

One test for each case of tests/data/faults.json (`fault` holds its sizes, data and seed), on
integers, so that every backend must be exact. Most run forward and both gradients.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gmm
from gmm.conformance import _oracle
from gmm.conformance._case import numpy_dtype
from gmm.conformance._programs import both_ways, forward, transposed
from gmm.conformance._registry import expect_equal

# Kernels run where the case is about them: interpreted, each new shape costs seconds.
without_kernels = pytest.mark.parametrize("backend", ["reference", "xla"])
every_backend = pytest.mark.parametrize(
  "backend", ["reference", "xla", "megablox", pytest.param("tokamax_v1", marks=pytest.mark.slow)]
)


def _exact(case, rows=None):
  """float64 (out, dlhs, drhs) of the case's own arrays."""
  rows = _oracle.ranges(case.sizes) if rows is None else rows
  out = _oracle.gmm(case.lhs, case.rhs, rows).value
  dlhs = _oracle.gmm(case.dout, case.rhs, rows, transpose_rhs=True).value
  return out, dlhs, _oracle.tgmm(case.lhs, case.dout, rows).value


def _expect_exact(backend, case, *, lhs=None, rhs=None, dout=None, sizes=None, out_dtype=None, rows=None, **static):
  """Runs the backend on the case, with some arrays poisoned; the results are those of the clean arrays."""
  given = lambda poisoned, clean: clean if poisoned is None else poisoned
  out_dtype = out_dtype or case.dtype
  run = both_ways(gmm.get_backend(backend), preferred_element_type=out_dtype, **static)
  got = run(given(lhs, case.lhs), given(rhs, case.rhs), given(sizes, case.sizes), given(dout, case.dout))
  for name, x, exact, dtype in zip(
    ("out", "dlhs", "drhs"), got, _exact(case, rows), (out_dtype, case.dtype, case.dtype), strict=True
  ):
    expect_equal(x, exact.astype(numpy_dtype(dtype)), f"{name} of {backend}")


def _integers(case, **changes):
  return dataclasses.replace(case, data="integers", **changes)


# ---- shapes and patterns of groups -----------------------------------------------------


@without_kernels
def test_tr10_sizes_that_sum_to_m(fault, backend):
  """A sum of exactly m is legal and the last row is computed: an off-by-one bound refuses or drops it."""
  assert fault.used == fault.m
  _expect_exact(backend, fault)
  np.testing.assert_array_equal(_exact(fault)[0][-1], fault.lhs[-1] @ fault.rhs[-1])


@every_backend
def test_ap04_padding_belongs_to_no_group(fault, backend):
  """Rows that are added to fill a tile enter neither the result nor the last group's weights; sizes stay as given."""
  sizes, before = fault.sizes, fault.sizes
  _expect_exact(backend, fault, sizes=sizes)
  np.testing.assert_array_equal(sizes, before)


def test_ap05_ids_of_no_expert():
  """Ids of padding slots (negative, or past the last expert) count for no group, so no garbage row is multiplied."""
  valid = np.repeat(np.arange(4), 10)
  ids = np.random.default_rng(0).permutation(np.concatenate([valid, [-1] * 8, [4] * 8, [2**31 - 1] * 8]))
  for dtype in (jnp.int32, jnp.int16, jnp.int8):
    sizes = gmm.group_sizes_from_ids(jnp.asarray(ids.clip(-1, 100), dtype), 4)
    np.testing.assert_array_equal(sizes, [10, 10, 10, 10])
  np.testing.assert_array_equal(jax.jit(gmm.group_sizes_from_ids, static_argnums=1)(jnp.asarray(ids), 4), [10] * 4)


@every_backend
def test_eg07_no_group_has_rows(fault, backend):
  """A rank can receive no token at all: zeros of the right shapes, and the NaN of unused rows stays out."""
  lhs = fault.lhs
  lhs[::2] = np.nan
  _expect_exact(backend, fault, lhs=lhs)


@every_backend
def test_dg02_contracting_nothing(fault, backend):
  """k = 0 is a sum of nothing: zeros forward, and a gradient of the weights' own empty shape."""
  _expect_exact(backend, fault)
  assert _exact(fault)[2].shape == (2, 0, 16)


@every_backend
def test_dg04_one_row_in_each_group(fault, backend):
  """Many groups share a tile: row i meets rhs[i] alone, drhs[i] is one outer product."""
  case = dataclasses.replace(fault, group_sizes=(1,) * 16)
  _expect_exact(backend, case, out_dtype="float32")


@every_backend
def test_dg05_router_collapse(fault, backend):
  """All rows in one group, first, last or inner: the dense product, and zero gradients for every other expert."""
  for lucky in (0, 7, 3):
    case = dataclasses.replace(fault, group_sizes=tuple(512 * (j == lucky) for j in range(8)))
    _expect_exact(backend, case, out_dtype="float32")


# ---- empty groups ----------------------------------------------------------------------


@every_backend
def test_eg01_most_groups_unused(fault, backend):
  """Experts without tokens get an exactly zero gradient, where a kernel that skips their block returns old memory."""
  cuts = np.sort(np.random.default_rng(0).integers(0, 33, 5))
  case = _integers(fault, group_sizes=(*np.diff([0, *cuts, 32]).tolist(), *[0] * 12))
  ones = np.ones_like(case.dout)
  drhs = both_ways(gmm.get_backend(backend))(case.lhs, case.rhs, case.sizes, ones)[2]
  expect_equal(drhs, _oracle.tgmm(case.lhs, ones, _oracle.ranges(case.sizes)).value.astype(np.float32), "drhs")
  assert not np.any(drhs[6:])


@every_backend
def test_eg03_nothing_left_of_an_earlier_call(fault, backend):
  """An inner empty group has no step to clear its block: after a call on huge values it must be zero all the same."""
  run = transposed(gmm.get_backend(backend), preferred_element_type="float32")
  jax.block_until_ready(run(np.full_like(fault.lhs, 1e30), np.full_like(fault.dout, 1e30), fault.sizes))
  got = run(fault.lhs, fault.dout, fault.sizes)
  expect_equal(got, _exact(fault)[2].astype(np.float32), "drhs after a call on 1e30")


@pytest.mark.parametrize("backend", ["megablox", "tokamax_v1"])
@pytest.mark.parametrize("tile_m", [8, 16, 32, 128])
def test_eg05_empty_groups_inside_a_tile(fault, backend, tile_m):
  """Empty groups that start inside a row tile own no row of it, whatever the tile."""
  run = forward(gmm.get_backend(backend), preferred_element_type="float32", tiling=(tile_m, 128, 128))
  out = run(fault.lhs, fault.rhs, fault.sizes)
  expect_equal(out, _exact(fault)[0].astype(np.float32), f"out with tile_m={tile_m}")


@every_backend
def test_eg06_existing_out_is_one_documented_thing(fault, backend):
  """existing_out only fills rows of no group, partial_sum is added; tgmm has neither and says so."""
  seven = np.full((fault.m, fault.n), 7, np.float32)
  exact = _exact(fault)[0].astype(np.float32)
  run = lambda **extra: gmm.gmm(fault.lhs, fault.rhs, fault.sizes, backend=backend, **extra)
  expect_equal(run(existing_out=seven), exact, "out with existing_out")
  expect_equal(run(partial_sum=seven), exact + 7, "out with partial_sum")
  drhs = gmm.tgmm(fault.lhs, fault.dout, fault.sizes, backend=backend)
  expect_equal(drhs, _exact(fault)[2].astype(np.float32), "drhs")
  with pytest.raises(TypeError, match="existing_out"):
    gmm.tgmm(fault.lhs, fault.dout, fault.sizes, existing_out=drhs)  # pyright: ignore[reportCallIssue] -- refused


# ---- shards of the groups, and sizes ---------------------------------------------------


@every_backend
def test_go01_shard_of_the_experts(fault, backend):
  """A shard computes its own groups' rows, at their global positions, and exact zeros elsewhere."""
  out, dlhs, drhs = both_ways(gmm.get_backend(backend))(fault.lhs, fault.rhs[2:6], fault.sizes, fault.dout, np.int32(2))
  mine = ((np.arange(64) >= 16) & (np.arange(64) < 48))[:, None]
  exact = [x.astype(np.float32) for x in _exact(fault)]
  expect_equal(out, np.where(mine, exact[0], 0), "out")
  expect_equal(dlhs, np.where(mine, exact[1], 0), "dlhs")
  expect_equal(drhs, exact[2][2:6], "drhs")


@every_backend
def test_go03_every_form_of_group_offset(fault, backend):
  """A Python int, a scalar, a (1,) array and a traced offset mean the same; none is 'unhashable'."""
  op = lambda offset: gmm.gmm(fault.lhs, fault.rhs[1:3], fault.sizes, backend=backend, group_offset=offset)
  exact = _exact(fault)[0].astype(np.float32)
  exact[:4] = exact[12:] = 0
  for form in (1, np.int64(1), jnp.int32(1), jnp.array([1]), np.array([1], np.uint8)):
    expect_equal(op(form), exact, f"out with group_offset={form!r}")
  expect_equal(jax.jit(op)(jnp.array([1])), exact, "out with a traced group_offset")


@every_backend
def test_go06_more_rows_than_the_buffer(fault, backend):
  """Local sizes past the receive buffer: an error when they can be seen, else rows cut at m in order."""
  sizes = np.array([20, 8, 15, 7], np.int32)
  case = _integers(fault, group_sizes=(20, 8, 4, 0))
  _expect_exact(backend, case, sizes=sizes)
  with pytest.raises(ValueError, match=r"sum to 50.*m = 32"):
    gmm.gmm(case.lhs, case.rhs, sizes, backend=backend)


@every_backend
def test_gs01_narrow_size_dtypes(fault, backend):
  """Three groups of 100 do not add up inside int8: whatever integer dtype the sizes have, the result is the same."""
  case = _integers(fault, dtype="float32", group_sizes=(100, 100, 100))
  exact = [x.astype(np.float32) for x in _exact(case)]
  for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"):
    op = lambda a, b, d=dtype: gmm.gmm(a, b, case.sizes.astype(d), backend=backend)
    out, pullback = jax.vjp(op, jnp.asarray(case.lhs), jnp.asarray(case.rhs))
    for name, got, want in zip(("out", "dlhs", "drhs"), (out, *pullback(jnp.asarray(case.dout))), exact, strict=True):
      expect_equal(got, want, f"{name} with {dtype} sizes")
  with jax.enable_x64(True):
    out = gmm.gmm(case.lhs, case.rhs, jnp.asarray(case.sizes, jnp.int64), backend=backend)
    expect_equal(out, exact[0], "out with int64 sizes on the device")


@every_backend
def test_gs03_sum_past_m(fault, backend):
  """[5, 5, 5] for 8 rows is an error when concrete; traced it means [5, 3, 0], and nothing past row 7 is read."""
  case = dataclasses.replace(fault, group_sizes=(5, 3, 0))
  _expect_exact(backend, case, sizes=fault.sizes)
  with pytest.raises(ValueError, match=r"sum to 15.*m = 8"):
    gmm.gmm(fault.lhs, fault.rhs, fault.sizes, backend=backend)


# ---- NaN stays where it belongs --------------------------------------------------------


@every_backend
def test_ni01_weights_of_an_empty_group(fault, backend):
  """NaN weights that no row uses reach no row: a product masked by zero would spread them to all."""
  case = _integers(fault)
  rhs = case.rhs
  rhs[1] = np.nan
  _expect_exact(backend, case, rhs=rhs)
  if backend in ("reference", "xla"):
    expect_equal(gmm.gmm(case.lhs, rhs, case.sizes, backend=backend), _exact(case)[0].astype(np.float32), "out, eager")


@every_backend
def test_ni03_one_bad_token(fault, backend):
  """A NaN row hurts its own output and its own expert's gradient, and not dlhs, which does not depend on lhs."""
  case = _integers(fault)
  lhs = case.lhs
  lhs[0] = np.nan
  got = both_ways(gmm.get_backend(backend))(lhs, case.rhs, case.sizes, case.dout)
  out, dlhs, drhs = (x.astype(np.float32) for x in _exact(case))
  out[0], drhs[0] = np.nan, np.nan
  for name, x, want in zip(("out", "dlhs", "drhs"), got, (out, dlhs, drhs), strict=True):
    expect_equal(x, want, name)


@every_backend
def test_tr01_tail_rows(fault, backend):
  """Rows past the last group are exactly zero, whatever lhs holds there: most NaN reports of grouped matmuls."""
  lhs = fault.lhs
  lhs[30:] = np.nan
  _expect_exact(backend, fault, lhs=lhs)
  if backend in ("reference", "xla"):
    out = gmm.gmm(lhs, fault.rhs, fault.sizes, backend=backend)
    expect_equal(out, _exact(fault)[0].astype(np.float32), "out, eager")

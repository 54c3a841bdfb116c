"""Checks of the clauses GMM-1 to GMM-14: the forward matmul."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from gmm import _op
from gmm._protocol import Backend
from gmm._recipe import Quant
from gmm.conformance import _oracle
from gmm.conformance._bounds import backend_bound
from gmm.conformance._case import Case, numpy_dtype
from gmm.conformance._programs import both_ways, forward, jit, transposed
from gmm.conformance._registry import check, expect, expect_equal, expect_within


def _owner(case: Case) -> np.ndarray:
  return _oracle.owner_of_rows(_oracle.ranges(case.sizes), case.m)


def _expected(case: Case, rhs: np.ndarray | None = None) -> np.ndarray:
  """The exact result rounded once; for integer data."""
  exact = _oracle.gmm(case.lhs, case.rhs if rhs is None else rhs, _oracle.ranges(case.sizes))
  return exact.value.astype(case.lhs.dtype)


@check("GMM-1", "each row times the weights of its own group")
def rows_of_groups(backend: Backend, case: Case) -> float | None:
  """Integers exactly, other data within the bound."""
  got = forward(backend)(case.lhs, case.rhs, case.sizes)
  if case.data == "integers":
    expect_equal(got, _expected(case), "out", _owner(case))
    return None
  exact = _oracle.gmm(case.lhs, case.rhs, _oracle.ranges(case.sizes))
  bound = backend_bound(backend, exact, case.dtype, (case.dtype, case.dtype))
  return expect_within(got, exact.value, bound, "out", _owner(case))


@check("GMM-2", "rows of no group are exactly zero, whatever is in them", "exact")
def uncovered_rows(backend: Backend, case: Case) -> None:
  """NaN and Inf in the slack rows of lhs change nothing."""
  lhs = case.lhs
  lhs[case.used :: 2], lhs[case.used + 1 :: 2] = np.nan, np.inf
  expect_equal(forward(backend)(lhs, case.rhs, case.sizes), _expected(case), "out", _owner(case))


@check("GMM-3", "a NaN or Inf stays in its row, or in the rows of its weights' group", "exact")
def isolation(backend: Backend, case: Case) -> None:
  """Poisons one row, and the weights of one group; everything else is what it was."""
  clean, owner = _expected(case), _owner(case)
  for poison in (np.nan, np.inf):
    row, group = case.seed % case.m, case.seed % case.g
    lhs, rhs = case.lhs, case.rhs
    lhs[row, 0] = poison
    got = np.asarray(forward(backend)(lhs, case.rhs, case.sizes))
    others = np.arange(case.m) != row
    expect_equal(got[others], clean[others], f"out with lhs[{row}, 0] = {poison}", owner[others])
    if owner[row] >= 0 and np.isnan(poison):
      expect(bool(np.isnan(got[row].astype(np.float64)).all()), f"out[{row}] must be NaN, its row of lhs has one")
    rhs[group] = poison
    got = np.asarray(forward(backend)(case.lhs, rhs, case.sizes))
    others = owner != group
    expect_equal(got[others], clean[others], f"out with rhs[{group}] = {poison}", owner[others])
    if np.isnan(poison):
      reached = np.isnan(got[~others].astype(np.float64))
      expect(bool(reached.all()), f"the rows of group {group} must be NaN, its weights are")


_DEGENERATE = (
  Case(0, 4, 3, (0, 0)),
  Case(6, 0, 3, (2, 3)),
  Case(5, 1, 1, (5,)),
  Case(8, 4, 3, (0, 0, 0)),
  Case(8, 4, 3, (8, 0, 0)),
  Case(8, 4, 3, (0, 0, 8)),
  Case(9, 2, 3, (0,) * 100 + (1,) * 9 + (0,) * 147),
)


@check("GMM-4", "m = 0, k = 0, k = 1, n = 1, one group, 256 groups, more groups than rows, all empty", _DEGENERATE)
def degenerate(backend: Backend, case: Case) -> None:
  """Every shape and pattern of empty groups is legal."""
  expect_equal(forward(backend)(case.lhs, case.rhs, case.sizes), _expected(case), "out", _owner(case))


@check("GMM-5", "the outputs of shards by group_offset add up to the whole", "exact", weight=0.5)
def offset_shards(backend: Backend, case: Case) -> None:
  """Rows of groups that are not local are exactly zero, so that the sum is exact."""
  whole, total = _expected(case), np.zeros((case.m, case.n))
  owner, local = _owner(case), max(1, case.g // 2)
  for offset in {0, case.seed % (case.g - local + 1), case.g - local}:
    got = forward(backend)(case.lhs, case.rhs[offset : offset + local], case.sizes, np.int32(offset))
    mine = (owner >= offset) & (owner < offset + local)
    expect_equal(got, np.where(mine[:, None], whole, 0).astype(whole.dtype), f"out with group_offset={offset}", owner)
  if case.g % 2 == 0:
    for offset in (0, local):
      total += np.asarray(forward(backend)(case.lhs, case.rhs[offset : offset + local], case.sizes, np.int32(offset)))
    expect_equal(total.astype(whole.dtype), whole, "sum over shards", owner)


@check("GMM-5", "an int, a scalar, a (1,) array and a traced group_offset mean the same", "short", weight=0.3)
def offset_forms(backend: Backend, case: Case) -> None:
  """All forms of the argument, outside jit too."""
  rhs, expected = case.rhs[1:2], np.where((_owner(case) == 1)[:, None], _expected(case), 0).astype(case.lhs.dtype)
  for offset in (1, np.int8(1), jnp.int32(1), jnp.array([1]), np.array([1], np.uint32)):
    got = _op.gmm(case.lhs, rhs, case.sizes, backend=backend, group_offset=offset)
    expect_equal(got, expected, f"out with group_offset={offset!r}", _owner(case))


@check("GMM-6", "group_sizes of any integer dtype", "short", weight=0.5)
def sizes_of_any_dtype(backend: Backend, case: Case) -> None:
  """The dtype of the sizes never matters."""
  for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
    got = _op.gmm(case.lhs, case.rhs, case.sizes.astype(dtype), backend=backend)
    expect_equal(got, _expected(case), f"out with {dtype} sizes", _owner(case))


@check("GMM-6", "under jit a negative size counts as 0 and rows are cut at m", "short", weight=0.5)
def sizes_out_of_range(backend: Backend, case: Case) -> None:
  """The defined meaning of sizes that would be an error if they were concrete."""
  sizes = case.sizes.copy()
  sizes[case.seed % case.g] = -3
  sizes[-1] += case.m
  # Three groups: what the last one asks for is cut at m.
  cut = np.maximum(sizes, 0)
  cut[-1] = min(cut[-1], case.m - cut[:-1].sum())
  rows = _oracle.ranges(cut)
  exact = _oracle.gmm(case.lhs, case.rhs, rows)
  owner = _oracle.owner_of_rows(rows, case.m)
  got = forward(backend)(case.lhs, case.rhs, sizes)
  expect_equal(got, exact.value.astype(case.lhs.dtype), f"out with sizes {sizes.tolist()}", owner)


@check("GMM-7", "sums are float32: 4096 ones make 4096 in bfloat16 too", (Case(16, 4096, 8, (9, 7), "bfloat16"),))
def accumulates_in_float32(backend: Backend, case: Case) -> None:
  """A bfloat16 running sum stalls at 256."""
  ones = np.ones_like(case.lhs), np.ones_like(case.rhs)
  expect_equal(forward(backend)(*ones, case.sizes), np.full((case.m, case.n), 4096).astype(case.lhs.dtype), "out")


@check("GMM-7", "float32 operands are multiplied at float32 precision", "short", weight=0.3)
def float32_products(backend: Backend, case: Case) -> None:
  """1 + 2^-12 in every operand: a pass through bfloat16 would lose it."""
  lhs, rhs = case.lhs * np.float32(1 + 2**-12), np.sign(case.rhs)
  exact = _oracle.gmm(lhs, rhs, _oracle.ranges(case.sizes))
  expect_equal(forward(backend)(lhs, rhs, case.sizes), exact.value.astype(np.float32), "out", _owner(case))


@check("GMM-7", "precision changes no product that bfloat16 holds", "short", weight=0.3)
def precision(backend: Backend, case: Case) -> None:
  """Small integers are exact at any precision: what is asked for is understood, and drops nothing else."""
  for name in ("default", "high", "highest"):
    got = forward(backend, precision=name)(case.lhs, case.rhs, case.sizes)
    expect_equal(got, _expected(case), f"out with precision={name!r}", _owner(case))


@check("GMM-7", "the result has the dtype of lhs, or preferred_element_type after one rounding", "exact", weight=0.5)
def result_dtype(backend: Backend, case: Case) -> None:
  """Sums of more than 8 bits: as float32 they are exact, as bfloat16 rounded once, from bfloat16 operands too."""
  lhs = (case.lhs.astype(np.float32) * 65).astype(case.lhs.dtype)
  exact = _oracle.gmm(lhs, case.rhs, _oracle.ranges(case.sizes)).value
  for dtype in ("float32", "bfloat16"):
    got = forward(backend, preferred_element_type=dtype)(lhs, case.rhs, case.sizes)
    expect_equal(got, exact.astype(numpy_dtype(dtype)), f"out as {dtype}", _owner(case))


@check(
  "GMM-8", "partial_sum is added in float32 before the one rounding; uncovered rows return it", "exact", weight=0.7
)
def partial_sum(backend: Backend, case: Case) -> None:
  """A half that a rounding before the addition would lose: 257 + 1 is 258 in bfloat16, 256 + 1 is 256."""
  lhs, rhs = np.zeros_like(case.lhs), np.zeros_like(case.rhs)
  lhs[:, 0], rhs[:, 0] = 1, np.where(case.rhs[:, 0] > 0, 257, 1).astype(rhs.dtype)
  if case.dtype == "bfloat16":  # 257 is no bfloat16 number: 256 + 1
    lhs[:, 1], rhs[:, 0] = 1, np.where(case.rhs[:, 0] > 0, 256, 0).astype(rhs.dtype)
    rhs[:, 1] = 1
  ones = np.ones((case.m, case.n), case.lhs.dtype)
  exact = _oracle.gmm(lhs, rhs, _oracle.ranges(case.sizes)).value + 1
  got = forward(backend)(lhs, rhs, case.sizes, None, ones)
  expect_equal(got, exact.astype(case.lhs.dtype), "out", _owner(case))


@check("GMM-9", "existing_out fills the rows of no group, and only those", "exact", weight=0.5)
def existing_out(backend: Backend, case: Case) -> None:
  """Covered rows ignore it, a NaN there included."""
  existing = np.where((_owner(case) >= 0)[:, None], np.nan, 7.0) * np.ones((1, case.n))
  existing = existing.astype(case.lhs.dtype)
  got = forward(backend)(case.lhs, case.rhs, case.sizes, None, None, existing)
  expected = np.where((_owner(case) >= 0)[:, None], _expected(case), existing)
  expect_equal(got, expected, "out", _owner(case))


@check("GMM-10", "transpose_rhs equals a transposed copy")
def transpose_rhs(backend: Backend, case: Case) -> float | None:
  """rhs stored [g, n, k] gives the same result."""
  stored = np.ascontiguousarray(case.rhs.swapaxes(1, 2))
  got = forward(backend, transpose_rhs=True)(case.lhs, stored, case.sizes)
  if case.data == "integers":
    expect_equal(got, _expected(case), "out", _owner(case))
    return None
  exact = _oracle.gmm(case.lhs, stored, _oracle.ranges(case.sizes), transpose_rhs=True)
  bound = backend_bound(backend, exact, case.dtype, (case.dtype, case.dtype))
  return expect_within(got, exact.value, bound, "out", _owner(case))


@check("GMM-11", "groups permute with their rows, and a group splits in two", "exact", weight=0.5)
def equivariance(backend: Backend, case: Case) -> None:
  """Needs no oracle: the backend is compared with itself on the rearranged problem."""
  run, out = forward(backend), np.asarray(forward(backend)(case.lhs, case.rhs, case.sizes))
  rows, order = _oracle.ranges(case.sizes), np.random.default_rng(case.seed).permutation(case.g)
  moved = np.concatenate([np.arange(*rows[j]) for j in order] + [np.arange(case.used, case.m)]).astype(int)
  got = np.asarray(run(case.lhs[moved], case.rhs[order], case.sizes[order]))
  expect_equal(got, out[moved], "out of permuted groups")
  # The last group's weights go to the one before it, and its rows are split between the two.
  if case.g > 1:
    both = int(case.sizes[-2:].sum())
    first = case.seed % (both + 1)
    rhs = case.rhs
    rhs[-2] = rhs[-1]
    one = run(case.lhs, rhs, np.array([*case.sizes[:-2], 0, both], np.int32))
    two = run(case.lhs, rhs, np.array([*case.sizes[:-2], first, both - first], np.int32))
    expect_equal(two, np.asarray(one), "out of a split group")


@check("GMM-11", "rows permute inside their group, and drhs does not change", "exact", weight=0.5)
def rows_inside_a_group(backend: Backend, case: Case) -> None:
  """Integer sums are exact, so their order must not show."""
  run, sums = forward(backend), transposed(backend)
  rng = np.random.default_rng(case.seed)
  moved = np.concatenate([rng.permutation(np.arange(*r)) for r in _oracle.ranges(case.sizes)] or [[]])
  moved = np.concatenate([moved, np.arange(case.used, case.m)]).astype(int)
  out = np.asarray(run(case.lhs, case.rhs, case.sizes))
  expect_equal(run(case.lhs[moved], case.rhs, case.sizes), out[moved], "out of permuted rows", _owner(case))
  drhs = np.asarray(sums(case.lhs, case.dout, case.sizes))
  expect_equal(sums(case.lhs[moved], case.dout[moved], case.sizes), drhs, "drhs of permuted rows", np.arange(case.g))


@check("GMM-11", "powers of two pass through a dynamic absmax unchanged", "quantized_short", weight=0.7)
def powers_of_two(backend: Backend, case: Case) -> None:
  """One factor per row for out and dlhs, one per operand for drhs: codes stay, so every bit but the exponent does."""
  run, rule = both_ways(backend, recipe=case.rule), case.rule
  rng = np.random.default_rng([case.seed, 4])

  def factor(quant: Quant | None, rows: int) -> np.ndarray:
    # A fixed range does not follow its operand; a scale shared by all rows follows one factor.
    if quant is not None and quant.fixed_range is not None:
      return np.ones((1, 1))
    rows = 1 if quant is not None and quant.one_scale else rows
    return 2.0 ** rng.integers(-8, 9, (rows, 1))

  times = lambda x, by: (x.astype(np.float64) * by).astype(x.dtype)
  out, dlhs, drhs = (np.asarray(x) for x in run(case.lhs, case.rhs, case.sizes, case.dout))
  for rows in (case.m, 1):
    a, b, c = factor(rule.lhs, rows), factor(rule.rhs, 1), factor(rule.dout, rows)
    got = run(times(case.lhs, a), times(case.rhs, b), case.sizes, times(case.dout, c))
    expect_equal(got[0], times(out, a * b), f"out of {case.recipe}", _owner(case))
    expect_equal(got[1], times(dlhs, b * c), f"dlhs of {case.recipe}", _owner(case))
    if rows == 1:
      expect_equal(got[2], times(drhs, a * c), f"drhs of {case.recipe}", np.arange(case.g))


@check("GMM-12", "eager, jit, scan and remat give the same bits", "short", weight=0.15)
def transforms(backend: Backend, case: Case) -> None:
  """Control flow around the op changes nothing."""
  args = case.lhs, case.rhs, case.sizes
  op = functools.partial(_op.gmm, backend=backend)
  expected = _expected(case)
  expect_equal(op(*args), expected, "out, eager")
  expect_equal(jit(jax.checkpoint(op))(*args), expected, "out under remat")
  twice = lambda lhs, rhs, sizes: jax.lax.scan(lambda c, x: (c, op(x, rhs, sizes)), 0, jnp.stack([lhs, lhs]))[1]
  expect_equal(jit(twice)(*args)[1], expected, "out under scan")
  zero = lambda lhs, rhs, sizes: jnp.zeros_like(op(lhs, rhs, sizes))
  nested = jit(lambda *args: jax.lax.cond(args[2][0] >= 0, op, zero, *args))
  expect_equal(nested(*args), expected, "out under cond")


_AXES = ((0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (1, 2, None))


@check("GMM-12", "vmap over every combination of operands equals a loop", "short", weight=0.1)
def vmap(backend: Backend, case: Case) -> None:
  """Different sizes per element included."""
  batch = [dataclasses.replace(case, seed=case.seed + i) for i in range(2)]
  sizes = np.stack([case.sizes, case.sizes[::-1]])
  for axes in _AXES:
    stacks = np.stack([c.lhs for c in batch]), np.stack([c.rhs for c in batch]), sizes
    args = [
      jnp.moveaxis(jnp.asarray(x), 0, axis) if axis is not None else x[0] for x, axis in zip(stacks, axes, strict=True)
    ]
    got = _vmapped(backend, axes)(*args)
    for i in range(2):
      lhs, rhs, s = (x[0 if axis is None else i] for x, axis in zip(stacks, axes, strict=True))
      exact = _oracle.gmm(lhs, rhs, _oracle.ranges(s))
      expect_equal(got[i], exact.value.astype(case.lhs.dtype), f"out[{i}] of vmap with in_axes={axes}")


@functools.cache
def _vmapped(backend: Backend, axes: tuple[int | None, ...]):
  return jit(jax.vmap(functools.partial(_op.gmm, backend=backend), in_axes=axes))


@check("GMM-12", "shard_map with check_vma=True", "short", weight=0.1)
def shard_map(backend: Backend, case: Case) -> None:
  """On a mesh of the devices that are there; weights by group_offset, the sum is the whole."""
  count = max(d for d in (1, 3) if d <= jax.device_count())
  out = _sharded(backend, count, case.g // count)(case.lhs, case.rhs, case.sizes)
  expect_equal(out, _expected(case), f"out under shard_map over {count} devices", _owner(case))


@functools.cache
def _sharded(backend: Backend, count: int, local: int):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("expert",))
  spec = jax.sharding.PartitionSpec

  def shard(lhs, rhs, sizes):
    offset = jax.lax.axis_index("expert") * local
    return jax.lax.psum(_op.gmm(lhs, rhs, sizes, backend=backend, group_offset=offset), "expert")

  return jit(
    jax.shard_map(shard, mesh=mesh, in_specs=(spec(), spec("expert"), spec()), out_specs=spec(), check_vma=True)
  )


@check("GMM-12", "new group sizes compile nothing", "short", weight=0.3)
def no_recompile(backend: Backend, case: Case) -> None:
  """The sizes are data, so one program serves them all."""
  run = forward(backend)
  run(case.lhs, case.rhs, case.sizes)
  before = run.programs()
  for sizes in (case.sizes[::-1], np.zeros_like(case.sizes), np.array([case.m, 0, 0], np.int32)):
    run(case.lhs, case.rhs, np.ascontiguousarray(sizes))
  expect(run.programs() == before, f"{run.programs() - before} programs were compiled for new group sizes")


@check("GMM-13", "the same bits in every run", "real_short", weight=0.3)
def same_bits(backend: Backend, case: Case) -> None:
  """On data where another order of summation would show."""
  first = np.asarray(forward(backend)(case.lhs, case.rhs, case.sizes))
  for _ in range(3):
    expect_equal(forward(backend)(case.lhs, case.rhs, case.sizes), first, "out of a second run")


@check("GMM-14", "sizes off every tile: explicit tiles change nothing", "off_tile", weight=0.3)
def off_every_tile(backend: Backend, case: Case) -> None:
  """m, k and n are no multiples of the tiles, group borders fall inside them; in every pass."""
  rows, groups = _oracle.ranges(case.sizes), np.arange(case.g)
  for tile_m in (16, 64):
    tiling = (tile_m, 128, 128)
    out, dlhs, drhs = both_ways(backend, tiling=tiling)(case.lhs, case.rhs, case.sizes, case.dout)
    expect_equal(out, _expected(case), f"out with tiling={tiling}", _owner(case))
    exact = _oracle.gmm(case.dout, case.rhs, rows, transpose_rhs=True).value.astype(case.lhs.dtype)
    expect_equal(dlhs, exact, f"dlhs with tiling={tiling}", _owner(case))
    exact = _oracle.tgmm(case.lhs, case.dout, rows).value.astype(case.lhs.dtype)
    expect_equal(drhs, exact, f"drhs with tiling={tiling}", groups)


CHECKS = (
  rows_of_groups,
  uncovered_rows,
  isolation,
  degenerate,
  offset_shards,
  offset_forms,
  sizes_of_any_dtype,
  sizes_out_of_range,
  accumulates_in_float32,
  float32_products,
  precision,
  result_dtype,
  partial_sum,
  existing_out,
  transpose_rhs,
  equivariance,
  rows_inside_a_group,
  powers_of_two,
  transforms,
  vmap,
  shard_map,
  no_recompile,
  same_bits,
  off_every_tile,
)

"""Checks of the clauses VJP-1 to VJP-8: gradients."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from gmm import _op
from gmm._protocol import Backend, Unsupported
from gmm._recipe import Quant, Recipe, recipe
from gmm.conformance import _oracle
from gmm.conformance._bounds import backend_bound
from gmm.conformance._case import Case
from gmm.conformance._operands import backward_operands, dtype_of, forward_operands
from gmm.conformance._planted import lossless
from gmm.conformance._programs import both_ways, jit
from gmm.conformance._registry import check, expect, expect_equal, expect_within


def _rows(case: Case) -> list[tuple[int, int]]:
  return _oracle.ranges(case.sizes)


def _expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
  """Exact (dlhs, drhs), rounded once; for integer data."""
  dlhs = _oracle.gmm(case.dout, case.rhs, _rows(case), transpose_rhs=True).value
  drhs = _oracle.tgmm(case.lhs, case.dout, _rows(case)).value
  return dlhs.astype(case.lhs.dtype), drhs.astype(case.rhs.dtype)


@check("VJP-1", "dlhs is dout times the transposed weights, drhs is lhs^T dout per group")
def gradients(backend: Backend, case: Case) -> float | None:
  """Integers exactly, other data within the bound of each matmul."""
  _, dlhs, drhs = both_ways(backend)(case.lhs, case.rhs, case.sizes, case.dout)
  owner = _oracle.owner_of_rows(_rows(case), case.m)
  if case.data == "integers":
    expected = _expected(case)
    expect_equal(dlhs, expected[0], "dlhs", owner)
    expect_equal(drhs, expected[1], "drhs", np.arange(case.g))
    return None
  types = case.dtype, case.dtype
  exact = _oracle.gmm(case.dout, case.rhs, _rows(case), transpose_rhs=True)
  worst = expect_within(dlhs, exact.value, backend_bound(backend, exact, case.dtype, types), "dlhs", owner)
  exact = _oracle.tgmm(case.lhs, case.dout, _rows(case))
  bound = backend_bound(backend, exact, case.dtype, types)
  return max(worst, expect_within(drhs, exact.value, bound, "drhs", np.arange(case.g)))


@check("VJP-1", "of a transposed rhs, drhs comes in its layout", "short", weight=0.5)
def transposed_gradients(backend: Backend, case: Case) -> None:
  """rhs stored [g, n, k] has a gradient [g, n, k]."""
  stored = np.ascontiguousarray(case.rhs.swapaxes(1, 2))
  _, dlhs, drhs = both_ways(backend, transpose_rhs=True)(case.lhs, stored, case.sizes, case.dout)
  expected = _expected(case)
  expect_equal(dlhs, expected[0], "dlhs")
  expect_equal(drhs, expected[1].swapaxes(1, 2), "drhs")


@check("VJP-2", "each recipe's backward multiplies the codes that SPEC's table names", "quantized", weight=2.5)
def backward_table(backend: Backend, case: Case) -> float | None:
  """Output and gradients within the bound on the same quantized operands."""
  out, dlhs, drhs = both_ways(backend, recipe=case.rule)(case.lhs, case.rhs, case.sizes, case.dout)
  owner, groups = _oracle.owner_of_rows(_rows(case), case.m), np.arange(case.g)
  lhs, rhs = forward_operands(case)
  (d_rows, weights), (acts, d_cols) = backward_operands(case)
  worst = 0.0
  for got, exact, operands, name, index in (
    (out, _oracle.gmm(lhs, rhs, _rows(case)), (lhs, rhs), "out", owner),
    (dlhs, _oracle.gmm(d_rows, weights, _rows(case), transpose_rhs=True), (d_rows, weights), "dlhs", owner),
    (drhs, _oracle.tgmm(acts, d_cols, _rows(case)), (acts, d_cols), "drhs", groups),
  ):
    types = dtype_of(operands[0]), dtype_of(operands[1])
    bound = backend_bound(backend, exact, case.dtype, types)
    worst = max(worst, expect_within(got, exact.value, bound, f"{name} of {case.recipe}", index))
  return worst


@check("VJP-2", "operands that quantize without loss give the unquantized result and gradients", "quantized_short")
def lossless_operands(backend: Backend, case: Case) -> None:
  """Power-of-two scales and integer codes, planted: exact, and the oracle has never seen `gmm.quantize`."""
  planted = lossless(case)
  got = both_ways(backend, recipe=case.rule)(planted.lhs, planted.rhs, case.sizes, planted.dout)
  owner, groups = _oracle.owner_of_rows(_rows(case), case.m), np.arange(case.g)
  for x, exact, name, index in (
    (got[0], _oracle.gmm(planted.lhs_value, planted.rhs_value, _rows(case)), "out", owner),
    (got[1], _oracle.gmm(planted.dout, planted.rhs_value, _rows(case), transpose_rhs=True), "dlhs", owner),
    (got[2], _oracle.tgmm(planted.lhs_value, planted.dout, _rows(case)), "drhs", groups),
  ):
    expect_equal(x, exact.value.astype(planted.lhs.dtype), f"{name} of {case.recipe}", index)


@check("VJP-3", "cotangents have their operand's dtype; sizes and codes have none", "short", weight=0.3)
def cotangent_dtypes(backend: Backend, case: Case) -> None:
  """A float32 result of bfloat16 lhs and float32 rhs."""
  lhs = jnp.asarray(case.lhs, jnp.bfloat16)
  run = both_ways(backend, preferred_element_type="float32")
  out, dlhs, drhs = run(lhs, case.rhs, case.sizes, case.dout)
  got = tuple(x.dtype.name for x in (out, dlhs, drhs))
  expect(got == ("float32", "bfloat16", "float32"), f"(out, dlhs, drhs) are {got}")
  expected = _expected(case)
  expect_equal(drhs, expected[1], "drhs")
  expect_equal(dlhs, expected[0].astype(dlhs.dtype), "dlhs")
  loss = lambda sizes: _op.gmm(case.lhs, case.rhs, sizes, backend=backend).sum()
  dsizes = jax.eval_shape(jax.grad(loss, allow_int=True), case.sizes)
  expect(dsizes.dtype == jax.dtypes.float0, f"the cotangent of group_sizes is {dsizes.dtype}, must be float0")
  codes = forward_operands(dataclasses.replace(case, recipe="int8_weight_only"))[1]
  dcodes = jax.grad(lambda q: _op.gmm(case.lhs, q, case.sizes, backend=backend).sum(), allow_int=True)(codes)
  expect(dcodes.qvalue.dtype == jax.dtypes.float0 and not np.any(dcodes.scale), "a QArray operand has a cotangent")


@check("VJP-4", "unused rows and empty groups have zero gradients, whatever is in them", "exact", weight=0.7)
def unused_rows(backend: Backend, case: Case) -> None:
  """NaN in the slack rows of lhs and dout and in the weights of empty groups."""
  lhs, rhs, dout = case.lhs, case.rhs, case.dout
  lhs[case.used :], dout[case.used :] = np.nan, np.nan
  rhs[case.sizes == 0] = np.nan
  _, dlhs, drhs = both_ways(backend)(lhs, rhs, case.sizes, dout)
  expected = _expected(case)
  expect_equal(dlhs, expected[0], "dlhs", _oracle.owner_of_rows(_rows(case), case.m))
  expect_equal(drhs, expected[1], "drhs", np.arange(case.g))


@check("VJP-4", "a shard's gradients by group_offset are those of its own groups", "exact", weight=0.4)
def offset_gradients(backend: Backend, case: Case) -> None:
  """The backward knows the offset too: dlhs adds up over shards, drhs concatenates."""
  local = max(1, case.g // 2)
  owner, (dlhs_whole, drhs_whole) = _oracle.owner_of_rows(_rows(case), case.m), _expected(case)
  for offset in (0, case.g - local):
    rhs = case.rhs[offset : offset + local]
    _, dlhs, drhs = both_ways(backend)(case.lhs, rhs, case.sizes, case.dout, np.int32(offset))
    mine = (owner >= offset) & (owner < offset + local)
    expect_equal(dlhs, np.where(mine[:, None], dlhs_whole, 0).astype(dlhs_whole.dtype), f"dlhs, offset {offset}", owner)
    expect_equal(drhs, drhs_whole[offset : offset + local], f"drhs, offset {offset}")


@check("VJP-5", "partial_sum gets dout everywhere, existing_out where no group covers", "short", weight=0.3)
def added_cotangents(backend: Backend, case: Case) -> None:
  """Both in their own dtype."""
  extra = jnp.zeros((case.m, case.n), jnp.bfloat16)
  covered = (_oracle.owner_of_rows(_rows(case), case.m) >= 0)[:, None]
  for name, expected in (("partial_sum", case.dout), ("existing_out", np.where(covered, 0, case.dout))):
    got = _extra_cotangent(backend, name)(case.lhs, case.rhs, case.sizes, extra, case.dout)
    expect_equal(got, expected.astype(extra.dtype), f"cotangent of {name}")


@functools.cache
def _extra_cotangent(backend: Backend, name: str):
  def run(lhs, rhs, sizes, extra, dout):
    op = lambda extra: _op.gmm(lhs, rhs, sizes, backend=backend, **{name: extra})
    return jax.vjp(op, extra)[1](dout)[0]

  return jit(run)


@check("VJP-6", "second order is exact unquantized", "short", weight=0.15)
def second_order(backend: Backend, case: Case) -> None:
  """d/drhs of <dlhs, v> is tgmm(v, dout), and d/dlhs of <drhs, w> is gmm(dout, w^T)."""
  v, w = case.array(4, (case.m, case.k)), case.array(5, (case.g, case.k, case.n))
  d_rhs, d_lhs = _second_order(backend)(case.lhs, case.rhs, case.sizes, case.dout, v, w)
  expect_equal(d_rhs, _oracle.tgmm(v, case.dout, _rows(case)).value.astype(np.float32), "d/drhs of <dlhs, v>")
  exact = _oracle.gmm(case.dout, w, _rows(case), transpose_rhs=True)
  expect_equal(d_lhs, exact.value.astype(np.float32), "d/dlhs of <drhs, w>")


@functools.cache
def _second_order(backend: Backend):
  def run(lhs, rhs, sizes, dout, v, w):
    loss = lambda lhs, rhs: (_op.gmm(lhs, rhs, sizes, backend=backend) * dout).sum()
    along_v = lambda rhs: (jax.grad(loss, 0)(lhs, rhs) * v).sum()
    along_w = lambda lhs: (jax.grad(loss, 1)(lhs, rhs) * w).sum()
    return jax.grad(along_v)(rhs), jax.grad(along_w)(lhs)

  return jit(run)


@check("VJP-6", "second order of a quantized recipe, and jvp, are errors", "short", weight=0.15)
def refused_derivatives(backend: Backend, case: Case) -> None:
  """Never a number that looks like one."""
  op = lambda lhs, **kwargs: _op.gmm(lhs, case.rhs, case.sizes, backend=backend, **kwargs)
  first = jax.grad(lambda lhs: (op(lhs, recipe="fp8_dynamic") ** 2).sum())
  try:
    jax.eval_shape(jax.grad(lambda lhs: (first(lhs) ** 2).sum()), case.lhs)
  except Unsupported:
    pass
  else:
    expect(False, "a second derivative of fp8_dynamic was returned")
  for kwargs in ({}, {"recipe": "fp8_dynamic"}):
    try:  # not under eval_shape: JAX refuses when the tangent is evaluated
      jax.jvp(lambda lhs, kwargs=kwargs: op(lhs, **kwargs), (case.lhs,), (case.lhs,))
    except TypeError:
      continue
    expect(False, f"a jvp was returned for {kwargs or 'no recipe'}")


_CLIPPED = (Case(4, 8, 4, (3,)),)


@check("VJP-7", "clip_gradient zeroes the gradient outside a static range, bounds inclusive", _CLIPPED)
def clip_gradient(backend: Backend, case: Case) -> None:
  """By default it passes straight through."""
  values = np.array([-3, -2, -1.5, 0, 2, 2.0001, 5, 1], np.float32)
  lhs, rhs = np.tile(values, (4, 1)), np.ones((1, 8, 4), np.float32)
  rhs[0, 0] = 3  # outside the weights' range
  quant = Quant(qtype="float8_e4m3fn", granularity="tensor", calibration="fixed,-2,2")
  for clip in (False, True):
    clipped = dataclasses.replace(quant, clip_gradient=clip)
    both = both_ways(backend, recipe=Recipe(lhs=clipped, rhs=clipped))
    _, dlhs, drhs = both(lhs, rhs, case.sizes, np.ones((4, 4), np.float32))
    inside = np.abs(values) <= 2 if clip else np.ones(8, bool)
    expect_equal(np.asarray(dlhs[:3]) != 0, np.tile(inside, (3, 1)), f"dlhs != 0 with clip_gradient={clip}")
    expect(bool((np.asarray(drhs[0, 0]) == 0).all()) == clip, f"drhs outside the range with clip_gradient={clip}")


@check("VJP-8", "gradients under vmap, scan, remat and shard_map are the eager ones", "short", weight=0.1)
def transforms(backend: Backend, case: Case) -> None:
  """Two transforms of an unquantized and two of a quantized gradient."""
  lhs, rhs, sizes = args = case.lhs, case.rhs, case.sizes
  pair = np.stack([lhs, lhs]), rhs, np.stack([sizes, sizes])
  for name, transformed in (
    ("bf16", {"vmap": _program("vmap", backend, "bf16")(*pair), "scan": _program("scan", backend, "bf16")(*pair)}),
    (
      "fp8_dynamic",
      {
        "remat": [x[None] for x in _program("remat", backend, "fp8_dynamic")(*args)],
        "shard_map": [x[None] for x in _program("shard_map", backend, "fp8_dynamic")(*args)],
      },
    ),
  ):
    expected = _program("jit", backend, name)(*args)
    for transform, got in transformed.items():
      for i, what in enumerate(("dlhs", "drhs")):
        expect_equal(got[i][-1], np.asarray(expected[i]), f"{what} of {name} under {transform}")


@functools.cache
def _program(transform: str, backend: Backend, name: str):
  grad = _gradient(backend, name, jax.checkpoint if transform == "remat" else lambda f: f)
  if transform == "vmap":
    grad = jax.vmap(grad, in_axes=(0, None, 0))
  elif transform == "scan":
    one = grad
    grad = lambda lhs, rhs, sizes: jax.lax.scan(lambda c, x: (c, one(x[0], rhs, x[1])), 0, (lhs, sizes))[1]
  elif transform == "shard_map":
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = jax.sharding.PartitionSpec
    specs = spec("x"), spec(), spec()
    grad = jax.shard_map(grad, mesh=mesh, in_specs=specs, out_specs=(spec("x"), spec()), check_vma=True)
  return jit(grad)


def _gradient(backend: Backend, name: str, wrap):
  op = wrap(lambda lhs, rhs, sizes: _op.gmm(lhs, rhs, sizes, backend=backend, recipe=recipe(name)))
  return lambda lhs, rhs, sizes: jax.grad(lambda a, b: op(a, b, sizes).sum(), (0, 1))(lhs, rhs)


CHECKS = (
  gradients,
  transposed_gradients,
  backward_table,
  lossless_operands,
  cotangent_dtypes,
  unused_rows,
  offset_gradients,
  added_cotangents,
  second_order,
  refused_derivatives,
  clip_gradient,
  transforms,
)

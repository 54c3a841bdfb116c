"""Public faults about transforms, meshes and the choice of a backend.

One test for each case of tests/data/faults.json; `fault` holds its sizes, data and seed. The
conftest gives four CPU devices.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gmm
from gmm import _registry
from gmm.conformance import _oracle
from gmm.conformance._programs import both_ways, forward
from gmm.conformance._registry import expect_equal

without_kernels = pytest.mark.parametrize("backend", ["reference", "xla"])
kernels = pytest.mark.parametrize("backend", ["megablox", pytest.param("tokamax_v1", marks=pytest.mark.slow)])
P = jax.sharding.PartitionSpec


def _mesh(count: int):
  return jax.sharding.Mesh(np.array(jax.devices()[:count]), ("expert",))


def _exact(case):
  """float32 (out, dlhs, drhs) of integer data."""
  rows = _oracle.ranges(case.sizes)
  dlhs = _oracle.gmm(case.dout, case.rhs, rows, transpose_rhs=True)
  exact = _oracle.gmm(case.lhs, case.rhs, rows), dlhs, _oracle.tgmm(case.lhs, case.dout, rows)
  return tuple(x.value.astype(np.float32) for x in exact)


# ---- backends --------------------------------------------------------------------------


def test_ap02_backend_that_cannot_be_loaded(fault, monkeypatch):
  """A named backend whose module is absent is an error with name and cause; "auto" goes on and says what it took."""
  case = dataclasses.replace(fault, group_sizes=(4, 4))
  real = _registry._entry_points()
  broken = dataclasses.make_dataclass("Entry", ["value"])("absent_wheel:backend")
  broken.load = lambda: __import__("absent_wheel")
  monkeypatch.setattr(_registry, "_entry_points", lambda: {**real, "absent": broken})
  monkeypatch.setattr(_registry, "AUTO_NAMES", {"cpu": ("absent", "reference")})
  with pytest.raises(ImportError, match=r"'absent'.*cannot be loaded.*absent_wheel"):
    gmm.gmm(case.lhs, case.rhs, case.sizes, backend="absent")
  listed = gmm.backends()
  assert "absent_wheel" in str(listed["absent"])
  assert listed["reference"] is None
  assert gmm.which_backend(case.lhs, case.rhs, case.sizes)["fwd"] == "reference"
  exact = _oracle.gmm(case.lhs, case.rhs, _oracle.ranges(case.sizes)).value
  # Integers or not, the automatic choice computes; its value is the reference's own.
  got = gmm.gmm(case.lhs, case.rhs, case.sizes)
  expect_equal(got, gmm.gmm(case.lhs, case.rhs, case.sizes, backend="reference"), "out of auto")
  assert got.shape == exact.shape


# ---- meshes ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "xla", "megablox"])
def test_go05_gradients_do_not_depend_on_the_layout(fault, backend):
  """The weights over 1, 2 or 4 shards have the same gradient, not one that is doubled by each sum over shards."""
  case = dataclasses.replace(fault, data="integers")
  exact = _exact(case)
  for count in (1, 2, 4):
    if backend == "megablox" and count != 2:
      continue  # interpreted, and the layout is the op's business

    def loss(lhs, rhs, sizes, dout, local=case.g // count):
      offset = jax.lax.axis_index("expert") * local
      return jax.lax.psum((gmm.gmm(lhs, rhs, sizes, backend=backend, group_offset=offset) * dout).sum(), "expert")

    specs = P(), P("expert"), P(), P()
    sharded = jax.shard_map(loss, mesh=_mesh(count), in_specs=specs, out_specs=P(), check_vma=True)
    dlhs, drhs = jax.jit(jax.grad(sharded, (0, 1)))(case.lhs, case.rhs, case.sizes, case.dout)
    expect_equal(drhs, exact[2], f"drhs of {count} shards")
    expect_equal(dlhs, exact[1], f"dlhs of {count} shards")


@without_kernels
def test_sh01_checked_shard_map(fault, backend):
  """Rows over 4 devices, each with its own sizes, under check_vma=True: the loop over devices, gradients too."""
  case = dataclasses.replace(fault, data="integers")
  sizes = np.array([[4, 4, 4, 4], [0, 16, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]], np.int32)

  def shard(lhs, rhs, sizes, dout):
    out, pullback = jax.vjp(lambda a, b: gmm.gmm(a, b, sizes[0], backend=backend), lhs, rhs)
    return out, *pullback(dout)

  rows, mesh = P("expert"), jax.sharding.Mesh(np.array(jax.devices()[:4]), ("expert",), axis_types=None)
  assert mesh == _mesh(4)  # axis types None mean what omitting them means
  sharded = jax.shard_map(
    shard, mesh=mesh, in_specs=(rows, P(), rows, rows), out_specs=(rows, rows, P()), check_vma=True
  )
  out, dlhs, drhs = jax.jit(sharded)(case.lhs, case.rhs, sizes, case.dout)
  parts = []
  for i in range(4):
    at, ranges = slice(16 * i, 16 * i + 16), _oracle.ranges(sizes[i])
    lhs, dout = case.lhs[at], case.dout[at]
    parts.append(_oracle.tgmm(lhs, dout, ranges).value)
    expect_equal(out[at], _oracle.gmm(lhs, case.rhs, ranges).value.astype(np.float32), f"out of device {i}")
    exact = _oracle.gmm(dout, case.rhs, ranges, transpose_rhs=True).value
    expect_equal(dlhs[at], exact.astype(np.float32), f"dlhs of device {i}")
  expect_equal(drhs, np.sum(parts, axis=0).astype(np.float32), "drhs, summed over the devices")


@without_kernels
def test_sh03_automatic_partitioning(fault, backend):
  """Operands sharded without shard_map: the same values on an Auto mesh, an error on an Explicit one."""
  exact = _exact(fault)
  mesh = _mesh(4)
  whole = jax.sharding.NamedSharding(mesh, P())
  run = jax.jit(lambda *args: gmm.gmm(*args, backend=backend))
  for lhs_axes, rhs_axes in (
    (("expert", None), ()),
    ((None, "expert"), (None, "expert")),
    ((), (None, None, "expert")),
  ):
    lhs = jax.device_put(fault.lhs, jax.sharding.NamedSharding(mesh, P(*lhs_axes)))
    rhs = jax.device_put(fault.rhs, jax.sharding.NamedSharding(mesh, P(*rhs_axes)))
    got = run(lhs, rhs, jax.device_put(fault.sizes, whole))
    expect_equal(got, exact[0], f"out of lhs over {lhs_axes} and rhs over {rhs_axes}")
  explicit = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Explicit,))
  with jax.set_mesh(explicit):
    lhs = jax.device_put(fault.lhs, jax.sharding.NamedSharding(explicit, P("expert")))
    with pytest.raises(ValueError, match=r"Explicit mesh axis.*jax\.shard_map"):
      gmm.gmm(lhs, fault.rhs, fault.sizes, backend=backend)


# ---- transforms ------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "recipe"), [("reference", "bf16"), ("xla", "bf16"), ("reference", "fp8_dynamic")])
def test_tf01_traced_sizes_in_every_transform(fault, backend, recipe):
  """Sizes counted inside the program reach the backward of the op as data: the same gradients in every transform."""
  ids = jnp.asarray(np.sort(np.random.default_rng(fault.seed).integers(0, 4, 32)), jnp.int32)
  case = dataclasses.replace(fault, group_sizes=tuple(np.bincount(ids, minlength=4).tolist()))
  lhs, rhs = jnp.asarray(case.lhs), jnp.asarray(case.rhs)

  def loss(lhs, rhs, ids):
    sizes = gmm.group_sizes_from_ids(ids, 4)
    return (gmm.gmm(lhs, rhs, sizes, backend=backend, recipe=recipe) * case.dout).sum()

  grad = jax.grad(loss, (0, 1))
  expected = grad(lhs, rhs, ids)
  assert all(np.isfinite(x).all() and np.any(x) for x in expected)
  under_cond = lambda *args: jax.lax.cond(args[2][0] >= 0, grad, lambda a, b, _: (0 * a, 0 * b), *args)
  scanned = lambda a, b, i: jax.lax.scan(lambda c, _: (c, grad(a, b, i)), 0, length=3)[1]
  for name, got in {
    "jit(grad)": jax.jit(grad)(lhs, rhs, ids),
    "grad(jit)": jax.grad(jax.jit(loss), (0, 1))(lhs, rhs, ids),
    "checkpoint": jax.jit(jax.grad(jax.checkpoint(loss), (0, 1)))(lhs, rhs, ids),
    "cond": jax.jit(under_cond)(lhs, rhs, ids),
    "scan": [x[2] for x in jax.jit(scanned)(lhs, rhs, ids)],
  }.items():
    for what, one, two in zip(("dlhs", "drhs"), got, expected, strict=True):
      expect_equal(one, two, f"{what} under {name}")
  sizes = jnp.asarray(case.sizes)
  dsizes = jax.grad(lambda s: gmm.gmm(lhs, rhs, s, backend=backend, recipe=recipe).sum(), allow_int=True)(sizes)
  assert dsizes.dtype == jax.dtypes.float0


_IN_AXES = ((0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (0, 1, 0), (1, None, 0))


@pytest.mark.parametrize("backend", ["reference", "xla", "megablox"])
def test_tf03_vmap_over_any_operands(fault, backend):
  """vmap over each combination of operands and axes is the loop, and so is vmap of the gradient."""
  cases = [
    dataclasses.replace(fault, seed=fault.seed + i, group_sizes=s) for i, s in enumerate(((9, 7), (0, 5), (16, 0)))
  ]
  stacks = tuple(np.stack([getattr(c, name) for c in cases]) for name in ("lhs", "rhs", "sizes"))
  op = lambda lhs, rhs, sizes: gmm.gmm(lhs, rhs, sizes, backend=backend)
  for axes in _IN_AXES if backend != "megablox" else _IN_AXES[4:5]:
    args = [x[0] if axis is None else np.moveaxis(x, 0, axis) for x, axis in zip(stacks, axes, strict=True)]
    exact = []
    for i in range(3):
      lhs, rhs, sizes = (x[0 if axis is None else i] for x, axis in zip(stacks, axes, strict=True))
      exact.append(_oracle.gmm(lhs, rhs, _oracle.ranges(sizes)).value.astype(np.float32))
    for out_axes in (0, 1) if axes == (0, 0, 0) else (0,):
      got = jax.jit(jax.vmap(op, in_axes=axes, out_axes=out_axes))(*args)
      expect_equal(np.moveaxis(got, out_axes, 0), np.stack(exact), f"out with in_axes={axes}, out_axes={out_axes}")
  if backend != "megablox":
    dout = cases[0].dout
    grad = jax.grad(lambda lhs, rhs, sizes: (op(lhs, rhs, sizes) * dout).sum(), (0, 1))
    dlhs, drhs = jax.jit(jax.vmap(grad))(*stacks)
    for i, case in enumerate(cases):
      rows = _oracle.ranges(case.sizes)
      exact = _oracle.gmm(dout, case.rhs, rows, transpose_rhs=True).value
      expect_equal(dlhs[i], exact.astype(np.float32), f"dlhs[{i}]")
      expect_equal(drhs[i], _oracle.tgmm(case.lhs, dout, rows).value.astype(np.float32), f"drhs[{i}]")


@kernels
def test_tf06_sizes_are_not_touched(fault, backend):
  """What a kernel is told about groups is only read: the buffer of sizes is the same after the call, and reusable."""
  sizes = jnp.asarray(fault.sizes)
  run = forward(gmm.get_backend(backend), preferred_element_type="float32")
  exact = _oracle.gmm(fault.lhs, fault.rhs, _oracle.ranges(fault.sizes)).value.astype(np.float32)
  for _ in range(2):
    expect_equal(run(fault.lhs, fault.rhs, sizes), exact, "out")
    np.testing.assert_array_equal(sizes, fault.sizes)


@pytest.mark.parametrize("backend", ["reference", "megablox"])
def test_tf08_sizes_compile_nothing_tiles_once(fault, backend):
  """Ten vectors of sizes take one trace; a new tile one more, with the same values; equal tiles none."""
  case = dataclasses.replace(fault, data="integers")
  traces = []

  def op(lhs, rhs, sizes, tiling):
    traces.append(tiling)
    return gmm.gmm(lhs, rhs, sizes, backend=backend, tiling=tiling, preferred_element_type="float32")

  run = jax.jit(op, static_argnums=3)
  rng = np.random.default_rng(0)
  for tiling in (None, gmm.Tiling(fwd=(16, 64, 64)), gmm.Tiling(fwd=(16, 64, 64))):
    for _ in range(10):
      sizes = np.diff([0, *np.sort(rng.integers(0, 65, 4))]).astype(np.int32)
      got = run(case.lhs, case.rhs, sizes, tiling)
      exact = _oracle.gmm(case.lhs, case.rhs, _oracle.ranges(sizes)).value.astype(np.float32)
      expect_equal(got, exact, f"out with tiling={tiling}")
  assert traces == [None, gmm.Tiling(fwd=(16, 64, 64))]
  assert gmm.Tiling(fwd=(8, 128, 128)) == gmm.Tiling(fwd=(8, 128, 128)) != gmm.Tiling(dlhs=(8, 128, 128))
  assert hash(gmm.recipe("fp8_dynamic")) == hash(gmm.recipe("fp8_dynamic"))


@without_kernels
def test_tf10_permutations(fault, backend):
  """Rows permuted inside a group permute out and dlhs and leave drhs alone; groups permute with their rows."""
  rng, run = np.random.default_rng(fault.seed), both_ways(gmm.get_backend(backend))
  out, dlhs, drhs = run(fault.lhs, fault.rhs, fault.sizes, fault.dout)
  expect_equal(out, _exact(fault)[0], "out")
  rows = _oracle.ranges(fault.sizes)
  inside = np.concatenate([rng.permutation(np.arange(*r)) for r in rows])
  got = run(fault.lhs[inside], fault.rhs, fault.sizes, fault.dout[inside])
  for name, x, want in zip(("out", "dlhs", "drhs"), got, (out[inside], dlhs[inside], drhs), strict=True):
    expect_equal(x, want, f"{name} of rows permuted inside groups")
  order = np.array([2, 0, 1])
  moved = np.concatenate([np.arange(*rows[j]) for j in order])
  got = run(fault.lhs[moved], fault.rhs[order], fault.sizes[order], fault.dout[moved])
  for name, x, want in zip(("out", "dlhs", "drhs"), got, (out[moved], dlhs[moved], drhs[order]), strict=True):
    expect_equal(x, want, f"{name} of permuted groups")

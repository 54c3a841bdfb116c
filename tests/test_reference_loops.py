"""The reference backend against a numpy oracle: exact on small integers, whatever the groups.

The conformance kit checks the clauses on every backend; here are the reference's own loops:
window edges, group patterns that move them, batching, memory. `xla` shares the tests.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gmm.reference import backend as reference
from gmm.reference.xla import backend as xla

BACKENDS = pytest.mark.parametrize("backend", [reference, xla], ids=lambda b: b.name)


def patterns(m: int, g: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Group sizes that put window edges everywhere: [g] each, sum at most m."""
  cuts = np.sort(rng.integers(0, m + 1, g))
  one_row = np.minimum(1, np.maximum(0, m - np.arange(g)))
  geometric = np.array([m >> (j + 1) for j in range(g)])
  at = lambda j, size: np.eye(g, dtype=int)[j] * size
  return {
    "all empty": np.zeros(g, int),
    "all in the first": at(0, m),
    "all in the last": at(g - 1, m),
    "slack rows": np.diff(np.r_[0, cuts]),
    "covering": np.diff(np.r_[0, cuts[:-1], m]),
    "one row each": one_row,
    "one row each, then the rest": one_row + at(g - 1, m - one_row.sum()),
    "falling by half": geometric,
    "one row over a window": np.minimum(17, np.maximum(0, m - 17 * np.arange(g))),
    "last row only": at(g - 1, min(1, m)),
  }


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


# m below, at and above the windows (16 to 256 rows), and off them.
SHAPES = [(1, 1, 1, 1), (5, 3, 2, 9), (16, 4, 3, 2), (33, 8, 5, 4), (300, 7, 130, 6), (800, 16, 24, 3)]


# Every shape in float32, every dtype in one of them: which dtype it is does not move a window.
CASES = [(shape, "float32") for shape in SHAPES] + [
  ((300, 7, 130, 6), dtype) for dtype in ("bfloat16", "float8_e5m2", "int8", "int4")
]


@BACKENDS
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_every_pattern_is_exact(backend, shape, dtype):
  """Integers leave rounding no excuse: a lost, doubled or foreign row shows as inequality.

  Rows and weights that no group uses are NaN where the dtype has one: a select turned into a
  multiplication by zero would show.
  """
  m, k, n, g = shape
  rng = np.random.default_rng(m)
  x, w, d = integers(rng, m, k), integers(rng, g, k, n), integers(rng, m, n)
  cast = lambda a: jnp.asarray(a, jnp.float32).astype(dtype)
  for name, sizes in patterns(m, g, rng).items():
    used_rows, used_groups = np.arange(m) < sizes.sum(), sizes > 0
    spoil = lambda a, used: a if "int" in dtype else np.where(used.reshape(-1, *(1,) * (a.ndim - 1)), a, np.nan)
    xs, ws, ds = cast(spoil(x, used_rows)), cast(spoil(w, used_groups)), cast(spoil(d, used_rows))
    want = oracle_gmm(x, w, sizes)
    np.testing.assert_array_equal(run_gmm(backend, xs, ws, sizes), want, err_msg=name)
    transposed = run_gmm(backend, xs, ws.swapaxes(1, 2), sizes, transpose_rhs=True)
    np.testing.assert_array_equal(transposed, want, err_msg=f"{name}, transposed")
    np.testing.assert_array_equal(run_tgmm(backend, xs, ds, sizes), oracle_tgmm(x, d, sizes), err_msg=name)


@BACKENDS
def test_used_nan_stays_in_its_row_and_group(backend):
  """0 · NaN must not carry a NaN of one group into another (GMM-3, TGMM-3)."""
  m, k, n, g = 60, 5, 4, 3
  rng = np.random.default_rng(0)
  x, w, d = integers(rng, m, k), integers(rng, g, k, n), integers(rng, m, n)
  sizes = np.array([20, 17, 20])
  w[1, 2, 3] = np.nan
  x[5, 0] = np.inf
  f32 = lambda a: jnp.asarray(a, jnp.float32)
  want = oracle_gmm(x, w, sizes)
  np.testing.assert_array_equal(run_gmm(backend, f32(x), f32(w), sizes), want)
  np.testing.assert_array_equal(run_tgmm(backend, f32(x), f32(d), sizes), oracle_tgmm(x, d, sizes))
  assert np.isfinite(want[:5]).all()
  assert np.isnan(want[20:37, 3]).all()


@BACKENDS
@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (8, 0, 4, 2), (8, 3, 0, 2), (8, 3, 4, 0)], ids=str)
def test_nothing_to_multiply(backend, shape):
  """A dimension of size zero gives zeros of the right shape (GMM-4, TGMM-4)."""
  m, k, n, g = shape
  sizes = np.full(g, m // max(g, 1))
  x, w, d = jnp.ones((m, k)), jnp.ones((g, k, n)), jnp.ones((m, n))
  np.testing.assert_array_equal(run_gmm(backend, x, w, sizes), np.zeros((m, n)))
  want = np.einsum("mk,mn->kn", x, d)[None] / max(g, 1) * np.ones((g, 1, 1))
  np.testing.assert_array_equal(run_tgmm(backend, x, d, sizes), want)


@BACKENDS
def test_group_offset_shards_add_up(backend):
  """Shards of the weights, each with its offset, sum and concatenate to the whole (GMM-5, TGMM-5)."""
  m, k, n, g = 50, 6, 5, 6
  rng = np.random.default_rng(1)
  x, w, d = integers(rng, m, k), integers(rng, g, k, n), integers(rng, m, n)
  f32 = lambda a: jnp.asarray(a, jnp.float32)
  for sizes in patterns(m, g, rng).values():
    outs, grads = [], []
    for first in range(0, g, 2):
      offset = jnp.int32(first)
      outs.append(run_gmm(backend, f32(x), f32(w[first : first + 2]), sizes, group_offset=offset))
      grads.append(run_tgmm(backend, f32(x), f32(d), sizes, num_groups=2, group_offset=offset))
    np.testing.assert_array_equal(sum(outs), oracle_gmm(x, w, sizes))
    np.testing.assert_array_equal(np.concatenate(grads), oracle_tgmm(x, d, sizes))


@BACKENDS
def test_int8_sums_are_integers(backend):
  """The running sum passes 2^24 + 1, which float32 does not hold (GMM-7), and -128 · -128 does not saturate."""
  half = 2**10
  x = np.r_[np.full(half, -128), 1, np.full(half, -128)]
  w = np.r_[np.full(half, -128), 1, np.full(half, 127)]
  out = run_gmm(backend, jnp.asarray(x[None], jnp.int8), jnp.asarray(w[None, :, None], jnp.int8), [1])
  np.testing.assert_array_equal(out, [[x @ w]])


@BACKENDS
def test_one_rounding_after_partial_sum(backend):
  """1 + 2^-9 rounds to 1 in bfloat16: rounding before the partial sum of -1 would give 0 (GMM-7, GMM-8)."""
  x = jnp.asarray([[1.0, 2.0**-9]], jnp.bfloat16)
  w = jnp.ones((1, 2, 1), jnp.bfloat16)
  out = run_gmm(backend, x, w, [1], out="bfloat16", partial_sum=jnp.full((1, 1), -1, jnp.float32))
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out.astype(np.float32), [[2.0**-9]])
  uncovered = run_gmm(backend, x, w, [0], out="bfloat16", partial_sum=jnp.full((1, 1), -3, jnp.bfloat16))
  np.testing.assert_array_equal(uncovered.astype(np.float32), [[-3]])


# xla runs a batch one after the other, whichever operand it is in; the reference's loops are batched.
BATCHED = [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (0, 0, 0)]
VMAPS = [(reference, axes) for axes in BATCHED] + [(xla, (0, None, None)), (xla, (0, 0, 0))]


@pytest.mark.parametrize(("backend", "axes"), VMAPS, ids=lambda v: getattr(v, "name", str(v)))
def test_vmap_over_each_operand(backend, axes):
  """A batch gives what its entries give one by one, also with other group sizes in each (GMM-12)."""
  m, k, n, g, batch = 40, 5, 4, 3, 3
  rng = np.random.default_rng(4)
  x, w, d = integers(rng, batch, m, k), integers(rng, batch, g, k, n), integers(rng, batch, m, n)
  sizes = np.array([[10, 0, 17], [0, 0, 0], [1, 39, 0]])
  pick = lambda a, axis: a if axis == 0 else a[0]
  at = lambda a, axis, i: a[i if axis == 0 else 0]

  def batched(op, a, b, **options):
    fn = lambda a, b, s: getattr(backend, op)(a, b, s, preferred_element_type="float32", **options)
    args = (pick(a, axes[0]).astype(np.float32), pick(b, axes[1]).astype(np.float32))
    return jax.jit(jax.vmap(fn, axes))(*args, jnp.asarray(pick(sizes, axes[2]), jnp.int32))

  for op, b, oracle, options in (("gmm", w, oracle_gmm, {}), ("tgmm", d, oracle_tgmm, {"num_groups": g})):
    want = [oracle(at(x, axes[0], i), at(b, axes[1], i), at(sizes, axes[2], i)) for i in range(batch)]
    np.testing.assert_array_equal(batched(op, x, b, **options), want, err_msg=op)


def test_shard_map_checks_varying_axes():
  """Loops carry arrays typed as varying: on 4 devices, each with its own groups or its own rows (GMM-12)."""
  script = textwrap.dedent("""
    import numpy as np, jax, jax.numpy as jnp
    from jax.sharding import AxisType, PartitionSpec as P
    from gmm.reference import backend as reference
    from gmm.reference.xla import backend as xla
    assert jax.device_count() == 4
    m, k, n, g = 96, 5, 4, 8
    rng = np.random.default_rng(0)
    x, w, d = (rng.integers(-3, 4, s).astype(np.float32) for s in ((m, k), (g, k, n), (m, n)))
    sizes = np.array([20, 0, 33, 1, 0, 7, 20, 5], np.int32)
    mesh = jax.make_mesh((4,), ("e",), axis_types=(AxisType.Auto,))
    for b in (reference, xla):
      # 1. Experts are split: every device has all rows and two groups.
      def experts(x, w, d, s):
        offset = jax.lax.axis_index("e") * 2
        out = b.gmm(x, w, s, group_offset=offset, preferred_element_type="float32")
        grad = b.tgmm(x, d, s, num_groups=2, group_offset=offset, preferred_element_type="float32")
        return jax.lax.psum(out, "e"), grad
      f = jax.shard_map(experts, mesh=mesh, in_specs=(P(), P("e"), P(), P()), out_specs=(P(), P("e")), check_vma=True)
      out, grad = jax.jit(f)(x, w, d, sizes)
      plain = reference.gmm(x, w, sizes, preferred_element_type="float32")
      np.testing.assert_array_equal(out, plain)
      np.testing.assert_array_equal(grad, reference.tgmm(x, d, sizes, num_groups=g, preferred_element_type="float32"))
      # 2. Rows are split: every device has all weights and its own group sizes.
      local = np.tile(np.array([[3, 0, 8, 1, 0, 4, 2, 2]], np.int32), (4, 1))
      def rows(x, w, s):
        return b.gmm(x, w, s[0], preferred_element_type="float32")
      f = jax.shard_map(rows, mesh=mesh, in_specs=(P("e"), P(), P("e")), out_specs=P("e"), check_vma=True)
      want = [b.gmm(x[i * 24 : i * 24 + 24], w, local[i], preferred_element_type="float32") for i in range(4)]
      np.testing.assert_array_equal(jax.jit(f)(x, w, local), np.concatenate(want))
    print("same")
  """)
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", script],
    capture_output=True,
    text=True,
    env=env,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.strip() == "same"


def test_new_group_sizes_do_not_compile_again():
  """One program serves all group sizes of a shape (GMM-12)."""
  traced = []

  @jax.jit
  def fn(x, w, sizes):
    traced.append(sizes)
    return reference.gmm(x, w, sizes, preferred_element_type="float32")

  x, w = jnp.ones((20, 3)), jnp.ones((4, 3, 2))
  for sizes in patterns(20, 4, np.random.default_rng(0)).values():
    fn(x, w, jnp.asarray(sizes, jnp.int32))
  assert len(traced) == 1


@pytest.mark.parametrize("op", ["gmm", "tgmm"])
def test_memory_beyond_operands_and_results(op):
  """Four weight slices and two m x (k + n) rows at most, for bfloat16 results too, however many groups."""
  m, k, n, g = 512, 128, 256, 64
  spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  sizes = jax.ShapeDtypeStruct((g,), jnp.int32)
  if op == "gmm":
    fn, second = functools.partial(reference.gmm, preferred_element_type="bfloat16"), spec(g, k, n)
  else:
    fn, second = functools.partial(reference.tgmm, num_groups=g, preferred_element_type="bfloat16"), spec(m, n)
  analysis = jax.jit(fn).lower(spec(m, k), second, sizes).compile().memory_analysis()
  assert analysis is not None
  assert analysis.temp_size_in_bytes <= 4 * (4 * k * n + 2 * m * (k + n))

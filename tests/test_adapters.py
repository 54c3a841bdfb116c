"""The adapters of public kernels: what each repair of `gmm.pallas._adapter` must hold, exact on small integers.

The conformance kit checks the clauses on every backend, through the op. Here the backends are called
themselves, where a repair can go wrong: explicit tiles whose edges cut groups, k and n off the tile, garbage in
rows that nobody owns, scales of one group, rows beyond one kernel call, what is declined.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gmm
from gmm._protocol import Problem, operand_spec
from gmm.pallas import _adapter, _opaque, megablox, tokamax_v1

BACKENDS = pytest.mark.parametrize("backend", [megablox.backend(), tokamax_v1.backend()], ids=lambda b: b.name)
M, K, N, G = 75, 200, 136, 4
# Cut by row tiles of 16 and 8; k and n are off 128, so the last tile of each is a part.
TILE = (16, 128, 128)
PATTERNS = {
  "covering": (20, 0, 32, 23),
  "slack rows": (17, 3, 0, 40),
  "all empty": (0, 0, 0, 0),
  "first only": (75, 0, 0, 0),
  "last only, one row": (0, 0, 0, 1),
  "one row each": (1, 1, 1, 1),
}


def integers(rng, *shape):
  return rng.integers(-3, 4, shape).astype(np.float32)


def ranges(sizes):
  ends = np.cumsum(sizes)
  return list(zip((ends - sizes).tolist(), ends.tolist(), strict=True))


@np.errstate(invalid="ignore")  # NaN is among the cases
def oracle_gmm(x, w, sizes, first=0):
  """w holds the groups from `first` on; in float64, exact here."""
  out = np.zeros((x.shape[0], w.shape[2]))
  for j, (a, b) in enumerate(ranges(sizes)):
    if first <= j < first + w.shape[0]:
      out[a:b] = x[a:b].astype(np.float64) @ w[j - first].astype(np.float64)
  return out


@np.errstate(invalid="ignore")
def oracle_tgmm(x, d, sizes):
  return np.stack([x[a:b].T.astype(np.float64) @ d[a:b].astype(np.float64) for a, b in ranges(sizes)])


def ints(sizes):
  return jnp.asarray(sizes, jnp.int32)


@functools.cache
def program(backend, op, **options):
  """One compiled program per backend and options; group sizes are data."""
  return jax.jit(functools.partial(getattr(backend, op), **{"preferred_element_type": "float32", **options}))


@pytest.mark.second_interpreter
@BACKENDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_edges_of_tiles_and_groups(backend, dtype):
  """Garbage in rows and weights that nobody uses stays there, whatever tile it shares (GMM-2, GMM-3, TGMM-3)."""
  rng = np.random.default_rng(0)
  for name, sizes in PATTERNS.items():
    sizes = np.array(sizes)
    x, d, w = integers(rng, M, K), integers(rng, M, N), integers(rng, G, K, N)
    x[sizes.sum() :], d[sizes.sum() :] = np.nan, np.inf
    w[sizes == 0] = np.nan
    cast = lambda *arrays: [jnp.asarray(a, dtype) for a in arrays]
    out = program(backend, "gmm", tiling=TILE)(*cast(x, w), ints(sizes))
    np.testing.assert_array_equal(out, oracle_gmm(x, w, sizes), err_msg=name)
    out = program(backend, "gmm", tiling=TILE, transpose_rhs=True)(*cast(x, w.swapaxes(1, 2)), ints(sizes))
    np.testing.assert_array_equal(out, oracle_gmm(x, w, sizes), err_msg=f"{name}, transposed")
    out = program(backend, "tgmm", tiling=TILE, num_groups=G)(*cast(x, d), ints(sizes))
    np.testing.assert_array_equal(out, oracle_tgmm(x, d, sizes), err_msg=f"{name}, tgmm")


@BACKENDS
def test_nan_in_used_rows_stays_in_them(backend):
  """Rows of two groups share tiles: a NaN in one row, or in one group's weights, reaches no other (GMM-3, TGMM-3)."""
  rng = np.random.default_rng(1)
  sizes = np.array(PATTERNS["covering"])
  x, d, w = integers(rng, M, K), integers(rng, M, N), integers(rng, G, K, N)
  x[5, 7], d[60, 3], w[2, 0, 0] = np.nan, np.nan, np.inf
  out = program(backend, "gmm", tiling=TILE)(jnp.asarray(x), jnp.asarray(w), ints(sizes))
  np.testing.assert_array_equal(out, oracle_gmm(x, w, sizes))
  out = program(backend, "tgmm", tiling=TILE, num_groups=G)(jnp.asarray(x), jnp.asarray(d), ints(sizes))
  np.testing.assert_array_equal(out, oracle_tgmm(x, d, sizes))


@BACKENDS
@pytest.mark.parametrize("first", [0, 1, 3, -1, 5, 9])
def test_group_offset(backend, first):
  """A shard of three groups, also when some or all of them lie outside the global ones (GMM-5, TGMM-5)."""
  rng = np.random.default_rng(2)
  sizes = np.array([20, 0, 13, 7, 16])
  x, d, w = integers(rng, M, 24), integers(rng, M, 40), integers(rng, 3, 24, 40)
  x[sizes.sum() :] = np.nan
  d[sizes.sum() :] = np.nan
  offset = jnp.int32(first)
  out = program(backend, "gmm")(jnp.asarray(x), jnp.asarray(w), ints(sizes), group_offset=offset)
  np.testing.assert_array_equal(out, oracle_gmm(x, w, sizes, first))
  out = program(backend, "tgmm", num_groups=3)(jnp.asarray(x), jnp.asarray(d), ints(sizes), group_offset=offset)
  whole = oracle_tgmm(x, d, sizes)
  local = [whole[j] if 0 <= j < 5 else np.zeros_like(whole[0]) for j in range(first, first + 3)]
  np.testing.assert_array_equal(out, np.stack(local))


@BACKENDS
def test_rows_beyond_one_kernel_call(backend, monkeypatch):
  """Groups that begin, end and lie within any of several calls; an empty one at a seam (GMM-1, TGMM-1)."""
  monkeypatch.setattr(_adapter, "_MOST_TILES", 2)  # calls of 16 rows
  rng = np.random.default_rng(3)
  x, d, w = integers(rng, 75, 24), integers(rng, 75, 40), integers(rng, 5, 24, 40)
  run = jax.jit(functools.partial(backend.gmm, preferred_element_type="float32", tiling=(8, 128, 128)))
  trun = jax.jit(functools.partial(backend.tgmm, num_groups=5, preferred_element_type="float32", tiling=(8, 128, 128)))
  for sizes in ([16, 0, 30, 3, 20], [0, 60, 0, 1, 2], [75, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 15, 16, 17, 26]):
    out = run(jnp.asarray(x), jnp.asarray(w), ints(sizes))
    np.testing.assert_array_equal(out, oracle_gmm(x, w, np.array(sizes)), err_msg=str(sizes))
    out = trun(jnp.asarray(x), jnp.asarray(d), ints(sizes))
    np.testing.assert_array_equal(out, oracle_tgmm(x, d, np.array(sizes)), err_msg=str(sizes))


@pytest.mark.slow
@BACKENDS
def test_more_row_tiles_than_the_kernel_counts_right(backend):
  """5000 row tiles, a border in the last but two: alone the kernel leaves or mixes rows there (GMM-1, TGMM-1)."""
  m, at = 40000, 40000 - 20
  x, w = jnp.ones((m, 8)), jnp.ones((2, 8, 8)) * jnp.array([1.0, 2.0])[:, None, None]
  out = backend.gmm(x, w, ints([at, m - at]), preferred_element_type="float32", tiling=(8, 8, 8))
  np.testing.assert_array_equal(out, np.repeat([8.0, 16.0], [at, m - at])[:, None] * np.ones((1, 8)))
  out = backend.tgmm(x, x, ints([at, m - at]), num_groups=2, preferred_element_type="float32", tiling=(8, 8, 8))
  np.testing.assert_array_equal(out, np.array([at, m - at])[:, None, None] * np.ones((2, 8, 8)))


def test_the_kernels_histogram_is_right_up_to_the_limit():
  """Each row tile counts in its own bin, which the limit of tiles per call rests on (at 5000 it does not)."""
  wrong = lambda t: int((np.asarray(jnp.histogram(jnp.arange(t), bins=t, range=(0, t - 1))[0]) != 1).sum())
  with jax.numpy_dtype_promotion("standard"):  # as the kernels call it
    assert [wrong(t) for t in (2, 3, 1500, 2047, _adapter._MOST_TILES)] == [0] * 5


@pytest.mark.parametrize(("rows", "tile"), [(16, 16), (2048 * 8, 8), (2048 * 8 + 8, 8), (5000 * 8, 8)])
def test_calls_cover_all_rows_once(rows, tile):
  calls = _adapter._calls(rows, tile)
  assert [a for a, _ in calls] == [0, *(b for _, b in calls[:-1])]
  assert calls[-1][1] == rows
  assert all((b - a) % tile == 0 and 0 < (b - a) // tile <= _adapter._MOST_TILES for a, b in calls)


@pytest.mark.second_interpreter
@BACKENDS
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize(("qtype", "top"), [("int8", 120), ("float8_e4m3fn", 8), ("float8_e5m2", 3)])
def test_scales_of_rows_and_groups(backend, transpose_rhs, qtype, top):
  """(acc * lhs_scale) * rhs_scale, the scale of the row's own group, and a NaN or Inf scale no further (QNT-1)."""
  rng = np.random.default_rng(4)
  sizes = np.array([20, 0, 13, 7])
  qx, qw = rng.integers(-top, top + 1, (M, 24)), rng.integers(-top, top + 1, (G, 24, 40))
  sx, sw = 2.0 ** rng.integers(-4, 4, (M, 1)), 2.0 ** rng.integers(-4, 4, (G, 1, 40))
  exact = oracle_gmm(qx * sx, qw * sw, sizes)
  sx[40:], sw[1] = np.nan, np.inf  # slack rows and the empty group
  sx[3], sw[2, 0, 5] = np.nan, np.inf
  exact[3] = np.nan
  used = oracle_gmm(qx, qw, sizes)[20:33, 5]
  exact[20:33, 5] = np.where(used == 0, np.nan, np.sign(used) * np.inf)
  turn = (lambda a: a.swapaxes(1, 2)) if transpose_rhs else (lambda a: a)
  lhs = gmm.QArray(jnp.asarray(qx, qtype), jnp.asarray(sx, jnp.float32))
  rhs = gmm.QArray(jnp.asarray(turn(qw), qtype), jnp.asarray(turn(sw), jnp.float32))
  out = program(backend, "gmm", transpose_rhs=transpose_rhs)(lhs, rhs, ints(sizes))
  np.testing.assert_array_equal(out, exact)


@BACKENDS
def test_the_two_scales_are_never_multiplied_first(backend):
  """2^-80 times 2^-78 is zero in float32, and the result, which is not, must not go through it (QNT-1)."""
  code = jnp.full((4, 16), 2.0**15, jnp.float8_e5m2)
  lhs = gmm.QArray(code, jnp.full((4, 1), 2.0**-80))
  rhs = gmm.QArray(jnp.full((1, 16, 8), 2.0**15, jnp.float8_e5m2), jnp.full((1, 1, 8), 2.0**-78))
  out = backend.gmm(lhs, rhs, ints([4]), preferred_element_type="float32")
  np.testing.assert_array_equal(out, np.full((4, 8), 2.0 ** (34 - 80 - 78), np.float32))
  assert float(out[0, 0]) > 0
  dout = gmm.QArray(jnp.full((4, 8), 2.0**15, jnp.float8_e5m2), jnp.full((1, 8), 2.0**-78))
  lhs = gmm.QArray(code, jnp.full((1, 1), 2.0**-80))
  out = backend.tgmm(lhs, dout, ints([4]), num_groups=1, preferred_element_type="float32")
  np.testing.assert_array_equal(out, np.full((1, 16, 8), 2.0 ** (32 - 80 - 78), np.float32))


@BACKENDS
def test_scales_of_tgmm(backend):
  """A scale per tensor or per column; one that is NaN does not reach a group without rows (TGMM-2, QNT-1)."""
  rng = np.random.default_rng(5)
  sizes = np.array([20, 0, 13, 7])
  qx, qd = integers(rng, M, 24), integers(rng, M, 40)
  sd = 2.0 ** rng.integers(-4, 4, (1, 40))
  exact = oracle_tgmm(qx, qd, sizes) * 0.5 * sd
  exact[[0, 2, 3], :, 9], sd[0, 9] = np.nan, np.nan
  lhs = gmm.QArray(jnp.asarray(qx, jnp.int8), jnp.full((1, 1), 0.5, jnp.bfloat16))
  dout = gmm.QArray(jnp.asarray(qd, jnp.float8_e5m2), jnp.asarray(sd, jnp.float32))
  out = program(backend, "tgmm", num_groups=G)(lhs, dout, ints(sizes))
  np.testing.assert_array_equal(out, exact)


@BACKENDS
@pytest.mark.parametrize(
  ("lhs", "rhs"),
  [("float16", "float16"), ("float16", "bfloat16"), ("bfloat16", "float32"), ("float32", "int8"), ("bfloat16", "int8")],
)
def test_mixed_dtypes_and_one_rounding(backend, lhs, rhs):
  """Each operand keeps all its bits, and the only rounding comes after partial_sum (GMM-7, GMM-8)."""
  x = jnp.array([[1.0, 2.0**-7]] * 3, lhs)
  w = jnp.array([[[127.0], [1.0]]], rhs)
  added = jnp.array([[0.5], [0.5], [0.5]])
  out = backend.gmm(x, w, ints([2]), partial_sum=added, preferred_element_type="float32")
  np.testing.assert_array_equal(out, np.array([[127.5078125], [127.5078125], [0.5]]))
  out = backend.gmm(x, w, ints([2]), partial_sum=added, preferred_element_type="bfloat16")
  np.testing.assert_array_equal(out, np.array([[127.5], [127.5], [0.5]]).astype(jnp.bfloat16))


@BACKENDS
@pytest.mark.parametrize(("m", "k", "n", "g"), [(0, 3, 2, 2), (5, 0, 2, 2), (5, 3, 0, 2), (5, 3, 2, 0), (1, 1, 1, 1)])
def test_degenerate_shapes(backend, m, k, n, g):
  """No rows, columns, terms or groups: zeros of the right shape, and one of each is a product (GMM-4, TGMM-4)."""
  x, w, d, sizes = jnp.ones((m, k)), jnp.ones((g, k, n)), jnp.ones((m, n)), ints([m // max(g, 1)] * g)
  out = backend.gmm(x, w, sizes, preferred_element_type="bfloat16")
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out.astype(jnp.float32), oracle_gmm(np.asarray(x), np.asarray(w), np.asarray(sizes)))
  out = backend.tgmm(x, d, sizes, num_groups=g, preferred_element_type="float32")
  assert out.shape == (g, k, n)
  assert (np.asarray(out) == m // max(g, 1)).all()


@pytest.mark.second_interpreter
@BACKENDS
def test_vmap_over_each_combination(backend):
  """Batched or not, an operand at a time or all of them; a batch of none too (GMM-12)."""
  rng = np.random.default_rng(6)
  xs, ws = integers(rng, 2, 40, 16), integers(rng, 2, 3, 16, 8)
  sizes = np.array([[10, 0, 20], [0, 40, 0]])
  run = functools.partial(backend.gmm, preferred_element_type="float32")
  for axes in [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)]:
    pick = lambda arrays, axis, i: arrays[i if axis == 0 else 0]
    args = [a if axis == 0 else a[0] for a, axis in zip((xs, ws, sizes), axes, strict=True)]
    out = jax.vmap(run, in_axes=axes)(jnp.asarray(args[0]), jnp.asarray(args[1]), ints(args[2]))
    for i in range(2):
      want = oracle_gmm(*(pick(a, axis, i) for a, axis in zip((xs, ws, sizes), axes, strict=True)))
      np.testing.assert_array_equal(out[i], want, err_msg=str((axes, i)))
  assert jax.vmap(run)(jnp.zeros((0, 40, 16)), jnp.zeros((0, 3, 16, 8)), jnp.zeros((0, 3), jnp.int32)).shape[0] == 0


@pytest.mark.second_interpreter
@BACKENDS
def test_checked_shard_map(backend):
  """check_vma=True, rows sharded over one axis and groups over another, under grad, scan and remat (GMM-12, VJP-8)."""
  mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  part = jax.sharding.PartitionSpec
  rng = np.random.default_rng(7)
  x, w, sizes = integers(rng, 32, 16), integers(rng, 4, 16, 8), np.array([[5, 0, 7, 2], [0, 16, 0, 0]])

  def local(x, w, sizes):
    offset = jax.lax.axis_index("expert") * 2

    def layer(total, _):
      out = gmm.gmm(x, w, sizes[0], backend=backend, group_offset=offset)
      return total + jax.lax.psum(out, "expert"), None

    start = jax.lax.pcast(jnp.zeros((x.shape[0], 8)), ("data",), to="varying")
    return jax.lax.scan(jax.checkpoint(layer), start, None, length=2)[0]

  specs = (part("data"), part("expert"), part("data"))
  sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=part("data"), check_vma=True))
  loss = lambda x, w: sharded(x, w, ints(sizes)).sum()
  out = sharded(jnp.asarray(x), jnp.asarray(w), ints(sizes))
  halves = [oracle_gmm(x[:16], w, sizes[0]), oracle_gmm(x[16:], w, sizes[1])]
  np.testing.assert_array_equal(out, 2 * np.concatenate(halves))
  dx, dw = jax.grad(loss, argnums=(0, 1))(jnp.asarray(x), jnp.asarray(w))
  ones = 2 * np.ones((16, 8))
  np.testing.assert_array_equal(dw, oracle_tgmm(x[:16], ones, sizes[0]) + oracle_tgmm(x[16:], ones, sizes[1]))
  back = w.swapaxes(1, 2)
  np.testing.assert_array_equal(dx, np.concatenate([oracle_gmm(ones, back, s) for s in sizes]))


def test_axes_of_the_result_are_those_of_all_operands():
  """Inside a checked shard_map a result varies over whatever any operand varies over, and over nothing more."""
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  part = jax.sharding.PartitionSpec
  seen = []

  def local(x, y):
    seen.append(jax.typeof(_opaque.opaque(jnp.multiply, (2,), x, y)).manual_axis_type.varying)
    return jax.lax.psum(_opaque.opaque(jnp.multiply, (2,), x, y), ("a", "b"))

  x = jnp.arange(4.0)
  out = jax.shard_map(local, mesh=mesh, in_specs=(part("a"), part("b")), out_specs=part(), check_vma=True)(x, x)
  assert set(seen) == {frozenset({"a", "b"})}
  np.testing.assert_array_equal(out, (x[:2] + x[2:]) ** 2)


def _problem(lhs, rhs, pass_="fwd", **changes):
  k, n = (lhs.shape[1], rhs.shape[1]) if pass_ == "drhs" else rhs.shape[1:]
  dims = {"m": lhs.shape[0], "k": k, "n": n, "num_groups": 4, "num_global_groups": 4}
  specs = {"lhs": operand_spec(lhs), "rhs": operand_spec(rhs), "out_dtype": "float32"}
  return Problem(**{"pass_": pass_, **dims, **specs, **changes})


def _codes(shape, scale, qtype="int8", scale_dtype="float32"):
  return gmm.QArray(jax.ShapeDtypeStruct(shape, qtype), jax.ShapeDtypeStruct(scale, scale_dtype))


LHS, RHS = jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((4, 256, 128), jnp.float32)
DECLINED = {
  "block scales": (_problem(_codes((64, 256), (64, 2)), RHS), "blocks"),
  "2-D block scales": (_problem(LHS, _codes((4, 256, 128), (4, 2, 1))), "contracting axis"),
  "blocks of columns": (_problem(LHS, _codes((4, 256, 128), (4, 1, 2))), "blocks"),
  "a scale per row in drhs": (_problem(_codes((64, 256), (64, 1)), LHS, "drhs"), "contracting axis"),
  "int4": (_problem(LHS, _codes((4, 256, 128), (1, 1, 128), "int4")), "int4"),
  "float64 operand": (_problem(jax.ShapeDtypeStruct((64, 256), np.float64), RHS), "float64"),
  "float64 result": (_problem(LHS, RHS, out_dtype="float64"), "float64"),
  "a preset": (_problem(LHS, RHS, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32), "BF16_BF16_F32"),
  "tile_m off 8": (_problem(LHS, RHS, tiling=(12, 128, 128)), "tile_m = 12.*multiple of 8"),
  "tile_k off 128": (_problem(LHS, RHS, tiling=(16, 64, 128)), "tile_k = 64 for .*multiples of 128 or the whole"),
  "tile_n off 128": (_problem(LHS, RHS, tiling=(16, 128, 64)), "tile_n = 64"),
}


@BACKENDS
@pytest.mark.parametrize("what", DECLINED)
def test_declined_with_condition_and_way_out(backend, what):
  """A sentence that names what was received, and no numbers from a caller that did not ask (REG-5)."""
  problem, words = DECLINED[what]
  assert re.search(words, backend.supports(problem))
  if "float64" in what:
    return  # without x64 there is no such array
  example = lambda spec: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec)
  operand = lambda s: (
    jax.ShapeDtypeStruct(s.shape, s.dtype) if s.scale_shape is None else _codes(s.shape, s.scale_shape, s.dtype)
  )
  options = {"preferred_element_type": "float32", "precision": problem.precision, "tiling": problem.tiling}
  run = functools.partial(backend.tgmm, num_groups=4) if problem.pass_ == "drhs" else backend.gmm
  with pytest.raises(gmm.Unsupported, match=words):
    run(example(operand(problem.lhs)), example(operand(problem.rhs)), ints([16] * 4), **options)


@BACKENDS
def test_a_step_inside_is_declined(backend):
  """Quantizing and prescaling are done by the op, which learns so from `supports`."""
  quant = gmm.Quant(qtype="float8_e5m2")
  asked = _problem(LHS, RHS)
  asked = dataclasses.replace(asked, lhs=dataclasses.replace(asked.lhs, quant=quant))
  assert "quantize lhs" in backend.supports(asked)
  with pytest.raises(gmm.Unsupported, match="quantize lhs"):
    backend.gmm(jnp.ones((8, 8)), jnp.ones((1, 8, 8)), ints([8]), lhs_quant=quant, preferred_element_type="float32")


@BACKENDS
def test_everything_else_is_supported(backend):
  """What an adapter may not decline: offsets, scales of rows, columns, groups and tensors, every precision."""
  supported = [
    _problem(LHS, RHS, group_offset=True, num_global_groups=9, partial_sum=True),
    _problem(_codes((64, 256), (64, 1)), _codes((4, 256, 128), (4, 1, 128))),
    _problem(_codes((64, 256), (1, 1), "float8_e4m3fn"), _codes((4, 256, 128), (1, 1, 1), "float8_e4m3fn")),
    _problem(_codes((64, 256), (1, 1)), _codes((64, 128), (1, 128), "float8_e5m2"), "drhs"),
    _problem(jax.ShapeDtypeStruct((64, 256), jnp.float16), RHS, out_dtype="float16"),
    *(_problem(LHS, RHS, precision=p) for p in jax.lax.Precision),
    _problem(LHS, RHS, tiling=(8, 256, 128)),
  ]
  assert [backend.supports(p) for p in supported] == [None] * len(supported)


def test_precision_of_the_kernels_dots():
  """float32 at float32 precision unless asked otherwise; bfloat16 at the one that Mosaic compiles (GMM-7)."""
  precision, f32, bf16 = jax.lax.Precision, jnp.ones(1), jnp.ones(1, jnp.bfloat16)
  assert _adapter._precision(None, f32) == precision.HIGHEST
  assert _adapter._precision(precision.DEFAULT, f32) == precision.DEFAULT
  assert _adapter._precision(precision.HIGH, f32) in (precision.HIGH, precision.HIGHEST)
  assert {_adapter._precision(p, bf16) for p in (None, *precision)} == {precision.DEFAULT}


@BACKENDS
def test_precision_reaches_the_kernel(backend):
  """Every dot in the traced program has it: neither kernel takes it the way the other does (GMM-7)."""
  x, w, sizes = jnp.ones((16, 8)), jnp.ones((1, 8, 8)), ints([16])
  for op, operands, options in [("gmm", (x, w), {}), ("tgmm", (x, x), {"num_groups": 1})]:
    for asked, want in [(None, "HIGHEST"), (jax.lax.Precision.DEFAULT, "DEFAULT")]:
      run = functools.partial(getattr(backend, op), preferred_element_type="float32", precision=asked, **options)
      text = jax.jit(run).lower(*operands, sizes).as_text()
      dots = [line for line in text.splitlines() if "dot_general" in line]
      assert dots
      # A precision that is not printed is the default.
      got = {line.split("precision = [")[1].split(",")[0] if "precision" in line else "DEFAULT" for line in dots}
      assert got == {want}, dots


def test_default_tiles_are_legal_and_fit():
  """Any dims: a legal tile, and on a TPU two buffers of each block and the sum within 12 of its 16 MiB of VMEM."""
  sizes = (1, 7, 8, 100, 128, 129, 512, 1000, 1024, 4096, 14336)
  for dims, g, dtype, drhs in itertools.product(
    itertools.product(sizes, sizes, sizes), (1, 8, 256), (jnp.float32, jnp.bfloat16), (False, True)
  ):
    default = functools.partial(_adapter._tile, None, dims, g, jnp.dtype(dtype), drhs=drhs)
    m, k, n = default(interpreted=False)
    for tile in ((m, k, n), default(interpreted=True)):
      assert _adapter._tiling_fault(tile, dims) is None, (dims, tile)
    blocks, out = ((m * k, m * n), k * n) if drhs else ((m * k, k * n), m * n)
    assert 2 * jnp.dtype(dtype).itemsize * sum(blocks) + 3 * 4 * out <= 12 * 2**20, (dims, (m, k, n))


def test_default_rows_follow_the_groups():
  """A row tile on a TPU is no larger than an average group, and never below 128 for many small ones."""
  rows = lambda m, g: _adapter._tile(None, (m, 256, 256), g, jnp.dtype(jnp.bfloat16), drhs=False, interpreted=False)[0]
  assert [rows(m, 8) for m in (64, 1024, 2047, 2048, 4095, 4096, 65536)] == [64, 128, 128, 256, 256, 512, 512]
  assert rows(65536, 256) == 256


@pytest.mark.parametrize("module", [megablox, tokamax_v1])
def test_backends_are_values(module):
  """Equal and hashable by value, so programs are compiled once; found by name under the same name (REG-1, REG-2)."""
  assert module.backend() is gmm.get_backend(module.backend().name)
  again = module.backend.__wrapped__()
  assert again == module.backend()
  assert hash(again) == hash(module.backend())
  assert module.backend(interpret=False) != module.backend()
  assert not module.backend(interpret=False).interpreted()
  assert module.backend(interpret=True).interpreted()
  assert module.backend().interpreted() == (jax.default_backend() != "tpu")
  assert module.backend().int_accumulator == "float32"


def test_auto_prefers_tokamax_on_a_tpu():
  """Lowest rank first; on other platforms neither is considered (REG-4)."""
  assert dict(tokamax_v1.backend().auto_rank) == {"tpu": 30}
  assert dict(megablox.backend().auto_rank) == {"tpu": 40}

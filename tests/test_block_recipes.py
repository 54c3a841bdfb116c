"""Block recipes, power-of-two scales and delayed scaling (SPEC QNT-3, QNT-10, QNT-13, QNT-14, VJP-2).

The conformance kit draws cases in which every block is short; here are the block sizes that the
recipes have, every clause under every block recipe, and what surrounds them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
import qwix.pallas

import gmm
from gmm.conformance import _oracle, checks
from gmm.conformance._bounds import backend_bound
from gmm.conformance._case import Case, Data
from gmm.conformance._operands import dtype_of
from gmm.conformance._programs import both_ways
from gmm.conformance._registry import expect_within
from gmm.conformance._run import run_check
from gmm.conformance._short_blocks import short_blocks

BLOCK_RECIPES = ("fp8_block", "mxfp8", "int4_weight_only")
QUANTIZED_CHECKS = [c for c in checks() if isinstance(c.draws, str) and c.draws.startswith("quantized")]
E4M3 = gmm.Quant(qtype="float8_e4m3fn")
REFERENCE = gmm.get_backend("reference")


def _data(m=24, k=16, n=12, g=3, dtype=jnp.bfloat16, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((m, k), (g, k, n), (m, n)))


def _quants(rule: gmm.Recipe) -> tuple[gmm.Quant, gmm.Quant, gmm.Quant]:
  """lhs, rhs and dout of a recipe that quantizes all three."""
  assert rule.lhs is not None
  assert rule.rhs is not None
  assert rule.dout is not None
  return rule.lhs, rule.rhs, rule.dout


# ---- the recipes -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", BLOCK_RECIPES)
@pytest.mark.parametrize("check", QUANTIZED_CHECKS, ids=lambda c: c.id)
def test_every_clause_holds(check, recipe):
  """The kit samples recipes; here none is left out, with an empty group, slack rows, one group and short blocks."""
  drawn: tuple[tuple[Data, int, tuple[int, ...]], ...]
  drawn = ("real", 1, (7, 0, 13)), ("positive", 2, (24, 0, 0)), ("real", 5, (1, 6, 9))
  for data, seed, sizes in drawn:
    case = Case(24, 16, 12, sizes, dtype="bfloat16", data=data, seed=seed, recipe=recipe)
    result = run_check(check, REFERENCE, case=case, explain=False)
    assert result.status == "passed", f"{case}: {result.message}"


@pytest.mark.parametrize(("recipe", "k", "n"), [("fp8_block", 256, 128), ("mxfp8", 64, 96)])
def test_blocks_of_the_named_size(recipe, k, n):
  """At 128 and at 32, with groups of more and of less than a block: each pass on the codes that SPEC's table names."""
  rule, sizes = gmm.recipe(recipe), np.array([150, 0, 20], np.int32)
  of_lhs, of_rhs, of_dout = _quants(rule)
  lhs, rhs, dout = _data(180, k, n)
  rows = _oracle.ranges(sizes)
  starts, ends = jnp.asarray(np.array(rows, np.int32).T)
  quantize = functools.partial(gmm.quantize, starts=starts, ends=ends)
  codes = quantize(lhs, of_lhs, "rows"), quantize(rhs, of_rhs, "rhs")
  weights = codes[1] if recipe == "fp8_block" else quantize(rhs, of_rhs, "rhs_t")
  d_rows, d_cols, acts = quantize(dout, of_dout), quantize(dout, of_dout, "cols"), quantize(lhs, of_lhs, "cols")
  for got, exact, operands, name in zip(
    both_ways(REFERENCE, recipe=rule)(lhs, rhs, sizes, dout),
    (
      _oracle.gmm(*codes, rows),
      _oracle.gmm(d_rows, weights, rows, transpose_rhs=True),
      _oracle.tgmm(acts, d_cols, rows),
    ),
    (codes, (d_rows, weights), (acts, d_cols)),
    ("out", "dlhs", "drhs"),
    strict=True,
  ):
    types = dtype_of(operands[0]), dtype_of(operands[1])
    expect_within(got, exact.value, backend_bound(REFERENCE, exact, "bfloat16", types), name)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_transposed_weights_give_the_same_bits(recipe):
  """The layout of rhs decides which axis is blocked where; a mistake there still gives plausible numbers."""
  lhs, rhs, dout = _data()
  sizes, rule = np.array([7, 0, 13], np.int32), short_blocks(recipe, 16, 12)
  plain = both_ways(REFERENCE, recipe=rule)(lhs, rhs, sizes, dout)
  stored = both_ways(REFERENCE, recipe=rule, transpose_rhs=True)(lhs, rhs.swapaxes(1, 2), sizes, dout)
  np.testing.assert_array_equal(plain[0], stored[0])
  np.testing.assert_array_equal(plain[1], stored[1])
  np.testing.assert_array_equal(plain[2], stored[2].swapaxes(1, 2))


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_shards_of_experts_give_the_bits_of_the_whole(recipe):
  """Blocks of rows count from a group's first row, so they are the same wherever the group lives (SPEC QNT-7)."""
  lhs, rhs, dout = _data()
  sizes, rule = np.array([7, 2, 13], np.int32), short_blocks(recipe, 16, 12)
  run = both_ways(REFERENCE, recipe=rule)
  out, dlhs, drhs = run(lhs, rhs, sizes, dout)
  shards = [run(lhs, rhs[j : j + 1], sizes, dout, np.int32(j)) for j in range(3)]
  np.testing.assert_array_equal(sum(s[0] for s in shards), out)
  np.testing.assert_array_equal(sum(s[1] for s in shards), dlhs)
  np.testing.assert_array_equal(np.concatenate([s[2] for s in shards]), drhs)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_transforms_change_no_bit(recipe):
  """Blocks of rows are found from the sizes, which vmap batches and shard_map lets differ by shard (SPEC VJP-8)."""
  rule = short_blocks(recipe, 16, 12)
  lhs, rhs, dout = _data()
  sizes = jnp.array([[7, 0, 13], [1, 22, 0]], jnp.int32)
  run = lambda sizes: jax.vjp(lambda a, b: gmm.gmm(a, b, sizes, recipe=rule, backend="reference"), lhs, rhs)[1](dout)
  expected = [jax.jit(run)(s) for s in sizes]
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
  spec = jax.sharding.PartitionSpec("x")
  shard = lambda s: jax.tree.map(lambda x: x[None], _sharded_gradient(rule, lhs, rhs, dout, s[0]))
  for got in (
    jax.jit(jax.vmap(run))(sizes),
    jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True))(sizes),
  ):
    for i in range(2):
      for a, b in zip(got, expected[i], strict=True):
        np.testing.assert_array_equal(a[i], b)


def _sharded_gradient(rule, lhs, rhs, dout, sizes):
  """Gradients of one shard for itself: the operands are marked as its own, else they would be summed."""
  lhs, rhs, dout = jax.tree.map(lambda x: jax.lax.pcast(x, "x", to="varying"), (lhs, rhs, dout))
  return jax.vjp(lambda a, b: gmm.gmm(a, b, sizes, recipe=rule, backend="reference"), lhs, rhs)[1](dout)


@pytest.mark.parametrize(
  ("recipe", "k", "n", "message"),
  [
    ("mxfp8", 40, 32, "blocks of 32 along k = 40"),
    ("fp8_block", 128, 64, "blocks of 128 along n = 64"),
    ("fp8_block", 64, 128, "blocks of 128 along k = 64"),
  ],
)
def test_blocks_that_do_not_divide(recipe, k, n, message):
  """A clear error with the way out, before any compile (SPEC REG-6)."""
  lhs, rhs, _ = _data(4, k, n, 1)
  with pytest.raises(ValueError, match=message + r".*Pad"):
    gmm.gmm(lhs, rhs, [4], recipe=recipe)


def test_n_has_to_fit_for_a_gradient_only():
  """Inference with mxfp8 needs blocks along k; the gradient of lhs has them along n."""
  lhs, rhs, _ = _data(4, 32, 20, 1)
  assert gmm.gmm(lhs, rhs, [4], recipe="mxfp8").shape == (4, 20)
  with pytest.raises(ValueError, match="blocks of 32 along n = 20"):
    jax.grad(lambda a: gmm.gmm(a, rhs, [4], recipe="mxfp8").astype(jnp.float32).sum())(lhs)


@pytest.mark.parametrize("backend", ["xla", "megablox", "tokamax_v1"])
def test_other_backends_decline(backend):
  """Their scales go on the result: in every pass they refuse blocks by name and never return numbers."""
  lhs, rhs, dout = _data()
  rule = short_blocks("fp8_block", 16, 12)
  sizes = np.array([7, 0, 13])
  with pytest.raises(gmm.Unsupported, match="reference"):
    gmm.gmm(lhs, rhs, sizes, recipe=rule, backend=backend)
  with pytest.raises(gmm.Unsupported, match="reference"):
    gmm.tgmm(lhs, dout, sizes, recipe=rule, backend=backend)
  starts, ends = jnp.array([0, 7, 7]), jnp.array([7, 7, 20])
  codes = gmm.quantize(lhs, _quants(rule)[0], "cols", starts=starts, ends=ends)
  other = gmm.get_backend(backend)
  with pytest.raises(gmm.Unsupported, match="reference"):  # asked directly, too
    other.tgmm(codes, dout, jnp.asarray(sizes, jnp.int32), num_groups=3, preferred_element_type="float32")


def test_k_of_zero_is_a_sum_of_nothing():
  """No block is there to scale: covered rows are exactly zero (SPEC GMM-4)."""
  lhs, rhs, _ = _data(4, 0, 32, 1)
  np.testing.assert_array_equal(gmm.gmm(lhs, rhs, [3], recipe="mxfp8", backend="reference"), np.zeros((4, 32)))


# ---- codes and scales ------------------------------------------------------------------

# kind, granularity, shape, and how qwix says it: channelwise axes, tiled axes.
NAMED_BLOCKS = [
  ("rows", 128, (8, 256), (0,), {1: 128}),
  ("rhs", (128, 128), (2, 256, 128), (0,), {1: 128, 2: 128}),
  ("rhs_t", (128, 128), (2, 128, 256), (0,), {2: 128, 1: 128}),
]


@pytest.mark.parametrize(("kind", "granularity", "shape", "channelwise", "tiled"), NAMED_BLOCKS)
def test_blocks_are_those_of_qwix(kind, granularity, shape, channelwise, tiled):
  """Codes, scales and the numbers they stand for, bit for bit (SPEC QNT-2)."""
  x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)
  theirs = qwix.pallas.quantize(x, "float8_e4m3fn", channelwise_axes=channelwise, tiled_axes=tiled)
  ours = gmm.quantize(x, dataclasses.replace(E4M3, granularity=granularity, tiny_scale="qwix"), kind)
  np.testing.assert_array_equal(ours.qvalue, theirs.qvalue)
  np.testing.assert_array_equal(ours.scale, theirs.scale)
  np.testing.assert_array_equal(gmm.dequantize(ours, jnp.bfloat16), qwix.pallas.dequantize(theirs))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_mxfp8_of_every_absmax_is_that_of_qwix(wrap):
  """All 65536 bfloat16 numbers: qwix's logarithm errs in bfloat16, here in the same places (SPEC QNT-13)."""
  values = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)
  x = jnp.asarray(np.repeat(values[:, None], 32, 1))
  theirs = qwix.pallas.quantize(x, "mxfp8", channelwise_axes=(0,), tiled_axes={1: 32})  # jit's maximum loses NaN
  quant = dataclasses.replace(E4M3, granularity=32, rounding="qwix", tiny_scale="qwix")
  ours = wrap(lambda x: gmm.quantize(x, quant))(x)
  np.testing.assert_array_equal(ours.scale.astype(jnp.float32), theirs.scale.astype(jnp.float32))
  np.testing.assert_array_equal(ours.qvalue.astype(jnp.float32), theirs.qvalue.astype(jnp.float32))


def test_ocp_scale_of_every_absmax():
  """Over all bfloat16 numbers: a power of two, absmax / scale in [256, 512) unless 2^-126 is the smallest scale."""
  values = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)
  got = np.asarray(
    jax.jit(lambda x: gmm.quantize(x, _quants(gmm.recipe("mxfp8"))[0]))(np.repeat(values[:, None], 32, 1)).scale
  )
  with np.errstate(invalid="ignore"):
    scale, absmax = got[:, 0].astype(np.float64), np.abs(values.astype(np.float64))
  normal = np.isfinite(absmax) & (absmax >= 2.0**-126)
  assert (np.frexp(scale[normal])[0] == 0.5).all()
  large = normal & (absmax >= 2.0**-118)
  assert (absmax[large] / scale[large] >= 256).all()
  assert (absmax[large] / scale[large] < 512).all()
  assert (scale[normal & ~large] == 2.0**-126).all()
  assert (scale[np.isfinite(absmax) & ~normal] == 1).all()
  assert np.isnan(scale[np.isnan(absmax)]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("granularity", ["channel", "tensor", 32])
def test_a_nan_survives_in_a_large_array(dtype, granularity):
  """XLA's maximum on CPU loses NaNs from some thousand elements on, which small cases never show (SPEC QNT-5)."""
  x = jnp.ones((4096, 64), dtype).at[1000, 3].set(jnp.nan)
  scale = jax.jit(lambda x: gmm.quantize(x, dataclasses.replace(E4M3, granularity=granularity)).scale)(x)
  lost = np.isnan(np.asarray(scale).astype(np.float32))
  assert lost.sum() == 1
  columns = jax.jit(lambda x: gmm.quantize(x, E4M3, "cols").scale)(x)
  assert np.isnan(np.asarray(columns).astype(np.float32)).sum() == 1


def test_no_rule_of_qwix_says_blocks():
  """qwix has no blocks in grouped matmuls: each direction refuses by name rather than drop them (SPEC QNT-11)."""
  with pytest.raises(ValueError, match="granularity=128"):
    gmm.recipe("fp8_block").to_qwix()
  with pytest.raises(ValueError, match="rounding='ocp'"):
    gmm.recipe("fp8_dynamic", rounding="ocp").to_qwix()
  with pytest.raises(ValueError, match="mxfp8"):
    gmm.Recipe.from_qwix(qwix.QtRule(weight_qtype="mxfp8"))
  with pytest.raises(ValueError, match="tile_size"):
    gmm.Recipe.from_qwix(qwix.QtRule(weight_qtype="int8", tile_size=32))
  rule = gmm.recipe("int4_weight_only")
  assert gmm.Recipe.from_qwix(rule.to_qwix()) == rule


def test_dequantize_needs_the_rows_of_the_groups():
  """A QArray with blocks of rows is worth something only with the groups; with them it is what went in."""
  x = jnp.asarray(np.repeat([[1.0], [448.0], [3.0]], [3, 2, 4], axis=0) * np.ones((9, 2)), jnp.float32)
  starts, ends = jnp.array([0, 3, 5]), jnp.array([3, 5, 8])
  codes = gmm.quantize(x, dataclasses.replace(E4M3, granularity=2), "cols", starts=starts, ends=ends)
  with pytest.raises(ValueError, match="starts and ends"):
    gmm.dequantize(codes)
  # An ulp of the scale (2^-23, SPEC QNT-2) and the rounding of code times scale (2^-24).
  np.testing.assert_allclose(gmm.dequantize(codes, starts=starts, ends=ends)[:8], x[:8], rtol=2.0**-23 + 2.0**-24)
  np.testing.assert_array_equal(gmm.dequantize(codes, starts=starts, ends=ends)[8], 0)
  with pytest.raises(ValueError, match='kind="rows"'):
    gmm.gmm(codes, jnp.ones((3, 2, 4)), [3, 2, 3])
  with pytest.raises(ValueError, match="with blocks of 2 rows in 3 groups it needs"):
    gmm.tgmm(dataclasses.replace(codes, scale=codes.scale[:3]), x, [3, 2, 3])


# ---- ranges and delayed scaling --------------------------------------------------------


def test_ranges_are_checked():
  """A range that nothing uses is a mistake, and so is a second one."""
  lhs, rhs, _ = _data()
  call = lambda ranges, recipe="fp8_dynamic": gmm.gmm(lhs, rhs, [24, 0, 0], recipe=recipe, ranges=ranges)
  with pytest.raises(ValueError, match="does not quantize lhs"):
    call(gmm.Ranges(lhs=jnp.float32(1)), "int8_weight_only")
  with pytest.raises(ValueError, match="static range"):
    call(gmm.Ranges(lhs=jnp.float32(1)), "fp8_static")
  with pytest.raises(ValueError, match="float scalar"):
    call(gmm.Ranges(lhs=jnp.ones((24, 1))))
  with pytest.raises(TypeError, match=r"gmm\.Ranges"):
    call(3.0)


def test_a_given_range_of_integer_codes_is_honest_about_nan():
  """Integer codes cannot carry a NaN: the scale of the tensor does, whoever found the range (SPEC QNT-5)."""
  lhs, rhs, _ = _data(dtype=jnp.float32)
  ranges = gmm.Ranges(lhs=jnp.float32(4), rhs=jnp.float32(4))
  run = lambda lhs: gmm.gmm(lhs, rhs, [7, 0, 13], recipe="int8_dynamic", ranges=ranges, backend="reference")
  out = run(lhs.at[1, 1].set(jnp.nan))
  assert np.isnan(out[:20]).all()
  assert not np.any(out[20:])
  np.testing.assert_array_equal(run(lhs.at[22, 1].set(jnp.nan)), run(lhs))  # of no group


def test_a_training_step_with_delayed_scaling():
  """The histories are state like any other: the step is jitted once, and its numbers are those of static ranges.

  The caller sees dout as the cotangent of a zero added to the result.
  """
  lhs, rhs, target = _data(dtype=jnp.float32)
  sizes = jnp.array([7, 0, 13])
  recipe = gmm.recipe("fp8_calibrated")

  def loss(rhs, zero, ranges):
    out = gmm.gmm(lhs, rhs, sizes, recipe=recipe, ranges=ranges, backend="reference") + zero
    return ((out - target) ** 2).mean()

  traces = []

  @jax.jit
  def step(rhs, histories):
    traces.append(1)
    histories = {**histories, "lhs": histories["lhs"].update(lhs, sizes), "rhs": histories["rhs"].update(rhs, sizes)}
    ranges = gmm.Ranges(**{name: history.range for name, history in histories.items()})
    value, (drhs, dout) = jax.value_and_grad(loss, (0, 1))(rhs, jnp.zeros_like(target), ranges)
    histories = {**histories, "dout": histories["dout"].update(dout, sizes)}
    return rhs - 0.3 * drhs, histories, ranges, value, drhs

  histories = {name: gmm.AmaxHistory.init(3) for name in ("lhs", "rhs", "dout")}
  values = []
  for i in range(4):
    before = rhs
    rhs, histories, ranges, value, drhs = step(rhs, histories)
    values.append(float(value))
    if i == 2:
      # The same step with the ranges written into a recipe.
      fixed = lambda quant, limit: dataclasses.replace(quant, calibration=f"fixed,-{float(limit)!r},{float(limit)!r}")
      ls = np.float32(ranges.lhs) / np.float32(448)
      limits = ranges.lhs, ranges.rhs, np.float32(ranges.dout) * ls
      static = gmm.Recipe(**dict(zip(("lhs", "rhs", "dout"), map(fixed, _quants(recipe), limits), strict=True)))
      out = lambda w, r=static: gmm.gmm(lhs, w, sizes, recipe=r, backend="reference")
      expected = jax.jit(jax.grad(lambda w, out=out: ((out(w) - target) ** 2).mean()))(before)
      np.testing.assert_array_equal(drhs, expected)
  assert len(traces) == 1
  assert values == sorted(values, reverse=True)
  assert histories["lhs"].absmax.shape == (3,)
  assert float(histories["lhs"].range) == float(jnp.abs(lhs[:20]).max())


def test_history_of_a_shard():
  """With a group_offset only the rows of local groups count; the maximum over shards is that of the whole."""
  x = jnp.arange(8.0).reshape(8, 1)
  whole = gmm.AmaxHistory.init(1).update(x, [2, 3, 2])
  parts = [gmm.AmaxHistory.init(1).update(x, [2, 3, 2], group_offset=j, num_groups=1) for j in range(3)]
  assert [float(p.range) for p in parts] == [1, 4, 6]
  assert float(whole.range) == 6
  with pytest.raises(ValueError, match="num_groups"):
    gmm.AmaxHistory.init(1).update(x, [2, 3, 2], group_offset=1)
  with pytest.raises(ValueError, match="at least one step"):
    gmm.AmaxHistory.init(0)

"""The custom VJP: what meets in each backward matmul, and what never happens silently (SPEC VJP-1 to VJP-8).

The values of every backend's gradients are the conformance kit's business; here a backend
that writes down what it is asked shows the steps themselves.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gmm
from gmm._quantize import quantize
from gmm.conformance._short_blocks import short_blocks

M, K, N = 16, 8, 12
SIZES = np.array([5, 0, 7])


def _data(dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal((M, K)), dtype), jnp.asarray(rng.standard_normal((3, K, N)), dtype)


def _spy(log, fuses=True):
  """The reference, with each call's arguments appended to `log`."""
  reference = gmm.get_backend("reference")

  def spied(pass_name, fn):
    @functools.wraps(fn)
    def call(lhs, rhs, sizes, **kwargs):
      log.append((pass_name, lhs, rhs, kwargs))
      return fn(lhs, rhs, sizes, **kwargs)

    return call

  def supports(problem):
    return f"It does not {problem.fused_steps[0]}." if problem.fused_steps and not fuses else None

  return gmm.Backend(name="spy", gmm=spied("gmm", reference.gmm), tgmm=spied("tgmm", reference.tgmm), supports=supports)


def _short(name):
  """The recipe with blocks that fit this file's sizes."""
  return short_blocks(name, K, N)


def _loss(backend, recipe=None, **kwargs):
  def loss(lhs, rhs):
    return (gmm.gmm(lhs, rhs, SIZES, backend=backend, recipe=recipe, **kwargs).astype(jnp.float32) ** 2).sum()

  return loss


BACKWARD_TABLE = {
  # recipe: (weights of dlhs, factor into its dout, its dout quantized to; lhs of drhs, factor, dout quantized to)
  "bf16": ("array", False, None, "array", False, None),
  "fp8_dynamic": ("codes", True, "float8_e5m2", "codes", True, "float8_e5m2"),
  "fp8_static": ("codes", True, "float8_e5m2", "codes", True, "float8_e5m2"),
  "fp8_calibrated": ("codes", True, "float8_e5m2", "codes", True, "float8_e5m2"),
  "int8_dynamic": ("codes", True, None, "codes", True, None),
  "int8_weight_only": ("codes", True, None, "array", False, None),
  "int4_weight_only": ("codes", True, None, "array", False, None),
  # Their lhs is quantized anew in drhs, by the backend if it can.
  "fp8_block": ("scaled codes", False, "float8_e4m3fn", "array", False, "float8_e4m3fn"),
  "mxfp8": ("scaled codes", False, "float8_e4m3fn", "array", False, "float8_e4m3fn"),
}


@pytest.mark.parametrize("recipe", gmm.recipe_names())
def test_backward_table(recipe):
  """Each recipe's backward matmuls get exactly the operands of SPEC's table; a swapped row would train, only worse."""
  log = []
  lhs, rhs = _data(jnp.bfloat16)
  jax.grad(_loss(_spy(log), _short(recipe)), (0, 1))(lhs, rhs)
  weights, dlhs_factor, dlhs_quant, acts, drhs_factor, drhs_quant = BACKWARD_TABLE[recipe]
  # Tracing runs the undifferentiated call too; the last three are forward, dlhs and drhs.
  (_, flhs, frhs, _), (_, _, dlhs_rhs, dlhs), (_, drhs_lhs, _, drhs) = log[-3:]

  def what(x, forward):
    if isinstance(x, gmm.QArray):
      return "scaled codes"
    if isinstance(forward, gmm.QArray) and x.dtype == forward.qvalue.dtype:
      return "codes"
    return "array" if x.dtype == jnp.bfloat16 else "other"

  assert what(dlhs_rhs, frhs) == weights
  assert (dlhs["lhs_prescale"] is not None) == dlhs_factor
  assert (dlhs["lhs_quant"] and dlhs["lhs_quant"].qtype) == dlhs_quant
  assert what(drhs_lhs, flhs) == acts
  assert (drhs["dout_prescale"] is not None) == drhs_factor
  assert (drhs["dout_quant"] and drhs["dout_quant"].qtype) == drhs_quant
  assert drhs["lhs_quant"] == (_short(recipe).lhs if recipe in ("fp8_block", "mxfp8") else None)
  if recipe == "fp8_block":  # the forward's codes and scales: blocks of both k and n
    assert dlhs_rhs.scale.shape == frhs.scale.shape == (3, K // 4, N // 4)
  if recipe == "mxfp8":  # blocks of n now, where the forward had blocks of k
    assert frhs.scale.shape == (3, K // 4, N)
    assert dlhs_rhs.scale.shape == (3, K, N // 4)
  assert dlhs["transpose_rhs"] is True
  assert drhs["num_groups"] == 3


def test_every_named_recipe_is_in_the_table():
  """A recipe that nobody wrote the backward of must not slip in."""
  assert set(BACKWARD_TABLE) == set(gmm.recipe_names())


@pytest.mark.parametrize(
  "recipe", ["fp8_dynamic", "fp8_static", "int8_dynamic", "int8_weight_only", "fp8_block", "mxfp8"]
)
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_fused_and_outside_agree(recipe, transpose_rhs):
  """A backend that quantizes inside and one that cannot get the same numbers, bit for bit (SPEC QNT-8)."""
  lhs, rhs = _data(jnp.bfloat16)
  rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
  run = lambda fuses: jax.value_and_grad(_loss(_spy([], fuses), _short(recipe), transpose_rhs=transpose_rhs), (0, 1))(
    lhs, rhs
  )
  for fused, outside in zip(jax.tree.leaves(run(True)), jax.tree.leaves(run(False)), strict=True):
    np.testing.assert_array_equal(fused, outside)


@pytest.mark.parametrize("recipe", gmm.recipe_names())
def test_undifferentiated_value_is_the_differentiated_one(recipe):
  """Without a gradient lhs is quantized inside the backend, with one outside: the value may not know."""
  lhs, rhs = _data(jnp.bfloat16)
  loss = _loss("reference", _short(recipe))
  assert loss(lhs, rhs) == jax.value_and_grad(loss, (0, 1))(lhs, rhs)[0]


@pytest.mark.parametrize(
  ("recipe", "kinds"),
  [
    ("fp8_dynamic", ("float8_e4m3fn", "float8_e4m3fn")),
    ("fp8_block", ("bfloat16", "float8_e4m3fn")),
    ("mxfp8", ("bfloat16", "bfloat16")),
    ("int4_weight_only", ("bfloat16", "int4")),
  ],
)
def test_residuals_are_codes(recipe, kinds):
  """The backward keeps 1 byte an element where it reuses codes, the operand as given where it quantizes anew."""
  lhs, rhs = _data(jnp.bfloat16)
  _, pullback = jax.vjp(lambda a, b: gmm.gmm(a, b, SIZES, recipe=_short(recipe), backend="reference"), lhs, rhs)
  kept = sorted((x.size, x.dtype.name) for x in jax.tree.leaves(pullback) if hasattr(x, "size") and x.size >= lhs.size)
  assert kept == [(lhs.size, kinds[0]), (rhs.size, kinds[1])]


def test_residuals_have_names_for_remat():
  """A remat policy can choose what to keep: nothing saved recomputes the quantization, names save the codes."""
  lhs, rhs = _data(jnp.bfloat16)
  loss = _loss("reference", "fp8_dynamic")
  expected = jax.grad(loss, (0, 1))(lhs, rhs)
  names = jax.checkpoint_policies.save_only_these_names("gmm_lhs", "gmm_rhs")
  for policy, codes in ((names, 2), (jax.checkpoint_policies.nothing_saveable, 0)):
    remat = jax.checkpoint(loss, policy=policy)
    for a, b in zip(jax.grad(remat, (0, 1))(lhs, rhs), expected, strict=True):
      np.testing.assert_array_equal(a, b)
    leaves = jax.tree.leaves(jax.vjp(remat, lhs, rhs)[1])
    assert sum(x.dtype == jnp.float8_e4m3fn for x in leaves if hasattr(x, "dtype")) == codes


def test_cotangent_dtypes():
  """dlhs and drhs have the operands' dtypes whatever the result's; sizes and codes have no cotangent (SPEC VJP-3)."""
  lhs, rhs = _data()
  lhs = lhs.astype(jnp.bfloat16)
  loss = lambda a, b, s: gmm.gmm(a, b, s, backend="reference", preferred_element_type=jnp.float32).sum()
  dlhs, drhs, dsizes = jax.grad(loss, (0, 1, 2), allow_int=True)(lhs, rhs, jnp.asarray(SIZES))
  assert (dlhs.dtype, drhs.dtype) == (jnp.bfloat16, jnp.float32)
  assert dsizes.dtype == jax.dtypes.float0

  codes = quantize(rhs, gmm.Quant(qtype="int8"), "rhs")
  dlhs, dcodes = jax.grad(lambda a, b: gmm.gmm(a, b, SIZES).sum().astype(jnp.float32), (0, 1), allow_int=True)(
    lhs, codes
  )
  assert dlhs.dtype == jnp.bfloat16
  assert dcodes.qvalue.dtype == jax.dtypes.float0
  assert not np.any(dcodes.scale)


def test_partial_sum_and_existing_out_cotangents():
  """partial_sum gets dout everywhere, existing_out only where no group covers the row (SPEC VJP-5)."""
  lhs, rhs = _data()
  dout = jnp.arange(M * N, dtype=jnp.float32).reshape(M, N)
  extra = jnp.ones((M, N), jnp.bfloat16)
  for name, rows in (("partial_sum", slice(0, M)), ("existing_out", slice(12, M))):
    fn = lambda e, name=name: gmm.gmm(lhs, rhs, SIZES, backend="reference", **{name: e})
    out, pullback = jax.vjp(fn, extra)
    expected = np.zeros((M, N), np.float32)
    expected[rows] = np.asarray(dout.astype(jnp.bfloat16).astype(jnp.float32))[rows]
    (got,) = pullback(dout)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), expected, err_msg=name)
    np.testing.assert_array_equal(out[12:], np.ones((4, N)), err_msg=name)


def test_each_pass_gets_its_tile():
  """An explicit tile reaches the pass it is for, and no other (SPEC REG-7)."""
  lhs, rhs = _data()
  fwd, dlhs, drhs = (8, 1, 1), (8, 2, 2), (8, 3, 3)
  for tiling, expected in (
    (gmm.Tiling(fwd=fwd), (fwd, None, None)),
    (gmm.Tiling(drhs=drhs), (None, None, drhs)),
    ((*fwd, *dlhs, *drhs), (fwd, dlhs, drhs)),
    (fwd, (fwd, fwd, fwd)),
    (None, (None, None, None)),
  ):
    for recipe in ("bf16", "fp8_dynamic"):
      log = []
      jax.grad(_loss(_spy(log), recipe, tiling=tiling), (0, 1))(lhs, rhs)
      assert tuple(call[3]["tiling"] for call in log[-3:]) == expected


def _dense_loss(lhs, rhs):
  groups = np.repeat(np.arange(3), SIZES)
  return (jnp.einsum("mk,mkn->mn", lhs[: len(groups)], rhs[groups], precision="highest") ** 2).sum()


def test_second_order_is_exact_on_integers():
  """gmm and tgmm differentiate into each other: the Hessian-vector products equal a dense einsum's (SPEC VJP-6)."""
  rng = np.random.default_rng(1)
  lhs, rhs = (jnp.asarray(rng.integers(-2, 3, s), jnp.float32) for s in ((M, K), (3, K, N)))

  def second(loss):
    return jax.grad(lambda a, b: sum((g**2).sum() for g in jax.grad(loss, (0, 1))(a, b)), (0, 1))

  expected = second(_dense_loss)(lhs, rhs)
  for transform in (lambda f: f, jax.jit):
    got = transform(second(_loss("reference")))(lhs, rhs)
    for a, b in zip(got, expected, strict=True):
      np.testing.assert_array_equal(a, b)


def test_tgmm_gradients_are_exact_on_integers():
  """The public tgmm has a VJP of its own (SPEC VJP-1)."""
  rng = np.random.default_rng(2)
  lhs, dout, ct = (jnp.asarray(rng.integers(-2, 3, s), jnp.float32) for s in ((M, K), (M, N), (3, K, N)))
  groups = np.repeat(np.arange(3), SIZES)
  onehot = jnp.asarray(np.eye(3, dtype=np.float32)[groups])

  def dense(a, b):
    return jnp.einsum("mg,mk,mn->gkn", onehot, a[: len(groups)], b[: len(groups)], precision="highest")

  out, pullback = jax.vjp(lambda a, b: gmm.tgmm(a, b, SIZES, backend="reference"), lhs, dout)
  expected, dense_pullback = jax.vjp(dense, lhs, dout)
  np.testing.assert_array_equal(out, expected)
  for a, b in zip(pullback(ct), dense_pullback(ct), strict=True):
    np.testing.assert_array_equal(a, b)


def test_tgmm_of_a_recipe_is_the_drhs_of_its_gmm():
  """A quantized tgmm means what the backward of gmm computes; anything else would be a second convention."""
  lhs, rhs = _data(jnp.bfloat16)
  dout = _data(jnp.bfloat16, seed=3)[1][0, :, :].repeat(2, axis=0)[:M, :N]
  for recipe in gmm.recipe_names():
    _, pullback = jax.vjp(lambda b, r=recipe: gmm.gmm(lhs, b, SIZES, backend="reference", recipe=_short(r)), rhs)
    drhs = gmm.tgmm(lhs, dout, SIZES, backend="reference", recipe=_short(recipe))
    np.testing.assert_array_equal(drhs, pullback(dout)[0], err_msg=recipe)


QUANTIZED = [r for r in gmm.recipe_names() if r != "bf16"]


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("jit", [False, True])
def test_second_order_of_a_quantized_recipe_is_refused(recipe, jit):
  """Rounding has no second derivative; numbers that look like one would be worse than an error (SPEC VJP-6)."""
  lhs, rhs = _data()
  first = jax.grad(_loss("reference", _short(recipe)))
  second = jax.grad(lambda a: (first(a, rhs) ** 2).sum())
  with pytest.raises(gmm.Unsupported, match="recipe='bf16'"):
    (jax.jit(second) if jit else second)(lhs)
  with pytest.raises(gmm.Unsupported, match="recipe='bf16'"):
    jax.grad(lambda a: gmm.tgmm(a, jnp.ones((M, N)), SIZES, recipe=_short(recipe), backend="reference").sum())(lhs)


def test_second_order_with_codes_as_operand_is_refused():
  """Weights that come quantized (PTQ) have a first derivative for lhs, and no second."""
  lhs, rhs = _data()
  codes = quantize(rhs, gmm.Quant(qtype="int8"), "rhs")
  first = jax.grad(lambda a: (gmm.gmm(a, codes, SIZES, backend="reference") ** 2).sum())
  assert first(lhs).shape == lhs.shape
  with pytest.raises(gmm.Unsupported, match="recipe='bf16'"):
    jax.grad(lambda a: (first(a) ** 2).sum())(lhs)


@pytest.mark.parametrize("recipe", [None, "fp8_dynamic"])
def test_forward_mode_is_refused(recipe):
  """jvp is JAX's own error for a custom VJP, never a wrong tangent (SPEC VJP-6)."""
  lhs, rhs = _data()
  with pytest.raises(TypeError, match="jvp"):
    jax.jvp(lambda a: gmm.gmm(a, rhs, SIZES, backend="reference", recipe=recipe), (lhs,), (lhs,))


def test_clip_gradient_bounds_are_inclusive():
  """With clip_gradient the gradient outside a static range is zero, on its bounds it is not (SPEC VJP-7)."""
  values = jnp.array([-3.0, -2.0, -1.5, 0.0, 2.0, 2.0001, 5.0, 1.0])
  lhs = jnp.broadcast_to(values, (M, K))
  rhs = jnp.ones((3, K, N))
  quant = gmm.Quant(qtype="float8_e4m3fn", granularity="tensor", calibration="fixed,-2,2")
  inside = np.array([0, 1, 1, 1, 1, 0, 0, 1.0])
  for clip, mask in ((False, np.ones(8)), (True, inside)):
    recipe = gmm.Recipe(lhs=dataclasses.replace(quant, clip_gradient=clip), rhs=quant)
    grad = jax.grad(lambda a, r=recipe: gmm.gmm(a, rhs, SIZES, backend="reference", recipe=r).sum())(lhs)
    np.testing.assert_array_equal(grad[:12] != 0, np.broadcast_to(mask, (12, 8)).astype(bool))
    np.testing.assert_array_equal(grad[12:], 0)


def test_clip_gradient_passes_a_nan_on():
  """Only what lies outside the range is zeroed: the gradient of a NaN stays what it is (SPEC VJP-7)."""
  quant = gmm.Quant(qtype="float8_e4m3fn", granularity="tensor", calibration="fixed,-2,2", clip_gradient=True)
  lhs = jnp.array([[np.nan, 1, 3, 0]], jnp.float32)
  loss = lambda x: gmm.gmm(
    x, jnp.ones((1, 4, 2)), [1], backend="reference", recipe=gmm.Recipe(lhs=quant, rhs=quant)
  ).sum()
  np.testing.assert_array_equal(jax.grad(loss)(lhs) != 0, [[True, True, False, True]])


def test_clip_gradient_knows_the_global_range():
  """With scale_scope="global" the range is that of all shards, as the codes are."""
  quant = gmm.Quant(qtype="int8", granularity="tensor", calibration="absmax,0.5", clip_gradient=True)
  recipe = gmm.Recipe(lhs=quant, rhs=quant)
  spread = dataclasses.replace(recipe, scale_scope="global", scale_axes=("shard",))
  lhs = np.repeat(np.array([1, 2, 3, 4, 1, 1, 1, 1], np.float32), 4).reshape(8, 4)
  rhs = np.array([1, 8], np.float32)[:, None, None] * np.ones((2, 4, 4), np.float32)
  grads = lambda recipe, sizes: jax.grad(lambda x, w: gmm.gmm(x, w, sizes, recipe=recipe).sum(), (0, 1))
  whole = grads(recipe, np.array([4, 4]))(lhs, rhs)
  split = jax.vmap(grads(spread, np.array([4])), axis_name="shard")(lhs.reshape(2, 4, 4), rhs[:, None])
  for one, other in zip(whole, split, strict=True):
    np.testing.assert_array_equal(one, other.reshape(one.shape))
  assert not whole[0][2:4].any()
  assert whole[0][4:].all()


def test_codes_with_blocks_cannot_be_quantized_anew():
  """Blocks along k say nothing along n: of codes alone the gradient of lhs is refused by name, never computed."""
  lhs, rhs = _data()
  codes = quantize(rhs, gmm.Quant(qtype="int8", granularity=4), "rhs")
  with pytest.raises(gmm.Unsupported, match=r"rhs came as codes.*unquantized"):
    jax.grad(lambda a: gmm.gmm(a, codes, SIZES, backend="reference").sum())(lhs)
  blocks = quantize(lhs, gmm.Quant(qtype="int8", granularity=4))
  with pytest.raises(gmm.Unsupported, match=r"lhs came as codes.*unquantized"):
    jax.grad(lambda w: gmm.gmm(blocks, w, SIZES, backend="reference").sum())(rhs)


def test_auto_chooses_for_each_pass():
  """A backend that can only multiply forward serves "auto" there, and another the gradients."""
  log = []
  spy = _spy(log)
  forward_only = dataclasses.replace(
    spy, name="forward_only", supports=lambda p: None if p.pass_ == "fwd" else "fwd only.", auto_rank=(("cpu", 1),)
  )
  lhs, rhs = _data()
  with gmm.register_backend(forward_only):
    if jax.default_backend() != "cpu":
      pytest.skip("ranks are for the CPU here")
    jax.grad(_loss("auto"), (0, 1))(lhs, rhs)
    assert {call[0] for call in log} == {"gmm"}
    assert all(not call[3]["transpose_rhs"] for call in log)
    with pytest.raises(gmm.Unsupported, match=r"'forward_only' cannot do dlhs.*fwd only"):
      jax.grad(_loss("forward_only"))(lhs, rhs)

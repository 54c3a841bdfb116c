"""qwix interoperability: rules, QArrays and interception (SPEC QNT-11).

A rule that says something we do not do must be an error that names the field: dropped
silently, it would be a model quantized differently from what its owner wrote. And a model
under `qwix.quantize_model` must be quantized once, by us.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
import qwix.pallas
from flax import linen, nnx
from qwix._src import interception

import gmm
from gmm import _call, _qwix

# qwix uses names that Flax deprecates; neither is ours to change.
pytestmark = [
  pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning"),
  pytest.mark.filterwarnings("ignore:The '.*' method is deprecated; use the 'nnx:DeprecationWarning"),
  pytest.mark.filterwarnings("ignore:'.value' access is now deprecated:DeprecationWarning"),
]

FP8 = {"weight_qtype": jnp.float8_e4m3fn, "act_qtype": jnp.float8_e4m3fn, "bwd_qtype": jnp.float8_e5m2}
SIZES = np.array([3, 0, 4], np.int32)


def quant(qtype, granularity: Any = "channel", **fields):
  return gmm.Quant(qtype=qtype, granularity=granularity, **fields)


# ---- rules -----------------------------------------------------------------------------

RULES = {
  "nothing": ({}, gmm.Recipe()),
  "fp8": (FP8, gmm.recipe("fp8_dynamic")),
  "int8": ({"weight_qtype": jnp.int8, "act_qtype": jnp.int8}, gmm.recipe("int8_dynamic")),
  "int8 weights": ({"weight_qtype": "int8"}, gmm.recipe("int8_weight_only")),
  "int4 by dtype": ({"weight_qtype": jnp.dtype("int4")}, gmm.Recipe(rhs=quant("int4"))),
  "e5m2 by name": ({"weight_qtype": "float8_e5m2"}, gmm.Recipe(rhs=quant("float8_e5m2"))),
  "int8 by numpy": ({"weight_qtype": np.int8, "bwd_qtype": "int8"}, gmm.Recipe(rhs=quant("int8"), dout=quant("int8"))),
  "static": (
    FP8 | {"weight_calibration_method": "fixed,-224,224", "act_calibration_method": "fixed,224"},
    gmm.Recipe(
      lhs=quant("float8_e4m3fn", "tensor", calibration="fixed,224"),
      rhs=quant("float8_e4m3fn", "tensor", calibration="fixed,-224,224"),
      dout=quant("float8_e5m2"),
    ),
  ),
  "per tensor": (
    FP8 | {"disable_channelwise_axes": True, "bwd_calibration_method": "absmax,0.5"},
    gmm.Recipe(
      lhs=quant("float8_e4m3fn", "tensor"),
      rhs=quant("float8_e4m3fn", "tensor"),
      dout=quant("float8_e5m2", "tensor", calibration="absmax,0.5"),
    ),
  ),
  "keys": ({"module_path": ".*moe.*", "op_names": ("gmm",), "weight_qtype": jnp.int8}, gmm.recipe("int8_weight_only")),
  "defaults spelled out": (
    FP8
    | {
      "act_static_scale": False,
      "act_calibration_method": "absmax",
      "act_batch_axes": [0],
      "channelwise_noise_axes": [0],
      "additional_qt_config": {},
      "tile_size": None,
    },
    gmm.recipe("fp8_dynamic"),
  ),
}


@pytest.mark.parametrize("name", RULES)
def test_rule_becomes_recipe(name):
  """Each field of a rule arrives in its place, whatever spelling its dtype has."""
  fields, want = RULES[name]
  assert gmm.Recipe.from_qwix(qwix.QtRule(**fields)) == want
  in_qwix = gmm.Recipe.from_qwix(qwix.QtRule(**fields), tiny_scale="qwix")
  assert in_qwix == want.replace_quants(tiny_scale="qwix")


def test_a_rule_without_backward_fields_leaves_dout_alone():
  rule = qwix.QuantizationRule(weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn)
  assert gmm.Recipe.from_qwix(rule) == dataclasses.replace(gmm.recipe("fp8_dynamic"), dout=None)


NOT_HONOURED = {
  "tile_size": 128,
  "act_static_scale": True,
  "act_batch_axes": (0, 1),
  "weight_calibration_method": "minmax",
  "act_calibration_method": "rms,3",
  "bwd_calibration_method": "fixed,-1,2",
  "weight_qtype": "nf4",
  "act_qtype": "mxfp8",
  "bwd_qtype": jnp.bfloat16,
  "bwd_weight_grad_tile_size": 1 / 2,
  "bwd_stochastic_rounding": "uniform",
  "channelwise_noise_axes": (1,),
  "additional_qt_config": {"disable_gradient_clipping": True},
}


@pytest.mark.parametrize("field", NOT_HONOURED)
def test_a_field_not_honoured_is_named(field):
  rule = qwix.QtRule(**FP8 | {field: NOT_HONOURED[field]})
  with pytest.raises(ValueError, match=rf"QtRule\.{field}\b.*not honoured"):
    gmm.Recipe.from_qwix(rule)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(qwix.QtRule)])
def test_every_field_of_a_rule_is_honoured_or_refused(field):
  """Holds the two lists above to qwix: a field that a new version adds fails here, and `from_qwix` refuses it."""
  granularity = ("disable_channelwise_axes", "module_path", "op_names")
  assert field in NOT_HONOURED or field in granularity


def test_a_field_unknown_to_us_is_refused():
  """Rules of other providers carry settings of their own, here LoRA's rank."""
  with pytest.raises(ValueError, match=r"LoraRule\.rank = 4 is not honoured"):
    gmm.Recipe.from_qwix(qwix.LoraRule(weight_qtype=jnp.int8, rank=4, alpha=1.0))


def test_a_rule_that_qwix_itself_would_ignore_is_refused():
  """qwix quantizes nothing without weight_qtype, however much else the rule says."""
  with pytest.raises(ValueError, match="act_qtype is set but weight_qtype is not"):
    gmm.Recipe.from_qwix(qwix.QtRule(act_qtype=jnp.int8))
  with pytest.raises(ValueError, match="bwd_qtype is set but weight_qtype is not"):
    gmm.Recipe.from_qwix(qwix.QtRule(bwd_qtype=jnp.int8))


@pytest.mark.parametrize("rule", [None, "fp8", qwix.QtRule, gmm.Recipe()])
def test_not_a_rule(rule):
  with pytest.raises(TypeError, match=r"needs a qwix\.QuantizationRule or qwix\.QtRule"):
    gmm.Recipe.from_qwix(rule)


# Every recipe that a rule can express: code dtypes x shared granularity or fixed ranges x tiny_scale.
def _expressible():
  e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
  for tiny in ("clamp", "qwix"):
    for granularity in ("tensor", "channel"):
      for lhs, rhs, dout in ((e4m3, e4m3, e5m2), ("int8", "int8", None), (None, "int4", None), (None, e5m2, "int8")):
        quants: dict[str, Any] = {"lhs": lhs, "rhs": rhs, "dout": dout}
        quants = {name: qtype and quant(qtype, granularity, tiny_scale=tiny) for name, qtype in quants.items()}
        quants["rhs"] = dataclasses.replace(quants["rhs"], calibration="absmax,0.75")
        yield gmm.Recipe(**quants)
        fixed = {"granularity": "tensor", "calibration": "fixed,-3.5,3.5"}
        yield gmm.Recipe(**quants | {"rhs": dataclasses.replace(quants["rhs"], **fixed)})
  yield gmm.Recipe(rhs=quant("int8", calibration=" Absmax, 0.5"))  # any spelling of ours is one of qwix's
  yield gmm.Recipe()
  for name in ("fp8_dynamic", "fp8_static", "int8_dynamic", "int8_weight_only", "bf16"):
    yield gmm.recipe(name)


@pytest.mark.parametrize("recipe", list(_expressible()), ids=lambda r: r.name)
def test_round_trip(recipe):
  """Nothing is lost between a recipe and its rule, also when a provider fills in its defaults."""
  tiny = recipe.rhs.tiny_scale if recipe.rhs else "clamp"
  rule = recipe.to_qwix()
  assert isinstance(rule, qwix.QtRule)
  assert gmm.Recipe.from_qwix(rule, tiny_scale=tiny) == recipe
  (filled_in,) = qwix.QtProvider([rule])._rules
  assert gmm.Recipe.from_qwix(filled_in, tiny_scale=tiny) == recipe


def test_to_qwix_takes_the_keys_of_the_rule():
  rule = gmm.recipe("fp8_dynamic").to_qwix(module_path=".*moe", op_names=("gmm",))
  assert (rule.module_path, rule.op_names) == (".*moe", ("gmm",))
  with pytest.raises(TypeError, match="'tile_size'"):
    gmm.recipe("fp8_dynamic").to_qwix(tile_size=128)


INT8 = quant("int8")
INEXPRESSIBLE = {
  r"lhs\.granularity=32": gmm.Recipe(lhs=quant("int8", 32), rhs=quant("int8", 32)),
  r"rhs\.granularity=\(128, 128\)": gmm.Recipe(rhs=quant("int8", (128, 128))),
  r"rhs\.granularity='channel_per_group'": gmm.Recipe(rhs=quant("int8", "channel_per_group")),
  r"one granularity .* lhs: 'tensor', rhs: 'channel'": gmm.Recipe(lhs=quant("int8", "tensor"), rhs=INT8),
  r"dout: 'channel'": gmm.recipe("fp8_calibrated"),
  r"rhs\.scale_dtype='float32'": gmm.Recipe(rhs=quant("int8", scale_dtype="float32")),
  r"dout\.clip_gradient=True": gmm.Recipe(rhs=INT8, dout=quant("int8", clip_gradient=True)),
  r"tiny_scale per operand": gmm.Recipe(rhs=INT8, dout=quant("int8", tiny_scale="qwix")),
  r"scale_scope='global'": gmm.Recipe(rhs=INT8, scale_scope="global", scale_axes=("x",)),
}


@pytest.mark.parametrize("words", INEXPRESSIBLE)
def test_a_recipe_that_no_rule_expresses_is_refused(words):
  with pytest.raises(ValueError, match=words):
    INEXPRESSIBLE[words].to_qwix()


# ---- operands --------------------------------------------------------------------------


def test_qarray_of_qwix_is_taken_as_ours():
  """Codes and scale of qwix multiply like ours: no difference in a single bit."""
  lhs = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4)), jnp.bfloat16)
  rhs = jnp.asarray(np.random.default_rng(1).standard_normal((3, 4, 5)), jnp.bfloat16)
  qlhs: Any = qwix.pallas.quantize(lhs, jnp.int8, channelwise_axes=(0,))
  qrhs: Any = qwix.pallas.quantize(rhs, jnp.int8, channelwise_axes=(2,))
  got = gmm.gmm(qlhs, qrhs, SIZES, backend="reference")
  ours = gmm.gmm(gmm.QArray(qlhs.qvalue, qlhs.scale), gmm.QArray(qrhs.qvalue, qrhs.scale), SIZES, backend="reference")
  np.testing.assert_array_equal(got, ours)
  assert got.any()


def test_qarray_of_qwix_that_is_not_codes_times_scale_is_refused():
  """A zero point or a lookup table is another meaning of the same integers."""
  rhs = jnp.ones((3, 4, 5), jnp.bfloat16)
  asymmetric: Any = qwix.pallas.quantize(jnp.ones((8, 4)), jnp.int8, calibration_method="minmax")
  with pytest.raises(ValueError, match="lhs has a zero_point"):
    gmm.gmm(asymmetric, rhs, SIZES, backend="reference")
  table: Any = qwix.pallas.quantize(jnp.ones((8, 4)), "nf4")
  with pytest.raises(ValueError, match="lhs has qtype nf4"):
    gmm.gmm(table, rhs, SIZES, backend="reference")


# ---- interception ----------------------------------------------------------------------


class Nnx(nnx.Module):
  """One grouped matmul; `log` gets what happened inside."""

  def __init__(self, run):
    self.w = nnx.Param(jnp.asarray(np.random.default_rng(2).standard_normal((3, 4, 5)), jnp.float32))
    self.run = run

  def __call__(self, x):
    return self.run(x, self.w[...])


class Linen(linen.Module):
  run: Any

  @linen.compact
  def __call__(self, x):
    return self.run(x, self.param("w", lambda key: jax.random.normal(key, (3, 4, 5))))


X = np.random.default_rng(3).standard_normal((8, 4)).astype(np.float32)


def in_model(run, *rules, flavour="nnx", **provider):
  """Calls run(x, w) inside a model under qwix.quantize_model; returns (its result, w)."""
  provider = qwix.QtProvider(rules, **provider)
  if flavour == "nnx":
    model: Any = qwix.quantize_model(Nnx(run), provider, X)
    return model(X), model.w[...]
  model = qwix.quantize_model(Linen(run), provider)
  variables = model.init(jax.random.key(0), X)
  return model.apply(variables, X), variables["params"]["w"]


FLAVOURS = pytest.mark.parametrize("flavour", ["nnx", "linen"])


@FLAVOURS
@pytest.mark.parametrize("disable_jit", [False, True])
def test_rule_in_force_is_found(flavour, disable_jit):
  """Inside the model the rule for op `gmm` is the recipe; other rules and other ops do not count."""
  found = []

  def run(x, w):
    found.append(_qwix.rule_in_force())
    return x @ w[0]

  other = qwix.QtRule(op_names=("dot_general",), weight_qtype=jnp.int8)
  mine = qwix.QtRule(op_names=("gmm", "ragged_dot"), **FP8)
  in_model(run, other, mine, flavour=flavour, disable_jit=disable_jit)
  assert set(map(hash, found)) == {hash(gmm.recipe("fp8_dynamic"))}
  assert found[0] == gmm.recipe("fp8_dynamic")


@FLAVOURS
def test_rule_with_provider_of_another_kind(flavour):
  """A QuantizationRule of any provider is found just as well."""
  found = []

  def run(x, w):
    found.append(_qwix.rule_in_force())
    return x

  in_model(run, qwix.QuantizationRule(weight_qtype=jnp.int8), flavour=flavour)
  assert found[0] == gmm.recipe("int8_weight_only")


@FLAVOURS
@pytest.mark.parametrize(
  ("rules", "words"),
  [
    ((), "found no rule in force for op 'gmm'"),
    ((qwix.QtRule(op_names=("ragged_dot",), **FP8),), "found no rule in force for op 'gmm'"),
    ((qwix.QtRule(module_path="elsewhere", **FP8),), "found no rule in force for op 'gmm'"),
    ((qwix.QtRule(),), "quantizes nothing"),
    ((qwix.QtRule(act_qtype=jnp.int8),), "act_qtype is set but weight_qtype is not"),
    ((qwix.QtRule(tile_size=32, **FP8),), "tile_size = 32 is not honoured"),
  ],
  ids=["no rule", "another op", "another module", "empty", "activations only", "not honoured"],
)
def test_never_silently_unquantized(flavour, rules, words):
  with pytest.raises(ValueError, match=words):
    in_model(lambda x, w: gmm.gmm(x, w, SIZES, recipe="qwix", backend="reference"), *rules, flavour=flavour)


def test_outside_of_a_model_there_is_no_rule():
  with pytest.raises(ValueError, match=r"found no rule in force .* qwix\.quantize_model"):
    gmm.gmm(X, jnp.ones((3, 4, 5)), SIZES, recipe="qwix", backend="reference")


def _intercepted_ops(lhs, rhs):
  """A product by each op that qwix patches: they differ bitwise from the plain ones if it quantizes them."""
  sizes = jnp.asarray(SIZES)
  return (
    jax.lax.ragged_dot(lhs, rhs, sizes),
    jnp.einsum("mk,kn->mn", lhs, rhs[0]),
    jax.lax.dot_general(lhs, rhs[0], (((1,), (0,)), ((), ()))),
    lhs @ rhs[0],
  )


def _jit_works():
  """Whether jit traces a function here, instead of running it as Python."""
  traced = []
  jax.jit(lambda x: traced.append(not isinstance(x, int)))(0)
  return traced == [True]


@pytest.fixture
def implicit_promotion():
  """qwix's own matmuls, which the controls run, mix dtypes: the suite's strict promotion refuses that."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.mark.usefixtures("implicit_promotion")
@pytest.mark.parametrize("disable_jit", [False, True])
def test_outside_interception_nothing_is_quantized(disable_jit):
  """The patched ops of a rule that names no op give plain results there, jit works, and interception is back after.

  The first call is the control: in the model, the same ops do give other numbers.
  """
  rule = qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8)
  seen = []

  def run(x, w):
    outside = _qwix.outside_interception(_intercepted_ops)
    seen.append(_intercepted_ops(x, w)[0])
    seen.append(outside(x, w))
    assert _qwix.outside_interception(_jit_works)()
    assert _jit_works() != disable_jit
    seen.append(_intercepted_ops(x, w)[0])
    return x

  _, w = in_model(run, rule, flavour="linen", disable_jit=disable_jit)
  want = _intercepted_ops(X, w)
  assert not np.array_equal(seen[-3], want[0])
  jax.tree.map(np.testing.assert_array_equal, seen[-2], want)
  np.testing.assert_array_equal(seen[-1], seen[-3])


def _backend_of_patched_ops():
  """A backend of the very ops that qwix patches; new functions each time, so that no trace is reused."""

  def multiply(lhs, rhs, sizes, *, transpose_rhs, preferred_element_type, **rest):
    del rest
    lhs, rhs = gmm.dequantize(lhs), gmm.dequantize(rhs)
    return jax.lax.ragged_dot(lhs, rhs.swapaxes(1, 2) if transpose_rhs else rhs, sizes).astype(preferred_element_type)

  def transposed(lhs, dout, sizes, *, num_groups, preferred_element_type, **rest):
    del rest
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(lhs.shape[0]), side="right")
    rows = (group[:, None] == jnp.arange(num_groups)).astype(jnp.float32)[:, :, None] * gmm.dequantize(lhs)[:, None]
    return jnp.einsum("mgk,mn->gkn", rows, gmm.dequantize(dout)).astype(preferred_element_type)

  def supports(problem):
    steps = problem.fused_steps
    return f"It does not {steps[0]}." if steps else None

  return gmm.Backend(name="patched", gmm=multiply, tgmm=transposed, supports=supports)


def _value_and_gradients(recipe, backend):
  # A sum of squares, so that the cotangent is not constant and quantizing it shows.
  loss = lambda x, w: (gmm.gmm(x, w, SIZES, recipe=recipe, backend=backend) ** 2).sum()
  return jax.value_and_grad(loss, argnums=(0, 1))


@pytest.mark.usefixtures("implicit_promotion")
@FLAVOURS
@pytest.mark.parametrize("disable_jit", [False, True])
@pytest.mark.parametrize("recipe", ["qwix", None])
def test_a_rule_that_names_no_op_does_not_quantize_twice(flavour, disable_jit, recipe, monkeypatch):
  """Value and both gradients in the model are bitwise those outside of it, though the rule is for every op.

  recipe=None is plain even there: qwix's rule reaches gmm only by recipe="qwix".
  """
  rule = qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8, bwd_qtype=jnp.float8_e5m2)
  want_recipe = gmm.Recipe.from_qwix(rule) if recipe else None

  def compare():
    seen = []

    def run(x, w):
      seen.append(_value_and_gradients(recipe, _backend_of_patched_ops())(x, w))
      return x

    _, w = in_model(run, rule, flavour=flavour, disable_jit=disable_jit)
    want = _value_and_gradients(want_recipe, _backend_of_patched_ops())(X, w)
    return [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(seen[-1]), jax.tree.leaves(want), strict=True)]

  assert compare() == [True, True, True]
  monkeypatch.setattr(_call, "_outside_interception", lambda fn: fn)
  assert not any(compare())  # the control: this is what quantizing twice would give


def test_interception_is_back_after_an_exception():
  def run(x, w):
    with pytest.raises(KeyError):
      _qwix.outside_interception(lambda: {}["missing"])()
    assert qwix.pallas.get_current_rule("gmm") is not None
    return x

  in_model(run, qwix.QtRule(**FP8))
  assert not interception.interception_manager._intercepted_threads

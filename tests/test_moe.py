"""The routed MoE layer: routing, permutation, values and gradients.

The exact tests use float32 and small integers, arranged so that no step rounds: router logits are
multiples of 128 (a softmax over two of them is exactly (1, 0) or (1/2, 1/2)), and the gated
projection is above 20 everywhere (there sigmoid is exactly 1, so SiLU is the identity). Quantized
layers are measured in test_table.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gmm.moe import (
  MoeConfig,
  MoeParams,
  Routing,
  init_params,
  load_balance_loss,
  moe_dense,
  moe_layer,
  permute,
  route,
  unpermute,
)

BACKENDS = ("reference", "xla")
CONFIG = MoeConfig(num_experts=5, top_k=2, embed=6, mlp=7, dtype="float32")


def integer_layer(config: MoeConfig, tokens: int, seed: int) -> tuple[MoeParams, jax.Array]:
  """Integer weights and tokens of the module's docstring; the first feature of each token is 1."""
  rng = np.random.default_rng(seed)
  ints = lambda *shape: rng.integers(-2, 3, shape).astype(np.float32)
  e, d, f = config.num_experts, config.embed, config.mlp
  wi_0 = ints(e, d, f)
  wi_0[:, 0, :] = 21 + 4 * (d - 1)  # |the other features' sum| <= 4 (d - 1)
  x = ints(tokens, d)
  x[:, 0] = 1
  params = MoeParams(gate=128 * ints(d, e), wi_0=wi_0, wi_1=ints(e, d, f), wo=ints(e, f, d))
  return jax.tree.map(jnp.asarray, params), jnp.asarray(x)


def layer_by_token(params: MoeParams, x: jax.Array, top_k: int) -> np.ndarray:
  """The layer as a loop over tokens and their experts, in float32."""
  gate, wi_0, wi_1, wo = (np.asarray(w) for w in (params.gate, params.wi_0, params.wi_1, params.wo))
  out = np.zeros(x.shape, np.float32)
  for t, token in enumerate(np.asarray(x)):
    logits = token @ gate
    chosen = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:top_k]
    weights = np.exp(logits[chosen] - logits[chosen].max())
    for e, weight in zip(chosen, weights / weights.sum(), strict=True):
      h0 = token @ wi_0[e]
      out[t] += weight * ((h0 / (1 + np.exp(-h0)) * (token @ wi_1[e])) @ wo[e])
  return out


def gradients(layer: Any, params: MoeParams, x: Any, cotangent: Any) -> tuple[MoeParams, jax.Array]:
  loss = lambda p, t: jnp.sum(layer(p, t).astype(jnp.float32) * cotangent)
  return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_equals_a_loop_over_tokens(backend, top_k):
  """Integers: whatever is lost, doubled or sent to another expert shows. With five equal or
  dominated logits some weights are 1/3 or 1/5, so top-5 data has one dominating expert."""
  config = dataclasses.replace(CONFIG, top_k=top_k)
  params, x = integer_layer(config, tokens=37, seed=top_k)
  if top_k == 5:  # distinct logits: weights (1, 0, 0, 0, 0)
    params = dataclasses.replace(
      params, gate=jnp.zeros_like(params.gate).at[0].set(128 * jnp.arange(5, dtype=jnp.float32))
    )
  got = moe_layer(params, x, config=config, backend=backend)
  np.testing.assert_array_equal(got, layer_by_token(params, x, top_k))


def test_dense_equals_a_loop_over_tokens():
  """The layer that all figures are measured against is checked against something plainer too."""
  params, x = integer_layer(CONFIG, tokens=37, seed=3)
  np.testing.assert_array_equal(moe_dense(params, x, config=CONFIG), layer_by_token(params, x, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_equal_those_of_the_dense_layer(backend):
  """On integers every product and sum of the backward pass is exact, the router's included."""
  params, x = integer_layer(CONFIG, tokens=29, seed=4)
  cotangent = np.random.default_rng(5).integers(-2, 3, x.shape).astype(np.float32)
  got = gradients(lambda p, t: moe_layer(p, t, config=CONFIG, backend=backend), params, x, cotangent)
  want = gradients(lambda p, t: moe_dense(p, t, config=CONFIG), params, x, cotangent)
  assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(want)), "a zero gradient tests nothing"
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_gradient_of_an_unused_expert_is_zero():
  """All tokens go to experts 0 and 1: the others' weights get exactly 0."""
  params, x = integer_layer(CONFIG, tokens=9, seed=6)
  params = dataclasses.replace(params, gate=jnp.zeros_like(params.gate))  # a tie: the lowest two
  grads, _ = gradients(lambda p, t: moe_layer(p, t, config=CONFIG, backend="reference"), params, x, jnp.ones(x.shape))
  for name in ("wi_0", "wi_1", "wo"):
    grad = np.asarray(getattr(grads, name))
    assert np.any(grad[:2])
    assert not np.any(grad[2:])


@pytest.mark.parametrize("layer", [moe_layer, moe_dense])
def test_dtypes_and_shapes(layer):
  """float32 weights, bfloat16 inside: results have the layer's dtype, gradients their operand's."""
  config = MoeConfig(num_experts=4, top_k=2, embed=16, mlp=24)
  params = init_params(jax.random.key(0), config)
  x = jax.random.normal(jax.random.key(1), (2, 3, 16), jnp.float32)
  out = jax.eval_shape(lambda p, t: layer(p, t, config=config), params, x)
  assert (out.shape, out.dtype) == ((2, 3, 16), jnp.bfloat16)
  grads, state_grad = gradients(lambda p, t: layer(p, t, config=config), params, x, jnp.ones(x.shape))
  assert jax.tree.map(lambda g: (g.shape, g.dtype), grads) == jax.tree.map(lambda w: (w.shape, w.dtype), params)
  assert (state_grad.shape, state_grad.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_dynamic"])
def test_bfloat16_weights_give_the_same_numbers_as_float32_ones(recipe):
  """`gmm table` holds weights in bfloat16: the output is the same, and the gradient with respect to
  float32 weights is a cast of the one with respect to bfloat16 weights."""
  config = MoeConfig(num_experts=4, top_k=2, embed=16, mlp=24)
  narrow = dataclasses.replace(config, weight_dtype="bfloat16")
  x = jax.random.normal(jax.random.key(1), (32, 16), jnp.float32).astype(jnp.bfloat16)
  results = []
  for c in (config, narrow):
    params = init_params(jax.random.key(0), c)
    assert params.wo.dtype == c.weight_dtype

    def loss(p, t, c=c):
      out = moe_layer(p, t, config=c, backend="reference", recipe=recipe)
      return jnp.sum(out.astype(jnp.float32)), out

    (grads, state_grad), out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    results.append((out, jax.tree.map(lambda g: g.astype(jnp.float32), grads), state_grad))
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_batch_dimensions_are_only_reshaped_and_no_token_is_fine():
  params, x = integer_layer(CONFIG, tokens=24, seed=7)
  flat = moe_layer(params, x, config=CONFIG)
  np.testing.assert_array_equal(moe_layer(params, x.reshape(2, 3, 4, 6), config=CONFIG), flat.reshape(2, 3, 4, 6))
  assert moe_layer(params, x[:0], config=CONFIG).shape == (0, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_broken_token_stays_alone(backend):
  """A NaN token makes its own output NaN and no other's."""
  params, x = integer_layer(CONFIG, tokens=11, seed=8)
  broken = x.at[4, 2].set(jnp.nan)
  got = np.asarray(moe_layer(params, broken, config=CONFIG, backend=backend))
  want = np.asarray(moe_layer(params, x, config=CONFIG, backend=backend))
  assert np.isnan(got[4]).all()
  np.testing.assert_array_equal(np.delete(got, 4, 0), np.delete(want, 4, 0))


# Routing.


def test_weights_of_a_token_sum_to_one_and_order_follows_the_logits():
  x = jax.random.normal(jax.random.key(0), (200, 16), jnp.float32)
  routing = route(x, jax.random.normal(jax.random.key(1), (16, 8), jnp.float32), top_k=3)
  # Three quotients by the same sum, each rounded, then two additions: 4 roundings of at most 1.
  np.testing.assert_allclose(np.asarray(routing.weights, np.float64).sum(1), 1, rtol=0, atol=4 * 2.0**-24)
  logits, experts = np.asarray(routing.logits), np.asarray(routing.experts)
  np.testing.assert_array_equal(experts, np.argsort(-logits, axis=1, kind="stable")[:, :3])
  weights = np.asarray(routing.weights)
  assert (weights[:, 1:] <= weights[:, :-1]).all()


def test_ties_go_to_the_lower_expert():
  routing = route(jnp.ones((3, 2)), jnp.asarray([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0] * 5]), top_k=3)
  np.testing.assert_array_equal(routing.experts, [[1, 2, 4]] * 3)


def test_router_is_float32_for_bfloat16_tokens():
  """Two logits that differ by 2^-20: equal in bfloat16, and not for the router."""
  gate = jnp.asarray([[1.0, 1.0 + 2.0**-20]], jnp.float32)
  routing = route(jnp.ones((1, 1), jnp.bfloat16), gate, top_k=1)
  assert routing.logits.dtype == routing.weights.dtype == jnp.float32
  assert int(routing.experts[0, 0]) == 1


def test_softmax_is_rounded_only_when_asked():
  """Two logits 2^-3 apart: float32 keeps the weights' digits, bfloat16 rounds each step, under jit too."""
  x, gate = jnp.ones((1, 1)), jnp.asarray([[0.0, 0.125]], jnp.float32)
  at = jax.jit(lambda dtype: route(x, gate, top_k=2, softmax_dtype=dtype).weights, static_argnums=0)
  exact = 1 / (1 + np.exp(-0.125))
  assert abs(float(at("float32")[0, 0]) - exact) < 2.0**-23
  exp = float(jnp.bfloat16(np.exp(-0.125)))  # e^-1/8, then 1 + e^-1/8, then the quotients
  total = float(jnp.bfloat16(1 + exp))
  np.testing.assert_array_equal(at("bfloat16")[0], [float(jnp.bfloat16(1 / total)), float(jnp.bfloat16(exp / total))])


def test_permute_sorts_by_expert_and_keeps_token_order():
  """Token 0 chose experts 2 and 0, and so on; row r of the result is slot slots[r]."""
  experts = jnp.asarray([[2, 0], [0, 3], [2, 3]], jnp.int32)
  x = jnp.asarray([[10.0], [20.0], [30.0]])
  rows, group_sizes, slots = permute(x, experts, num_experts=4)
  np.testing.assert_array_equal(group_sizes, [2, 0, 2, 2])
  np.testing.assert_array_equal(slots, [1, 2, 0, 4, 3, 5])
  np.testing.assert_array_equal(rows[:, 0], [10, 20, 10, 30, 20, 30])
  out = unpermute(rows * jnp.asarray([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]]), slots, jnp.full((3, 2), 0.5))
  # Token 0: slots 0 (row 2, x4) and 1 (row 0, x1); token 1: rows 1 and 4; token 2: rows 3 and 5.
  np.testing.assert_array_equal(out[:, 0], [0.5 * 10 * 5, 0.5 * 20 * 18, 0.5 * 30 * 40])


def test_unpermute_undoes_permute():
  experts = jax.random.randint(jax.random.key(0), (50, 3), 0, 7)
  x = jax.random.randint(jax.random.key(1), (50, 4), -9, 10).astype(jnp.bfloat16)
  rows, group_sizes, slots = permute(x, experts, num_experts=7)
  assert int(group_sizes.sum()) == 150
  assert rows.dtype == x.dtype
  np.testing.assert_array_equal(np.sort(np.asarray(experts).reshape(-1)), np.asarray(experts).reshape(-1)[slots])
  np.testing.assert_array_equal(unpermute(rows, slots, jnp.ones((50, 3))), 3 * x.astype(jnp.float32))


def test_gradient_of_permute_sums_copies_in_float32():
  """1 + 2^-8 + 2^-8 is 1.0078125 in bfloat16 when added in float32, and 1 when each sum is rounded."""
  experts = jnp.asarray([[0, 1, 2]], jnp.int32)
  _, transpose = jax.vjp(lambda x: permute(x, experts, 3)[0], jnp.ones((1, 1), jnp.bfloat16))
  (grad,) = transpose(jnp.asarray([[1.0], [2.0**-8], [2.0**-8]], jnp.bfloat16))
  assert float(grad[0, 0]) == 1.0078125


# Load-balance loss.


@pytest.mark.parametrize("top_k", [1, 3])
def test_load_balance_loss_of_a_uniform_router_is_one(top_k):
  """Equal probabilities: 1, wherever the ties go."""
  routing = route(jnp.ones((16, 4)), jnp.zeros((4, 8)), top_k=top_k)
  assert float(load_balance_loss(routing)) == 1.0


def test_load_balance_loss_of_one_favourite_is_the_number_of_experts():
  routing = route(jnp.ones((16, 1)), jnp.asarray([[0.0, 256.0, 0.0, 0.0]]), top_k=1)
  assert float(load_balance_loss(routing)) == 4.0


def test_load_balance_loss_pushes_tokens_away_from_the_favourite():
  """Its gradient is positive for the expert that gets most assignments: descent lowers its logit."""
  favourite = lambda logits: load_balance_loss(Routing(logits, jnp.asarray([[2]] * 3 + [[0]]), jnp.ones((4, 1))))
  grad = np.asarray(jax.grad(favourite)(jnp.zeros((4, 4)))).sum(0)
  assert grad[2] > 0
  assert (grad[[1, 3]] < 0).all()


def test_layer_returns_the_loss_on_request():
  params, x = integer_layer(CONFIG, tokens=13, seed=9)
  out, loss = moe_layer(params, x, config=CONFIG, return_load_balance_loss=True)
  np.testing.assert_array_equal(out, moe_layer(params, x, config=CONFIG))
  assert float(loss) == float(load_balance_loss(route(jnp.asarray(x), params.gate, top_k=2)))


# Weights.


def test_initial_weights_have_the_published_spread():
  """0.00295 for wi (fan-in 8 x 14336) and 0.00552 for wo (8 x 4096), the gate 1 / sqrt(embed). The
  other axis is cut short: it does not count. Bound: 4 standard errors of a sample's deviation."""
  wide = init_params(jax.random.key(0), MoeConfig(num_experts=8, top_k=2, embed=16, mlp=14336))
  assert_spread(wide.wi_0, 14336 * 8)
  assert_spread(wide.wi_1, 14336 * 8)
  tall = init_params(jax.random.key(1), MoeConfig(num_experts=8, top_k=2, embed=4096, mlp=16))
  assert_spread(tall.wo, 4096 * 8)
  assert_spread(tall.gate, 4096)
  assert (round(float(jnp.std(wide.wi_0)), 5), f"{(8 * 4096) ** -0.5:.5f}") == (0.00295, "0.00552")
  assert not np.array_equal(wide.wi_0, wide.wi_1)


def assert_spread(weights: jax.Array, fan_in: int) -> None:
  values = np.asarray(weights, np.float64)
  assert weights.dtype == jnp.float32
  np.testing.assert_allclose(values.std() * fan_in**0.5, 1, rtol=0, atol=4 / (2 * values.size) ** 0.5)
  # Truncated at two standard deviations of the normal, whose own is 1.137 times the weights'.
  assert np.abs(values).max() * fan_in**0.5 < 2 / 0.8796


# Bad input.


@pytest.mark.parametrize(
  ("changes", "error", "words"),
  [
    ({"top_k": 9}, ValueError, "top_k must be at most num_experts"),
    ({"top_k": 0}, ValueError, "top_k must be at least 1"),
    ({"mlp": 0}, ValueError, "mlp must be at least 1"),
    ({"dtype": "int8"}, TypeError, "dtype must be a float dtype"),
  ],
)
def test_config_refuses(changes, error, words):
  with pytest.raises(error, match=words):
    dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize("layer", [moe_layer, moe_dense])
def test_layer_refuses_what_does_not_fit_the_config(layer):
  params, x = integer_layer(CONFIG, tokens=3, seed=0)
  with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., 6\].*got \(3, 5\)"):
    layer(params, x[:, :5], config=CONFIG)
  with pytest.raises(TypeError, match="float array, got int32"):
    layer(params, x.astype(np.int32), config=CONFIG)
  with pytest.raises(ValueError, match=r"params\.wo must have shape \(5, 7, 6\).*got \(4, 7, 6\)"):
    layer(dataclasses.replace(params, wo=params.wo[:4]), x, config=CONFIG)

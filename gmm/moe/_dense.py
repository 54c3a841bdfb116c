"""The routed layer without grouping or quantization: what the other one is measured against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gmm.moe._config import MoeConfig, MoeParams, check_inputs
from gmm.moe._gate import rounded, silu_gate
from gmm.moe._route import route


def moe_dense(params: MoeParams, x: jax.Array, *, config: MoeConfig) -> jax.Array:
  """Applies the layer of `moe_layer` by ordinary dense matmuls.

  Every expert multiplies all tokens; a token that did not choose it gets weight 0. Values are
  rounded to `config.dtype` at the places where `moe_layer` rounds.

  Args:
    params: weights of any float dtype, cast to `config.dtype` here.
    x: tokens, [..., embed].
    config: sizes and dtypes.

  Returns:
    [..., embed] in `config.dtype`. The work is experts / top_k times that of `moe_layer`; memory
    is one expert's weights, plus 2 * mlp + embed values per token and expert for the gradient.

  Raises:
    ValueError, TypeError: tokens or weights do not have the shape or dtype that `config` says.
  """
  check_inputs(params, x, config)
  dtype = jnp.dtype(config.dtype)
  tokens = x.astype(dtype).reshape(-1, config.embed)

  routing = route(tokens, params.gate, top_k=config.top_k, softmax_dtype=config.softmax_dtype)
  chosen = jax.nn.one_hot(routing.experts, config.num_experts, dtype=jnp.float32)  # [tokens, top_k, experts]
  weights = jnp.sum(chosen * routing.weights[:, :, None], axis=1)  # [tokens, experts]

  # A float32 copy, cast inside the loop: the gradient of the tokens is summed over experts in float32.
  tokens = tokens.astype(jnp.float32)

  def add_expert(total, expert):
    wi_0, wi_1, wo, weight = expert
    rows = tokens.astype(dtype)
    hidden = silu_gate(_dot(rows, wi_0), _dot(rows, wi_1))
    return total + weight[:, None] * _dot(hidden, wo).astype(jnp.float32), None

  # One expert at a time, so that only one expert's weights are ever unpacked.
  total, _ = jax.lax.scan(add_expert, jnp.zeros_like(tokens), (params.wi_0, params.wi_1, params.wo, weights.T))
  return rounded(total, dtype).reshape(x.shape)


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
  """x @ weight in the dtype of x; HIGHEST keeps float32 operands out of bfloat16 passes on TPU."""
  return rounded(jnp.dot(x, weight.astype(x.dtype), precision=jax.lax.Precision.HIGHEST), x.dtype)

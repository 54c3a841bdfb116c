"""Routing: which experts each token goes to, and with which weight."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gmm._groups import group_sizes_from_ids
from gmm.moe._gate import rounded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """Where tokens go.

  Attributes:
    logits: router output for every expert, float32 [tokens, experts].
    experts: chosen experts, best first, int32 [tokens, top_k]; of equal logits the lower expert.
    weights: softmax over the chosen logits, float32 [tokens, top_k]; each row sums to 1.
  """

  logits: Any
  experts: Any
  weights: Any


def route(x: jax.Array, gate: jax.Array, *, top_k: int, softmax_dtype: Any = jnp.float32) -> Routing:
  """Chooses `top_k` experts for each token.

  Args:
    x: tokens, [tokens, embed], any float dtype.
    gate: router weights, [embed, experts].
    top_k: experts per token.
    softmax_dtype: dtype that the softmax over the chosen logits is rounded to, step by step.

  Returns:
    `Routing`. Logits are float32 whatever the dtype of `x`: bfloat16 ones would send tokens to
    other experts.
  """
  # HIGHEST: a default float32 dot on TPU is a single bfloat16 pass.
  logits = jnp.dot(x.astype(jnp.float32), gate.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
  chosen, experts = jax.lax.top_k(logits, top_k)
  return Routing(logits=logits, experts=experts, weights=_softmax(chosen, softmax_dtype))


def _softmax(x: jax.Array, dtype: Any) -> jax.Array:
  """Softmax along the last axis of a float32 array, every step (and its gradient) rounded to dtype."""
  step = lambda y: rounded(y, dtype).astype(jnp.float32)
  exp = step(jnp.exp(step(x - jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True)))))
  return step(exp / step(jnp.sum(exp, axis=-1, keepdims=True)))


def load_balance_loss(routing: Routing) -> jax.Array:
  """Load-balance loss of Switch Transformer, for top-k routing.

  Args:
    routing: from `route`.

  Returns:
    float32 scalar: experts x sum over experts of (share of the assignments) x (mean router
    probability). It is 1 when either factor is uniform, and `experts` when everything goes to
    one expert; only the probabilities carry a gradient.
  """
  num_experts = routing.logits.shape[-1]
  counts = group_sizes_from_ids(routing.experts, num_experts).astype(jnp.float32)
  share = counts / routing.experts.size
  probability = jnp.mean(jax.nn.softmax(routing.logits, axis=-1), axis=0)
  return num_experts * jnp.sum(share * probability)

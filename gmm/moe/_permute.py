"""Sorting tokens by expert and back: what turns a routed layer into grouped matmuls."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gmm._groups import group_sizes_from_ids


def permute(x: jax.Array, experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Copies each token once per chosen expert and sorts the copies by expert.

  Args:
    x: tokens, [tokens, embed].
    experts: chosen experts, integer [tokens, top_k].
    num_experts: number of experts.

  Returns:
    rows: [tokens * top_k, embed], dtype of `x`; the rows of an expert are in token order.
    group_sizes: int32 [num_experts], summing to tokens * top_k.
    slots: int32 [tokens * top_k], the slot (token * top_k + rank of the choice) of each row.

  The gradient of `x` sums a token's copies in float32 and rounds once.
  """
  top_k = experts.shape[1]
  # 1. Slot s is choice s % top_k of token s // top_k.
  slot_experts = experts.reshape(-1)
  # 2. Stable: within an expert, slots stay in order, and so do tokens.
  slots = jnp.argsort(slot_experts, stable=True).astype(jnp.int32)
  # 3. Row r holds slot slots[r], thus token slots[r] // top_k. Taken from a float32 copy, so
  #    that the transpose (a scatter-add over a token's rows) accumulates in float32.
  rows = x.astype(jnp.float32)[slots // top_k].astype(x.dtype)
  return rows, group_sizes_from_ids(slot_experts, num_experts), slots


def unpermute(rows: jax.Array, slots: jax.Array, weights: jax.Array) -> jax.Array:
  """Brings rows back to token order and adds each token's rows, weighted.

  Args:
    rows: results in the order of `permute`, [tokens * top_k, embed].
    slots: as returned by `permute`.
    weights: float32 [tokens, top_k].

  Returns:
    float32 [tokens, embed].
  """
  tokens, top_k = weights.shape
  # 1. slots is a permutation: row_of[slots[r]] = r.
  row_of = jnp.zeros_like(slots).at[slots].set(jnp.arange(slots.size, dtype=slots.dtype), unique_indices=True)
  # 2. Row by slot, then by (token, rank).
  by_slot = rows.at[row_of].get(unique_indices=True, mode="promise_in_bounds")
  by_token = by_slot.reshape(tokens, top_k, rows.shape[1]).astype(jnp.float32)
  return jnp.sum(weights[:, :, None] * by_token, axis=1)

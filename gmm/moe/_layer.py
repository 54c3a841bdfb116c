"""The routed layer: route, permute, expert MLP, un-permute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import gmm
from gmm._protocol import Backend
from gmm._recipe import Recipe
from gmm.moe._config import MoeConfig, MoeParams, check_inputs
from gmm.moe._gate import rounded, silu_gate
from gmm.moe._permute import permute, unpermute
from gmm.moe._route import load_balance_loss, route


def moe_layer(
  params: MoeParams,
  x: jax.Array,
  *,
  config: MoeConfig,
  backend: str | Backend = "auto",
  recipe: str | Recipe | None = None,
  tiling: Any = None,
  return_load_balance_loss: bool = False,
) -> Any:
  """Applies a routed Mixture-of-Experts layer.

  Args:
    params: weights of any float dtype, cast to `config.dtype` here; their gradients are casts back.
    x: tokens, [..., embed], any float dtype, cast to `config.dtype`.
    config: sizes and dtypes.
    backend, recipe, tiling: as in `gmm.gmm`, for the three grouped matmuls.
    return_load_balance_loss: also return `load_balance_loss`.

  Returns:
    [..., embed] in `config.dtype`; with `return_load_balance_loss` a pair of it and a float32 scalar.

  Raises:
    ValueError, TypeError: tokens or weights do not have the shape or dtype that `config` says.
    gmm.Unsupported: the named backend cannot do what the recipe asks for.
  """
  check_inputs(params, x, config)
  dtype = jnp.dtype(config.dtype)
  tokens = x.astype(dtype).reshape(-1, config.embed)

  routing = route(tokens, params.gate, top_k=config.top_k, softmax_dtype=config.softmax_dtype)
  rows, group_sizes, slots = permute(tokens, routing.experts, config.num_experts)
  rows = expert_mlp(
    rows,
    params.wi_0.astype(dtype),
    params.wi_1.astype(dtype),
    params.wo.astype(dtype),
    group_sizes,
    backend=backend,
    recipe=recipe,
    tiling=tiling,
  )
  out = rounded(unpermute(rows, slots, routing.weights), dtype).reshape(x.shape)

  return (out, load_balance_loss(routing)) if return_load_balance_loss else out


def expert_mlp(
  rows: jax.Array,
  wi_0: jax.Array,
  wi_1: jax.Array,
  wo: jax.Array,
  group_sizes: jax.Array,
  *,
  backend: str | Backend = "auto",
  recipe: str | Recipe | None = None,
  tiling: Any = None,
) -> jax.Array:
  """Applies each expert's gated MLP to its own rows: (silu(rows @ wi_0) * (rows @ wi_1)) @ wo.

  Args:
    rows: tokens sorted by expert, [m, embed].
    wi_0, wi_1: [experts, embed, mlp], dtype of `rows`.
    wo: [experts, mlp, embed], dtype of `rows`.
    group_sizes: rows of each expert, integer [experts].
    backend, recipe, tiling: as in `gmm.gmm`.

  Returns:
    [m, embed], dtype of `rows`.
  """
  how: dict[str, Any] = {"backend": backend, "recipe": recipe, "tiling": tiling}
  hidden = silu_gate(gmm.gmm(rows, wi_0, group_sizes, **how), gmm.gmm(rows, wi_1, group_sizes, **how))
  return gmm.gmm(hidden, wo, group_sizes, **how)

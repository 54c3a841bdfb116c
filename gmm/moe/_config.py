"""Sizes and weights of a routed layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
  """Sizes and dtypes of a routed layer.

  Attributes:
    num_experts: number of experts, E.
    top_k: experts that each token is sent to.
    embed: size of a token.
    mlp: hidden size of an expert.
    dtype: name of the dtype that tokens and weights are multiplied in.
    weight_dtype: name of the dtype that `init_params` stores the experts' weights in. The
      draw is float32 either way; the layer casts to `dtype`, so storing `dtype` right away
      halves the memory and changes neither the output nor, up to a cast, the gradients.
    softmax_dtype: name of the dtype that the softmax over a token's chosen logits is rounded to;
      the logits themselves are float32.
  """

  num_experts: int
  top_k: int
  embed: int
  mlp: int
  dtype: str = "bfloat16"
  weight_dtype: str = "float32"
  softmax_dtype: str = "float32"

  def __post_init__(self):
    for field in ("num_experts", "top_k", "embed", "mlp"):
      if getattr(self, field) < 1:
        raise ValueError(f"MoeConfig.{field} must be at least 1, got {getattr(self, field)}.")
    if self.top_k > self.num_experts:
      raise ValueError(f"top_k must be at most num_experts ({self.num_experts}), got {self.top_k}.")
    for field in ("dtype", "weight_dtype", "softmax_dtype"):
      dtype = jnp.dtype(getattr(self, field))
      if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"MoeConfig.{field} must be a float dtype, got {dtype.name}.")
      object.__setattr__(self, field, dtype.name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoeParams:
  """Weights of a routed layer.

  Attributes:
    gate: router, [embed, experts], float32.
    wi_0: projection that goes through SiLU, [experts, embed, mlp].
    wi_1: projection that it is multiplied with, [experts, embed, mlp].
    wo: projection back, [experts, mlp, embed].
  """

  gate: Any
  wi_0: Any
  wi_1: Any
  wo: Any


def param_shapes(config: MoeConfig) -> dict[str, tuple[int, ...]]:
  """Shape of each weight."""
  e, d, f = config.num_experts, config.embed, config.mlp
  return {"gate": (d, e), "wi_0": (e, d, f), "wi_1": (e, d, f), "wo": (e, f, d)}


def init_params(key: jax.Array, config: MoeConfig) -> MoeParams:
  """Draws the weights as the published layer does: truncated normal, variance 1 / fan-in.

  Args:
    key: a `jax.random` key.
    config: sizes; `config.weight_dtype` is the dtype of the experts' weights.

  Returns:
    `MoeParams`. The gate's fan-in is `embed`. An expert weight [experts, a, b] counts
    experts x b: the published initializer takes the expert axis as the input axis and
    multiplies the last one in. At Mixtral's size that is a standard deviation of 0.00295 for
    wi_0 and wi_1, and of 0.00552 for wo.
  """
  # For three axes this is the published rule: axis 2 is neither input nor output, and multiplies both fans.
  draw = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=1)
  names = ("gate", "wi_0", "wi_1", "wo")
  shapes = param_shapes(config)
  weights = {}
  for name, weight_key in zip(names, jax.random.split(key, len(names)), strict=True):
    dtype = jnp.float32 if name == "gate" else config.weight_dtype
    weights[name] = draw(weight_key, shapes[name], jnp.float32).astype(dtype)
  return MoeParams(**weights)


def check_inputs(params: MoeParams, x: jax.Array, config: MoeConfig) -> None:
  """Raises ValueError or TypeError unless tokens and weights are those of `config`."""
  for name, shape in param_shapes(config).items():
    got = tuple(getattr(params, name).shape)
    if got != shape:
      raise ValueError(f"params.{name} must have shape {shape} for this MoeConfig, got {got}.")
  if x.ndim < 1 or x.shape[-1] != config.embed:
    raise ValueError(f"x must have shape [..., {config.embed}] (MoeConfig.embed), got {tuple(x.shape)}.")
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"x must be a float array, got {x.dtype.name}.")

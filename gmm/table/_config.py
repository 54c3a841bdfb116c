"""What is measured: sizes of the layer, number of tokens, recipes."""

from __future__ import annotations

import dataclasses
import math

from gmm._recipe import Recipe, TinyScale
from gmm._recipe import recipe as named_recipe
from gmm.moe import MoeConfig

SCHEMES = ("bf16", "fp8_dynamic", "fp8_static", "fp8_calibrated")

_PUBLISHED_MLP = 14336


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
  """Choices of arithmetic that the recipe's name leaves open.

  Attributes:
    name: what `--numerics` calls it.
    tiny_scale: "clamp" or "qwix" (`gmm.Quant.tiny_scale`). The published run had qwix's cutoff.
    softmax_dtype: dtype of the router's softmax over the chosen two. The published layer rounds it to
      bfloat16, which is a good part of its grad_gate under every recipe, and through it of state_grad.
    scale_dtype: "float32", or None for the named recipe's own bits. XLA on a TPU keeps x / scale in
      float32 on its way to fp8, and so does "float32" here. The recipe's own bits round it to bfloat16
      first (as qwix's kernel does), which alone adds 0.5 % to the output's distance.
  """

  name: str
  tiny_scale: TinyScale
  softmax_dtype: str
  scale_dtype: str | None = "float32"


NUMERICS = {
  n.name: n
  for n in (
    Numerics(name="ours", tiny_scale="clamp", softmax_dtype="float32"),
    Numerics(name="published", tiny_scale="qwix", softmax_dtype="bfloat16"),
  )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig:
  """A layer and its input.

  Attributes:
    name: what `--config` calls it.
    embed, mlp: sizes of the layer; 8 experts, top-2.
    tokens: number of tokens.
  """

  name: str
  embed: int
  mlp: int
  tokens: int

  def moe(self, softmax_dtype: str) -> MoeConfig:
    """The layer. Its experts' weights are held in bfloat16, which is what the layer multiplies:
    gradients with respect to float32 weights would be these very numbers, cast."""
    return MoeConfig(
      num_experts=8,
      top_k=2,
      embed=self.embed,
      mlp=self.mlp,
      weight_dtype="bfloat16",
      softmax_dtype=softmax_dtype,
    )

  @property
  def weight_range(self) -> float:
    """Fixed range of the weights in fp8_static: +-224 at the published size.

    The initializer's standard deviation goes with mlp^-0.5 (embed / mlp being the same), so this
    range gives weights of every size the same codes. Activations do not change with the size.
    """
    return 224.0 * math.sqrt(_PUBLISHED_MLP / self.mlp)

  @property
  def is_published_size(self) -> bool:
    return self.mlp == _PUBLISHED_MLP


# Tokens go with the size too: rows per expert over mlp decides how far the quantization errors of
# a weight gradient average out.
CONFIGS = {
  c.name: c
  for c in (
    TableConfig(name="mixtral-8x7b", embed=4096, mlp=14336, tokens=2048),
    TableConfig(name="small", embed=512, mlp=1792, tokens=512),
    TableConfig(name="tiny", embed=256, mlp=896, tokens=256),
  )
}


def table_recipe(scheme: str, config: TableConfig, numerics: Numerics) -> Recipe:
  """Returns the recipe of one row: the named one, its fixed range matched to the layer's size.

  Args:
    scheme: one of `SCHEMES`, or any other name `gmm.recipe` knows.
    config: the layer; its size sets the fixed range of the weights.
    numerics: sets tiny_scale and scale_dtype of every operand.
  """
  found = named_recipe(scheme, tiny_scale=numerics.tiny_scale, scale_dtype=numerics.scale_dtype)
  if scheme != "fp8_static" or config.is_published_size:
    return found
  assert found.rhs is not None
  high = config.weight_range
  return dataclasses.replace(found, rhs=dataclasses.replace(found.rhs, calibration=f"fixed,-{high!r},{high!r}"))

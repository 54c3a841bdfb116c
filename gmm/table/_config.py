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

  @property
  def moe(self) -> MoeConfig:
    # The experts' weights are held in bfloat16, which is what the layer multiplies. Gradients
    # with respect to float32 weights would be these very numbers, cast.
    # The published layer's softmax over the chosen two is bfloat16: its rounding, amplified where two
    # logits are near, is a good part of the published grad_gate of every recipe.
    return MoeConfig(
      num_experts=8,
      top_k=2,
      embed=self.embed,
      mlp=self.mlp,
      weight_dtype="bfloat16",
      softmax_dtype="bfloat16",
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


def table_recipe(
  scheme: str, config: TableConfig, *, tiny_scale: TinyScale = "clamp", scale_dtype: str | None = "float32"
) -> Recipe:
  """Returns the recipe of one row: the named one, made comparable with the published run.

  Args:
    scheme: one of `SCHEMES`, or any other name `gmm.recipe` knows.
    config: the layer; its size sets the fixed range of the weights.
    tiny_scale: "clamp" or "qwix" (`gmm.Quant.tiny_scale`).
    scale_dtype: "float32", or None for the named recipe's own bits. XLA on a TPU keeps x / scale in
      float32 on its way to fp8, and so does this. The recipe's own bits round it to bfloat16 first
      (as qwix's kernel does), which alone adds 0.5 % to the output's distance.
  """
  found = named_recipe(scheme, tiny_scale=tiny_scale, scale_dtype=scale_dtype)
  if scheme != "fp8_static" or config.is_published_size:
    return found
  assert found.rhs is not None
  high = config.weight_range
  return dataclasses.replace(found, rhs=dataclasses.replace(found.rhs, calibration=f"fixed,-{high!r},{high!r}"))

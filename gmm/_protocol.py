"""The backend protocol: what a backend is, what it is asked, and how it declines (SPEC REG-1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax

from gmm._qarray import Operand, QArray
from gmm._quantize import GivenScale
from gmm._recipe import Quant

Pass = Literal["fwd", "dlhs", "drhs"]
Tile = tuple[int, int, int]


class Unsupported(NotImplementedError):
  """A backend cannot do what was asked; the message names the condition and the way out."""


@dataclasses.dataclass(frozen=True)
class OperandSpec:
  """Shape and dtype of one operand of a `Problem`, without its data.

  Attributes:
    shape: shape of the operand (of `qvalue` when quantized).
    dtype: dtype name of the array that is multiplied (the codes when quantized).
    scale_shape: shape of the scale of a quantized operand, else None.
    scale_dtype: dtype name of that scale, else None.
    quant: the quantization that the backend is asked to do inside, else None.
    scale_given: whether that quantization comes with its scale (a `GivenScale`).
    row_block: rows of the blocks that count from each group's first row and have a scale
      of their own (`QArray.row_block`), else None.
    prescale_shape: shape of the float32 factor that the backend is asked to multiply into
      the operand first, else None.
  """

  shape: tuple[int, ...]
  dtype: str
  scale_shape: tuple[int, ...] | None = None
  scale_dtype: str | None = None
  quant: Quant | None = None
  scale_given: bool = False
  row_block: int | None = None
  prescale_shape: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
  """One call of a backend, described without arrays: what `Backend.supports` judges.

  Attributes:
    pass_: "fwd" (out), "dlhs" (gmm against the weights' other axis) or "drhs" (tgmm).
    m, k, n: rows, contracting and output size of a gmm; rows and output [k, n] of a tgmm.
    num_groups: groups in this shard's weights (g).
    num_global_groups: length of `group_sizes`.
    lhs, rhs: the two operands; `rhs` is dout in a tgmm.
    out_dtype: dtype name of the result.
    transpose_rhs: rhs is stored [g, n, k] (gmm only).
    group_offset: whether one is given.
    partial_sum: whether one is given (gmm only).
    precision: as in `jax.lax.dot`, or None for SPEC GMM-7's default.
    tiling: (tile_m, tile_k, tile_n) or None for the backend's own choice.
    platform: "cpu", "gpu" or "tpu".
  """

  pass_: Pass
  m: int
  k: int
  n: int
  num_groups: int
  num_global_groups: int
  lhs: OperandSpec
  rhs: OperandSpec
  out_dtype: str
  transpose_rhs: bool = False
  group_offset: bool = False
  partial_sum: bool = False
  precision: Any = None
  tiling: Tile | None = None
  platform: str = "cpu"

  @property
  def fused_steps(self) -> tuple[str, ...]:
    """What the backend is asked to do inside beyond multiplying, in words."""
    steps = []
    for name, spec in (("lhs", self.lhs), ("dout" if self.pass_ == "drhs" else "rhs", self.rhs)):
      if spec.prescale_shape is not None:
        steps.append(f"multiply a scale into {name}")
      if spec.quant is not None:
        steps.append(f"quantize {name}")
    return tuple(steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
  """A grouped matmul implementation: a frozen value that holds pure functions (SPEC REG-1).

  `gmm(lhs, rhs, group_sizes, *, lhs_quant, lhs_prescale, group_offset, transpose_rhs,
  partial_sum, precision, preferred_element_type, tiling) -> [m, n]` and
  `tgmm(lhs, dout, group_sizes, *, num_groups, lhs_quant, dout_quant, dout_prescale,
  group_offset, precision, preferred_element_type, tiling) -> [g, k, n]`, where

  - lhs [m, k], rhs [g, k, n] ([g, n, k] with transpose_rhs) and dout [m, n] are arrays or
    `QArray`s (those of a tgmm also with `row_block`); a bare array of a code dtype is codes
    with scale one.
  - group_sizes is int32 [num_global_groups], each >= 0, their sum at most m.
  - group_offset is None (0) or an int32 scalar array: local group j is global group
    group_offset + j; a local group outside the global ones has no rows.
  - lhs_prescale is float32 [1 or g, 1 or k], multiplied into each row by its local group;
    dout_prescale is float32 [1 or m, 1]. The product is formed in float32 and rounded once
    to the operand's dtype; `*_quant`, a `Quant` or `GivenScale`, then quantizes it (SPEC QNT-2).
  - partial_sum is None or float [m, n].
  - preferred_element_type is the result dtype, always given.
  - tiling is None or (tile_m, tile_k, tile_n) of this very call.

  Attributes:
    name: what `get_backend` finds it by.
    gmm, tgmm: the two functions above.
    supports: `supports(problem)` is None, or a sentence that names the condition and the
      way out. What it accepts must work, what it refuses raises `Unsupported`.
    auto_rank: (platform, rank) pairs; backend="auto" tries ours and those registered in this
      process (`register_backend`) that list the platform, lowest rank first. An entry point of
      a third party is used by name only: "auto" loads no module it does not know.
    accumulator: dtype of the running sum of float products.
    int_accumulator: dtype of the running sum of int8 x int8 products.
    out_roundings: roundings of the result after accumulation (1: only to the result dtype).
    interpreted: whether it runs in an interpreter on this machine; the kit then uses small shapes.
  """

  name: str
  gmm: Callable[..., jax.Array]
  tgmm: Callable[..., jax.Array]
  supports: Callable[[Problem], str | None]
  auto_rank: tuple[tuple[str, int], ...] = ()
  accumulator: str = "float32"
  int_accumulator: str = "int32"
  out_roundings: int = 1
  interpreted: Callable[[], bool] = lambda: False


def operand_spec(x: Operand, quant: Quant | GivenScale | None = None, prescale: jax.Array | None = None) -> OperandSpec:
  """Describes an operand (array or QArray) and what is asked to be done to it."""
  codes = isinstance(x, QArray)
  return OperandSpec(
    shape=tuple(x.shape),
    dtype=x.qvalue.dtype.name if codes else x.dtype.name,
    scale_shape=tuple(x.scale.shape) if codes else None,
    scale_dtype=x.scale.dtype.name if codes else None,
    quant=quant.quant if isinstance(quant, GivenScale) else quant,
    scale_given=isinstance(quant, GivenScale),
    row_block=x.row_block if codes else None,
    prescale_shape=None if prescale is None else tuple(prescale.shape),
  )

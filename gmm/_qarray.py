"""Quantized operands: integer or fp8 codes with their scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gmm._row_blocks import expand_row_blocks

# Dtypes that are codes: a number in one of these means nothing without its scale.
CODE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8", "int4")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QArray:
  """Codes and the scale that turns them back into numbers (SPEC QNT-1).

  Attributes:
    qvalue: codes, the shape of the original operand; dtype one of `CODE_DTYPES`.
    scale: same rank as `qvalue`, each dimension a divisor of the one in `qvalue`
      (1: shared, equal: one per index, otherwise one per block); a float dtype.
      The dtype of `scale` is the unquantized dtype of the operand.
    row_block: None, or the rows of blocks that count from each group's first row: then
      `scale` is [num_row_blocks, columns] (SPEC QNT-3), for an operand [m, columns] of `tgmm`.
  """

  qvalue: Any
  scale: Any
  row_block: int | None = dataclasses.field(default=None, metadata={"static": True})

  @property
  def shape(self) -> tuple[int, ...]:
    return self.qvalue.shape

  @property
  def ndim(self) -> int:
    return self.qvalue.ndim

  @property
  def dtype(self) -> jnp.dtype:
    """The unquantized dtype, which is that of `scale`."""
    return self.scale.dtype

  def swapaxes(self, axis1: int, axis2: int) -> QArray:
    if self.row_block is not None:
      raise ValueError("A QArray with blocks of rows (row_block) is [m, columns]; its axes cannot be swapped.")
    return QArray(self.qvalue.swapaxes(axis1, axis2), self.scale.swapaxes(axis1, axis2))


Operand = jax.Array | QArray
# What the public ops take.
OperandLike = jax.Array | np.ndarray | QArray


def is_code_dtype(dtype: Any) -> bool:
  """Whether numbers of this dtype are codes that need a scale."""
  return jnp.dtype(dtype).name in CODE_DTYPES


def dequantize(
  x: Operand, dtype: Any = jnp.float32, *, starts: jax.Array | None = None, ends: jax.Array | None = None
) -> jax.Array:
  """Returns `qvalue * scale` as `dtype`, multiplied in float32; an array is only cast.

  Args:
    x: array or QArray.
    dtype: of the result.
    starts, ends: int32 [g], row ranges of the groups; needed for a QArray with `row_block`.

  Raises:
    ValueError: x has blocks of rows, and starts and ends are not given.
  """
  if not isinstance(x, QArray):
    return x.astype(dtype)
  if x.row_block is None:
    scale = expand_scale(x.scale, x.shape)
  elif starts is None or ends is None:
    raise ValueError(
      f"x has blocks of {x.row_block} rows, which count from each group's first row: give starts and ends."
    )
  else:
    scale = expand_row_blocks(x.scale, starts, ends, x.shape[0], x.row_block).astype(jnp.float32)
  return (x.qvalue.astype(jnp.float32) * scale).astype(dtype)


def expand_scale(scale: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
  """Repeats a block scale to `shape` (dimensions of size 1 stay 1), as float32 or another dtype."""
  scale = scale.astype(dtype)
  for axis, (have, want) in enumerate(zip(scale.shape, shape, strict=True)):
    if have not in (1, want):
      scale = jnp.repeat(scale, want // have, axis=axis)
  return scale

"""What a result must be: float64 loops over groups in numpy, independent of every backend.

Each product also returns the sum of the magnitudes of its terms, which the error bounds need.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from gmm._qarray import QArray


@dataclasses.dataclass(frozen=True)
class Exact:
  """A result in float64 with what bounds the error of computing it in less.

  Attributes:
    value: the exact result.
    magnitude: sum of |term| of each element, scales included.
    terms: contraction length of each element (broadcasts to value).
    scaled: number of scale multiplications behind it.
    blocks: partial sums that are scaled one by one and then added (broadcasts to value).
  """

  value: np.ndarray
  magnitude: np.ndarray
  terms: np.ndarray
  scaled: int = 0
  blocks: np.ndarray | int = 1


def ranges(sizes: np.ndarray, offset: int = 0, num_groups: int | None = None) -> list[tuple[int, int]]:
  """(start, end) row of each local group."""
  ends = np.cumsum(np.asarray(sizes, np.int64))
  starts = ends - sizes
  count = len(ends) if num_groups is None else num_groups
  return [(int(starts[j]), int(ends[j])) for j in range(offset, offset + count)]


def owner_of_rows(rows: list[tuple[int, int]], m: int) -> np.ndarray:
  """Local group of each row, -1 where there is none."""
  owner = np.full(m, -1)
  for j, (start, end) in enumerate(rows):
    owner[start:end] = j
  return owner


def gmm(lhs, rhs, rows: list[tuple[int, int]], transpose_rhs: bool = False) -> Exact:
  """lhs[i] @ rhs[group of i], zero in uncovered rows; operands are arrays or QArrays."""
  x, w = _wide(lhs), _wide(rhs)
  if transpose_rhs:
    w = w.swapaxes(1, 2)
  value, magnitude = np.zeros((len(x), w.shape[2])), np.zeros((len(x), w.shape[2]))
  for j, (start, end) in enumerate(rows):
    value[start:end] = x[start:end] @ w[j]
    magnitude[start:end] = np.abs(x[start:end]) @ np.abs(w[j])
  k, counts = x.shape[1], (_count(lhs, 1), _count(rhs, 2 if transpose_rhs else 1))
  # Equal blocks that straddle none of either operand: of size gcd(k / a, k / b).
  blocks = k // math.gcd(k, *(k // c for c in counts)) if k else 1
  return Exact(value, magnitude, np.full((1, 1), k), _scales(lhs, rhs), blocks)


def _count(x, axis: int) -> int:
  """Scales along an axis of an operand."""
  return x.scale.shape[axis] if isinstance(x, QArray) else 1


def tgmm(lhs, dout, rows: list[tuple[int, int]]) -> Exact:
  """lhs_g^T @ dout_g per group, zero for an empty one; operands are arrays or QArrays."""
  x, d = _wide(lhs, rows), _wide(dout, rows)
  shape = (len(rows), x.shape[1], d.shape[1])
  value, magnitude = np.zeros(shape), np.zeros(shape)
  for j, (start, end) in enumerate(rows):
    value[j] = x[start:end].T @ d[start:end]
    magnitude[j] = np.abs(x[start:end]).T @ np.abs(d[start:end])
  terms = np.array([end - start for start, end in rows], np.int64).reshape(-1, 1, 1)
  sizes = [x.row_block for x in (lhs, dout) if isinstance(x, QArray) and x.row_block]
  blocks = np.maximum(-(-terms // math.gcd(*sizes)), 1) if sizes else 1
  return Exact(value, magnitude, terms, _scales(lhs, dout), blocks)


def _wide(x, rows: list[tuple[int, int]] | None = None) -> np.ndarray:
  """float64 value of an operand; a QArray's codes times its scales, exactly."""
  if not isinstance(x, QArray):
    return np.asarray(x).astype(np.float64)
  return np.asarray(x.qvalue).astype(np.float64) * expanded_scale(x, rows)


def expanded_scale(x: QArray, rows: list[tuple[int, int]] | None = None) -> np.ndarray:
  """float64 scale of each element of an operand; blocks of rows need the rows of each group."""
  scale = np.asarray(x.scale).astype(np.float64)
  if x.row_block is not None:
    assert rows is not None
    each, at = np.ones(x.shape), 0
    for start, end in rows:
      for first in range(start, end, x.row_block):
        each[first : min(first + x.row_block, end)] = scale[at]
        at += 1
    return each
  for axis, (have, want) in enumerate(zip(scale.shape, x.shape, strict=True)):
    if have != want:
      scale = np.repeat(scale, want // have, axis)
  return scale


def _scales(*operands) -> int:
  return sum(isinstance(x, QArray) for x in operands)

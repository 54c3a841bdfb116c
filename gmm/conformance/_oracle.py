"""What a result must be: float64 loops over groups in numpy, independent of every backend.

Each product also returns the sum of the magnitudes of its terms, which the error bounds need.
"""

from __future__ import annotations

import dataclasses

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
  """

  value: np.ndarray
  magnitude: np.ndarray
  terms: np.ndarray
  scaled: int = 0


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
  return Exact(value, magnitude, np.full((1, 1), x.shape[1]), _scales(lhs, rhs))


def tgmm(lhs, dout, rows: list[tuple[int, int]]) -> Exact:
  """lhs_g^T @ dout_g per group, zero for an empty one; operands are arrays or QArrays."""
  x, d = _wide(lhs), _wide(dout)
  shape = (len(rows), x.shape[1], d.shape[1])
  value, magnitude = np.zeros(shape), np.zeros(shape)
  for j, (start, end) in enumerate(rows):
    value[j] = x[start:end].T @ d[start:end]
    magnitude[j] = np.abs(x[start:end]).T @ np.abs(d[start:end])
  terms = np.array([end - start for start, end in rows]).reshape(-1, 1, 1)
  return Exact(value, magnitude, terms, _scales(lhs, dout))


def _wide(x) -> np.ndarray:
  """float64 value of an operand; a QArray's codes times its scales, exactly."""
  if not isinstance(x, QArray):
    return np.asarray(x).astype(np.float64)
  scale = np.asarray(x.scale).astype(np.float64)
  for axis, (have, want) in enumerate(zip(scale.shape, x.shape, strict=True)):
    if have not in (1, want):
      scale = np.repeat(scale, want // have, axis)
  return np.asarray(x.qvalue).astype(np.float64) * scale


def _scales(*operands) -> int:
  return sum(isinstance(x, QArray) for x in operands)

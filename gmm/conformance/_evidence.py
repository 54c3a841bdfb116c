"""What a failed comparison saw, as arrays: for a diagnosis, a picture, a report."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
  """A result beside what it must be.

  Attributes:
    what: name of the result, for example "dlhs of fp8_dynamic".
    got, expected: float64; of the same shape unless the shape is what is wrong.
    dtypes: names of the dtypes of got and expected; the same unless the dtype is what is wrong.
    bound: largest |got - expected| allowed, float64 of their shape; None where they must be equal.
    owner: group of each index of the first axis, -1 for none; None where it is not known.
  """

  what: str
  got: np.ndarray
  expected: np.ndarray
  dtypes: tuple[str, str]
  bound: np.ndarray | None = None
  owner: np.ndarray | None = None

  @property
  def ratio(self) -> np.ndarray:
    """error / bound of each element: 0 where nothing is wrong, inf for a NaN or a difference where none is allowed."""
    return error_ratio(self.got, self.expected, self.bound)

  @property
  def same_form(self) -> bool:
    """Whether shape and dtype are right, so that elements can be compared."""
    return self.got.shape == self.expected.shape and self.dtypes[0] == self.dtypes[1]

  @property
  def first_bad(self) -> tuple[int, ...] | None:
    """Index of the first element outside the bound, None when shape or dtype is what is wrong."""
    if not self.same_form:
      return None
    bad = np.argwhere(self.ratio > 1)
    return tuple(int(i) for i in bad[0]) if len(bad) else None

  def group_of(self, at: tuple[int, ...]) -> int | None:
    """Group that the element belongs to, -1 for none, None where it is not known."""
    if self.owner is None or not at or at[0] >= len(self.owner):
      return None
    return int(self.owner[at[0]])


def error_ratio(got: np.ndarray, expected: np.ndarray, bound: np.ndarray | None) -> np.ndarray:
  """|got - expected| / bound with NaN equal to NaN; without a bound 0 where they are equal and inf elsewhere."""
  same = (got == expected) | (np.isnan(got) & np.isnan(expected))
  if bound is None:
    return np.where(same, 0.0, np.inf)
  with np.errstate(invalid="ignore", divide="ignore"):
    ratio = np.where(same, 0.0, np.abs(got - expected) / bound)
  return np.where(np.isnan(ratio), np.inf, ratio)

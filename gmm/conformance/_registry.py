"""The checks: one or more functions for each clause of SPEC.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from gmm._protocol import Backend
from gmm.conformance._evidence import Evidence, error_ratio

# What a check runs on: one backend, or the library itself (codes, registry, arguments).
Scope = Literal["backend", "library"]


class Violation(AssertionError):
  """A result that the clause forbids; the message says which element, and how far off.

  Attributes:
    evidence: the result and what it must be, where the two were compared.
  """

  def __init__(self, message: str, evidence: Evidence | None = None):
    super().__init__(message)
    self.evidence = evidence


@dataclasses.dataclass(frozen=True)
class Check:
  """One property.

  Attributes:
    clause: id of the clause in SPEC.md.
    rule: the property, in a few words.
    run: `run(backend, case)`; raises Violation, or returns the worst error/bound ratio
      (None where there is no bound but equality).
    draws: name of the strategy in `_strategies` that draws its cases, or the cases themselves.
    scope: "backend", or "library" where no backend matters (run gets the reference).
    weight: share of the profile's examples; checks that compile much take less.
  """

  clause: str
  rule: str
  run: Callable[[Backend, Any], float | None]
  draws: str | tuple[Any, ...]
  scope: Scope = "backend"
  weight: float = 1.0

  @property
  def id(self) -> str:
    return f"{self.clause}:{self.run.__name__}"


def check(
  clause: str, rule: str, draws: str | tuple[Any, ...] = "cases", scope: Scope = "backend", weight: float = 1.0
):
  """Marks a function as the check of a clause."""

  def mark(run: Callable[[Backend, Any], float | None]) -> Check:
    return Check(clause, rule, run, draws, scope, weight)

  return mark


def expect_equal(got: Any, expected: Any, what: str, owner: np.ndarray | None = None) -> None:
  """Exact equality with NaN equal to NaN; `owner` gives the group of each index of the first axis."""
  got, expected = np.asarray(got), np.asarray(expected)
  dtypes = got.dtype.name, expected.dtype.name
  wide_got, wide = got.astype(np.float64), expected.astype(np.float64)
  evidence = Evidence(what, wide_got, wide, dtypes, owner=owner)
  if not evidence.same_form:
    raise Violation(f"{what} is {got.dtype}{got.shape}, must be {expected.dtype}{expected.shape}", evidence)
  bad = ~((wide_got == wide) | (np.isnan(wide_got) & np.isnan(wide)))
  if bad.any():
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    raise Violation(
      f"{what}[{', '.join(map(str, at))}]{_group(owner, at)} = {wide_got[at]:g}, must be {wide[at]:g} exactly "
      f"({bad.sum()} of {bad.size} elements differ)",
      evidence,
    )


def expect_within(got: Any, exact: np.ndarray, bound: np.ndarray, what: str, owner: np.ndarray | None = None) -> float:
  """|got - exact| <= bound, element by element; returns the worst ratio."""
  got = np.asarray(got)
  wide, bound = got.astype(np.float64), np.broadcast_to(bound, exact.shape)
  evidence = Evidence(what, wide, exact, (got.dtype.name, got.dtype.name), bound, owner)
  if wide.shape != exact.shape:
    raise Violation(f"{what} has shape {wide.shape}, must be {exact.shape}", evidence)
  ratio = error_ratio(wide, exact, bound)
  if ratio.size and ratio.max() > 1:
    at = tuple(int(i) for i in np.unravel_index(ratio.argmax(), ratio.shape))
    error = abs(wide[at] - exact[at])
    raise Violation(
      f"{what}[{', '.join(map(str, at))}]{_group(owner, at)} = {wide[at]:.9g}, exact {exact[at]:.9g}, error "
      f"{error:.3g} is {ratio[at]:.3g} times the bound {bound[at]:.3g} "
      f"({(ratio > 1).sum()} of {ratio.size} elements past it)",
      evidence,
    )
  return float(ratio.max()) if ratio.size else 0.0


def expect(condition: bool, message: str) -> None:
  """Raises Violation with the message unless the condition holds."""
  if not condition:
    raise Violation(message)


def _group(owner: np.ndarray | None, at: tuple[int, ...]) -> str:
  if owner is None:
    return ""
  return f" (group {owner[at[0]]})" if owner[at[0]] >= 0 else " (a row of no group)"

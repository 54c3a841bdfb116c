"""The checks: one or more functions for each clause of SPEC.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from gmm._protocol import Backend

# What a check runs on: one backend, or the library itself (codes, registry, arguments).
Scope = Literal["backend", "library"]


class Violation(AssertionError):
  """A result that the clause forbids; the message says which element, and how far off."""


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
  if got.shape != expected.shape or got.dtype != expected.dtype:
    raise Violation(f"{what} is {got.dtype}{got.shape}, must be {expected.dtype}{expected.shape}")
  wide_got, wide = got.astype(np.float64), expected.astype(np.float64)
  bad = ~((wide_got == wide) | (np.isnan(wide_got) & np.isnan(wide)))
  if bad.any():
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    raise Violation(
      f"{what}[{', '.join(map(str, at))}]{_group(owner, at)} = {wide_got[at]:g}, must be {wide[at]:g} exactly "
      f"({bad.sum()} of {bad.size} elements differ)"
    )


def expect_within(got: Any, exact: np.ndarray, bound: np.ndarray, what: str, owner: np.ndarray | None = None) -> float:
  """|got - exact| <= bound, element by element; returns the worst ratio."""
  wide = np.asarray(got).astype(np.float64)
  if wide.shape != exact.shape:
    raise Violation(f"{what} has shape {wide.shape}, must be {exact.shape}")
  with np.errstate(invalid="ignore"):
    error = np.abs(wide - exact)
    ratio = np.where(error == 0, 0.0, error / bound)
  ratio = np.where(np.isnan(ratio), np.inf, ratio)
  if ratio.size and ratio.max() > 1:
    at = tuple(int(i) for i in np.unravel_index(ratio.argmax(), ratio.shape))
    raise Violation(
      f"{what}[{', '.join(map(str, at))}]{_group(owner, at)} = {wide[at]:.9g}, exact {exact[at]:.9g}, error "
      f"{error[at]:.3g} is {ratio[at]:.3g} times the bound {np.broadcast_to(bound, exact.shape)[at]:.3g} "
      f"({(ratio > 1).sum()} of {ratio.size} elements past it)"
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

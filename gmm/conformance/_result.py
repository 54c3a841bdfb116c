"""What running checks gives: a result per check and backend, a report of them all."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from gmm.conformance._evidence import Evidence
from gmm.conformance._registry import Check

Status = Literal["passed", "failed", "declined", "expected failure", "unexpected pass", "suite error"]
Profile = Literal["quick", "default", "thorough"]

_GOOD: tuple[Status, ...] = ("passed", "declined", "expected failure")


@dataclasses.dataclass(frozen=True)
class Result:
  """What one check found on one backend.

  Attributes:
    check: the check.
    backend: name of the backend.
    status: "declined" when every case was refused: it is not passed. "suite error": the kit itself broke.
    ran, declined: cases of each kind.
    reasons: why cases were declined.
    ratio: worst error/bound, None where the check is exact.
    case: the smallest case that failed.
    message: what is wrong there, or the error that was raised.
    seconds: wall time.
    expected: the reason given in `expected_failures`, "" where none is.
    looks_like: the likely kind of fault, in a few words, "" where none is recognised.
    evidence: the arrays that were compared, where they were.
    found_case, found_evidence: the same of the case that failed first, before it was made small.
    tile: (rows, columns) of the tile that the failing call was given, None where it chose its own.
    traceback: of an error that is no violation.
  """

  check: Check
  backend: str
  status: Status
  ran: int = 0
  declined: int = 0
  reasons: tuple[str, ...] = ()
  ratio: float | None = None
  case: Any = None
  message: str = ""
  seconds: float = 0.0
  expected: str = ""
  looks_like: str = ""
  evidence: Evidence | None = None
  found_case: Any = None
  found_evidence: Evidence | None = None
  tile: tuple[int, int] | None = None
  traceback: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
  """Results of one or more backends, in the order of SPEC.md."""

  results: tuple[Result, ...]
  profile: str
  seed: int
  seconds: float

  @property
  def conforms(self) -> bool:
    """Whether something ran and nothing failed that was not expected to."""
    return any(r.ran for r in self.results) and not self.failures

  @property
  def failures(self) -> tuple[Result, ...]:
    """Failures, suite errors and unexpected passes."""
    return tuple(r for r in self.results if r.status not in _GOOD)


class ConformanceError(AssertionError):
  """A backend does not conform.

  Attributes:
    report: the whole report.
  """

  def __init__(self, message: str, report: Report):
    super().__init__(message)
    self.report = report

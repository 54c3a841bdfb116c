"""A failure made small and named: the smallest case, what is wrong there, whose error it is."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any

from gmm import _registry
from gmm._protocol import Backend, Unsupported
from gmm.conformance import _diagnose, _spy
from gmm.conformance._blame import is_backends_error
from gmm.conformance._case import Case
from gmm.conformance._evidence import Evidence
from gmm.conformance._registry import Check, Violation
from gmm.conformance._shrink import shrink

# How long a failing check may look for a smaller case: a few shapes, one or two compiles each.
SHRINK_SECONDS = 12.0


@dataclasses.dataclass(frozen=True)
class Finding:
  """What is known of a failure.

  Attributes:
    suite: whether the kit itself broke, not the backend.
    case: the smallest case that fails.
    message, evidence, looks_like, found_case, found_evidence, tile, traceback: as in `Result`.
  """

  suite: bool
  case: Any
  message: str
  evidence: Evidence | None = None
  looks_like: str = ""
  found_case: Any = None
  found_evidence: Evidence | None = None
  tile: tuple[int, int] | None = None
  traceback: str = ""


def examine(
  error: Exception, check: Check, backend: Backend, case: Any, *, explain: bool, smaller: bool = True
) -> Finding:
  """Names a failure of `check` on `backend` at `case` and makes it small.

  Args:
    error: what was raised.
    check, backend, case: where.
    explain: False takes the failure as it is.
    smaller: whether a smaller case may be looked for.
  """
  if not isinstance(error, Violation) and not is_backends_error(error, check, backend, case):
    return Finding(True, case, _text(error), traceback=_trace(error))
  if not explain:
    return Finding(False, case, _text(error), _evidence(error), "", case, _evidence(error), None, _trace(error))
  # 1. The kind of fault, from the case as it was found: a small one fits more explanations.
  found_case, found = case, error
  calls = _spy.record(check, backend, case) if isinstance(error, Violation) else ()
  looks_like = _diagnose.diagnose(_evidence(error), calls, str(error)) if isinstance(error, Violation) else ""
  tile = _tile(_evidence(error), calls)
  # 2. The smallest case that fails.
  if smaller and isinstance(case, Case) and (isinstance(check.draws, str) or case.m > 16 or case.g > 3):
    case, error = _smallest(error, check, backend, case)
  if not _diagnose.is_named(looks_like) and isinstance(error, Violation) and case != found_case:
    again = _diagnose.diagnose(_evidence(error), _spy.record(check, backend, case), str(error))
    looks_like = again if _diagnose.is_named(again) else looks_like or again
  return Finding(
    False, case, _text(error), _evidence(error), looks_like, found_case, _evidence(found), tile, _trace(error)
  )


def _evidence(error: Exception) -> Evidence | None:
  return error.evidence if isinstance(error, Violation) else None


def _tile(evidence: Evidence | None, calls: tuple[_spy.Call, ...]) -> tuple[int, int] | None:
  """(rows, columns) of the tile that the call behind the evidence was given."""
  for call in calls:
    tiling = call.options.get("tiling")
    if tiling is not None and evidence is not None and call.got.shape == evidence.got.shape:
      return (tiling[1] if call.pass_ == "drhs" else tiling[0]), tiling[2]
  return None


def _smallest(error: Exception, check: Check, backend: Backend, case: Case) -> tuple[Case, Exception]:
  """The smallest case found, and its error."""
  errors: dict[Case, Exception] = {case: error}
  unfit: set[tuple[int, int, int, int]] = set()

  def fails(candidate: Case) -> bool:
    shape = candidate.m, candidate.k, candidate.n, candidate.g
    if shape in unfit:
      return False
    raised = _error_of(check, backend, candidate)
    if raised is None or type(raised) is not type(error):
      return False
    # Not every check works at every shape: the reference must pass where the backend is said to fail.
    if backend.name != "reference" and _error_of(check, _registry.get_backend("reference"), candidate) is not None:
      unfit.add(shape)
      return False
    if backend.name == "reference" and not _same_result(raised, error):
      return False
    errors[candidate] = raised
    return True

  # A check that draws floats of every kind, or integers of both dtypes, holds for float32 integers as well.
  found = shrink(case, fails, simpler_data=check.draws in ("cases", "exact"), seconds=SHRINK_SECONDS)
  return found, errors[found]


def _error_of(check: Check, backend: Backend, case: Case) -> Exception | None:
  try:
    check.run(backend, case)
  except Unsupported:
    return None
  except Exception as error:
    return error
  return None


def _same_result(a: Exception, b: Exception) -> bool:
  """Whether two violations are about the same result, "out" or "dlhs"."""
  names = [e.evidence.what.split()[0] if isinstance(e, Violation) and e.evidence else "" for e in (a, b)]
  return names[0] == names[1]


def _text(error: Exception) -> str:
  return str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"


def _trace(error: Exception) -> str:
  return "" if isinstance(error, Violation) else "".join(traceback.format_exception(error))

"""The checks as tests of somebody else's suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from gmm._protocol import Backend
from gmm.conformance import _checks, _expected
from gmm.conformance._load import load_backend
from gmm.conformance._registry import Check
from gmm.conformance._result import ConformanceError, Profile, Report
from gmm.conformance._run import failure_text, run_check, select


class SuiteError(RuntimeError):
  """The kit itself broke; never an expected failure."""


@dataclasses.dataclass(frozen=True)
class Run:
  """One check on one backend, to be called in a test.

  Attributes:
    check: the check.
    backend: what `load_backend` takes; loaded when the test runs, not when tests are collected.
    profile, seed: as in `check_backend`.
  """

  check: Check
  backend: str | Backend
  profile: Profile
  seed: int

  def __call__(self) -> None:
    """Runs it.

    Raises:
      ConformanceError: the check fails.
      SuiteError: the kit broke.
      pytest.skip.Exception: the backend declines every case; the skip's reason is the backend's own.
    """
    import pytest

    result = run_check(self.check, load_backend(self.backend), profile=self.profile, seed=self.seed)
    report = Report((result,), self.profile, self.seed, result.seconds)
    if result.status == "suite error":
      raise SuiteError(f"{failure_text(report)}\n{result.traceback}")
    if result.status == "failed":
      raise ConformanceError(failure_text(report), report)
    if result.status == "declined":
      pytest.skip(f"declined: {'; '.join(result.reasons)}")


def parametrize_with_checks(
  backend: str | Backend,
  clauses: str = "*",
  expected_failures: Mapping[str, str] = MappingProxyType({}),
  *,
  profile: Profile = "default",
  seed: int = 0,
) -> Callable[[Any], Any]:
  """Decorator that makes one pytest test of each check of a backend; the test's id is the check's.

  `@parametrize_with_checks("my_package.kernels:backend")` goes above `def test_conforms(check): check()`.
  A declined check is skipped with the backend's reason, an expected failure is a strict xfail. Checks of the
  library itself, which ask no backend, are left out.

  Args:
    backend: a `gmm.Backend`, its name, or "package.module:object"; a string is loaded when the first test runs.
    clauses, expected_failures, profile, seed: as in `check_backend`.

  Raises:
    ValueError: no clause matches, unknown profile, or an expected failure that names no check.
  """
  import pytest

  params = []
  for check in select(clauses, profile, expected_failures):
    if check.scope == "library":
      continue
    reason = _expected.reason_for(check, expected_failures)
    marks = [pytest.mark.xfail(reason=reason, strict=True, raises=ConformanceError)] if reason else []
    params.append(pytest.param(Run(check, backend, profile, seed), id=check.id, marks=marks))
  if not params:
    known = ", ".join(dict.fromkeys(c.clause for c in _checks.CHECKS if c.scope == "backend"))
    raise ValueError(f"{clauses!r} matches no check that asks a backend; clauses that do: {known}.")
  return pytest.mark.parametrize("check", params)

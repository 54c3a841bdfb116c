"""Failures that a caller expects: a mapping from clauses or checks to reasons."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from gmm.conformance._registry import Check


def matches(check: Check, pattern: str) -> bool:
  """Whether a glob pattern names the check, by its clause ("GMM-5", "VJP-*") or its own id ("GMM-5:offset_forms")."""
  return fnmatch.fnmatchcase(check.clause, pattern) or fnmatch.fnmatchcase(check.id, pattern)


def validate(expected: Mapping[str, str], known: Iterable[Check]) -> None:
  """Raises ValueError for a pattern that names no check, or that has no reason."""
  known = tuple(known)
  for pattern, reason in expected.items():
    if not any(matches(c, pattern) for c in known):
      ids = ", ".join(dict.fromkeys(c.clause for c in known))
      raise ValueError(f"expected_failures names {pattern!r}, which matches no check; known clauses: {ids}.")
    if not isinstance(reason, str) or not reason.strip():
      raise ValueError(f"expected_failures[{pattern!r}] must be a reason in words, got {reason!r}.")


def reason_for(check: Check, expected: Mapping[str, str]) -> str:
  """The reason of the first pattern that names the check, "" where none does."""
  return next((reason for pattern, reason in expected.items() if matches(check, pattern)), "")

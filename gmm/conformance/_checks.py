"""All checks, in the order of SPEC.md."""

from __future__ import annotations

from gmm.conformance import (
  _checks_blocks,
  _checks_codes,
  _checks_gmm,
  _checks_qnt,
  _checks_reg,
  _checks_tgmm,
  _checks_vjp,
)
from gmm.conformance._registry import Check


def _by_clause(checks: tuple[Check, ...]) -> tuple[Check, ...]:
  return tuple(sorted(checks, key=lambda c: int(c.clause.rpartition("-")[2])))


CHECKS = (
  *_checks_gmm.CHECKS,
  *_checks_tgmm.CHECKS,
  *_checks_vjp.CHECKS,
  *_by_clause((*_checks_codes.CHECKS, *_checks_blocks.CHECKS, *_checks_qnt.CHECKS)),
  *_checks_reg.CHECKS,
)

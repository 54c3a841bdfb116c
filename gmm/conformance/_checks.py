"""All checks, in the order of SPEC.md."""

from __future__ import annotations

from gmm.conformance import _checks_gmm, _checks_tgmm

CHECKS = (*_checks_gmm.CHECKS, *_checks_tgmm.CHECKS)

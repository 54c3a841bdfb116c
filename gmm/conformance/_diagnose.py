"""One line about a failure: which kind of fault it looks like.

First the backend's calls are replayed: the first whose result is outside its bound is compared
with what known faults would have given (`_hypotheses`), then with what its result is made of
(`_structure`), then with what too few bits would give. Where no call is to blame, the compared
arrays alone are looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gmm.conformance._case import numpy_dtype
from gmm.conformance._evidence import Evidence, error_ratio
from gmm.conformance._hypotheses import hypotheses
from gmm.conformance._replay import Replay, replay
from gmm.conformance._spy import Call
from gmm.conformance._structure import nan_lost, place, structure

_UNNAMED = "wrong values"  # nothing known; only the place is said
_PASS = {"fwd": "in the forward", "dlhs": "in dlhs", "drhs": "in drhs"}


def diagnose(evidence: Evidence | None, calls: Sequence[Call], message: str = "") -> str:
  """What the failure looks like, "" when nothing is recognised.

  Args:
    evidence: the arrays that the check compared, where it compared arrays.
    calls: the backend's calls while the check ran, from `_spy.record`.
    message: the check's own sentence.
  """
  for i, call in enumerate(calls if "second run" not in message else ()):
    said = of_call(call, calls[:i])
    if said:
      return f"{said} ({_PASS[call.pass_]})"
  return of_evidence(evidence, message)


def is_named(said: str) -> bool:
  """Whether a diagnosis names a kind of fault rather than only its place."""
  return said != "" and not said.startswith(_UNNAMED)


def of_call(call: Call, earlier: Sequence[Call] = ()) -> str:
  """What is wrong with one call's result, "" when nothing is; `earlier` calls may have left something behind."""
  r = replay(call)
  wanted = (len(r.rows), r.lhs.codes.shape[1], r.rhs.codes.shape[-1]) if r.sums_rows else (r.m, r.rhs.codes.shape[-1])
  if call.got.dtype.name != r.out_dtype:
    return f"wrong dtype: {call.got.dtype.name} instead of {r.out_dtype}"
  if call.got.shape != wanted:
    return f"wrong shape: {call.got.shape} instead of {wanted}"
  with np.errstate(all="ignore"):
    found = r.exact()
    bound = np.broadcast_to(r.bound(found), found.value.shape)
    got, exact = call.got.astype(np.float64), _overflowed(found.value, r.out_dtype)
    bad = error_ratio(got, exact, bound) > 1
    if not bad.any():
      return ""
    # One rounding too many may look like codes that are off by one, where a backend quantizes by itself.
    codes = r.lhs.quantized or r.rhs.quantized
    said = nan_lost(got, exact, bad) or _stalled(r, got) or ("" if codes else _rounded(r, got, exact))
    said = said or _stale_sizes(call, got, earlier) or _known(r, call, got) or _rounded(r, got, exact)
    said = said or _stale_result(call, got, earlier) or structure(r, got, exact, bad, bound)
    return said or _short_sums(r, got, exact) or f"{_UNNAMED}: {place(r, bad)}"


def _overflowed(exact: np.ndarray, dtype: str) -> np.ndarray:
  """What is past the largest number of the result's dtype is Inf there."""
  rounded = exact.astype(numpy_dtype(dtype)).astype(np.float64)
  return np.where(np.isinf(rounded), rounded, exact)


def _alike(call: Call, earlier: Sequence[Call]) -> list[Call]:
  """Earlier calls of the same pass and shapes, the last one first."""
  same = lambda c: c.pass_ == call.pass_ and c.got.shape == call.got.shape and c.sizes.shape == call.sizes.shape
  return [c for c in reversed(earlier) if same(c)]


def _stale_sizes(call: Call, got: np.ndarray, earlier: Sequence[Call]) -> str:
  for before in _alike(call, earlier):
    if not np.array_equal(before.sizes, call.sizes):
      mixed = replay(dataclasses.replace(call, sizes=before.sizes))
      if _fits(mixed, got):
        return "stale metadata: group sizes of an earlier call"
  return ""


def _stale_result(call: Call, got: np.ndarray, earlier: Sequence[Call]) -> str:
  same = any(np.array_equal(c.got.astype(np.float64), got) for c in _alike(call, earlier))
  return "stale buffer: the result of an earlier call" if same and got.any() else ""


def _known(r: Replay, call: Call, got: np.ndarray) -> str:
  return next((label for label, wrong in hypotheses(r, call) if _fits(wrong, got)), "")


def _fits(r: Replay, got: np.ndarray) -> bool:
  found = r.exact()
  if found.value.shape != got.shape:
    return False
  exact = _overflowed(found.value, r.out_dtype)
  return bool((error_ratio(got, exact, np.broadcast_to(r.bound(found), exact.shape)) <= 1).all())


def _stalled(r: Replay, got: np.ndarray) -> str:
  """A sum of equal terms that ends where one more term is half a unit in the last place."""
  x, w = r.lhs.value, r.rhs.value
  if not x.size or not w.size or np.ptp(x) or np.ptp(w) or not x.flat[0] * w.flat[0]:
    return ""
  terms = got / (x.flat[0] * w.flat[0])
  last = terms.max()
  if (r.exact().terms > last).any() and last >= 256 and np.log2(last).is_integer():
    kind = "bfloat16" if last < 2048 else "bfloat16 or float16"
    return f"{kind} accumulation: the running sum stalls at {last:g} terms"
  return ""


def _rounded(r: Replay, got: np.ndarray, exact: np.ndarray) -> str:
  """One rounding more than allowed, of the result."""
  through = []
  for dtype, unit in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
    narrow = np.array_equal(got.astype(numpy_dtype(dtype)).astype(np.float64), got, equal_nan=True)
    once = (np.abs(got - exact) <= unit * 1.01 * np.abs(exact) + 2.0**-126).all()
    if r.out_dtype == "float32" and narrow and once:
      through.append(dtype)
    if r.out_dtype == dtype and _within(r, got, exact, out_roundings=2):
      return f"an extra rounding to {dtype}, or {dtype} accumulation: the result is rounded more than once"
  return f"an extra rounding: the result went through {' or '.join(through)}" if through else ""


def _short_sums(r: Replay, got: np.ndarray, exact: np.ndarray) -> str:
  """A running sum, or products, of too few bits: the last resort, as that bound is wide for long sums."""
  for dtype in ("bfloat16", "float16"):
    if _within(r, got, exact, accumulator=dtype):
      return f"{dtype} accumulation: the running sum, or the products, have too few bits"
  return ""


def _within(r: Replay, got: np.ndarray, exact: np.ndarray, **declared) -> bool:
  bound = np.broadcast_to(r.bound(r.exact(), **declared), got.shape)
  return bool((error_ratio(got, exact, bound) <= 1).all())


# Sentences of checks that compare no arrays.
_SENTENCES = (
  ("second run", "not reproducible: the bits differ from run to run"),
  ("compiled for new group sizes", "recompiled: group sizes are treated as static"),
  ("core grid was declined", "the core is declined: supports refuses what every backend must do"),
  ("refused without a reason", "declined without a reason"),
  ("supports accepts it and the backend refuses", "supports accepts what the backend refuses"),
  ("supports refuses it", "supports refuses what the backend does"),
  (" lacks [", "an argument of the protocol is missing"),
)


def of_evidence(evidence: Evidence | None, message: str) -> str:
  """What the compared arrays alone say."""
  for words, said in _SENTENCES:
    if words in message:
      return said
  if evidence is None:
    return ""
  if evidence.dtypes[0] != evidence.dtypes[1]:
    return f"wrong dtype: {evidence.dtypes[0]} instead of {evidence.dtypes[1]}"
  if evidence.got.shape != evidence.expected.shape:
    return f"wrong shape: {evidence.got.shape} instead of {evidence.expected.shape}"
  bad = evidence.ratio > 1
  got, owner = evidence.got, evidence.owner
  index = np.unique(np.nonzero(bad)[0]) if bad.ndim else np.zeros(0, int)
  if owner is not None and len(index) and (owner[index] < 0).all():
    return "uninitialised tail rows: rows of no group are not zeroed"
  if (bad & ~np.isfinite(got)).any():
    return "NaN leaking: from rows of no group, another row or another group"
  if not got[bad].any():
    return "dropped: zeros where numbers must be"
  return ""

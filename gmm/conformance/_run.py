"""Running checks over a backend: draw cases, keep the smallest that fails, count what was declined."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import hypothesis
import hypothesis.errors
import jax

from gmm import _registry as backend_registry
from gmm._protocol import Backend, Unsupported
from gmm.conformance import _checks, _expected
from gmm.conformance._blame import refused_inside
from gmm.conformance._examine import examine
from gmm.conformance._load import load_backend
from gmm.conformance._registry import Check, Violation
from gmm.conformance._result import ConformanceError, Profile, Report, Result, Status
from gmm.conformance._strategies import strategy

_NONE: Mapping[str, str] = types.MappingProxyType({})

# Examples of a check of weight 1; a compiled shape runs many of them.
EXAMPLES = {"quick": 4, "default": 12, "thorough": 100}


def checks(clauses: str = "*") -> tuple[Check, ...]:
  """The checks whose clause or id matches the glob pattern, in the order of SPEC.md."""
  return tuple(c for c in _checks.CHECKS if _expected.matches(c, clauses))


def check_backend(
  backend: str | Backend,
  clauses: str = "*",
  expected_failures: Mapping[str, str] = _NONE,
  *,
  profile: Profile = "default",
  seed: int = 0,
  on_fail: Literal["raise", "report"] = "raise",
  on_result: Callable[[Result], None] | None = None,
) -> Report:
  """Checks one backend against SPEC.md.

  Args:
    backend: a `gmm.Backend`, its registered name, or "package.module:object".
    clauses: glob pattern of clauses or of checks, for example "VJP-*" or "GMM-5:offset_forms".
    expected_failures: glob pattern of the same kind -> reason. A check so named that fails is an "expected
      failure"; one that passes is an "unexpected pass", which does not conform: the entry is out of date.
    profile: how many cases: "quick", "default" or "thorough".
    seed: another seed draws other cases.
    on_fail: "raise" a `ConformanceError` that lists what failed, or only "report" it.
    on_result: called with each result as it comes.

  Returns:
    Report: `report.conforms` says whether all that ran holds.

  Raises:
    ConformanceError: something failed, or nothing ran, and on_fail is "raise"; it carries the report.
    ValueError, ImportError: the backend cannot be found or loaded; no clause matches; unknown profile or
      on_fail; an expected failure that names no check.
  """
  if on_fail not in ("raise", "report"):
    raise ValueError(f"on_fail must be 'raise' or 'report', got {on_fail!r}.")
  report = check_backends([backend], clauses, expected_failures, profile=profile, seed=seed, on_result=on_result)
  if on_fail == "raise" and not report.conforms:
    raise ConformanceError(failure_text(report), report)
  return report


def check_backends(
  backends: Iterable[str | Backend],
  clauses: str = "*",
  expected_failures: Mapping[str, str] = _NONE,
  *,
  profile: Profile = "default",
  seed: int = 0,
  on_result: Callable[[Result], None] | None = None,
) -> Report:
  """`check_backend` for several, which only reports; checks of the library itself run once."""
  chosen = select(clauses, profile, expected_failures)
  begun, results = time.monotonic(), []
  for check, backend in plan([load_backend(b) for b in backends], chosen):
    results.append(run_check(check, backend, expected_failures, profile=profile, seed=seed))
    if on_result is not None:
      on_result(results[-1])
  return Report(tuple(results), profile, seed, time.monotonic() - begun)


def failure_text(report: Report) -> str:
  """Each failure in a few lines, for an exception."""
  if not report.failures:
    return "Nothing ran: every case was declined."
  lines = [f"{len(report.failures)} of {len(report.results)} checks do not hold."]
  for r in report.failures:
    lines += ["", f"{r.check.id} on {r.backend}: {r.status}", f"  rule           {r.check.rule}"]
    fields = ("case", "smallest case"), ("message", "found"), ("looks_like", "looks like"), ("expected", "reason given")
    lines += [f"  {title:14s} {getattr(r, name)}" for name, title in fields if getattr(r, name) not in (None, "")]
  return "\n".join(lines)


def select(clauses: str, profile: str, expected_failures: Mapping[str, str] = _NONE) -> tuple[Check, ...]:
  """`checks(clauses)`; raises ValueError when none matches, or the profile or an expected failure is unknown."""
  _expected.validate(expected_failures, _checks.CHECKS)
  if profile not in EXAMPLES:
    raise ValueError(f"Unknown profile {profile!r}; known: {', '.join(EXAMPLES)}.")
  chosen = checks(clauses)
  if not chosen:
    known = ", ".join(dict.fromkeys(c.clause for c in _checks.CHECKS))
    raise ValueError(f"No clause matches {clauses!r}; known: {known}.")
  return chosen


def plan(backends: list[Backend], chosen: tuple[Check, ...]) -> Iterator[tuple[Check, Backend]]:
  """The runs: each check on each backend, those of the library once, on the reference."""
  for check in chosen:
    if check.scope == "library":
      yield check, backend_registry.get_backend("reference")
  for backend in backends:
    for check in chosen:
      if check.scope == "backend":
        yield check, backend


def run_check(
  check: Check,
  backend: Backend,
  expected_failures: Mapping[str, str] = _NONE,
  *,
  profile: Profile = "default",
  seed: int = 0,
  case: Any = None,
  explain: bool = True,
) -> Result:
  """Runs one check on one backend; an error of the suite or the backend is a result, not an exception.

  Args:
    check, backend: what runs.
    expected_failures, profile, seed: as in `check_backend`.
    case: run this case only, as it is, instead of drawing.
    explain: whether a failure is shrunk to a small case and diagnosed, which takes some seconds.
  """
  begun = time.monotonic()
  tally, finding = _Tally(), None
  with warnings.catch_warnings(), _quick_compiles(backend, profile):
    # Hypothesis warns of a slow first example, which is a compile.
    warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
    try:
      if case is not None:
        tally.run(check, backend, case)
      else:
        _run_cases(check, backend, EXAMPLES[profile], seed, lambda case: tally.run(check, backend, case))
    except Exception as error:  # whatever a third party's kernel raises is reported with its case
      finding = examine(error, check, backend, tally.case, explain=explain, smaller=case is None)
  expected = _expected.reason_for(check, expected_failures)
  status: Status = "declined" if not tally.ran else "unexpected pass" if expected else "passed"
  result = Result(
    check=check,
    backend="(library)" if check.scope == "library" else backend.name,
    status=status,
    ran=tally.ran,
    declined=tally.declined,
    reasons=tuple(reason for reason, _ in tally.reasons.most_common()),
    ratio=tally.ratio,
    seconds=time.monotonic() - begun,
    expected=expected,
  )
  if finding is None:
    return result
  status = "suite error" if finding.suite else "expected failure" if expected else "failed"
  said = {f.name: getattr(finding, f.name) for f in dataclasses.fields(finding) if f.name != "suite"}
  return dataclasses.replace(result, status=status, ran=max(tally.ran, 1), **said)


@contextlib.contextmanager
def _quick_compiles(backend: Backend, profile: Profile) -> Iterator[None]:
  """Compiles without the optimisations that pay off in long runs: a check's programs run for milliseconds.

  They change how code is emitted, not which operations it has. What is compiled for real is compiled as
  users compile it in the thorough profile, and on every platform but CPU.
  """
  if not backend.interpreted() and (profile == "thorough" or jax.default_backend() != "cpu"):
    yield
    return
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  try:
    yield
  finally:
    jax.config.update("jax_disable_most_optimizations", before)


class _Tally:
  """What happened so far; after a failure `case` is the last one run, which failed."""

  def __init__(self):
    self.ran = self.declined = 0
    self.reasons: collections.Counter[str] = collections.Counter()
    self.ratio: float | None = None
    self.case: Any = None

  def run(self, check: Check, backend: Backend, case: Any) -> None:
    self.case = case
    try:
      ratio = check.run(backend, case)
    except Unsupported as refusal:
      if refused_inside(refusal, backend):
        raise Violation(f"supports accepts it and the backend refuses: {refusal}") from refusal
      self.declined += 1
      self.reasons[_reason(str(refusal))] += 1
      return
    self.ran += 1
    if ratio is not None:
      self.ratio = max(ratio, self.ratio or 0.0)


def _reason(text: str) -> str:
  """The backend's own sentence, without the sizes of the case around it."""
  head, _, tail = text.partition(": ")
  return (tail if head.startswith("Backend ") else text).removesuffix(" (A named backend never falls back.)")


def _run_cases(check: Check, backend: Backend, examples: int, seed: int, run: Callable[[Any], None]) -> None:
  if not isinstance(check.draws, str):
    for case in check.draws:
      run(case)
    return
  interpreted = backend.interpreted()
  count = max(2, round(examples * check.weight))
  settings = hypothesis.settings(
    max_examples=count,
    deadline=None,  # the first example of a shape compiles
    database=None,  # the same cases on every machine
    report_multiple_bugs=False,
    # They measure time, which is compilation here.
    suppress_health_check=(hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large),
    phases=(hypothesis.Phase.generate,),  # a failure is shrunk over shapes as well, in `_shrink`
    verbosity=hypothesis.Verbosity.quiet,
  )

  @hypothesis.seed(seed)
  @settings
  @hypothesis.given(strategy(check.draws, interpreted))
  def each(case):
    run(case)

  each()

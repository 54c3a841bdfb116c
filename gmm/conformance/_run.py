"""Running checks over a backend: draw cases, keep the smallest that fails, count what was declined."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import hypothesis
import hypothesis.errors
import jax

from gmm import _registry as backend_registry
from gmm._protocol import Backend, Unsupported
from gmm.conformance import _checks
from gmm.conformance._registry import Check, Violation
from gmm.conformance._strategies import strategy

Status = Literal["passed", "failed", "declined", "suite error"]
Profile = Literal["quick", "default", "thorough"]

# Examples of a check of weight 1; a compiled shape runs many of them.
EXAMPLES = {"quick": 4, "default": 12, "thorough": 100}


@dataclasses.dataclass(frozen=True)
class Result:
  """What one check found on one backend.

  Attributes:
    check: the check.
    backend: name of the backend.
    status: "declined" when every case was refused: it is not passed.
    ran, declined: cases of each kind.
    reasons: why cases were declined.
    ratio: worst error/bound, None where the check is exact.
    case: the smallest case that failed.
    message: what is wrong there, or the suite's own error.
    seconds: wall time.
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


@dataclasses.dataclass(frozen=True)
class Report:
  """Results of one or more backends, in the order of SPEC.md."""

  results: tuple[Result, ...]
  profile: str
  seed: int
  seconds: float

  @property
  def conforms(self) -> bool:
    """Whether something ran and nothing failed."""
    return any(r.ran for r in self.results) and all(r.status in ("passed", "declined") for r in self.results)

  @property
  def failures(self) -> tuple[Result, ...]:
    return tuple(r for r in self.results if r.status in ("failed", "suite error"))


def checks(clauses: str = "*") -> tuple[Check, ...]:
  """The checks whose clause id matches the glob pattern, in the order of SPEC.md."""
  return tuple(c for c in _checks.CHECKS if fnmatch.fnmatchcase(c.clause, clauses))


def check_backend(
  backend: str | Backend,
  clauses: str = "*",
  *,
  profile: Profile = "default",
  seed: int = 0,
  on_result: Callable[[Result], None] | None = None,
) -> Report:
  """Checks one backend against SPEC.md.

  Args:
    backend: a name or a `gmm.Backend`.
    clauses: glob pattern of clause ids, for example "VJP-*".
    profile: how many cases: "quick", "default" or "thorough".
    seed: another seed draws other cases.
    on_result: called with each result as it comes.

  Returns:
    Report: `report.conforms` says whether all that ran holds.

  Raises:
    ValueError, ImportError: the backend cannot be found or loaded; no clause matches; unknown profile.
  """
  return check_backends([backend], clauses, profile=profile, seed=seed, on_result=on_result)


def check_backends(
  backends: Iterable[str | Backend],
  clauses: str = "*",
  *,
  profile: Profile = "default",
  seed: int = 0,
  on_result: Callable[[Result], None] | None = None,
) -> Report:
  """`check_backend` for several; checks of the library itself run once."""
  chosen = select(clauses, profile)
  begun, results = time.monotonic(), []
  for check, backend in plan([backend_registry.get_backend(b) for b in backends], chosen):
    results.append(run_check(check, backend, profile=profile, seed=seed))
    if on_result is not None:
      on_result(results[-1])
  return Report(tuple(results), profile, seed, time.monotonic() - begun)


def select(clauses: str, profile: str) -> tuple[Check, ...]:
  """`checks(clauses)`; raises ValueError when none matches or the profile is unknown."""
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


def run_check(check: Check, backend: Backend, *, profile: Profile = "default", seed: int = 0) -> Result:
  """Runs one check on one backend; an error of the suite or the backend is a result, not an exception."""
  begun = time.monotonic()
  tally = _Tally()
  status, message = "passed", ""
  try:
    with warnings.catch_warnings(), _quick_compiles(backend, profile):
      # Hypothesis warns of a slow first example, which is a compile.
      warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
      _run_cases(check, backend, EXAMPLES[profile], seed, lambda case: tally.run(check, backend, case))
  except Violation as violation:
    status, message = "failed", str(violation)
  except Exception as error:  # whatever a third party's kernel raises is reported with its case
    status, message = "suite error" if tally.case is None else "failed", f"{type(error).__name__}: {error}"
  if status == "passed" and not tally.ran:
    status = "declined"
  return Result(
    check=check,
    backend="(library)" if check.scope == "library" else backend.name,
    status=status,
    ran=tally.ran,
    declined=tally.declined,
    reasons=tuple(reason for reason, _ in tally.reasons.most_common()),
    ratio=tally.ratio,
    case=tally.case if status in ("failed", "suite error") else None,
    message=message,
    seconds=time.monotonic() - begun,
  )


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
  """What happened so far; after a failure `case` is the last one run, which is the smallest."""

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
    phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    verbosity=hypothesis.Verbosity.quiet,
  )

  @hypothesis.seed(seed)
  @settings
  @hypothesis.given(strategy(check.draws, interpreted))
  def each(case):
    run(case)

  each()

"""The same checks in several processes: nearly all of their time is compilation, which uses one core."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from gmm.conformance._load import load_backend
from gmm.conformance._result import Profile, Report, Result
from gmm.conformance._run import checks, plan, run_check, select


def check_in_processes(
  backends: Sequence[str],
  clauses: str = "*",
  expected_failures: Mapping[str, str] = MappingProxyType({}),
  *,
  profile: Profile = "default",
  seed: int = 0,
  on_result: Callable[[Result], None] | None = None,
  jobs: int | None = None,
) -> Report:
  """`check_backends` spread over processes, one backend at a time in each.

  Args:
    backends: names, or "package.module:object"; the processes load them again.
    clauses, expected_failures, profile, seed, on_result: as in `check_backends`.
    jobs: number of processes; None for one per core, at most one per backend.

  Returns:
    Report, in the same order and with the same cases as in one process.

  Raises:
    ValueError, ImportError: as in `check_backends`.
    RuntimeError: a process died.
  """
  begun = time.monotonic()
  by_id = {c.id: c for c in select(clauses, profile, expected_failures)}
  loaded = [load_backend(b) for b in backends]
  if len({b.name for b in loaded}) < len(loaded):
    raise ValueError(f"Two backends have the same name: {', '.join(b.name for b in loaded)}.")
  order = [(c.id, b.name) for c, b in plan(loaded, tuple(by_id.values()))]
  # The reference's part and the library's go last: they are short, and fill the gaps.
  tasks = sorted(backends, key=lambda name: name == "reference")
  jobs = min(len(tasks), jobs or _cores())
  context = multiprocessing.get_context("spawn")  # JAX's threads do not survive a fork
  todo, done = context.Queue(), context.Queue()
  for name in [*tasks, *[None] * jobs]:
    todo.put(name)
  settings = clauses, dict(expected_failures), profile, seed, tasks[-1]
  workers = [context.Process(target=_work, args=(todo, done, *settings), daemon=True) for _ in range(jobs)]
  for worker in workers:
    worker.start()
  results: dict[tuple[str, str], Result] = {}
  while len(results) < len(order):
    try:
      check_id, ran_on, fields = done.get(timeout=1)
    except queue.Empty:
      dead = [w.exitcode for w in workers if w.exitcode not in (None, 0)]
      if dead:
        raise RuntimeError(f"A checking process died with exit code {dead[0]}; run with jobs=1 to see why.") from None
      continue
    result = results[(check_id, ran_on)] = Result(check=by_id[check_id], **fields)
    if on_result is not None:
      on_result(result)
  for worker in workers:
    worker.join()
  ordered = tuple(results[key] for key in order)
  return Report(ordered, profile, seed, time.monotonic() - begun)


def _cores() -> int:
  """Cores that this process may use; macOS knows only how many there are."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _work(todo: Any, done: Any, clauses: str, expected: dict[str, str], profile: Profile, seed: int, last: str) -> None:
  """Runs backends from `todo` until it says None; the library's own checks go with the last one."""
  while (name := todo.get()) is not None:
    for check, backend in plan([load_backend(name)], checks(clauses)):
      if check.scope == "library" and name != last:
        continue
      result = run_check(check, backend, expected, profile=profile, seed=seed)
      fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "check"}
      done.put((check.id, backend.name, fields))
    # Programs are per backend; each holds memory maps, of which Linux gives a process 65530.
    jax.clear_caches()

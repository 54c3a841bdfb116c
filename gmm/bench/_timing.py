"""Timing that survives a noisy machine: interleaved runs, compared round by round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleaved(
  runs: Mapping[str, Callable[[], Any]],
  rounds: int,
  *,
  min_seconds: float = 0.2,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
  """Times each run once per round, in turn (A B A B …), after one untimed round.

  Args:
    runs: name -> function of no arguments that returns when its work is done.
    rounds: samples of each.
    min_seconds: a sample repeats its run for at least that long and is the mean of it, so
      that a short run is not measured on the caches that a long neighbour left behind.
    clock: gives seconds.

  Returns:
    name -> seconds per run of each round, in order.
  """
  for run in runs.values():
    run()  # compiles
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  for _ in range(rounds):
    for name, run in runs.items():
      seconds[name].append(_sample(run, min_seconds, clock))
  return seconds


def _sample(run: Callable[[], Any], min_seconds: float, clock: Callable[[], float]) -> float:
  begin, calls, elapsed = clock(), 0, -1.0
  while elapsed < min_seconds:
    run()
    calls += 1
    elapsed = clock() - begin
  return elapsed / calls


def ratio(seconds: Mapping[str, list[float]], name: str, to: str) -> float:
  """Median over rounds of the time of `name` divided by that of `to` in the same round.

  What slows the machine for a while slows neighbours in a round alike, and leaves their
  ratio alone; the ratio of two medians would mix rounds.
  """
  return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))

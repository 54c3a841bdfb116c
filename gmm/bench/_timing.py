"""Timing that survives a noisy machine: interleaved runs, compared round by round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleaved(
  runs: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
  """Times each run once per round, in turn (A B A B …), after one untimed round.

  Args:
    runs: name -> function of no arguments that returns when its work is done.
    rounds: timed runs of each.
    clock: gives seconds.

  Returns:
    name -> seconds of each round, in order.
  """
  for run in runs.values():
    run()  # compiles, and warms the caches
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  for _ in range(rounds):
    for name, run in runs.items():
      begin = clock()
      run()
      seconds[name].append(clock() - begin)
  return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, to: str) -> float:
  """Median over rounds of the time of `name` divided by that of `to` in the same round.

  What slows the machine for a while slows neighbours in a round alike, and leaves their
  ratio alone; the ratio of two medians would mix rounds.
  """
  return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))

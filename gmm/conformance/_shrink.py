"""The smallest case that still fails: shapes from small to large, simple group sizes first.

A shape costs a compile, sizes and data cost milliseconds. So few shapes are tried, in rising
order, and many sizes in each; the first that fails is the answer.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator

from gmm.conformance._case import Case

# (m, k, n, g): one element per product, then room for borders inside a tile, then for blocks and tiles.
_SHAPES = ((4, 2, 2, 2), (6, 4, 3, 3), (16, 16, 12, 3))
_PER_SHAPE = 0.2  # share of the time for one shape


def shrink(case: Case, fails: Callable[[Case], bool], *, simpler_data: bool, seconds: float) -> Case:
  """The first simpler case for which `fails` holds; the given one when none does in time.

  Args:
    case: a case that fails.
    fails: whether another case fails in the same way.
    simpler_data: whether float32 integers may stand for the case's data.
    seconds: how long to try; the candidate at hand is still finished.
  """
  deadline = time.monotonic() + seconds
  for m, k, n, g in _shapes(case):
    variants = [case]
    plain = dataclasses.replace(case, dtype="float32", data="integers")
    if simpler_data and plain != case:
      variants.insert(0, plain)
    for variant in variants:
      until = min(deadline, time.monotonic() + _PER_SHAPE * seconds)
      for sizes, seed in itertools.product(_sizes(m, g), dict.fromkeys((0, 1, 2, case.seed))):
        candidate = dataclasses.replace(variant, m=m, k=k, n=n, group_sizes=sizes, seed=seed)
        if candidate == case:
          continue
        if fails(candidate):
          return candidate
        if time.monotonic() > until:
          break
    if time.monotonic() > deadline:
      break
  return _fewer_rows(case, fails, deadline)


def _shapes(case: Case) -> Iterator[tuple[int, int, int, int]]:
  """Shapes no larger than the case's in any dimension, ending with its own k and n on few rows."""
  few_rows, few_groups = ((min(case.m, m), case.k, case.n, min(case.g, 3)) for m in (16, case.m))
  seen = set()
  for m, k, n, g in (*_SHAPES, few_rows, (24, 16, 12, 3), few_groups):
    shape = min(m, case.m), min(k, case.k), min(n, case.n), min(g, case.g)
    if shape not in seen:
      seen.add(shape)
      yield shape


def _sizes(m: int, g: int) -> list[tuple[int, ...]]:
  """Group sizes with the fewest groups in use first, then the fewest rows."""
  values = sorted({0, 1, m // 2, m - 1, m} - {-1})
  # Many groups are only tried with few in use: the first, the last, two neighbours.
  if g > 3:
    head = [s + (0,) * (g - 2) for s in _sizes(m, 2)]
    return head + [s[::-1] for s in head]
  found = [s for s in itertools.product(values, repeat=g) if sum(s) <= m]
  return sorted(found, key=lambda s: (sum(x > 0 for x in s), sum(s), s))


def _fewer_rows(case: Case, fails: Callable[[Case], bool], deadline: float) -> Case:
  """Empties groups and halves their rows one by one, in the case's own shape, while it still fails."""
  for j, new in itertools.product(range(case.g), ("none", "half")):
    size = case.group_sizes[j]
    less = 0 if new == "none" else size // 2
    if less == size or time.monotonic() > deadline:
      continue
    sizes = (*case.group_sizes[:j], less, *case.group_sizes[j + 1 :])
    candidate = dataclasses.replace(case, group_sizes=sizes)
    if fails(candidate):
      case = candidate
  return case

"""How cases are drawn: shapes from few buckets (each costs a compile), everything else freely."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st

from gmm._recipe import recipe_names
from gmm.conformance._case import Case


@dataclasses.dataclass(frozen=True)
class Bucket:
  """A shape: rows, contracting size, columns, groups."""

  m: int
  k: int
  n: int
  g: int


# Short sums, where the error bound is sharp; sizes off every tile; more groups than rows.
SHORT = Bucket(24, 16, 12, 3)
OFF_TILE = Bucket(150, 136, 20, 5)
MANY_GROUPS = Bucket(12, 3, 5, 18)
BUCKETS = (SHORT, OFF_TILE, MANY_GROUPS)
# Interpreted kernels take seconds to compile a shape: two do.
BUCKETS_INTERPRETED = (SHORT, OFF_TILE)

DATA = ("integers", "real", "positive")
DTYPES = ("float32", "bfloat16")


@st.composite
def group_sizes(draw: st.DrawFn, m: int, g: int) -> tuple[int, ...]:
  """Sizes from sorted cut points, so that every pattern is near: empty groups anywhere, slack, one row."""
  # 1. g + 1 cuts in [0, m]: the first is where group 0 starts, so it must be 0; the last
  #    leaves slack rows, which half of the examples do without.
  cuts = sorted(draw(st.lists(st.integers(0, m), min_size=g, max_size=g)))
  if draw(st.booleans()):
    cuts[-1] = m
  # 2. Differences: each >= 0, their sum = the last cut <= m.
  return tuple(b - a for a, b in zip([0, *cuts[:-1]], cuts, strict=True))


def cases(
  buckets: tuple[Bucket, ...],
  *,
  data: tuple[str, ...] = DATA,
  dtypes: tuple[str, ...] = DTYPES,
  recipes: tuple[str, ...] = ("bf16",),
) -> st.SearchStrategy[Case]:
  """Draws one `Case`."""

  @st.composite
  def draw_case(draw: st.DrawFn) -> Case:
    bucket = draw(st.sampled_from(buckets))
    return Case(
      m=bucket.m,
      k=bucket.k,
      n=bucket.n,
      group_sizes=draw(group_sizes(bucket.m, bucket.g)),
      dtype=draw(st.sampled_from(dtypes)),
      data=draw(st.sampled_from(data)),
      seed=draw(st.integers(0, 2**16 - 1)),
      recipe=draw(st.sampled_from(recipes)),
    )

  return draw_case()


def strategy(name: str, interpreted: bool) -> st.SearchStrategy[Case]:
  """The strategy that a check names in `draws`.

  "cases": every bucket, dtype and kind of data. "exact": integers. "short": one bucket of
  short sums, integers, float32: for checks that compile much. "off_tile": the same in the
  bucket off every tile. "real_short": the short one with other data. "quantized": every quantized
  recipe on real data. "quantized_short": the same in the short bucket.
  """
  buckets = BUCKETS_INTERPRETED if interpreted else BUCKETS
  quantized = tuple(r for r in recipe_names() if r != "bf16")
  few = ("fp8_dynamic", "fp8_static", "int8_dynamic", "int8_weight_only") if interpreted else quantized
  return {
    "cases": lambda: cases(buckets),
    "exact": lambda: cases(buckets, data=("integers",)),
    "short": lambda: cases((SHORT,), data=("integers",), dtypes=("float32",)),
    "off_tile": lambda: cases((OFF_TILE,), data=("integers",), dtypes=("float32",)),
    "real_short": lambda: cases((SHORT,), data=("real", "positive"), dtypes=("float32",)),
    "quantized": lambda: cases(buckets[:2], data=("real", "positive"), dtypes=DTYPES[1:], recipes=quantized),
    "quantized_short": lambda: cases((SHORT,), data=("real", "positive"), dtypes=DTYPES[1:], recipes=few),
  }[name]()

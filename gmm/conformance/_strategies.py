"""How cases are drawn: shapes from few buckets (each costs a compile), everything else freely."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st

from gmm._recipe import recipe_names
from gmm.conformance._case import BOTH_DTYPES as BOTH
from gmm.conformance._case import DATA_KINDS as DATA
from gmm.conformance._case import Case, Data


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


@st.composite
def group_sizes(draw: st.DrawFn, m: int, g: int) -> tuple[int, ...]:
  """Sizes from sorted cut points, so that every pattern is near: empty groups anywhere, slack, one row.

  Every eighth example gives one group all the rows it draws, as a router that collapsed does.
  """
  # 1. The last cut leaves slack rows, which half of the examples do without.
  total = m if draw(st.booleans()) else draw(st.integers(0, m))
  if draw(st.integers(0, 7)) == 7:
    lucky = draw(st.integers(0, g - 1))
    return tuple(total * (j == lucky) for j in range(g))
  # 2. g - 1 cuts between the groups, in order; differences are >= 0 and add up to the total.
  cuts = sorted(draw(st.lists(st.integers(0, total), min_size=g - 1, max_size=g - 1)))
  return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))


@st.composite
def cases(
  draw: st.DrawFn,
  bucket: Bucket,
  dtypes: tuple[str, ...] = BOTH,
  *,
  data: tuple[Data, ...] = DATA,
  recipes: tuple[str, ...] = ("bf16",),
) -> Case:
  """Draws one `Case` of a bucket."""
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


def strategy(name: str, interpreted: bool) -> st.SearchStrategy[Case]:
  """The strategy that a check names in `draws`.

  "cases": every bucket and kind of data. "exact": integers, in the buckets of awkward sizes. "short": one
  bucket of short sums, integers, float32: for checks that compile much. "off_tile": the same
  in the bucket off every tile. "real_short": the short one with other data. "quantized": every
  quantized recipe on real data, one of them off every tile too. "quantized_short": without
  that one; of interpreted kernels a recipe of each kind.
  """
  quantized = tuple(r for r in recipe_names() if r != "bf16")
  each_kind = ("fp8_dynamic", "fp8_static", "int8_dynamic", "int8_weight_only") if interpreted else quantized
  real: tuple[Data, ...] = DATA[1:]

  def everywhere(data: tuple[Data, ...]) -> st.SearchStrategy[Case]:
    # Not every dtype in every bucket: a pair costs every check a compile. Short sums make
    # bounds sharp; exact data needs none.
    drawn = [cases(OFF_TILE, BOTH[1:], data=data)]
    if data != DATA[:1]:
      drawn.append(cases(SHORT, data=data))
    if not interpreted:
      drawn.append(cases(MANY_GROUPS, BOTH[:1], data=data))
    return st.one_of(drawn)

  return {
    "cases": lambda: everywhere(DATA),
    "exact": lambda: everywhere(DATA[:1]),
    "short": lambda: cases(SHORT, BOTH[:1], data=DATA[:1]),
    "off_tile": lambda: cases(OFF_TILE, BOTH[:1], data=DATA[:1]),
    "real_short": lambda: cases(SHORT, BOTH[:1], data=real),
    "quantized": lambda: st.one_of(
      cases(SHORT, BOTH[1:], data=real, recipes=each_kind),
      cases(OFF_TILE, BOTH[1:], data=real, recipes=each_kind[:1]),
    ),
    "quantized_short": lambda: cases(SHORT, BOTH[1:], data=real, recipes=each_kind),
  }[name]()

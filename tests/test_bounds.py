"""The error bound holds for every correct order of summation, and notices what it must (SPEC appendix A)."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from gmm.conformance import Case, error_bound
from gmm.conformance._oracle import Exact, gmm, ranges
from gmm.conformance._strategies import MANY_GROUPS, SHORT, group_sizes


def _sums(products, rng):
  """float32 sums of [m, k, n] products over k in several orders."""
  k = products.shape[1]
  forward = backward = np.float32(0)
  for i in range(k):
    forward, backward = forward + products[:, i], backward + products[:, k - 1 - i]
  order = rng.permutation(k)
  shuffled = np.float32(0)
  for i in order:
    shuffled = shuffled + products[:, i]
  blocks = [products[:, i : i + 4].sum(1, dtype=np.float32) for i in range(0, k, 4)]
  return forward, backward, shuffled, sum(blocks, np.float32(0))


@hypothesis.settings(max_examples=300)
@hypothesis.given(
  k=st.sampled_from([1, 2, 3, 16, 64, 700]),
  data=st.sampled_from(["real", "positive"]),
  dtype=st.sampled_from(["float32", "bfloat16"]),
  out=st.sampled_from(["float32", "bfloat16"]),
  seed=st.integers(0, 2**32 - 1),
)
def test_correct_sums_stay_inside(k, data, dtype, out, seed):
  """Four orders of summation, 48 elements each: thousands of sums, none past the bound."""
  case = Case(6, k, 8, (6,), dtype, data, seed)
  exact = gmm(case.lhs, case.rhs, ranges(case.sizes))
  bound = error_bound(exact, out, inexact_products=dtype == "float32")
  products = case.lhs.astype(np.float32)[:, :, None] * case.rhs[0].astype(np.float32)[None]
  for total in _sums(products, np.random.default_rng(seed)):
    rounded = total.astype(getattr(ml_dtypes, out, out)).astype(np.float64)
    assert (np.abs(rounded - exact.value) <= bound).all()


@pytest.mark.parametrize("k", [2, 8, 16])
@pytest.mark.parametrize(
  ("wrong", "least"),
  [
    ("accumulate in bfloat16", 1.0),
    ("drop the last product", 1.0),
    ("round the operands to bfloat16", 1.0),
    ("round the result twice", 0.3),
  ],
)
def test_wrong_sums_are_seen(k, wrong, least):
  """On short sums of one sign the bound is sharp: each fault passes it somewhere."""
  worst = 0.0
  for seed in range(20):
    case = Case(8, k, 8, (8,), "float32", "positive", seed)
    lhs, rhs = case.lhs, case.rhs[0]
    exact = gmm(lhs, case.rhs, ranges(case.sizes))
    bound = error_bound(exact, "float32", inexact_products=True)
    half = ml_dtypes.bfloat16
    if wrong == "accumulate in bfloat16":
      got = np.zeros((8, 8), half)
      for i in range(k):
        got = (got.astype(np.float32) + lhs[:, i, None] * rhs[None, i]).astype(half)
    elif wrong == "drop the last product":
      got = lhs[:, :-1] @ rhs[:-1]
    elif wrong == "round the operands to bfloat16":
      got = lhs.astype(half).astype(np.float32) @ rhs.astype(half).astype(np.float32)
    else:
      got = (lhs @ rhs).astype(half).astype(np.float32)
    worst = max(worst, (np.abs(got.astype(np.float64) - exact.value) / bound).max())
  assert worst > least


def test_bound_of_declared_roundings():
  """What a backend declares widens its bound, and only that."""
  exact = Exact(np.ones((1, 1)), np.ones((1, 1)), np.full((1, 1), 8))
  plain = error_bound(exact, "bfloat16").item()
  assert error_bound(exact, "bfloat16", out_roundings=2).item() == pytest.approx(2 * plain, rel=0.01)
  assert error_bound(exact, "float32", accumulator="bfloat16").item() > 1000 * error_bound(exact, "float32").item()
  assert error_bound(exact, "float32", accumulator="int32").item() < error_bound(exact, "float32").item()


@pytest.mark.parametrize(
  ("accumulator", "out", "least"),
  [("float64", "float32", 0.3), ("float64", "bfloat16", 0.3), ("bfloat16", "bfloat16", 0.01)],
)
@pytest.mark.parametrize("k", [1, 16, 300])
def test_other_accumulators_are_held_to_theirs(accumulator, out, least, k):
  """What sums in float64 still rounds its result; what sums in bfloat16 has a bound past 256 terms too."""
  dtypes = np.dtype(getattr(ml_dtypes, accumulator, accumulator)), np.dtype(getattr(ml_dtypes, out, out))
  worst = 0.0
  for seed in range(20):
    case = Case(6, k, 8, (6,), out, "positive", seed)
    exact = gmm(case.lhs, case.rhs, ranges(case.sizes))
    bound = error_bound(exact, out, accumulator=accumulator)
    total = np.zeros((6, 8), dtypes[0])
    for i in range(k):
      product = case.lhs[:, i, None].astype(np.float64) * case.rhs[0, None, i].astype(np.float64)
      total = (total.astype(np.float64) + product).astype(dtypes[0])
    error = np.abs(total.astype(dtypes[1]).astype(np.float64) - exact.value)
    assert np.isfinite(bound).all()
    worst = max(worst, (error / bound).max())
  assert least <= worst <= 1


def test_strategy_reaches_every_pattern():
  """Empty first, middle and last group, all empty, slack rows and none, one-row groups, borders off 8 and 16."""
  seen = set()

  @hypothesis.settings(max_examples=300)
  @hypothesis.given(
    st.sampled_from([SHORT, MANY_GROUPS]).flatmap(lambda b: st.tuples(st.just(b), group_sizes(b.m, b.g)))
  )
  def collect(drawn):
    bucket, sizes = drawn
    assert sum(sizes) <= bucket.m
    assert min(sizes) >= 0
    assert len(sizes) == bucket.g
    seen.update(
      name
      for name, holds in {
        "empty first": sizes[0] == 0 < sum(sizes),
        "empty middle": 0 in sizes[1:-1] and sizes[0] and sizes[-1],
        "empty last": sizes[-1] == 0 < sum(sizes),
        "all empty": not any(sizes),
        "one group has all": max(sizes) == bucket.m,
        "slack rows": sum(sizes) < bucket.m,
        "no slack": sum(sizes) == bucket.m,
        "one-row group": 1 in sizes,
        "border off 8": bool(sizes[0] % 8),
        "more groups than rows": bucket.g > bucket.m,
      }.items()
      if holds
    )

  collect()
  assert seen >= {
    "empty first",
    "empty middle",
    "empty last",
    "all empty",
    "one group has all",
    "slack rows",
    "no slack",
    "one-row group",
    "border off 8",
    "more groups than rows",
  }

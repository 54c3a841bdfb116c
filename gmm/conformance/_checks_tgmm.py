"""Checks of the clauses TGMM-1 to TGMM-6: lhs^T @ dout group by group."""

from __future__ import annotations

import numpy as np

from gmm._protocol import Backend
from gmm.conformance import _oracle
from gmm.conformance._bounds import backend_bound
from gmm.conformance._case import Case, numpy_dtype
from gmm.conformance._programs import transposed
from gmm.conformance._registry import check, expect, expect_equal, expect_within


def _expected(case: Case) -> np.ndarray:
  """The exact result rounded once; for integer data."""
  return _oracle.tgmm(case.lhs, case.dout, _oracle.ranges(case.sizes)).value.astype(case.lhs.dtype)


def _groups(case: Case) -> np.ndarray:
  return np.arange(case.g)


@check("TGMM-1", "lhs^T times dout over the rows of each group")
def rows_summed_by_group(backend: Backend, case: Case) -> float | None:
  """Integers exactly, other data within the bound of the group's own number of rows."""
  got = transposed(backend)(case.lhs, case.dout, case.sizes)
  if case.data == "integers":
    expect_equal(got, _expected(case), "drhs", _groups(case))
    return None
  exact = _oracle.tgmm(case.lhs, case.dout, _oracle.ranges(case.sizes))
  bound = backend_bound(backend, exact, case.dtype, (case.dtype, case.dtype))
  return expect_within(got, exact.value, bound, "drhs", _groups(case))


@check("TGMM-2", "a group without rows is exactly zero", "real_short", weight=0.5)
def empty_groups(backend: Backend, case: Case) -> None:
  """Also right after a call that left other numbers in memory."""
  big = np.full_like(case.lhs, 1e30), np.full_like(case.dout, 1e30)
  transposed(backend)(*big, np.array([case.m, 0, 0], np.int32))
  sizes = case.sizes.copy()
  sizes[case.seed % case.g] = 0
  got = np.asarray(transposed(backend)(case.lhs, case.dout, sizes))
  for j in np.flatnonzero(sizes == 0):
    expect(not got[j].any(), f"drhs[{j}] has no rows and must be zero, largest element {np.abs(got[j]).max():g}")


@check("TGMM-3", "unused rows add nothing, and a NaN stays in its group", "exact")
def isolation(backend: Backend, case: Case) -> None:
  """NaN in slack rows of both operands, then in one used row of each."""
  clean, owner = _expected(case), _oracle.owner_of_rows(_oracle.ranges(case.sizes), case.m)
  lhs, dout = case.lhs, case.dout
  lhs[case.used :], dout[case.used :] = np.nan, np.inf
  expect_equal(transposed(backend)(lhs, dout, case.sizes), clean, "drhs with NaN in unused rows", _groups(case))
  row = case.seed % case.m
  for poisoned in ("lhs", "dout"):
    lhs, dout = case.lhs, case.dout
    (lhs if poisoned == "lhs" else dout)[row] = np.nan
    got = np.asarray(transposed(backend)(lhs, dout, case.sizes))
    others = _groups(case) != owner[row]
    expect_equal(got[others], clean[others], f"drhs with {poisoned}[{row}] = nan", _groups(case)[others])
    if owner[row] >= 0:
      expect(
        bool(np.isnan(got[owner[row]].astype(np.float64)).all()),
        f"drhs[{owner[row]}] must be NaN, {poisoned}[{row}] is",
      )


_DEGENERATE = (
  Case(0, 4, 3, (0, 0)),
  Case(6, 0, 3, (2, 3)),
  Case(5, 1, 1, (5,)),
  Case(8, 4, 3, (0, 0, 0)),
  Case(8, 4, 3, (0, 8, 0)),
  Case(9, 2, 3, (0,) * 100 + (1,) * 9 + (0,) * 147),
)


@check("TGMM-4", "m = 0, k = 0, k = n = 1, one group, 256 groups, all empty", _DEGENERATE)
def degenerate(backend: Backend, case: Case) -> None:
  """Every shape and pattern of empty groups is legal."""
  expect_equal(transposed(backend)(case.lhs, case.dout, case.sizes), _expected(case), "drhs", _groups(case))


@check("TGMM-5", "the drhs of shards by group_offset concatenate to the whole", "exact", weight=0.5)
def offset_shards(backend: Backend, case: Case) -> None:
  """A shard gives its own groups, wherever they start."""
  whole, local = _expected(case), max(1, case.g // 2)
  for offset in sorted({0, case.seed % (case.g - local + 1), case.g - local}):
    run = transposed(backend, num_groups=local)
    got = run(case.lhs, case.dout, case.sizes, np.int32(offset))
    expect_equal(got, whole[offset : offset + local], f"drhs with group_offset={offset}")


@check("TGMM-6", "sums are float32, rounded once to the result's dtype", (Case(600, 8, 4, (590, 5), "bfloat16"),))
def accumulates_in_float32(backend: Backend, case: Case) -> None:
  """590 ones: a bfloat16 running sum stalls at 256; as float32 the sum is exact."""
  ones = np.ones_like(case.lhs), np.ones_like(case.dout)
  exact = case.sizes.astype(np.float64)[:, None, None] * np.ones((1, case.k, case.n))
  expect_equal(transposed(backend)(*ones, case.sizes), exact.astype(case.lhs.dtype), "drhs", _groups(case))
  run = transposed(backend, preferred_element_type="float32")
  expect_equal(run(*ones, case.sizes), exact.astype(np.float32), "drhs as float32", _groups(case))


@check("TGMM-6", "float32 operands at float32 precision; the result's dtype is lhs's", "short", weight=0.3)
def float32_products(backend: Backend, case: Case) -> None:
  """1 + 2^-12 in every element: a pass through bfloat16 would lose it."""
  lhs, dout = case.lhs * np.float32(1 + 2**-12), np.sign(case.dout)
  exact = _oracle.tgmm(lhs, dout, _oracle.ranges(case.sizes)).value
  expect_equal(transposed(backend)(lhs, dout, case.sizes), exact.astype(np.float32), "drhs", _groups(case))
  run = transposed(backend, preferred_element_type="bfloat16")
  expect_equal(
    run(lhs, dout, case.sizes), exact.astype(np.float32).astype(numpy_dtype("bfloat16")), "drhs", _groups(case)
  )


CHECKS = (
  rows_summed_by_group,
  empty_groups,
  isolation,
  degenerate,
  offset_shards,
  accumulates_in_float32,
  float32_products,
)

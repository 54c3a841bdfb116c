"""The one-line diagnosis: planted faults are named, correct results are not accused.

Faults are planted in numpy, in the result of a call, so that no program is compiled.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import gmm
from gmm.conformance import Evidence, _oracle, _spy, checks
from gmm.conformance._case import Case, numpy_dtype
from gmm.conformance._diagnose import diagnose, of_call, of_evidence
from gmm.conformance._spy import Call

INTEGERS = Case(24, 16, 12, (6, 0, 11, 4), data="integers", seed=3)
REAL = dataclasses.replace(INTEGERS, dtype="bfloat16", data="real")
POSITIVE = dataclasses.replace(INTEGERS, data="positive")
BF16 = numpy_dtype("bfloat16")


def _wide(x):
  return np.asarray(x).astype(np.float64)


def _rows(case, sizes=None):
  return _oracle.ranges(case.sizes if sizes is None else np.array(sizes))


def _call(case, got, pass_="fwd", **options):
  """A call of the case's operands that returned `got`."""
  given = dict(lhs_quant=None, group_offset=None, precision=None, preferred_element_type=case.dtype, tiling=None)
  given |= dict(num_groups=case.g, dout_quant=None, dout_prescale=None) if pass_ == "drhs" else {}
  given |= dict(lhs_prescale=None, transpose_rhs=False, partial_sum=None) if pass_ != "drhs" else {}
  dtype = numpy_dtype(options.pop("returned", case.dtype))
  got = np.asarray(got, np.float64).astype(np.float32).astype(dtype)
  second = case.dout if pass_ == "drhs" else case.rhs
  return Call(pass_, case.lhs, options.pop("rhs", second), case.sizes, given | options, got)  # pyright: ignore


def _product(case, rhs=None, sizes=None):
  return _oracle.gmm(case.lhs, case.rhs if rhs is None else rhs, _rows(case, sizes)).value


def _sums(case, rows=None):
  return _oracle.tgmm(case.lhs, case.dout, _rows(case) if rows is None else rows).value


def _changed(out, at, value):
  out = out.copy()
  out[at] = value(out[at]) if callable(value) else value
  return out


def _first_group_of_tile(case, tile=8):
  """Rows of a tile all use the group of its first row: the classic fault at a border."""
  owner = _oracle.owner_of_rows(_rows(case), case.m)
  used = np.where(owner >= 0, owner[np.arange(case.m) // tile * tile], -1)
  return np.stack([_wide(case.lhs)[i] @ _wide(case.rhs)[j] if j >= 0 else np.zeros(case.n) for i, j in enumerate(used)])


def _added_up(case, tile=8):
  out = _product(case)
  for start in range(tile, case.used - tile + 1, tile):
    out[start : start + tile] += out[start - tile : start]
  return out


def _sum_in_bfloat16(case):
  owner = _oracle.owner_of_rows(_rows(case), case.m)
  out = np.zeros((case.m, case.n), BF16)
  for k in range(case.k):
    out = (_wide(out) + _wide(case.lhs)[:, [k]] * np.where(owner[:, None] >= 0, _wide(case.rhs)[owner, k], 0)).astype(
      BF16
    )
  return out


FORWARD = {
  "tail rows left as they were": ("uninitialised tail rows", lambda c: _changed(_product(c), np.s_[c.used :], 7)),
  "tail rows NaN": ("uninitialised tail rows", lambda c: _changed(_product(c), np.s_[c.used :], np.nan)),
  "last group reaches to m": ("mask", lambda c: _product(c, sizes=(6, 0, 11, 7))),
  "one border late": ("wrong group at an edge", lambda c: _product(c, sizes=(7, 0, 10, 4))),
  "group of the tile's first row": ("wrong group at an edge", _first_group_of_tile),
  "rows shifted": ("shifted by one", lambda c: _changed(_product(c), np.s_[1 : c.used], _product(c)[: c.used - 1])),
  "last k block": ("k tail", lambda c: _oracle.gmm(c.lhs[:, :12], c.rhs[:, :12], _rows(c)).value),
  "first k block twice": (
    "k block counted twice",
    lambda c: _product(c) + _oracle.gmm(c.lhs[:, :4], c.rhs[:, :4], _rows(c)).value,
  ),
  "k padding read": ("k tail unmasked", lambda c: _changed(_product(c), np.s_[: c.used], lambda x: x + 49)),
  "tile twice": ("double count", lambda c: _changed(_product(c), np.s_[8:16, :4], lambda x: 2 * x)),
  "accumulator kept": ("accumulator not reset", _added_up),
  "columns swapped": ("swapped", lambda c: _product(c)[:, [2, 3, 0, 1, *range(4, c.n)]]),
  "rows swapped": ("swapped", lambda c: _product(c)[[*range(8, 16), *range(8), *range(16, c.m)]]),
  "n tail": ("n tail", lambda c: _changed(_product(c), np.s_[:, 10:], 0)),
  "last rows of groups": ("last row", lambda c: _changed(_product(c), [5, 16, 20], 0)),
  "a group skipped": ("group", lambda c: _changed(_product(c), np.s_[6:17], 0)),
  "nothing written": ("nothing was written", lambda c: 0 * _product(c)),
  "sign": ("sign", lambda c: -_product(c)),
  "group 0 for all": ("wrong group", lambda c: _product(c, np.broadcast_to(c.rhs[:1], c.rhs.shape))),
}

BACKWARD = {
  "empty group": ("empty group left over", lambda c: _changed(_sums(c), 1, 3)),
  "last row lost": ("last row", lambda c: _sums(c, [(s, max(s, e - 1)) for s, e in _rows(c)])),
  "first row twice": ("twice", lambda c: _sums(c) + _sums(c, [(s, min(s + 1, e)) for s, e in _rows(c)])),
  "one border late": ("wrong group at an edge", lambda c: _sums(c, _rows(c, (7, 0, 10, 4)))),
  "accumulator kept": ("accumulator not reset", lambda c: _sums(c).cumsum(0)),
  "tail rows counted": ("tail rows", lambda c: _sums(c, [*_rows(c)[:-1], (17, c.m)])),
  "groups reversed": ("reversed", lambda c: _sums(c)[::-1]),
  "k rows missing": ("k tail", lambda c: _changed(_sums(c), np.s_[:, 13:], 0)),
  "a group twice": ("double count", lambda c: _changed(_sums(c), 2, lambda x: 2 * x)),
}

PLANTED = [("fwd", name, *fault) for name, fault in FORWARD.items()]
PLANTED += [("drhs", name, *fault) for name, fault in BACKWARD.items()]


@pytest.mark.parametrize("case", [INTEGERS, REAL, POSITIVE], ids=["integers", "bfloat16", "positive"])
@pytest.mark.parametrize(("pass_", "name", "words", "plant"), PLANTED, ids=[f"{p[0]} {p[1]}" for p in PLANTED])
def test_planted_fault_is_named(case, pass_, name, words, plant):
  """The words a kernel developer searches for, on exact data and where rounding blurs it."""
  del name
  assert words in of_call(_call(case, plant(case), pass_))


@pytest.mark.parametrize("case", [INTEGERS, REAL, POSITIVE], ids=["integers", "bfloat16", "positive"])
def test_right_result_is_not_accused(case):
  """A correct call has no diagnosis, nor one whose sums are ordered otherwise."""
  assert of_call(_call(case, _product(case))) == ""
  assert of_call(_call(case, _sums(case), "drhs")) == ""
  backwards = np.asarray(np.cumsum(_product(case)[::-1], 0)[::-1] * 0 + _product(case), np.float32)
  assert of_call(_call(case, backwards)) == ""


def test_lost_bits_are_told_apart():
  """Rounding the operands, the result, or every addition are three different faults."""
  exact = _product(POSITIVE)
  rounded = _oracle.gmm(POSITIVE.lhs.astype(BF16), POSITIVE.rhs.astype(BF16), _rows(POSITIVE)).value
  assert "rounded to bfloat16" in of_call(_call(POSITIVE, rounded))
  assert "extra rounding" in of_call(_call(POSITIVE, exact.astype(np.float32).astype(BF16)))
  coarse = dataclasses.replace(POSITIVE, dtype="bfloat16")
  assert "bfloat16 accumulation" in of_call(_call(coarse, _sum_in_bfloat16(coarse)))


def test_scales_and_options():
  """Scales dropped, doubled or taken from the wrong place; offset and partial_sum ignored; dtype and shape."""
  scale = (2.0 ** np.arange(-6, 6, dtype=np.float32)).reshape(1, 1, 12)
  codes = gmm.QArray(INTEGERS.rhs.astype(np.int8), scale)
  value = lambda s: _product(INTEGERS, INTEGERS.rhs * s)
  assert of_call(_call(INTEGERS, value(scale), rhs=codes)) == ""
  assert of_call(_call(INTEGERS, value(1.0), rhs=codes)) == "scale of rhs dropped"
  assert of_call(_call(INTEGERS, value(scale**2), rhs=codes)) == "scale of rhs applied twice"
  assert "used for all" in of_call(_call(INTEGERS, value(scale[..., :1]), rhs=codes))
  shard = INTEGERS.rhs[2:]
  local = _oracle.gmm(INTEGERS.lhs, shard, _rows(INTEGERS)[:2]).value
  assert of_call(_call(INTEGERS, local, rhs=shard, group_offset=np.int32(2))) == "group_offset ignored"
  partial = np.ones((24, 12), np.float32)
  assert of_call(_call(INTEGERS, _product(INTEGERS), partial_sum=partial)) == "partial_sum dropped"
  assert of_call(_call(INTEGERS, _product(INTEGERS) + 2, partial_sum=partial)) == "partial_sum added twice"
  assert "wrong dtype" in of_call(_call(INTEGERS, _product(INTEGERS), returned="bfloat16"))
  assert "wrong shape" in of_call(_call(INTEGERS, _product(INTEGERS)[:-1]))


def test_stale_metadata():
  """The second call answers for the sizes of the first."""
  first = _call(INTEGERS, _product(INTEGERS))
  other = dataclasses.replace(INTEGERS, group_sizes=(11, 4, 6, 0))
  assert "stale metadata" in of_call(_call(other, _product(INTEGERS)), [first])


def test_nan_of_another_group():
  """A NaN in the operands of one group in the rows of another."""
  rhs = INTEGERS.rhs
  rhs[2] = np.nan
  call = _call(INTEGERS, _product(INTEGERS) * np.nan, rhs=rhs)
  assert "NaN leaking" in of_call(call)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_dynamic", "int8_dynamic", "int8_weight_only"])
def test_calls_of_the_reference_are_seen_and_clean(recipe):
  """Every pass is recorded with concrete operands, and the replay agrees with the reference on each."""
  ran = "VJP-1:gradients" if recipe == "bf16" else "VJP-2:backward_table"
  (check,) = (c for c in checks() if c.id == ran)
  case = Case(24, 16, 12, (5, 0, 14), "bfloat16", "real", 1, recipe)
  calls = _spy.record(check, gmm.get_backend("reference"), case)
  assert sorted(c.pass_ for c in calls) == ["dlhs", "drhs", "fwd"]
  assert [of_call(c) for c in calls] == ["", "", ""]
  assert diagnose(None, calls) == ""


def test_arrays_alone():
  """What is said when no call of the backend can be seen."""
  right = np.ones((3, 2))
  evidence = Evidence(
    "out", _changed(right, 2, 5.0), _changed(right, 2, 0.0), ("float32", "float32"), owner=np.array([0, 0, -1])
  )
  assert "tail rows" in of_evidence(evidence, "")
  assert "wrong dtype" in of_evidence(dataclasses.replace(evidence, dtypes=("float16", "float32")), "")
  assert "reproducible" in of_evidence(None, "out of a second run[0] = 1, must be 2")

"""Every backend holds to every clause of SPEC.md, or declines for a reason that adapters may give."""

from __future__ import annotations

import dataclasses
import functools

import pytest

import gmm
from gmm.conformance import Case, ConformanceError, check_backend, checks, run_check
from gmm.conformance._shrink import shrink

BACKENDS = ("reference", "xla", "megablox", "tokamax_v1")

# What an adapter of a public kernel may decline (the reference declines nothing).
MAY_DECLINE = ("in blocks", "constant along k", "constant along the rows of a group", "int4 codes")

RUNS = [("reference", check) for check in checks() if check.scope == "library"]
RUNS += [(name, check) for name in BACKENDS for check in checks() if check.scope == "backend"]


# What also runs on a second Python with the newest JAX: where versions have differed.
ON_BOTH_VERSIONS = {"GMM-1", "GMM-4", "GMM-12", "TGMM-1", "VJP-2", "VJP-6", "VJP-8", "QNT-1", "QNT-2", "QNT-11"}


def _param(name, check):
  # One process per backend: its checks share compiled programs.
  marks = [pytest.mark.xdist_group(name)]
  if check.clause in ON_BOTH_VERSIONS:
    marks.append(pytest.mark.second_interpreter)
  return pytest.param(name, check, id=f"{name}-{check.id}", marks=marks)


@pytest.mark.parametrize(("name", "check"), [_param(*run) for run in RUNS])
def test_clause(name, check):
  """The clause holds on all cases drawn; a decline is never counted as a pass."""
  result = run_check(check, gmm.get_backend(name), profile="quick")
  if result.status == "declined":
    assert result.reasons
  else:
    assert result.status == "passed", f"{result.case}\n{result.message}"
    assert result.ran
  assert name != "reference" or not result.declined
  assert all(any(words in reason for words in MAY_DECLINE) for reason in result.reasons), result.reasons


def _halves(lhs, rhs, axis):
  """Both operands cut in two along the contracting axis."""
  half = lhs.shape[1] // 2
  parts = (slice(None, half), slice(half, None))
  return [lhs[:, s] for s in parts], [rhs[(slice(None),) * axis + (s,)] for s in parts]


@functools.cache
def _broken(fault):
  """The reference with one fault of a kind that public kernels had."""
  import jax.numpy as jnp

  from gmm._groups import covered_rows, local_ranges

  reference = gmm.get_backend("reference")

  def broken_gmm(lhs, rhs, sizes, **kwargs):
    offset, g = kwargs["group_offset"], rhs.shape[0]
    if fault == "offset ignored":
      kwargs["group_offset"] = None if offset is None else jnp.zeros_like(offset)
    if fault == "border off by one" and sizes.shape[0] > 1:
      move = jnp.minimum(sizes[0], 1)
      sizes = sizes.at[0].add(-move).at[1].add(move)
    if fault == "lhs scale dropped" and isinstance(lhs, gmm.QArray):
      lhs = gmm.QArray(lhs.qvalue, jnp.ones_like(lhs.scale))
    if fault == "rhs scale of group 0 for all" and isinstance(rhs, gmm.QArray):
      rhs = gmm.QArray(rhs.qvalue, jnp.broadcast_to(rhs.scale[:1], rhs.scale.shape))
    if fault == "rounds twice":
      kwargs["preferred_element_type"], wanted = "bfloat16", kwargs["preferred_element_type"]
      return reference.gmm(lhs, rhs, sizes, **kwargs).astype(wanted)
    if fault == "scales below 2^-8 raised" and isinstance(lhs, gmm.QArray):
      lhs = gmm.QArray(lhs.qvalue, jnp.maximum(lhs.scale, jnp.asarray(2.0**-8, lhs.scale.dtype)))
    if fault == "sums in bfloat16" and lhs.dtype == jnp.bfloat16 and not isinstance(rhs, gmm.QArray):
      axis = 2 if kwargs["transpose_rhs"] else 1
      halves = [reference.gmm(x, w, sizes, **kwargs) for x, w in zip(*_halves(lhs, rhs, axis), strict=True)]
      return halves[0] + halves[1]
    out = reference.gmm(lhs, rhs, sizes, **kwargs)
    starts, ends = local_ranges(sizes, offset, g)
    covered = covered_rows(starts, ends, out.shape[0])[:, None]
    if fault == "supports lies" and isinstance(rhs, gmm.QArray):
      raise gmm.Unsupported("it takes no codes.")
    if fault == "uncovered rows unset":
      return jnp.where(covered, out, jnp.full_like(out, 7))
    if fault == "NaN leaks between groups" and not isinstance(rhs, gmm.QArray):
      return out + jnp.where(covered, (jnp.sum(rhs) * 0).astype(out.dtype), jnp.zeros((), out.dtype))
    if fault == "partial_sum twice" and kwargs["partial_sum"] is not None:
      return out + kwargs["partial_sum"].astype(out.dtype)
    return out

  def broken_tgmm(lhs, dout, sizes, **kwargs):
    if fault == "offset ignored in drhs":
      kwargs["group_offset"] = None
    if fault == "forward scale forgotten in drhs":
      kwargs["dout_prescale"] = None
    if fault == "first row of a group twice" and not isinstance(lhs, gmm.QArray):
      starts = local_ranges(sizes, kwargs["group_offset"], kwargs["num_groups"])[0]
      again = jnp.any(jnp.arange(lhs.shape[0])[:, None] == starts[None], axis=1)
      lhs = jnp.where(again[:, None], lhs + lhs, lhs)
    out = reference.tgmm(lhs, dout, sizes, **kwargs)
    starts, ends = local_ranges(sizes, kwargs["group_offset"], kwargs["num_groups"])
    if fault == "empty group left over":
      return jnp.where((ends > starts)[:, None, None], out, jnp.ones_like(out))
    if fault == "last row of a group lost":
      rows = jnp.arange(lhs.shape[0])[:, None]
      lost = jnp.any(rows == (ends - 1)[None], axis=1) if ends.shape[0] else jnp.zeros(lhs.shape[0], bool)
      if not isinstance(lhs, gmm.QArray):
        lhs = jnp.where(lost[:, None], jnp.zeros((), lhs.dtype), lhs)
      return reference.tgmm(lhs, dout, sizes, **kwargs)
    if fault == "drhs in bfloat16":
      return out.astype(jnp.bfloat16).astype(out.dtype)
    return out

  return gmm.Backend(name=fault, gmm=broken_gmm, tgmm=broken_tgmm, supports=reference.supports)


FAULTS = {
  "uncovered rows unset": "GMM-2:uncovered_rows",
  "border off by one": "GMM-1:rows_of_groups",
  "NaN leaks between groups": "GMM-3:isolation",
  "offset ignored": "GMM-5:offset_shards",
  "rounds twice": "GMM-7:result_dtype",
  "sums in bfloat16": "GMM-1:rows_of_groups",
  "partial_sum twice": "GMM-8:partial_sum",
  "scales below 2^-8 raised": "GMM-11:powers_of_two",
  "empty group left over": "TGMM-2:empty_groups",
  "last row of a group lost": "TGMM-1:rows_summed_by_group",
  "offset ignored in drhs": "VJP-4:offset_gradients",
  "first row of a group twice": "GMM-11:rows_inside_a_group",
  "drhs in bfloat16": "VJP-1:gradients",
  "forward scale forgotten in drhs": "VJP-2:lossless_operands",
  "lhs scale dropped": "QNT-1:quantized_operands",
  "rhs scale of group 0 for all": "QNT-1:quantized_operands",
  "supports lies": "REG-5:supports_both_ways",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault):
  """A backend with one fault fails the clause that forbids it, with a case and a sentence about it."""
  (check,) = (c for c in checks() if c.id == FAULTS[fault])
  result = run_check(check, _broken(fault), profile="default")
  assert result.status == "failed", result
  assert result.case is not None
  assert len(result.message) > 20


@pytest.mark.parametrize("ran", ["GMM-1:rows_of_groups", "TGMM-1:rows_summed_by_group", "VJP-1:gradients"])
def test_another_order_of_summation_is_no_fault(ran):
  """A correct backend that adds up backwards passes where the bound decides: no false alarm."""
  reference = gmm.get_backend("reference")

  def backwards(lhs, rhs, sizes, **kwargs):
    if isinstance(rhs, gmm.QArray):
      return reference.gmm(lhs, rhs, sizes, **kwargs)
    return reference.gmm(lhs[:, ::-1], rhs[..., ::-1] if kwargs["transpose_rhs"] else rhs[:, ::-1], sizes, **kwargs)

  def swapped(lhs, dout, sizes, **kwargs):
    return reference.tgmm(dout, lhs, sizes, **kwargs).swapaxes(1, 2)

  other = gmm.Backend(name="backwards", gmm=backwards, tgmm=swapped, supports=reference.supports)
  (check,) = (c for c in checks() if c.id == ran)
  result = run_check(check, other, profile="default")
  assert result.status == "passed", f"{result.case}\n{result.message}"
  assert result.ratio is not None
  assert 0.1 < result.ratio <= 1


def test_smallest_case_is_kept():
  """The case of a failure is shrunk: one row in one group is enough to see a moved border."""
  (check,) = (c for c in checks() if c.id == "GMM-1:rows_of_groups")
  result = run_check(check, _broken("border off by one"), profile="default")
  assert result.case.dtype == "float32"
  assert sum(s > 0 for s in result.case.group_sizes) <= 2
  assert eval(repr(result.case), {"Case": Case}) == result.case


def test_declined_is_not_passed():
  """A backend that refuses everything passes nothing."""
  reference = gmm.get_backend("reference")
  lazy = gmm.Backend(name="lazy", gmm=reference.gmm, tgmm=reference.tgmm, supports=lambda p: "It is asleep, wake it.")
  report = check_backend(lazy, "GMM-1", profile="quick", on_fail="report")
  assert [r.status for r in report.results] == ["declined"]
  assert report.results[0].reasons == ("It is asleep, wake it.",)
  assert not report.conforms


def test_error_in_a_backend_is_a_failure_with_its_case():
  """Whatever a third party's kernel raises, the report says on which case."""
  reference = gmm.get_backend("reference")

  def crash(*args, **kwargs):
    raise RuntimeError("out of tiles")

  crashing = gmm.Backend(name="crashing", gmm=crash, tgmm=reference.tgmm, supports=lambda p: None)
  (result,) = check_backend(crashing, "GMM-1", profile="quick", on_fail="report").results
  assert result.status == "failed"
  assert result.message == "RuntimeError: out of tiles"
  assert result.case is not None


def _backend(name, run, **fields):
  reference = gmm.get_backend("reference")
  given = {"gmm": run, "tgmm": reference.tgmm, "supports": lambda problem: None, **fields}
  return gmm.Backend(name=name, **given)


def test_core_may_not_be_declined():
  """Plain bfloat16 in whole tiles is what a backend is for."""
  reference = gmm.get_backend("reference")
  refuses = lambda p: "It is float32 only; convert." if p.lhs.dtype == "bfloat16" else None
  picky = _backend("picky", reference.gmm, supports=refuses)
  (result,) = check_backend(picky, "REG-5:core*", on_fail="report").results
  assert result.status == "failed"
  assert "It is float32 only; convert." in result.message
  assert result.case.dtype == "bfloat16"


def test_refusing_what_supports_accepts_is_a_failure():
  """Wherever it happens: it is not counted as declined."""

  def refuse(*args, **kwargs):
    raise gmm.Unsupported("Not today; come back later.")

  (result,) = check_backend(_backend("moody", refuse), "GMM-2", profile="quick", on_fail="report").results
  assert result.status == "failed"
  assert "supports accepts it and the backend refuses" in result.message


def test_expected_failures():
  """A failure with a reason conforms; a pass with a reason does not; a reason for nothing is an error."""
  faulty = _broken("uncovered rows unset")
  named = {"GMM-2": "rows past the end are the caller's, issue 3", "GMM-13": "summed in any order"}
  report = check_backend(faulty, "GMM-[2]", named, profile="quick")
  assert [r.status for r in report.results] == ["expected failure"]
  assert report.results[0].expected == named["GMM-2"]
  assert report.conforms
  with pytest.raises(ConformanceError, match="unexpected pass") as raised:
    check_backend(faulty, "GMM-13", named, profile="quick")
  assert [r.status for r in raised.value.report.results] == ["unexpected pass"]
  with pytest.raises(ValueError, match=r"'GMN-2', which matches no check"):
    check_backend(faulty, "GMM-2", {"GMN-2": "a typo"})
  with pytest.raises(ValueError, match="must be a reason in words"):
    check_backend(faulty, "GMM-2", {"GMM-2": ""})


def test_failing_raises_with_the_report():
  """The default: one exception that says what fails, on which case, and what it looks like."""
  with pytest.raises(ConformanceError) as raised:
    check_backend(_broken("uncovered rows unset"), "GMM-2", profile="quick")
  text = str(raised.value)
  for part in ("1 of 1 checks", "GMM-2:uncovered_rows", "Case(m=", "must be 0 exactly", "uninitialised tail rows"):
    assert part in text
  assert not raised.value.report.conforms
  with pytest.raises(ValueError, match="'raise' or 'report', got 'print'"):
    check_backend("reference", "GMM-2", on_fail="print")  # pyright: ignore[reportArgumentType]  a typo is the point


def test_an_error_of_the_kit_is_no_failure_of_a_backend():
  """The traceback decides, then the reference: a check that is broken breaks there as well; a compiler does not."""
  (check,) = (c for c in checks() if c.id == "GMM-1:rows_of_groups")

  def broken_check(backend, case):
    raise KeyError("a typo in the kit")

  def compiler(backend, case):
    if backend.name != "reference":
      raise NotImplementedError("cannot lower this primitive")

  # All its functions are the reference's, so that no frame of this module is the backend's.
  reference = gmm.get_backend("reference")
  mine = _backend("mine", reference.gmm, supports=reference.supports)
  result = run_check(dataclasses.replace(check, run=broken_check), mine, profile="quick")
  assert result.status == "suite error"
  assert "a typo in the kit" in result.traceback
  expected = run_check(dataclasses.replace(check, run=broken_check), mine, {"GMM-1*": "known"}, profile="quick")
  assert expected.status == "suite error"  # no reason excuses the kit
  assert run_check(dataclasses.replace(check, run=compiler), mine, profile="quick").status == "failed"


def test_shrinking_finds_the_least_rows():
  """On a predicate instead of a backend: the smallest shape and the fewest rows that fail, within the given case."""
  case = Case(150, 136, 20, (60, 10, 0, 50, 5), "bfloat16", "real", 9)
  asked = []

  def fails(candidate):
    asked.append(candidate)
    return sum(s > 0 for s in candidate.group_sizes) >= 2 and candidate.m >= 5

  small = shrink(case, fails, simpler_data=True, seconds=5.0)
  assert (small.m, small.k, small.n) == (6, 4, 3)
  assert sorted(small.group_sizes) == [0, 1, 1]
  assert (small.dtype, small.data) == ("float32", "integers")
  assert all(c.m <= case.m and c.k <= case.k and c.n <= case.n for c in asked)
  assert shrink(case, lambda c: False, simpler_data=True, seconds=5.0) == case
  kept = shrink(case, lambda c: c.g == 5 and c.group_sizes[3] > 20, simpler_data=False, seconds=5.0)
  assert kept.group_sizes == (0, 0, 0, 25, 0)


def test_unknown_clause_and_profile():
  """A typo is an error, not an empty report that looks green."""
  with pytest.raises(ValueError, match="No clause matches 'GMN-1'; known: GMM-1"):
    check_backend("reference", "GMN-1")
  with pytest.raises(ValueError, match="Unknown profile 'slow'; known: quick"):
    check_backend("reference", profile="slow")  # pyright: ignore[reportArgumentType]  a typo is the point

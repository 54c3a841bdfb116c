"""Every backend holds to every clause of SPEC.md, or declines for a reason that adapters may give."""

from __future__ import annotations

import functools

import pytest

import gmm
from gmm.conformance import Case, check_backend, checks, run_check

BACKENDS = ("reference", "xla", "megablox", "tokamax_v1")

# What an adapter of a public kernel may decline (the reference declines nothing).
MAY_DECLINE = {"block_scales", "int4_weights"}

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
    assert name != "reference"
    assert check.run.__name__ in MAY_DECLINE, result.reasons
    return
  assert result.status == "passed", f"{result.case}\n{result.message}"
  assert result.ran
  assert result.declined == 0 or check.run.__name__ in MAY_DECLINE, result.reasons


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


def test_unknown_clause_and_profile():
  """A typo is an error, not an empty report that looks green."""
  with pytest.raises(ValueError, match="No clause matches 'GMN-1'; known: GMM-1"):
    check_backend("reference", "GMN-1")
  with pytest.raises(ValueError, match="Unknown profile 'slow'; known: quick"):
    check_backend("reference", profile="slow")  # pyright: ignore[reportArgumentType]  a typo is the point

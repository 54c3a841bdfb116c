"""The mutants: operator x site, the clause that names the fault, the words a diagnosis may use."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from gmm import Backend, Problem, Unsupported, _vjp

from . import _operators as o
from . import _plain
from ._shell import make_backend
from ._tiled import Gmm, Tgmm

_PLAIN = (_plain.gmm, _plain.tgmm)
_TILED = (Gmm(), Tgmm())


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One small change to a correct backend, or to the library around it.

  Attributes:
    name: operator and site.
    clause: the clause whose check is tried first; any may kill it.
    kind: words of which a diagnosis of it has one.
    backend: the faulty backend.
    patch: (attribute of `gmm._vjp`, replacement) for a fault around the backend.
  """

  name: str
  clause: str
  kind: tuple[str, ...]
  backend: Backend
  patch: tuple[str, Any] | None = None

  @contextlib.contextmanager
  def applied(self) -> Iterator[Backend]:
    """The backend, with the library changed as long as the block lasts."""
    if self.patch is None:
      yield self.backend
      return
    name, replacement = self.patch
    before = getattr(_vjp, name)
    setattr(_vjp, name, replacement)
    try:
      yield self.backend
    finally:
      setattr(_vjp, name, before)


def _at(
  clause: str,
  kind: str,
  operator: Callable[..., Any],
  *sites: str,
  core: tuple[Any, Any] = _PLAIN,
  also: tuple[tuple[str, Any], ...] = (),
) -> tuple[Mutant, ...]:
  """One mutant for each site; `also` are changes that belong to the same fault."""
  word = getattr(operator, "__name__", type(operator).__name__).lower()
  made = []
  for site in sites:
    name = f"{'tiled.' if core is not _PLAIN else ''}{site}:{word}"
    made.append(Mutant(name, clause, tuple(kind.split("|")), make_backend(name, core, ((site, operator), *also))))
  return tuple(made)


def _fields(name: str, clause: str, kind: str, **fields: Any) -> Mutant:
  """A fault of the backend's other fields."""
  return Mutant(name, clause, tuple(kind.split("|")), make_backend(name, _PLAIN, **fields))


def _around(name: str, clause: str, kind: str, attribute: str, change: Callable[[Any], Any]) -> Mutant:
  """A fault in the gradient rule around a correct backend."""
  replacement = change(getattr(_vjp, attribute))
  return Mutant(name, clause, tuple(kind.split("|")), make_backend(name, _PLAIN), (attribute, replacement))


# ---- groups, offsets, unused rows --------------------------------------------------------

_GROUPS = (
  *_at("GMM-1", "edge|rows|shifted", o.plus_one, "gmm.starts", "gmm.ends"),
  *_at("GMM-1", "edge|rows|shifted", o.minus_one, "gmm.starts", "gmm.ends"),
  *_at("TGMM-1", "edge|rows|shifted", o.plus_one, "tgmm.starts", "tgmm.ends"),
  *_at("TGMM-1", "edge|rows|shifted", o.minus_one, "tgmm.starts", "tgmm.ends"),
  *_at("GMM-1", "group", o.reversed_groups, "gmm.rhs"),
  *_at("TGMM-1", "group|block", o.reversed_groups, "tgmm.acc"),
  *_at("GMM-6", "rows|group", o.as_int8, "gmm.sizes"),
  *_at("TGMM-1", "rows|group", o.as_int8, "tgmm.sizes"),
  *_at("GMM-5", "offset|group", o.forget, "gmm.offset"),
  *_at("TGMM-5", "offset|group", o.forget, "tgmm.offset"),
  *_at("GMM-2", "tail|uninitialised", o.garbage_outside, "gmm.out"),
  *_at("GMM-2", "tail|uninitialised", o.nan_outside, "gmm.out"),
  *_at("GMM-2", "tail|uninitialised", o.last_tile_outside, "gmm.out"),
  *_at("GMM-2", "tail|mask", o.to_the_last_row, "gmm.ends", also=(("gmm.covered", o.everywhere),)),
  *_at("TGMM-3", "rows of no group|tail|NaN", o.to_the_last_row, "tgmm.ends"),
  *_at("TGMM-2", "left over|empty", o.left_over, "tgmm.out"),
  *_at("TGMM-2", "left over|empty", o.previous_group, "tgmm.out"),
  *_at("GMM-3", "NaN", o.mask_by_multiplication, "gmm.kept"),
  *_at("TGMM-3", "NaN", o.mask_by_multiplication, "tgmm.kept"),
  *_at("GMM-3", "NaN", o.nan_as_zero, "gmm.lhs", "gmm.rhs", "gmm.acc"),
  *_at("TGMM-3", "NaN", o.nan_as_zero, "tgmm.lhs", "tgmm.dout", "tgmm.acc"),
)

# ---- products, layouts, dtypes -----------------------------------------------------------

_PRODUCTS = (
  *_at("GMM-1", "k tail|k block|column|zero", o.last_column_dropped, "gmm.lhs"),
  *_at("TGMM-1", "zero|tail|column|k", o.last_column_dropped, "tgmm.lhs", "tgmm.dout"),
  *_at("GMM-10", "transposed|layout|wrong", o.reshaped, "gmm.layout"),
  *_at("GMM-7", "precision|rounding|bfloat16", o.through_bfloat16, "gmm.lhs", "gmm.rhs", "gmm.acc"),
  *_at("TGMM-6", "precision|rounding|bfloat16", o.through_bfloat16, "tgmm.lhs", "tgmm.dout", "tgmm.acc"),
  *_at("GMM-7", "rounding|precision|float16|overflow|Inf", o.through_float16, "gmm.acc"),
  *_at("TGMM-6", "rounding|precision|float16|overflow|Inf", o.through_float16, "tgmm.acc"),
  *_at("GMM-7", "dtype", o.as_float32, "gmm.out"),
  *_at("TGMM-6", "dtype", o.as_float32, "tgmm.out"),
  *_at("VJP-3", "dtype", o.as_float32_in_dlhs, "gmm.out"),
  *_at("GMM-7", "rounding|precision|bfloat16", o.rounded_twice, "gmm.out"),
  *_at("TGMM-6", "rounding|precision|bfloat16", o.rounded_twice, "tgmm.out"),
  *_at("GMM-8", "rounding", o.rounded_before_addition, "gmm.acc"),
  *_at("GMM-8", "partial_sum|rows|zero|tail", o.only_where_covered, "gmm.partial"),
  *_at("GMM-8", "partial_sum|constant|missing|added", o.as_zero, "gmm.partial"),
  *_at("GMM-8", "partial_sum|constant|twice|added", o.plus_one, "gmm.partial"),
  *_at("GMM-13", "run|differ|order|rounding", o.Drifts(), "gmm.out"),
)

# ---- quantized operands ------------------------------------------------------------------

_SCALES = (
  *_at("QNT-1", "scale", o.dropped, "gmm.lhs_scale", "gmm.rhs_scale"),
  *_at("VJP-2", "scale", o.dropped, "tgmm.dout_scale"),
  *_at("VJP-2", "scale", o.dropped_in_dlhs, "gmm.lhs_scale"),
  *_at("QNT-1", "scale", o.twice, "gmm.lhs_scale", "gmm.rhs_scale"),
  *_at("VJP-2", "scale", o.twice, "tgmm.dout_scale"),
  *_at("QNT-1", "scale", o.first_for_all, "gmm.lhs_scale", "gmm.rhs_scale"),
  *_at("VJP-2", "scale", o.first_for_all, "tgmm.dout_scale"),
  *_at("QNT-1", "scale", o.first_group_for_all, "gmm.rhs_scale"),
  *_at("QNT-1", "scale", o.rolled, "gmm.lhs_scale", "gmm.rhs_scale"),
  *_at("VJP-2", "scale", o.rolled, "tgmm.dout_scale"),
  *_at("QNT-9", "scale|rounding|precision", o.through_bfloat16, "gmm.rhs_scale"),
  *_at("QNT-9", "scale|rounding|precision|reciprocal", o.by_reciprocal, "gmm.rhs_scale"),
  *_at("VJP-2", "scale|rounding|precision|reciprocal", o.by_reciprocal, "gmm.lhs_scale", "tgmm.dout_scale"),
  *_at("QNT-1", "scale", o.dropped, "tgmm.lhs_scale"),
)

_CODES = (
  *_at("VJP-2", "scale|factor", o.dropped, "gmm.prescale", "tgmm.prescale"),
  *_at("VJP-2", "scale|factor", o.twice, "gmm.prescale", "tgmm.prescale"),
  *_at("VJP-2", "scale|factor", o.first_for_all, "gmm.prescale", "tgmm.prescale"),
  *_at("QNT-8", "scale|codes|quant|granularity", o.per_tensor, "gmm.quant", "tgmm.quant"),
  *_at("VJP-2", "codes|quant|e4m3|e5m2|scale", o.other_fp8, "gmm.quant", "tgmm.quant"),
  *_at("QNT-8", "scale|codes|quant", o.wide_scale, "gmm.quant", "tgmm.quant"),
  *_at("VJP-2", "tiny|scale|zero|codes|flush", o.qwix_cutoff, "gmm.quant", "tgmm.quant"),
  *_at("QNT-6", "padding|NaN|absmax|unused|tail|rows", o.all_rows, "tgmm.quant_ranges"),
  *_at("VJP-2", "code", o.next_code, "gmm.codes"),
  *_at("QNT-5", "code|clip|saturat|-128", o.without_lowest, "gmm.codes"),
  *_at("QNT-8", "code|clip|saturat", o.clipped_at_240, "gmm.codes"),
  *_at("QNT-8", "scale", o.scale_rounded_up, "gmm.codes", "tgmm.codes"),
  *_at("QNT-4", "NaN|zero|scale", o.negative_zero_scale, "gmm.codes"),
)

# ---- tiles -------------------------------------------------------------------------------

_TILES = (
  *_at("GMM-14", "k tail|constant", o.one, "gmm.k_fill", core=_TILED),
  *_at("GMM-14", "k tail|k block|last k", o.whole_steps_only, "gmm.steps", core=_TILED),
  *_at("GMM-14", "n tail|column", o.whole_tiles_only, "gmm.columns", core=_TILED),
  *_at("GMM-1", "accumulator|double|group", o.last_sum, "gmm.acc_init", core=_TILED),
  *_at("TGMM-1", "accumulator|rows|dropped", o.reset_always, "tgmm.acc_init", core=_TILED),
  *_at("TGMM-1", "accumulator|group", o.never_reset, "tgmm.acc_init", core=_TILED),
  *_at("GMM-1", "rows|zero|edge", o.overwritten, "gmm.merge", core=_TILED),
  *_at("GMM-1", "group|edge|tail", o.unmasked_store, "gmm.merge", core=_TILED),
  # The row after a group belongs to the next, which stores later; after the last group it is a tail row.
  *_at(
    "GMM-2", "edge|tail|rows", o.with_row_after, "gmm.store_mask", core=_TILED, also=(("gmm.covered", o.everywhere),)
  ),
  *_at("GMM-1", "edge|group|rows", o.with_row_before, "gmm.store_mask", core=_TILED),
  *_at("GMM-1", "edge|rows|zero", o.without_first_row, "gmm.store_mask", core=_TILED),
  *_at("TGMM-1", "edge|rows", o.with_row_after, "tgmm.row_mask", core=_TILED),
  *_at("TGMM-1", "edge|rows", o.with_row_before, "tgmm.row_mask", core=_TILED),
  *_at("TGMM-1", "edge|rows", o.everywhere, "tgmm.row_mask", core=_TILED),
  *_at("GMM-1", "rows|dropped|zero", o.tiles_of_an_aligned_group, "gmm.visit_counts", core=_TILED),
  *_at("TGMM-1", "rows|dropped|zero", o.tiles_of_an_aligned_group, "tgmm.visit_counts", core=_TILED),
  *_at("GMM-1", "rows|dropped|zero", o.one_visit_more, "gmm.visit_counts", core=_TILED),
  *_at("GMM-1", "group|rows|zero", o.next_group, "gmm.visit_group", core=_TILED),
  *_at("TGMM-1", "group|rows|zero", o.next_group, "tgmm.visit_group", core=_TILED),
  *_at("GMM-1", "rows|zero", o.always_first_tile, "gmm.visit_tile", core=_TILED),
  *_at("TGMM-1", "rows|dropped|twice", o.always_first_tile, "tgmm.visit_tile", core=_TILED),
  *_at("GMM-1", "k|block|swapped", o.blocks_backwards, "gmm.k_block", core=_TILED),
  *_at("GMM-7", "bfloat16|rounding|precision|accumul", o.through_bfloat16, "gmm.partial_acc", core=_TILED),
  *_at("TGMM-6", "bfloat16|rounding|precision|accumul", o.through_bfloat16, "tgmm.partial_acc", core=_TILED),
)

# ---- the protocol ------------------------------------------------------------------------


def _refuses_bfloat16(problem: Problem) -> str | None:
  return "bfloat16 is not implemented here" if problem.lhs.dtype == "bfloat16" else None


def _refuses_in_silence(problem: Problem) -> str | None:
  return "no" if problem.transpose_rhs else None


def _cannot_after_all(*args: Any, **kwargs: Any) -> Any:
  if kwargs.get("group_offset") is not None:
    raise Unsupported("group_offset is not implemented here.")
  return make_backend("plain", _PLAIN).gmm(*args, **kwargs)


def _without_tiling(
  lhs,
  rhs,
  sizes,
  *,
  lhs_quant,
  lhs_prescale,
  group_offset,
  transpose_rhs,
  partial_sum,
  precision,
  preferred_element_type,
):
  return make_backend("plain", _PLAIN).gmm(
    lhs,
    rhs,
    sizes,
    lhs_quant=lhs_quant,
    lhs_prescale=lhs_prescale,
    group_offset=group_offset,
    transpose_rhs=transpose_rhs,
    partial_sum=partial_sum,
    precision=precision,
    preferred_element_type=preferred_element_type,
  )


_PROTOCOL = (
  _fields("supports:refuses_the_core", "REG-5", "declined", supports=_refuses_bfloat16),
  _fields("supports:no_reason", "REG-5", "reason", supports=_refuses_in_silence),
  _fields("gmm:refuses_what_it_supports", "REG-5", "accepts|refuses|supports", gmm=_cannot_after_all),
  _fields("gmm:lacks_an_argument", "REG-1", "argument|lacks|TypeError", gmm=_without_tiling),
)

# ---- the gradient rule around the backend ------------------------------------------------


def _no_forward_scale(in_kind):
  """The forward scale that stands on the contracting axis never reaches dout."""

  def change(original):
    def changed(plan, dout, prescale, kind, *rest):
      return original(plan, dout, None if kind == in_kind else prescale, kind, *rest)

    return changed

  return change


def _dout_as_it_is(original):
  """dout is multiplied as it comes, whatever the recipe says."""

  def changed(plan, *rest):
    return original(dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, dout=None)), *rest)

  return changed


def _no_mask(original):
  del original
  return lambda keep, gradient: gradient


_AUTODIFF = (
  _around("vjp:forward_scale_forgotten_in_dlhs", "VJP-2", "scale", "_dout_todo", _no_forward_scale("rows")),
  _around("vjp:forward_scale_forgotten_in_drhs", "VJP-2", "scale", "_dout_todo", _no_forward_scale("cols")),
  _around("vjp:dout_not_quantized", "VJP-2", "quant|code|precision|rounding", "_dout_todo", _dout_as_it_is),
  _around("vjp:clip_mask_forgotten", "VJP-7", "clip|mask|range", "_masked", _no_mask),
)

MUTANTS: tuple[Mutant, ...] = (*_GROUPS, *_PRODUCTS, *_SCALES, *_CODES, *_TILES, *_PROTOCOL, *_AUTODIFF)

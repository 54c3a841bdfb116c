"""Faults that can be computed: a call replayed with one thing wrong, beside the words for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from gmm._quantize import GivenScale
from gmm._recipe import Quant
from gmm.conformance._case import numpy_dtype
from gmm.conformance._replay import Replay, Rows, Side, local_rows, prepared, side_of
from gmm.conformance._spy import Call

# Largest codes of formats that are easily taken for each other: e4m3fnuz and e4m3b11 for e4m3fn, a symmetric int8.
_LIMITS = {"float8_e4m3fn": (240.0, 30.0), "float8_e5m2": (448.0, 240.0), "int8": (127.0, 7.0), "int4": (7.0,)}

Hypothesis = tuple[str, Replay]


def hypotheses(r: Replay, call: Call) -> Iterator[Hypothesis]:
  """(what is wrong, the call with that wrong), the particular before the general."""
  yield from _borders(r)
  yield from _scales(r, call)
  yield from _steps_inside(r, call)
  yield from _partial_sum(r)
  yield from _operands(r, call)


def operand_names(call: Call) -> tuple[str, str]:
  """What the two operands of a call are: the protocol's lhs is dout in dlhs, its rhs is dout in tgmm."""
  return {"fwd": ("lhs", "rhs"), "dlhs": ("dout", "rhs"), "drhs": ("lhs", "dout")}[call.pass_]


def _borders(r: Replay) -> Iterator[Hypothesis]:
  """Other row ranges of the groups."""
  moved = lambda rows: dataclasses.replace(r, rows=rows)
  g, m = len(r.rows), r.m
  if r.offset:
    yield "group_offset ignored", moved(local_rows(r.sizes, 0, g))
    for wrong in (2 * r.offset, r.offset + 1, r.offset - 1, -r.offset):
      yield f"group_offset applied wrongly (as if it were {wrong})", moved(local_rows(r.sizes, wrong, g))
  elif len(r.sizes) > 0:
    for wrong in (1, -1):
      yield f"wrong group: each group has the rows of group {wrong:+d}", moved(local_rows(r.sizes, wrong, g))
  clip = lambda x: min(max(x, 0), m)
  used = [j for j, (start, end) in enumerate(r.rows) if end > start]
  first, last = (used[0], used[-1]) if used else (0, 0)

  def each(change: Callable[[int, int, int], tuple[int, int]], only: list[int]) -> Rows:
    return [
      tuple(clip(x) for x in change(start, end, j)) if j in only else (start, end)  # pyright: ignore
      for j, (start, end) in enumerate(r.rows)
    ]

  for by in (1, -1):
    yield (
      f"wrong group at an edge: group borders {'late' if by > 0 else 'early'} by one row",
      moved(each(lambda s, e, j, by=by: (s + by * (j != first), e + by * (j != last)), used)),
    )
    yield (
      f"rows shifted by one: every border {'late' if by > 0 else 'early'} by one row",
      moved(each(lambda s, e, j, by=by: (s + by, e + by), used)),
    )
  yield "last row of each group dropped: its end edge is one row early", moved(each(lambda s, e, j: (s, e - 1), used))
  yield "first row of each group dropped: its start edge is one row late", moved(each(lambda s, e, j: (s + 1, e), used))
  yield "row after each group counted too: its end edge is one row late", moved(each(lambda s, e, j: (s, e + 1), used))
  yield (
    "row before each group counted too: its start edge is one row early",
    moved(each(lambda s, e, j: (s - 1, e), used)),
  )
  if used:
    yield "last row in use dropped", moved(each(lambda s, e, j: (s, e - 1), [last]))
    yield "last group reaches over the tail rows: mask forgotten", moved(each(lambda s, e, j: (s, m), [last]))
    yield "last group dropped", moved(each(lambda s, e, j: (s, s), [last]))
    yield "first group dropped", moved(each(lambda s, e, j: (s, s), [first]))
  if g > 1:
    yield "group order reversed", moved(r.rows[::-1])
    for by in (1, -1):
      rolled = r.rows[by:] + r.rows[:by]
      yield f"wrong group: each group's rows with the {'previous' if by > 0 else 'next'} group", moved(rolled)


def _scales(r: Replay, call: Call) -> Iterator[Hypothesis]:
  """Scales dropped, doubled, or taken from another place."""
  names = operand_names(call)
  scaled = [i for i, side in enumerate((r.lhs, r.rhs)) if side.quantized]
  for i in scaled:
    side, name = (r.lhs, r.rhs)[i], names[i]
    for label, scale in _wrong_scales(side, r.owner if i == 0 else None):
      yield f"scale of {name} {label}", _with(r, i, dataclasses.replace(side, scale=scale))
  if len(scaled) == 2:
    both = lambda change: dataclasses.replace(r, lhs=change(r.lhs), rhs=change(r.rhs))
    yield "both scales dropped", both(lambda s: dataclasses.replace(s, scale=np.ones_like(s.scale)))
    yield "both scales applied twice", both(lambda s: dataclasses.replace(s, scale=s.scale**2))


def _wrong_scales(side: Side, owner: np.ndarray | None) -> Iterator[tuple[str, np.ndarray]]:
  scale = side.scale
  for dtype in ("bfloat16", "float8_e4m3fn"):
    yield f"rounded to {dtype}", _rounded(scale, dtype)
  yield "dropped", np.ones_like(scale)
  yield "applied twice", scale**2
  with np.errstate(divide="ignore", invalid="ignore"):
    yield "divided by instead of multiplied", 1 / scale
  yield "rounded to a power of two", 2.0 ** np.rint(np.log2(np.where(scale > 0, scale, 1)))
  for axis, size in enumerate(scale.shape):
    if size < 2:
      continue
    where = ("row" if scale.ndim == 2 else "group") if axis == 0 else "block or column"
    for index, words in ((0, "first"), (-1, "last")):
      one = np.take(scale, [index], axis)
      yield f"of the {words} {where} used for all", np.broadcast_to(one, scale.shape)
    for by in (1, -1):
      yield f"of the neighbouring {where} used", np.roll(scale, by, axis)
    yield f"of the largest {where} used for all", np.broadcast_to(scale.max(axis, keepdims=True), scale.shape)
  if owner is not None:
    # A row's scale read by the index of its group.
    yield "of a row read by its group's index", scale[np.maximum(owner, 0) % len(scale)]


def _steps_inside(r: Replay, call: Call) -> Iterator[Hypothesis]:
  """What a backend that prescales and quantizes by itself may do wrong."""
  options, names = call.options, operand_names(call)
  sums_rows = call.pass_ == "drhs"
  for i, (x, role) in enumerate(((call.lhs, "lhs"), (call.rhs, "dout" if sums_rows else "rhs"))):
    quant, prescale = options.get(f"{role}_quant"), options.get(f"{role}_prescale")
    if quant is None and prescale is None:
      continue
    kind = "cols" if sums_rows else "rows"
    replaced = lambda label, x, i=i: (label, _with(r, i, side_of(x, r.rows)))
    if prescale is not None:
      yield replaced(
        f"forward scale forgotten: {names[i]} not multiplied by it", prepared(x, quant, None, kind, r.rows)
      )
      yield replaced(
        f"forward scale applied twice to {names[i]}", prepared(x, quant, np.asarray(prescale) ** 2, kind, r.rows)
      )
      for axis, size in enumerate(np.shape(prescale)):
        first = np.broadcast_to(np.take(prescale, [0], axis), np.shape(prescale))
        for label, wrong in (("first", first), ("neighbouring", np.roll(np.asarray(prescale), 1, axis))):
          if size > 1:
            said = f"forward scale of the {label} {'group or row' if axis == 0 else 'column'} used for {names[i]}"
            yield replaced(said, prepared(x, quant, wrong, kind, r.rows))
    if quant is None:
      continue
    yield replaced(f"{names[i]} not quantized", prepared(x, None, prescale, kind, r.rows))
    yield replaced(f"absmax of {names[i]} taken over rows of no group too", prepared(x, quant, prescale, kind, None))
    if isinstance(quant, GivenScale):
      continue
    for label, changed in _wrong_quants(quant):
      yield replaced(f"{names[i]} {label}", prepared(x, changed, prescale, kind, r.rows))
    other = "rows" if kind == "cols" else "cols"
    yield replaced(f"scale of {names[i]} along the wrong axis", prepared(x, quant, prescale, other, r.rows))


def _wrong_quants(quant: Quant) -> Iterator[tuple[str, Quant]]:
  change = lambda **fields: dataclasses.replace(quant, **fields)
  for qtype in ("float8_e4m3fn", "float8_e5m2", "int8", "int4"):
    if qtype != quant.qtype:
      yield f"quantized to {qtype} instead of {quant.qtype}", change(qtype=qtype)
  for granularity in ("tensor", "channel"):
    if granularity != quant.granularity:
      yield f"quantized with one scale per {granularity}", change(granularity=granularity)
  if quant.tiny_scale == "clamp":
    yield "quantized with another cutoff of tiny scales", change(tiny_scale="qwix")
  yield "quantized with a scale of another dtype", change(scale_dtype=None if quant.scale_dtype else "float32")
  if quant.fixed_range is not None:
    yield "quantized by its absmax instead of its fixed range", change(calibration="absmax")


def _partial_sum(r: Replay) -> Iterator[Hypothesis]:
  if r.partial is None:
    return
  changed = lambda partial: dataclasses.replace(r, partial=partial)
  yield "partial_sum dropped", changed(np.zeros_like(r.partial))
  yield "partial_sum added twice", changed(2 * r.partial)
  yield "partial_sum subtracted", changed(-r.partial)
  covered = (r.owner >= 0)[:, None]
  yield "partial_sum missing in the rows of no group", changed(np.where(covered, r.partial, 0))
  yield "partial_sum only in the rows of no group", changed(np.where(covered, 0, r.partial))


def _operands(r: Replay, call: Call) -> Iterator[Hypothesis]:
  """Operands transposed, rounded or turned round."""
  names = operand_names(call)
  for i, side in enumerate((r.lhs, r.rhs)):
    reread = lambda change, side=side: dataclasses.replace(side, codes=change(side.codes), scale=change(side.scale))
    if side.codes.ndim == 3 and side.codes.shape[1] == side.codes.shape[2]:
      yield (
        f"transposed operand: {names[i]} multiplied the other way round",
        _with(r, i, reread(lambda x: x.swapaxes(1, 2))),
      )
    if side.codes.ndim == 3 and side.codes.size:
      flat = lambda x: x.swapaxes(1, 2).reshape(x.shape)
      yield f"transposed operand: {names[i]} read in the other layout", _with(r, i, reread(flat))
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
      lossy = _rounded(side.codes, dtype)
      if side.dtype != dtype and not np.array_equal(lossy, side.codes, equal_nan=True):
        yield f"{names[i]} rounded to {dtype} before the product", _with(r, i, dataclasses.replace(side, codes=lossy))
    yield f"sign lost: magnitudes of {names[i]}", _with(r, i, dataclasses.replace(side, codes=np.abs(side.codes)))
  if not r.sums_rows:
    k = r.lhs.codes.shape[1]
    for step in (s for s in (8, 16, 32, 64, 128, 256, k // 2) if 0 < s < k and k % s == 0):
      turned = np.arange(k).reshape(-1, step)[::-1].reshape(-1)
      yield f"swapped k blocks: steps of {step} in reverse order", _with(r, 0, _taken(r.lhs, turned))
  yield "wrong sign", _with(r, 0, dataclasses.replace(r.lhs, codes=-r.lhs.codes))
  for dtype in ("bfloat16", "float16"):
    sides = [dataclasses.replace(s, codes=_rounded(s.codes, dtype)) for s in (r.lhs, r.rhs)]
    yield (
      f"operands rounded to {dtype}: precision lower than asked for",
      dataclasses.replace(r, lhs=sides[0], rhs=sides[1]),
    )
  for i, side in enumerate((r.lhs, r.rhs)):
    for limit in _LIMITS.get(side.dtype, ()):
      codes = np.clip(side.codes, -limit, limit)
      yield f"codes of {names[i]} clipped at {limit:g}", _with(r, i, dataclasses.replace(side, codes=codes))
    if side.dtype == "int8":
      codes = np.where(side.codes == -128, 128, side.codes)
      yield f"code -128 of {names[i]} read as 128", _with(r, i, dataclasses.replace(side, codes=codes))


def _taken(side: Side, columns: np.ndarray) -> Side:
  return dataclasses.replace(side, codes=side.codes[:, columns], scale=side.scale[:, columns])


def _with(r: Replay, i: int, side: Side) -> Replay:
  return dataclasses.replace(r, lhs=side) if i == 0 else dataclasses.replace(r, rhs=side)


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
  with np.errstate(over="ignore", invalid="ignore"):
    return x.astype(np.float32).astype(numpy_dtype(dtype)).astype(np.float64)

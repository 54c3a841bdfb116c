"""A backend call computed anew in float64, as it should be and with one thing changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from gmm._qarray import QArray, dequantize
from gmm._quantize import GivenScale, apply_prescale, quantize
from gmm.conformance import _oracle
from gmm.conformance._bounds import error_bound
from gmm.conformance._spy import Call

Rows = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
  """One operand after the steps that the backend does inside: codes and scales, float64 of its shape.

  Attributes:
    codes, scale: the operand is codes · scale; scale is one where it is not quantized.
    quantized: whether it has a scale.
    given: the operand as it came, float; None where codes came.
    dtype: name of the dtype that is multiplied.
  """

  codes: np.ndarray
  scale: np.ndarray
  quantized: bool
  given: np.ndarray | None
  dtype: str

  @property
  def value(self) -> np.ndarray:
    return self.codes * self.scale


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
  """The problem of a call, in plain numpy.

  Attributes:
    sums_rows: whether it is tgmm (lhs_g^T @ dout_g); else lhs[i] @ rhs[group of i].
    lhs, rhs: the operands; rhs as [g, k, n] whatever layout it came in, or dout [m, n].
    sizes: rows of each global group.
    rows: (start, end) of each local group.
    total: rows that belong to any group, local or not.
    offset: group_offset, 0 without one.
    partial: float64 [m, n], None without a partial_sum.
    out_dtype: name of the result's dtype.
  """

  sums_rows: bool
  lhs: Side
  rhs: Side
  sizes: np.ndarray
  rows: Rows
  total: int
  offset: int
  partial: np.ndarray | None
  out_dtype: str

  @property
  def m(self) -> int:
    return self.lhs.codes.shape[0]

  @property
  def owner(self) -> np.ndarray:
    """Local group of each row of lhs, -1 for none."""
    return _oracle.owner_of_rows(self.rows, self.m)

  def exact(self) -> _oracle.Exact:
    """The result in float64, with what its bound needs."""
    product = _oracle.tgmm if self.sums_rows else _oracle.gmm
    found = product(self.lhs.value, self.rhs.value, self.rows)
    scaled = self.lhs.quantized + self.rhs.quantized
    return dataclasses.replace(found, value=found.value + (0 if self.partial is None else self.partial), scaled=scaled)

  def bound(self, exact: _oracle.Exact, **declared: Any) -> np.ndarray:
    """How far a correct result may lie from `exact`, float32 sums unless declared otherwise."""
    added = self.partial is not None
    return error_bound(
      exact,
      self.out_dtype,
      inexact_products="float32" in (self.lhs.dtype, self.rhs.dtype),
      extra_roundings=int(added),
      extra_magnitude=0.0 if self.partial is None else np.abs(self.partial),
      **declared,
    )


def replay(call: Call) -> Replay:
  """The problem that a call states."""
  options, sums_rows = call.options, call.pass_ == "drhs"
  offset = options.get("group_offset")
  offset = 0 if offset is None else int(np.asarray(offset).reshape(-1)[0])
  groups = options["num_groups"] if sums_rows else call.rhs.shape[0]
  rows = local_rows(call.sizes, offset, groups)
  kinds = ("cols", "cols") if sums_rows else ("rows", "rhs")
  lhs = _side(call.lhs, options.get("lhs_quant"), options.get("lhs_prescale"), kinds[0], rows)
  rhs = _side(call.rhs, options.get("dout_quant"), options.get("dout_prescale"), kinds[1], rows)
  if options.get("transpose_rhs"):
    swap = lambda x: None if x is None else x.swapaxes(1, 2)
    rhs = dataclasses.replace(rhs, codes=swap(rhs.codes), scale=swap(rhs.scale), given=swap(rhs.given))
  partial = options.get("partial_sum")
  return Replay(
    sums_rows=sums_rows,
    lhs=lhs,
    rhs=rhs,
    sizes=np.asarray(call.sizes, np.int64),
    rows=rows,
    total=int(call.sizes.sum()),
    offset=offset,
    partial=None if partial is None else np.asarray(partial).astype(np.float64),
    out_dtype=np.dtype(jnp.dtype(options["preferred_element_type"])).name,
  )


def local_rows(sizes: np.ndarray, offset: int, groups: int) -> Rows:
  """(start, end) of each local group; one outside the global groups has no rows."""
  ends = np.cumsum(np.asarray(sizes, np.int64))
  known = lambda j: 0 <= j < len(ends)
  return [(int(ends[j] - sizes[j]), int(ends[j])) if known(j) else (0, 0) for j in range(offset, offset + groups)]


def side_of(x: Any, rows: Rows, given: np.ndarray | None = None) -> Side:
  """An operand that is multiplied as it is; `rows` are the groups' (blocks of rows count from their starts)."""
  if not isinstance(x, QArray):
    wide = np.asarray(x).astype(np.float64)
    return Side(wide, np.ones_like(wide), False, wide if given is None else given, np.asarray(x).dtype.name)
  codes = np.asarray(x.qvalue)
  if x.row_block is None:
    scale = np.asarray(x.scale).astype(np.float64)
    for axis, (have, want) in enumerate(zip(scale.shape, x.shape, strict=True)):
      if have != want:
        scale = np.repeat(scale, want // have, axis)
  else:
    starts, ends = _starts_ends(rows)
    ones = QArray(jnp.ones(x.shape), jnp.asarray(x.scale), x.row_block)
    scale = np.asarray(dequantize(ones, starts=starts, ends=ends)).astype(np.float64)
  return Side(codes.astype(np.float64), scale, True, given, codes.dtype.name)


def _side(x: Any, quant: Any, prescale: Any, kind: Any, rows: Rows) -> Side:
  """The operand after prescale and quantization, as the op would do them outside."""
  if isinstance(x, QArray) or (quant is None and prescale is None):
    return side_of(x, rows)
  return side_of(prepared(x, quant, prescale, kind, rows), rows, np.asarray(x).astype(np.float64))


def prepared(x: Any, quant: Any, prescale: Any, kind: Any, rows: Rows | None) -> Any:
  """`quantize` and `apply_prescale` on numpy arrays; without rows every row counts as used."""
  starts, ends = (None, None) if rows is None else _starts_ends(rows)
  factor = None if prescale is None else jnp.asarray(prescale)
  if quant is None:
    return jnp.asarray(x) if factor is None else apply_prescale(jnp.asarray(x), factor, kind, starts, ends)
  if isinstance(quant, GivenScale):
    quant = GivenScale(quant.quant, jnp.asarray(quant.scale))
  return quantize(jnp.asarray(x), quant, kind, starts=starts, ends=ends, prescale=factor)


def _starts_ends(rows: Rows) -> tuple[Any, Any]:
  starts, ends = np.array(rows, np.int32).reshape(-1, 2).T
  return jnp.asarray(starts), jnp.asarray(ends)

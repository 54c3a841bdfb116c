"""The quantized operands that a recipe fixes, as SPEC's tables name them: what an oracle multiplies.

The codes come from `gmm.quantize`, which the clauses QNT-2 to QNT-6 hold to a formula of
their own; here it is stated anew which codes meet which factor.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from gmm._qarray import Operand, QArray
from gmm._quantize import Kind, apply_prescale
from gmm._recipe import Quant
from gmm.conformance import _oracle
from gmm.conformance._case import Case
from gmm.conformance._programs import Program, jit, quantized


def forward_operands(case: Case) -> tuple[Operand, Operand]:
  """(lhs, rhs) of the forward matmul under the case's recipe."""
  rule, ranges = case.rule, _ranges(case)
  lhs, rhs = jnp.asarray(case.lhs), jnp.asarray(case.rhs)
  if rule.lhs is not None:
    lhs = quantized(lhs, rule.lhs, "rows", **ranges)
  if rule.rhs is not None:
    rhs = quantized(rhs, rule.rhs, "rhs", **ranges)
  return lhs, rhs


def backward_operands(case: Case) -> tuple[tuple[Operand, Operand], tuple[Operand, Operand]]:
  """((dout, weights) of dlhs, (lhs, dout) of drhs) under the case's recipe (SPEC VJP-2)."""
  rule, ranges = case.rule, _ranges(case)
  lhs, rhs = forward_operands(case)
  # 1. Codes with blocks along what is contracted no longer are made anew; other codes are reused.
  #    Their scale moves into dout, but that of 2-D blocks stays.
  weights, by_column = rhs, None
  if rule.rhs is not None and rule.rhs.block:
    weights = quantized(jnp.asarray(case.rhs), rule.rhs, "rhs_t", **ranges)
  elif isinstance(rhs, QArray) and not (rule.rhs and rule.rhs.blocks_2d):
    weights, by_column = rhs.qvalue, np.asarray(rhs.scale).astype(np.float32)[:, 0, :]
  acts, by_row = lhs, None
  if rule.lhs is not None and rule.lhs.block:
    acts = quantized(jnp.asarray(case.lhs), rule.lhs, "cols", **ranges)
  elif isinstance(lhs, QArray):
    acts, by_row = lhs.qvalue, np.asarray(lhs.scale).astype(np.float32)
  # 2. dout with that scale in it, quantized along what is contracted now.
  d_rows = _dout(case, rule.dout, "rows", by_column, ranges)
  d_cols = _dout(case, rule.dout, "cols", by_row, ranges)
  return (d_rows, weights), (acts, d_cols)


def _dout(case: Case, quant: Quant | None, kind: Kind, factor: np.ndarray | None, ranges: dict) -> Operand:
  dout = jnp.asarray(case.dout)
  if quant is not None:
    return quantized(dout, quant, kind, prescale=factor, **ranges)
  return dout if factor is None else _prescaled(kind)(dout, factor, ranges["starts"], ranges["ends"])


def dtype_of(x: Operand) -> str:
  """Name of the dtype that is multiplied."""
  return (x.qvalue if isinstance(x, QArray) else x).dtype.name


def _ranges(case: Case) -> dict:
  rows = np.array(_oracle.ranges(case.sizes), np.int32).reshape(-1, 2)
  return {"starts": jnp.asarray(rows[:, 0]), "ends": jnp.asarray(rows[:, 1])}


@functools.cache
def _prescaled(kind: Kind) -> Program:
  return jit(lambda x, factor, starts, ends: apply_prescale(x, factor, kind, starts, ends))

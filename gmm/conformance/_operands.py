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
from gmm._recipe import recipe
from gmm.conformance import _oracle
from gmm.conformance._case import Case
from gmm.conformance._programs import Program, jit, quantized


def forward_operands(case: Case) -> tuple[Operand, Operand]:
  """(lhs, rhs) of the forward matmul under the case's recipe."""
  rule, ranges = recipe(case.recipe), _ranges(case)
  lhs, rhs = jnp.asarray(case.lhs), jnp.asarray(case.rhs)
  if rule.lhs is not None:
    lhs = quantized(lhs, rule.lhs, "rows", **ranges)
  if rule.rhs is not None:
    rhs = quantized(rhs, rule.rhs, "rhs", **ranges)
  return lhs, rhs


def backward_operands(case: Case) -> tuple[tuple[Operand, Operand], tuple[Operand, Operand]]:
  """((dout, weights) of dlhs, (lhs, dout) of drhs) under the case's recipe (SPEC VJP-2)."""
  rule, ranges = recipe(case.recipe), _ranges(case)
  lhs, rhs = forward_operands(case)
  sides = []
  pairs: tuple[tuple[Kind, Operand], ...] = (("rows", rhs), ("cols", lhs))
  for kind, codes in pairs:
    factor = None
    if isinstance(codes, QArray):
      scale = np.asarray(codes.scale).astype(np.float32)
      factor = scale[:, 0, :] if kind == "rows" else scale
    dout: Operand = jnp.asarray(case.dout)
    if rule.dout is not None:
      dout = quantized(dout, rule.dout, kind, prescale=factor, **ranges)
    elif factor is not None:
      dout = _prescaled(kind)(dout, factor, ranges["starts"], ranges["ends"])
    sides.append((dout, codes.qvalue if isinstance(codes, QArray) else codes))
  return (sides[0][0], sides[0][1]), (sides[1][1], sides[1][0])


def dtype_of(x: Operand) -> str:
  """Name of the dtype that is multiplied."""
  return (x.qvalue if isinstance(x, QArray) else x).dtype.name


def _ranges(case: Case) -> dict:
  rows = np.array(_oracle.ranges(case.sizes), np.int32).reshape(-1, 2)
  return {"starts": jnp.asarray(rows[:, 0]), "ends": jnp.asarray(rows[:, 1])}


@functools.cache
def _prescaled(kind: Kind) -> Program:
  return jit(lambda x, factor, starts, ends: apply_prescale(x, factor, kind, starts, ends))

"""Mesh axes that values vary over inside shard_map, where `check_vma=True` wants them said."""

from __future__ import annotations

import functools
from typing import Any

import jax


def varying_axes(*operands: Any) -> frozenset[str]:
  """Manual mesh axes over which any leaf of the operands varies; empty outside shard_map."""
  axes = (getattr(jax.typeof(x), "manual_axis_type", None) for x in jax.tree.leaves(operands))
  return functools.reduce(frozenset.union, (a.varying for a in axes if a is not None), frozenset())


def vary_over(axes: frozenset[str], tree: Any) -> Any:
  """Marks every leaf as varying over `axes` too; the values stay.

  The transpose of that mark is a sum over those axes: the cotangent of a replicated operand
  comes out summed, as it must.
  """

  def mark(x: jax.Array) -> jax.Array:
    missing = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

  return jax.tree.map(mark, tree)


def vary_alike(*operands: Any) -> tuple[Any, ...]:
  """Marks all operands as varying over the axes that any of them varies over."""
  return vary_over(varying_axes(*operands), operands)

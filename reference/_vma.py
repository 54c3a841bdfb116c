"""Manual mesh axes: loops inside shard_map with check_vma=True (SPEC GMM-12)."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def varying_axes(*trees: Any) -> frozenset[str]:
  """Mesh axes over which any of the arrays may differ between devices."""
  return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(trees)))


def varying(tree: Any, axes: frozenset[str]) -> Any:
  """Types arrays as varying over `axes`: what a loop carries must be typed as its body's result."""

  def cast(x: jax.Array) -> jax.Array:
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)

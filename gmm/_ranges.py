"""Ranges that the caller holds: the largest magnitude of each operand, known when `gmm` is called (SPEC QNT-14)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gmm import _validate
from gmm._absmax import absmax
from gmm._groups import canonical_sizes, covered_rows, local_ranges
from gmm._recipe import Recipe


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranges:
  """R of "fixed,-R,R" for the operands of one `gmm`, as arrays: new ones never recompile.

  Attributes:
    lhs, rhs, dout: float scalars, or None to let the recipe find that operand's scale.
  """

  lhs: Any = None
  rhs: Any = None
  dout: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AmaxHistory:
  """The absmax of an operand in the last steps, for delayed scaling (SPEC QNT-14).

  A frozen pytree that the caller keeps with the rest of the training state: `update` returns
  another. One per operand of one `gmm`.

  Attributes:
    absmax: float32 [length], newest first; 0 where there was no step yet, or none that counts.
  """

  absmax: jax.Array

  @staticmethod
  def init(length: int = 16) -> AmaxHistory:
    """Returns a history of that many steps in which nothing was seen.

    Raises:
      ValueError: length is below 1.
    """
    if length < 1:
      raise ValueError(f"A history needs at least one step, got length {length}.")
    return AmaxHistory(jnp.zeros((length,), jnp.float32))

  @property
  def range(self) -> jax.Array:
    """float32 scalar: the largest absmax of the history, what `Ranges` takes; 0 (scale 1) before the first step."""
    return jnp.max(self.absmax)

  def update(
    self,
    x: jax.Array | np.ndarray,
    group_sizes: Any = None,
    *,
    group_offset: Any = None,
    num_groups: int | None = None,
    scale_axes: tuple[str, ...] = (),
  ) -> AmaxHistory:
    """Returns the history with the absmax of x in front and the oldest step dropped.

    Args:
      x: the operand: lhs [m, k], dout [m, n], or rhs [g, ...].
      group_sizes, group_offset: those of the `gmm`: rows of no local group and weights of
        groups without rows do not count (SPEC QNT-6). Without sizes all of x counts.
      num_groups: local groups, needed with group_offset for lhs and dout, as in `tgmm`.
      scale_axes: mesh axes over which the maximum is taken, inside shard_map.

    A step whose absmax is NaN or Inf counts as none: it is recorded as 0. So an overflowing
    step under loss scaling leaves the range alone.
    """
    x = jnp.asarray(x)
    if group_sizes is not None:
      x = _used(x, group_sizes, group_offset, num_groups)
    seen = absmax(x).astype(jnp.float32)
    seen = jnp.where(jnp.isfinite(seen), seen, 0.0)
    if scale_axes:
      seen = jax.lax.pmax(seen, scale_axes)
    return AmaxHistory(jnp.concatenate([seen[None], self.absmax[:-1]]))


def _used(x: jax.Array, group_sizes: Any, group_offset: Any, num_groups: int | None) -> jax.Array:
  """x with zeros in rows of no local group, or in weights of groups without rows."""
  # The weights alone do not say how many rows there are: then no row is cut.
  m = jnp.iinfo(jnp.int32).max if x.ndim == 3 else x.shape[0]
  sizes = _validate.group_sizes(group_sizes, m)
  groups = x.shape[0] if x.ndim == 3 else _validate.num_groups(num_groups, sizes.shape[0], group_offset is not None)
  offset = _validate.group_offset(group_offset, groups, sizes.shape[0])
  starts, ends = local_ranges(canonical_sizes(sizes, m), offset, groups)
  used = ends > starts if x.ndim == 3 else covered_rows(starts, ends, x.shape[0])
  return jnp.where(used.reshape((-1,) + (1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def with_ranges(recipe: Recipe, ranges: Ranges | None) -> tuple[Recipe, Ranges | None]:
  """Checks ranges against a recipe; returns it with one scale for the operands that have a range, and float32 ranges.

  Raises:
    TypeError, ValueError: not a `Ranges` of float scalars, or a range of an operand that the recipe leaves alone.
  """
  if ranges is None:
    return recipe, None
  if not isinstance(ranges, Ranges):
    raise TypeError(f"ranges must be a gmm.Ranges or None, got {type(ranges).__name__}.")
  quants, limits = {}, {}
  for name in ("lhs", "rhs", "dout"):
    limit, quant = getattr(ranges, name), getattr(recipe, name)
    if limit is None:
      continue
    if quant is None:
      raise ValueError(
        f"ranges.{name} is given, but recipe {recipe.name!r} does not quantize {name}. Leave it None, or give a recipe "
        f"that does."
      )
    if quant.fixed_range is not None:
      raise ValueError(
        f"ranges.{name} is given, but recipe {recipe.name!r} has the static range {quant.calibration!r} for {name}. "
        f"Give one of them."
      )
    limit = jnp.asarray(limit)
    if limit.shape != () or not jnp.issubdtype(limit.dtype, jnp.floating):
      raise ValueError(f"ranges.{name} has shape {limit.shape} and dtype {limit.dtype}; it needs to be a float scalar.")
    quants[name] = dataclasses.replace(quant, granularity="tensor", calibration="absmax")
    limits[name] = limit.astype(jnp.float32) * jnp.float32(quant.absmax_factor)
  return dataclasses.replace(recipe, **quants), Ranges(**limits)

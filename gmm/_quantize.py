"""Codes and scales: the one place where an operand is quantized (SPEC QNT-2 to QNT-9).

The op, the reference and the conformance kit all call `quantize`, so a recipe fixes the
quantized operands exactly; a kernel that quantizes inside is held to the same codes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from gmm._groups import covered_rows, row_groups
from gmm._qarray import QArray
from gmm._recipe import Quant

# What the operand is, which decides the axes that share a scale:
#   "rows"  [m, c] contracted over c: lhs and, in dlhs, dout
#   "cols"  [m, c] contracted over m: dout (and lhs) in tgmm
#   "rhs"   [g, k, n] contracted over k;  "rhs_t"  the same stored as [g, n, k]
Kind = Literal["rows", "cols", "rhs", "rhs_t"]

_SMALLEST_SCALE = 2.0**-126  # smallest normal number of float32 and bfloat16
_QWIX_CUTOFF = 2.0**-63  # sqrt of it: below this qwix replaces a scale by 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GivenScale:
  """A `Quant` whose scale is known already: what `lhs_quant` and `dout_quant` may also be."""

  quant: Quant = dataclasses.field(metadata={"static": True})
  scale: jax.Array


def quantize(
  x: jax.Array,
  quant: Quant | GivenScale,
  kind: Kind = "rows",
  *,
  starts: jax.Array | None = None,
  ends: jax.Array | None = None,
  prescale: jax.Array | None = None,
  scale_axes: tuple[str, ...] = (),
) -> QArray:
  """Quantizes an operand of a grouped matmul (SPEC QNT-2).

  Args:
    x: the operand, a float array; [m, c] for "rows" and "cols", [g, k, n] for "rhs",
      [g, n, k] for "rhs_t".
    quant: what to quantize to, or a `GivenScale` to use a scale found before.
    kind: which operand it is: "rows", "cols", "rhs" or "rhs_t".
    starts, ends: int32 [g], row ranges of the local groups; rows of no group and groups
      of no row reach no scale (SPEC QNT-6). None: everything is used.
    prescale: float32 factor to multiply in first ("rows": [1 or g, 1 or c], "cols":
      [1 or m, 1]); the product is rounded once to x's dtype.
    scale_axes: mesh axes over which a scale that rows or groups share takes its maximum.

  Returns:
    QArray: codes of x's shape and their scale (SPEC QNT-3 has its shape). Rows that
    belong to no group have code 0 and, where they have their own, scale 1.

  Raises:
    TypeError: x is not a float array.
    ValueError: a block size that does not divide its dimension.
  """
  given = quant.scale if isinstance(quant, GivenScale) else None
  quant = quant.quant if isinstance(quant, GivenScale) else quant
  if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.dtype(x.dtype).itemsize < 2:
    raise TypeError(f"quantize needs float16, bfloat16, float32 or float64, got {x.dtype}.")
  x = _used_only(x, kind, starts, ends)
  if prescale is not None:
    x = apply_prescale(x, prescale, kind, starts, ends)
  if given is None:
    given = find_scale(x, quant, kind, starts=starts, ends=ends, scale_axes=scale_axes)
  return QArray(_codes(x, given, quant), given)


def find_scale(
  x: jax.Array,
  quant: Quant,
  kind: Kind,
  *,
  starts: jax.Array | None = None,
  ends: jax.Array | None = None,
  scale_axes: tuple[str, ...] = (),
) -> jax.Array:
  """The scale `quantize` uses for x, whose unused rows are zero already (SPEC QNT-2 to QNT-7)."""
  dtype = _scale_dtype(x.dtype, quant)
  if quant.fixed_range is not None:
    scale = jnp.full((1,) * x.ndim, _scale_of(_number(quant.fixed_range, x.dtype), quant, x.dtype), dtype)
    if not quant.is_integer:
      return scale  # fp8 codes carry a NaN themselves
    # Integer codes have no NaN: a used one goes into the scale, which all elements share.
    has_nan = jnp.isnan(_shared_absmax(x, kind, starts, ends, scale_axes))
    return jnp.where(has_nan, jnp.nan, scale).astype(dtype)
  if quant.granularity == "tensor":
    absmax = _shared_absmax(x, kind, starts, ends, scale_axes)
  else:
    absmax = _absmax(x, scale_tiles(x.shape, quant, kind))
    if _groups_share(quant, kind):
      absmax = _across_groups(absmax, starts, ends)
    if _groups_share(quant, kind) or kind == "cols":
      absmax = _across_shards(absmax, scale_axes)
  return _scale_of(absmax, quant, x.dtype).astype(dtype)


def scale_tiles(shape: tuple[int, ...], quant: Quant, kind: Kind) -> tuple[int, ...]:
  """Elements along each axis that share a scale (0: the whole axis); "rhs" keeps its group axis.

  Raises:
    ValueError: a block size that does not divide its dimension.
  """
  # Axis that is contracted, and the one that stays.
  contracting, output = {"rows": (1, 0), "cols": (0, 1), "rhs": (1, 2), "rhs_t": (2, 1)}[kind]
  tiles = [1] * len(shape)
  if quant.granularity in ("channel", "channel_per_group"):
    tiles[contracting] = shape[contracting]
  elif quant.granularity == "tensor":
    return tuple(shape)
  else:
    blocks = quant.granularity if isinstance(quant.granularity, tuple) else (quant.granularity, 1)
    tiles[contracting], tiles[output] = blocks
    for axis in (contracting, output):
      if tiles[axis] and shape[axis] % tiles[axis]:
        raise ValueError(
          f"Blocks of {tiles[axis]} do not divide dimension {axis} of the operand {tuple(shape)}; "
          f"choose a block size that divides {shape[axis]}."
        )
  return tuple(tiles)


def apply_prescale(
  x: jax.Array, prescale: jax.Array, kind: Kind, starts: jax.Array | None, ends: jax.Array | None
) -> jax.Array:
  """x times a scale, formed in float32 and rounded once to x's dtype; unused rows become 0."""
  wide = _wide(x.dtype)
  if kind == "rows" and prescale.shape[0] != 1:
    if starts is None or ends is None:
      raise ValueError(f"A prescale of shape {prescale.shape} has one row per group: give starts and ends.")
    prescale = prescale[row_groups(starts, ends, x.shape[0])]
  product = _round(x.astype(wide) * prescale.astype(wide), x.dtype).astype(x.dtype)
  return _used_only(product, kind, starts, ends)  # a NaN factor must not reach unused rows


def in_range(
  x: jax.Array,
  quant: Quant,
  kind: Kind,
  starts: jax.Array | None,
  ends: jax.Array | None,
  scale_axes: tuple[str, ...] = (),
) -> jax.Array:
  """bool, x's shape: whether each element lies in the calibrated range, bounds included (SPEC VJP-7)."""
  if quant.fixed_range is not None:
    return ~(jnp.abs(x) > _number(quant.fixed_range, x.dtype))  # a NaN passes its gradient on
  if quant.granularity == "tensor":
    absmax = _shared_absmax(_used_only(x, kind, starts, ends), kind, starts, ends, scale_axes)
  else:
    absmax = _absmax(_used_only(x, kind, starts, ends), scale_tiles(x.shape, quant, kind))
    if _groups_share(quant, kind):
      absmax = _across_shards(_across_groups(absmax, starts, ends), scale_axes)
  bound = _round(absmax.astype(_wide(x.dtype)) * _number(quant.absmax_factor, x.dtype).astype(_wide(x.dtype)), x.dtype)
  bound = bound.astype(x.dtype)
  for axis, (have, want) in enumerate(zip(bound.shape, x.shape, strict=True)):
    if have not in (1, want):
      bound = jnp.repeat(bound, want // have, axis=axis)
  return ~(jnp.abs(x) > bound)


def _number(value: float, dtype: Any) -> jax.Array:
  """A constant in dtype that XLA cannot see: it would divide by a constant through its
  rounded reciprocal, which moves ties (SPEC QNT-2)."""
  return lax.optimization_barrier(jnp.asarray(value, dtype))


def _wide(dtype: Any) -> Any:
  return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _scale_dtype(dtype: Any, quant: Quant) -> Any:
  """float16 has too few exponents for a scale: it gets float32 (SPEC QNT-9)."""
  if dtype == jnp.float16 or (quant.scale_dtype and dtype == jnp.bfloat16):
    return jnp.dtype(jnp.float32)
  return jnp.dtype(dtype)


def _round(x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds a float32 value to dtype's precision, in a way that XLA does not optimise away."""
  if jnp.dtype(dtype).itemsize > 2:
    return x
  finfo = jnp.finfo(dtype)
  return lax.reduce_precision(x, finfo.nexp, finfo.nmant)


def _used_only(x: jax.Array, kind: Kind, starts: jax.Array | None, ends: jax.Array | None) -> jax.Array:
  if starts is None or ends is None or kind not in ("rows", "cols"):
    return x
  used = covered_rows(starts, ends, x.shape[0])
  return jnp.where(used[:, None], x, jnp.zeros((), x.dtype))


def _absmax(x: jax.Array, tiles: tuple[int, ...]) -> jax.Array:
  """max |x| over tiles of that size, with one entry per tile in each axis."""
  # 1. Each axis is split in (number of tiles, tile): the tile axes are the odd ones.
  counts = [size // tile if tile else 1 for size, tile in zip(x.shape, tiles, strict=True)]
  split = [d for pair in zip(counts, tiles, strict=True) for d in pair]
  # 2. 0 is the maximum of nothing.
  return jnp.max(jnp.abs(x.reshape(split)), axis=tuple(range(1, len(split), 2)), initial=0)


def _groups_share(quant: Quant, kind: Kind) -> bool:
  return kind in ("rhs", "rhs_t") and quant.granularity == "channel"


def _across_groups(absmax: jax.Array, starts: jax.Array | None, ends: jax.Array | None) -> jax.Array:
  """Maximum over the groups that have rows; absmax is [g, ...] and keeps its rank."""
  if starts is not None and ends is not None:
    used = (ends > starts).reshape((-1,) + (1,) * (absmax.ndim - 1))
    absmax = jnp.where(used, absmax, jnp.zeros((), absmax.dtype))
  return jnp.max(absmax, axis=0, keepdims=True, initial=0)


def _shared_absmax(
  x: jax.Array, kind: Kind, starts: jax.Array | None, ends: jax.Array | None, axes: tuple[str, ...]
) -> jax.Array:
  """max |x| of all that is used, shape (1, ..., 1)."""
  absmax = _absmax(x, (1, *x.shape[1:])) if x.shape[0] else jnp.zeros((0,) + (1,) * (x.ndim - 1), x.dtype)
  absmax = _across_groups(absmax, starts, ends) if kind in ("rhs", "rhs_t") else _across_groups(absmax, None, None)
  return _across_shards(absmax, axes)


def _across_shards(absmax: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  if not axes:
    return absmax
  # As bits: non-negative floats order like their integers, with NaN above Inf, whereas a
  # float all-reduce may lose a NaN.
  wide = jnp.where(jnp.isnan(absmax), jnp.nan, absmax.astype(_wide(absmax.dtype)))
  bits = lax.bitcast_convert_type(wide, jnp.int64 if wide.dtype == jnp.float64 else jnp.int32)
  return lax.bitcast_convert_type(lax.pmax(bits, axes), wide.dtype).astype(absmax.dtype)


def _scale_of(absmax: jax.Array, quant: Quant, dtype: Any) -> jax.Array:
  """absmax / qmax in dtype's arithmetic, with the rule for tiny and zero slices (SPEC QNT-2, QNT-4)."""
  # 1. The range, rounded to dtype as qwix does.
  wide = _wide(dtype)
  absmax = absmax.astype(wide)
  if quant.absmax_factor != 1.0:
    absmax = _round(absmax * _number(quant.absmax_factor, dtype).astype(wide), dtype)  # both factors in dtype
  # 2. A true division, rounded to the scale's dtype.
  scale = _round(absmax / _number(quant.qmax, wide), _scale_dtype(dtype, quant))
  # 3. Never so small that a code overflows or a quotient is NaN; NaN stays NaN.
  if quant.tiny_scale == "qwix":
    return jnp.where(scale < _QWIX_CUTOFF, jnp.ones((), wide), scale)
  is_zero = absmax < _SMALLEST_SCALE  # subnormal numbers count as zero, as on a TPU
  return jnp.where(is_zero, jnp.ones((), wide), jnp.maximum(scale, jnp.asarray(_SMALLEST_SCALE, wide)))


def _codes(x: jax.Array, scale: jax.Array, quant: Quant) -> jax.Array:
  """cast(clip(x / scale)), the quotient rounded to the arithmetic of x and scale (SPEC QNT-2)."""
  # 1. Block scales: view x as (blocks, block) on each blocked axis, so that they broadcast.
  shape, x_shape, s_shape = x.shape, [], []
  for size, count in zip(x.shape, scale.shape, strict=True):
    blocked = count not in (1, size)
    x_shape += [count, size // count] if blocked else [size]
    s_shape += [count, 1] if blocked else [count]
  wide = _wide(x.dtype)
  numerator = x.reshape(x_shape).astype(wide)
  # Subnormal numbers count as zero, of their sign: fp8 has a -0.
  numerator = jnp.where(jnp.abs(numerator) < _SMALLEST_SCALE, jnp.copysign(jnp.zeros((), wide), numerator), numerator)
  # 2. One rounding of the quotient to the dtype qwix divides in, none for a float32 scale.
  in_bf16 = x.dtype == jnp.bfloat16 and scale.dtype == jnp.bfloat16
  y = _round(numerator / scale.reshape(s_shape).astype(wide), jnp.bfloat16 if in_bf16 else wide)
  # 3. Clip before the cast: e4m3fn has no Inf and would give NaN, integers must not wrap.
  if quant.is_integer:
    low = -(quant.qmax + 0.5)
    y = jnp.clip(jnp.round(y), low, -low - 1)  # [-128, 127], [-8, 7]
    y = jnp.where(jnp.isnan(y), jnp.zeros((), wide), y).astype(jnp.int8)
  else:
    y = jnp.clip(y, -quant.qmax, quant.qmax)
  return y.reshape(shape).astype(quant.qtype)

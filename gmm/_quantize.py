"""Codes and scales: the one place where an operand is quantized (SPEC QNT-2 to QNT-9).

The op, the reference and the conformance kit all call `quantize`, so a recipe fixes the
quantized operands exactly; a kernel that quantizes inside is held to the same codes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from gmm._absmax import absmax, magnitude_bits
from gmm._groups import covered_rows, row_groups
from gmm._qarray import QArray
from gmm._recipe import Quant
from gmm._row_blocks import expand_row_blocks, row_block_absmax

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
      of no row reach no scale (SPEC QNT-6), and blocks of "cols" count from each group's
      first row. None: everything is used, and blocks of "cols" count from row 0.
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
  if kind != "cols" or quant.block is None or starts is None or ends is None:
    return QArray(_codes(x, given, quant), given)
  of_rows = expand_row_blocks(given, starts, ends, x.shape[0], quant.block)
  # Rows of no group take no block's scale, which may be NaN: their code is 0.
  of_rows = jnp.where(covered_rows(starts, ends, x.shape[0])[:, None], of_rows, jnp.ones((), given.dtype))
  return QArray(_codes(x, of_rows, quant), given, quant.block)


def find_scale(
  x: jax.Array,
  quant: Quant,
  kind: Kind,
  *,
  starts: jax.Array | None = None,
  ends: jax.Array | None = None,
  scale_axes: tuple[str, ...] = (),
  limit: jax.Array | None = None,
) -> jax.Array:
  """The scale `quantize` uses for x, whose unused rows are zero already (SPEC QNT-2 to QNT-7).

  `limit` is a float scalar R known at run time: the scale is that of "fixed,-R,R".
  """
  dtype = _scale_dtype(x.dtype, quant)
  if limit is None and quant.fixed_range is not None:
    limit = _number(quant.fixed_range, x.dtype)
  if limit is not None:
    scale = jnp.full((1,) * x.ndim, _scale_of(limit.astype(x.dtype), quant, x.dtype, factor=1.0), dtype)
    if not quant.is_integer:
      return scale  # fp8 codes carry a NaN themselves
    # Integer codes have no NaN: a used one goes into the scale, which all elements share.
    has_nan = jnp.isnan(_shared_absmax(x, kind, starts, ends, scale_axes))
    return jnp.where(has_nan, jnp.nan, scale).astype(dtype)
  if quant.granularity == "tensor":
    found = _shared_absmax(x, kind, starts, ends, scale_axes)
  elif kind == "cols" and quant.block is not None and starts is not None and ends is not None:
    found = row_block_absmax(x, starts, ends, quant.block)
  else:
    found = _absmax(x, scale_tiles(x.shape, quant, kind))
    if _groups_share(quant, kind):
      found = _across_groups(found, starts, ends)
    if _groups_share(quant, kind) or kind == "cols":
      found = _across_shards(found, scale_axes)
  return _scale_of(found, quant, x.dtype).astype(dtype)


def scale_of_range(
  x: jax.Array,
  quant: Quant,
  kind: Kind,
  limit: jax.Array,
  *,
  starts: jax.Array | None = None,
  ends: jax.Array | None = None,
  scale_axes: tuple[str, ...] = (),
) -> GivenScale:
  """quant with the scale of "fixed,-R,R" for a float scalar R that is known at run time (SPEC QNT-14)."""
  x = _used_only(x, kind, starts, ends)
  return GivenScale(quant, find_scale(x, quant, kind, starts=starts, ends=ends, scale_axes=scale_axes, limit=limit))


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
  limit: jax.Array | None = None,
) -> jax.Array:
  """bool, x's shape: whether each element lies in the calibrated range, bounds included (SPEC VJP-7).

  `limit` as in `find_scale`.
  """
  if limit is None and quant.fixed_range is not None:
    limit = _number(quant.fixed_range, x.dtype)
  if limit is not None:
    return ~(jnp.abs(x) > limit.astype(x.dtype))  # a NaN passes its gradient on
  if quant.granularity == "tensor":
    found = _shared_absmax(_used_only(x, kind, starts, ends), kind, starts, ends, scale_axes)
  else:
    found = _absmax(_used_only(x, kind, starts, ends), scale_tiles(x.shape, quant, kind))
    if _groups_share(quant, kind):
      found = _across_shards(_across_groups(found, starts, ends), scale_axes)
  bound = _round(found.astype(_wide(x.dtype)) * _number(quant.absmax_factor, x.dtype).astype(_wide(x.dtype)), x.dtype)
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
  return absmax(x.reshape(split), tuple(range(1, len(split), 2)))


def _groups_share(quant: Quant, kind: Kind) -> bool:
  return kind in ("rhs", "rhs_t") and quant.granularity == "channel"


def _across_groups(found: jax.Array, starts: jax.Array | None, ends: jax.Array | None) -> jax.Array:
  """Maximum over the groups that have rows; `found` is an absmax [g, ...] and keeps its rank."""
  if starts is not None and ends is not None:
    used = (ends > starts).reshape((-1,) + (1,) * (found.ndim - 1))
    found = jnp.where(used, found, jnp.zeros((), found.dtype))
  return absmax(found, 0, keepdims=True)


def _shared_absmax(
  x: jax.Array, kind: Kind, starts: jax.Array | None, ends: jax.Array | None, axes: tuple[str, ...]
) -> jax.Array:
  """max |x| of all that is used, shape (1, ..., 1)."""
  found = _absmax(x, (1, *x.shape[1:])) if x.shape[0] else jnp.zeros((0,) + (1,) * (x.ndim - 1), x.dtype)
  found = _across_groups(found, starts, ends) if kind in ("rhs", "rhs_t") else _across_groups(found, None, None)
  return _across_shards(found, axes)


def _across_shards(found: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """Maximum over the mesh axes; `found` is an absmax, so >= 0 or NaN."""
  if not axes:
    return found
  wide = found.astype(_wide(found.dtype))  # an all-reduce has no 16-bit integers on every platform
  # As bits, for the reason that `absmax` has.
  return lax.bitcast_convert_type(lax.pmax(magnitude_bits(wide), axes), wide.dtype).astype(found.dtype)


def _scale_of(largest: jax.Array, quant: Quant, dtype: Any, factor: float | None = None) -> jax.Array:
  """largest / qmax in dtype's arithmetic, with the rule for tiny and zero slices (SPEC QNT-2, QNT-4, QNT-13)."""
  # 1. The range, rounded to dtype as qwix does.
  wide = _wide(dtype)
  largest = largest.astype(wide)
  factor = quant.absmax_factor if factor is None else factor
  if factor != 1.0:
    largest = _round(largest * _number(factor, dtype).astype(wide), dtype)  # both factors in dtype
  # 2. A true division, rounded to the scale's dtype; or a power of two, exact in any.
  if quant.rounding == "ocp":
    scale = _power_below(largest) * jnp.asarray(2.0**-quant.max_exponent, wide)
  else:
    scale = _round(largest / _number(quant.qmax, wide), _scale_dtype(dtype, quant))
  # 3. Never so small that a code overflows or a quotient is NaN; NaN stays NaN.
  if quant.tiny_scale == "qwix":
    scale = jnp.where(scale < _QWIX_CUTOFF, jnp.ones((), wide), scale)
  else:
    is_zero = largest < _SMALLEST_SCALE  # subnormal numbers count as zero, as on a TPU
    scale = jnp.where(is_zero, jnp.ones((), wide), jnp.maximum(scale, jnp.asarray(_SMALLEST_SCALE, wide)))
  return _power_by_log(scale, _scale_dtype(dtype, quant)) if quant.rounding == "qwix" else scale


def _power_below(x: jax.Array) -> jax.Array:
  """2^floor(log2 x) of x >= 0 by its exponent bits; Inf and NaN stay, subnormal numbers give 0."""
  finfo = jnp.finfo(x.dtype)
  integer = jnp.int64 if finfo.bits == 64 else jnp.int32
  exponent = ((1 << finfo.nexp) - 1) << finfo.nmant
  power = lax.bitcast_convert_type(lax.bitcast_convert_type(x, integer) & jnp.asarray(exponent, integer), x.dtype)
  return jnp.where(jnp.isnan(x), x, power)


def _power_by_log(scale: jax.Array, dtype: Any) -> jax.Array:
  """2^ceil(log(scale) / log(2)), each step rounded to dtype: qwix's arithmetic, which errs in bfloat16."""
  log = _round(jnp.log(scale), dtype)
  exponent = jnp.ceil(_round(log / _number(math.log(2.0), dtype).astype(scale.dtype), dtype))
  # The power from its bits, exact: 2^exponent in [2^-126, 2^127], Inf above.
  finfo = jnp.finfo(scale.dtype)
  integer = jnp.int64 if finfo.bits == 64 else jnp.int32
  biased = (jnp.clip(jnp.nan_to_num(exponent), finfo.minexp, finfo.maxexp) + (1 - finfo.minexp)).astype(integer)
  power = lax.bitcast_convert_type(biased << finfo.nmant, scale.dtype)
  return jnp.where(jnp.isnan(exponent), exponent, power)


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

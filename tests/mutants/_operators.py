"""The operators: small changes of a value, each meant for the sites where it makes sense."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from gmm._quantize import GivenScale

# ---- edges, offsets, sizes ---------------------------------------------------------------


def plus_one(x, where):
  """Shifts every edge down by a row."""
  return x + 1


def minus_one(x, where):
  """Shifts every edge up by a row."""
  return x - 1


def forget(x, where):
  """The argument was never passed on."""
  return None


def as_int8(x, where):
  """Sizes go through int8, where 128 rows are -128."""
  return x.astype(jnp.int8).astype(jnp.int32)


def to_the_last_row(ends, where):
  """The last group owns what is left of the rows."""
  return ends.at[-1].set(where.covered.shape[0])


def reversed_groups(x, where):
  """Values of the groups in the opposite order."""
  return x[::-1]


# ---- terms, masks, precision -------------------------------------------------------------


def last_column_dropped(x, where):
  """The last term of every sum is missing."""
  return x.at[..., -1].set(0) if x.shape[-1] else x


def through_bfloat16(x, where):
  """Rounds to bfloat16 on the way."""
  return jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7).astype(x.dtype)


def through_float16(x, where):
  """Rounds to float16 on the way, which ends at 65504."""
  return x.astype(jnp.float16).astype(x.dtype)


def nan_as_zero(x, where):
  """Cleans up NaN and Inf."""
  return jnp.where(jnp.isfinite(x), x, 0.0)


def mask_by_multiplication(kept, where):
  """0 times NaN is NaN."""
  values, mask = where.extra
  return values * mask[:, :, None]


def reshaped(w, where):
  """[g, n, k] read as [g, k, n] instead of transposed."""
  return w.swapaxes(1, 2).reshape(w.shape)


def everywhere(mask, where):
  """A mask that lets everything through."""
  return jnp.ones_like(mask)


def garbage_outside(out, where):
  """Rows of no group hold what was in memory."""
  return jnp.where(where.covered[:, None], out, jnp.asarray(-7.5e8, out.dtype))


def nan_outside(out, where):
  """Rows of no group hold NaN, as the TPU interpreter fills memory."""
  return jnp.where(where.covered[:, None], out, jnp.asarray(jnp.nan, out.dtype))


def last_tile_outside(out, where):
  """Rows of no group hold a copy of the rows before them."""
  return jnp.where(where.covered[:, None], out, jnp.roll(out, 1, axis=0)) if out.shape[0] else out


def left_over(drhs, where):
  """An empty group's block was never written."""
  empty = (where.ends <= where.starts)[:, None, None]
  return jnp.where(empty, jnp.asarray(3.0, drhs.dtype), drhs)


def previous_group(drhs, where):
  """An empty group's block holds the group before it."""
  empty = (where.ends <= where.starts)[:, None, None]
  return jnp.where(empty, jnp.roll(drhs, 1, axis=0), drhs)


# ---- scales and codes --------------------------------------------------------------------


def dropped(scale, where):
  """The scale is never multiplied in."""
  return jnp.ones_like(scale)


def dropped_in_dlhs(scale, where):
  """The scale is forgotten in dlhs only."""
  return jnp.ones_like(scale) if where.is_dlhs else scale


def twice(scale, where):
  """The scale is multiplied in twice."""
  return scale * scale


def first_for_all(scale, where):
  """The first row's, column's or group's scale serves all."""
  return jnp.broadcast_to(scale[(slice(0, 1),) * scale.ndim], scale.shape)


def first_group_for_all(scale, where):
  """The first group's scales serve all groups."""
  return jnp.broadcast_to(scale[:1], scale.shape)


def rolled(scale, where):
  """Each row or column takes its neighbour's scale."""
  axis = int(np.argmax(scale.shape))
  return jnp.roll(scale, 1, axis=axis)


def by_reciprocal(scale, where):
  """1 / (1 / scale) with the reciprocal in bfloat16."""
  return 1 / jax.lax.reduce_precision(1 / scale, 8, 7)


def _changed(quant, **fields):
  """A Quant, or one whose scale is given, with other fields."""
  if isinstance(quant, GivenScale):
    return dataclasses.replace(quant, quant=dataclasses.replace(quant.quant, **fields))
  return dataclasses.replace(quant, **fields)


def per_tensor(quant, where):
  """One scale for the whole operand."""
  return _changed(quant, granularity="tensor")


def other_fp8(quant, where):
  """e5m2 and e4m3fn mixed up."""
  other = {"float8_e5m2": "float8_e4m3fn", "float8_e4m3fn": "float8_e5m2"}
  qtype = (quant.quant if isinstance(quant, GivenScale) else quant).qtype
  return _changed(quant, qtype=other.get(qtype, qtype))


def qwix_cutoff(quant, where):
  """Tiny scales are replaced by 1."""
  return _changed(quant, tiny_scale="qwix")


def wide_scale(quant, where):
  """The scale is kept in float32 where the recipe has the operand's dtype."""
  return _changed(quant, scale_dtype="float32")


def all_rows(ranges, where):
  """The absmax is taken over padding too."""
  starts, ends = ranges
  return jnp.zeros_like(starts), jnp.full_like(ends, where.extra.shape[0])


def next_code(q, where):
  """Integer codes are one too large."""
  if q.qvalue.dtype != jnp.int8:
    return q
  return dataclasses.replace(q, qvalue=jnp.minimum(q.qvalue.astype(jnp.int32) + 1, 127).astype(jnp.int8))


def without_lowest(q, where):
  """-128 does not exist: codes are clipped at -127."""
  return dataclasses.replace(q, qvalue=jnp.maximum(q.qvalue, -127)) if q.qvalue.dtype == jnp.int8 else q


def clipped_at_240(q, where):
  """e4m3's other variant ends at 240: codes are clipped a second time."""
  if q.qvalue.dtype != jnp.float8_e4m3fn:
    return q
  wide = q.qvalue.astype(jnp.float32)
  return dataclasses.replace(q, qvalue=jnp.clip(wide, -240, 240).astype(q.qvalue.dtype))


def scale_rounded_up(q, where):
  """The stored scale is not the one that was divided by."""
  return dataclasses.replace(q, scale=(q.scale.astype(jnp.float32) * (1 + 2.0**-7)).astype(q.scale.dtype))


def negative_zero_scale(q, where):
  """A slice of zeros gets scale 0, whose codes are 0 / 0."""
  empty = jnp.all(q.qvalue.astype(jnp.float32) == 0, axis=-1, keepdims=True)
  if q.scale.shape != empty.shape:
    return q
  return dataclasses.replace(q, scale=jnp.where(empty, jnp.nan, q.scale).astype(q.scale.dtype))


# ---- results -----------------------------------------------------------------------------


def rounded_before_addition(acc, where):
  """Rounds to the result's dtype before partial_sum is added."""
  if not where.extra:
    return acc
  finfo = jnp.finfo(where.out_dtype)
  return jax.lax.reduce_precision(acc, finfo.nexp, finfo.nmant)


def only_where_covered(partial, where):
  """Uncovered rows lose partial_sum."""
  return jnp.where(where.covered[:, None], partial, 0.0)


def as_zero(x, where):
  """The operand is ignored."""
  return jnp.zeros_like(x)


def as_float32(out, where):
  """The result keeps the accumulator's dtype."""
  return out.astype(jnp.float32)


def as_float32_in_dlhs(out, where):
  """The cotangent of lhs keeps the accumulator's dtype."""
  return out.astype(jnp.float32) if where.is_dlhs else out


def rounded_twice(out, where):
  """Rounds through bfloat16 on the way to a wider result."""
  return through_bfloat16(out, where)


@dataclasses.dataclass(frozen=True)
class Drifts:
  """Another result in every run: the order of a sum that is left to chance."""

  runs: itertools.count = dataclasses.field(default_factory=itertools.count, compare=False)

  def __call__(self, out, where):
    step = jax.pure_callback(lambda: np.float32(next(self.runs) % 2), jax.ShapeDtypeStruct((), jnp.float32))
    return (out.astype(jnp.float32) * (1 + step * 2.0**-18)).astype(out.dtype)


# ---- tiles -------------------------------------------------------------------------------


def one(value, where):
  """Padding along k is not zero."""
  return 1.0


def whole_steps_only(steps, where):
  """The part of a tile that is left along k is never visited."""
  return where.extra


def whole_tiles_only(out, where):
  """Columns past the last whole tile are never written."""
  n = out.shape[1]
  return jnp.where(jnp.arange(n) < max(n // 8 * 8, 8), out, 0.0)


def last_sum(acc, where):
  """The accumulator still holds the visit before."""
  return where.extra


def reset_always(acc, where):
  """The sum of a group begins anew in every tile."""
  return jnp.zeros_like(acc)


def never_reset(acc, where):
  """The sum goes on from group to group."""
  return where.extra[0]


def overwritten(new, where):
  """A second visit of a tile loses what the first stored."""
  mask, acc, active, old = where.extra
  return jnp.where(active, jnp.where(mask, acc, 0.0), old)


def unmasked_store(new, where):
  """A visit stores the whole tile."""
  _, acc, active, old = where.extra
  return jnp.where(active, acc, old)


def with_row_after(mask, where):
  """The mask's upper edge is one row late."""
  row, start, end = where.extra
  return (row >= start) & (row <= end)


def with_row_before(mask, where):
  """The mask's lower edge is one row early."""
  row, start, end = where.extra
  return (row >= start - 1) & (row < end)


def without_first_row(mask, where):
  """The mask's lower edge is one row late."""
  row, start, _ = where.extra
  return mask & (row > start)


def tiles_of_an_aligned_group(counts, where):
  """Counts tiles as if every group began at one."""
  starts, ends, tm = where.extra
  return (ends - starts + tm - 1) // tm


def one_visit_more(counts, where):
  """A group that ends at a tile's edge visits the tile after it: visits of later groups come too late."""
  starts, ends, tm = where.extra
  return jnp.where(ends > starts, ends // tm - starts // tm, 0)


def next_group(group, where):
  """Metadata of the group after this one."""
  return jnp.minimum(group + 1, where.extra - 1)


def always_first_tile(tile, where):
  """Visits of a group stay at its first tile."""
  start, tm, tiles = where.extra
  return jnp.clip(start // tm, 0, tiles - 1)


def blocks_backwards(i, where):
  """The weights' blocks along k come in the opposite order."""
  return where.extra - 1 - i

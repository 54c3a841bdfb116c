"""The reference's gmm and tgmm: quantize, multiply over ranges, scale, round once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gmm._groups import covered_rows, local_ranges
from gmm._manual_axes import vary_alike
from gmm._qarray import Operand, QArray, expand_scale
from gmm._quantize import apply_prescale, quantize
from gmm.reference._block_sums import block_sums
from gmm.reference._dots import acc_dtype, dot, product_dtype
from gmm.reference._loops import gmm_ranges, tgmm_ranges
from gmm.reference._scales import (
  common_blocks,
  has_row_blocks,
  scale_columns,
  scale_groups,
  scale_rows,
  split,
  unscaled_rows,
  wide_dtype,
)


def gmm(
  lhs: Operand,
  rhs: Operand,
  group_sizes: jax.Array,
  *,
  lhs_quant: Any = None,
  lhs_prescale: jax.Array | None = None,
  group_offset: jax.Array | None = None,
  transpose_rhs: bool = False,
  partial_sum: jax.Array | None = None,
  precision: Any = None,
  preferred_element_type: Any,
  tiling: Any = None,
) -> jax.Array:
  """`Backend.gmm` in plain jax.numpy (SPEC GMM-1 to GMM-14, QNT-1).

  Args:
    lhs: [m, k] array or QArray.
    rhs: [g, k, n], or [g, n, k] with transpose_rhs; array or QArray.
    group_sizes: int32 [num_global_groups], each >= 0, sum at most m.
    lhs_quant, lhs_prescale, group_offset, transpose_rhs, partial_sum, precision,
      preferred_element_type: as in `gmm.Backend`.
    tiling: ignored, the windows are fixed.

  Returns:
    [m, n] of preferred_element_type.
  """
  del tiling
  starts, ends = local_ranges(group_sizes, group_offset, rhs.shape[0])
  lhs = _quantized(lhs, lhs_quant, lhs_prescale, "rows", starts, ends)
  lhs, rhs, starts, ends = vary_alike(lhs, rhs, starts, ends)
  (x, x_scale), (w, w_scale) = split(lhs), split(rhs)
  if transpose_rhs and w_scale is not None:
    w_scale = w_scale.swapaxes(1, 2)  # from here on [., k or blocks, n or blocks]
  (m, k), n = x.shape, w.shape[1 if transpose_rhs else 2]

  if not k:  # sums of nothing, which scales of no block leave alone
    x_scale = w_scale = None
  # 1. Multiply. Scales along k go into the partial sum of their block.
  blocks = common_blocks(k, x_scale, w_scale)
  if blocks == 1:
    out = _plain_gmm(x, w, starts, ends, n, transpose_rhs, precision)
  else:
    out = _block_gmm(x, x_scale, w, w_scale, starts, ends, n, blocks, transpose_rhs, precision)
    # Only scales that are constant along k are left.
    x_scale = None if x_scale is None or x_scale.shape[1] > 1 else x_scale
    w_scale = None if w_scale is None or w_scale.shape[1] > 1 else w_scale
  # 2. Scale, one factor after the other: the product of two scales may not be representable.
  out = out.astype(wide_dtype(out.dtype, preferred_element_type))
  if x_scale is not None or w_scale is not None:
    out = scale_groups(scale_rows(out, x_scale), w_scale, starts, ends)
    # A scale that is NaN must not reach rows that no group owns.
    out = jnp.where(covered_rows(starts, ends, m)[:, None], out, jnp.zeros((), out.dtype))
  # 3. Add and round once.
  if partial_sum is not None:
    out = out + partial_sum.astype(out.dtype)
  return out.astype(preferred_element_type)


def tgmm(
  lhs: Operand,
  dout: Operand,
  group_sizes: jax.Array,
  *,
  num_groups: int,
  lhs_quant: Any = None,
  dout_quant: Any = None,
  dout_prescale: jax.Array | None = None,
  group_offset: jax.Array | None = None,
  precision: Any = None,
  preferred_element_type: Any,
  tiling: Any = None,
) -> jax.Array:
  """`Backend.tgmm` in plain jax.numpy (SPEC TGMM-1 to TGMM-6, QNT-1).

  Args:
    lhs: [m, k] array or QArray.
    dout: [m, n] array or QArray.
    group_sizes: int32 [num_global_groups], each >= 0, sum at most m.
    num_groups: local groups, g.
    lhs_quant, dout_quant, dout_prescale, group_offset, precision,
      preferred_element_type: as in `gmm.Backend`.
    tiling: ignored, the windows are fixed.

  Returns:
    [g, k, n] of preferred_element_type.
  """
  del tiling
  starts, ends = local_ranges(group_sizes, group_offset, num_groups)
  lhs = _quantized(lhs, lhs_quant, None, "cols", starts, ends)
  dout = _quantized(dout, dout_quant, dout_prescale, "cols", starts, ends)
  lhs, dout, starts, ends = vary_alike(lhs, dout, starts, ends)
  wide = wide_dtype(lhs.dtype, dout.dtype)
  # 1. A scale that varies along the rows, which are contracted, goes into its operand; that
  #    of a row block waits for the block's partial sum.
  (x, x_scale), (d, d_scale) = ((y, None) if has_row_blocks(y) else unscaled_rows(y, wide) for y in (lhs, dout))
  # 2. Multiply, and group by group scale, one factor after the other, and round once.
  dtype = product_dtype(split(x)[0].dtype, split(d)[0].dtype)
  out_dtype = jnp.dtype(preferred_element_type)
  scaled = wide_dtype(acc_dtype(dtype), out_dtype)

  def finish(total: jax.Array) -> jax.Array:
    return scale_columns(scale_columns(total.astype(scaled), x_scale, 0), d_scale, 1).astype(out_dtype)

  if isinstance(x, QArray) or isinstance(d, QArray):
    return block_sums(x, d, starts, ends, precision=precision, wide=scaled, finish=finish, out_dtype=out_dtype)
  return tgmm_ranges(
    x,
    d,
    starts,
    ends,
    multiply=lambda x, d: dot(x, d, (0, 0), precision, dtype),
    finish=finish,
    k=x.shape[1],
    n=d.shape[1],
    acc_dtype=acc_dtype(dtype),
    out_dtype=out_dtype,
  )


def _quantized(
  x: Operand, quant: Any, prescale: jax.Array | None, kind: Any, starts: jax.Array, ends: jax.Array
) -> Operand:
  """Does to an operand what the op asked to be done inside the backend (SPEC QNT-8)."""
  if quant is not None:
    assert not isinstance(x, QArray)
    return quantize(x, quant, kind, starts=starts, ends=ends, prescale=prescale)
  if prescale is not None:
    assert not isinstance(x, QArray)
    return apply_prescale(x, prescale, kind, starts, ends)
  return x


def _plain_gmm(
  x: jax.Array, w: jax.Array, starts: jax.Array, ends: jax.Array, n: int, transpose_rhs: bool, precision: Any
) -> jax.Array:
  dtype = product_dtype(x.dtype, w.dtype)
  contract = (1, 1 if transpose_rhs else 0)
  return gmm_ranges(
    x,
    w,
    starts,
    ends,
    multiply=lambda x, w: dot(x, w, contract, precision, dtype),
    prepare=lambda w: w.astype(dtype),
    n=n,
    acc_dtype=acc_dtype(dtype),
  )


def _block_gmm(
  x: jax.Array,
  x_scale: jax.Array | None,
  w: jax.Array,
  w_scale: jax.Array | None,
  starts: jax.Array,
  ends: jax.Array,
  n: int,
  blocks: int,
  transpose_rhs: bool,
  precision: Any,
) -> jax.Array:
  """Sum over blocks of k of (partial sum · lhs block scale) · rhs block scale, in float32."""
  (m, k), g = x.shape, w.shape[0]
  size = k // blocks
  dtype = product_dtype(x.dtype, w.dtype)
  wide = wide_dtype(dtype)
  k_axis = 1 if transpose_rhs else 0
  # Scales of one block each, row by row and group by group, so that they are sliced with
  # their operand: [m, blocks] and [g, blocks, 1 or n or n / b].
  lhs, rhs = {"x": x}, {"w": w}
  if x_scale is not None and x_scale.shape[1] > 1:
    lhs["scale"] = jnp.broadcast_to(expand_scale(x_scale, (m, blocks), wide), (m, blocks))
  if w_scale is not None and w_scale.shape[1] > 1:
    per_block = expand_scale(w_scale, (w_scale.shape[0], blocks, w_scale.shape[2]), wide)
    rhs["scale"] = jnp.broadcast_to(per_block, (g, *per_block.shape[1:]))

  def multiply(lhs: dict[str, jax.Array], rhs: dict[str, jax.Array]) -> jax.Array:
    def block(i: jax.Array) -> jax.Array:
      x = lax.dynamic_slice_in_dim(lhs["x"], i * size, size, axis=1)
      w = lax.dynamic_slice_in_dim(rhs["w"], i * size, size, axis=k_axis)
      part = dot(x, w, (1, k_axis), precision, dtype).astype(wide)
      if "scale" in lhs:
        part = part * lax.dynamic_slice_in_dim(lhs["scale"], i, 1, axis=1)
      if "scale" in rhs:
        row = lax.dynamic_slice_in_dim(rhs["scale"], i, 1, axis=0)
        part = part * expand_scale(row, (1, n), wide)
      return part

    return lax.fori_loop(jnp.int32(1), jnp.int32(blocks), lambda i, acc: acc + block(i), block(jnp.int32(0)))

  prepare = lambda rhs: {**rhs, "w": rhs["w"].astype(dtype)}
  return gmm_ranges(lhs, rhs, starts, ends, multiply=multiply, prepare=prepare, n=n, acc_dtype=wide)

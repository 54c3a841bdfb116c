"""The `xla` backend: `jax.lax.ragged_dot`, what users have today, held to the SPEC.

What `ragged_dot` gets wrong or leaves open is repaired here, at this cost:

- It multiplies a row with the weights of every group and masks by zero, so one NaN or Inf in
  a weight (used or not) reaches every row, and one in a row of tgmm every group. The inputs
  are read once to see whether all are finite; when one is not, each group is multiplied on its
  own (g dense matmuls, about what `ragged_dot` itself costs on CPU).
- Rows that no group owns are unspecified: they are set to zero by one pass over the result
  (tgmm: over both operands).
- `group_offset` is not implemented in it: the rows are rolled so that the first local group
  starts at row 0, and the result is rolled back (one copy of lhs and of the result).
- `vmap` works over all operands at once or not at all: here it runs one after the other.
- Codes are cast to bfloat16 (or float32 when the partner needs it), exactly; pairs of integer
  codes stay int8. Scales are multiplied in afterwards in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gmm._groups import covered_rows, local_ranges
from gmm._manual_axes import vary_alike, vary_over, varying_axes
from gmm._protocol import Backend, Problem, Unsupported
from gmm._qarray import Operand
from gmm.reference._dots import acc_dtype, product_dtype, used_precision
from gmm.reference._scales import scale_columns, scale_groups, scale_rows, split, unscaled_rows, wide_dtype

_WAY_OUT = "Use backend='reference', which can."


def supports(problem: Problem) -> str | None:
  """None, or why this backend declines: scales along the contracting axis, steps inside (SPEC REG-5)."""
  if problem.fused_steps:
    return _refuse_steps(problem.fused_steps)
  if problem.pass_ == "drhs":
    return _refuse_row_blocks(lhs=problem.lhs.row_block, dout=problem.rhs.row_block)
  return _refuse_blocks(problem.lhs.scale_shape, problem.rhs.scale_shape, problem.transpose_rhs)


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
  """`Backend.gmm` on `jax.lax.ragged_dot_general`; arguments and result as there.

  Raises:
    Unsupported: a scale along k, or a step to do inside.
  """
  del tiling  # XLA chooses
  _raise_if(_refuse_steps(_steps(lhs=(lhs_quant, lhs_prescale))))
  (x, x_scale), (w, w_scale) = split(lhs), split(rhs)
  shape = lambda scale: None if scale is None else scale.shape
  _raise_if(_refuse_blocks(shape(x_scale), shape(w_scale), transpose_rhs))
  if transpose_rhs and w_scale is not None:
    w_scale = w_scale.swapaxes(1, 2)

  starts, ends = local_ranges(group_sizes, group_offset, w.shape[0])
  x, w, starts, ends = vary_alike(x, w, starts, ends)
  covered = covered_rows(starts, ends, x.shape[0])[:, None]
  # 1. Multiply, with the first local group moved to row 0 and back.
  dtype = product_dtype(x.dtype, w.dtype)
  shift = jnp.int32(0) if group_offset is None or 0 in w.shape else starts[0]
  rows = x.astype(dtype) if group_offset is None else jnp.roll(x.astype(dtype), -shift, axis=0)
  product = _row_product(contract=2 if transpose_rhs else 1, precision=used_precision(precision, dtype))
  out = product(rows, w.astype(dtype), ends - starts)
  out = out if group_offset is None else jnp.roll(out, shift, axis=0)
  # 2. Scale, one factor after the other, and clear what no group owns.
  out = out.astype(wide_dtype(out.dtype, preferred_element_type))
  out = scale_groups(scale_rows(out, x_scale), w_scale, starts, ends)
  out = jnp.where(covered, out, jnp.zeros((), out.dtype))
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
  """`Backend.tgmm` on `jax.lax.ragged_dot_general`; arguments and result as there.

  Raises:
    Unsupported: scales of blocks of rows, or a step to do inside.
  """
  del tiling  # XLA chooses
  _raise_if(_refuse_steps(_steps(lhs=(lhs_quant, None), dout=(dout_quant, dout_prescale))))
  _raise_if(_refuse_row_blocks(lhs=getattr(lhs, "row_block", None), dout=getattr(dout, "row_block", None)))
  wide = wide_dtype(lhs.dtype, dout.dtype)
  (x, x_scale), (d, d_scale) = unscaled_rows(lhs, wide), unscaled_rows(dout, wide)
  starts, ends = local_ranges(group_sizes, group_offset, num_groups)
  x, d, starts, ends = vary_alike(x, d, starts, ends)
  covered = covered_rows(starts, ends, x.shape[0])[:, None]
  # 1. Multiply, with the first local group moved to row 0; what no group owns becomes zero.
  dtype = product_dtype(x.dtype, d.dtype)
  shift = jnp.int32(0) if group_offset is None or num_groups == 0 else starts[0]
  rows = lambda y: jnp.where(covered, y.astype(dtype), jnp.zeros((), dtype))
  moved = lambda y: rows(y) if group_offset is None else jnp.roll(rows(y), -shift, axis=0)
  out = _group_product(precision=used_precision(precision, dtype))(moved(x), moved(d), ends - starts)
  # 2. Scale, one factor after the other; a scale that is NaN must not reach empty groups.
  out = out.astype(wide_dtype(out.dtype, preferred_element_type))
  out = scale_columns(scale_columns(out, x_scale, 0), d_scale, 1)
  out = jnp.where((ends > starts)[:, None, None], out, jnp.zeros((), out.dtype))
  return out.astype(preferred_element_type)


backend = Backend(name="xla", gmm=gmm, tgmm=tgmm, supports=supports, auto_rank=(("gpu", 10),))


def _row_product(*, contract: int, precision: Any) -> Callable[..., jax.Array]:
  """(x [m, k], w, sizes [g]) -> [m, n] for groups from row 0 on; rows past them are unspecified."""
  dims = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (contract,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
  )

  @jax.custom_batching.sequential_vmap
  def product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    ragged = lambda x, w, sizes: lax.ragged_dot_general(
      x, w, sizes, dims, precision=precision, preferred_element_type=acc_dtype(x.dtype)
    )

    def one_by_one() -> jax.Array:
      m, ends = x.shape[0], jnp.cumsum(sizes, dtype=jnp.int32)
      row = jnp.arange(m, dtype=jnp.int32)[:, None]

      def group(j: jax.Array, out: jax.Array) -> jax.Array:
        rows = ragged(x, lax.dynamic_slice_in_dim(w, j, 1), jnp.full((1,), m, jnp.int32))
        return jnp.where((row >= ends[j] - sizes[j]) & (row < ends[j]), rows, out)

      return _over_groups(group, (m, w.shape[3 - contract]), x, w, sizes)

    return _if_finite((w,), lambda: ragged(x, w, sizes), one_by_one)

  return product


def _group_product(*, precision: Any) -> Callable[..., jax.Array]:
  """(x [m, k], d [m, n], sizes [g]) -> [g, k, n] for groups from row 0 on; rows past them must be zero."""
  dims = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
  )

  @jax.custom_batching.sequential_vmap
  def product(x: jax.Array, d: jax.Array, sizes: jax.Array) -> jax.Array:
    ragged = lambda x, d, sizes: lax.ragged_dot_general(
      x, d, sizes, dims, precision=precision, preferred_element_type=acc_dtype(x.dtype)
    )

    def one_by_one() -> jax.Array:
      m, ends = x.shape[0], jnp.cumsum(sizes, dtype=jnp.int32)
      row = jnp.arange(m, dtype=jnp.int32)[:, None]

      def group(j: jax.Array, out: jax.Array) -> jax.Array:
        own = (row >= ends[j] - sizes[j]) & (row < ends[j])
        only = lambda y: jnp.where(own, y, jnp.zeros((), y.dtype))
        total = ragged(only(x), only(d), jnp.full((1,), m, jnp.int32))
        return lax.dynamic_update_slice_in_dim(out, total, j, axis=0)

      return _over_groups(group, (sizes.shape[0], x.shape[1], d.shape[1]), x, d, sizes)

    return _if_finite((x, d), lambda: ragged(x, d, sizes), one_by_one)

  return product


def _over_groups(
  group: Callable[[jax.Array, jax.Array], jax.Array],
  shape: tuple[int, ...],
  x: jax.Array,
  y: jax.Array,
  sizes: jax.Array,
) -> jax.Array:
  zeros = vary_over(varying_axes(x, y, sizes), jnp.zeros(shape, acc_dtype(x.dtype)))
  return lax.fori_loop(0, sizes.shape[0], group, zeros) if sizes.shape[0] else zeros


def _if_finite(
  operands: tuple[jax.Array, ...], fast: Callable[[], jax.Array], exact: Callable[[], jax.Array]
) -> jax.Array:
  """fast() when all operands are finite, else exact(); integers always are."""
  floats = [x for x in operands if jnp.issubdtype(x.dtype, jnp.floating)]
  if not floats:
    return fast()
  finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]).all()
  return lax.cond(finite, fast, exact)


def _steps(**operands: tuple[Any, Any]) -> tuple[str, ...]:
  return tuple(f"quantize or scale {name}" for name, asked in operands.items() if any(a is not None for a in asked))


def _refuse_steps(steps: tuple[str, ...]) -> str | None:
  if not steps:
    return None
  return f"xla only multiplies and cannot {', '.join(steps)} inside; do it before the call. {_WAY_OUT}"


def _refuse_blocks(
  lhs_scale: tuple[int, ...] | None, rhs_scale: tuple[int, ...] | None, transpose_rhs: bool
) -> str | None:
  for name, shape, axis in (("lhs", lhs_scale, 1), ("rhs", rhs_scale, 2 if transpose_rhs else 1)):
    if shape is not None and shape[axis] > 1:
      return f"xla needs scales that are constant along k; {name}.scale has shape {shape}. {_WAY_OUT}"
  return None


def _refuse_row_blocks(**operands: int | None) -> str | None:
  for name, block in operands.items():
    if block is not None:
      return (
        f"xla needs scales that are constant along the rows of a group; {name} has one per {block} rows. {_WAY_OUT}"
      )
  return None


def _raise_if(reason: str | None) -> None:
  if reason is not None:
    raise Unsupported(reason)

"""The backend: what the kernels need around them, and what is declined."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import gmm
from my_backend import _kernels
from my_backend._segments import segments

_FLOATS = ("float32", "bfloat16")
# Their values are exact in bfloat16, so the kernels multiply them as bfloat16.
_CODES = ("int8", "float8_e4m3fn", "float8_e5m2")
_TILE = (128, 512, 512)


@functools.cache
def backend() -> gmm.Backend:
  """Returns the backend: natively on TPU, in Pallas's interpreter elsewhere."""
  return gmm.Backend(
    name="my_backend",
    gmm=_gmm,
    tgmm=_tgmm,
    supports=_supports,
    int_accumulator="float32",  # int8 codes are multiplied as bfloat16
    interpreted=_interpreted,
  )


def _interpreted() -> bool:
  return jax.default_backend() != "tpu"


def _supports(problem: gmm.Problem) -> str | None:
  """None, or what cannot be done and the way out; the op raises `gmm.Unsupported` with it."""
  if problem.fused_steps:
    return f"It does not {problem.fused_steps[0]} inside; do that before the call."
  contracted = {"lhs": 0 if problem.pass_ == "drhs" else 1, "rhs": 0 if problem.pass_ == "drhs" else 1}
  if problem.transpose_rhs:
    contracted["rhs"] = 2
  for name, operand in (("lhs", problem.lhs), ("rhs", problem.rhs)):
    if operand.dtype not in (*_FLOATS, *_CODES):
      return f"{name} is {operand.dtype}; it multiplies {', '.join((*_FLOATS, *_CODES))}. Use backend='reference'."
    if operand.scale_dtype not in (None, *_FLOATS):
      return f"The scale of {name} is {operand.scale_dtype}, not float32 or bfloat16. Use backend='reference'."
    if operand.scale_shape is not None:
      in_blocks = any(s not in (1, d) for s, d in zip(operand.scale_shape, operand.shape, strict=True))
      if in_blocks or operand.row_block is not None or operand.scale_shape[contracted[name]] != 1:
        return (
          f"{name} has scales {operand.scale_shape} in blocks or along the contracting axis, and scales are multiplied "
          f"into the result: give one per row or output column, or use backend='reference'."
        )
  if problem.out_dtype == "float64":
    return "The result is float64, and it accumulates in float32. Use backend='reference'."
  if isinstance(problem.precision, jax.lax.DotAlgorithmPreset):
    return f"precision is the preset {problem.precision.name}; give a jax.lax.Precision."
  return _tiling_fault(problem)


def _tiling_fault(problem: gmm.Problem) -> str | None:
  """What a TPU cannot take of an explicit tiling, or None."""
  if problem.tiling is None:
    return None
  tile_m, tile_k, tile_n = problem.tiling
  if tile_m % 16 or tile_k % 128 or tile_n % 128:
    return f"tiling is {problem.tiling}; tile_m must be a multiple of 16, tile_k and tile_n of 128."
  return None


def _gmm(
  lhs: jax.Array | gmm.QArray,
  rhs: jax.Array | gmm.QArray,
  group_sizes: jax.Array,
  *,
  group_offset: jax.Array | None = None,
  transpose_rhs: bool = False,
  partial_sum: jax.Array | None = None,
  precision: Any = None,
  preferred_element_type: Any,
  tiling: tuple[int, int, int] | None = None,
  lhs_quant: None = None,
  lhs_prescale: None = None,
) -> jax.Array:
  """[m, n]; arguments as in `gmm.Backend`."""
  del lhs_quant, lhs_prescale  # declined
  (x, x_scale), (w, w_scale) = _split(lhs), _split(rhs)
  if transpose_rhs and w_scale is not None:
    w_scale = w_scale.swapaxes(1, 2)  # [1 or g, 1, n]
  (m, k), (g, n) = x.shape, (w.shape[0], w.shape[1 if transpose_rhs else 2])
  starts, ends = _local_ranges(group_sizes, group_offset, g)
  covered, group = _owners(starts, ends, m)
  if 0 in (m, k, n, g):
    out = jnp.zeros((m, n), jnp.float32)
  else:
    # 1. Pad to whole tiles: padded rows belong to no group, padded k adds 0 * 0.
    x, w = _same_dtype(x, w)
    tile = _tile(tiling, (m, k, n))
    k_axis, n_axis = (2, 1) if transpose_rhs else (1, 2)
    x = _pad(x, {0: tile[0], 1: tile[1]})
    w = _pad(w, {k_axis: tile[1], n_axis: tile[2]})
    # 2. Multiply.
    table = segments(starts, ends, x.shape[0], tile[0])
    x, w, table = _vary_alike(x, w, table)
    out = _kernels.gmm(
      x,
      w,
      table,
      tile=tile,
      transpose_rhs=transpose_rhs,
      precision=_precision(precision, x),
      interpret=_interpreted(),
    )[:m, :n]
  # 3. Scales: one per row, then one per column of the row's group. Then rows of no group are cleared,
  #    which a scale of NaN would have reached.
  if x_scale is not None:
    out = out * x_scale.astype(jnp.float32)
  if w_scale is not None and g:
    columns = w_scale[:, 0].astype(jnp.float32)
    out = out * (columns if columns.shape[0] == 1 else columns[group])
  out = jnp.where(covered[:, None], out, 0.0)
  # 4. Add in float32, round once.
  if partial_sum is not None:
    out = out + partial_sum.astype(jnp.float32)
  return out.astype(preferred_element_type)


def _tgmm(
  lhs: jax.Array | gmm.QArray,
  dout: jax.Array | gmm.QArray,
  group_sizes: jax.Array,
  *,
  num_groups: int,
  group_offset: jax.Array | None = None,
  precision: Any = None,
  preferred_element_type: Any,
  tiling: tuple[int, int, int] | None = None,
  lhs_quant: None = None,
  dout_quant: None = None,
  dout_prescale: None = None,
) -> jax.Array:
  """[g, k, n]; arguments as in `gmm.Backend`."""
  del lhs_quant, dout_quant, dout_prescale  # declined
  (x, x_scale), (d, d_scale) = _split(lhs), _split(dout)
  (m, k), n, g = x.shape, d.shape[1], num_groups
  starts, ends = _local_ranges(group_sizes, group_offset, g)
  if 0 in (m, k, n, g):
    out = jnp.zeros((g, k, n), jnp.float32)
  else:
    x, d = _same_dtype(x, d)
    tile = _tile(tiling, (m, k, n))
    x, d = _pad(x, {0: tile[0], 1: tile[1]}), _pad(d, {0: tile[0], 1: tile[2]})
    table = segments(starts, ends, x.shape[0], tile[0])
    x, d, table = _vary_alike(x, d, table)
    out = _kernels.tgmm(
      x, d, table, num_groups=g, tile=tile, precision=_precision(precision, x), interpret=_interpreted()
    )[:, :k, :n]
  # Scales: one per column of lhs, one per column of dout; one that is NaN must not reach empty groups.
  if x_scale is not None:
    out = out * x_scale.astype(jnp.float32).reshape(1, -1, 1)
  if d_scale is not None:
    out = out * d_scale.astype(jnp.float32).reshape(1, 1, -1)
  return jnp.where((ends > starts)[:, None, None], out, 0.0).astype(preferred_element_type)


def _split(x: jax.Array | gmm.QArray) -> tuple[jax.Array, jax.Array | None]:
  return (x.qvalue, x.scale) if isinstance(x, gmm.QArray) else (x, None)


def _local_ranges(sizes: jax.Array, offset: jax.Array | None, g: int) -> tuple[jax.Array, jax.Array]:
  """int32 [g] each: rows [start, end) of the local groups. One outside the global groups has no rows."""
  borders = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])
  first = jnp.int32(0) if offset is None else jnp.asarray(offset, jnp.int32)
  at = jnp.clip(first + jnp.arange(g + 1, dtype=jnp.int32), 0, sizes.shape[0])
  return borders[at[:-1]], borders[at[1:]]


def _owners(starts: jax.Array, ends: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
  """([m] whether a local group owns the row, [m] which one: any where none does)."""
  row = jnp.arange(m, dtype=jnp.int32)
  if not starts.shape[0]:
    return jnp.zeros((m,), bool), row
  group = jnp.searchsorted(ends, row, side="right")
  return (row >= starts[0]) & (row < ends[-1]), jnp.minimum(group, ends.shape[0] - 1)


def _same_dtype(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Both as float32 if one is, else as bfloat16."""
  dtype = jnp.float32 if jnp.float32 in (a.dtype, b.dtype) else jnp.bfloat16
  return a.astype(dtype), b.astype(dtype)


def _precision(precision: Any, x: jax.Array) -> Any:
  """float32 is multiplied as float32 unless asked otherwise (SPEC GMM-7); bfloat16 has only one precision."""
  if x.dtype == jnp.bfloat16:
    return jax.lax.Precision.DEFAULT
  return jax.lax.Precision.HIGHEST if precision in (None, jax.lax.Precision.HIGH) else precision


def _tile(tiling: tuple[int, int, int] | None, dims: tuple[int, int, int]) -> tuple[int, int, int]:
  """The tiling asked for, or `_TILE`, no larger than the padded operands."""
  if tiling is not None:
    return tiling
  up = lambda size, to: -(-size // to) * to
  tile_m, tile_k, tile_n = _TILE
  return min(tile_m, up(dims[0], 16)), min(tile_k, up(dims[1], 128)), min(tile_n, up(dims[2], 128))


def _pad(x: jax.Array, tiles: dict[int, int]) -> jax.Array:
  """Zeros at the end of the given axes, up to whole tiles."""
  return jnp.pad(x, [(0, -size % tiles.get(axis, 1)) for axis, size in enumerate(x.shape)])


def _vary_alike(*xs: jax.Array) -> tuple[jax.Array, ...]:
  """The operands as values that differ over the same mesh axes, as a kernel inside a shard_map needs them."""
  varying = lambda x: jax.typeof(x).manual_axis_type.varying
  axes = frozenset[str]().union(*(varying(x) for x in xs))
  missing = lambda x: tuple(sorted(axes - varying(x)))
  return tuple(jax.lax.pcast(x, missing(x), to="varying") if missing(x) else x for x in xs)

"""Arguments of the public ops, checked before anything is traced or compiled (SPEC REG-6)."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from gmm._qarray import CODE_DTYPES, Operand, QArray, is_code_dtype
from gmm._row_blocks import num_row_blocks

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def operand(x: Any, name: str, ndim: int) -> Operand:
  """Returns x as a float array or a well-formed `QArray`.

  Raises:
    TypeError: a dtype that is neither float nor codes with a scale.
    ValueError: wrong rank; codes without a scale; a scale that does not fit its codes.
  """
  if hasattr(x, "qvalue") and hasattr(x, "scale"):
    return _qarray(x, name, ndim)
  x = _array(x, name)
  if is_code_dtype(x.dtype):
    raise ValueError(
      f"{name} has dtype {x.dtype}: codes without their scale. Pass gmm.QArray(qvalue, scale), or a float array "
      f"and a recipe that quantizes it."
    )
  if x.dtype.name not in _FLOATS:
    raise TypeError(f"{name} has dtype {x.dtype}; needed: {', '.join(_FLOATS)}, or a gmm.QArray.")
  if x.ndim != ndim:
    raise ValueError(f"{name} has shape {x.shape}; it needs {ndim} dimensions, {_LAYOUT[name]}.")
  return x


_LAYOUT = {
  "lhs": "[m, k]",
  "rhs": "[g, k, n] ([g, n, k] with transpose_rhs=True)",
  "dout": "[m, n]",
  "partial_sum": "[m, n]",
  "existing_out": "[m, n]",
}


def _array(x: Any, name: str) -> jax.Array:
  if not isinstance(x, (jax.Array, np.ndarray)):
    raise TypeError(f"{name} must be an array or a gmm.QArray, got {type(x).__name__}.")
  return jnp.asarray(x)


def _qarray(x: Any, name: str, ndim: int) -> QArray:
  if getattr(x, "zero_point", None) is not None:
    raise ValueError(f"{name} has a zero_point: only symmetric quantization is defined. Quantize it without one.")
  qtype = getattr(x, "qtype", None)
  if qtype is not None and (str(qtype) in ("nf4",) or jnp.dtype(qtype) != x.qvalue.dtype):
    raise ValueError(f"{name} has qtype {qtype} stored as {x.qvalue.dtype}; needed: one of {', '.join(CODE_DTYPES)}.")
  qvalue, scale = _array(x.qvalue, f"{name}.qvalue"), _array(x.scale, f"{name}.scale")
  if not is_code_dtype(qvalue.dtype):
    raise TypeError(f"{name}.qvalue has dtype {qvalue.dtype}; needed: one of {', '.join(CODE_DTYPES)}.")
  if scale.dtype.name not in _FLOATS:
    raise TypeError(f"{name}.scale has dtype {scale.dtype}; needed: one of {', '.join(_FLOATS)}.")
  if qvalue.ndim != ndim:
    raise ValueError(f"{name}.qvalue has shape {qvalue.shape}; it needs {ndim} dimensions, {_LAYOUT[name]}.")
  row_block = getattr(x, "row_block", None)
  if row_block is not None and scale.ndim == ndim == 2:
    return QArray(qvalue, scale, row_block)  # how many blocks there are depends on the groups: checked by tgmm
  fits = scale.ndim == ndim and all(
    s == 1 or (s > 0 and q % s == 0) for q, s in zip(qvalue.shape, scale.shape, strict=True)
  )
  if not fits:
    raise ValueError(
      f"{name}.scale has shape {scale.shape}; for codes of shape {qvalue.shape} it needs {ndim} dimensions, each 1 "
      f"or a divisor of the one in the codes (blocks)."
    )
  return QArray(qvalue, scale)


def group_sizes(sizes: Any, m: int) -> jax.Array:
  """Returns an integer vector; concrete sizes must be >= 0 with a sum of at most m (SPEC GMM-6)."""
  if isinstance(sizes, (list, tuple)):
    sizes = np.asarray(sizes, np.int64 if not sizes else None)
  if not isinstance(sizes, (jax.Array, np.ndarray)):
    raise TypeError(f"group_sizes must be an integer vector, got {type(sizes).__name__}.")
  if not jnp.issubdtype(sizes.dtype, jnp.integer):
    raise TypeError(f"group_sizes has dtype {sizes.dtype}; it needs an integer dtype, one size per group.")
  if sizes.ndim != 1:
    raise ValueError(f"group_sizes has shape {sizes.shape}; it needs one dimension, [groups].")
  if not isinstance(sizes, jax.core.Tracer):
    values = np.asarray(sizes).astype(np.int64)
    if values.size and values.min() < 0:
      at = int(values.argmin())
      raise ValueError(f"group_sizes[{at}] is {values[at]}; sizes must be >= 0.")
    if values.sum() > m:
      raise ValueError(
        f"group_sizes sum to {values.sum()}, but lhs has only m = {m} rows; the sum must be at most m "
        f"(rows past it belong to no group)."
      )
    if isinstance(sizes, np.ndarray):
      sizes = values.astype(np.int32)  # at most m, so it fits
  return jnp.asarray(sizes)


def group_offset(offset: Any, num_groups: int, num_global: int) -> jax.Array | None:
  """Returns None or an int32 scalar; a concrete one must leave the local groups among the global ones (SPEC GMM-5)."""
  if offset is None:
    if num_groups != num_global:
      raise ValueError(
        f"rhs holds {num_groups} groups but group_sizes has {num_global}. Give one size per group, or group_offset, "
        f"the index of the first local group, when rhs is a shard."
      )
    return None
  if isinstance(offset, numbers.Integral) and not isinstance(offset, bool):
    array = np.asarray(offset)
  elif isinstance(offset, (jax.Array, np.ndarray)):
    array = offset
  else:
    raise TypeError(f"group_offset must be an int or an integer array, got {type(offset).__name__}.")
  if not jnp.issubdtype(array.dtype, jnp.integer):
    raise TypeError(f"group_offset has dtype {array.dtype}; it needs an integer dtype.")
  if array.shape not in ((), (1,)):
    raise ValueError(f"group_offset has shape {array.shape}; it needs () or (1,).")
  array = array.reshape(())
  if not isinstance(array, jax.core.Tracer):
    value = int(array)
    if not 0 <= value <= num_global - num_groups:
      raise ValueError(
        f"group_offset is {value}; with {num_groups} local groups out of {num_global} it must be in "
        f"[0, {num_global - num_groups}]."
      )
    return jnp.asarray(value, jnp.int32)
  # Any offset past either end means that no local group exists: keep it so when narrowing.
  array = jnp.asarray(array)
  if array.dtype.itemsize < 4:
    return array.astype(jnp.int32)
  low = 0 if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else -num_groups
  return jnp.clip(array, low, num_global).astype(jnp.int32)


def float_dtype(dtype: Any, name: str, default: Any) -> str:
  """Returns the name of a float dtype of at least two bytes; None means the default."""
  if dtype is None:
    dtype = default
  try:
    found = jnp.dtype(dtype)
  except TypeError:
    raise TypeError(f"{name} must be a float dtype, got {dtype!r}.") from None
  if found.name not in _FLOATS:
    raise ValueError(f"{name} is {found.name}; needed: {', '.join(_FLOATS)}.")
  if found == jnp.float64 and not jax.config.read("jax_enable_x64"):
    raise ValueError(f"{name} is float64, which needs jax.config.update('jax_enable_x64', True).")
  return found.name


def same_mesh_rule(**operands: Any) -> None:
  """Refuses operands that an Explicit mesh axis shards: the partition must be written (SPEC GMM-12).

  Raises:
    ValueError: names the operand, its axes and the shard_map to write.
  """
  for name, value in operands.items():
    for leaf in jax.tree.leaves(value):
      sharding = getattr(jax.typeof(leaf), "sharding", None)
      spec = getattr(sharding, "spec", None)
      if spec is not None and any(axis is not None for axis in spec):
        raise ValueError(
          f"{name} is sharded as {spec} over an Explicit mesh axis, and how groups are split is yours to say. "
          f"Wrap the call: jax.shard_map(lambda lhs, rhs, group_sizes: gmm.gmm(lhs, rhs, group_sizes, ...), "
          f"in_specs=..., out_specs=...), with group_sizes and group_offset of each shard."
        )


def result_like(x: Any, name: str, shape: tuple[int, int]) -> jax.Array | None:
  """Returns None or a float array of the result's shape."""
  if x is None:
    return None
  if hasattr(x, "qvalue"):
    raise TypeError(f"{name} must be a float array of shape {shape}, got a quantized operand.")
  x = operand(x, name, 2)
  if x.shape != shape:
    raise ValueError(f"{name} has shape {x.shape}; it needs the result's, {shape}.")
  assert isinstance(x, jax.Array)
  return x


def scales_fit_gmm(lhs: Operand, rhs: Operand, transpose_rhs: bool) -> None:
  """Checks which axes of each operand of gmm may have a scale of their own (SPEC QNT-3)."""
  if isinstance(lhs, QArray) and lhs.row_block is not None:
    raise ValueError(
      f"lhs has scales of blocks of {lhs.row_block} rows (row_block), which are for tgmm, where rows are contracted. "
      f'Quantize it with kind="rows".'
    )
  if isinstance(lhs, QArray) and lhs.scale.shape[0] not in (1, lhs.shape[0]):
    raise ValueError(
      f"lhs.scale has shape {lhs.scale.shape}; its first dimension must be 1 (shared) or m = {lhs.shape[0]}."
    )
  if isinstance(rhs, QArray) and rhs.scale.shape[0] not in (1, rhs.shape[0]):
    raise ValueError(
      f"rhs.scale has shape {rhs.scale.shape}; its first dimension must be 1 (shared over groups) or "
      f"g = {rhs.shape[0]}. A scale per output column is {'[1 or g, n, 1]' if transpose_rhs else '[1 or g, 1, n]'}."
    )


def scales_fit_tgmm(lhs: Operand, dout: Operand, num_groups: int) -> None:
  """Checks that scales of tgmm do not vary along the rows, which are contracted, but by row block (SPEC QNT-3)."""
  for name, x in (("lhs", lhs), ("dout", dout)):
    if isinstance(x, QArray) and x.row_block is not None:
      blocks = num_row_blocks(x.shape[0], num_groups, x.row_block)
      if x.scale.shape != (blocks, x.shape[1]):
        raise ValueError(
          f"{name}.scale has shape {x.scale.shape}; with blocks of {x.row_block} rows in {num_groups} groups it needs "
          f"({blocks}, {x.shape[1]})."
        )
    elif isinstance(x, QArray) and (x.scale.shape[0] != 1 or x.scale.shape[1] not in (1, x.shape[1])):
      raise ValueError(
        f"{name}.scale has shape {x.scale.shape}; tgmm contracts over rows, so it needs (1, 1) or (1, {x.shape[1]}). "
        f"Multiply a scale per row into the other operand."
      )


def num_groups(value: int | None, num_global: int, has_offset: bool) -> int:
  """Local groups of a tgmm; a shard must say how many it holds."""
  if value is None:
    if has_offset:
      raise ValueError("group_offset needs num_groups, the number of local groups that tgmm returns.")
    return num_global
  if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not 0 <= value <= num_global:
    raise ValueError(f"num_groups must be an int in [0, {num_global}] (the length of group_sizes), got {value!r}.")
  return int(value)


def precision(value: Any) -> Any:
  """Returns a hashable precision that `jax.lax.dot` takes."""
  if value is None or isinstance(value, (jax.lax.Precision, jax.lax.DotAlgorithmPreset)):
    return value
  if isinstance(value, str):
    try:
      return jax.lax.Precision(value)
    except ValueError:
      names = ", ".join(sorted({p.name.lower() for p in jax.lax.Precision}))
      raise ValueError(f"precision {value!r} is not known; needed: None, {names}, or a jax.lax.Precision.") from None
  raise TypeError(f"precision must be None, a name or a jax.lax.Precision, got {value!r}.")

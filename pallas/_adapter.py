"""What a public TPU kernel needs around it to keep SPEC, shared by the adapters.

The kernels multiply float32 or bfloat16 rows that fill whole tiles, for group sizes that add
up to all rows. Around them, in plain jax.numpy:

- Groups: sizes become [rows before, the local groups, rows after], which always add up to the
  padded rows, and the kernel is given the local groups as a shard of these (group_offset = 1).
  So slack rows, padding and a group_offset are one case.
- Rows: m is padded to the tile, and rows of no local group are zeroed before and selected to
  zero after, so that nothing in them is ever multiplied. Cost: one pass over lhs and one over
  the result.
- Many rows: the kernels find the group of each row tile with a float32 histogram, which errs
  from about 4100 row tiles on. More than `_MOST_TILES` are done in several calls. Cost: one more
  pass over the result.
- Codes: fp8 and int8 are exact in bfloat16 (or float32 beside a float32 operand), so they are
  cast, and their scales multiply the float32 result outside: one more pass over the result.
- vmap and shard_map: see `_opaque`; vmap calls the kernel once for each element.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gmm._groups import covered_rows, local_ranges, row_groups
from gmm._protocol import Backend, Problem, Tile, Unsupported, operand_spec
from gmm._qarray import Operand, QArray
from gmm.pallas._opaque import opaque

# Row tiles of one kernel call. Tile i is counted in the bin that begins at i * (T - 1) / T of T
# tiles: near the end 1 / T from the tile before, which at 2048 is still 4 float32 spacings.
_MOST_TILES = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """A public kernel as the adapter calls it.

  Attributes:
    name: of the backend.
    gmm: (lhs [m, k], rhs [g, k, n] or [g, n, k], sizes int32 [g + 2], *, tile, transpose_rhs,
      precision, interpret) -> float32 [m, n]; m is a multiple of tile_m, sizes add up to m and
      rhs holds the groups 1 to g of them.
    tgmm: (lhs [m, k], dout [m, n], sizes int32 [g + 2], *, num_groups, tile, precision,
      interpret) -> float32 [g, k, n].
    auto_rank: as in `Backend`.
  """

  name: str
  gmm: Callable[..., jax.Array]
  tgmm: Callable[..., jax.Array]
  auto_rank: tuple[tuple[str, int], ...]


def make_backend(kernel: Kernel, interpret: bool | None) -> Backend:
  """Returns the backend of a kernel; interpret None looks at the platform when it is called."""
  return Backend(
    name=kernel.name,
    gmm=_Call(_gmm, kernel, interpret),
    tgmm=_Call(_tgmm, kernel, interpret),
    supports=_Call(_supports, kernel, interpret),
    auto_rank=kernel.auto_rank,
    int_accumulator="float32",  # int8 codes go through the bfloat16 kernel
    interpreted=_Call(_is_interpreted, kernel, interpret),
  )


@dataclasses.dataclass(frozen=True)
class _Call:
  """`function` of this kernel: a partial application that is equal by value, as a Backend must be."""

  function: Callable[..., Any]
  kernel: Kernel
  interpret: bool | None

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self.function(self.kernel, self.interpret, *args, **kwargs)


class _Run(NamedTuple):
  """A kernel with its static arguments, hashable so that a program is compiled once."""

  kernel: Callable[..., jax.Array]
  tile: Tile
  precision: Any
  interpret: bool
  transpose_rhs: bool | None = None
  num_groups: int | None = None

  def __call__(self, *operands: jax.Array) -> jax.Array:
    given = {k: v for k, v in self._asdict().items() if v is not None or k == "precision"}
    del given["kernel"]
    return self.kernel(*operands, **given)


def _is_interpreted(kernel: Kernel, interpret: bool | None) -> bool:
  del kernel
  return jax.default_backend() != "tpu" if interpret is None else interpret


def _supports(kernel: Kernel, interpret: bool | None, problem: Problem) -> str | None:
  del interpret
  use = f"Use backend='reference', which can, instead of {kernel.name!r}."
  if problem.fused_steps:
    return f"It does not {problem.fused_steps[0]} inside: do that outside."
  for name, operand, contracted in (
    ("lhs", problem.lhs, 0 if problem.pass_ == "drhs" else 1),
    ("rhs", problem.rhs, 0 if problem.pass_ == "drhs" else 2 if problem.transpose_rhs else 1),
  ):
    if operand.dtype == "int4":
      return f"{name} has int4 codes, which the kernel does not take; int8 and fp8 it does. {use}"
    if "float64" in (operand.dtype, operand.scale_dtype):
      return f"{name} is float64, and the kernel multiplies float32 at most. {use}"
    if operand.scale_shape is not None:
      blocks = [s not in (1, d) for s, d in zip(operand.scale_shape, operand.shape, strict=True)]
      if operand.row_block is not None or operand.scale_shape[contracted] != 1 or any(blocks):
        return (
          f"{name} has a scale {operand.scale_shape} in blocks or along the contracting axis, and scales are "
          f"multiplied into the result here: one per row or output column is needed. {use}"
        )
  if problem.out_dtype == "float64":
    return f"The result is float64, and the kernel accumulates in float32. {use}"
  if isinstance(problem.precision, jax.lax.DotAlgorithmPreset):
    return f"precision is the preset {problem.precision.name}; give a jax.lax.Precision. {use}"
  return _tiling_fault(problem.tiling, (problem.m, problem.k, problem.n))


def _refuse_unsupported(kernel: Kernel, interpret: bool | None, **problem: Any) -> None:
  """Raises for what `_supports` declines, also where a caller did not ask (SPEC REG-5)."""
  reason = _supports(kernel, interpret, Problem(platform=jax.default_backend(), **problem))
  if reason is not None:
    raise Unsupported(f"Backend {kernel.name!r} cannot do this {problem['pass_']} call: {reason}")


def _gmm(
  kernel: Kernel,
  interpret: bool | None,
  lhs: Operand,
  rhs: Operand,
  group_sizes: jax.Array,
  *,
  lhs_quant: Any = None,
  lhs_prescale: Any = None,
  group_offset: jax.Array | None = None,
  transpose_rhs: bool = False,
  partial_sum: jax.Array | None = None,
  precision: Any = None,
  preferred_element_type: Any,
  tiling: Tile | None = None,
) -> jax.Array:
  """`Backend.gmm` around a kernel."""
  (x, x_scale), (w, w_scale) = _split(lhs), _split(rhs)
  (m, k), (g, n) = x.shape, (w.shape[0], w.shape[1 if transpose_rhs else 2])
  _refuse_unsupported(
    kernel,
    interpret,
    pass_="fwd",
    m=m,
    k=k,
    n=n,
    num_groups=g,
    num_global_groups=group_sizes.shape[0],
    lhs=operand_spec(lhs, lhs_quant, lhs_prescale),
    rhs=operand_spec(rhs),
    out_dtype=jnp.dtype(preferred_element_type).name,
    transpose_rhs=transpose_rhs,
    precision=precision,
    tiling=tiling,
  )
  x, w = _same_float(x, w)
  starts, ends = local_ranges(group_sizes, group_offset, g)
  covered = covered_rows(starts, ends, m)[:, None]
  if 0 in (m, k, n, g):
    out = jnp.zeros((m, n), jnp.float32)
  else:
    interpreted = _is_interpreted(kernel, interpret)
    tile = _tile(tiling, (m, k, n), g, x.dtype, drhs=False, interpreted=interpreted)
    # 1. Rows: padded to the tile, and zero where no local group owns them.
    rows = _pad_rows(jnp.where(covered, x, jnp.zeros((), x.dtype)), tile[0])
    run = _Run(
      kernel.gmm, tile=tile, transpose_rhs=transpose_rhs, precision=_precision(precision, x), interpret=interpreted
    )
    # 2. Multiply in calls of whole tiles. In each the groups' sizes add up to its rows, and the
    #    local groups are 1 to g.
    parts = [
      opaque(run, (b - a, n), rows[a:b], w, _all_sizes(starts, ends, a, b), interpreted=interpreted)
      for a, b in _calls(rows.shape[0], tile[0])
    ]
    # 3. Keep the rows that a local group owns: the others were never written.
    out = jnp.where(covered, jnp.concatenate(parts)[:m], 0.0)
  # 4. Scales, one after the other; one that is NaN must not reach rows of no group.
  if x_scale is not None:
    out = out * x_scale.astype(jnp.float32)
  if w_scale is not None and g:
    columns = (w_scale.swapaxes(1, 2) if transpose_rhs else w_scale)[:, 0, :].astype(jnp.float32)
    out = out * (columns if columns.shape[0] == 1 else columns[row_groups(starts, ends, m)])
  out = jnp.where(covered, out, 0.0)
  # 5. Add, and round once.
  if partial_sum is not None:
    out = out + partial_sum.astype(jnp.float32)
  return out.astype(preferred_element_type)


def _tgmm(
  kernel: Kernel,
  interpret: bool | None,
  lhs: Operand,
  dout: Operand,
  group_sizes: jax.Array,
  *,
  num_groups: int,
  lhs_quant: Any = None,
  dout_quant: Any = None,
  dout_prescale: Any = None,
  group_offset: jax.Array | None = None,
  precision: Any = None,
  preferred_element_type: Any,
  tiling: Tile | None = None,
) -> jax.Array:
  """`Backend.tgmm` around a kernel."""
  (x, x_scale), (d, d_scale) = _split(lhs), _split(dout)
  (m, k), n, g = x.shape, d.shape[1], num_groups
  _refuse_unsupported(
    kernel,
    interpret,
    pass_="drhs",
    m=m,
    k=k,
    n=n,
    num_groups=g,
    num_global_groups=group_sizes.shape[0],
    lhs=operand_spec(lhs, lhs_quant),
    rhs=operand_spec(dout, dout_quant, dout_prescale),
    out_dtype=jnp.dtype(preferred_element_type).name,
    precision=precision,
    tiling=tiling,
  )
  x, d = _same_float(x, d)
  starts, ends = local_ranges(group_sizes, group_offset, g)
  if 0 in (m, k, n, g):
    out = jnp.zeros((g, k, n), jnp.float32)
  else:
    interpreted = _is_interpreted(kernel, interpret)
    tile = _tile(tiling, (m, k, n), g, x.dtype, drhs=True, interpreted=interpreted)
    covered = covered_rows(starts, ends, m)[:, None]
    x, d = (_pad_rows(jnp.where(covered, a, jnp.zeros((), a.dtype)), tile[0]) for a in (x, d))
    run = _Run(kernel.tgmm, num_groups=g, tile=tile, precision=_precision(precision, x), interpret=interpreted)
    # A group whose rows are in no call's share adds exactly zero there.
    parts = (
      opaque(run, (g, k, n), x[a:b], d[a:b], _all_sizes(starts, ends, a, b), interpreted=interpreted)
      for a, b in _calls(x.shape[0], tile[0])
    )
    out = functools.reduce(jnp.add, parts)
  if x_scale is not None:
    out = out * x_scale.astype(jnp.float32).reshape(1, -1, 1)
  if d_scale is not None:
    out = out * d_scale.astype(jnp.float32).reshape(1, 1, -1)
  # A scale that is NaN must not reach groups without rows.
  return jnp.where((ends > starts)[:, None, None], out, 0.0).astype(preferred_element_type)


def _split(x: Operand) -> tuple[jax.Array, jax.Array | None]:
  return (x.qvalue, x.scale) if isinstance(x, QArray) else (x, None)


def _same_float(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Both as bfloat16 when that holds both exactly, else as float32, which holds all that is supported."""
  exact = all(x.dtype == jnp.bfloat16 or x.dtype.itemsize == 1 for x in (a, b))
  dtype = jnp.bfloat16 if exact else jnp.float32
  return a.astype(dtype), b.astype(dtype)


def _precision(precision: Any, x: jax.Array) -> Any:
  """The precision that the kernel is asked for.

  float32 operands multiply at float32 precision unless told otherwise (SPEC GMM-7). Products of
  bfloat16 are exact at any, and Mosaic compiles them at the default one only. Mosaic of JAX 0.12
  has HIGH (three passes), that of 0.10 has not: HIGHEST (six) stands in for it.
  """
  if x.dtype == jnp.bfloat16:
    return jax.lax.Precision.DEFAULT
  if precision is None or (precision == jax.lax.Precision.HIGH and jax.__version_info__ < (0, 12)):
    return jax.lax.Precision.HIGHEST
  return precision


def _pad_rows(x: jax.Array, tile_m: int) -> jax.Array:
  return jnp.pad(x, ((0, -x.shape[0] % tile_m), (0, 0)))


def _calls(rows: int, tile_m: int) -> list[tuple[int, int]]:
  """Row ranges, one per kernel call: whole tiles, at most `_MOST_TILES` of them, that cover all rows in order."""
  step = _MOST_TILES * tile_m
  return [(a, min(a + step, rows)) for a in range(0, rows, step)]


def _all_sizes(starts: jax.Array, ends: jax.Array, first: int, last: int) -> jax.Array:
  """int32 [g + 2], what rows [first, last) hold of: rows before the local groups, each group, rows after.

  Their sum is last - first, because local groups are consecutive: starts[j + 1] == ends[j].
  """
  starts, ends = jnp.clip(starts, first, last), jnp.clip(ends, first, last)
  return jnp.concatenate([starts[:1] - first, ends - starts, last - ends[-1:]]).astype(jnp.int32)


def _tile(
  tiling: Tile | None, dims: tuple[int, int, int], groups: int, dtype: Any, *, drhs: bool, interpreted: bool
) -> Tile:
  """The tile (tile_m, tile_k, tile_n) of a call on dims (m, k, n).

  By default, on a TPU, as large as its 16 MiB of VMEM (the least of any generation) were seen to take in a
  compile: every row tile reads the weights anew, so few rows wait for memory. But at most as many rows as an
  average group has, since a tile is multiplied whole for each group in it. An interpreted step costs the
  same whatever it multiplies, so there the tiles are as large as the operands, up to 512 x 4096 x 4096.
  """
  if tiling is not None:  # found legal in `_supports`
    return tiling[0], min(tiling[1], dims[1]), min(tiling[2], dims[2])
  if interpreted:
    most = (512, 4096, 4096)
  else:
    rows = next((r for r in (512, 256) if dims[0] >= r * groups), 128)
    most = (rows, 512, 512) if dtype == jnp.float32 else (rows, 1024, 512 if drhs else 1024)
  m = -(-dims[0] // 16) * 16  # whole sublanes of bfloat16
  return min(most[0], m), min(most[1], dims[1]), min(most[2], dims[2])


def _tiling_fault(tiling: Tile | None, dims: tuple[int, int, int]) -> str | None:
  """What a TPU cannot take of an explicit tile of a call on dims (m, k, n), or None."""
  if tiling is None:
    return None
  wrong = [f"tile_m = {tiling[0]}"] if tiling[0] % 8 else []
  for name, tile, dim in zip(("tile_k", "tile_n"), tiling[1:], dims[1:], strict=True):
    if tile % 128 and tile < dim:
      wrong.append(f"{name} = {tile}")
  if not wrong:
    return None
  return (
    f"tiling has {', '.join(wrong)} for (m, k, n) = {dims}: tile_m must be a multiple of 8, tile_k and tile_n "
    f"multiples of 128 or the whole dimension."
  )

"""Backend `tokamax_v1`: the first TPU kernel of tokamax's ragged_dot.

tokamax's public `ragged_dot` takes no group_offset on TPU, runs on no other platform and needs
k and n of at least 128; the kernel underneath has none of these limits, so it is called itself.
It leaves rows of no group unset and needs m divisible by the tile; `_adapter` says how that is
repaired and at what cost.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from gmm._protocol import Backend, Tile
from gmm.pallas._adapter import Kernel, make_backend


@functools.cache
def backend(interpret: bool | None = None) -> Backend:
  """Returns the backend.

  Args:
    interpret: run the kernel in Pallas's interpreter; None for natively on TPU, interpreted
      elsewhere.
  """
  return make_backend(Kernel(name="tokamax_v1", gmm=_gmm, tgmm=_tgmm, auto_rank=(("tpu", 30),)), interpret)


def _gmm(
  lhs: jax.Array,
  rhs: jax.Array,
  sizes: jax.Array,
  *,
  tile: Tile,
  transpose_rhs: bool,
  precision: Any,
  interpret: bool,
) -> jax.Array:
  from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel as kernel

  n = rhs.shape[1 if transpose_rhs else 2]
  if interpret:
    _, tile_k, tile_n = tile
    lhs = _whole_tiles(lhs, (1, tile_k))
    rhs = _whole_tiles(rhs, (1, tile_n, tile_k) if transpose_rhs else (1, tile_k, tile_n))
  with _environment():
    out = kernel.gmm(
      lhs,
      rhs,
      sizes,
      precision=_canonical(precision),
      out_dtype=jnp.dtype(jnp.float32),
      tiling=tile,
      group_offset=jnp.int32(1),
      transpose_rhs=transpose_rhs,
      interpret=interpret,
    )
  return out[:, :n]


def _tgmm(
  lhs: jax.Array,
  dout: jax.Array,
  sizes: jax.Array,
  *,
  num_groups: int,
  tile: Tile,
  precision: Any,
  interpret: bool,
) -> jax.Array:
  from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel as kernel

  k, n = lhs.shape[1], dout.shape[1]
  if interpret:
    lhs, dout = _whole_tiles(lhs, (1, tile[1])), _whole_tiles(dout, (1, tile[2]))
  with _environment():
    out = kernel.tgmm(
      lhs.swapaxes(0, 1),
      dout,
      sizes,
      precision=_canonical(precision),
      out_dtype=jnp.dtype(jnp.float32),
      tiling=tile,
      group_offset=jnp.int32(1),
      num_actual_groups=num_groups,
      interpret=interpret,
    )
  return out[:, :k, :n]


def _whole_tiles(x: jax.Array, tile: tuple[int, ...]) -> jax.Array:
  """x padded with zeros to whole tiles: the interpreter cannot copy the part of a tile that is left."""
  return jnp.pad(x, [(0, -size % t) for size, t in zip(x.shape, tile, strict=True)])


@contextlib.contextmanager
def _environment() -> Iterator[None]:
  """What tokamax's code needs while it is traced: dtypes that mix, and a TPU to ask about."""
  with jax.numpy_dtype_promotion("standard"), _some_tpu():
    yield


def _some_tpu() -> contextlib.AbstractContextManager[None]:
  """A stand-in where there is no TPU, in the interpreter or compiling ahead of time.

  A chip that is named already, by `jax.sharding.use_abstract_mesh` or by the shard_map around, stays.
  """
  named = jax.sharding.get_abstract_mesh().abstract_device
  if jax.default_backend() == "tpu" or (named is not None and named.platform == "tpu"):
    return contextlib.nullcontext()
  device = jax.sharding.AbstractDevice("TPU v6 lite", 1, "tpu")
  return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def _canonical(precision: Any) -> Any:
  """tokamax's canonical form: one precision for each operand."""
  one = jax.lax.Precision.DEFAULT if precision is None else precision
  return one, one

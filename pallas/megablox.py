"""Backend `megablox`: the grouped matmul kernel that ships in JAX.

The kernel leaves rows of no group unset, needs m divisible by the tile and int32 sizes, takes
float32 and bfloat16 only, and refuses checked shard_maps; `_adapter` says how each is repaired
and at what cost.
"""

from __future__ import annotations

import functools
import importlib
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
  return make_backend(Kernel(name="megablox", gmm=_gmm, tgmm=_tgmm, auto_rank=(("tpu", 40),)), interpret)


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
  kernel = _kernel_module()
  with _matmul_precision(precision):
    return kernel.gmm(
      lhs, rhs, sizes, jnp.float32, tile, jnp.int32(1), transpose_rhs=transpose_rhs, interpret=interpret
    )


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
  kernel = _kernel_module()
  # Its own code mixes dtypes, which strict promotion refuses.
  with _matmul_precision(precision), jax.numpy_dtype_promotion("standard"):
    return kernel.tgmm(
      lhs.swapaxes(0, 1), dout, sizes, jnp.float32, tile, jnp.int32(1), num_groups, interpret=interpret
    )


def _kernel_module() -> Any:
  # The package exports a function of the module's name, which hides the module.
  return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


def _matmul_precision(precision: Any):
  """The kernel has no precision argument: its dots take the default one."""
  return jax.default_matmul_precision("default" if precision is None else precision.name.lower())

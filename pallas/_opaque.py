"""A function as one primitive: vmap loops over it, and a checked shard_map does not look inside.

Public kernels have no batching rule (their grids depend on their operands) and do not say which
mesh axes their results vary over, which `check_vma=True` asks of every pallas_call. As a
primitive of its own the call has a batching rule, and the axes: those of its operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def opaque(run: Callable[..., jax.Array], shape: tuple[int, ...], *operands: jax.Array) -> jax.Array:
  """Calls `run(*operands)`, a float32 array of that shape; `run` must be hashable."""
  return _primitive().bind(*operands, run=run, shape=shape)


@functools.cache
def _primitive() -> Primitive:
  primitive = Primitive("gmm_kernel")

  @primitive.def_abstract_eval
  def _abstract(*operands: Any, run: Any, shape: tuple[int, ...]) -> Any:
    del run
    axes = type(operands[0].manual_axis_type)(varying=_varying_axes(operands))
    return operands[0].update(shape=shape, dtype=jnp.dtype(jnp.float32), weak_type=False, manual_axis_type=axes)

  @primitive.def_impl
  def _impl(*operands: jax.Array, run: Any, shape: tuple[int, ...]) -> jax.Array:
    return jax.jit(opaque, static_argnums=(0, 1))(run, shape, *operands)

  def lower(context: Any, *operands: Any, run: Any, shape: tuple[int, ...]) -> Any:
    from jax._src import config  # the check has no public switch inside a shard_map

    del shape
    plain = context.replace(
      avals_in=[_without_axes(a) for a in context.avals_in], avals_out=[_without_axes(a) for a in context.avals_out]
    )
    # Pallas's interpreter mixes index dtypes when x64 is on, which strict promotion refuses.
    with config._check_vma(False), jax.numpy_dtype_promotion("standard"):
      return mlir.lower_fun(run, multiple_results=False)(plain, *operands)

  def batch(operands: Any, dims: Any, *, run: Any, shape: tuple[int, ...]) -> tuple[jax.Array, int]:
    batched = tuple(jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None)

    def one(elements: tuple[jax.Array, ...]) -> jax.Array:
      element = iter(elements)
      return opaque(run, shape, *(x if d is None else next(element) for x, d in zip(operands, dims, strict=True)))

    return jax.lax.map(one, batched), 0

  mlir.register_lowering(primitive, lower)
  batching.primitive_batchers[primitive] = batch
  return primitive


def _varying_axes(avals: Any) -> frozenset[str]:
  """The mesh axes that any of the abstract values varies over."""
  return functools.reduce(frozenset.union, (a.manual_axis_type.varying for a in avals), frozenset())


def _without_axes(aval: Any) -> Any:
  return aval.update(manual_axis_type=type(aval.manual_axis_type)())

"""A function as one primitive: vmap loops over it, and a checked shard_map does not look inside.

Public kernels have no batching rule (their grids depend on their operands) and do not say which
mesh axes their results vary over, which `check_vma=True` asks of every pallas_call. As a
primitive of its own the call has a batching rule, and the axes: those of its operands.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def opaque(
  run: Callable[..., jax.Array], shape: tuple[int, ...], *operands: jax.Array, interpreted: bool = False
) -> jax.Array:
  """Calls `run(*operands)`, a float32 array of that shape; `run` must be hashable.

  An interpreted kernel is traced once for its shapes, however many programs it stands in.
  """
  if _is_sanitized():
    return run(*operands)  # the interpreter's callbacks are effects, which a primitive would hide
  if interpreted:
    # Here and not while it is lowered: an error in there would be raised between two MLIR modules.
    _traced(run, tuple((x.shape, x.dtype) for x in operands))
  return _primitive().bind(*operands, run=run, shape=shape, interpreted=interpreted)


@functools.cache
def _primitive() -> Primitive:
  primitive = Primitive("gmm_kernel")

  @primitive.def_abstract_eval
  def _abstract(*operands: Any, run: Any, shape: tuple[int, ...], interpreted: bool) -> Any:
    del run, interpreted
    axes = type(operands[0].manual_axis_type)(varying=_varying_axes(operands))
    return operands[0].update(shape=shape, dtype=jnp.dtype(jnp.float32), weak_type=False, manual_axis_type=axes)

  @primitive.def_impl
  def _impl(*operands: jax.Array, run: Any, shape: tuple[int, ...], interpreted: bool) -> jax.Array:
    return jax.jit(functools.partial(opaque, run, shape, interpreted=interpreted))(*operands)

  def lower(context: Any, *operands: Any, run: Any, shape: tuple[int, ...], interpreted: bool) -> Any:
    del shape
    if interpreted:
      run = _traced(run, tuple((a.shape, a.dtype) for a in context.avals_in)).call
    plain = context.replace(
      avals_in=[_without_axes(a) for a in context.avals_in], avals_out=[_without_axes(a) for a in context.avals_out]
    )
    with _unchecked():
      return mlir.lower_fun(run, multiple_results=False)(plain, *operands)

  def batch(operands: Any, dims: Any, *, run: Any, shape: tuple[int, ...], interpreted: bool) -> tuple[jax.Array, int]:
    batched = tuple(jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None)

    def one(elements: tuple[jax.Array, ...]) -> jax.Array:
      element = iter(elements)
      mine = (x if d is None else next(element) for x, d in zip(operands, dims, strict=True))
      return opaque(run, shape, *mine, interpreted=interpreted)

    return jax.lax.map(one, batched), 0

  mlir.register_lowering(primitive, lower)
  batching.primitive_batchers[primitive] = batch
  return primitive


def _is_sanitized() -> bool:
  """Whether `pltpu.force_tpu_interpret_mode` is on: kernels then run in JAX's simulation of a TPU."""
  from jax._src import config  # no public way to ask

  return config.pallas_tpu_interpret_mode_context_manager.value is not None


@functools.cache
def _traced(run: Callable[..., jax.Array], operands: tuple[tuple[tuple[int, ...], Any], ...]) -> export.Exported:
  """`run` as StableHLO: Pallas's interpreter takes a second to trace a kernel, and keeps nothing."""
  with _unchecked(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
    # The lambda, because jit needs a function that can be referenced weakly.
    return export.export(jax.jit(lambda *xs: run(*xs)))(*(jax.ShapeDtypeStruct(*operand) for operand in operands))


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
  """No check of mesh axes, and dtypes that mix: Pallas's interpreter mixes index dtypes when x64 is on."""
  from jax._src import config  # the check has no public switch inside a shard_map

  with config._check_vma(False), jax.numpy_dtype_promotion("standard"):
    yield


def _varying_axes(avals: Any) -> frozenset[str]:
  """The mesh axes that any of the abstract values varies over."""
  return functools.reduce(frozenset.union, (a.manual_axis_type.varying for a in avals), frozenset())


def _without_axes(aval: Any) -> Any:
  return aval.update(manual_axis_type=type(aval.manual_axis_type)())

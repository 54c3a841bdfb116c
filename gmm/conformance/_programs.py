"""Compiled calls of the public ops, one per backend and static arguments, shared by all checks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from gmm import _op
from gmm._protocol import Backend
from gmm._qarray import QArray
from gmm._quantize import Kind, quantize
from gmm._recipe import Quant

# XLA on CPU: the emitters that take most of its time, and whose code pays off in long runs only.
_QUICK_ON_CPU = {"xla_cpu_use_fusion_emitters": False}


@dataclasses.dataclass(frozen=True)
class Program:
  """A function compiled as users compile it, or quickly where `jax_disable_most_optimizations` is on.

  Attributes:
    as_users: jit of the function.
    quick: the same with compiler options that change no operation, only how well its code runs.
  """

  as_users: Any
  quick: Any

  def __call__(self, *args: Any) -> Any:
    return self._now()(*args)

  def programs(self) -> int:
    """How many were compiled so far."""
    return self._now()._cache_size()

  def _now(self) -> Any:
    return self.quick if jax.config.read("jax_disable_most_optimizations") else self.as_users


def jit(run: Callable[..., Any]) -> Program:
  """`jax.jit` for checks, whose programs run for milliseconds: nearly all of their time is compilation."""
  return Program(jax.jit(run), jax.jit(run, compiler_options=_quick_options()))


@functools.cache
def _quick_options() -> dict[str, Any] | None:
  """The options that this XLA knows; one that it does not know is an error of the compiler."""
  if jax.default_backend() != "cpu":
    return None
  try:
    jax.jit(lambda x: x + 1, compiler_options=_QUICK_ON_CPU).lower(0).compile()
  except jax.errors.JaxRuntimeError:
    return None
  return _QUICK_ON_CPU


@functools.cache
def forward(backend: Backend, **static: Any) -> Program:
  """gmm(lhs, rhs, sizes, offset=None, partial_sum=None, existing_out=None)."""

  def run(lhs, rhs, sizes, offset=None, partial_sum=None, existing_out=None):
    extra = {"partial_sum": partial_sum, "existing_out": existing_out}
    return _op.gmm(lhs, rhs, sizes, backend=backend, group_offset=offset, **extra, **static)

  return jit(run)


@functools.cache
def both_ways(backend: Backend, **static: Any) -> Program:
  """(out, dlhs, drhs) from (lhs, rhs, sizes, dout, offset=None, ranges=None)."""

  def run(lhs, rhs, sizes, dout, offset=None, ranges=None):
    op = lambda lhs, rhs: _op.gmm(lhs, rhs, sizes, backend=backend, group_offset=offset, ranges=ranges, **static)
    out, pullback = jax.vjp(op, lhs, rhs)
    return out, *pullback(dout.astype(out.dtype))

  return jit(run)


@functools.cache
def transposed(backend: Backend, **static: Any) -> Program:
  """tgmm(lhs, dout, sizes, offset=None)."""

  def run(lhs, dout, sizes, offset=None):
    return _op.tgmm(lhs, dout, sizes, backend=backend, group_offset=offset, **static)

  return jit(run)


@functools.cache
def _quantizer(quant: Quant, kind: Kind) -> Program:
  return jit(lambda x, ranges: quantize(x, quant, kind, **ranges))


def quantized(x: Any, quant: Quant, kind: Kind = "rows", **ranges: Any) -> QArray:
  """`gmm.quantize`, compiled; QNT-2 holds it to the same bits eagerly."""
  return _quantizer(quant, kind)(x, ranges)

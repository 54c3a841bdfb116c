"""Compiled calls of the public ops, one per backend and static arguments, shared by all checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from gmm import _op
from gmm._protocol import Backend


@functools.cache
def forward(backend: Backend, **static: Any) -> Callable[..., jax.Array]:
  """jit of gmm(lhs, rhs, sizes, offset=None, partial_sum=None)."""

  def run(lhs, rhs, sizes, offset=None, partial_sum=None):
    return _op.gmm(lhs, rhs, sizes, backend=backend, group_offset=offset, partial_sum=partial_sum, **static)

  return jax.jit(run)


@functools.cache
def both_ways(backend: Backend, **static: Any) -> Callable[..., tuple[jax.Array, Any, Any]]:
  """jit of (out, dlhs, drhs) from (lhs, rhs, sizes, dout, offset=None)."""

  def run(lhs, rhs, sizes, dout, offset=None):
    op = lambda lhs, rhs: _op.gmm(lhs, rhs, sizes, backend=backend, group_offset=offset, **static)
    out, pullback = jax.vjp(op, lhs, rhs)
    return out, *pullback(dout.astype(out.dtype))

  return jax.jit(run)


@functools.cache
def transposed(backend: Backend, **static: Any) -> Callable[..., jax.Array]:
  """jit of tgmm(lhs, dout, sizes, offset=None)."""

  def run(lhs, dout, sizes, offset=None):
    return _op.tgmm(lhs, dout, sizes, backend=backend, group_offset=offset, **static)

  return jax.jit(run)

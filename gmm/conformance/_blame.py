"""Whose error it is: the backend's, or the kit's own."""

from __future__ import annotations

import functools
import inspect
from types import CodeType, TracebackType
from typing import Any

import jax

from gmm import _registry
from gmm._protocol import Backend, Unsupported
from gmm.conformance._registry import Check


def is_backends_error(error: BaseException, check: Check, backend: Backend, case: Any) -> bool:
  """Whether an exception that is no `Violation` came out of the backend rather than out of the kit.

  Args:
    error: the exception, with its traceback.
    check, backend, case: what ran.
  """
  # 1. It passed through a function of the backend, or through the module that one is written in.
  codes, modules = _places(backend)
  if any(_passed_through(e.__traceback__, codes, modules) for e in _chain(error)):
    return True
  # 2. A program that was compiled failed while it ran: there is no frame of the backend then.
  if isinstance(error, jax.errors.JaxRuntimeError):
    return True
  # 3. A kernel that cannot be lowered fails in a compiler, after its own frames are gone. What the
  #    reference does not meet on the same case is the backend's.
  if backend.name == "reference":
    return False
  try:
    check.run(_registry.get_backend("reference"), case)
  except Unsupported:
    return True
  except Exception:  # whatever it is: the reference meets it too, so the kit is at fault; `error` itself is reported
    return False
  return True


def refused_inside(refusal: Unsupported, backend: Backend) -> bool:
  """Whether the backend's own `gmm` or `tgmm` raised it, after `supports` had accepted the problem."""
  codes = {code for fn in (backend.gmm, backend.tgmm) if (code := _code(fn)) is not None}
  return any(_passed_through(e.__traceback__, codes, set()) for e in _chain(refusal))


def _places(backend: Backend) -> tuple[set[CodeType], set[str]]:
  """Code objects of the backend's functions, and the names of their modules."""
  functions = backend.gmm, backend.tgmm, backend.supports, backend.interpreted
  codes = {code for fn in functions if (code := _code(fn)) is not None}
  modules = {getattr(_inner(fn), "__module__", None) for fn in functions}
  # The protocol's own default functions are no place of a backend.
  return codes, {m for m in modules if m is not None and m != "gmm._protocol" and not m.startswith("gmm.conformance")}


def _inner(fn: Any) -> Any:
  """The function inside partials, jit and other wrappers."""
  while isinstance(fn, functools.partial):
    fn = fn.func
  return inspect.unwrap(fn)


def _code(fn: Any) -> CodeType | None:
  fn = _inner(fn)
  method = vars(type(fn)).get("__call__")
  return getattr(fn, "__code__", None) or getattr(method, "__code__", None)


def _chain(error: BaseException) -> list[BaseException]:
  """The exception and those it was raised from or while handling."""
  seen: list[BaseException] = []
  todo: list[BaseException | None] = [error]
  while todo:
    e = todo.pop()
    if e is not None and e not in seen:
      seen.append(e)
      todo += [e.__cause__, e.__context__]
  return seen


def _passed_through(trace: TracebackType | None, codes: set[CodeType], modules: set[str]) -> bool:
  while trace is not None:
    frame = trace.tb_frame
    if frame.f_code in codes or frame.f_globals.get("__name__") in modules:
      return True
    trace = trace.tb_next
  return False

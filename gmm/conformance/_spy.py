"""What a backend was given and what it returned while a check ran: the calls behind a failure."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np

from gmm._protocol import Backend, Pass, Problem
from gmm._qarray import QArray
from gmm._quantize import GivenScale
from gmm.conformance._registry import Check


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
  """One call of a backend, its arrays as numpy.

  Attributes:
    pass_: "fwd", "dlhs" or "drhs"; the last is a call of `tgmm`.
    lhs, rhs: the two operands as the protocol names them (rhs is dout in `tgmm`).
    sizes: int32 [num_global_groups].
    options: the keyword arguments of the call.
    got: what it returned.
  """

  pass_: Pass
  lhs: Any
  rhs: Any
  sizes: np.ndarray
  options: dict[str, Any]
  got: np.ndarray


def record(check: Check, backend: Backend, case: Any) -> tuple[Call, ...]:
  """Runs the check once more on a backend that takes notes; empty where its calls cannot be seen.

  The notes are host callbacks in the compiled program, so that it computes what it computed before.
  """
  calls: list[Call] = []
  asked: list[Pass] = ["fwd"]

  def supports(problem: Problem) -> str | None:
    asked.append(problem.pass_)
    return backend.supports(problem)

  def noting(fn: Any) -> Any:
    def call(lhs: Any, rhs: Any, sizes: Any, **options: Any) -> Any:
      pass_ = asked[-1]
      out = fn(lhs, rhs, sizes, **options)
      given = {name: x for name, x in options.items() if isinstance(x, jax.Array | np.ndarray | QArray | GivenScale)}
      static = {name: x for name, x in options.items() if name not in given}

      def note(arrays: Any) -> None:
        lhs, rhs, sizes, given, out = jax.tree.map(np.asarray, arrays)
        calls.append(Call(pass_, lhs, rhs, sizes, {**static, **given}, out))

      jax.debug.callback(note, (lhs, rhs, sizes, given, out))
      return out

    return call

  noted = dataclasses.replace(backend, gmm=noting(backend.gmm), tgmm=noting(backend.tgmm), supports=supports)
  # Whatever goes wrong here, the failure itself is known already: the check's violation is the rule.
  with contextlib.suppress(Exception):
    check.run(noted, case)
  with contextlib.suppress(Exception):
    jax.effects_barrier()
  return tuple(calls)

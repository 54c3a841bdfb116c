"""One call of one backend: choose it, ask it, do outside what it cannot fuse (SPEC REG-1, REG-4, REG-5)."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from gmm import _registry
from gmm._groups import local_ranges
from gmm._protocol import Backend, OperandSpec, Pass, Problem, Tile, Unsupported, operand_spec
from gmm._qarray import Operand, QArray
from gmm._quantize import GivenScale, Kind, apply_prescale, quantize
from gmm._recipe import Quant


@dataclasses.dataclass(frozen=True)
class Candidates:
  """The backends that may do a call, best first.

  Attributes:
    backends: one when it was named, several under "auto".
    missing: (name, reason) of those that "auto" would try but cannot load.
    named: whether the caller named the one: then it does the work or raises.
  """

  backends: tuple[Backend, ...]
  missing: tuple[tuple[str, str], ...] = ()
  named: bool = True


def candidates(wanted: str | Backend) -> Candidates:
  """What the `backend` argument of an op allows (SPEC REG-2, REG-4)."""
  if isinstance(wanted, str) and wanted == "auto":
    found, missing = _registry.auto_backends(jax.default_backend())
    return Candidates(tuple(found), tuple(missing.items()), named=False)
  return Candidates((_registry.get_backend(wanted),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """The static part of one backend call: what is the same for every array of these shapes."""

  candidates: Candidates
  pass_: Pass
  out_dtype: str
  precision: Any = None
  tile: Tile | None = None
  transpose_rhs: bool = False


@dataclasses.dataclass(frozen=True)
class Todo:
  """What a backend may do to an operand before multiplying: prescale, then quantize."""

  quant: Quant | GivenScale | None = None
  prescale: jax.Array | None = None

  def __bool__(self) -> bool:
    return self.quant is not None or self.prescale is not None


_NOTHING = Todo()


def call_gmm(
  call: Call,
  lhs: Operand,
  rhs: Operand,
  sizes: jax.Array,
  offset: jax.Array | None,
  *,
  lhs_todo: Todo,
  partial_sum: jax.Array | None = None,
) -> jax.Array:
  """gmm on the backend of `call`; raises Unsupported when no allowed backend takes it."""
  m, k = lhs.shape
  g = rhs.shape[0]
  n = rhs.shape[1 if call.transpose_rhs else 2]

  def problem(lhs_spec: OperandSpec) -> Problem:
    return _problem(call, lhs_spec, operand_spec(rhs), (m, k, n, g), sizes, offset, partial_sum=partial_sum is not None)

  backend, fuse = _choose(call.candidates, problem, [(lhs, lhs_todo)], "rows", g)
  if not fuse:
    lhs, lhs_todo = _do(lhs, lhs_todo, "rows", sizes, offset, g), Todo()
  return backend.gmm(
    lhs,
    rhs,
    sizes,
    lhs_quant=lhs_todo.quant,
    lhs_prescale=lhs_todo.prescale,
    group_offset=offset,
    transpose_rhs=call.transpose_rhs,
    partial_sum=partial_sum,
    precision=call.precision,
    preferred_element_type=call.out_dtype,
    tiling=call.tile,
  )


def call_tgmm(
  call: Call,
  lhs: Operand,
  dout: Operand,
  sizes: jax.Array,
  offset: jax.Array | None,
  *,
  num_groups: int,
  lhs_todo: Todo = _NOTHING,
  dout_todo: Todo = _NOTHING,
) -> jax.Array:
  """tgmm on the backend of `call`; raises Unsupported when no allowed backend takes it."""
  dims = (lhs.shape[0], lhs.shape[1], dout.shape[1], num_groups)

  def problem(lhs_spec: OperandSpec, dout_spec: OperandSpec) -> Problem:
    return _problem(call, lhs_spec, dout_spec, dims, sizes, offset)

  backend, fuse = _choose(call.candidates, problem, [(lhs, lhs_todo), (dout, dout_todo)], "cols", num_groups)
  if not fuse:
    lhs, lhs_todo = _do(lhs, lhs_todo, "cols", sizes, offset, num_groups), Todo()
    dout, dout_todo = _do(dout, dout_todo, "cols", sizes, offset, num_groups), Todo()
  return backend.tgmm(
    lhs,
    dout,
    sizes,
    num_groups=num_groups,
    lhs_quant=lhs_todo.quant,
    dout_quant=dout_todo.quant,
    dout_prescale=dout_todo.prescale,
    group_offset=offset,
    precision=call.precision,
    preferred_element_type=call.out_dtype,
    tiling=call.tile,
  )


def _problem(
  call: Call,
  lhs: OperandSpec,
  rhs: OperandSpec,
  dims: tuple[int, int, int, int],
  sizes: jax.Array,
  offset: jax.Array | None,
  partial_sum: bool = False,
) -> Problem:
  m, k, n, g = dims
  return Problem(
    pass_=call.pass_,
    m=m,
    k=k,
    n=n,
    num_groups=g,
    num_global_groups=sizes.shape[0],
    lhs=lhs,
    rhs=rhs,
    out_dtype=call.out_dtype,
    transpose_rhs=call.transpose_rhs,
    group_offset=offset is not None,
    partial_sum=partial_sum,
    precision=call.precision,
    tiling=call.tile,
    platform=jax.default_backend(),
  )


def _choose(
  allowed: Candidates,
  problem: Callable[..., Problem],
  operands: list[tuple[Operand, Todo]],
  kind: Kind,
  num_groups: int,
) -> tuple[Backend, bool]:
  """Returns the backend, and whether it also does what is to do to the operands before multiplying."""
  asked = problem(*(operand_spec(x, todo.quant, todo.prescale) for x, todo in operands))
  refusals = []
  for backend in allowed.backends:
    reason = backend.supports(asked)
    if reason is None:
      return backend, True
    if any(todo for _, todo in operands):
      reason = backend.supports(problem(*(_done(x, todo, kind, num_groups) for x, todo in operands)))
      if reason is None:
        return backend, False
    refusals.append((backend.name, reason))
  what = f"{asked.pass_} of m={asked.m} k={asked.k} n={asked.n} groups={asked.num_groups} on {asked.platform}"
  if allowed.named:
    name, reason = refusals[0]
    raise Unsupported(f"Backend {name!r} cannot do {what}: {reason} (A named backend never falls back.)")
  listed = "; ".join(f"{name}: {reason}" for name, reason in (*refusals, *allowed.missing)) or "none is registered"
  raise Unsupported(f"No backend can do {what}. {listed}")


def _done(x: Operand, todo: Todo, kind: Kind, num_groups: int) -> OperandSpec:
  """The operand after what is asked has been done outside the backend."""
  quant = todo.quant
  if quant is None:
    return operand_spec(x)
  ranges = jax.ShapeDtypeStruct((num_groups,), "int32")
  by_ranges = lambda x, starts, ends: quantize(x, quant, kind, starts=starts, ends=ends)
  # Shape and dtype only: inside a shard_map the operand has axes that these ranges have not.
  return operand_spec(jax.eval_shape(by_ranges, jax.ShapeDtypeStruct(x.shape, x.dtype), ranges, ranges))


def _do(x: Operand, todo: Todo, kind: Kind, sizes: jax.Array, offset: jax.Array | None, num_groups: int) -> Operand:
  if not todo:
    return x
  assert not isinstance(x, QArray)  # the op asks for steps on unquantized operands only
  starts, ends = local_ranges(sizes, offset, num_groups)
  if todo.quant is None:
    assert todo.prescale is not None
    return apply_prescale(x, todo.prescale, kind, starts, ends)
  return quantize(x, todo.quant, kind, starts=starts, ends=ends, prescale=todo.prescale)


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
  """jit of fn(plan, *arrays): one program per plan and shapes, also when called outside jit.

  It is traced and compiled outside qwix's interception. Compiling too, because some primitives
  (ragged_dot on CPU) are lowered through functions that qwix patches; so the passes are
  compiled one by one inside the custom VJP, not the op around it, whose gradient JAX would
  compile later.
  """
  program = jax.jit(fn, static_argnums=0)

  @functools.wraps(fn)
  def run(*args: Any) -> Any:
    return _outside_interception(program)(*args)

  return run


def _outside_interception(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Runs fn where qwix, if it is loaded at all, patches nothing: no operand is quantized twice (SPEC QNT-11)."""
  if "qwix" not in sys.modules:
    return fn
  from gmm import _qwix

  return _qwix.outside_interception(fn)

"""Sanitizers for Pallas TPU kernels, off a TPU: uninitialized memory, reads out of bounds, races.

JAX's simulation of a TPU fills memory with NaN before a kernel writes it, raises on a read past an
array, and keeps vector clocks of loads, stores and DMAs. Here a small grid of calls runs in it;
results must be exact, so that a NaN shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gmm._protocol import Backend, Unsupported
from gmm.conformance import _oracle
from gmm.conformance._case import Case
from gmm.conformance._registry import Check, expect, expect_equal
from gmm.conformance._result import Result
from gmm.conformance._run import run_check

# Sizes off every tile, an empty group and slack rows; whole tiles; nothing at all.
_CASES = (
  Case(40, 130, 140, (10, 0, 25)),
  Case(40, 130, 140, (0, 33, 7), "bfloat16", seed=1),
  Case(32, 128, 128, (16, 16), seed=2),
  Case(32, 128, 128, (0, 0), seed=3),
)


def sanitize(backend: Backend, on_result: Callable[[Result], None] = lambda result: None) -> tuple[Result, ...]:
  """Runs gmm, dlhs and tgmm of a backend's Pallas kernels under the sanitizers.

  Args:
    backend: its kernels run in the simulation whatever `interpret` they ask for.
    on_result: called with each result as it comes.

  Returns:
    Results of three checks; "declined" where no Pallas kernel runs.
  """
  results = []
  for check in CHECKS:
    results.append(run_check(check, backend, explain=False))
    on_result(results[-1])
  return tuple(results)


def forward(backend: Backend, case: Case) -> None:
  """gmm, with and without a group_offset."""
  rows = _oracle.ranges(case.sizes)
  run = lambda lhs, rhs, sizes: backend.gmm(lhs, rhs, sizes, **_gmm_options(case))
  expected = _oracle.gmm(case.lhs, case.rhs, rows).value.astype(case.lhs.dtype)
  expect_equal(_sanitized(run, case.lhs, case.rhs, case.sizes), expected, "out", _oracle.owner_of_rows(rows, case.m))
  offset = lambda lhs, rhs, sizes: backend.gmm(lhs, rhs, sizes, **_gmm_options(case, group_offset=jnp.int32(1)))
  mine = (_oracle.owner_of_rows(rows, case.m) >= 1)[:, None]
  got = _sanitized(offset, case.lhs, case.rhs[1:], case.sizes)
  expect_equal(got, np.where(mine, expected, 0).astype(expected.dtype), "out with group_offset=1")


def dlhs(backend: Backend, case: Case) -> None:
  """gmm against the transposed weights."""
  rows = _oracle.ranges(case.sizes)
  run = lambda dout, rhs, sizes: backend.gmm(dout, rhs, sizes, **_gmm_options(case, transpose_rhs=True))
  expected = _oracle.gmm(case.dout, case.rhs, rows, transpose_rhs=True).value.astype(case.lhs.dtype)
  expect_equal(_sanitized(run, case.dout, case.rhs, case.sizes), expected, "dlhs", _oracle.owner_of_rows(rows, case.m))


def drhs(backend: Backend, case: Case) -> None:
  """tgmm, in which an empty group's block must be written as well."""
  run = lambda lhs, dout, sizes: backend.tgmm(
    lhs,
    dout,
    sizes,
    num_groups=case.g,
    lhs_quant=None,
    dout_quant=None,
    dout_prescale=None,
    group_offset=None,
    precision=None,
    preferred_element_type=case.lhs.dtype,
    tiling=None,
  )
  expected = _oracle.tgmm(case.lhs, case.dout, _oracle.ranges(case.sizes)).value.astype(case.lhs.dtype)
  expect_equal(_sanitized(run, case.lhs, case.dout, case.sizes), expected, "drhs", np.arange(case.g))


_RULE = "no uninitialized memory, read out of bounds or race in {}"
CHECKS = (
  Check("SAN-1", _RULE.format("gmm"), forward, _CASES),
  Check("SAN-2", _RULE.format("gmm against transposed weights"), dlhs, _CASES),
  Check("SAN-3", _RULE.format("tgmm"), drhs, _CASES),
)


def _gmm_options(case: Case, group_offset: Any = None, transpose_rhs: bool = False) -> dict[str, Any]:
  return {
    "lhs_quant": None,
    "lhs_prescale": None,
    "group_offset": group_offset,
    "transpose_rhs": transpose_rhs,
    "partial_sum": None,
    "precision": None,
    "preferred_element_type": case.lhs.dtype,
    "tiling": None,
  }


def _sanitized(run: Callable[..., jax.Array], *args: Any) -> np.ndarray:
  """The result of `run` with its Pallas kernels simulated; a race is a violation, a bad read raises."""
  from jax.experimental.pallas import tpu as pltpu

  params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
  with _some_tpu(), pltpu.force_tpu_interpret_mode(params):
    try:
      traced = jax.jit(lambda *args: run(*args)).trace(*args)
      if "pallas_call" not in str(traced.jaxpr):
        raise Unsupported("No Pallas kernel runs here: there is nothing to sanitize.")
      got = np.asarray(traced.lower().compile()(*args))
      expect(not _races_found(), "a race: a load or store of the kernel is not ordered with another or with a DMA")
    finally:
      pltpu.reset_tpu_interpret_mode_state()
  return got


@contextlib.contextmanager
def _some_tpu() -> Iterator[None]:
  """Kernels that ask which TPU they run on are told of one."""
  device = jax.sharding.AbstractDevice("TPU v6 lite", 1, "tpu")
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
    yield


def _races_found() -> bool:
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the report has no public place

  return interpret_pallas_call.races is not None and interpret_pallas_call.races.races_found

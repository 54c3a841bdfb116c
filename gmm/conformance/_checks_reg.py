"""Checks of the clauses REG-1 to REG-7: the protocol, the registry, the arguments."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gmm import _op, _registry
from gmm._protocol import Backend, Problem, Unsupported
from gmm._qarray import QArray
from gmm._recipe import Quant
from gmm._tiling import Tiling
from gmm.conformance import _oracle
from gmm.conformance._case import Case, numpy_dtype
from gmm.conformance._programs import both_ways, jit, quantized
from gmm.conformance._registry import Violation, check, expect, expect_equal

_ONCE = (Case(8, 16, 16, (3, 5)),)
_GMM_ARGUMENTS = {
  "lhs_quant",
  "lhs_prescale",
  "group_offset",
  "transpose_rhs",
  "partial_sum",
  "precision",
  "preferred_element_type",
  "tiling",
}
_TGMM_ARGUMENTS = {
  "num_groups",
  "lhs_quant",
  "dout_quant",
  "dout_prescale",
  "group_offset",
  "precision",
  "preferred_element_type",
  "tiling",
}


@check("REG-1", "a backend is a hashable value whose functions take the protocol's arguments", _ONCE)
def protocol(backend: Backend, case: Case) -> None:
  """Equal by value, so that programs are compiled once."""
  del case
  expect(hash(backend) == hash(dataclasses.replace(backend)), f"two copies of {backend.name} hash differently")
  for fn, needed in ((backend.gmm, _GMM_ARGUMENTS), (backend.tgmm, _TGMM_ARGUMENTS)):
    parameters = inspect.signature(fn).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = set() if takes_all else needed - set(parameters)
    expect(not missing, f"{getattr(fn, '__name__', fn)} of {backend.name} lacks {sorted(missing)}")


@check("REG-2", "a name is found, an unknown one is an error with the known names", _ONCE, "library")
def lookup(backend: Backend, case: Case) -> None:
  """The closest match is named."""
  del case
  expect(_registry.get_backend(backend.name) is _registry.get_backend(backend), "a name and its backend differ")
  try:
    _registry.get_backend(backend.name + "x")
  except ValueError as error:
    expect(f"Did you mean {backend.name!r}?" in str(error), f"no closest match in: {error}")
  else:
    expect(False, "an unknown name was found")


@check("REG-3", "register_backend lasts as long as its with block, and takes no name twice", _ONCE, "library")
def registration(backend: Backend, case: Case) -> None:
  """Tests do not leak."""
  del case
  mine = dataclasses.replace(backend, name="conformance_registration")
  with _registry.register_backend(mine):
    expect(_registry.get_backend(mine.name) is mine, "the registered backend is not found")
    try:
      _registry.register_backend(mine)
    except ValueError:
      pass
    else:
      expect(False, "a name was registered twice")
  expect(mine.name not in _registry.backends(), "the registration outlives its block")


@check("REG-4", '"auto" takes the first backend of the platform that supports the problem', _ONCE, "library")
def auto(backend: Backend, case: Case) -> None:
  """And can say which one it was."""
  platform = jax.default_backend()
  first = dataclasses.replace(backend, name="conformance_auto", auto_rank=((platform, -1),))
  args = case.lhs, case.rhs, case.sizes
  with _registry.register_backend(first):
    expect(set(_op.which_backend(*args).values()) == {first.name}, f"auto took {_op.which_backend(*args)}")
  refusing = dataclasses.replace(first, supports=lambda problem: "never.")
  with _registry.register_backend(refusing):
    expect(first.name not in _op.which_backend(*args).values(), "auto took a backend that refuses")


def _variants(case: Case) -> dict[str, tuple]:
  """Name -> (lhs, rhs, keyword arguments) over what a backend may decline."""
  lhs, rhs = case.lhs, case.rhs
  half = lhs.astype(numpy_dtype("bfloat16")), rhs.astype(numpy_dtype("bfloat16"))
  codes = lambda qtype, granularity: quantized(half[1], Quant(qtype=qtype, granularity=granularity), "rhs")
  rows = quantized(half[0], Quant(qtype="int8"))
  return {
    "float32": (lhs, rhs, {}),
    "bfloat16": (*half, {}),
    "float16": (lhs.astype(np.float16), rhs.astype(np.float16), {}),
    "bfloat16 x float32": (half[0], rhs, {}),
    "transposed": (lhs, np.ascontiguousarray(rhs.swapaxes(1, 2)), {"transpose_rhs": True}),
    "group_offset": (lhs, rhs[1:], {"group_offset": 1}),
    "partial_sum": (lhs, rhs, {"partial_sum": np.ones((case.m, case.n), np.float32)}),
    "fp8 weights": (half[0], codes("float8_e4m3fn", "channel"), {}),
    "int8 x int8": (rows, codes("int8", "channel_per_group"), {}),
    "int4 weights": (half[0], codes("int4", "channel"), {}),
    "k blocks": (half[0], codes("int8", 8), {}),
    "2-D blocks": (half[0], codes("int8", (8, 8)), {}),
    "lhs blocks": (quantized(half[0], Quant(qtype="int8", granularity=8)), codes("int8", "channel"), {}),
    "fp8_dynamic": (*half, {"recipe": "fp8_dynamic"}),
  }


@check("REG-5", "supports tells the truth: what it accepts works, what it refuses raises Unsupported", _ONCE)
def supports_both_ways(backend: Backend, case: Case) -> None:
  """Over dtypes, layouts, scales and options."""
  for name, (lhs, rhs, kwargs) in _variants(case).items():
    answers: list[str | None] = []

    def noted(problem: Problem, answers=answers) -> str | None:
      answers.append(backend.supports(problem))
      return answers[-1]

    spied = dataclasses.replace(backend, supports=noted)
    try:
      op = lambda lhs, rhs, spied=spied, kwargs=kwargs: _op.gmm(lhs, rhs, case.sizes, backend=spied, **kwargs)
      out = jit(op)(lhs, rhs)
    except Unsupported:
      expect(answers[-1] is not None, f"{name}: supports accepts it and the backend refuses")
      expect(isinstance(answers[-1], str) and len(answers[-1]) > 10, f"{name}: refused without a reason")
      continue
    expect(answers[-1] is None, f"{name}: supports refuses it and a result was returned")
    expect(out.shape == (case.m, case.n), f"{name}: out has shape {out.shape}")
    expect(bool(np.isfinite(np.asarray(out).astype(np.float32)).all()), f"{name}: out is not finite")


# Whole tiles of 128, the largest usual size: nothing in it is odd.
_CORE = tuple(Case(128, 128, 128, (64, 64), dtype) for dtype in ("float32", "bfloat16"))


@check("REG-5", "the core may not be declined: plain float32 and bfloat16, forward and both gradients", _CORE)
def core_is_not_declined(backend: Backend, case: Case) -> None:
  """Whole tiles, two full groups, no option: what refuses this is no backend."""
  try:
    out, dlhs, drhs = both_ways(backend)(case.lhs, case.rhs, case.sizes, case.dout)
  except Unsupported as refusal:
    raise Violation(f"a case of the core grid was declined: {refusal}") from refusal
  rows, groups, dtype = _oracle.ranges(case.sizes), np.arange(case.g), case.lhs.dtype
  owner = _oracle.owner_of_rows(rows, case.m)
  expect_equal(out, _oracle.gmm(case.lhs, case.rhs, rows).value.astype(dtype), "out", owner)
  expect_equal(dlhs, _oracle.gmm(case.dout, case.rhs, rows, transpose_rhs=True).value.astype(dtype), "dlhs", owner)
  expect_equal(drhs, _oracle.tgmm(case.lhs, case.dout, rows).value.astype(dtype), "drhs", groups)


@check("REG-6", "bad arguments are named before the backend is reached", _ONCE)
def bad_arguments(backend: Backend, case: Case) -> None:
  """Received and expected stand in the message."""

  def never(*args, **kwargs):
    raise AssertionError("the backend was reached")

  untouched = dataclasses.replace(backend, gmm=never, tgmm=never)
  codes = jnp.ones((case.m, case.k), jnp.int8)
  bad: tuple[tuple[str, str, tuple, dict[str, Any]], ...] = (
    ("k differs", "k = 16", (case.lhs, case.rhs[:, :5], case.sizes), {}),
    ("float sizes", "float64", (case.lhs, case.rhs, case.sizes / 1.0), {}),
    ("sum past m", "sum to 9", (case.lhs, case.rhs, np.array([4, 5])), {}),
    ("negative size", "-1", (case.lhs, case.rhs, np.array([4, -1])), {}),
    ("offset", "group_offset is 1", (case.lhs, case.rhs, case.sizes), {"group_offset": 1}),
    ("no scale", "without their scale", (codes, case.rhs, case.sizes), {}),
    ("scale rank", "(8,)", (QArray(codes, jnp.ones(8)), case.rhs, case.sizes), {}),
    ("recipe", "fp9", (case.lhs, case.rhs, case.sizes), {"recipe": "fp9"}),
  )
  for what, words, args, kwargs in bad:
    try:
      _op.gmm(*args, backend=untouched, **kwargs)
    except (ValueError, TypeError) as error:
      expect(words in str(error), f"{what}: {words!r} is not in the message: {error}")
    else:
      expect(False, f"{what}: accepted")


@check("REG-7", "each pass gets the tile given for it; another form of tiling is an error", _ONCE)
def tiles(backend: Backend, case: Case) -> None:
  """Seen from inside the backend."""
  seen: list[tuple[str, object]] = []

  def spy(name, fn):
    def call(*args, **kwargs):
      seen.append((name, kwargs["tiling"]))
      return fn(*args, **{**kwargs, "tiling": None})

    return call

  # The tiles are for the spy alone: what is legal is each backend's own affair.
  spied = dataclasses.replace(
    backend,
    gmm=spy("gmm", backend.gmm),
    tgmm=spy("tgmm", backend.tgmm),
    supports=lambda p: backend.supports(dataclasses.replace(p, tiling=None)),
  )
  fwd, dlhs, drhs = (8, 128, 128), (16, 128, 128), (24, 128, 128)
  loss = lambda lhs, rhs: _op.gmm(
    lhs, rhs, case.sizes, backend=spied, tiling=Tiling(fwd=fwd, dlhs=dlhs, drhs=drhs)
  ).sum()
  grads = jit(jax.grad(loss, (0, 1)))(case.lhs, case.rhs)
  expect(set(seen) == {("gmm", fwd), ("gmm", dlhs), ("tgmm", drhs)}, f"the passes got {seen}")
  expect_equal(grads[1][0], np.asarray(case.lhs[:3]).sum(0)[:, None] * np.ones((1, case.n), np.float32), "drhs[0]")
  try:
    _op.gmm(case.lhs, case.rhs, case.sizes, backend=backend, tiling=(8, 128))
  except ValueError:
    return
  expect(False, "a tiling of two numbers was accepted")


CHECKS = (protocol, lookup, registration, auto, supports_both_ways, core_is_not_declined, bad_arguments, tiles)

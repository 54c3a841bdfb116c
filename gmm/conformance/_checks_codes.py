"""Checks of the clauses QNT-2 to QNT-11 on the library: codes and scales, whatever the backend."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gmm._protocol import Backend
from gmm._quantize import quantize
from gmm._recipe import QMAX, Quant, Recipe, recipe, recipe_names
from gmm.conformance._case import Case, numpy_dtype
from gmm.conformance._programs import jit, quantized
from gmm.conformance._registry import check, expect, expect_equal

_BF16 = numpy_dtype("bfloat16")


def _formula(x: np.ndarray, quant: Quant, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
  """(codes, scale) of a bfloat16 operand by SPEC QNT-2's formula, in numpy."""
  absmax = np.abs(x.astype(np.float32)).max(axis=axes, keepdims=True)
  scale = (absmax / np.float32(quant.qmax)).astype(_BF16).astype(np.float32)
  scale = np.where(absmax < 2.0**-126, 1, np.maximum(scale, np.float32(2.0**-126)))
  quotient = (x.astype(np.float32) / scale).astype(_BF16).astype(np.float32)
  if quant.is_integer:
    top = int(quant.qmax - 0.5)
    codes = np.clip(np.rint(quotient), -top - 1, top)
  else:
    codes = np.clip(quotient, -quant.qmax, quant.qmax)
  return codes.astype(numpy_dtype(quant.qtype)), scale.astype(_BF16)


_AXES: dict[tuple[Any, Any], tuple[int, ...]] = {
  ("channel", "rows"): (1,),
  ("channel", "cols"): (0,),
  ("tensor", "rows"): (0, 1),
  ("channel", "rhs"): (0, 1),
}


@check(
  "QNT-2", "codes = cast(clip(round(x / scale))), scale = absmax / qmax, in bfloat16 arithmetic", "short", "library"
)
def codes_by_formula(backend: Backend, case: Case) -> None:
  """Against a numpy formula, over 30 orders of magnitude, eager and compiled."""
  del backend
  rng = np.random.default_rng(case.seed)
  for (granularity, kind), axes in _AXES.items():
    shape = (4, 6, 8) if kind == "rhs" else (16, 24)
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-28, 20, (shape[0],) + (1,) * (len(shape) - 1))).astype(
      _BF16
    )
    for qtype in QMAX:
      quant = Quant(qtype=qtype, granularity=granularity)
      codes, scale = _formula(x, quant, axes)
      # Eager, each operation is a compile of its own: one kind of operand shows it.
      for how, run in (("eager", quantize), ("jit", quantized))[kind != "cols" :]:
        got = run(jnp.asarray(x), quant, kind)
        expect_equal(got.scale, scale, f"{how} scale of {qtype} {granularity} {kind}")
        expect_equal(got.qvalue, codes, f"{how} codes of {qtype} {granularity} {kind}")


_ONCE = (None,)
_SHAPES: tuple[tuple[Any, Any, tuple[int, ...]], ...] = (
  ("rows", "tensor", (1, 1)),
  ("rows", "channel", (6, 1)),
  ("rows", 4, (6, 2)),
  ("cols", "channel", (1, 8)),
  ("cols", "tensor", (1, 1)),
  ("rhs", "tensor", (1, 1, 1)),
  ("rhs", "channel", (1, 1, 4)),
  ("rhs", "channel_per_group", (3, 1, 4)),
  ("rhs", 4, (3, 2, 4)),
  ("rhs", (4, 2), (3, 2, 2)),
  ("rhs_t", "channel", (1, 4, 1)),
  ("rhs_t", "channel_per_group", (3, 4, 1)),
  ("rhs_t", 4, (3, 4, 2)),
)


@check("QNT-3", "each granularity has one shape of scale", _ONCE, "library")
def scale_shapes(backend: Backend, case: None) -> None:
  """And every slice that shares a scale reaches the largest code."""
  del backend, case
  for kind, granularity, expected in _SHAPES:
    shape = {"rows": (6, 8), "cols": (6, 8), "rhs": (3, 8, 4), "rhs_t": (3, 4, 8)}[kind]
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    got = quantized(x, Quant(qtype="float8_e4m3fn", granularity=granularity), kind)
    expect(got.scale.shape == expected, f"scale of {kind} {granularity} is {got.scale.shape}, must be {expected}")
    largest = np.abs(np.asarray(got.qvalue).astype(np.float32))
    expect(float(largest.max()) == 448.0, f"largest code of {kind} {granularity} is {largest.max()}, must be 448")


@check("QNT-4", "a zero slice has scale 1; no scale is below 2^-126; qwix's cutoff is 2^-63", _ONCE, "library")
def tiny_scales(backend: Backend, case: None) -> None:
  """The exact scale and code of named magnitudes."""
  del backend, case
  tiny = 2.0**-126
  rows = np.array([[0.0], [2.0**-130], [2.0**-126], [2.0**-118], [448 * 2.0**-63], [448 * 2.0**-64]], np.float32)
  for dtype in (jnp.bfloat16, jnp.float32):
    x = jnp.asarray(rows, dtype)
    got = quantized(x, Quant(qtype="float8_e4m3fn"))
    expect_equal(
      got.scale.astype(jnp.float32)[:, 0], np.array([1, 1, tiny, tiny, 2.0**-63, 2.0**-64], np.float32), "scale"
    )
    expect_equal(got.qvalue.astype(jnp.float32)[:, 0], np.array([0, 0, 1, 256, 448, 448], np.float32), "code")
    got = quantized(x, Quant(qtype="float8_e4m3fn", tiny_scale="qwix"))
    expect_equal(got.scale.astype(jnp.float32)[:, 0], np.array([1, 1, 1, 1, 2.0**-63, 1], np.float32), "qwix scale")
    expect_equal(got.qvalue.astype(jnp.float32)[:, 0], np.array([0, 0, 0, 0, 448, 0], np.float32), "qwix code")


@check("QNT-5", "saturation, -128, NaN and Inf have exact values", _ONCE, "library")
def special_values(backend: Backend, case: None) -> None:
  """Clipped before the cast: e4m3fn would give NaN, integers would wrap."""
  del backend, case
  x = jnp.array([[0.5, 1.0, 1.04, 2.0, 1e4, -1e4, np.inf, -np.inf]], jnp.float32)
  for qtype, qmax, low in (
    ("float8_e4m3fn", 448, -448),
    ("float8_e5m2", 57344, -57344),
    ("int8", 127, -128),
    ("int4", 7, -8),
  ):
    got = np.asarray(quantized(x, Quant(qtype=qtype, calibration="fixed,-1,1")).qvalue).astype(np.float32)
    expect(set(got[0, 3:].tolist()) == {float(qmax), float(low)}, f"{qtype} codes past the range are {got[0, 3:]}")
  # An integer's own bound is half a step past its largest code, and ties go to even: with
  # absmax 127.5 the scale is 1, -127.5 is -128 and 127.5 saturates at 127.
  got = quantized(jnp.array([[-127.5, 127.5, 0.5, 1.5, -2.5]]), Quant(qtype="int8"))
  expect_equal(got.qvalue.astype(jnp.int32), np.array([[-128, 127, 0, 2, -2]], np.int32), "int8 codes with scale 1")
  nan = jnp.array([[np.nan, 1.0], [2.0, 1.0]], jnp.float32)
  got = quantized(nan, Quant(qtype="int8"))
  expect(
    bool(np.isnan(got.scale[0, 0])) and got.scale[1, 0] == np.float32(2) / np.float32(127.5),
    f"scales with a NaN row: {got.scale}",
  )
  fixed = Quant(qtype="int8", calibration="fixed,-1,1")
  expect(bool(np.isnan(quantized(nan, fixed).scale).all()), "a NaN under a fixed integer range must make the scale NaN")
  carried = np.asarray(quantized(nan, dataclasses.replace(fixed, qtype="float8_e4m3fn")).qvalue).astype(np.float32)
  expect(bool(np.isnan(carried[0, 0])) and carried[0, 1] == 448, f"fp8 codes with a NaN are {carried}")


@check("QNT-7", "global scales are those of the unsharded operand", _ONCE, "library")
def global_scales(backend: Backend, case: None) -> None:
  """Over an axis that splits rows and groups; local scales differ."""
  del backend, case
  x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 8, 6)) * [[[1]], [[10]], [[0.1]], [[3]]], jnp.bfloat16)
  shared: tuple[tuple[Any, Any], ...] = (
    ("rows", "tensor"),
    ("cols", "channel"),
    ("rhs", "channel"),
    ("rhs", "tensor"),
    ("rows", "channel"),
  )
  for kind, granularity in shared:
    quant = Quant(qtype="int8", granularity=granularity)
    whole = quantized(x if kind == "rhs" else x.reshape(32, 6), quant, kind)
    shards = x[:, None] if kind == "rhs" else x
    shard = functools.partial(quantize, quant=quant, kind=kind, scale_axes=("shard",))
    split = jit(jax.vmap(shard, axis_name="shard"))(shards)
    expect_equal(split.qvalue.reshape(whole.shape), np.asarray(whole.qvalue), f"codes of {kind} {granularity}")


@check("QNT-9", "scale_dtype='float32' keeps the scale of a bfloat16 operand unrounded", _ONCE, "library")
def unrounded_scale(backend: Backend, case: None) -> None:
  """A bfloat16 scale can let absmax / scale pass qmax; float16 operands always get float32."""
  del backend, case
  x = jnp.asarray(np.random.default_rng(2).standard_normal((64, 16)), jnp.bfloat16)
  exact = np.abs(np.asarray(x).astype(np.float32)).max(1, keepdims=True) / np.float32(448)
  got = quantized(x, Quant(qtype="float8_e4m3fn", scale_dtype="float32"))
  expect(got.scale.dtype == jnp.float32, f"scale is {got.scale.dtype}")
  # One ulp: XLA may multiply by the reciprocal of a constant (SPEC QNT-2).
  off = np.abs(np.asarray(got.scale) / exact - 1).max()
  expect(bool(off <= 2.0**-22), f"the scale is off by {off:.3g}, more than an ulp of float32")
  expect(
    quantized(x.astype(jnp.float16), Quant(qtype="int8")).scale.dtype == jnp.float32, "float16 needs float32 scales"
  )


_NAMED = {
  "bf16": (None, None, None),
  "fp8_dynamic": ("float8_e4m3fn channel absmax", "float8_e4m3fn channel absmax", "float8_e5m2 channel absmax"),
  "fp8_static": (
    "float8_e4m3fn tensor fixed,-224,224",
    "float8_e4m3fn tensor fixed,-224,224",
    "float8_e5m2 channel absmax",
  ),
  "fp8_calibrated": ("float8_e4m3fn tensor absmax", "float8_e4m3fn tensor absmax", "float8_e5m2 channel absmax"),
  "int8_dynamic": ("int8 channel absmax", "int8 channel absmax", None),
  "int8_weight_only": (None, "int8 channel absmax", None),
  "int4_weight_only": (None, "int4 channel absmax", None),
  "fp8_block": ("float8_e4m3fn 128 absmax", "float8_e4m3fn (128, 128) absmax", "float8_e4m3fn 128 absmax"),
  "mxfp8": ("float8_e4m3fn 32 absmax ocp",) * 3,
}


@check("QNT-10", "the named recipes are what SPEC's table says", _ONCE, "library")
def named_recipes(backend: Backend, case: None) -> None:
  """lhs, rhs and dout of each."""
  del backend, case
  expect(set(recipe_names()) == set(_NAMED), f"recipes are {recipe_names()}, SPEC names {tuple(_NAMED)}")
  for name, expected in _NAMED.items():
    rule = recipe(name)
    got = tuple(
      q and f"{q.qtype} {q.granularity} {q.calibration} {q.rounding or ''}".strip()
      for q in (rule.lhs, rule.rhs, rule.dout)
    )
    expect(got == expected, f"{name} is {got}, must be {expected}")


@check("QNT-11", "codes are qwix's for bfloat16, and rules translate both ways", _ONCE, "library")
def qwix_interop(backend: Backend, case: None) -> None:
  """Bit for bit with tiny_scale="qwix"; a rule field that is not honoured is an error."""
  del backend, case
  import qwix
  import qwix.pallas

  x = jnp.asarray(np.random.default_rng(3).standard_normal((32, 64)), jnp.bfloat16)
  for qtype in QMAX:
    theirs = qwix.pallas.quantize(x, qtype, channelwise_axes=(0,))
    ours = quantized(x, Quant(qtype=qtype, tiny_scale="qwix"))
    expect_equal(ours.qvalue, np.asarray(theirs.qvalue), f"{qtype} codes")
    expect_equal(ours.scale, np.asarray(theirs.scale), f"{qtype} scale")
  for name in ("fp8_dynamic", "fp8_static", "int8_dynamic", "int8_weight_only", "int4_weight_only"):
    rule = recipe(name)
    expect(Recipe.from_qwix(rule.to_qwix()) == rule, f"{name} does not survive a round trip through a qwix rule")
  try:
    Recipe.from_qwix(qwix.QtRule(weight_qtype="int8", tile_size=32))
  except ValueError as error:
    expect("tile_size" in str(error), f"the error must name tile_size: {error}")
  else:
    expect(False, "tile_size of a qwix rule was dropped silently")


CHECKS = (
  codes_by_formula,
  scale_shapes,
  tiny_scales,
  special_values,
  global_scales,
  unrounded_scale,
  named_recipes,
  qwix_interop,
)

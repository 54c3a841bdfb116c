"""Checks of blocks of rows (QNT-3), power-of-two scales (QNT-13) and ranges that the caller holds (QNT-14)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from gmm._protocol import Backend
from gmm._ranges import AmaxHistory, Ranges
from gmm._recipe import QMAX, Quant, Recipe
from gmm._row_blocks import num_row_blocks
from gmm.conformance import _oracle
from gmm.conformance._case import Case, numpy_dtype
from gmm.conformance._programs import both_ways, quantized
from gmm.conformance._registry import check, expect, expect_equal

_BF16 = numpy_dtype("bfloat16")
_ONCE = (None,)


@check("QNT-3", "blocks of rows count from each group's first row; the last one is short", "short", "library", 0.3)
def row_blocks(backend: Backend, case: Case) -> None:
  """Codes and scales of each block by the formula of QNT-2 in numpy; NaN in rows of no group reaches none."""
  del backend
  block, x = 4, case.array(6, (case.m, case.k)).astype(_BF16)
  x[case.used :] = np.nan
  rows = _oracle.ranges(case.sizes)
  starts, ends = np.array(rows, np.int32).T
  got = quantized(x, Quant(qtype="int8", granularity=block), "cols", starts=starts, ends=ends)
  room = num_row_blocks(case.m, case.g, block)
  expect(got.row_block == block, f"row_block is {got.row_block}, must be {block}")
  expect(got.scale.shape == (room, case.k), f"scale has shape {got.scale.shape}, must be {(room, case.k)}")
  scales, codes = np.ones((room, case.k), np.float32), np.zeros(x.shape, np.float32)
  at = 0
  for start, end in rows:
    for first in range(start, end, block):
      own = slice(first, min(first + block, end))
      largest = np.abs(x[own].astype(np.float32)).max(0)
      scales[at] = np.where(largest > 0, (largest / np.float32(127.5)).astype(_BF16).astype(np.float32), 1)
      codes[own] = np.clip(
        np.rint((x[own].astype(np.float32) / scales[at]).astype(_BF16).astype(np.float32)), -128, 127
      )
      at += 1
  expect_equal(got.scale.astype(jnp.float32), scales, "scale of each block of rows")
  expect_equal(got.qvalue.astype(jnp.float32), codes, "codes in blocks of rows")


_EMAX = {"float8_e4m3fn": 8, "float8_e5m2": 15, "int8": 6, "int4": 2}


@check(
  "QNT-13",
  "rounding='ocp': scales are 2^(floor(log2 absmax) - emax), and what is past the codes saturates",
  _ONCE,
  "library",
)
def ocp_scales(backend: Backend, case: None) -> None:
  """On either side of a power of two, in both dtypes, with the largest code that each gives."""
  del backend, case
  magnitudes = np.array([1, 1.9921875, 2, 3, 448, 2.0**-100 * 1.5, 2.0**100 * 1.75, 2.0**-120, 0], np.float32)
  x = np.repeat(magnitudes[:, None], 4, 1) * np.array([1, -0.5, 0.25, 0], np.float32)
  for qtype, emax in _EMAX.items():
    top = float(jnp.finfo(qtype).max) if qtype.startswith("float") else QMAX[qtype] - 0.5
    floor = 2.0 ** np.floor(np.log2(np.maximum(magnitudes, 2.0**-126)))
    scale = np.where(magnitudes == 0, 1, np.maximum(floor * 2.0**-emax, 2.0**-126))
    for dtype in (jnp.bfloat16, jnp.float32):
      got = quantized(jnp.asarray(x, dtype), Quant(qtype=qtype, granularity=4, rounding="ocp"))
      expect_equal(got.scale.astype(jnp.float32)[:, 0], scale.astype(np.float32), f"scale of {qtype} {dtype.__name__}")
      largest = np.minimum(magnitudes / scale, top).astype(np.float32)
      code = np.rint(largest) if qtype.startswith("int") else largest.astype(numpy_dtype(qtype)).astype(np.float32)
      expect_equal(
        got.qvalue.astype(jnp.float32)[:, 0], np.minimum(code, top).astype(np.float32), f"largest code of {qtype}"
      )


@check(
  "QNT-13", "rounding='qwix': scales and codes are those of qwix's mxfp8, bit for bit in bfloat16", _ONCE, "library"
)
def qwix_mxfp8(backend: Backend, case: None) -> None:
  """Over 60 orders of magnitude: its logarithm errs in bfloat16, and a step differently taken shows."""
  del backend, case
  import qwix.pallas

  rng = np.random.default_rng(4)
  x = jnp.asarray(rng.standard_normal((256, 64)) * 10.0 ** rng.integers(-30, 30, (256, 1)), jnp.bfloat16)
  theirs = qwix.pallas.quantize(x, "mxfp8", channelwise_axes=(0,), tiled_axes={1: 32})
  quant = Quant(qtype="float8_e4m3fn", granularity=32, rounding="qwix", tiny_scale="qwix")
  ours = quantized(x, quant)
  expect_equal(ours.scale, np.asarray(theirs.scale), "scale")
  expect_equal(ours.qvalue, np.asarray(theirs.qvalue), "codes")


@check("QNT-14", "ranges of the caller are fixed ranges that never recompile", "real_short", weight=0.3)
def given_ranges(backend: Backend, case: Case) -> None:
  """Bits of a static recipe, forward and backward; the range of dout is widened by what moves into it."""
  e4m3, e5m2 = Quant(qtype="float8_e4m3fn"), Quant(qtype="float8_e5m2")
  run = both_ways(
    backend, recipe=Recipe(lhs=e4m3, rhs=dataclasses.replace(e4m3, granularity="channel_per_group"), dout=e5m2)
  )
  # A scale of 2^-7 moves into dout, so that its range times that is a number to write.
  moved = 3.5 / 448
  fixed = dataclasses.replace(e4m3, calibration="fixed,-3.5,3.5")
  of_dout = dataclasses.replace(e5m2, calibration=f"fixed,-{2 * moved},{2 * moved}")
  args = case.lhs, case.rhs, case.sizes, case.dout
  got = run(*args, None, Ranges(lhs=np.float32(3.5), rhs=np.float32(3.5), dout=np.float32(2)))
  expected = both_ways(backend, recipe=Recipe(lhs=fixed, rhs=fixed, dout=of_dout))(*args)
  for name, a, b in zip(("out", "dlhs", "drhs"), got, expected, strict=True):
    expect_equal(a, np.asarray(b), f"{name} with given ranges")
  before = run.programs()
  run(*args, None, Ranges(lhs=np.float32(1), rhs=np.float32(2), dout=np.float32(3)))
  expect(run.programs() == before, "other ranges compiled another program")


@check(
  "QNT-14", "an amax history keeps the last steps, without rows of no group and steps that overflow", _ONCE, "library"
)
def amax_history(backend: Backend, case: None) -> None:
  """The range is the largest of what is kept; the oldest step leaves."""
  del backend, case
  history = AmaxHistory.init(2)
  expect(float(history.range) == 0, f"the range of an empty history is {history.range}")
  x = np.array([[1, -3], [2, 0], [np.nan, 9]], np.float32)
  history = history.update(x, [1, 1])
  expect(float(history.range) == 3, f"the range is {history.range}, must be 3: the last row belongs to no group")
  history = history.update(np.array([[[4.0]], [[-2.0]]], np.float32), [0, 5])
  expect(float(history.absmax[0]) == 2, f"the newest absmax is {history.absmax[0]}, must be 2: group 0 has no rows")
  history = history.update(np.full((1, 1), np.inf, np.float32))
  expect_equal(history.absmax, np.array([0, 2], np.float32), "the history after a step that overflowed")


CHECKS = (row_blocks, ocp_scales, qwix_mxfp8, given_ranges, amax_history)

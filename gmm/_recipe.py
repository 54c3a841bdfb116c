"""Recipes: which operand is quantized to what, and how its scale is found."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, Literal

import jax.numpy as jnp

# Largest magnitude that a scale maps the absmax to (qwix's convention, SPEC QNT-2):
# the format's maximum, and for integers half a step beyond it.
QMAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.5, "int4": 7.5}

Granularity = Literal["tensor", "channel", "channel_per_group"] | int | tuple[int, int]
TinyScale = Literal["clamp", "qwix"]
Rounding = Literal["ocp", "qwix"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quant:
  """How one operand is quantized (SPEC QNT-2 to QNT-9).

  Attributes:
    qtype: name of the code dtype: "float8_e4m3fn", "float8_e5m2", "int8" or "int4".
    granularity: what shares a scale. "tensor": everything. "channel": one scale per
      row of lhs and dout (per column in `tgmm`), one per output column of rhs shared
      over groups. "channel_per_group": as "channel", but rhs has one per group and
      column. An int: blocks of that size along the contracting dimension, whichever the
      pass contracts; along rows they count from each group's first row. A pair: 2-D
      blocks of rhs, (contracting, output) of the forward pass.
    calibration: "absmax", "absmax,F" (absmax times F) or "fixed,-R,R" (one scale R/qmax
      for the whole tensor, whatever the granularity).
    scale_dtype: None for the operand's own dtype (qwix's choice), or "float32" to keep
      the scale of a bfloat16 operand unrounded.
    tiny_scale: "clamp" keeps scales at or above 2^-126; "qwix" replaces a scale below
      2^-63 by 1, which flushes the slice to zero, for the same bits as qwix.
    rounding: None for a scale of absmax/qmax; "ocp" for a power of two as the OCP MX
      specification has it, 2^(floor(log2 absmax) - emax); "qwix" for one as qwix's mxfp8
      has it, 2^ceil(log2(absmax/qmax)) in the scale's own arithmetic (SPEC QNT-13).
    clip_gradient: zero the gradient of elements outside the calibrated range (bounds
      inclusive) instead of passing it straight through.
  """

  qtype: str
  granularity: Granularity = "channel"
  calibration: str = "absmax"
  scale_dtype: str | None = None
  tiny_scale: TinyScale = "clamp"
  rounding: Rounding | None = None
  clip_gradient: bool = False

  def __post_init__(self):
    try:
      name = jnp.dtype(self.qtype).name
    except TypeError:
      name = str(self.qtype)
    object.__setattr__(self, "qtype", name)
    if name not in QMAX:
      raise ValueError(f"qtype {name!r} is not one of {', '.join(QMAX)}.")
    _check_granularity(self.granularity)
    _parse_calibration(self.calibration)
    object.__setattr__(self, "calibration", self.calibration.lower().replace(" ", ""))  # one spelling, as qwix reads it
    if self.scale_dtype is not None:
      if jnp.dtype(self.scale_dtype) != jnp.float32:
        raise ValueError(f"scale_dtype must be None or 'float32', got {self.scale_dtype!r}.")
      object.__setattr__(self, "scale_dtype", "float32")
    if self.tiny_scale not in ("clamp", "qwix"):
      raise ValueError(f"tiny_scale must be 'clamp' or 'qwix', got {self.tiny_scale!r}.")
    if self.rounding not in (None, "ocp", "qwix"):
      raise ValueError(f"rounding must be None, 'ocp' or 'qwix', got {self.rounding!r}.")

  @property
  def qmax(self) -> float:
    return QMAX[self.qtype]

  @property
  def max_exponent(self) -> int:
    """Exponent of the largest power of two that is a code (the OCP MX specification's emax)."""
    return {"float8_e4m3fn": 8, "float8_e5m2": 15, "int8": 6, "int4": 2}[self.qtype]

  @property
  def is_integer(self) -> bool:
    return self.qtype.startswith("int")

  @property
  def fixed_range(self) -> float | None:
    """R of "fixed,-R,R", or None when the range is taken from the data."""
    method, value = _parse_calibration(self.calibration)
    return value if method == "fixed" else None

  @property
  def absmax_factor(self) -> float:
    """F of "absmax,F" (1 when absent)."""
    method, value = _parse_calibration(self.calibration)
    return value if method == "absmax" else 1.0

  @property
  def one_scale(self) -> bool:
    """Whether one scale serves the whole tensor (a fixed range always has one)."""
    return self.fixed_range is not None or self.granularity == "tensor"

  @property
  def block(self) -> int | None:
    """Size of blocks along the contracting dimension, None for another granularity (and 2-D blocks)."""
    return None if self.one_scale or isinstance(self.granularity, str | tuple) else self.granularity

  @property
  def blocks_2d(self) -> tuple[int, int] | None:
    """(contracting, output) size of 2-D blocks, None for another granularity."""
    return self.granularity if isinstance(self.granularity, tuple) and not self.one_scale else None


def _check_granularity(granularity: Any) -> None:
  if granularity in ("tensor", "channel", "channel_per_group"):
    return
  sizes = granularity if isinstance(granularity, tuple) else (granularity,)
  is_blocks = all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sizes)
  counts = (2,) if isinstance(granularity, tuple) else (1,)
  if isinstance(granularity, str) or not is_blocks or len(sizes) not in counts:
    raise ValueError(
      f"granularity must be 'tensor', 'channel', 'channel_per_group', a positive block size along "
      f"the contracting dimension, or a pair of block sizes for rhs; got {granularity!r}."
    )


def _parse_calibration(text: str) -> tuple[str, float]:
  """("fixed", R) or ("absmax", F)."""
  method, *rest = str(text).lower().replace(" ", "").split(",")
  way_out = (
    f"calibration must be 'absmax', 'absmax,F' with F > 0, or a symmetric 'fixed,-R,R' with R > 0; got {text!r}."
  )
  try:
    values = [float(r) for r in rest]
  except ValueError:
    raise ValueError(way_out) from None
  if method == "absmax" and len(values) <= 1:
    factor = values[0] if values else 1.0
    if 0 < factor < float("inf"):
      return "absmax", factor
  if method == "fixed" and len(values) in (1, 2):
    low, high = (-values[0], values[0]) if len(values) == 1 else values
    if 0 < high < float("inf") and low == -high:
      return "fixed", high
  raise ValueError(way_out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """Which operands a grouped matmul quantizes, forward and backward (SPEC QNT-1, VJP-2).

  Attributes:
    lhs: quantization of the activations, or None.
    rhs: quantization of the weights, or None.
    dout: quantization of the incoming gradient in both backward matmuls, or None.
    scale_scope: "local": absmax over the rows and groups of this shard. "global": the
      absmax of every scale that rows or groups share is the maximum over `scale_axes`.
    scale_axes: mesh axis names over which rows or groups are split ("global" only).
    name: for messages and reports; not part of equality.
  """

  lhs: Quant | None = None
  rhs: Quant | None = None
  dout: Quant | None = None
  scale_scope: Literal["local", "global"] = "local"
  scale_axes: tuple[str, ...] = ()
  name: str = dataclasses.field(default="custom", compare=False)

  def __post_init__(self):
    for field in ("lhs", "rhs", "dout"):
      value = getattr(self, field)
      if value is not None and not isinstance(value, Quant):
        raise TypeError(f"Recipe.{field} must be a gmm.Quant or None, got {type(value).__name__}.")
    if isinstance(self.scale_axes, str):
      object.__setattr__(self, "scale_axes", (self.scale_axes,))
    object.__setattr__(self, "scale_axes", tuple(self.scale_axes))
    if self.scale_scope not in ("local", "global"):
      raise ValueError(f"scale_scope must be 'local' or 'global', got {self.scale_scope!r}.")
    if (self.scale_scope == "global") != bool(self.scale_axes):
      raise ValueError(
        f"scale_scope='global' needs the mesh axes to take the maximum over in scale_axes, and 'local' none; "
        f"got scale_scope={self.scale_scope!r}, scale_axes={self.scale_axes!r}."
      )
    for field in ("lhs", "dout"):
      quant = getattr(self, field)
      if quant is not None and isinstance(quant.granularity, tuple):
        raise ValueError(f"2-D blocks are for rhs only; Recipe.{field} has granularity {quant.granularity!r}.")
    if self.lhs is not None and self.rhs is None:
      raise ValueError("A recipe that quantizes lhs must quantize rhs too (activation-only is not defined).")
    if self.dout is not None and self.rhs is None:
      raise ValueError("A recipe that quantizes dout must quantize rhs too.")

  @property
  def is_quantized(self) -> bool:
    return any(q is not None for q in (self.lhs, self.rhs, self.dout))

  def check_blocks(self, k: int, n: int) -> None:
    """Raises ValueError where a block size of lhs or rhs does not divide k or n (SPEC QNT-3)."""
    for name, quant in (("lhs", self.lhs), ("rhs", self.rhs)):
      if quant is not None:
        along_k, along_n = quant.blocks_2d or (quant.block, None)
        self._check_block(name, along_k, "k", k)
        self._check_block(name, along_n, "n", n)

  def check_gradient_blocks(self, n: int) -> None:
    """Raises ValueError where a block size of dlhs, which contracts n, does not divide it (SPEC QNT-3)."""
    for name, quant in (("rhs", self.rhs), ("dout", self.dout)):
      if quant is not None:
        self._check_block(name, quant.block, "n", n)

  def _check_block(self, name: str, block: int | None, dimension: str, size: int) -> None:
    if block is not None and size % block:
      raise ValueError(
        f"Recipe {self.name!r} quantizes {name} in blocks of {block} along {dimension} = {size}, which they do not "
        f"divide. Pad {dimension} with zeros to a multiple of {block}, or give a Recipe with blocks that divide it."
      )

  @staticmethod
  def from_qwix(rule: Any, *, tiny_scale: TinyScale = "clamp") -> Recipe:
    """Returns the recipe that a qwix rule describes, or raises on a field not honoured (SPEC QNT-11)."""
    from gmm import _qwix  # loads qwix

    return _qwix.from_qwix(rule, tiny_scale=tiny_scale)

  def to_qwix(self, **keys: Any) -> Any:
    """Returns the `qwix.QtRule` that describes the recipe; keys are its module_path and op_names (SPEC QNT-11)."""
    from gmm import _qwix  # loads qwix

    return _qwix.to_qwix(self, **keys)

  def replace_quants(self, **changes: Any) -> Recipe:
    """Returns the recipe with `changes` applied to each of its `Quant`s (for example tiny_scale="qwix")."""
    quants = {f: getattr(self, f) for f in ("lhs", "rhs", "dout")}
    return dataclasses.replace(self, **{f: q and dataclasses.replace(q, **changes) for f, q in quants.items()})


def _named() -> dict[str, Recipe]:
  e4m3 = Quant(qtype="float8_e4m3fn")
  e5m2 = Quant(qtype="float8_e5m2")
  fixed = Quant(qtype="float8_e4m3fn", granularity="tensor", calibration="fixed,-224,224")
  tensor = Quant(qtype="float8_e4m3fn", granularity="tensor")
  int8 = Quant(qtype="int8")
  row_128, square_128 = (Quant(qtype="float8_e4m3fn", granularity=b) for b in (128, (128, 128)))
  mx = Quant(qtype="float8_e4m3fn", granularity=32, rounding="ocp")
  return {
    "bf16": Recipe(),
    "fp8_dynamic": Recipe(lhs=e4m3, rhs=e4m3, dout=e5m2),
    "fp8_static": Recipe(lhs=fixed, rhs=fixed, dout=e5m2),
    "fp8_calibrated": Recipe(lhs=tensor, rhs=tensor, dout=e5m2),
    "int8_dynamic": Recipe(lhs=int8, rhs=int8),
    "int8_weight_only": Recipe(rhs=int8),
    "int4_weight_only": Recipe(rhs=Quant(qtype="int4")),
    "fp8_block": Recipe(lhs=row_128, rhs=square_128, dout=row_128),
    "mxfp8": Recipe(lhs=mx, rhs=mx, dout=mx),
  }


def recipe_names() -> tuple[str, ...]:
  """Names that `recipe` takes."""
  return tuple(_named())


def recipe(name: str | Recipe | None, **quant_changes: Any) -> Recipe:
  """Returns the named recipe (SPEC QNT-10).

  Args:
    name: one of `recipe_names()`, a `Recipe` (returned as it is), or None for "bf16".
    **quant_changes: fields of `Quant` to set in every operand of the recipe, for example
      tiny_scale="qwix".

  Raises:
    ValueError: an unknown name; the message lists the known ones and the closest.
    TypeError: anything that is neither a name nor a `Recipe`.
  """
  if name is None:
    name = "bf16"
  if isinstance(name, Recipe):
    return name.replace_quants(**quant_changes) if quant_changes else name
  if not isinstance(name, str):
    raise TypeError(f"recipe must be a name, a gmm.Recipe or None, got {type(name).__name__}.")
  named = _named()
  if name not in named:
    close = difflib.get_close_matches(name, named, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"Unknown recipe {name!r}; known: {', '.join(named)}.{hint}")
  found = dataclasses.replace(named[name], name=name)
  return found.replace_quants(**quant_changes) if quant_changes else found

"""qwix interoperability: its rules as recipes, and its interception kept away from backends (SPEC QNT-11).

qwix loads Pallas and Flax, so it is imported inside the functions that need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from gmm._recipe import Quant, Recipe, TinyScale

if TYPE_CHECKING:
  import qwix

# Fields of a rule that say where it applies, not how to quantize.
_KEYS = ("module_path", "op_names")
# Recipe operand -> the rule's fields for its code dtype and its calibration.
_OPERANDS = {
  "lhs": ("act_qtype", "act_calibration_method"),
  "rhs": ("weight_qtype", "weight_calibration_method"),
  "dout": ("bwd_qtype", "bwd_calibration_method"),
}
_HONOURED = (*_KEYS, *(field for fields in _OPERANDS.values() for field in fields), "disable_channelwise_axes")


def from_qwix(rule: Any, *, tiny_scale: TinyScale = "clamp") -> Recipe:
  """Returns the recipe that a qwix rule describes (SPEC QNT-11).

  act_*, weight_* and bwd_* become lhs, rhs and dout; each has one scale per row or output
  column, or per tensor with disable_channelwise_axes or a fixed range. module_path and
  op_names say where a rule applies and are not looked at.

  Args:
    rule: a `qwix.QuantizationRule` or `qwix.QtRule`.
    tiny_scale: as in `Quant`, for all operands; a rule has no word for it. "qwix" gives the
      codes that qwix's own ops make.

  Raises:
    TypeError: not a rule.
    ValueError: a field that is not honoured differs from its default; the message names it.
  """
  if not dataclasses.is_dataclass(rule) or isinstance(rule, type) or not hasattr(rule, "weight_qtype"):
    raise TypeError(f"from_qwix needs a qwix.QuantizationRule or qwix.QtRule, got {type(rule).__name__}.")
  for field in dataclasses.fields(rule):
    if field.name not in _HONOURED and not _is_default(field, getattr(rule, field.name)):
      raise ValueError(
        f"{type(rule).__name__}.{field.name} = {getattr(rule, field.name)!r} is not honoured by gmm; leave it at its "
        f"default. Honoured are {', '.join(f for f in _HONOURED if f not in _KEYS)}."
      )
  granularity = "tensor" if getattr(rule, "disable_channelwise_axes", False) else "channel"
  quants = {operand: _quant_of(rule, *fields, granularity, tiny_scale) for operand, fields in _OPERANDS.items()}
  for operand in ("lhs", "dout"):
    if quants[operand] is not None and quants["rhs"] is None:
      raise ValueError(
        f"{type(rule).__name__}.{_OPERANDS[operand][0]} is set but weight_qtype is not, with which qwix quantizes "
        f"nothing. Set weight_qtype too, or neither."
      )
  return Recipe(lhs=quants["lhs"], rhs=quants["rhs"], dout=quants["dout"], name="qwix")


def _is_default(field: dataclasses.Field, value: Any) -> bool:
  if field.name == "act_static_scale":
    return value is None or value is False  # a provider fills None in as False
  if field.name in ("act_batch_axes", "channelwise_noise_axes"):
    return tuple(value) == (0,)  # a collection, also spelled as a list
  if field.name == "additional_qt_config":
    return not value
  return field.default is not dataclasses.MISSING and value == field.default


def _quant_of(rule: Any, qtype: str, calibration: str, granularity: Any, tiny_scale: TinyScale) -> Quant | None:
  if getattr(rule, qtype, None) is None:
    return None
  method = getattr(rule, calibration)
  if method is None:
    method = "absmax"  # what a provider fills in
  try:
    quant = Quant(qtype=getattr(rule, qtype), tiny_scale=tiny_scale)
  except ValueError as error:
    raise ValueError(f"{type(rule).__name__}.{qtype} is not honoured by gmm: {error}") from None
  try:
    quant = dataclasses.replace(quant, granularity=granularity, calibration=method)
  except ValueError as error:
    raise ValueError(f"{type(rule).__name__}.{calibration} is not honoured by gmm: {error}") from None
  return dataclasses.replace(quant, granularity="tensor") if quant.fixed_range is not None else quant


def to_qwix(recipe: Recipe, **keys: Any) -> qwix.QtRule:
  """Returns the qwix rule that describes a recipe (SPEC QNT-11).

  `from_qwix(to_qwix(r), tiny_scale=t) == r` where t is r's tiny_scale and its fixed ranges say
  granularity "tensor" (any other means the same).

  Args:
    recipe: the recipe.
    **keys: module_path and op_names of the rule, which say where it applies.

  Raises:
    ValueError: qwix has no word for something in the recipe; the message names the field.
    TypeError: another key.
  """
  import qwix

  for key in keys:
    if key not in _KEYS:
      raise TypeError(f"to_qwix takes {' and '.join(_KEYS)} of the rule, got {key!r}.")
  if recipe.scale_scope != "local":
    raise ValueError(f"A qwix rule cannot express scale_scope={recipe.scale_scope!r}; only 'local'.")
  quants = {operand: getattr(recipe, operand) for operand in _OPERANDS}
  quants = {operand: quant for operand, quant in quants.items() if quant is not None}
  for operand, quant in quants.items():
    _check_expressible(operand, quant)
  if len({quant.tiny_scale for quant in quants.values()}) > 1:
    raise ValueError("A qwix rule cannot express a tiny_scale per operand; give all of them the same.")
  granularities = {quant.granularity for quant in quants.values() if quant.fixed_range is None}
  if len(granularities) > 1:
    raise ValueError(
      f"A qwix rule has one granularity for lhs, rhs and dout (disable_channelwise_axes), but the recipe has "
      f"{', '.join(f'{o}: {q.granularity!r}' for o, q in quants.items())}."
    )
  fields = {}
  for operand, quant in quants.items():
    qtype, calibration = _OPERANDS[operand]
    fields |= {qtype: quant.qtype, calibration: quant.calibration}
  return qwix.QtRule(**keys, **fields, disable_channelwise_axes=granularities == {"tensor"})


def _check_expressible(operand: str, quant: Quant) -> None:
  """Raises ValueError for a field that no rule of qwix has."""
  if quant.fixed_range is None and quant.granularity not in ("tensor", "channel"):
    raise ValueError(
      f"A qwix rule cannot express {operand}.granularity={quant.granularity!r} for a grouped matmul; only 'channel' "
      f"and 'tensor'."
    )
  if quant.scale_dtype is not None:
    raise ValueError(f"A qwix rule cannot express {operand}.scale_dtype={quant.scale_dtype!r}; only None.")
  if quant.rounding is not None:
    raise ValueError(
      f"A qwix rule cannot express {operand}.rounding={quant.rounding!r} for a grouped matmul; only None."
    )
  if quant.clip_gradient:
    raise ValueError(f"A qwix rule cannot express {operand}.clip_gradient=True; only False.")


def rule_in_force(op_name: str = "gmm") -> Recipe:
  """Returns the recipe of the rule that `qwix.quantize_model` put in force for an op (SPEC QNT-11).

  Args:
    op_name: what the rule's op_names call the op.

  Raises:
    ValueError: no rule is in force here, or it quantizes nothing, or it has a field that is
      not honoured: never silently unquantized.
  """
  import qwix.pallas

  rule = qwix.pallas.get_current_rule(op_name)
  if rule is None:
    raise ValueError(
      f"recipe='qwix' found no rule in force for op {op_name!r}. Call it inside a model that qwix.quantize_model "
      f"returned, with a rule whose module_path matches this module and whose op_names is empty or names "
      f"{op_name!r}; or pass a recipe of gmm (None for no quantization)."
    )
  recipe = from_qwix(rule)
  if not recipe.is_quantized:
    raise ValueError(
      f"recipe='qwix' found a rule in force for op {op_name!r} that quantizes nothing (weight_qtype is None). Set "
      f"weight_qtype, and act_qtype and bwd_qtype as needed; or pass recipe=None for no quantization. Rule: {rule}"
    )
  return recipe


def outside_interception(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Returns fn run where qwix patches nothing in this thread, so that no operand is quantized twice.

  jit works inside: a provider with disable_jit=True switches it off for the model, which would
  run a kernel's loops in Python.
  """
  # qwix has no public name for this; disable_interceptions there is the same without the jit.
  from qwix._src.interception import interception_manager

  @functools.wraps(fn)
  def outside(*args: Any, **kwargs: Any) -> Any:
    disabled = interception_manager.disable_interception()
    try:
      with jax.disable_jit(False) if disabled else contextlib.nullcontext():
        return fn(*args, **kwargs)
    finally:
      interception_manager.enable_interception(disabled)

  return outside

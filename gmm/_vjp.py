"""The grouped matmuls with their gradients (SPEC VJP-1 to VJP-8).

Top to bottom: quantize, multiply, and for the gradients dlhs and drhs. A backend only
multiplies; which codes and scales meet in which matmul is said here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gmm._absmax import absmax
from gmm._call import Call, Candidates, Todo, call_gmm, call_tgmm, compiled
from gmm._groups import covered_rows, local_ranges
from gmm._protocol import Pass, Unsupported
from gmm._qarray import Operand, QArray
from gmm._quantize import in_range, quantize, scale_of_range
from gmm._ranges import Ranges
from gmm._recipe import Quant, Recipe
from gmm._tiling import Tiling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What is static in one call of an op.

  Attributes:
    candidates: the backends to choose from, for each pass by itself.
    recipe: which operands are quantized.
    pass_: which pass the primal call is; second order reaches the other ones.
    transpose_rhs: rhs is stored [g, n, k].
    num_groups: local groups.
    lhs_dtype, rhs_dtype, out_dtype: unquantized dtypes; `tgmm`: rhs is dout.
    lhs_is_codes, rhs_is_codes: the operand came as a `QArray`: it has no gradient.
    partial_dtype: dtype of partial_sum, or None.
    precision, tiling: as given to the op.
  """

  candidates: Candidates
  recipe: Recipe
  pass_: Pass = "fwd"
  transpose_rhs: bool = False
  num_groups: int
  lhs_dtype: str
  rhs_dtype: str
  out_dtype: str
  lhs_is_codes: bool = False
  rhs_is_codes: bool = False
  partial_dtype: str | None = None
  precision: Any = None
  tiling: Tiling = dataclasses.field(default_factory=Tiling)

  @property
  def multiplies_codes(self) -> bool:
    """Whether any operand is quantized: then only the first derivative is defined (SPEC VJP-6)."""
    return self.recipe.is_quantized or self.lhs_is_codes or self.rhs_is_codes

  def call(self, pass_: Pass, out_dtype: str, transpose_rhs: bool = False) -> Call:
    # Of the op's own pass the tile stands in `fwd`, of its gradients in their own field.
    tile = self.tiling.fwd if pass_ == self.pass_ else getattr(self.tiling, pass_)
    return Call(
      candidates=self.candidates,
      pass_=pass_,
      out_dtype=out_dtype,
      precision=self.precision,
      tile=tile,
      transpose_rhs=transpose_rhs,
    )


# ---- gmm -------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@compiled
def gmm(
  plan: Plan,
  lhs: Operand,
  rhs: Operand,
  sizes: jax.Array,
  offset: jax.Array | None,
  partial_sum: jax.Array | None,
  ranges: Ranges | None,
) -> jax.Array:
  """out[i] = lhs[i] @ rhs[group of i] (+ partial_sum), [m, n]; undifferentiated."""
  quant, todo = plan.recipe.lhs, Todo()
  if quant is None or isinstance(lhs, QArray) or _needs_collective(plan.recipe, quant):
    lhs = _quantize_lhs(plan, lhs, sizes, offset, ranges)
  elif ranges is None or ranges.lhs is None:
    todo = Todo(quant)  # for the backend to do, if it can
  else:
    starts, ends = local_ranges(sizes, offset, plan.num_groups)
    todo = Todo(scale_of_range(lhs, quant, "rows", ranges.lhs, starts=starts, ends=ends))
  rhs = _quantize_rhs(plan, rhs, sizes, offset, ranges)
  return call_gmm(_own(plan), lhs, rhs, sizes, offset, lhs_todo=todo, partial_sum=partial_sum)


def _own(plan: Plan) -> Call:
  return plan.call(plan.pass_, plan.out_dtype, plan.transpose_rhs)


@compiled
def _gmm_fwd(plan, lhs, rhs, sizes, offset, partial_sum, ranges):
  if not plan.multiplies_codes:
    # Through the op itself, so that a second derivative finds its rule.
    out = gmm(plan, lhs, rhs, sizes, offset, partial_sum, None)
    return out, (*_named(lhs, rhs), None, None, sizes, offset, None)
  n = rhs.shape[1 if plan.transpose_rhs else 2]
  if not plan.lhs_is_codes:
    plan.recipe.check_gradient_blocks(n)
  lhs, rhs, partial_sum = _first_order_only((lhs, rhs, partial_sum))
  starts, ends = local_ranges(sizes, offset, plan.num_groups)
  axes, limits = plan.recipe.scale_axes, ranges or Ranges()
  keep_lhs = _clip_mask(plan.recipe.lhs, lhs, "rows", starts, ends, axes, limits.lhs)
  keep_rhs = _clip_mask(plan.recipe.rhs, rhs, _rhs_kind(plan), starts, ends, axes, limits.rhs)
  # 1. Quantize. The residuals are the codes (1 byte an element) wherever the gradients reuse
  #    them, and the operand as given where they quantize it anew.
  codes = _quantize_lhs(plan, lhs, sizes, offset, ranges), _quantize_rhs(plan, rhs, sizes, offset, ranges)
  kept_lhs = lhs if _is_requantized(plan.recipe.lhs) else codes[0]
  kept_rhs = rhs if _is_requantized(plan.recipe.rhs) else codes[1]
  kept = _named(kept_lhs, kept_rhs)
  # 2. Multiply.
  out = call_gmm(_own(plan), *codes, sizes, offset, lhs_todo=Todo(), partial_sum=partial_sum)
  return out, (*kept, keep_lhs, keep_rhs, sizes, offset, ranges)


def _named(lhs: Operand, rhs: Operand) -> tuple[Operand, Operand]:
  """The residuals under the names that remat policies know them by (SPEC VJP-8)."""
  return checkpoint_name(lhs, "gmm_lhs"), checkpoint_name(rhs, "gmm_rhs")


@compiled
def _gmm_bwd(plan, residuals, dout):
  lhs, rhs, keep_lhs, keep_rhs, sizes, offset, ranges = residuals
  dlhs = drhs = None  # of an operand that came quantized
  if not plan.lhs_is_codes:
    dlhs = _masked(keep_lhs, _dlhs(plan, dout, rhs, sizes, offset, ranges))
  if not plan.rhs_is_codes:
    drhs = _drhs(plan, lhs, dout, sizes, offset, ranges)
    drhs = _masked(keep_rhs, drhs.swapaxes(1, 2) if plan.transpose_rhs else drhs)
  dpartial = None if plan.partial_dtype is None else dout.astype(plan.partial_dtype)
  return dlhs, drhs, None, None, dpartial, None


gmm.defvjp(_gmm_fwd, _gmm_bwd)


def _dlhs(
  plan: Plan,
  dout: jax.Array,
  rhs: Operand,
  sizes: jax.Array,
  offset: jax.Array | None,
  ranges: Ranges | None,
) -> jax.Array:
  """dout against the weights' other axis, [m, k] (SPEC VJP-2)."""
  if not plan.multiplies_codes:
    other = dataclasses.replace(
      plan,
      pass_="dlhs",
      transpose_rhs=not plan.transpose_rhs,
      lhs_dtype=plan.out_dtype,
      out_dtype=plan.lhs_dtype,
      partial_dtype=None,
      tiling=Tiling(fwd=plan.tiling.dlhs),
    )
    return gmm(other, dout, rhs, sizes, offset, None, None)
  codes, prescale = rhs, None
  if isinstance(rhs, QArray) and not _keeps_its_scale(plan, rhs):
    # The forward scale of each output column now stands on the contracting axis: it moves into dout.
    scale = rhs.scale.swapaxes(1, 2) if plan.transpose_rhs else rhs.scale
    codes, prescale = rhs.qvalue, scale[:, 0, :].astype(jnp.float32)
  elif plan.recipe.rhs is not None and not isinstance(rhs, QArray):
    # Quantized anew, in blocks along n, which is contracted now.
    starts, ends = local_ranges(sizes, offset, plan.num_groups)
    codes = quantize(rhs, plan.recipe.rhs, "rhs" if plan.transpose_rhs else "rhs_t", starts=starts, ends=ends)
  operand, todo = _dout_todo(plan, dout, prescale, "rows", sizes, offset, ranges)
  call = plan.call("dlhs", plan.lhs_dtype, not plan.transpose_rhs)
  return call_gmm(call, operand, codes, sizes, offset, lhs_todo=todo)


def _drhs(
  plan: Plan,
  lhs: Operand,
  dout: jax.Array,
  sizes: jax.Array,
  offset: jax.Array | None,
  ranges: Ranges | None,
) -> jax.Array:
  """lhs^T @ dout per group, [g, k, n] (SPEC VJP-2)."""
  if not plan.multiplies_codes:
    other = dataclasses.replace(
      plan,
      pass_="drhs",
      transpose_rhs=False,
      rhs_dtype=plan.out_dtype,
      out_dtype=plan.rhs_dtype,
      partial_dtype=None,
      tiling=Tiling(fwd=plan.tiling.drhs),
    )
    return tgmm(other, lhs, dout, sizes, offset)
  codes, prescale, lhs_todo = lhs, None, Todo()
  if isinstance(lhs, QArray) and lhs.row_block is None:
    # The forward scale of each row stands on the contracting axis: it moves into dout.
    if lhs.scale.shape[1] != 1:
      raise Unsupported(_no_block_gradient("lhs", lhs))
    codes, prescale = lhs.qvalue, lhs.scale.astype(jnp.float32)
  elif plan.recipe.lhs is not None and not isinstance(lhs, QArray):
    lhs_todo = Todo(plan.recipe.lhs)  # anew, in blocks of rows, which are contracted now
  operand, dout_todo = _dout_todo(plan, dout, prescale, "cols", sizes, offset, ranges)
  call, g = plan.call("drhs", plan.rhs_dtype), plan.num_groups
  return call_tgmm(call, codes, operand, sizes, offset, num_groups=g, lhs_todo=lhs_todo, dout_todo=dout_todo)


# ---- tgmm ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@compiled
def tgmm(plan: Plan, lhs: Operand, dout: Operand, sizes: jax.Array, offset: jax.Array | None) -> jax.Array:
  """lhs_g^T @ dout_g of each local group, [g, k, n], with nothing quantized here."""
  call = plan.call(plan.pass_, plan.out_dtype)
  return call_tgmm(call, lhs, dout, sizes, offset, num_groups=plan.num_groups, dout_todo=Todo())


def _tgmm_fwd(plan, lhs, dout, sizes, offset):
  return tgmm(plan, lhs, dout, sizes, offset), (lhs, dout, sizes, offset)


@compiled
def _tgmm_bwd(plan, residuals, ct):
  lhs, dout, sizes, offset = residuals
  # The op is bilinear: each cotangent is a gmm of the other operand with ct as the weights.
  to_lhs = dataclasses.replace(
    plan,
    pass_="dlhs",
    transpose_rhs=True,
    lhs_dtype=plan.rhs_dtype,
    rhs_dtype=plan.out_dtype,
    out_dtype=plan.lhs_dtype,
    tiling=Tiling(),
  )
  to_dout = dataclasses.replace(
    plan, pass_="fwd", lhs_dtype=plan.lhs_dtype, rhs_dtype=plan.out_dtype, out_dtype=plan.rhs_dtype, tiling=Tiling()
  )
  dlhs = None if isinstance(lhs, QArray) else gmm(to_lhs, _plain(dout), ct, sizes, offset, None, None)
  ddout = None if isinstance(dout, QArray) else gmm(to_dout, _plain(lhs), ct, sizes, offset, None, None)
  return dlhs, ddout, None, None


tgmm.defvjp(_tgmm_fwd, _tgmm_bwd)


def tgmm_plan(plan: Plan) -> Plan:
  """The plan of a public tgmm as `tgmm` reads it: out_dtype is the result's, rhs_dtype dout's."""
  return dataclasses.replace(plan, rhs_dtype=plan.out_dtype, out_dtype=plan.rhs_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@compiled
def tgmm_quantized(plan: Plan, lhs: Operand, dout: jax.Array, sizes: jax.Array, offset: jax.Array | None) -> jax.Array:
  """drhs of a quantized gmm, [g, k, n]: lhs quantized as forward, dout as backward."""
  if not _is_requantized(plan.recipe.lhs):
    lhs = _quantize_lhs(plan, lhs, sizes, offset, None)
  return _drhs(plan, lhs, dout, sizes, offset, None)


def _refuse_gradient(plan, *operands):
  del operands
  raise Unsupported(
    f"tgmm under the quantized recipe {plan.recipe.name!r} is itself a gradient, and has none: rounding has no "
    f"derivative beyond straight-through. Use recipe='bf16'."
  )


tgmm_quantized.defvjp(_refuse_gradient, lambda plan, residuals, ct: ())


# ---- the steps -------------------------------------------------------------------------


def _quantize_lhs(plan: Plan, lhs: Operand, sizes, offset, ranges: Ranges | None) -> Operand:
  return _quantized(plan, plan.recipe.lhs, lhs, "rows", sizes, offset, ranges and ranges.lhs)


def _quantize_rhs(plan: Plan, rhs: Operand, sizes, offset, ranges: Ranges | None) -> Operand:
  return _quantized(plan, plan.recipe.rhs, rhs, _rhs_kind(plan), sizes, offset, ranges and ranges.rhs)


def _rhs_kind(plan: Plan) -> Literal["rhs", "rhs_t"]:
  return "rhs_t" if plan.transpose_rhs else "rhs"


def _quantized(plan: Plan, quant: Quant | None, x: Operand, kind, sizes, offset, limit: jax.Array | None) -> Operand:
  """x by the recipe, and the range R if the caller gave one; an operand that comes quantized stays as it is."""
  if quant is None or isinstance(x, QArray):
    return x
  starts, ends = local_ranges(sizes, offset, plan.num_groups)
  options = {"starts": starts, "ends": ends, "scale_axes": plan.recipe.scale_axes}
  known = quant if limit is None else scale_of_range(x, quant, kind, limit, **options)
  return quantize(x, known, kind, **options)


def _is_requantized(quant: Quant | None) -> bool:
  """Whether a gradient quantizes this operand anew: its forward blocks lie along what is no longer contracted."""
  return quant is not None and quant.block is not None


def _needs_collective(recipe: Recipe, quant: Quant) -> bool:
  """Whether the scale of these rows is a maximum over the mesh, which no backend takes."""
  return recipe.scale_scope == "global" and quant.one_scale


def _dout_todo(
  plan: Plan, dout, prescale, kind: Literal["rows", "cols"], sizes, offset, ranges: Ranges | None
) -> tuple[Operand, Todo]:
  """What is left for the backend to do to dout; a scale over the mesh or of a given range is found here."""
  quant, limit = plan.recipe.dout, ranges and ranges.dout
  if quant is None or (plan.recipe.scale_scope == "local" and limit is None):
    return dout, Todo(quant, prescale)
  starts, ends = local_ranges(sizes, offset, plan.num_groups)
  options = {"starts": starts, "ends": ends, "scale_axes": plan.recipe.scale_axes}
  if limit is None:
    return quantize(dout, quant, kind, **options, prescale=prescale), Todo()
  # The range is that of dout as it comes; what is multiplied into it widens it as much.
  factor = 1.0 if prescale is None else _largest(prescale, kind, starts, ends, dout.shape[0])
  return dout, Todo(scale_of_range(dout, quant, kind, limit * factor, **options), prescale)


def _largest(prescale: jax.Array, kind: Literal["rows", "cols"], starts, ends, m: int) -> jax.Array:
  """The largest factor that a used row of dout is multiplied with."""
  if prescale.shape[0] == 1:
    return absmax(prescale)
  used = ends > starts if kind == "rows" else covered_rows(starts, ends, m)
  return absmax(jnp.where(used[:, None], prescale, 0.0))


def _keeps_its_scale(plan: Plan, rhs: QArray) -> bool:
  """Whether the scale of rhs stays with its codes in dlhs, a factor of the partial sums or of the result."""
  if not plan.rhs_is_codes:
    return plan.recipe.rhs is not None and plan.recipe.rhs.blocks_2d is not None
  # A QArray of the caller's: only its shape tells.
  along_k, along_n = rhs.scale.shape[1:][:: -1 if plan.transpose_rhs else 1]
  n = rhs.shape[1 if plan.transpose_rhs else 2]
  if along_k > 1 and along_n == n > 1:
    raise Unsupported(_no_block_gradient("rhs", rhs))
  return along_k > 1 or along_n not in (1, n)


def _clip_mask(quant: Quant | None, x: Operand, kind, starts, ends, axes, limit: jax.Array | None) -> jax.Array | None:
  if quant is None or not quant.clip_gradient or isinstance(x, QArray):
    return None
  if limit is None and quant.fixed_range is None and quant.absmax_factor >= 1:
    return None  # everything lies in the range
  return in_range(x, quant, kind, starts, ends, axes, limit)


def _masked(keep: jax.Array | None, gradient: jax.Array) -> jax.Array:
  return gradient if keep is None else jnp.where(keep, gradient, jnp.zeros((), gradient.dtype))


def _plain(x: Operand) -> jax.Array:
  if isinstance(x, QArray):
    raise Unsupported("The gradient of tgmm with respect to one operand needs the other unquantized.")
  return x


def _no_block_gradient(name: str, x: QArray) -> str:
  return (
    f"{name} came as codes {x.shape} with a scale {x.scale.shape} that varies along the contracting axis: the gradient "
    f"needs it in blocks along another axis, which codes cannot give. Pass {name} unquantized, with a recipe that has "
    f"these blocks."
  )


_SECOND_ORDER = (
  "Second-order and forward-mode derivatives of a quantized grouped matmul are not defined: "
  "rounding has no derivative beyond straight-through. Differentiate once, or use recipe='bf16'."
)


@jax.custom_vjp
def _first_order_only(x):
  """The identity, for values that must not be differentiated a second time."""
  return x


def _refuse_second_order(x):
  del x
  raise Unsupported(_SECOND_ORDER)


_first_order_only.defvjp(_refuse_second_order, lambda residuals, ct: (ct,))

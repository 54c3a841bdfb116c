"""The public grouped matmuls: check, normalise, and hand to the custom VJP."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gmm import _calibrate, _validate, _vjp
from gmm._call import candidates
from gmm._groups import canonical_sizes, covered_rows, local_ranges
from gmm._manual_axes import vary_alike
from gmm._protocol import Backend, Pass, Problem
from gmm._qarray import Operand, OperandLike, QArray
from gmm._ranges import Ranges, with_ranges
from gmm._recipe import Recipe
from gmm._recipe import recipe as _named_recipe
from gmm._tiling import Tiling, as_tiling


def gmm(
  lhs: OperandLike,
  rhs: OperandLike,
  group_sizes: Any,
  *,
  backend: str | Backend = "auto",
  recipe: str | Recipe | None = None,
  group_offset: Any = None,
  transpose_rhs: bool = False,
  partial_sum: jax.Array | np.ndarray | None = None,
  existing_out: jax.Array | np.ndarray | None = None,
  ranges: Ranges | None = None,
  precision: Any = None,
  preferred_element_type: Any = None,
  tiling: Any = None,
) -> jax.Array:
  """Multiplies each contiguous block of rows of lhs with the weights of its own group (SPEC GMM-1).

  Differentiable in lhs, rhs, partial_sum and existing_out; works under jit, vmap, scan,
  remat and shard_map. New group sizes never recompile.

  Args:
    lhs: [m, k], float, or a `QArray` of codes [m, k].
    rhs: [g, k, n], or [g, n, k] with transpose_rhs; float or `QArray`.
    group_sizes: integer vector; rows [sum(group_sizes[:j]), sum(group_sizes[:j+1])) belong
      to group j. Rows past the sum belong to no group.
    backend: a name from `gmm.backends()`, a `Backend`, or "auto". A named backend does the
      work or raises; it never falls back.
    recipe: what to quantize: a name from `gmm.recipe_names()`, a `Recipe`, None for no
      quantization, or "qwix" for the rule that `qwix.quantize_model` put in force.
    group_offset: int or integer scalar when rhs holds only the groups
      [group_offset, group_offset + g) of group_sizes; rows of other groups count as
      uncovered.
    transpose_rhs: rhs is stored [g, n, k].
    partial_sum: [m, n], added in float32 before the output is rounded; uncovered rows
      return it.
    existing_out: [m, n], returned in uncovered rows, which are zero without it.
    ranges: ranges of operands that the caller knows, one scale each, instead of the
      recipe's own calibration (SPEC QNT-14).
    precision: as in `jax.lax.dot`; None multiplies float32 operands at float32 precision.
    preferred_element_type: result dtype; None for the unquantized dtype of lhs.
    tiling: None, (tile_m, tile_k, tile_n), nine ints, or `gmm.Tiling`.

  Returns:
    [m, n] of preferred_element_type; uncovered rows are exactly zero.

  Raises:
    ValueError, TypeError: an argument does not fit, before anything is compiled (SPEC REG-6).
    Unsupported: the backend cannot; the message names the condition and the way out.
  """
  plan, operands, existing_out = _prepare(
    lhs,
    rhs,
    group_sizes,
    backend=backend,
    recipe=recipe,
    group_offset=group_offset,
    transpose_rhs=transpose_rhs,
    partial_sum=partial_sum,
    existing_out=existing_out,
    ranges=ranges,
    precision=precision,
    preferred_element_type=preferred_element_type,
    tiling=tiling,
  )
  x, weights, sizes, offset, _, _ = operands
  _calibrate.observe(x, weights, sizes, offset)
  out: jax.Array = _vjp.gmm(plan, *operands)
  if existing_out is None:
    return out
  covered = covered_rows(*local_ranges(sizes, offset, plan.num_groups), out.shape[0])
  return jnp.where(covered[:, None], out, existing_out.astype(out.dtype))


def which_backend(lhs: OperandLike, rhs: OperandLike, group_sizes: Any, **arguments: Any) -> dict[Pass, str]:
  """Tells which backend `gmm` takes for each pass, without computing anything (SPEC REG-4).

  Args:
    lhs, rhs, group_sizes, **arguments: as in `gmm`.

  Returns:
    {"fwd": name, "dlhs": name, "drhs": name}; a pass that has no gradient is absent.

  Raises:
    ValueError, TypeError, Unsupported: as `gmm` and its gradient would.
  """
  plan, (lhs, rhs, sizes, offset, partial_sum, ranges), _ = _prepare(lhs, rhs, group_sizes, **arguments)
  chosen: dict[Pass, str] = {}

  def noting(backend: Backend) -> Backend:
    def supports(problem: Problem) -> str | None:
      reason = backend.supports(problem)
      if reason is None:
        chosen[problem.pass_] = backend.name
      return reason

    return dataclasses.replace(backend, supports=supports)

  noted = dataclasses.replace(plan.candidates, backends=tuple(noting(b) for b in plan.candidates.backends))
  plan = dataclasses.replace(plan, candidates=noted)

  def both_ways(lhs: Operand, rhs: Operand) -> Any:
    out, pullback = jax.vjp(lambda a, b: _vjp.gmm(plan, a, b, sizes, offset, partial_sum, ranges), lhs, rhs)
    return pullback(out)

  jax.eval_shape(both_ways, lhs, rhs)
  return chosen


def _prepare(
  lhs: Any,
  rhs: Any,
  group_sizes: Any,
  *,
  backend: str | Backend = "auto",
  recipe: str | Recipe | None = None,
  group_offset: Any = None,
  transpose_rhs: bool = False,
  partial_sum: Any = None,
  existing_out: Any = None,
  ranges: Any = None,
  precision: Any = None,
  preferred_element_type: Any = None,
  tiling: Any = None,
) -> tuple[_vjp.Plan, tuple[Any, ...], jax.Array | None]:
  """Checks the arguments of `gmm`; returns the plan, (lhs, rhs, sizes, offset, partial_sum, ranges), existing_out."""
  rule, ranges = with_ranges(_recipe(recipe), ranges)
  lhs = _validate.operand(lhs, "lhs", 2)
  rhs = _validate.operand(rhs, "rhs", 3)
  _validate.scales_fit_gmm(lhs, rhs, transpose_rhs)
  m, k = lhs.shape
  contracting, output = (2, 1) if transpose_rhs else (1, 2)
  if rhs.shape[contracting] != k:
    raise ValueError(
      f"lhs {tuple(lhs.shape)} has k = {k}, but rhs {tuple(rhs.shape)} contracts dimension {contracting} of size "
      f"{rhs.shape[contracting]}; they must be equal (transpose_rhs={transpose_rhs})."
    )
  g, n = rhs.shape[0], rhs.shape[output]
  rule.check_blocks(k, n)
  sizes = _validate.group_sizes(group_sizes, m)
  offset = _validate.group_offset(group_offset, g, sizes.shape[0])
  if partial_sum is not None and existing_out is not None:
    raise ValueError("partial_sum and existing_out both say what uncovered rows return; give one of them.")
  partial_sum = _validate.result_like(partial_sum, "partial_sum", (m, n))
  existing_out = _validate.result_like(existing_out, "existing_out", (m, n))
  _validate.same_mesh_rule(lhs=lhs, rhs=rhs, partial_sum=partial_sum, existing_out=existing_out)
  out_dtype = _validate.float_dtype(preferred_element_type, "preferred_element_type", lhs.dtype)
  plan = _vjp.Plan(
    candidates=candidates(backend),
    recipe=rule,
    transpose_rhs=bool(transpose_rhs),
    num_groups=g,
    lhs_dtype=lhs.dtype.name,
    rhs_dtype=rhs.dtype.name,
    out_dtype=out_dtype,
    lhs_is_codes=isinstance(lhs, QArray),
    rhs_is_codes=isinstance(rhs, QArray),
    partial_dtype=None if partial_sum is None else partial_sum.dtype.name,
    precision=_validate.precision(precision),
    tiling=as_tiling(tiling),
  )
  operands = vary_alike(lhs, rhs, canonical_sizes(sizes, m), offset, partial_sum, ranges)
  return plan, operands, existing_out


def tgmm(
  lhs: OperandLike,
  dout: OperandLike,
  group_sizes: Any,
  *,
  backend: str | Backend = "auto",
  recipe: str | Recipe | None = None,
  num_groups: int | None = None,
  group_offset: Any = None,
  precision: Any = None,
  preferred_element_type: Any = None,
  tiling: Any = None,
) -> jax.Array:
  """Multiplies lhs^T with dout group by group: the gradient of `gmm` for rhs (SPEC TGMM-1).

  Differentiable in lhs and dout when nothing is quantized.

  Args:
    lhs: [m, k], float or `QArray`.
    dout: [m, n], float or `QArray`.
    group_sizes: as in `gmm`.
    backend, precision: as in `gmm`.
    recipe: as in `gmm`; a quantized one gives the drhs that its backward computes.
    num_groups: local groups g; None for all of group_sizes.
    group_offset: first local group.
    preferred_element_type: result dtype; None for the unquantized dtype of lhs.
    tiling: None or (tile_m, tile_k, tile_n), or `gmm.Tiling`, of which drhs is used.

  Returns:
    [g, k, n] of preferred_element_type; groups without rows are exactly zero.

  Raises:
    ValueError, TypeError, Unsupported: as in `gmm`.
  """
  rule = _recipe(recipe)
  lhs = _validate.operand(lhs, "lhs", 2)
  dout = _validate.operand(dout, "dout", 2)
  m = lhs.shape[0]
  if dout.shape[0] != m:
    raise ValueError(f"lhs {tuple(lhs.shape)} and dout {tuple(dout.shape)} must have the same number of rows.")
  sizes = _validate.group_sizes(group_sizes, m)
  g = _validate.num_groups(num_groups, sizes.shape[0], group_offset is not None)
  _validate.scales_fit_tgmm(lhs, dout, g)
  offset = _validate.group_offset(group_offset, g, sizes.shape[0])
  _validate.same_mesh_rule(lhs=lhs, dout=dout)
  plan = _vjp.Plan(
    candidates=candidates(backend),
    recipe=rule,
    pass_="drhs",
    num_groups=g,
    lhs_dtype=lhs.dtype.name,
    rhs_dtype=_validate.float_dtype(preferred_element_type, "preferred_element_type", lhs.dtype),
    out_dtype=dout.dtype.name,
    precision=_validate.precision(precision),
    tiling=Tiling(fwd=as_tiling(tiling).drhs),
  )
  sizes = canonical_sizes(sizes, m)
  lhs, dout, sizes, offset = vary_alike(lhs, dout, sizes, offset)
  if rule.is_quantized:
    if isinstance(dout, QArray):
      raise ValueError("dout is a QArray and the recipe quantizes too; pass recipe=None to multiply codes as they are.")
    return _vjp.tgmm_quantized(plan, lhs, dout, sizes, offset)
  return _vjp.tgmm(_vjp.tgmm_plan(plan), lhs, dout, sizes, offset)


def ragged_dot(
  lhs: OperandLike,
  rhs: OperandLike,
  group_sizes: Any,
  precision: Any = None,
  preferred_element_type: Any = None,
  group_offset: Any = None,
  *,
  backend: str | Backend = "auto",
  recipe: str | Recipe | None = None,
  tiling: Any = None,
) -> jax.Array:
  """`jax.lax.ragged_dot` with this library's semantics: same argument order, same defaults (SPEC GMM-7).

  Args:
    lhs, rhs, group_sizes, precision, group_offset: as in `gmm`.
    preferred_element_type: result dtype; None for `jnp.result_type(lhs, rhs)`, as in
      jax.lax (where `gmm` follows lhs).
    backend, recipe, tiling: as in `gmm`.

  Returns:
    [m, n].

  Raises:
    ValueError, TypeError, Unsupported: as in `gmm`.
  """
  if preferred_element_type is None:
    lhs = _validate.operand(lhs, "lhs", 2)
    rhs = _validate.operand(rhs, "rhs", 3)
    with jax.numpy_dtype_promotion("standard"):
      preferred_element_type = jnp.result_type(lhs.dtype, rhs.dtype)
  return gmm(
    lhs,
    rhs,
    group_sizes,
    backend=backend,
    recipe=recipe,
    group_offset=group_offset,
    precision=precision,
    preferred_element_type=preferred_element_type,
    tiling=tiling,
  )


def _recipe(wanted: str | Recipe | None) -> Recipe:
  if isinstance(wanted, str) and wanted == "qwix":
    from gmm import _qwix  # loads qwix, and through it Pallas

    return _qwix.rule_in_force("gmm")
  return _named_recipe(wanted)

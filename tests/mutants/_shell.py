"""A correct backend in plain jax.numpy whose every step has a name, so that a fault can be put into one.

`_shell` does what surrounds the multiplication: ranges, quantizing inside, scales, masks, one
rounding. A core (`_plain`, `_tiled`) multiplies. A `Hook` passes each named value through the change
that a mutant makes to it; without changes it does nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gmm import Backend, Problem
from gmm._groups import covered_rows, local_ranges, row_groups
from gmm._qarray import QArray, dequantize, expand_scale, is_code_dtype
from gmm._quantize import apply_prescale, quantize

# What a change is told beside the value: see `Where`.
Change = Callable[[Any, "Where"], Any]


@dataclasses.dataclass(frozen=True)
class Where:
  """What surrounds a value.

  Attributes:
    starts, ends: int32 [g], row ranges of the local groups.
    owner: int32 [m], local group of each row.
    covered: bool [m], whether a local group owns the row.
    out_dtype: dtype of the result.
    is_dlhs: of a gmm, whether it is the one against the transposed weights.
    extra: whatever else a site has.
  """

  starts: jax.Array
  ends: jax.Array
  owner: jax.Array
  covered: jax.Array
  out_dtype: Any
  is_dlhs: bool = False
  extra: Any = None


@dataclasses.dataclass(frozen=True)
class Hook:
  """The changes of a mutant, by site; sites are named "gmm.ends", "tgmm.acc" and so on."""

  changes: tuple[tuple[str, Change], ...]
  where: Where
  op: str = "gmm"

  def __call__(self, site: str, value: Any, extra: Any = None) -> Any:
    for name, change in self.changes:
      if name == f"{self.op}.{site}":
        value = change(value, dataclasses.replace(self.where, extra=extra))
    return value


@dataclasses.dataclass(frozen=True)
class Op:
  """One of the backend's functions; equal by value."""

  run: Callable[..., jax.Array]
  core: Callable[..., jax.Array]
  changes: tuple[tuple[str, Change], ...]

  def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
    return self.run(self.core, self.changes, *args, **kwargs)


def make_backend(name: str, cores: tuple[Any, Any], changes: tuple[tuple[str, Change], ...] = (), **fields: Any):
  """Returns the backend with those changes; fields replace the backend's own (`supports`, for example)."""
  ops = {"gmm": Op(gmm, cores[0], changes), "tgmm": Op(tgmm, cores[1], changes), "supports": supports}
  return Backend(name=name, **{**ops, "int_accumulator": "float32", "interpreted": _small_cases_only, **fields})


def supports(problem: Problem) -> str | None:
  """Everything but float64, which JAX does not have unless asked to."""
  dtypes = (problem.lhs.dtype, problem.rhs.dtype, problem.lhs.scale_dtype, problem.rhs.scale_dtype, problem.out_dtype)
  return "it multiplies float32 at most" if "float64" in dtypes else None


def _small_cases_only() -> bool:
  """As an interpreted kernel's: fewer shapes and recipes are drawn, since all are compiled."""
  return True


def gmm(
  core,
  changes,
  lhs,
  rhs,
  group_sizes,
  *,
  lhs_quant=None,
  lhs_prescale=None,
  group_offset=None,
  transpose_rhs=False,
  partial_sum=None,
  precision=None,
  preferred_element_type,
  tiling=None,
):
  """`Backend.gmm`."""
  del precision  # a CPU multiplies float32 at float32 precision
  m, g = lhs.shape[0], rhs.shape[0]
  is_dlhs = transpose_rhs if not is_code_dtype(_codes(rhs).dtype) else not isinstance(rhs, QArray)
  hook = _hook("gmm", changes, group_sizes, group_offset, g, m, preferred_element_type, is_dlhs)
  starts, ends = hook("starts", hook.where.starts), hook("ends", hook.where.ends)
  owner, covered = hook("owner", hook.where.owner), hook("covered", hook.where.covered)
  lhs = _prepared(hook, lhs, lhs_quant, lhs_prescale, "rows")
  (x, x_scale), (w, w_scale) = _parts(lhs, hook), _parts(rhs, hook)
  if transpose_rhs:
    w = hook("layout", w.swapaxes(1, 2))
    w_scale = None if w_scale is None else w_scale.swapaxes(1, 2)
  x, w = hook("lhs", x.astype(jnp.float32)), hook("rhs", w.astype(jnp.float32))
  acc = hook("acc", core(hook, x, w, starts, ends, tiling), partial_sum is not None)
  if x_scale is not None:
    acc = acc * hook("lhs_scale", x_scale.astype(jnp.float32))
  if w_scale is not None and m:
    factors = hook("rhs_scale", w_scale.astype(jnp.float32))[:, 0]
    acc = acc * (factors if factors.shape[0] == 1 else factors[owner])
  acc = jnp.where(covered[:, None], acc, 0.0)
  if partial_sum is not None:
    acc = acc + hook("partial", partial_sum.astype(jnp.float32))
  return hook("out", acc.astype(preferred_element_type), partial_sum is not None)


def tgmm(
  core,
  changes,
  lhs,
  dout,
  group_sizes,
  *,
  num_groups,
  lhs_quant=None,
  dout_quant=None,
  dout_prescale=None,
  group_offset=None,
  precision=None,
  preferred_element_type,
  tiling=None,
):
  """`Backend.tgmm`."""
  del precision
  hook = _hook("tgmm", changes, group_sizes, group_offset, num_groups, lhs.shape[0], preferred_element_type, False)
  starts, ends = hook("starts", hook.where.starts), hook("ends", hook.where.ends)
  lhs = _prepared(hook, lhs, lhs_quant, None, "cols")
  dout = _prepared(hook, dout, dout_quant, dout_prescale, "cols")
  (x, x_scale), (d, d_scale) = _parts(lhs, hook, rows=True), _parts(dout, hook, rows=True)
  x, d = hook("lhs", x.astype(jnp.float32)), hook("dout", d.astype(jnp.float32))
  acc = hook("acc", core(hook, x, d, starts, ends, tiling))
  if x_scale is not None:
    acc = acc * hook("lhs_scale", x_scale.astype(jnp.float32)).reshape(1, -1, 1)
  if d_scale is not None:
    acc = acc * hook("dout_scale", d_scale.astype(jnp.float32)).reshape(1, 1, -1)
  acc = jnp.where((hook.where.ends > hook.where.starts)[:, None, None], acc, 0.0)
  return hook("out", acc.astype(preferred_element_type))


def _hook(op, changes, sizes, offset, g, m, out_dtype, is_dlhs) -> Hook:
  nowhere = Where(sizes, sizes, sizes, sizes, out_dtype, is_dlhs)
  hook = Hook(changes, nowhere, op)
  starts, ends = local_ranges(hook("sizes", sizes), hook("offset", offset), g)
  owner, covered = row_groups(starts, ends, m), covered_rows(starts, ends, m)
  return Hook(changes, Where(starts, ends, owner, covered, out_dtype, is_dlhs), op)


def _prepared(hook: Hook, x, quant, prescale, kind):
  """What the op asked to be done inside: prescale, then quantize."""
  starts, ends = hook("quant_ranges", (hook.where.starts, hook.where.ends), x)
  if prescale is not None:
    prescale = hook("prescale", prescale)
  if quant is not None:
    return hook("codes", quantize(x, hook("quant", quant), kind, starts=starts, ends=ends, prescale=prescale), quant)
  return x if prescale is None else apply_prescale(x, prescale, kind, starts, ends)


def _codes(x):
  return x.qvalue if isinstance(x, QArray) else x


def _parts(x, hook: Hook, rows: bool = False):
  """(array, scale or None); scales that vary along the contraction go into the array, in float32."""
  if not isinstance(x, QArray):
    return x, None
  if x.row_block is not None:
    return dequantize(x, jnp.float32, starts=hook.where.starts, ends=hook.where.ends), None
  contracted = 0 if rows else x.scale.ndim - 1 if x.scale.ndim == 2 else None
  # Of weights [g, k, n] either axis may be contracted: blocks along any go into the array.
  fits = [s in (1, d) for s, d in zip(x.scale.shape, x.shape, strict=True)]
  along = x.scale.shape[contracted] != 1 if contracted is not None else min(x.scale.shape[1:]) != 1
  if along or not all(fits):
    return x.qvalue.astype(jnp.float32) * expand_scale(x.scale.astype(jnp.float32), x.shape), None
  return x.qvalue, x.scale

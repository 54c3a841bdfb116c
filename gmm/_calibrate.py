"""Static ranges from sample data: run a function, watch the operands of every `gmm` in it (SPEC QNT-10)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from gmm._absmax import absmax
from gmm._groups import covered_rows, local_ranges
from gmm._qarray import Operand, QArray
from gmm._recipe import Quant, Recipe
from gmm._recipe import recipe as _named_recipe

# The watcher of the calibration in progress in this thread, or None. As a JAX context it is
# part of every trace's cache key: a function that was traced before is traced again while
# calibrating, so that it is watched, and that trace serves no later call. It is made at import
# because JAX forbids making one while another thread uses JAX.
_watching = jax.make_user_context(default_value=None)


@dataclasses.dataclass(eq=False)
class _Watcher:
  """What one calibration has seen; a cache key by its identity.

  Attributes:
    batch: index of the batch that runs.
    traced: how many `gmm` calls were traced or run.
    absmax: operand name -> largest magnitude seen so far.
    not_finite: operand name -> first batch with a NaN or Inf.
  """

  batch: int = 0
  traced: int = 0
  absmax: dict[str, float] = dataclasses.field(default_factory=dict)
  not_finite: dict[str, int] = dataclasses.field(default_factory=dict)

  def record(self, name: str, absmax: Any) -> None:
    value = float(absmax)
    if not math.isfinite(value):
      self.not_finite.setdefault(name, self.batch)
    else:
      self.absmax[name] = max(self.absmax.get(name, 0.0), value)


def observe(lhs: Operand, rhs: Operand, sizes: jax.Array, offset: jax.Array | None) -> None:
  """Shows the operands of one `gmm` to the calibration in progress; does nothing without one.

  Args:
    lhs: [m, k]; only rows of a local group are looked at (SPEC QNT-6).
    rhs: [g, k, n] or [g, n, k]; only groups that have rows are looked at.
    sizes: canonical int32 sizes of all groups.
    offset: None or int32 scalar, the first local group.
  """
  watcher = _watching.value
  if watcher is None:
    return
  watcher.traced += 1
  starts, ends = local_ranges(sizes, offset, rhs.shape[0])
  if not isinstance(lhs, QArray):
    _report(watcher, "lhs", lhs, covered_rows(starts, ends, lhs.shape[0]))
  if not isinstance(rhs, QArray):
    _report(watcher, "rhs", rhs, ends > starts)


def _report(watcher: _Watcher, name: str, x: jax.Array, used: jax.Array) -> None:
  """Tells the watcher max |x| over the used entries of the first axis, whenever the program runs."""
  x = jnp.where(used.reshape((-1,) + (1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
  # The maximum needs no order and does not mind a call that remat or vmap repeats.
  jax.debug.callback(lambda largest: watcher.record(name, largest), absmax(x))


def calibrate(
  fn: Callable[[Any], Any], batches: Iterable[Any], *, recipe: str | Recipe | None = "fp8_calibrated"
) -> Recipe:
  """Runs a function on sample batches and returns a recipe with static ranges (SPEC QNT-10).

  Every `gmm.gmm` and `gmm.ragged_dot` inside `fn` is watched, under jit, grad, scan, vmap and
  remat too: R of an operand is the largest magnitude in any call and batch, over rows and
  groups that are used (SPEC QNT-6). All calls share one recipe; for one recipe per call,
  calibrate functions that hold one call each. `fn` is compiled anew for this, and what was
  compiled for it before or is later is untouched. With several processes each sees its own data.

  Args:
    fn: called as fn(batch) for its `gmm` calls; the result is dropped.
    batches: sample inputs, any iterable.
    recipe: the base, a name or a `Recipe`: which operands get a static range, their code dtype
      and other fields. An "absmax,F" of the base makes the range F times as wide.

  Returns:
    The base with calibration "fixed,-R,R" and granularity "tensor" for lhs and rhs, as far as
    it quantizes them; dout is the base's.

  Raises:
    ValueError: no batch; the base quantizes neither lhs nor rhs; fn runs no `gmm`; an operand
      was NaN or Inf, all zero, or always quantized already.
  """
  base = _named_recipe(recipe)
  quants = {name: quant for name, quant in (("lhs", base.lhs), ("rhs", base.rhs)) if quant is not None}
  if not quants:
    raise ValueError(f"Recipe {base.name!r} quantizes neither lhs nor rhs, so it has no range to find. Give another.")
  watcher = _Watcher(batch=-1)
  for batch in batches:
    watcher.batch += 1
    with _watching(watcher):
      jax.block_until_ready(fn(batch))
    jax.effects_barrier()  # all reports of this batch are in
  if watcher.batch < 0:
    raise ValueError("batches is empty: give at least one sample batch (a generator can be consumed only once).")
  if not watcher.traced:
    raise ValueError(
      "fn called neither gmm.gmm nor gmm.ragged_dot, so there is nothing to calibrate. Give the function itself: "
      "one that was compiled before (.lower().compile()) cannot be watched."
    )
  ranges = {name: _static(name, quant, watcher) for name, quant in quants.items()}
  return dataclasses.replace(base, name=f"{base.name} with static ranges", **ranges)


def _static(name: str, quant: Quant, watcher: _Watcher) -> Quant:
  """quant with the range that was seen for operand `name`."""
  if name in watcher.not_finite:
    raise ValueError(
      f"{name} of a gmm had a NaN or Inf in a used row or group, first in batch {watcher.not_finite[name]} (counted "
      f"from 0), so it has no range. Check that batch, and the weights."
    )
  if name not in watcher.absmax:
    raise ValueError(
      f"No unquantized {name} was seen: every gmm in fn took it as a QArray, or was traced but not run. Run fn on "
      f"unquantized operands, or give a base recipe that leaves {name} alone."
    )
  if not watcher.absmax[name]:
    raise ValueError(
      f"{name} was zero in every used row and group of all {watcher.batch + 1} batches, so it has no range. Give "
      f"batches with data, and trained or initialised weights."
    )
  limit = watcher.absmax[name] * quant.absmax_factor
  return dataclasses.replace(quant, granularity="tensor", calibration=f"fixed,{-limit!r},{limit!r}")

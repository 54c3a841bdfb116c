"""Running the layer and comparing it with the dense one."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gmm
from gmm.moe import MoeConfig, MoeParams, init_params, moe_dense, moe_layer
from gmm.table._config import NUMERICS, SCHEMES, Numerics, TableConfig, table_recipe
from gmm.table._published import METRICS, QUANTITIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One backend under one recipe against the dense layer.

  Attributes:
    backend, scheme: names.
    figures: metric -> quantity -> figure; empty when declined.
    declined: why the backend refused, else None.
    interpreted: whether the backend runs in an interpreter on this machine.
    seconds: wall time, compilation included.
  """

  backend: str
  scheme: str
  figures: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
  declined: str | None = None
  interpreted: bool = False
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """All rows of a run.

  Attributes:
    config: what was measured.
    seed: of weights and tokens.
    numerics: as given to `compute`.
    rows: in the order they were run.
    seconds: wall time of everything, the dense layer included.
    peak_rss: largest resident memory of this process so far, in bytes.
  """

  config: TableConfig
  seed: int
  numerics: Numerics
  rows: tuple[Row, ...]
  seconds: float
  peak_rss: int


def compute(
  config: TableConfig,
  backends: Sequence[str],
  schemes: Sequence[str] = SCHEMES,
  *,
  seed: int = 0,
  numerics: Numerics | None = None,
  progress: Callable[[str], None] = lambda step: None,
) -> Table:
  """Measures every backend under every recipe against the dense layer.

  Args:
    config: one of `CONFIGS`.
    backends: names of backends.
    schemes: names of recipes.
    seed: of weights and tokens.
    numerics: one of `NUMERICS`, or another choice; None for ours.
    progress: called with a description before each of the 1 + backends x schemes steps.

  Returns:
    `Table`. A backend that raises `gmm.Unsupported` gets a row with the reason.

  Raises:
    ValueError: an unknown backend or recipe; raised before anything runs.
    ImportError: a backend that cannot be loaded.
  """
  start = time.monotonic()
  numerics = numerics or NUMERICS["ours"]
  recipes = {scheme: table_recipe(scheme, config, numerics) for scheme in schemes}
  loaded = [gmm.get_backend(name) for name in backends]

  progress("dense layer")
  moe = config.moe(numerics.softmax_dtype)
  params, x = _inputs(moe, config.tokens, seed)
  dense = _run(lambda p, t: moe_dense(p, t, config=moe), params, x)
  rows = []
  for backend in loaded:
    for scheme, recipe in recipes.items():
      progress(f"{backend.name} {scheme}")
      row = Row(backend=backend.name, scheme=scheme, interpreted=backend.interpreted())
      began = time.monotonic()
      try:
        layer = lambda p, t, b=backend, r=recipe: moe_layer(p, t, config=moe, backend=b, recipe=r)
        figures = _compare(dense, _run(layer, params, x))
        row = dataclasses.replace(row, figures=figures, seconds=time.monotonic() - began)
      except gmm.Unsupported as refusal:
        row = dataclasses.replace(row, declined=str(refusal))
      rows.append(row)

  return Table(
    config=config,
    seed=seed,
    numerics=numerics,
    rows=tuple(rows),
    seconds=time.monotonic() - start,
    peak_rss=_peak_rss(),
  )


def _inputs(config: MoeConfig, tokens: int, seed: int) -> tuple[MoeParams, jax.Array]:
  weight_key, token_key = jax.random.split(jax.random.key(seed))
  x = jax.random.normal(token_key, (tokens, config.embed), jnp.float32)
  return init_params(weight_key, config), x.astype(config.dtype)


def _run(layer: Callable[[MoeParams, jax.Array], jax.Array], params: MoeParams, x: jax.Array) -> dict[str, jax.Array]:
  """Output and gradients of mean(out^2), by quantity."""

  def loss(params: MoeParams, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = layer(params, x)
    return jnp.mean(jnp.square(out.astype(jnp.float32))), out

  (_, out), (grads, state_grad) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
  grads = {f"grad_{f.name}": getattr(grads, f.name) for f in dataclasses.fields(grads)}
  return {"output": out, "state_grad": state_grad, **grads}


def _compare(want: dict[str, jax.Array], got: dict[str, jax.Array]) -> dict[str, dict[str, float]]:
  figures: dict[str, dict[str, float]] = {metric: {} for metric in METRICS}
  for quantity in QUANTITIES:
    relative, largest = difference(want[quantity], got[quantity])
    figures["relative_norm_diff"][quantity] = relative
    figures["max_abs_diff"][quantity] = largest
  return figures


def difference(want: Any, got: Any) -> tuple[float, float]:
  """Returns (||want - got|| / ||want||, max |want - got|), summed in float64; NaN stays NaN."""
  if want.shape != got.shape:
    raise ValueError(f"Shapes differ: {want.shape} and {got.shape}.")
  diff_square, want_square, largest = 0.0, 0.0, 0.0
  for w, g in zip(_slices(want), _slices(got), strict=True):
    diff = w - g
    diff_square += float(np.vdot(diff, diff))
    want_square += float(np.vdot(w, w))
    largest = float(np.maximum(largest, np.max(np.abs(diff), initial=0.0)))
  if want_square == 0.0:
    return (0.0 if diff_square == 0.0 else float("inf")), largest
  return float(np.sqrt(diff_square / want_square)), largest


def _slices(x: Any) -> Iterator[np.ndarray]:
  """float64 slices along the first axis, one at a time: a whole weight would not fit twice."""
  x = np.asarray(x)
  step = max(1, (1 << 24) // max(1, int(np.prod(x.shape[1:]))))
  for start in range(0, x.shape[0], step):
    yield x[start : start + step].astype(np.float64)


def _peak_rss() -> int:
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB

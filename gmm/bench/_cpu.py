"""`gmm bench cpu`: the reference against `jax.lax.ragged_dot` and a dense matmul of equal work."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gmm._op import gmm
from gmm.bench._figures import Figure
from gmm.bench._timing import interleaved, ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """Sizes of one measurement and the targets that issue 1 sets for it (None: only shown).

  Attributes:
    m, k, n, g: as in `gmm`.
    over_ragged_dot: forward, times faster than `jax.lax.ragged_dot`, at least.
    over_ragged_dot_grad: the same with gradients.
    to_dense: forward, time relative to a batched dense matmul, at most.
    skew: forward, time of any distribution of sizes relative to the uniform one, at most.
    ragged_rounds: rounds against `ragged_dot`, which is slow for many groups.
    min_seconds: least time of a sample.
  """

  m: int
  k: int
  n: int
  g: int
  over_ragged_dot: float | None = None
  over_ragged_dot_grad: float | None = None
  to_dense: float | None = None
  skew: float | None = None
  ragged_rounds: int = 5
  min_seconds: float = 0.2

  def __str__(self) -> str:
    return f"m={self.m} k={self.k} n={self.n} g={self.g}"


_FULL = (
  Shape(m=4096, k=512, n=1024, g=8, over_ragged_dot=6, over_ragged_dot_grad=5, to_dense=1.4, skew=1.25),
  Shape(m=4096, k=512, n=1024, g=64, over_ragged_dot=30, to_dense=1.7, skew=1.25),
  Shape(m=4096, k=512, n=1024, g=256, over_ragged_dot=80, skew=1.25, ragged_rounds=3),
)
# Too small for the targets: it only shows that everything runs.
_QUICK = tuple(Shape(m=512, k=64, n=128, g=g, min_seconds=0.005) for g in (4, 16))


def run_cpu(
  *, quick: bool = False, rounds: int = 9, progress: Callable[[str], None] = lambda text: None
) -> list[Figure]:
  """Measures the reference backend on this machine's CPU.

  Args:
    quick: small shapes, without targets.
    rounds: samples of each function (fewer against `ragged_dot` with many groups).
    progress: called with a line of text before each measurement.

  Returns:
    list of `Figure`s: ratios of interleaved runs, and temporary memory against its budget.
  """
  figures: list[Figure] = []
  for shape in _QUICK if quick else _FULL:
    for measure in (_against_ragged_dot, _gradients, _against_dense, _distributions, _memory):
      progress(f"{measure.__name__.strip('_').replace('_', ' ')}, {shape}")
      figures.extend(measure(shape, rounds))
  return sorted(figures, key=lambda f: list(dict.fromkeys(f.part for f in figures)).index(f.part))


def distributions(m: int, g: int) -> dict[str, np.ndarray]:
  """Group sizes of every kind of skew, int32 [g] each, all with sum m; "uniform" first."""
  rng = np.random.default_rng(0)
  shares = 0.5 ** np.arange(g) if g < 64 else 0.9 ** np.arange(g)
  cuts = np.sort(rng.integers(0, m + 1, g - 1))
  uniform = np.full(g, m // g)
  jitter = np.where(np.arange(g) % 2 == 0, 1, -1) * min(3, m // g)
  alternate = np.where(np.arange(g) % 4 == 0, 1, 0)
  sizes = {
    "uniform": uniform,
    "all rows in one group": np.eye(g, dtype=int)[g // 2],
    "geometric": np.maximum(0, np.floor(shares / shares.sum() * m)),
    "three of four groups empty": alternate * (m // alternate.sum()),
    "one row each but one": np.ones(g),
    "unaligned": uniform + jitter,
    "random": np.diff(np.r_[0, cuts, m]),
  }
  return {name: _fill(s.astype(np.int64), m).astype(np.int32) for name, s in sizes.items()}


def _fill(sizes: np.ndarray, m: int) -> np.ndarray:
  """Adds what is missing to sum m to the largest group."""
  sizes[np.argmax(sizes)] += m - sizes.sum()
  return sizes


def _arrays(shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array]:
  """lhs, rhs and dout."""
  lhs, rhs, dout = jax.random.split(jax.random.key(0), 3)
  m, k, n, g = shape.m, shape.k, shape.n, shape.g
  return jax.random.normal(lhs, (m, k)), jax.random.normal(rhs, (g, k, n)), jax.random.normal(dout, (m, n))


def _forward(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
  return gmm(lhs, rhs, sizes, backend="reference")


def _with_gradients(forward: Callable[..., jax.Array]) -> Callable[..., Any]:
  """(lhs, rhs, sizes, dout) -> (out, dlhs, drhs)."""

  def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, dout: jax.Array) -> Any:
    out, pullback = jax.vjp(lambda lhs, rhs: forward(lhs, rhs, sizes), lhs, rhs)
    return out, *pullback(dout)

  return run


def _bound(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
  """The compiled function on these arguments, returning when the result is there."""
  compiled = jax.jit(fn)
  return lambda: jax.block_until_ready(compiled(*args))


def _uniform(shape: Shape) -> jax.Array:
  return jnp.asarray(distributions(shape.m, shape.g)["uniform"])


def _against_ragged_dot(shape: Shape, rounds: int) -> Iterator[Figure]:
  lhs, rhs, _ = _arrays(shape)
  args = (lhs, rhs, _uniform(shape))
  runs = {"ragged_dot": _bound(jax.lax.ragged_dot, *args), "reference": _bound(_forward, *args)}
  seconds = interleaved(runs, min(rounds, shape.ragged_rounds), min_seconds=shape.min_seconds)
  yield Figure(
    part="forward, times faster than jax.lax.ragged_dot",
    name=str(shape),
    value=ratio(seconds, "ragged_dot", "reference"),
    unit="x",
    target=shape.over_ragged_dot,
    sense="at least",
  )


def _gradients(shape: Shape, rounds: int) -> Iterator[Figure]:
  if shape.g > 8:
    return  # ragged_dot takes a minute of it
  lhs, rhs, dout = _arrays(shape)
  args = (lhs, rhs, _uniform(shape), dout)
  runs = {
    "ragged_dot": _bound(_with_gradients(jax.lax.ragged_dot), *args),
    "reference": _bound(_with_gradients(_forward), *args),
  }
  seconds = interleaved(runs, min(rounds, shape.ragged_rounds), min_seconds=shape.min_seconds)
  yield Figure(
    part="forward and gradients, times faster than jax.lax.ragged_dot",
    name=str(shape),
    value=ratio(seconds, "ragged_dot", "reference"),
    unit="x",
    target=shape.over_ragged_dot_grad,
    sense="at least",
  )


def _against_dense(shape: Shape, rounds: int) -> Iterator[Figure]:
  lhs, rhs, _ = _arrays(shape)
  stacked = lhs.reshape(shape.g, shape.m // shape.g, shape.k)
  dense = lambda lhs, rhs: jnp.matmul(lhs, rhs, precision=jax.lax.Precision.HIGHEST)
  runs = {"dense": _bound(dense, stacked, rhs), "reference": _bound(_forward, lhs, rhs, _uniform(shape))}
  seconds = interleaved(runs, rounds, min_seconds=shape.min_seconds)
  yield Figure(
    part="forward, time relative to a batched dense matmul",
    name=str(shape),
    value=ratio(seconds, "reference", "dense"),
    unit="x",
    target=shape.to_dense,
  )
  yield Figure(
    part="forward, milliseconds", name=str(shape), value=1e3 * statistics.median(seconds["reference"]), unit="ms"
  )


def _distributions(shape: Shape, rounds: int) -> Iterator[Figure]:
  lhs, rhs, _ = _arrays(shape)
  forward = jax.jit(_forward)
  # One program for all: new group sizes do not compile again.
  sizes = {name: jnp.asarray(s) for name, s in distributions(shape.m, shape.g).items()}
  runs = {name: lambda s=s: jax.block_until_ready(forward(lhs, rhs, s)) for name, s in sizes.items()}
  seconds = interleaved(runs, rounds, min_seconds=shape.min_seconds)
  for name in sizes:
    if name != "uniform":
      yield Figure(
        part="forward, time relative to uniform group sizes",
        name=f"g={shape.g}, {name}",
        value=ratio(seconds, name, "uniform"),
        unit="x",
        target=shape.skew,
      )


def _memory(shape: Shape, rounds: int) -> Iterator[Figure]:
  del rounds  # nothing runs
  lhs, rhs, dout = _arrays(shape)
  sizes, size = _uniform(shape), lhs.dtype.itemsize
  budget = size * (4 * shape.k * shape.n + 2 * shape.m * (shape.k + shape.n))
  for name, fn, args in (
    ("forward", _forward, (lhs, rhs, sizes)),
    ("forward and gradients", _with_gradients(_forward), (lhs, rhs, sizes, dout)),
  ):
    analysis: Any = jax.jit(fn).lower(*args).compile().memory_analysis()
    yield Figure(
      part="memory beyond operands and results (4 weight slices and two m x (k + n) rows allowed)",
      name=f"{name}, {shape}",
      value=analysis.temp_size_in_bytes / 2**20,
      unit="MiB",
      target=budget / 2**20,
    )

"""The published figures.

Source: MaxText's quantized grouped matmul, value and gradient equivalence of the MoE layer of
Mixtral-8x7B against a dense bfloat16 layer, as its authors measured it on one TPU v5p host
(rows "ep1": no expert parallelism). Embedding 4096, MLP 14336, 8 experts, top-2, hidden states
standard normal of 8 x 256 tokens, loss = mean(out^2).
"""

from __future__ import annotations

import dataclasses
import decimal

METRICS = ("relative_norm_diff", "max_abs_diff")
QUANTITIES = ("output", "state_grad", "grad_gate", "grad_wi_0", "grad_wi_1", "grad_wo")

# backend, recipe, then one figure per quantity; "*" stands for every backend.
_FIGURES = {
  "relative_norm_diff": """
    megablox    bf16         0.004347 0.007798 0.007537 0.007493 0.007523 0.006855
    megablox    fp8_dynamic  0.064479 0.064210 0.022872 0.100576 0.100811 0.101557
    megablox    fp8_static   0.153188 0.049933 0.031198 0.189635 0.190141 0.215808
    tokamax_v1  bf16         0.004347 0.007794 0.007531 0.007492 0.007523 0.006855
    tokamax_v1  fp8_dynamic  0.064479 0.064168 0.022875 0.100574 0.100811 0.101557
    tokamax_v1  fp8_static   0.153188 0.049933 0.031198 0.189635 0.190141 0.215808
    tokamax_v2  bf16         0.004347 0.007798 0.007537 0.007493 0.007523 0.006855
    tokamax_v2  fp8_dynamic  0.064551 0.064635 0.023685 0.100734 0.100966 0.101706
    tokamax_v2  fp8_static   0.153188 0.049926 0.031198 0.189628 0.190157 0.215808
  """,
  "max_abs_diff": """
    *           bf16         2.44e-04 1.64e-11 5.95e-09 2.33e-10 1.75e-10 5.89e-11
    megablox    fp8_dynamic  3.05e-03 1.04e-10 1.97e-08 1.11e-09 9.31e-10 3.16e-10
    tokamax_v1  fp8_dynamic  3.05e-03 1.04e-10 1.97e-08 1.11e-09 9.31e-10 3.16e-10
    tokamax_v2  fp8_dynamic  3.17e-03 1.05e-10 2.18e-08 1.08e-09 1.05e-09 3.26e-10
    *           fp8_static   7.39e-03 8.37e-11 2.55e-08 2.62e-09 2.44e-09 6.86e-10
  """,
}

# The published row that a backend without one of its own is held against.
_STANDS_FOR = {"gmm_v2": "tokamax_v2"}
_OTHERS = "megablox"


@dataclasses.dataclass(frozen=True)
class Published:
  """A published figure.

  Attributes:
    value: as printed.
    half_unit: half a unit of its last printed digit; the measured figure was at most
      value + half_unit.
  """

  value: float
  half_unit: float


def published(backend: str, scheme: str, metric: str, quantity: str) -> Published | None:
  """Returns the published figure that stands beside a measured one, or None where there is none.

  Args:
    backend: name of the backend; one that was not published (`reference`, `xla`) is held against
      megablox's row, and `gmm_v2` against tokamax_v2's.
    scheme: name of the recipe.
    metric: one of `METRICS`.
    quantity: one of `QUANTITIES`.
  """
  rows = _rows(metric)
  names = (backend, _STANDS_FOR.get(backend, _OTHERS), "*")
  for name in names:
    if (name, scheme) in rows:
      return rows[name, scheme][QUANTITIES.index(quantity)]
  return None


def _rows(metric: str) -> dict[tuple[str, str], list[Published]]:
  lines = [line.split() for line in _FIGURES[metric].strip().splitlines()]
  return {(backend, scheme): [_parse(f) for f in figures] for backend, scheme, *figures in lines}


def _parse(text: str) -> Published:
  exponent = decimal.Decimal(text).as_tuple().exponent
  return Published(value=float(text), half_unit=float(decimal.Decimal((0, (5,), int(exponent) - 1))))

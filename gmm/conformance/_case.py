"""One example of a property check, reproducible from its repr."""

from __future__ import annotations

import dataclasses
from typing import Literal

import ml_dtypes  # installed with JAX: numpy's bfloat16 and fp8
import numpy as np

from gmm._recipe import Recipe
from gmm.conformance._short_blocks import short_blocks

Data = Literal["integers", "real", "positive", "uneven"]

DATA_KINDS: tuple[Data, ...] = ("integers", "real", "positive", "uneven")
BOTH_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Case:
  """Sizes, dtype and seed of one example; the arrays follow from them.

  Attributes:
    m, k, n: rows, contracting size, output columns.
    group_sizes: rows of each group; what is left of m are slack rows.
    dtype: of lhs, rhs and dout, "float32" or "bfloat16".
    data: "integers" in -3..3, where float32 sums are exact in any order; "real", standard
      normal; "positive", bounded away from zero, where errors cannot cancel; "uneven", normal
      with rows and columns of zeros, and rows whose scales are below qwix's cutoff.
    seed: of the data.
    recipe: name of the recipe, for the checks that quantize; `rule` is what they run.
  """

  m: int
  k: int
  n: int
  group_sizes: tuple[int, ...]
  dtype: str = "float32"
  data: Data = "integers"
  seed: int = 0
  recipe: str = "bf16"

  @property
  def g(self) -> int:
    return len(self.group_sizes)

  @property
  def rule(self) -> Recipe:
    """The recipe, its blocks shortened to fit k and n."""
    return short_blocks(self.recipe, self.k, self.n)

  @property
  def used(self) -> int:
    """Rows that belong to a group."""
    return sum(self.group_sizes)

  @property
  def sizes(self) -> np.ndarray:
    return np.array(self.group_sizes, np.int32)

  @property
  def lhs(self) -> np.ndarray:
    """[m, k]."""
    return self.array(1, (self.m, self.k))

  @property
  def rhs(self) -> np.ndarray:
    """[g, k, n]."""
    return self.array(2, (self.g, self.k, self.n))

  @property
  def dout(self) -> np.ndarray:
    """[m, n]."""
    return self.array(3, (self.m, self.n))

  def array(self, salt: int, shape: tuple[int, ...]) -> np.ndarray:
    """An array of the case's kind of data and dtype; `salt` tells arrays of one shape apart."""
    rng = np.random.default_rng([self.seed, salt])
    if self.data == "integers":
      values = rng.integers(-3, 4, shape).astype(np.float64)
    elif self.data == "real":
      values = rng.standard_normal(shape)
    elif self.data == "uneven":
      values = _uneven(rng.standard_normal(shape), salt)
    else:
      values = rng.uniform(0.5, 2.0, shape)
    return values.astype(numpy_dtype(self.dtype))


def _uneven(x: np.ndarray, salt: int) -> np.ndarray:
  """Zero and tiny slices; in no product are both factors tiny, so that none underflows."""
  if x.ndim == 3:
    x[:, :, 0] = 0
  elif salt == 1:  # lhs
    x[0::8] = 0
    x[2::8] *= 2.0**-58
  else:
    x[3::8] = 0
    x[1::8] *= 2.0**-48
    x[:, 1:2] *= 2.0**-50
    x[2::8, 1:2] = 0
  return x


def numpy_dtype(name: str) -> np.dtype:
  """numpy's dtype of that name, JAX's extended ones included."""
  return np.dtype(getattr(ml_dtypes, name, name))

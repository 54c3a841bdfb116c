"""Recipes for small cases: the blocks of fp8_block and mxfp8 are longer than most of their sizes."""

from __future__ import annotations

import dataclasses
import math

from gmm._recipe import Quant, Recipe, recipe

_BLOCK = 4


def short_blocks(name: str | Recipe, k: int, n: int) -> Recipe:
  """The recipe with every block shortened to 4, or to what divides k and n; one without blocks as it is."""
  rule, size = recipe(name), math.gcd(_BLOCK, k, n)

  def shortened(quant: Quant | None) -> Quant | None:
    if quant is None or (quant.block is None and quant.blocks_2d is None):
      return quant
    return dataclasses.replace(quant, granularity=size if quant.block else (size, size))

  return dataclasses.replace(rule, lhs=shortened(rule.lhs), rhs=shortened(rule.rhs), dout=shortened(rule.dout))

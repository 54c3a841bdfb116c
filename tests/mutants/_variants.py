"""Correct backends that compute differently: each must pass every check, or the check is wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import _plain
from ._shell import make_backend
from ._tiled import Gmm, Tgmm

_EXACT = jax.lax.Precision.HIGHEST


def _groups_backwards(hook, x, w, starts, ends, tiling):
  """The plain core with the groups in the opposite order."""
  return _plain.gmm(hook, x, w[::-1], starts[::-1], ends[::-1], tiling)


def _groups_backwards_tgmm(hook, x, d, starts, ends, tiling):
  return _plain.tgmm(hook, x, d, starts[::-1], ends[::-1], tiling)[::-1]


def _k_in_two(hook, x, w, starts, ends, tiling):
  """The second half of k first."""
  half = x.shape[1] // 2
  second = _plain.gmm(hook, x[:, half:], w[:, half:], starts, ends, tiling)
  return second + _plain.gmm(hook, x[:, :half], w[:, :half], starts, ends, tiling)


def _rows_in_two(hook, x, d, starts, ends, tiling):
  """The second half of the rows first."""
  half = x.shape[0] // 2
  second = _plain.tgmm(hook, x[half:], d[half:], starts - half, ends - half, tiling)
  return second + _plain.tgmm(hook, x[:half], d[:half], starts, ends, tiling)


def _weights_of_each_row(hook, x, w, starts, ends, tiling):
  """Gathers each row's weights; memory m·k·n, and no group is looped over."""
  del tiling
  if 0 in (x.shape[0], w.shape[0]):
    return jnp.zeros((x.shape[0], w.shape[2]), jnp.float32)
  out = jnp.einsum("mk,mkn->mn", x, w[hook.where.owner], precision=_EXACT)
  return jnp.where(hook.where.covered[:, None], out, 0.0)


VARIANTS = (
  make_backend("plain", (_plain.gmm, _plain.tgmm)),
  make_backend("groups_backwards", (_groups_backwards, _groups_backwards_tgmm)),
  make_backend("sums_in_halves", (_k_in_two, _rows_in_two)),
  make_backend("weights_of_each_row", (_weights_of_each_row, _plain.tgmm)),
  make_backend("tiles_of_8", (Gmm(), Tgmm())),
  make_backend("tiles_of_16_by_32", (Gmm(16, 32), Tgmm(16))),
)

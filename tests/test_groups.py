"""Group sizes mean the same for every dtype, sum and offset (SPEC GMM-1, GMM-5, GMM-6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gmm
from gmm._groups import canonical_sizes, covered_rows, local_ranges, row_groups

pytestmark = pytest.mark.second_interpreter


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_sizes_of_any_integer_dtype(dtype):
  """Three groups of 100 rows: their sum does not fit int8 or uint8, where jax.lax.ragged_dot goes wrong."""
  sizes = jnp.full((3,), 100, dtype)
  np.testing.assert_array_equal(canonical_sizes(sizes, 300), [100, 100, 100])
  assert canonical_sizes(sizes, 300).dtype == jnp.int32


@pytest.mark.parametrize(
  ("sizes", "m", "expected"),
  [
    ([5, 5, 5], 8, [5, 3, 0]),  # rows are cut at m, in order
    ([-3, 4, -1, 2], 8, [0, 4, 0, 2]),  # negative counts as 0
    ([0, 0], 8, [0, 0]),
    ([9], 8, [8]),
    ([3, 4], 0, [0, 0]),
    ([], 8, []),
    ([2**31 - 1] * 4, 2**30, [2**30, 0, 0, 0]),  # a sum past 2^31 does not wrap
    ([2**31 - 1, -(2**31), 5], 2**31 - 1, [2**31 - 1, 0, 0]),
  ],
)
def test_canonical_sizes(sizes, m, expected):
  """Under jit, sizes that would be an error have one defined meaning (SPEC GMM-6)."""
  got = jax.jit(canonical_sizes, static_argnums=1)(jnp.array(sizes, jnp.int32), m)
  np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("offset", range(-3, 6))
def test_local_ranges_of_any_offset(offset):
  """Local groups outside the global ones have no rows; nothing is clamped into range (SPEC GMM-5)."""
  sizes, g = np.array([2, 0, 3, 1]), 2
  ends = np.cumsum(sizes)
  starts, stops = jax.jit(local_ranges, static_argnums=2)(jnp.asarray(sizes, jnp.int32), jnp.int32(offset), g)
  for j in range(g):
    exists = 0 <= offset + j < 4
    expected = range(ends[offset + j] - sizes[offset + j], ends[offset + j]) if exists else range(0)
    assert list(range(int(starts[j]), int(stops[j]))) == list(expected)
  # Neither ever falls: searching them for a row's group relies on it.
  assert (np.diff(starts) >= 0).all()
  assert (np.diff(stops) >= 0).all()


def test_rows_and_their_groups():
  """A row is covered by exactly the group whose range holds it, empty groups anywhere."""
  rng = np.random.default_rng(0)
  for _ in range(50):
    g = int(rng.integers(1, 6))
    sizes = rng.integers(0, 4, g) * rng.integers(0, 2, g)
    m = int(sizes.sum() + rng.integers(0, 3))
    starts, ends = local_ranges(jnp.asarray(sizes, jnp.int32), None, g)
    owner = np.full(m, -1)
    owner[: sizes.sum()] = np.repeat(np.arange(g), sizes)
    covered = np.asarray(covered_rows(starts, ends, m))
    np.testing.assert_array_equal(covered, owner >= 0)
    np.testing.assert_array_equal(np.asarray(row_groups(starts, ends, m))[covered], owner[covered])


def test_group_sizes_from_ids():
  """Invalid ids, as padding slots carry them, count for no group."""
  ids = jnp.array([[0, 1, -1, 7], [3, 3, 4, -(2**31)]], jnp.int32)
  np.testing.assert_array_equal(gmm.group_sizes_from_ids(ids, 4), [1, 1, 0, 2])
  np.testing.assert_array_equal(gmm.group_sizes_from_ids(jnp.array([200, 3], jnp.uint8), 4), [0, 0, 0, 1])
  np.testing.assert_array_equal(gmm.group_sizes_from_ids(jnp.array([-1, 127], jnp.int8), 4), [0, 0, 0, 0])
  np.testing.assert_array_equal(gmm.group_sizes_from_ids(jnp.array([127, -1], jnp.int8), 300).nonzero()[0], [127])


@pytest.mark.parametrize(
  "offset", [np.uint32(2**32 - 1), np.int32(2**31 - 1), np.int32(-(2**31)), np.int8(-2), np.uint8(255)]
)
def test_traced_offset_past_either_end(offset):
  """No local group exists there, and none comes into being by narrowing the offset (SPEC GMM-5)."""
  run = jax.jit(lambda o: gmm.gmm(jnp.ones((4, 2)), jnp.ones((2, 2, 3)), np.array([1, 1, 2]), group_offset=o))
  np.testing.assert_array_equal(run(offset), np.zeros((4, 3)))

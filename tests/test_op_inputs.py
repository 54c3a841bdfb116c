"""Bad input to the public ops is refused before any compile, in a sentence with the way out (SPEC REG-6).

Each row says what is wrong, the exception, and words that the message must hold: what was
received and what is needed. The backend would fail the test by being called at all.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gmm

pytestmark = pytest.mark.second_interpreter


def _never(*args, **kwargs):
  raise AssertionError("the backend was reached")


@contextlib.contextmanager
def _refusal(error, words):
  """The block must raise `error` with all the words in its message."""
  with pytest.raises(error) as caught:  # the message is checked word by word below
    yield
  missing = [w for w in words if w not in str(caught.value)]
  assert not missing, f"{missing} not in: {caught.value}"


UNREACHABLE = gmm.Backend(name="unreachable", gmm=_never, tgmm=_never, supports=_never)
LHS, RHS, DOUT = jnp.ones((8, 4)), jnp.ones((3, 4, 6)), jnp.ones((8, 6))
SIZES = np.array([2, 3, 1])
INT8 = jnp.ones((8, 4), jnp.int8)

BAD_GMM = {
  "k differs": ((LHS, RHS.swapaxes(1, 2), SIZES), {}, ValueError, ["k = 4", "(3, 6, 4)", "transpose_rhs=False"]),
  "k differs, transposed": ((LHS, RHS, SIZES), {"transpose_rhs": True}, ValueError, ["dimension 2 of size 6"]),
  "lhs rank": ((LHS[0], RHS, SIZES), {}, ValueError, ["lhs", "(4,)", "2 dimensions", "[m, k]"]),
  "rhs rank": ((LHS, RHS[0], SIZES), {}, ValueError, ["rhs", "(4, 6)", "3 dimensions", "[g, k, n]"]),
  "lhs a list": (([[1.0]], RHS, SIZES), {}, TypeError, ["lhs", "list"]),
  "lhs of integers": ((LHS.astype(jnp.int32), RHS, SIZES), {}, TypeError, ["int32", "bfloat16"]),
  "codes without a scale": ((INT8, RHS, SIZES), {}, ValueError, ["int8", "without their scale", "gmm.QArray"]),
  "fp8 without a scale": (
    (LHS, RHS.astype(jnp.float8_e4m3fn), SIZES),
    {},
    ValueError,
    ["float8_e4m3fn", "without their scale"],
  ),
  "scale rank": ((gmm.QArray(INT8, jnp.ones((8,))), RHS, SIZES), {}, ValueError, ["(8,)", "(8, 4)"]),
  "scale shape": ((gmm.QArray(INT8, jnp.ones((8, 3))), RHS, SIZES), {}, ValueError, ["(8, 3)", "divisor"]),
  "scale of integers": ((gmm.QArray(INT8, jnp.ones((8, 1), jnp.int32)), RHS, SIZES), {}, TypeError, ["scale", "int32"]),
  "qvalue of floats": ((gmm.QArray(LHS, jnp.ones((8, 1))), RHS, SIZES), {}, TypeError, ["qvalue", "float32"]),
  "scale along rows in blocks": ((gmm.QArray(INT8, jnp.ones((4, 1))), RHS, SIZES), {}, ValueError, ["(4, 1)", "m = 8"]),
  "float group_sizes": ((LHS, RHS, SIZES / 1.0), {}, TypeError, ["group_sizes", "float64", "integer"]),
  "group_sizes rank": ((LHS, RHS, SIZES[None]), {}, ValueError, ["(1, 3)", "one dimension"]),
  "group_sizes None": ((LHS, RHS, None), {}, TypeError, ["NoneType"]),
  "negative size": ((LHS, RHS, [2, -1, 1]), {}, ValueError, ["group_sizes[1] is -1"]),
  "sum past m": ((LHS, RHS, [4, 4, 1]), {}, ValueError, ["sum to 9", "m = 8"]),
  "sum past m, int8": ((LHS, RHS, np.array([127, 127, 127], np.int8)), {}, ValueError, ["sum to 381"]),
  "shard without offset": ((LHS, RHS[:2], SIZES), {}, ValueError, ["2 groups", "has 3", "group_offset"]),
  "offset too large": ((LHS, RHS[:2], SIZES), {"group_offset": 2}, ValueError, ["group_offset is 2", "[0, 1]"]),
  "offset negative": ((LHS, RHS[:2], SIZES), {"group_offset": -1}, ValueError, ["group_offset is -1", "[0, 1]"]),
  "offset a float": ((LHS, RHS, SIZES), {"group_offset": 1.0}, TypeError, ["group_offset", "float"]),
  "offset of shape (2,)": ((LHS, RHS, SIZES), {"group_offset": jnp.zeros(2, int)}, ValueError, ["(2,)", "()", "(1,)"]),
  "more weights than groups": (
    (LHS, RHS, SIZES[:2]),
    {"group_offset": 0},
    ValueError,
    ["3 local groups out of 2"],
  ),
  "partial_sum shape": ((LHS, RHS, SIZES), {"partial_sum": LHS}, ValueError, ["partial_sum", "(8, 4)", "(8, 6)"]),
  "existing_out shape": ((LHS, RHS, SIZES), {"existing_out": LHS}, ValueError, ["existing_out", "(8, 4)", "(8, 6)"]),
  "partial_sum and existing_out": (
    (LHS, RHS, SIZES),
    {"partial_sum": DOUT, "existing_out": DOUT},
    ValueError,
    ["partial_sum", "existing_out"],
  ),
  "result dtype": ((LHS, RHS, SIZES), {"preferred_element_type": jnp.int8}, ValueError, ["int8", "bfloat16"]),
  "result float64 without x64": (
    (LHS, RHS, SIZES),
    {"preferred_element_type": "float64"},
    ValueError,
    ["jax_enable_x64"],
  ),
  "unknown recipe": ((LHS, RHS, SIZES), {"recipe": "fp8_dinamic"}, ValueError, ["fp8_dinamic", "'fp8_dynamic'?"]),
  "recipe of another type": ((LHS, RHS, SIZES), {"recipe": 8}, TypeError, ["int", "gmm.Recipe"]),
  "unknown backend": ((LHS, RHS, SIZES), {"backend": "referense"}, ValueError, ["megablox", "'reference'?"]),
  "backend of another type": ((LHS, RHS, SIZES), {"backend": print}, TypeError, ["gmm.Backend"]),
  "precision": ((LHS, RHS, SIZES), {"precision": "best"}, ValueError, ["best", "highest"]),
  "tiling of two": ((LHS, RHS, SIZES), {"tiling": (8, 128)}, ValueError, ["(8, 128)", "three", "nine"]),
  "tiling of zero": ((LHS, RHS, SIZES), {"tiling": (8, 0, 128)}, ValueError, ["(8, 0, 128)", "positive"]),
}


@pytest.mark.parametrize("name", BAD_GMM)
def test_gmm_refuses(name):
  """A wrong argument is named with what was received and what is needed."""
  args, kwargs, error, words = BAD_GMM[name]
  with _refusal(error, words):
    gmm.gmm(*args, **{"backend": UNREACHABLE, **kwargs})


@pytest.mark.parametrize("name", [n for n in BAD_GMM if n not in ("negative size", "sum past m", "sum past m, int8")])
def test_gmm_refuses_while_tracing(name):
  """Everything but the values of group_sizes is known while tracing, so it is refused there too."""
  args, kwargs, error, _ = BAD_GMM[name]
  with pytest.raises(error):
    jax.eval_shape(lambda: gmm.gmm(*args, **{"backend": UNREACHABLE, **kwargs}))


BAD_TGMM = {
  "rows differ": ((LHS, DOUT[:4], SIZES), {}, ValueError, ["(8, 4)", "(4, 6)", "rows"]),
  "offset without num_groups": ((LHS, DOUT, SIZES), {"group_offset": 0}, ValueError, ["num_groups"]),
  "num_groups too large": ((LHS, DOUT, SIZES), {"num_groups": 4}, ValueError, ["[0, 3]", "4"]),
  "shard without offset": ((LHS, DOUT, SIZES), {"num_groups": 2}, ValueError, ["2 groups", "group_offset"]),
  "scale along rows": ((gmm.QArray(INT8, jnp.ones((8, 1))), DOUT, SIZES), {}, ValueError, ["(8, 1)", "rows"]),
  "codes and a recipe": (
    (LHS, gmm.QArray(INT8, jnp.ones((1, 1))), SIZES),
    {"recipe": "fp8_dynamic"},
    ValueError,
    ["recipe=None"],
  ),
}


@pytest.mark.parametrize("name", BAD_TGMM)
def test_tgmm_refuses(name):
  """As for gmm, for the arguments that tgmm has of its own."""
  args, kwargs, error, words = BAD_TGMM[name]
  with _refusal(error, words):
    gmm.tgmm(*args, **{"backend": UNREACHABLE, **kwargs})


BAD_RECIPES = {
  "unknown qtype": (lambda: gmm.Quant(qtype="int7"), ["int7", "float8_e4m3fn"]),
  "bf16 as qtype": (lambda: gmm.Quant(qtype="bfloat16"), ["bfloat16", "int8"]),
  "granularity": (
    lambda: gmm.Quant(qtype="int8", granularity="row"),  # pyright: ignore[reportArgumentType]  the point of the row
    ["'row'", "channel_per_group"],
  ),
  "block of zero": (lambda: gmm.Quant(qtype="int8", granularity=0), ["0", "positive"]),
  "calibration": (lambda: gmm.Quant(qtype="int8", calibration="minmax"), ["minmax", "absmax", "fixed"]),
  "asymmetric range": (lambda: gmm.Quant(qtype="int8", calibration="fixed,-1,2"), ["fixed,-1,2", "symmetric"]),
  "range of zero": (lambda: gmm.Quant(qtype="int8", calibration="fixed,0"), ["fixed,0"]),
  "tiny_scale": (
    lambda: gmm.Quant(qtype="int8", tiny_scale="zero"),  # pyright: ignore[reportArgumentType]  the point of the row
    ["'zero'", "clamp"],
  ),
  "scale_dtype": (lambda: gmm.Quant(qtype="int8", scale_dtype="bfloat16"), ["bfloat16", "float32"]),
  "lhs alone": (lambda: gmm.Recipe(lhs=gmm.Quant(qtype="int8")), ["rhs"]),
  "2-D blocks of lhs": (
    lambda: gmm.Recipe(lhs=gmm.Quant(qtype="int8", granularity=(2, 2)), rhs=gmm.Quant(qtype="int8")),
    ["(2, 2)", "rhs"],
  ),
  "global without axes": (lambda: gmm.Recipe(scale_scope="global"), ["scale_axes"]),
  "axes without global": (lambda: gmm.Recipe(scale_axes=("expert",)), ["expert", "global"]),
}


@pytest.mark.parametrize("name", BAD_RECIPES)
def test_recipe_refuses(name):
  """A recipe that means nothing cannot be built."""
  build, words = BAD_RECIPES[name]
  with _refusal(ValueError, words):
    build()


def test_block_that_does_not_divide():
  """The block size meets its dimension only in the call; it is refused there, before the backend."""
  recipe = gmm.Recipe(rhs=gmm.Quant(qtype="int8", granularity=3))
  with pytest.raises(ValueError, match="quantizes rhs in blocks of 3 along k = 4"):
    gmm.gmm(LHS, RHS, SIZES, recipe=recipe, backend=UNREACHABLE)


def test_inputs_are_left_alone():
  """The caller's sizes stay what they were, and numpy arrays and lists serve as arrays."""
  sizes = np.array([2, 3, 1], np.int16)
  out = gmm.gmm(np.ones((8, 4), np.float32), np.ones((3, 4, 6), np.float32), sizes)
  assert sizes.tolist() == [2, 3, 1]
  expected = np.repeat([[4.0] * 6, [0.0] * 6], [6, 2], axis=0)
  np.testing.assert_array_equal(out, expected)
  np.testing.assert_array_equal(gmm.gmm(LHS, RHS, [2, 3, 1]), expected)

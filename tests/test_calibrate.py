"""`gmm.calibrate`: static ranges are the largest magnitudes that any gmm in a function really used (SPEC QNT-10).

The operands are seen from inside the function, so what matters is that every way to run it
(jit before or during, grad, scan, vmap, remat, shard_map) is seen, that nothing of calibration stays behind in a
jit cache, and that data which has no range is an error in words.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gmm

M, K, N, G = 12, 4, 3, 3
SIZES = np.array([5, 0, 4], np.int32)  # 3 slack rows, group 1 is empty


def _multiply(lhs, rhs, sizes, *, lhs_quant, group_offset, transpose_rhs, preferred_element_type, **rest):
  """A grouped matmul for one shard of all groups: enough to run the ops of these tests."""
  del lhs_quant, group_offset, rest
  rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
  ends = jnp.cumsum(sizes)
  group = jnp.searchsorted(ends, jnp.arange(lhs.shape[0]), side="right")
  out = jnp.einsum("mk,mkn->mn", lhs, rhs[jnp.minimum(group, rhs.shape[0] - 1)])
  return jnp.where((group < rhs.shape[0])[:, None], out, 0).astype(preferred_element_type)


def _transposed(lhs, dout, sizes, *, num_groups, preferred_element_type, **rest):
  del rest
  group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(lhs.shape[0]), side="right")
  one_hot = (group[:, None] == jnp.arange(num_groups)).astype(lhs.dtype)
  return jnp.einsum("mg,mk,mn->gkn", one_hot, lhs, dout).astype(preferred_element_type)


def _refuses_quantized(problem):
  return "It only multiplies floats." if problem.lhs.scale_shape or problem.lhs.quant else None


PLAIN = gmm.Backend(name="plain", gmm=_multiply, tgmm=_transposed, supports=_refuses_quantized)


def op(lhs, rhs, **kwargs):
  return gmm.gmm(lhs, rhs, SIZES, backend=PLAIN, **kwargs)


def operands(seed=0, dtype=jnp.float32):
  """Small integers, whose absmax of used rows and groups is 5 and 3, and larger ones where nothing is used."""
  rng = np.random.default_rng(seed)
  lhs, rhs = rng.integers(-2, 3, (M, K)), rng.integers(-2, 3, (G, K, N))
  lhs[4, 1], rhs[2, 0, 1] = -5, 3
  lhs[9:], rhs[1] = 100, -100
  return jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype)


def ranges(recipe):
  return tuple(q and q.fixed_range for q in (recipe.lhs, recipe.rhs))


def _scan(lhs, rhs):
  return jax.lax.scan(lambda carry, x: (carry + op(x, rhs).sum(), None), jnp.zeros(()), lhs[None])[0]


def _remat_grad(lhs, rhs):
  return jax.grad(lambda x, y: jax.checkpoint(op)(x, y).sum(), argnums=(0, 1))(lhs, rhs)


def _shard_map(lhs, rhs):
  mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  p = jax.sharding.PartitionSpec
  return jax.shard_map(op, mesh=mesh, in_specs=(p("x"), p()), out_specs=p("x"))(lhs, rhs)


WAYS = {
  "eager": op,
  "jit": jax.jit(op),
  "jit in jit": jax.jit(lambda x, y: jax.jit(op)(x, y) + 1),
  "transpose_rhs": lambda x, y: op(x, y.swapaxes(1, 2), transpose_rhs=True),
  "ragged_dot": lambda x, y: gmm.ragged_dot(x, y, SIZES, backend=PLAIN),
  "grad": lambda x, y: jax.grad(lambda x: op(x, y).sum())(x),
  "jit of grad": jax.jit(jax.grad(lambda x, y: op(x, y).sum(), argnums=(0, 1))),
  "grad of jit": jax.grad(jax.jit(lambda x, y: op(x, y).sum())),
  "scan": _scan,
  "jit of scan": jax.jit(_scan),
  "remat": _remat_grad,
  "jit of remat": jax.jit(_remat_grad),
  "vmap": lambda x, y: jax.vmap(op, in_axes=(0, None))(jnp.stack([x, x * 0]), y),
  "jit of vmap of grad": jax.jit(jax.vmap(jax.grad(lambda x, y: op(x, y).sum()), in_axes=(None, 0))),
  "shard_map": _shard_map,
  "jit of shard_map": jax.jit(_shard_map),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_is_seen(way):
  """The range is the used absmax however the function runs, also when it was traced before, uncalibrated."""
  fn = WAYS[way]
  lhs, rhs = operands()
  if way == "jit of vmap of grad":
    rhs = jnp.stack([rhs, rhs / 2])
  before = fn(lhs, rhs)
  found = gmm.calibrate(lambda batch: fn(*batch), [(lhs, rhs)])
  assert ranges(found) == (5.0, 3.0)
  jax.tree.map(np.testing.assert_array_equal, before, fn(lhs, rhs))  # and calibration changed nothing


def test_range_is_the_maximum_over_batches_and_calls():
  """Two calls in each of three batches: one recipe that covers all six."""

  @jax.jit
  def fn(batch):
    lhs, rhs = batch
    return op(lhs, rhs), op(2 * lhs, 0.5 * rhs)

  lhs, rhs = operands()
  found = gmm.calibrate(fn, ((lhs * f, rhs / f) for f in (1.0, 4.0, 2.0)))
  assert ranges(found) == (40.0, 3.0)


def test_a_traced_function_is_watched_again_and_no_trace_of_it_stays():
  """Each calibration sees a jitted function that was traced before, and later calls report to nobody.

  The program that runs afterwards must be the very one from before: no callback in it.
  """
  lhs, rhs = operands()
  traces = []

  @jax.jit
  def fn(batch):
    traces.append(1)
    return op(*batch)

  fn((lhs, rhs))
  first = gmm.calibrate(fn, [(lhs, rhs)] * 3)
  second = gmm.calibrate(fn, [(lhs * 2, rhs)])
  assert ranges(first) == (5.0, 3.0)
  assert ranges(second) == (10.0, 3.0)
  count = len(traces)
  fn((lhs, rhs))
  assert len(traces) == count == 3
  assert "callback" not in fn.lower((lhs, rhs)).as_text()


def test_a_scan_body_traced_before_is_watched():
  """lax.scan keeps its own cache of traced bodies, keyed by the function."""
  lhs, rhs = operands()

  def body(carry, x):
    return carry + op(x, rhs).sum(), None

  run = lambda xs: jax.lax.scan(body, jnp.zeros(()), xs)[0]
  run(lhs[None])
  assert ranges(gmm.calibrate(run, [lhs[None]])) == (5.0, 3.0)
  assert "callback" not in str(jax.make_jaxpr(run)(lhs[None]))


def test_ranges_of_a_local_shard_of_groups():
  """With group_offset, rows of groups that are not local and local groups without rows are not used."""
  lhs, rhs = operands()
  fn = lambda batch: gmm.gmm(batch[0], batch[1], SIZES, group_offset=2, backend=PLAIN)
  assert np.abs(lhs[5:9]).max() == 2
  assert ranges(gmm.calibrate(fn, [(lhs, rhs[2:])])) == (2.0, 3.0)


def test_static_range_gives_the_codes_of_the_dynamic_one():
  """On the batch it was calibrated on, the static recipe quantizes bit for bit as absmax per tensor does."""
  rng = np.random.default_rng(1)
  lhs = jnp.asarray(rng.standard_normal((M, K)), jnp.bfloat16)
  rhs = jnp.asarray(rng.standard_normal((G, K, N)), jnp.bfloat16)
  dynamic = gmm.recipe("fp8_calibrated")
  static = gmm.calibrate(lambda batch: op(*batch), [(lhs, rhs)])
  ends = jnp.cumsum(SIZES)
  used: Any = {"starts": ends - SIZES, "ends": ends}

  def codes(recipe: Any):
    return gmm.quantize(lhs, recipe.lhs, "rows", **used), gmm.quantize(rhs, recipe.rhs, "rhs", **used)

  jax.tree.map(np.testing.assert_array_equal, codes(static), codes(dynamic))


def test_the_base_gives_everything_but_the_range():
  """Code dtype, dout and the other fields are the base's; "absmax,F" widens; an unquantized operand stays so."""
  lhs, rhs = operands()
  fn = lambda batch: op(*batch)
  assert gmm.calibrate(fn, [(lhs, rhs)]).dout == gmm.recipe("fp8_calibrated").dout
  int8 = gmm.Quant(qtype="int8", granularity="channel_per_group", tiny_scale="qwix", clip_gradient=True)
  wide = gmm.Quant(qtype="float8_e5m2", granularity=2, calibration="absmax,1.5")
  found = gmm.calibrate(fn, [(lhs, rhs)], recipe=gmm.Recipe(lhs=wide, rhs=int8))
  assert found.lhs == gmm.Quant(qtype="float8_e5m2", granularity="tensor", calibration="fixed,-7.5,7.5")
  assert found.rhs == gmm.Quant(
    qtype="int8", granularity="tensor", calibration="fixed,-3.0,3.0", tiny_scale="qwix", clip_gradient=True
  )
  assert found.dout is None
  assert ranges(gmm.calibrate(fn, [(lhs, rhs)], recipe="int8_weight_only")) == (None, 3.0)
  assert ranges(gmm.calibrate(fn, [(lhs, rhs)], recipe="fp8_static")) == (5.0, 3.0)


def test_an_odd_range_survives_its_spelling():
  """R is written as text: it must come back as the same float."""
  lhs, rhs = operands()
  lhs = lhs.at[0, 0].set(np.float32(17.1234567))
  assert ranges(gmm.calibrate(lambda b: op(*b), [(lhs, rhs)]))[0] == float(np.float32(17.1234567))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_used_non_finite_value_is_named_with_its_batch(value):
  lhs, rhs = operands()
  batches = [(lhs, rhs), (lhs.at[3, 0].set(value), rhs), (lhs, rhs)]
  with pytest.raises(ValueError, match=r"lhs .*NaN or Inf.*batch 1"):
    gmm.calibrate(lambda b: op(*b), batches)
  with pytest.raises(ValueError, match=r"rhs .*NaN or Inf.*batch 0"):
    gmm.calibrate(lambda b: op(*b), [(lhs, rhs.at[2, 0, 0].set(value))])
  unused = (lhs.at[10].set(value), rhs.at[1].set(value))
  assert ranges(gmm.calibrate(lambda b: op(*b), [unused])) == (5.0, 3.0)


def test_no_range_is_an_error_in_words():
  lhs, rhs = operands()
  qlhs = gmm.QArray(lhs.astype(jnp.int8), jnp.ones((1, 1)))
  with pytest.raises(ValueError, match=r"lhs was zero .* all 2 batches"):
    gmm.calibrate(lambda b: op(*b), [(lhs * 0, rhs)] * 2)
  with pytest.raises(ValueError, match="rhs was zero"):
    gmm.calibrate(lambda b: op(*b), [(lhs, rhs * 0)])
  with pytest.raises(ValueError, match="batches is empty"):
    gmm.calibrate(lambda b: op(*b), [])
  with pytest.raises(ValueError, match=r"called neither gmm.gmm nor"):
    gmm.calibrate(lambda b: b[0] @ b[1][0], [(lhs, rhs)])
  with pytest.raises(ValueError, match="No unquantized lhs was seen"):
    gmm.calibrate(lambda b: jax.eval_shape(op, *b), [(lhs, rhs)])
  with pytest.raises(ValueError, match="quantizes neither lhs nor rhs"):
    gmm.calibrate(lambda b: op(*b), [(lhs, rhs)], recipe="bf16")
  with pytest.raises(ValueError, match="Unknown recipe"):
    gmm.calibrate(lambda b: op(*b), [(lhs, rhs)], recipe="fp8")
  codes = lambda b: gmm.gmm(qlhs, b[1], SIZES, backend="reference")
  with pytest.raises(ValueError, match="No unquantized lhs was seen: every gmm in fn took it as a QArray"):
    gmm.calibrate(codes, [(lhs, rhs)])


def test_an_error_in_the_function_ends_the_calibration():
  """The function's own exception comes out, and calls after it are not watched."""
  lhs, rhs = operands()

  def fails(batch):
    op(*batch)
    raise KeyError("mine")

  with pytest.raises(KeyError, match="mine"):
    gmm.calibrate(fails, [(lhs, rhs)])
  assert "callback" not in str(jax.make_jaxpr(op)(lhs, rhs))

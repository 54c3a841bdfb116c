"""The sanitizers catch what a TPU would do silently: three kernels with a fault each, and one without."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import gmm
from gmm.conformance._sanitize import sanitize

# A minute of simulation, which leaves state in its process: a run of its own.
pytestmark = pytest.mark.slow


def _right(x_ref, o_ref, scratch, sem):
  copy = pltpu.make_async_copy(x_ref, scratch, sem)
  copy.start()
  copy.wait()
  o_ref[...] = scratch[...]


def _reads_what_nobody_wrote(x_ref, o_ref, scratch, sem):
  del sem
  rows = x_ref.shape[0] - 1
  pltpu.sync_copy(x_ref.at[pl.ds(0, rows)], scratch.at[pl.ds(0, rows)])
  o_ref[...] = scratch[...]


def _reads_past_the_end(x_ref, o_ref, scratch, sem):
  del sem
  pltpu.sync_copy(x_ref, scratch)
  o_ref[...] = scratch[pl.ds(pl.program_id(0) + 1, x_ref.shape[0]), :]


def _does_not_wait(x_ref, o_ref, scratch, sem):
  copy = pltpu.make_async_copy(x_ref, scratch, sem)
  copy.start()
  o_ref[...] = scratch[...]
  copy.wait()


def _copied_by(kernel):
  """The reference, its results copied by a Pallas kernel."""
  reference = gmm.get_backend("reference")

  def copied(x):
    flat = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    call = pl.pallas_call(
      kernel,
      out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
      grid=(1,),
      in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
      scratch_shapes=[pltpu.VMEM(flat.shape, flat.dtype), pltpu.SemaphoreType.DMA],
      interpret=True,
    )
    return call(flat).reshape(x.shape).astype(x.dtype)

  def gmm_(*args, **kwargs):
    return copied(reference.gmm(*args, **kwargs))

  def tgmm_(*args, **kwargs):
    return copied(reference.tgmm(*args, **kwargs))

  return dataclasses.replace(reference, name=kernel.__name__.strip("_"), gmm=gmm_, tgmm=tgmm_)


def test_a_right_kernel_passes():
  """No false alarm, in any pass."""
  results = sanitize(_copied_by(_right))
  assert [(r.status, r.message) for r in results] == [("passed", "")] * 3


@pytest.mark.parametrize(
  ("kernel", "words"),
  [
    (_reads_what_nobody_wrote, "nan"),
    (_reads_past_the_end, "bound"),
    (_does_not_wait, "race"),
  ],
  ids=lambda x: x.__name__.strip("_") if callable(x) else "",
)
def test_a_fault_is_caught(kernel, words):
  """Each would pass in plain interpret mode, or on a TPU on a good day."""
  results = sanitize(_copied_by(kernel))
  assert {r.status for r in results} == {"failed"}
  assert all(words in r.message.lower() for r in results), [r.message for r in results]


def test_nothing_to_sanitize_is_declined():
  """A backend without Pallas kernels is not passed."""
  results = sanitize(gmm.get_backend("reference"))
  assert {r.status for r in results} == {"declined"}
  assert all("nothing to sanitize" in r.reasons[0] for r in results)


@pytest.mark.parametrize("name", ["megablox", "tokamax_v1"])
def test_public_kernels(name):
  """Found by name, after and before a call of the same shapes outside the simulation."""
  results = sanitize(gmm.get_backend(name))
  assert [(r.status, r.message) for r in results] == [("passed", "")] * 3

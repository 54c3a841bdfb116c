"""Backends are found, listed and refused by name (SPEC REG-1 to REG-5)."""

from __future__ import annotations

import importlib.metadata

import jax.numpy as jnp
import numpy as np
import pytest

import gmm
from gmm import _registry

pytestmark = pytest.mark.second_interpreter

LHS, RHS, SIZES = jnp.ones((8, 4)), jnp.ones((2, 4, 6)), np.array([3, 5])


def _backend(name, supports=lambda problem: None, **kwargs):
  reference = gmm.get_backend("reference")
  return gmm.Backend(name=name, gmm=reference.gmm, tgmm=reference.tgmm, supports=supports, **kwargs)


@pytest.fixture
def entry_points(monkeypatch):
  """Replaces the installed entry points; the caches of the registry start and end empty."""

  def install(**values):
    points = {n: importlib.metadata.EntryPoint(n, v, _registry.ENTRY_POINT_GROUP) for n, v in values.items()}
    monkeypatch.setattr(_registry, "_entry_points", lambda: points)
    _registry._load.cache_clear()

  yield install
  _registry._load.cache_clear()


def test_ours_are_listed_and_load():
  """The four backends of this package are found like anyone's, through entry points."""
  listed = gmm.backends()
  assert {"reference", "xla", "megablox", "tokamax_v1"} <= set(listed)
  assert all(reason is None for reason in listed.values()), listed


def test_broken_entry_point_is_named(entry_points):
  """A third party's broken import hurts nobody else and is listed with its cause."""
  entry_points(reference="gmm.reference:backend", broken="no_such_module:backend", wrong="math:pi")
  listed = gmm.backends()
  assert listed["reference"] is None
  assert "no_such_module" in str(listed["broken"])
  assert "ModuleNotFoundError" in str(listed["broken"])
  assert "TypeError" in str(listed["wrong"])
  with pytest.raises(ImportError, match=r"'broken' \(no_such_module:backend\).*ModuleNotFoundError"):
    gmm.gmm(LHS, RHS, SIZES, backend="broken")


def test_entry_point_under_another_name(entry_points):
  """The name of the entry point is the name of the backend: otherwise reports would lie."""
  entry_points(other="gmm.reference:backend")
  with pytest.raises(ImportError, match="'reference'; the two names must be equal"):
    gmm.get_backend("other")


def test_register_as_context_manager():
  """A registration ends with its block, so tests do not leak; an exception ends it too."""
  with gmm.register_backend(_backend("mine")) as mine:
    assert gmm.get_backend("mine") is mine
    assert "mine" in gmm.backends()
  assert "mine" not in gmm.backends()
  with pytest.raises(RuntimeError, match="out"), gmm.register_backend(_backend("mine")):
    raise RuntimeError("out")
  with pytest.raises(ValueError, match="Unknown backend 'mine'"):
    gmm.get_backend("mine")


@pytest.mark.parametrize(("name", "words"), [("reference", "exists already"), ("auto", "choice by platform")])
def test_register_refuses_taken_names(name, words):
  """A second backend of one name would make every report ambiguous."""
  with pytest.raises(ValueError, match=words):
    gmm.register_backend(_backend(name))


def test_named_backend_never_falls_back():
  """A named backend that refuses raises with its reason, although the reference could."""
  refusing = _backend("refusing", supports=lambda problem: f"k must be 128, got {problem.k}.")
  with pytest.raises(gmm.Unsupported, match=r"'refusing' cannot do fwd of m=8 k=4 n=6 groups=2.*k must be 128, got 4"):
    gmm.gmm(LHS, RHS, SIZES, backend=refusing)
  assert issubclass(gmm.Unsupported, NotImplementedError)


def test_auto_lists_every_refusal(entry_points):
  """When nothing fits, the error says why for each candidate, the unloadable ones included."""
  refusing = _backend("refusing", supports=lambda problem: "not today.", auto_rank=(("cpu", 1), ("gpu", 1), ("tpu", 1)))
  entry_points(reference="no_such_module:backend")
  with gmm.register_backend(refusing), pytest.raises(gmm.Unsupported) as caught:
    gmm.gmm(LHS, RHS, SIZES)
  assert "refusing: not today." in str(caught.value)
  assert "no_such_module" in str(caught.value)


def test_auto_takes_the_first_that_fits():
  """Rank decides among those that support the problem; a backend without a rank takes no part."""
  calls = []

  def spy(name, rank, reason=None):
    reference = gmm.get_backend("reference")

    def record(*args, **kwargs):
      calls.append(name)
      return reference.gmm(*args, **kwargs)

    ranks = tuple((p, rank) for p in ("cpu", "gpu", "tpu")) if rank is not None else ()
    return gmm.Backend(name=name, gmm=record, tgmm=reference.tgmm, supports=lambda p: reason, auto_rank=ranks)

  with (
    gmm.register_backend(spy("unranked", None)),
    gmm.register_backend(spy("second", 2)),
    gmm.register_backend(spy("refusing", 1, "no.")),
    gmm.register_backend(spy("third", 3)),
  ):
    gmm.gmm(LHS, RHS, SIZES)
  assert calls == ["second"]

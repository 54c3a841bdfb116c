"""Strict settings for the whole suite: no implicit dtype promotion, the same examples everywhere."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import re

# Four CPU devices, so that sharded checks have something to shard over; before JAX starts.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

import hypothesis
import jax
import pytest

from gmm.conformance._case import Case

jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
  "gmm",
  derandomize=True,
  database=None,
  deadline=None,  # the first example of a shape compiles
  suppress_health_check=(hypothesis.HealthCheck.too_slow,),  # compilation again
)
hypothesis.settings.load_profile("gmm")


@pytest.fixture(autouse=True)
def _few_memory_maps():
  """Drops compiled programs before a process meets Linux's limit of 65530 memory maps, where XLA crashes.

  Each program holds several maps, and the suite compiles thousands in each process.
  """
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Case:
  """The public fault that `test_<id>_...` is about, from tests/data/faults.json: its sizes, dtype, data and seed.

  Where the entry gives no list of sizes they are zeros, and the test draws its own. Operands that a recipe
  quantizes are bfloat16.
  """
  name = request.node.originalname.split("_")[1].upper()
  faults = json.loads((pathlib.Path(__file__).parent / "data" / "faults.json").read_text())
  (entry,) = (f for f in faults if f["id"] == name)
  shapes, sizes, dtypes, inputs = (entry[f] for f in ("shapes", "group_sizes", "dtypes", "inputs"))
  seed = re.search(r"(?:INT|NRM)\((\d+)\)", inputs)
  return Case(
    m=shapes["m"],
    k=shapes["k"],
    n=shapes["n"],
    group_sizes=tuple(sizes) if isinstance(sizes, list) else (0,) * shapes["groups"],
    dtype="float32" if isinstance(dtypes, dict) and dtypes["lhs"] == "f32" else "bfloat16",
    data="integers" if "INT" in inputs else "real",
    seed=int(seed[1]) if seed else 0,
  )

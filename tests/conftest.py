"""Strict settings for the whole suite: no implicit dtype promotion, the same examples everywhere."""

from __future__ import annotations

import os

# Four CPU devices, so that sharded checks have something to shard over; before JAX starts.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
  "gmm",
  derandomize=True,
  database=None,
  deadline=None,  # the first example of a shape compiles
  suppress_health_check=(hypothesis.HealthCheck.too_slow,),  # compilation again
)
hypothesis.settings.load_profile("gmm")

"""The reference backend: grouped matmuls in plain jax.numpy, the oracle for kernels."""

from gmm._protocol import Backend
from gmm.reference._matmul import gmm, tgmm

backend = Backend(
  name="reference",
  gmm=gmm,
  tgmm=tgmm,
  supports=lambda problem: None,  # refuses nothing
  auto_rank=(("cpu", 10), ("gpu", 20), ("tpu", 90)),
)

__all__ = ["backend", "gmm", "tgmm"]

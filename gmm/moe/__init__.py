"""A functional routed Mixture-of-Experts layer on `gmm.gmm`, and the same layer without it."""

from gmm.moe._config import MoeConfig, MoeParams, init_params
from gmm.moe._dense import moe_dense
from gmm.moe._layer import expert_mlp, moe_layer
from gmm.moe._permute import permute, unpermute
from gmm.moe._route import Routing, load_balance_loss, route

__all__ = [
  "MoeConfig",
  "MoeParams",
  "Routing",
  "expert_mlp",
  "init_params",
  "load_balance_loss",
  "moe_dense",
  "moe_layer",
  "permute",
  "route",
  "unpermute",
]

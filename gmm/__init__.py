"""Grouped matrix multiplication for Mixture-of-Experts: one specification, many backends.

`gmm.gmm(lhs, rhs, group_sizes)` multiplies each contiguous block of rows with the weights of
its own group; `recipe="fp8_dynamic"` quantizes it, `backend="megablox"` runs it elsewhere.
SPEC.md says what every result must be; `gmm check` holds a backend to it.
"""

from gmm._calibrate import calibrate as calibrate
from gmm._groups import group_sizes_from_ids as group_sizes_from_ids
from gmm._op import gmm as gmm
from gmm._op import ragged_dot as ragged_dot
from gmm._op import tgmm as tgmm
from gmm._op import which_backend as which_backend
from gmm._protocol import Backend as Backend
from gmm._protocol import OperandSpec as OperandSpec
from gmm._protocol import Problem as Problem
from gmm._protocol import Unsupported as Unsupported
from gmm._qarray import QArray as QArray
from gmm._qarray import dequantize as dequantize
from gmm._quantize import GivenScale as GivenScale
from gmm._quantize import quantize as quantize
from gmm._ranges import AmaxHistory as AmaxHistory
from gmm._ranges import Ranges as Ranges
from gmm._recipe import Quant as Quant
from gmm._recipe import Recipe as Recipe
from gmm._recipe import recipe as recipe
from gmm._recipe import recipe_names as recipe_names
from gmm._registry import backends as backends
from gmm._registry import get_backend as get_backend
from gmm._registry import register_backend as register_backend
from gmm._tiling import Tiling as Tiling

"""Faulty backends that the conformance kit must catch, and correct ones that it must not.

`MUTANTS` is the table: each is one operator at one site of a correct backend. `VARIANTS` are
correct and compute differently.
"""

from ._table import MUTANTS as MUTANTS
from ._table import Mutant as Mutant
from ._variants import VARIANTS as VARIANTS

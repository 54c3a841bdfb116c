"""The published table of a quantized Mixtral MoE layer, computed with any backend (`gmm table`)."""

from gmm.table._config import CONFIGS, NUMERICS, SCHEMES, Numerics, TableConfig, table_recipe
from gmm.table._criteria import Criterion, criteria
from gmm.table._main import default_backends, main
from gmm.table._measure import Row, Table, compute
from gmm.table._published import METRICS, QUANTITIES, Published, published
from gmm.table._report import as_json, print_table

__all__ = [
  "CONFIGS",
  "METRICS",
  "NUMERICS",
  "QUANTITIES",
  "SCHEMES",
  "Criterion",
  "Numerics",
  "Published",
  "Row",
  "Table",
  "TableConfig",
  "as_json",
  "compute",
  "criteria",
  "default_backends",
  "main",
  "print_table",
  "published",
  "table_recipe",
]

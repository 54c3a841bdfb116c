"""No public fault is forgotten: each case of tests/data/faults.json has a test, or a reason in the table here."""

from __future__ import annotations

import collections
import json
import pathlib
import re

HERE = pathlib.Path(__file__).parent

# Cases about what does not exist yet, and what brings it.
NOT_YET = {
  "DT06": "no activation is fused into a matmul: with the v2 kernels (issue 3)",
  "IX01": "no index arithmetic of our own: the public kernels compute their offsets; with the v2 kernels (issue 3)",
  "TR08": "no kernel of our own to run on memory filled with NaN and with 0: with the v2 kernels (issue 3)",
  "VM01": "no VMEM estimate or default tiles of our own to compile ahead of time: with the v2 kernels (issue 3)",
}


def test_every_fault_is_tested_or_explained():
  """An id without a test is a fault that may come back; one in both places is a stale excuse."""
  ids = [entry["id"] for entry in json.loads((HERE / "data" / "faults.json").read_text())]
  assert [i for i, count in collections.Counter(ids).items() if count > 1] == []
  sources = "".join(path.read_text() for path in sorted(HERE.glob("test_faults_*.py")))
  tested = {i.upper() for i in re.findall(r"^def test_([a-z]{2}\d{2})_", sources, re.MULTILINE)}
  assert tested & set(NOT_YET) == set()
  assert tested | set(NOT_YET) == set(ids)

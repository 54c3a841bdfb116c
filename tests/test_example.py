"""examples/my_backend as a third party's package: installed, found by its entry point, held to SPEC.md."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
  """Environment variables under which the installed example is importable, and nothing of the checkout's folder is."""
  uv = shutil.which("uv")
  if uv is None:
    pytest.skip("needs uv to install the example")
  # A copy, because building leaves files behind.
  folder = tmp_path_factory.mktemp("example")
  shutil.copytree(ROOT / "examples" / "my_backend", folder / "source")
  command = [uv, "pip", "install", "--no-deps", "--python", sys.executable, "--target", str(folder / "site")]
  # Offline first: setuptools is in uv's cache wherever this project was built with it.
  for extra in (["--offline"], []):
    done = subprocess.run([*command, *extra, str(folder / "source")], capture_output=True, text=True, check=False)
    if done.returncode == 0:
      break
  assert done.returncode == 0, done.stderr
  return {**{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}, "PYTHONPATH": str(folder / "site")}


def _gmm(environment: dict[str, str], folder: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
  program = "import sys; from gmm import cli; sys.exit(cli.main(sys.argv[1:]))"
  if "check" in words:  # its processes are spawned, which needs a main module on disk
    (folder / "run.py").write_text(f"if __name__ == '__main__':\n  {program}\n")
    command = [sys.executable, "run.py", *words]
  else:
    command = [sys.executable, "-c", program, *words]
  return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_entry_point_is_found(environment, tmp_path):
  """`gmm backends` lists it as one that loads, and the module is the installed one."""
  done = _gmm(environment, tmp_path, "backends")
  assert done.returncode == 0, done.stderr
  assert "my_backend ok" in " ".join(done.stdout.split())
  where = subprocess.run(
    [sys.executable, "-c", "import my_backend; print(my_backend.__file__)"],
    cwd=tmp_path,
    env=environment,
    capture_output=True,
    text=True,
    check=True,
  )
  assert where.stdout.startswith(environment["PYTHONPATH"])


def test_core_and_borders(environment, tmp_path):
  """The clauses that a wrong border, tile or transpose breaks first, forward and weight gradient."""
  clauses = "*GMM-[12]*:rows*"
  done = _gmm(
    environment, tmp_path, "check", "my_backend", "--clause", clauses, "--profile", "quick", "--json", "r.json"
  )
  assert done.returncode == 0, done.stdout + done.stderr
  results = json.loads((tmp_path / "r.json").read_text())["conformance"]["results"]
  assert {r["check"] for r in results} >= {"rows_of_groups", "rows_summed_by_group"}
  assert all(r["status"] == "passed" for r in results)


@pytest.mark.slow
def test_conforms(environment, tmp_path):
  """Every clause passed or declined, and what is declined is what its README says: int4 and scales in blocks."""
  done = _gmm(environment, tmp_path, "check", "my_backend", "--profile", "quick", "--no-table", "--json", "r.json")
  assert done.returncode == 0, done.stdout + done.stderr
  results = json.loads((tmp_path / "r.json").read_text())["conformance"]["results"]
  mine = [r for r in results if r["backend"] == "my_backend"]
  assert {r["status"] for r in mine} == {"passed", "declined"}
  declined = {reason for r in mine if r["status"] == "declined" for reason in r["reasons"]}
  assert all("int4" in reason or "in blocks" in reason for reason in declined), declined

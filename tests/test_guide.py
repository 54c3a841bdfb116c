"""docs/write-a-backend.md is true: its files, commands and outputs, in order, in an empty folder."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "write-a-backend.md").read_text()
BLOCKS = re.findall(r"^```(python|console|diff) ?(\S*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def _run(command: str, folder: pathlib.Path) -> str:
  """What the command prints, white space as one blank: a terminal of another width breaks lines elsewhere."""
  path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
  # XLA as a user has it, not with the four devices of this suite.
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("PYTEST")} | {
    "PATH": path
  }
  done = subprocess.run(
    shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
  )
  assert "Traceback" not in done.stderr, done.stderr
  return " ".join(done.stdout.split())


def _patch(text: str, diff: str) -> str:
  """The text with the "-" line of the diff replaced by its "+" line."""
  (old,) = re.findall(r"^-(.*)$", diff, re.MULTILINE)
  (new,) = re.findall(r"^\+(.*)$", diff, re.MULTILINE)
  assert text.count(old) == 1
  return text.replace(old, new)


@pytest.mark.slow
def test_guide_from_an_empty_folder(tmp_path):
  """Each file as printed, each command run there, each line of output found in what it printed."""
  kinds = [kind for kind, _, _ in BLOCKS]
  assert kinds == ["python", "console", "console", "diff", "console", "python", "console"]
  for kind, name, text in BLOCKS:
    if kind == "python":
      (tmp_path / name).write_text(text)
    elif kind == "diff":
      (tmp_path / name).write_text(_patch((tmp_path / name).read_text(), text))
    else:
      command, *lines = text.splitlines()
      assert command.startswith("$ ")
      printed = _run(command[2:], tmp_path)
      for line in lines:
        for part in line.split("…"):
          assert " ".join(part.split()) in printed, f"{command}\n{part!r} is not in\n{printed}"


def test_links_lead_somewhere():
  """Relative to the page's folder."""
  targets = re.findall(r"\]\((?!https?://)([^)#]+)\)", GUIDE)
  assert targets
  assert not [t for t in targets if not (ROOT / "docs" / t).exists()]


def test_first_backend_conforms_after_the_fix_and_not_before(tmp_path):
  """The planted mistake is one that the kit finds, and the only one: a fast look without the command line."""
  from gmm.conformance import check_backend

  (source, diff) = (
    next(text for kind, name, text in BLOCKS if kind == k and name == "first.py") for k in ("python", "diff")
  )
  for text, conforms in ((source, False), (_patch(source, diff), True)):
    namespace: dict = {}
    exec(compile(text, "first.py", "exec"), namespace)
    report = check_backend(namespace["backend"], "GMM-1", profile="quick", on_fail="report")
    assert report.conforms is conforms, report.results

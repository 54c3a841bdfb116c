"""`gmm bench`: its arithmetic and its plumbing. Nothing here depends on how fast anything is."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import rich.console

from gmm.bench import Figure, distributions, main, table
from gmm.bench._timing import interleaved, ratio


class Clock:
  """Time that passes only where a run says so."""

  def __init__(self):
    self.now = 0.0
    self.order: list[str] = []

  def __call__(self) -> float:
    return self.now

  def run(self, name: str, seconds: float):
    def run():
      self.order.append(name)
      self.now += seconds

    return run


def test_runs_take_turns():
  """A B A B: a slow spell of the machine must hit both; the first round only compiles."""
  clock = Clock()
  runs = {"a": clock.run("a", 1.0), "b": clock.run("b", 2.0)}
  assert interleaved(runs, 3, min_seconds=0.5, clock=clock) == {"a": [1.0] * 3, "b": [2.0] * 3}
  assert clock.order == ["a", "b"] * 4


def test_short_runs_repeat_within_their_turn():
  """A sample lasts min_seconds, and is the time of one run."""
  clock = Clock()
  runs = {"a": clock.run("a", 0.25), "b": clock.run("b", 2.0)}
  assert interleaved(runs, 2, min_seconds=0.5, clock=clock) == {"a": [0.25] * 2, "b": [2.0] * 2}
  assert clock.order == ["a", "b"] + ["a", "a", "b"] * 2


def test_ratio_compares_within_a_round():
  """Twice as slow in every round is a ratio of 2, though the machine slows down tenfold meanwhile."""
  seconds = {"a": [2.0, 20.0, 200.0], "b": [1.0, 10.0, 100.0], "c": [1.0, 100.0, 10.0]}
  assert ratio(seconds, "a", "b") == 2
  assert ratio(seconds, "c", "b") == 1


@pytest.mark.parametrize(
  ("value", "sense", "met"),
  [
    (1.0, "at most", True),
    (1.5, "at most", True),
    (2.0, "at most", False),
    (1.0, "at least", False),
    (1.5, "at least", True),
    (float("nan"), "at least", False),
    (float("nan"), "at most", False),
  ],
)
def test_target(value, sense, met):
  """A bound is kept when it is reached exactly; a figure that is no number keeps none."""
  figure = Figure(part="p", name="n", value=value, unit="x", target=1.5, sense=sense)
  assert figure.met is met
  assert figure.as_dict()["met"] is met


def test_no_target_no_verdict():
  assert Figure(part="p", name="n", value=1.0, unit="x").met is None


def test_table_shows_every_figure():
  """Each part once, each figure with its number, target and verdict."""
  figures = [
    Figure(part="speed", name="first", value=7.125, unit="x", target=6, sense="at least"),
    Figure(part="speed", name="second", value=0.5, unit="x", target=0.25),
    Figure(part="size", name="third", value=1234.4, unit="MiB"),
  ]
  console = rich.console.Console(width=120, record=True, file=io.StringIO())
  console.print(table(figures, "title"))
  text = console.export_text()
  assert [text.count(part) for part in ("speed", "size")] == [1, 1]
  for words in (
    ("first", "7.12 x", "at least 6 x", "met"),
    ("second", "0.5 x", "at most 0.25 x", "missed"),
    ("third", "1234 MiB"),
  ):
    line = next(line for line in text.splitlines() if words[0] in line)
    assert all(word in line for word in words)


@pytest.mark.parametrize(("m", "g"), [(4096, 8), (4096, 64), (4096, 256), (512, 4), (100, 7)])
def test_distributions_share_their_sum(m, g):
  """Times are comparable only for equal work: m rows in g groups, never a negative size."""
  sizes = distributions(m, g)
  assert next(iter(sizes)) == "uniform"
  for name, s in sizes.items():
    assert (s.shape, s.dtype, s.sum(), s.min() >= 0) == ((g,), np.int32, m, True), name
  assert len({tuple(s) for s in sizes.values()}) == len(sizes)


def test_quick_run_prints_and_writes(tmp_path, capsys):
  """The command runs from end to end; its JSON has every figure, finite and without a timing target."""
  file = tmp_path / "figures.json"
  assert main(["cpu", "--quick", "--rounds", "1", "--json", str(file)]) == 0
  assert "gmm bench cpu" in capsys.readouterr().out
  figures = json.loads(file.read_text())
  parts = {f["part"] for f in figures}
  assert len(parts) == 6
  assert all(np.isfinite(f["value"]) and f["value"] > 0 for f in figures)
  assert all("memory" in f["part"] for f in figures if f["target"] is not None)


def test_bad_arguments(capsys):
  """Argparse's exit code, and a sentence that names what is wrong."""
  for args, word in ((["cpu", "--rounds", "0"], "--rounds"), (["gpu"], "gpu"), ([], "bench")):
    with pytest.raises(SystemExit) as raised:
      main(args)
    assert raised.value.code == 2
    assert word in capsys.readouterr().err

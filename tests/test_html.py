"""The page of a report: self-contained, and its pictures show the wrong tile where it is."""

from __future__ import annotations

import base64
import functools
import io
import re
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest

import gmm
from gmm.conformance import Evidence, Report, checks, run_check
from gmm.conformance import _heatmap as heatmap
from gmm.conformance._html import page, write_html

RED = (215, 48, 31)  # a wrong element of an exact result


def _evidence(shape, wrong, owner=None, bound=None):
  """Ones, with `wrong` (an index) twice as large."""
  got = np.ones(shape)
  got[wrong] = 2
  return Evidence("out", got, np.ones(shape), ("float32", "float32"), bound, owner)


def _pixels(svg):
  """[rows, columns, 3] of the picture inside an SVG."""
  (data,) = re.findall(r'href="data:image/png;base64,([^"]+)"', svg)
  return np.rint(matplotlib.image.imread(io.BytesIO(base64.b64decode(data)))[..., :3] * 255).astype(int)


def test_each_element_is_a_pixel():
  """A wrong tile is red in its place, and nothing else is."""
  pixels = _pixels(heatmap.svg(_evidence((24, 12), np.s_[8:16, 4:8])))
  assert pixels.shape == (24, 12, 3)
  red = (pixels == RED).all(axis=-1)
  assert red[8:16, 4:8].all()
  assert red.sum() == 32


def test_colour_follows_the_ratio():
  """Inside the bound blue deepens, outside red darkens, a NaN has a colour of its own."""
  evidence = _evidence((1, 6), 0, bound=np.array([[1e9, 2.0, 0.9, 1 / 9.0, 1 / 999.0, 1.0]]))
  evidence.got[0] = [1, 2, 2, 2, 2, np.nan]
  pixels = _pixels(heatmap.svg(evidence))[0]
  assert pixels[0].tolist() == [244, 247, 250]
  assert pixels[1].sum() < pixels[0].sum()
  reds = pixels[2:5, 0] - pixels[2:5, 2]
  assert (reds > 60).all()
  assert (np.diff(pixels[2:5].sum(axis=1)) < 0).all()
  assert pixels[5].tolist() == [74, 20, 140]


def test_borders_tiles_and_names():
  """A line at every border between groups, rows of no group named, the tile grid dotted."""
  owner = np.repeat([0, 2, -1], [5, 10, 9])
  svg = heatmap.svg(_evidence((24, 12), np.s_[0, 0], owner), tile=(8, 4))
  assert svg.count('class="group"') == 2
  assert svg.count('class="tile"') == 2 + 2
  for name in ("group 0", "group 2", "no group"):
    assert f">{name}<" in svg
  assert "group 1<" not in svg


def test_groups_of_a_weight_gradient_lie_below_each_other():
  """[g, k, n] is drawn with a border after each group's k rows."""
  svg = heatmap.svg(_evidence((3, 8, 6), np.s_[1, 2:4], np.arange(3)))
  red = (_pixels(svg) == RED).all(axis=-1)
  assert red.shape == (24, 6)
  assert np.flatnonzero(red.any(axis=1)).tolist() == [10, 11]
  assert svg.count('class="group"') == 2


def test_a_large_result_keeps_its_one_wrong_element():
  """Pooling takes the worst element of each block, so that nothing wrong disappears."""
  pixels = _pixels(heatmap.svg(_evidence((1000, 2000), np.s_[777, 1501])))
  assert max(pixels.shape[:2]) <= 360
  assert (pixels == RED).all(axis=-1).sum() == 1


def test_no_picture_of_another_shape():
  """A wrong shape or dtype is said in words."""
  evidence = _evidence((4, 4), 0)
  assert heatmap.svg(Evidence("out", evidence.got, np.ones((3, 4)), ("float32", "float32"))) == ""
  assert heatmap.svg(Evidence("out", evidence.got, evidence.got, ("float16", "float32"))) == ""


@functools.cache
def _report():
  """GMM-1 of a backend that doubles a tile: rows 8 to 15, columns 0 to 7; and a clause that it passes."""
  import jax.numpy as jnp

  reference = gmm.get_backend("reference")

  def doubled(lhs, rhs, sizes, **options):
    out = reference.gmm(lhs, rhs, sizes, **options)
    row, column = jnp.arange(out.shape[0])[:, None], jnp.arange(out.shape[1])[None]
    return jnp.where((row // 8 == 1) & (column < 8), out + out, out)

  name = "<doubled> & tiled"
  backend = gmm.Backend(name=name, gmm=doubled, tgmm=reference.tgmm, supports=lambda problem: None)
  results = [
    run_check(c, backend, profile="quick") for c in checks("*") if c.id in ("GMM-1:rows_of_groups", "REG-1:protocol")
  ]
  return Report(tuple(results), "quick", 0, 1.0)


def test_page_is_self_contained():
  """One file that asks the network for nothing, with everything a reader needs; names are escaped."""
  text = page(_report())
  failed = _report().failures[0]
  assert failed.looks_like.startswith("double count")
  assert not re.search(r'(src|href)="(?!data:|#)', text)
  assert not re.search(r"@import|url\(", text)
  assert "&lt;doubled&gt; &amp; tiled" in text
  assert "<doubled>" not in text
  for part in (
    failed.looks_like,
    "rows_of_groups",
    "run_case(",
    "--case",
    "smallest case",
    "as found",
    "does not conform",
  ):
    assert part in text
  for clause in ("GMM-1", "REG-1"):
    assert f'<th scope="row">{clause}</th>' in text


def _browser():
  names = ("chromium", "chromium-browser", "google-chrome", "chrome")
  return next((found for name in names if (found := shutil.which(name))), None)


@pytest.mark.skipif(_browser() is None, reason="no Chromium to look at the page with")
def test_a_browser_shows_the_wrong_tile(tmp_path):
  """A screenshot: the wrong tile stands there as a red rectangle of the tile's proportions."""
  write_html(_report(), tmp_path / "r.html")
  shot = tmp_path / "r.png"
  subprocess.run(
    [
      str(_browser()),
      "--headless",
      "--no-sandbox",
      "--disable-gpu",
      "--hide-scrollbars",
      "--force-device-scale-factor=1",
      "--window-size=1280,1400",
      f"--user-data-dir={tmp_path / 'profile'}",
      f"--screenshot={shot}",
      (tmp_path / "r.html").as_uri(),
    ],
    check=True,
    capture_output=True,
    timeout=120,
  )
  pixels = np.rint(matplotlib.image.imread(shot)[..., :3] * 255).astype(int)
  found = _report().failures[0].evidence
  assert found is not None
  wrong = found.ratio > 1
  rows, columns = np.flatnonzero(wrong.any(axis=1)), np.flatnonzero(wrong.any(axis=0))
  # The smallest case's picture is the last one: its wrong elements, as large as they are drawn.
  colour = (np.abs(pixels - RED).max(axis=-1) <= 2) if found.bound is None else pixels[..., 0] > pixels[..., 2] + 120
  assert colour.sum() > 40 * len(rows) * len(columns)
  # It is the page of our styles, not a list without them: the paper is white, the ground grey.
  assert (pixels[5, 5] == (245, 247, 249)).all()

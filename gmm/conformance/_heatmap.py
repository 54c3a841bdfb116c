"""error / bound over a result as a picture: one pixel per element, group borders and tiles drawn in.

The pixels are a PNG inside an SVG, scaled without smoothing; lines and words are SVG on top, so
that they stay sharp at any size.
"""

from __future__ import annotations

import base64
import html
import io
import itertools

import numpy as np

from gmm.conformance._evidence import Evidence

# Right: from nearly white to blue as the error nears its bound. Wrong: orange to dark red, by powers of ten.
_RIGHT = ((244, 247, 250), (150, 182, 214))
_WRONG = ((247, 178, 103), (215, 48, 31), (127, 0, 0))
_NOT_FINITE = (74, 20, 140)
_DECADES = 3.0  # from 1 to 1000 times the bound

_LARGEST = 360  # pixels along an axis; longer ones are pooled, the worst element of each block standing for it
_WIDTH, _HEIGHT = 380.0, 270.0


def svg(evidence: Evidence, tile: tuple[int, int] | None = None) -> str:
  """The picture as an SVG element, "" when shape or dtype is wrong or there is nothing to draw.

  Args:
    evidence: the result, [m, n] or [g, k, n]; the groups of a three-dimensional one lie below each other.
    tile: (rows, columns) of the backend's tiles, drawn as a dotted grid.
  """
  if not evidence.same_form or not evidence.got.size or evidence.got.ndim < 1:
    return ""
  ratio, finite, owner = _flat(evidence)
  rows, columns = ratio.shape
  w, h = _cell(columns, _WIDTH), _cell(rows, _HEIGHT)
  width, height = columns * w, rows * h
  left, top = 92.0, 26.0
  parts = [_image(ratio, finite, evidence.bound is None, left, top, width, height)]
  parts += _tiles(evidence, tile, left, top, w, h, rows, columns)
  parts += _groups(owner, left, top, h, width)
  parts += _axes(evidence, left, top, w, h, rows, columns)
  parts.append(f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{height:.1f}" class="frame"/>')
  at = evidence.first_bad
  if at is not None:
    row = at[0] * (rows // max(evidence.got.shape[0], 1)) + (at[1] if evidence.got.ndim == 3 else 0)
    x, y = left + at[-1] * w, top + (row if evidence.got.ndim > 1 else 0) * h
    parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" class="first"/>')
  total_w, total_h = left + width + 14, top + height + 8
  label = html.escape(f"error over bound of {evidence.what}")
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_w:.0f} {total_h:.0f}" width="{total_w:.0f}" '
    f'height="{total_h:.0f}" role="img" aria-label="{label}" class="heat">{"".join(parts)}</svg>'
  )


def legend() -> str:
  """What the colours mean, as an HTML element."""
  right, wrong = _css_gradient(_RIGHT), _css_gradient(_WRONG)
  return (
    '<div class="legend"><span>error / bound</span>'
    f'<span>0</span><i class="bar" style="background:{right}"></i><span>1</span>'
    f'<i class="bar" style="background:{wrong}"></i><span>1000 or must be equal</span>'
    f'<i class="dot" style="background:{_css(_NOT_FINITE)}"></i><span>NaN or Inf</span>'
    '<i class="line"></i><span>group border</span><i class="line dotted"></i><span>tile</span>'
    '<i class="dot ring"></i><span>first bad element</span></div>'
  )


def _flat(evidence: Evidence) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """(ratio, whether got is finite, group of each row) in two dimensions, groups below each other."""
  shape = evidence.got.shape
  columns = shape[-1]
  rows = evidence.got.size // columns
  owner = evidence.owner
  if owner is not None:
    owner = np.repeat(owner, rows // len(owner)) if len(owner) and rows % len(owner) == 0 else None
  ratio, finite = (x.reshape(rows, columns) for x in (evidence.ratio, np.isfinite(evidence.got)))
  return ratio, finite | (ratio <= 1), owner


def _cell(count: int, room: float) -> float:
  return min(max(room / count, 0.25), 30.0)


def _image(ratio: np.ndarray, finite: np.ndarray, exact: bool, x: float, y: float, width: float, height: float) -> str:
  pixels = _pooled(_colours(ratio, finite, exact), np.where(finite, ratio, np.inf))
  data = base64.b64encode(_png(pixels)).decode()
  return (
    f'<image x="{x}" y="{y}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none" '
    f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'
  )


def _colours(ratio: np.ndarray, finite: np.ndarray, exact: bool) -> np.ndarray:
  """uint8 [rows, columns, 3]."""
  inside = np.clip(ratio, 0, 1)[..., None]
  colour = np.array(_RIGHT[0]) * (1 - inside) + np.array(_RIGHT[1]) * inside
  depth = np.clip(np.log10(np.clip(ratio, 1, 1e30)) / _DECADES, 0, 1)
  if exact:
    depth = np.full_like(depth, 0.5)  # equal or not: nothing between
  stops = np.linspace(0, 1, len(_WRONG))
  wrong = np.stack([np.interp(depth, stops, [c[i] for c in _WRONG]) for i in range(3)], axis=-1)
  colour = np.where((ratio > 1)[..., None], wrong, colour)
  return np.where(finite[..., None], colour, np.array(_NOT_FINITE)).round().astype(np.uint8)


def _pooled(pixels: np.ndarray, badness: np.ndarray) -> np.ndarray:
  """At most _LARGEST pixels along each axis; of each block the worst one."""
  for axis in (0, 1):
    step = -(-pixels.shape[axis] // _LARGEST)
    if step == 1:
      continue
    chosen = []
    for start in range(0, pixels.shape[axis], step):
      block = np.take(badness, range(start, min(start + step, pixels.shape[axis])), axis)
      chosen.append(np.expand_dims(block.argmax(axis) + start, axis))
    index = np.concatenate(chosen, axis)
    badness = np.take_along_axis(badness, index, axis)
    pixels = np.take_along_axis(pixels, index[..., None], axis)
  return pixels


def _png(pixels: np.ndarray) -> bytes:
  import matplotlib.image

  out = io.BytesIO()
  matplotlib.image.imsave(out, pixels, format="png")
  return out.getvalue()


def _tiles(
  evidence: Evidence,
  tile: tuple[int, int] | None,
  left: float,
  top: float,
  w: float,
  h: float,
  rows: int,
  columns: int,
) -> list[str]:
  """The tile grid; tiles of a three-dimensional result start anew in each group."""
  if tile is None:
    return []
  per_group = evidence.got.shape[-2] if evidence.got.ndim > 1 else rows
  ys = [start + y for start in range(0, rows, per_group) for y in range(tile[0], per_group, tile[0])]
  lines = [_line(left, top + y * h, left + columns * w, top + y * h, "tile") for y in ys]
  return lines + [
    _line(left + x * w, top, left + x * w, top + rows * h, "tile") for x in range(tile[1], columns, tile[1])
  ]


def _groups(owner: np.ndarray | None, left: float, top: float, h: float, width: float) -> list[str]:
  """Borders between groups, and a strip at the left that names them."""
  if owner is None or not len(owner):
    return []
  cuts = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
  parts, last_label = [], -1e9
  for number, (start, end) in enumerate(itertools.pairwise(cuts)):
    group, y, high = int(owner[start]), top + start * h, (end - start) * h
    kind = "none" if group < 0 else f"g{number % 2}"
    parts.append(f'<rect x="{left - 12}" y="{y:.1f}" width="8" height="{high:.1f}" class="strip {kind}"/>')
    if start:
      parts.append(_line(left - 12, y, left + width, y, "group"))
    middle = y + high / 2
    if middle - last_label >= 11:  # thin groups share a label's room
      name = "no group" if group < 0 else f"group {group}"
      parts.append(f'<text x="{left - 17}" y="{middle + 3.5:.1f}" class="name">{name}</text>')
      last_label = middle
  return parts


def _axes(evidence: Evidence, left: float, top: float, w: float, h: float, rows: int, columns: int) -> list[str]:
  """Column numbers above; row numbers at the left where no groups are named there."""
  parts = []
  for j in _ticks(columns, w):
    parts.append(f'<text x="{left + (j + 0.5) * w:.1f}" y="{top - 5}" class="tick">{j}</text>')
  if evidence.owner is None and evidence.got.ndim == 2:
    for i in _ticks(rows, h):
      parts.append(f'<text x="{left - 6}" y="{top + (i + 0.5) * h + 3:.1f}" class="name">{i}</text>')
  return parts


def _ticks(count: int, cell: float) -> range:
  """Indices far enough apart for their numbers."""
  step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10000) if s * cell >= 22)
  return range(0, count, step)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
  return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _css(colour: tuple[int, int, int]) -> str:
  return f"rgb{colour}".replace(" ", "")


def _css_gradient(stops: tuple[tuple[int, int, int], ...]) -> str:
  return f"linear-gradient(90deg,{','.join(map(_css, stops))})"

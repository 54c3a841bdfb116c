"""Which rows, columns and groups are wrong, and what a wrong result is made of.

A result is a sum of known products. Fitting their coefficients to what came back (least squares)
says which products are missing, doubled or foreign: 1 is right, 0 dropped, 2 counted twice.
"""

from __future__ import annotations

import numpy as np

from gmm.conformance._replay import Replay

_UNSET = "uninitialised memory in the result"


def structure(r: Replay, got: np.ndarray, exact: np.ndarray, bad: np.ndarray, bound: np.ndarray) -> str:
  """Words for where and how `got` differs from `exact`; "" when nothing is recognised.

  Args:
    r: the problem.
    got, exact, bound: float64, [m, n] or [g, k, n].
    bad: bool, elements outside the bound.
  """
  rules = (
    _not_finite,
    _must_be_zero,
    _dropped,
    _combined_rows if r.sums_rows else _combined_groups,
    _moved,
    _combined_k,
    _factor,
    _added,
  )
  return next((said for rule in rules if (said := rule(r, got, exact, bad, bound))), "")


def nan_lost(got: np.ndarray, exact: np.ndarray, bad: np.ndarray) -> str:
  """Words for numbers where only NaN or Inf is right, when that is all that is wrong."""
  lost = np.isfinite(got) & ~np.isfinite(exact)
  return "NaN lost: a NaN or Inf in an operand does not reach the result" if (bad == (bad & lost)).all() else ""


def _not_finite(r: Replay, got: np.ndarray, exact: np.ndarray, bad: np.ndarray, bound: np.ndarray) -> str:
  leaked = bad & ~np.isfinite(got) & np.isfinite(exact)
  if not leaked.any():
    return ""
  operands = not (np.isfinite(r.lhs.value).all() and np.isfinite(r.rhs.value).all())
  index = np.unique(np.nonzero(leaked)[0])
  if r.sums_rows:
    empty = all(r.rows[j][0] == r.rows[j][1] for j in index)
    if empty and not operands:
      return "drhs of an empty group left over: uninitialised memory"
    return (
      "NaN leaking: from rows of no group or of another group" if operands else "uninitialised memory in the result"
    )
  tail = (r.owner[index] < 0).all()
  if tail and not operands:
    return "uninitialised tail rows: rows of no group are not zeroed"
  if tail and not np.isfinite(r.lhs.value[r.owner < 0]).all():
    return "NaN leaking: tail rows not zeroed, or masked by a multiplication with 0"
  return (
    "NaN leaking: from another row or another group's weights" if operands else "uninitialised memory in the result"
  )


def _must_be_zero(r: Replay, got: np.ndarray, exact: np.ndarray, bad: np.ndarray, bound: np.ndarray) -> str:
  """Everything wrong lies in rows of no group, or in empty groups."""
  index = np.unique(np.nonzero(bad)[0])
  if r.sums_rows:
    empty = np.array([start == end for start, end in r.rows], bool)
    return "drhs of an empty group left over: it is not zeroed" if empty[index].all() else ""
  if not (r.owner[index] < 0).all():
    return ""
  foreign = r.offset or len(r.sizes) != len(r.rows)
  if foreign and (index < r.total).any():
    return "group_offset: rows of groups that are not local are not zeroed"
  for i in index[:4]:
    products = r.lhs.value[i] @ r.rhs.value
    if (np.abs(got[i] - products) <= np.maximum(bound[i], 1e-2 * np.abs(products))).all(axis=1).any():
      return "tail rows multiplied too: mask of rows of no group forgotten (uninitialised tail rows)"
  return "uninitialised tail rows: rows of no group are not zeroed"


def _dropped(r: Replay, got: np.ndarray, exact: np.ndarray, bad: np.ndarray, bound: np.ndarray) -> str:
  """Zeros where numbers must be."""
  if got[bad].any():
    return ""
  if bad.all() or not got.any():
    return "nothing was written: the result is zero"
  columns = np.unique(np.nonzero(bad)[-1])
  if len(columns) < bad.shape[-1] and columns[-1] == bad.shape[-1] - 1 and (np.diff(columns) == 1).all():
    return f"n tail dropped: columns from {columns[0]} on are zero"
  if r.sums_rows:
    k_rows = np.unique(np.nonzero(bad)[1])
    if len(k_rows) < bad.shape[1]:
      return f"k tail dropped: rows {k_rows[0]} to {k_rows[-1]} of drhs are zero"
    return f"groups dropped: drhs of group {', '.join(map(str, np.unique(np.nonzero(bad)[0])[:5]))} is zero"
  index = np.unique(np.nonzero(bad)[0])
  owner = r.owner
  last = all(i + 1 == len(owner) or owner[i + 1] != owner[i] or i + 1 in index for i in index)
  first = all(i == 0 or owner[i - 1] != owner[i] or i - 1 in index for i in index)
  which = "rows of whole groups" if last and first else "last rows of a group" if last else "first rows of a group"
  return f"rows dropped: {which if last or first else 'some rows'} are zero ({_span(index)})"


def _combined_groups(r: Replay, got: np.ndarray, exact: np.ndarray, bad: np.ndarray, bound: np.ndarray) -> str:
  """Which groups' weights each wrong row was multiplied with."""
  g = r.rhs.codes.shape[0]
  rows = np.unique(np.nonzero(bad)[0])
  found: list[tuple[int, np.ndarray]] = []
  for i in rows[:40]:
    at = bad[i]
    products = (r.lhs.value[i] @ r.rhs.value)[:, at]  # [g, wrong columns]
    target = got[i, at] if r.partial is None else (got[i] - r.partial[i])[at]
    limit = _tolerance(r, bound[i, at], target)
    whole = _fit(products.T, target, limit) if at.sum() >= g else _one_of(products, target, limit)
    if whole is None:
      return ""
    found.append((int(i), whole))
  owner = r.owner
  own = lambda i, c: c[owner[i]] if owner[i] >= 0 else 0
  foreign = [(i, np.flatnonzero(np.delete(c, owner[i]) if owner[i] >= 0 else c)) for i, c in found]
  if all(own(i, c) == 0 and not len(f) for (i, c), (_, f) in zip(found, foreign, strict=True)):
    return f"rows dropped ({_span(rows)})"
  if all(own(i, c) >= 2 and not len(f) for (i, c), (_, f) in zip(found, foreign, strict=True)):
    return f"double count: a tile is added twice ({place(r, bad)})"
  edge = {b + d for pair in r.rows for b in pair for d in (-1, 0)}
  if all(own(i, c) >= 1 and len(f) for (i, c), (_, f) in zip(found, foreign, strict=True)):
    if set(rows.tolist()) <= edge:
      return f"wrong group at an edge: rows beside it are multiplied with both groups ({place(r, bad)})"
    return f"accumulator not reset: the product of another group is in the sum ({place(r, bad)})"
  if all(own(i, c) == 1 and not len(f) for (i, c), (_, f) in zip(found, foreign, strict=True)):
    return ""  # the right products: something small is wrong
  where = " at an edge" if set(rows.tolist()) <= edge or _next_to_borders(r, rows) else ""
  others = sorted({int(j) for _, c in found for j in np.flatnonzero(c)})
  return f"wrong group{where}: {_span(rows)} use the weights of group {', '.join(map(str, others[:5]))}"


def _next_to_borders(r: Replay, rows: np.ndarray) -> bool:
  """Whether each run of wrong rows touches a border, and not all of them are whole groups."""
  runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
  spans = [(int(run[0]), int(run[-1]) + 1) for run in runs]
  borders = {b for pair in r.rows for b in pair}
  return all(a in borders or b in borders for a, b in spans) and not all(span in r.rows for span in spans)


def _combined_rows(r: Replay, got: np.ndarray, exact: np.ndarray, bad: np.ndarray, bound: np.ndarray) -> str:
  """Which rows were summed into each wrong group, and how often."""
  x, d = r.lhs.value, r.rhs.value
  said: list[str] = []
  for j in np.unique(np.nonzero(bad)[0])[:6]:
    products = np.einsum("ik,in->kni", x, d).reshape(-1, len(x))
    known = np.isfinite(products).all(axis=0) & (products != 0).any(axis=0)
    target = got[j].reshape(-1)
    counts = _fit(products[:, known], target, _tolerance(r, bound[j].reshape(-1), target))
    if counts is None:
      return ""
    whole = np.zeros(len(x))
    whole[known] = counts
    said.append(_counts_in_words(r, int(j), whole, known))
  kinds = {s.split(":")[0]: s for s in reversed(said) if s}  # one example of each kind
  return "; ".join(reversed(kinds.values()))


def _counts_in_words(r: Replay, j: int, counts: np.ndarray, known: np.ndarray) -> str:
  start, end = r.rows[j]
  own = np.zeros(len(counts), bool)
  own[start:end] = True
  missing = np.flatnonzero(own & known & (counts == 0))
  twice = np.flatnonzero(own & (counts >= 2))
  foreign = np.flatnonzero(~own & (counts != 0))
  if len(missing) and len(foreign):
    shifted = " (rows shifted by one)" if len(missing) == len(foreign) and len(missing) <= 2 else ""
    return f"wrong group at an edge{shifted}: {_span(foreign)} counted for {_span(missing)}"
  if len(foreign):
    if (r.owner[foreign] < 0).all():
      return f"rows of no group counted: {_span(foreign)} in drhs of group {j}"
    if (
      any((foreign == np.arange(*rows)).all() for rows in r.rows if rows[1] - rows[0] == len(foreign))
      and len(foreign) > 1
    ):
      return f"accumulator not reset: drhs of group {j} has another group's sum in it"
    return f"wrong group at an edge: {_span(foreign)} counted in drhs of group {j}"
  if len(missing):
    at = "first" if missing[0] == start else "last" if missing[-1] == end - 1 else "some"
    return f"rows dropped: {at} rows of a group are not summed ({_span(missing)})"
  return f"double count: {_span(twice)} summed twice" if len(twice) else ""


def _combined_k(r: Replay, got: np.ndarray, exact: np.ndarray, bad: np.ndarray, bound: np.ndarray) -> str:
  """Which steps along k were summed, and how often."""
  if r.sums_rows:
    return ""
  rows = [i for i in np.unique(np.nonzero(bad)[0]) if r.owner[i] >= 0][:48]
  columns = np.unique(np.nonzero(bad)[1])
  if not rows:
    return ""
  weights = r.rhs.value[r.owner[rows]][:, :, columns]  # [rows, k, columns]
  terms = (r.lhs.value[rows][:, :, None] * weights).swapaxes(1, 2).reshape(-1, weights.shape[1])
  partial = 0 if r.partial is None else r.partial[np.ix_(rows, columns)]
  at = np.ix_(rows, columns)
  target = (got[at] - partial).reshape(-1)
  counts = _fit(terms, target, _tolerance(r, bound[at].reshape(-1), target))
  if counts is None:
    return ""
  k = len(counts)
  dropped, twice = np.flatnonzero(counts == 0), np.flatnonzero(counts >= 2)
  if len(dropped) == k:
    return ""
  if len(twice) == k:
    return f"double count: a tile is added twice ({place(r, bad)})"
  if len(dropped) and dropped[-1] == k - 1:
    return f"last k block dropped: k from {dropped[0]} on is not summed (k tail)"
  if len(dropped):
    return f"k block dropped: {_span(dropped, 'k')} not summed"
  if len(twice):
    return f"k block counted twice: {_span(twice, 'k')} (k tail unmasked, or an accumulator not reset)"
  return ""


def _factor(r: Replay, got: np.ndarray, exact: np.ndarray, bad: np.ndarray, bound: np.ndarray) -> str:
  """One factor between got and exact, for all or for each row or column."""
  good = bad & np.isfinite(got) & np.isfinite(exact) & (np.abs(exact) > 4 * bound) & (exact != 0)
  if good.sum() < 3:
    return ""
  ratio = np.where(good, got / np.where(good, exact, 1), np.nan)
  slack = 3 * np.nanmax(np.where(good, bound / np.abs(np.where(good, exact, 1)), np.nan))
  if np.nanmax(ratio) - np.nanmin(ratio) <= slack * np.abs(np.nanmean(ratio)):
    factor = float(np.nanmean(ratio))
    if abs(factor - 1) < 1e-3:
      return ""  # that is a rounding
    if abs(factor - 2) <= 2 * slack:
      return f"double count: twice what it must be ({place(r, bad)})"
    return f"scale wrong: {factor:.4g} times what it must be ({place(r, bad)})"
  for axis, words in ((-1, "row"), (-2, "column")):
    some = good.sum(axis=axis, keepdims=True) >= 2
    if not some.any():
      continue
    with np.errstate(all="ignore"):
      low = np.where(good, ratio, np.inf).min(axis=axis, keepdims=True)
      high = np.where(good, ratio, -np.inf).max(axis=axis, keepdims=True)
    if (high - low <= slack * np.abs(high))[some].all() and np.abs(high[some] - 1).max() > slack:
      return f"scale wrong: one factor for each {words} (a scale dropped, doubled or taken from another {words})"
  return ""


def _added(r: Replay, got: np.ndarray, exact: np.ndarray, bad: np.ndarray, bound: np.ndarray) -> str:
  """What is too much is a constant, or the result of another place."""
  extra, places = got - exact, np.unique(np.nonzero(bad)[0])
  if np.ptp(extra[bad]) <= 2 * _tolerance(r, bound, got)[bad].max() < np.abs(extra[bad]).min() / 4:
    return f"k tail unmasked: a constant is added ({place(r, bad)})"
  for source in (got, exact):
    for i in places[:8]:
      equal = np.abs(source - extra[i]) <= _tolerance(r, bound[i], got[i]) + 1e-12
      at = np.asarray(equal.reshape(len(equal), -1).all(axis=1)) & (np.arange(len(equal)) != i)
      if not (at & np.any(source.reshape(len(at), -1), axis=1)).any():
        break
    else:
      kind = "group" if r.sums_rows else "row"
      return f"accumulator not reset: another {kind}'s result is added"
  columns = np.unique(np.nonzero(bad)[-1])
  for j in columns[:8]:
    equal = np.abs(got - extra[..., [j]]) <= _tolerance(r, bound, got) + 1e-12
    at = np.asarray(equal.reshape(-1, equal.shape[-1]).all(axis=0)) & (np.arange(equal.shape[-1]) != j)
    if not at.any():
      return ""
  return "accumulator not reset: another column's result is added"


def _moved(r: Replay, got: np.ndarray, exact: np.ndarray, bad: np.ndarray, bound: np.ndarray) -> str:
  """The right numbers at the wrong place."""
  for axis in range(got.ndim):
    if got.shape[axis] < 2:
      continue
    a, b, limit = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (got, exact, bound))
    wrong = np.flatnonzero(np.moveaxis(bad, axis, 0).reshape(len(a), -1).any(axis=1))
    if len(wrong) < 2:
      continue
    source = []
    for i in wrong[:64]:
      # A zero row may come from any row of zeros; that alone would be no sign of a move.
      same = (np.abs(b - a[i]) <= _tolerance(r, limit, b) + 1e-12).all(axis=1) & (b.any(axis=1) == a[i].any())
      at = np.flatnonzero(same)
      source.append(int(at[np.abs(at - i).argmin()]) if len(at) else -1)
    if min(source) < 0 or not a[wrong[:64]].any() or (np.array(source) == wrong[:64]).any():
      continue
    word = (("row", "column") if got.ndim == 2 else ("group", "k row", "column"))[axis]
    shift = set((np.array(source) - wrong[:64]).tolist())
    if shift in ({1}, {-1}):
      return f"{word}s shifted by one"
    return f"swapped blocks: right {word}s at the wrong place ({word} {wrong[0]} has what belongs to {source[0]})"
  return ""


def _tolerance(r: Replay, bound: np.ndarray, values: np.ndarray) -> np.ndarray:
  """How far what explains `values` may lie from them: their own rounding may exceed that of the right result."""
  unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(r.out_dtype, 2.0**-20)
  return 2 * bound + 2 * unit * np.abs(values)


def _fit(terms: np.ndarray, target: np.ndarray, tolerance: np.ndarray) -> np.ndarray | None:
  """Integer c with terms @ c = target within the tolerance; None when there is none or more than one."""
  if not np.isfinite(terms).all() or not np.isfinite(target).all() or terms.shape[0] < terms.shape[1] or not terms.size:
    return None
  found, _, rank, _ = np.linalg.lstsq(terms, target, rcond=None)
  counts = np.rint(found)
  if rank < terms.shape[1] or np.abs(counts).max() > 64:
    return None
  return counts if (np.abs(terms @ counts - target) <= tolerance).all() else None


def _one_of(products: np.ndarray, target: np.ndarray, tolerance: np.ndarray) -> np.ndarray | None:
  """Where there are too few columns to fit: one group's product, once or twice, or nothing."""
  counts = np.zeros(len(products))
  if not target.any():
    return counts
  for j, times in ((j, t) for t in (1, 2) for j in range(len(products))):
    if (np.abs(times * products[j] - target) <= tolerance).all():
      counts[j] = times
      return counts
  return None


def place(r: Replay, bad: np.ndarray) -> str:
  """Where the wrong elements lie, along each axis on which some are right."""
  names = ("group", "k row", "column") if r.sums_rows else ("row", "column")
  parts = []
  for axis, name in enumerate(names):
    index = np.unique(np.nonzero(bad)[axis])
    if len(index) < bad.shape[axis]:
      gaps = " with gaps" if len(index) <= index[-1] - index[0] else ""
      parts.append(f"{name} {index[0]}" if len(index) == 1 else f"{name}s {index[0]} to {index[-1]}{gaps}")
  return ", ".join(parts) or "everywhere"


def _span(index: np.ndarray, word: str = "rows") -> str:
  """ "rows 3-7" of an index list; "rows 3-7 and others" when it has gaps."""
  index = np.asarray(index)
  gaps = np.flatnonzero(np.diff(index) > 1)
  end = int(index[gaps[0]]) if len(gaps) else int(index[-1])
  first = f"{int(index[0])}" if end == index[0] else f"{int(index[0])}-{end}"
  return f"{word if word != 'rows' or end != index[0] else 'row'} {first}{' and others' if len(gaps) else ''}"

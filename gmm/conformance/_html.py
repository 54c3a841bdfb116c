"""A report as one page that needs nothing else: clause table, failures, pictures."""

from __future__ import annotations

import html
import pathlib
from collections.abc import Mapping
from types import MappingProxyType

import jax

from gmm.conformance import _heatmap
from gmm.conformance._case import Case
from gmm.conformance._report import RANK, backend_names, declined, failure_lines, summary
from gmm.conformance._reproduce import command, script
from gmm.conformance._result import Report, Result
from gmm.conformance._style import SCRIPT, STYLE


def write_html(report: Report, path: str | pathlib.Path, found_by: Mapping[str, str] = MappingProxyType({})) -> None:
  """Writes the report as one self-contained HTML file.

  Args:
    report: what to show.
    path: the file to write.
    found_by: name of a backend -> what `load_backend` finds it by, where that is not its name.
  """
  pathlib.Path(path).write_text(page(report, found_by), encoding="utf-8")


def page(report: Report, found_by: Mapping[str, str] = MappingProxyType({})) -> str:
  """The page as text; `found_by` as in `write_html`."""
  verdict = ("good", "conforms") if report.conforms else ("bad", "does not conform")
  if not any(r.ran for r in report.results):
    verdict = "warn", "nothing ran"
  names = [b for b in backend_names(report) if b != "(library)"] or ["the library"]
  title = f"{', '.join(names)}: {verdict[1]}"
  shown = [*report.failures, *(r for r in report.results if r.status == "expected failure")]
  failures = "".join(_failure(r, found_by.get(r.backend)) for r in shown)
  return (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    f"<title>{_text(title)}</title><style>{STYLE}</style></head><body><main>"
    f'<header><h1>{_text(", ".join(names))}</h1><p class="verdict {verdict[0]}">{verdict[1]}</p></header>'
    f'<p class="summary">{_text(summary(report))}, JAX {jax.__version__} on {jax.default_backend()}</p>'
    f"{_contents(shown)}"
    f"{'<h2>Failures</h2>' + _heatmap.legend() + failures if shown else ''}"
    f"<h2>Clauses</h2>{_table(report)}{_declines(report)}"
    f"</main><script>{SCRIPT}</script></body></html>\n"
  )


def _contents(shown: list[Result]) -> str:
  if len(shown) < 2:
    return ""
  rows = "".join(
    f'<li><a href="#{_anchor(r)}">{_text(r.check.id)}</a> {_text(r.backend)}'
    f"<span>{_text(r.looks_like or r.message[:90])}</span></li>"
    for r in shown
  )
  return f'<ul class="contents">{rows}</ul>'


def _table(report: Report) -> str:
  """Clause x backend: the worst status of the clause's checks, and the worst error / bound as a bar."""
  backends = [b for b in backend_names(report) if b != "(library)"] or ["(library)"]
  head = "".join(f"<th>{_text(b)}</th>" for b in backends)
  body = []
  for clause in dict.fromkeys(r.check.clause for r in report.results):
    rows = [r for r in report.results if r.check.clause == clause]
    rules = "; ".join(dict.fromkeys(r.check.rule for r in rows))
    shared = [r for r in rows if r.backend == "(library)"]
    cells = [_cell([*shared, *(r for r in rows if r.backend == b and b != "(library)")]) for b in backends]
    seconds = sum(r.seconds for r in rows)
    body.append(
      f'<tr><th scope="row">{clause}</th><td class="rule">{_text(rules)}</td>{"".join(cells)}'
      f'<td class="number">{seconds:.1f}</td></tr>'
    )
  return (
    f'<div class="scroll"><table><thead><tr><th>clause</th><th>rule</th>{head}<th class="number">seconds</th></tr>'
    "</thead>"
    f"<tbody>{''.join(body)}</tbody></table></div>"
    '<p class="note">The bar is the worst error over its bound; checks without one are exact. '
    "Declined is never counted as passed.</p>"
  )


def _cell(results: list[Result]) -> str:
  if not results:
    return "<td>&ndash;</td>"
  statuses = {r.status for r in results}
  worst = next(s for s in RANK if s in statuses)
  said = "part declined" if worst == "declined" and "passed" in statuses else worst
  ratios = [r.ratio for r in results if r.ratio is not None]
  bar = ""
  if ratios:
    ratio = max(ratios)
    over = ' class="over"' if ratio > 1 else ""
    bar = f'<span class="ratio"><i style="width:{100 * min(ratio, 1):.0f}%"{over}></i></span>'
    bar += f'<span class="value">{ratio:.2f}</span>'
  targets = [r for r in results if r.status in ("failed", "suite error", "unexpected pass", "expected failure")]
  badge = f'<span class="badge {worst.replace(" ", "-")}">{said}</span>'
  if targets:
    badge = f'<a href="#{_anchor(targets[0])}">{badge}</a>'
  return f"<td><div class='cell'>{badge}{bar}</div></td>"


def _declines(report: Report) -> str:
  items = [
    f"<li><b>{_text(backend)}</b>: {_text(reason)}<span>{_text(', '.join(where))}</span></li>"
    for backend in backend_names(report)
    for reason, where in declined(report, backend).items()
  ]
  return f'<h2>Declined</h2><ul class="contents">{"".join(items)}</ul>' if items else ""


def _failure(result: Result, backend: str | None) -> str:
  """One failure: what is known of it at the left, its pictures at the right."""
  lines = "".join(
    f'<dt>{_text(title)}</dt><dd class="{title.replace(" ", "-")}">{_text(text)}</dd>'
    for title, text in failure_lines(result)
  )
  trace = f"<pre class='trace'>{_text(result.traceback)}</pre>" if result.traceback else ""
  again = ""
  if result.case is not None:
    again = _pasted("run it again", script(result, backend))
    line = command(result, backend)
    again += _pasted("or from a shell", line) if line else ""
  pictures = _pictures(result)
  return (
    f'<section id="{_anchor(result)}"><h3>{_text(result.check.id)} <small>{_text(result.backend)}</small>'
    f'<span class="badge {result.status.replace(" ", "-")}">{result.status}</span></h3>'
    f'<div class="failure"><div class="known"><dl>{lines}</dl>{trace}{again}</div>{pictures}</div></section>'
  )


def _pictures(result: Result) -> str:
  """The smallest case, and before it the case as it was found, where a wrong tile can be seen."""
  shown = [("as found", result.found_case, result.found_evidence), ("smallest case", result.case, result.evidence)]
  if result.found_case == result.case:
    shown = shown[1:]
  figures = []
  for title, case, evidence in shown:
    drawn = "" if evidence is None else _heatmap.svg(evidence, result.tile)
    if drawn and evidence is not None:
      sizes = f", groups of {', '.join(map(str, case.group_sizes[:12]))} rows" if isinstance(case, Case) else ""
      shape = " x ".join(map(str, evidence.got.shape))
      caption = f"<b>{title}</b>: {_text(evidence.what)}, {shape}{_text(sizes)}"
      figures.append(f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>")
  return f'<div class="pictures">{"".join(figures)}</div>' if figures else ""


def _pasted(title: str, text: str) -> str:
  return f'<div class="paste"><span>{title}</span><button type="button">copy</button><pre>{_text(text)}</pre></div>'


def _anchor(result: Result) -> str:
  return "".join(c if c.isalnum() else "-" for c in f"{result.backend}-{result.check.id}")


def _text(text: str) -> str:
  return html.escape(text)

"""How the page of `_html` looks; plain CSS and a copy button."""

from __future__ import annotations

STYLE = """
:root{--ink:#1c2430;--soft:#5b6676;--line:#dde3ea;--paper:#fff;--back:#f5f7f9;--good:#1b7f4b;--bad:#c62a1c;--warn:#a86a00;
--odd:#6a3fb5;--calm:#2563a8}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 24px 60px}
header{display:flex;align-items:center;gap:16px;flex-wrap:wrap}
h1{font-size:26px;margin:0;font-weight:650}
h2{font-size:18px;margin:34px 0 12px;font-weight:650}
h3{font-size:16px;margin:0 0 14px;font-weight:650;display:flex;align-items:center;gap:10px;flex-wrap:wrap}
h3 small{font-weight:400;color:var(--soft);font-size:14px}
.verdict{margin:0;padding:3px 12px;border-radius:14px;font-weight:600;color:#fff}
.good{background:var(--good)}.bad{background:var(--bad)}.warn{background:var(--warn)}
.summary,.note{color:var(--soft);margin:8px 0 0}
.note{font-size:13px}
.contents{list-style:none;padding:0;margin:18px 0 0}
.contents li{padding:5px 0;border-bottom:1px solid var(--line)}
.contents span{display:block;color:var(--soft);font-size:13px}
a{color:var(--calm);text-decoration:none}a:hover{text-decoration:underline}
section{background:var(--paper);border:1px solid var(--line);border-radius:8px;padding:18px 20px;margin:0 0 16px}
.failure{display:flex;gap:26px;flex-wrap:wrap;align-items:flex-start}
.known{flex:1 1 420px;min-width:0}
.pictures{flex:0 1 auto;display:flex;flex-direction:column;gap:18px;max-width:100%}
figure{margin:0;max-width:100%}
figcaption{color:var(--soft);font-size:13px;margin-top:4px;max-width:520px}
.heat{max-width:100%;height:auto;display:block}
.heat .frame{fill:none;stroke:#8b97a6;stroke-width:1}
.heat .group{stroke:#111827;stroke-width:1.6}
.heat .tile{stroke:#111827;stroke-width:1;stroke-dasharray:1.5 3;opacity:.75}
.heat .first{fill:none;stroke:#000;stroke-width:2}
.heat .strip.g0{fill:#7f8ea3}.heat .strip.g1{fill:#bcc7d4}.heat .strip.none{fill:#f0e3c4}
.heat text{font:11px system-ui,sans-serif;fill:var(--soft)}
.heat .name{text-anchor:end}.heat .tick{text-anchor:middle}
dl{display:grid;grid-template-columns:108px 1fr;gap:5px 12px;margin:0}
dt{color:var(--soft);font-size:13px;padding-top:1px}
dd{margin:0;font-size:14px;overflow-wrap:anywhere}
dd.smallest-case,dd.found,dd.first-element{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
dd.looks-like{font-weight:650;color:var(--bad)}
.paste{position:relative;margin-top:14px}
.paste span{color:var(--soft);font-size:13px}
.paste button{float:right;font:12px system-ui;border:1px solid var(--line);background:var(--paper);border-radius:4px;
padding:1px 9px;cursor:pointer;color:var(--soft)}
pre{background:#f0f3f6;border-radius:6px;padding:10px 12px;margin:4px 0 0;overflow-x:auto;white-space:pre-wrap;
overflow-wrap:anywhere;
font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.trace{max-height:320px;margin-top:12px}
.legend{display:flex;align-items:center;gap:7px;flex-wrap:wrap;color:var(--soft);font-size:12.5px;margin:0 0 12px}
.legend .bar{width:70px;height:10px;display:inline-block}
.legend .dot{width:10px;height:10px;display:inline-block;margin-left:10px}
.legend .ring{border:2px solid #000}
.legend .line{width:20px;border-top:2px solid #111827;display:inline-block;margin-left:10px}
.legend .dotted{border-top-style:dotted}
.scroll{overflow-x:auto;background:var(--paper);border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:7px 12px;border-bottom:1px solid var(--line);vertical-align:top}
thead th{font-size:12.5px;color:var(--soft);font-weight:600;background:#fafbfc}
tbody tr:last-child>*{border-bottom:0}
tbody th{font-weight:600;white-space:nowrap}
td.rule{color:var(--soft);font-size:13px;min-width:220px}
.number{text-align:right;font-variant-numeric:tabular-nums;color:var(--soft)}
.cell{display:flex;align-items:center;gap:8px;white-space:nowrap}
.badge{font-size:12px;font-weight:600;border-radius:10px;padding:1px 9px;color:#fff;background:var(--soft)}
.badge.passed{background:#e3f3ea;color:var(--good)}.badge.failed,.badge.unexpected-pass{background:var(--bad)}
.badge.declined{background:#fbf0da;color:var(--warn)}.badge.suite-error{background:var(--odd)}
.badge.expected-failure{background:#dfeaf6;color:var(--calm)}
.ratio{width:64px;height:6px;border-radius:3px;background:#e8edf2;display:inline-block;overflow:hidden}
.ratio i{display:block;height:100%;background:#7ba3cc}.ratio .over{background:var(--bad)}
.value{font-size:12.5px;color:var(--soft);font-variant-numeric:tabular-nums}
@media print{body{background:#fff}.paste button{display:none}section{break-inside:avoid}}
"""

SCRIPT = """
for (const button of document.querySelectorAll(".paste button")) {
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.parentElement.querySelector("pre").textContent);
    button.textContent = "copied";
  });
}
"""

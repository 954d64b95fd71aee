"""One HTML page that needs nothing else.

No script, no font, no image from elsewhere: a page can be mailed, archived or opened on a machine without network, and
its content policy says so to the browser. Plots are inline SVG whose colours are CSS variables, so the page follows the
reader's light or dark scheme. Every text from a run (prompts, responses, names) is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tracefp4.report.figures import PALETTE

_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
  font:15px/1.5 system-ui,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 2px}
h2{font-size:18px;margin:36px 0 10px}
.about{color:var(--muted);margin:0 0 18px}
.verdict{font-size:17px;margin:0 0 20px;padding-left:20px}
.verdict li{margin:3px 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(240px,1fr));gap:12px}
.card,.plot,details,.sample{background:var(--panel);border:1px solid var(--grid);border-radius:8px}
.card{padding:12px 16px}
.card b{display:block;font-size:24px;font-weight:650;font-variant-numeric:tabular-nums;white-space:nowrap}
.card span{display:block}
.card small,.meta{color:var(--muted);font-size:13px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:12px;margin-top:12px}
.plot{padding:10px 8px 4px}
.plot svg{width:100%;height:auto;display:block;font-family:inherit}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--grid);vertical-align:top}
th{font-weight:600;color:var(--muted)}
td.n,td:first-child{white-space:nowrap}
td.n,th.n{text-align:right}
.sample{padding:10px 16px;margin:10px 0}
pre{margin:6px 0;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace}
.prompt{color:var(--muted)}
details{padding:10px 16px;margin:10px 0}
summary{cursor:pointer;font-weight:600}
i.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:7px;vertical-align:-1px}
"""

_GROUND = {"page": ("#f5f7fa", "#14181e"), "panel": ("#ffffff", "#1b212a")}


def page(title: str, about: str, sections: Sequence[str]) -> str:
    """A whole page.

    Args:
        title: heading, plain text.
        about: the line under it, plain text.
        sections: HTML of the parts, from the other functions of this module.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_variables()}{_STYLE}</style></head>",
            f'<body><main><h1>{escape(title)}</h1><p class="about">{escape(about)}</p>',
            *sections,
            "</main></body></html>\n",
        ]
    )


def section(title: str, *parts: str) -> str:
    """A headed part; empty when all its parts are empty."""
    body = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>" if body else ""


def verdict(sentences: Sequence[str]) -> str:
    """What the run showed, in sentences."""
    return (
        '<ul class="verdict">' + "".join(f"<li>{escape(text)}</li>" for text in sentences) + "</ul>"
        if sentences
        else ""
    )


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Headline numbers as (what, value, explanation)."""
    cells = [
        f'<div class="card"><span>{escape(what)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for what, value, note in items
    ]
    return f'<div class="cards">{"".join(cells)}</div>' if cells else ""


def plots(figures: Sequence[tuple[str, str]]) -> str:
    """Inline SVG plots as (name for screen readers, SVG)."""
    cells = [f'<div class="plot" role="img" aria-label="{escape(name)}">{svg}</div>' for name, svg in figures]
    return f'<div class="plots">{"".join(cells)}</div>' if cells else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table of plain texts; ``numbers`` are the columns aligned to the right."""
    if not rows:
        return ""
    classes = ['class="n"' if index in numbers else "" for index in range(len(head))]
    top = "".join(f"<th {kind}>{escape(text)}</th>" for text, kind in zip(head, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td {kind}>{escape(cell)}</td>" for cell, kind in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def pairs(values: Mapping[str, Any]) -> str:
    """A mapping as a table of two columns; values that are not text are shown as JSON."""
    rows = [[str(k), v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)] for k, v in values.items()]
    return table(["setting", "value"], rows)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Colour keys as (label, colour name)."""
    keys = [f'<i class="key" style="background:var(--{colour})"></i>{escape(text)}' for text, colour in entries]
    return f"<p>{' &nbsp; '.join(keys)}</p>" if keys else ""


def sample(title: str, prompt: str, response: str) -> str:
    """One generated sample."""
    return (
        f'<div class="sample"><div class="meta">{escape(title)}</div>'
        f'<pre class="prompt">{escape(prompt)}</pre><pre>{escape(response)}</pre></div>'
    )


def folded(title: str, body: str) -> str:
    """A part that opens on a click."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def notes(lines: Sequence[str]) -> str:
    """Remarks about the data."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _variables() -> str:
    colours = PALETTE | _GROUND
    light = ";".join(f"--{name}:{pair[0]}" for name, pair in colours.items())
    dark = ";".join(f"--{name}:{pair[1]}" for name, pair in colours.items())
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"

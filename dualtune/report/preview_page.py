"""The page of `dualtune preview --html`: documents with what is trained in them, and the numbers of the data.

One file without scripts. Whatever the data hold is text here, and the page may load nothing from anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dualtune.data.survey import Bar, ShownDocument, ShownToken, visible

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root { color-scheme: light dark; --text: #1b1b1b; --page: #fff; --dim: #6b6b6b; --line: #ddd; --trained: #c9efd0;
  --bar: #3d8f53; --warning: #fff0c2 }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --page: #161616; --dim: #9a9a9a; --line: #3a3a3a;
  --trained: #1d4a2a; --bar: #58b06f; --warning: #4a3c10 } }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: var(--text); background: var(--page);
  font: 1rem/1.5 system-ui, sans-serif }
h2 { margin-top: 2rem; font-size: 1.1rem }
h2 small { color: var(--dim); font-weight: normal }
.text { padding: .75rem; border: 1px solid var(--line); font: .9rem/1.7 ui-monospace, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere }
.text span { color: var(--dim) }
.text .trained { color: var(--text); background: var(--trained) }
.text:hover span { box-shadow: inset 1px 0 var(--line) }
.text span:hover { outline: 1px solid var(--text) }
.warning { padding: .5rem .75rem; background: var(--warning) }
table { border-collapse: collapse }
th, td { padding: .15rem 1rem .15rem 0; text-align: left; vertical-align: top; font-weight: normal;
  overflow-wrap: anywhere }
th { color: var(--dim); white-space: nowrap }
.bars { width: 100% }
.bars td:last-child { width: 100% }
.bars div { height: .9rem; background: var(--bar) }
</style>
</head>
<body>
"""


def preview_page(
    title: str,
    documents: Sequence[ShownDocument],
    numbers: Sequence[tuple[str, str]],
    histogram: Sequence[Bar],
    warnings: Sequence[str],
) -> str:
    """The whole page. `numbers` are (what, how much), in words."""
    parts = [_HEAD.replace("{title}", _text(title)), f"<h1>{_text(title)}</h1>\n"]
    parts += [f'<p class="warning">{_text(warning)}</p>\n' for warning in warnings]
    parts.append("<h2>Numbers</h2>\n<table>\n")
    parts += [f"<tr><th>{_text(what)}</th><td>{_text(number)}</td></tr>\n" for what, number in numbers]
    parts += ["</table>\n<h2>Tokens of a document</h2>\n", _bars(histogram)]
    parts += [_document(document) for document in documents]
    return "".join([*parts, "</body>\n</html>\n"])


def _document(document: ShownDocument) -> str:
    counts = f"{len(document.tokens)} tokens, {document.num_trained} of them trained"
    tokens = "".join(map(_token, document.tokens))
    return f'<h2>{_text(document.where)} <small>{counts}</small></h2>\n<div class="text">{tokens}</div>\n'


def _token(token: ShownToken) -> str:
    kind = ' class="trained"' if token.trained else ""
    return f'<span title="{token.id}"{kind}>{_text(token.text)}</span>'


def _bars(histogram: Sequence[Bar]) -> str:
    most = max(bar.documents for bar in histogram)
    rows = (
        f"<tr><th>{bar.first} to {bar.last}</th><td>{bar.documents}</td>"
        f'<td><div style="width: {bar.documents / most:.1%}"></div></td></tr>\n'
        for bar in histogram
    )
    return f'<table class="bars">\n{"".join(rows)}</table>\n'


def _text(text: str) -> str:
    return escape(visible(text))

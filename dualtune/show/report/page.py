"""The frame of every page: one file that may not load anything, and runs only the scripts that its policy names.

And the parts that several pages have: notices, tables, bars.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dualtune.base.text import visible

_IN_SCRIPT = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})

ASSETS = Path(__file__).parent


def whole_page(title: str, style: str, body: str, scripts: Sequence[str] = ()) -> str:
    """Return an HTML page that allows this style, these scripts and nothing else. `body` is HTML, `title` is text.

    The scripts are ours, run after the body and know it by its ids. ValueError for one that HTML would read otherwise.
    """
    if any(word in script.lower() for script in scripts for word in ("</script", "<!--", "\r")):
        raise ValueError("a script ends early, begins a comment, or has carriage returns")
    allowed = f"style-src {_hash(style)}; "
    if scripts:
        allowed += f"script-src {' '.join(map(_hash, scripts))}; "
    title = as_text(title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"{allowed}base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        f"{body}</main>\n{''.join(f'<script>{script}</script>' for script in scripts)}</body>\n</html>\n"
    )


@functools.cache
def asset(name: str) -> str:
    """Return a style or script of this folder."""
    return (ASSETS / name).read_text(encoding="utf-8")


def as_text(text: str) -> str:
    """Return text as HTML: escaped, and with invisible characters shown."""
    return escape(visible(text))


def as_data(name: str, value: Any) -> str:
    """Return a value as JSON in an element that scripts find by its id. ValueError for NaN and Infinity.

    Nothing in it can end the element, because no character of HTML is left.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPT)
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def notice(text: str) -> str:
    """Return a box with a text."""
    return f'<p class="notice">{as_text(text)}</p>\n'


def scrolling(label: str, heads: Sequence[str], rows: str, *, kind: str = "", caption: str = "") -> str:
    """Return a table that scrolls sideways where it is too wide. `rows` and `caption` are HTML, `kind` is its class."""
    cells = "".join(f"<th scope=col>{head}</th>" for head in heads)
    marked = f" class={kind}" if kind else ""
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0"><table{marked}>\n'
        f"{f'<caption>{caption}</caption>' if caption else ''}<thead><tr>{cells}</tr></thead>\n"
        f"<tbody>\n{rows}</tbody></table></div>\n"
    )


def histogram(bars: Iterable[tuple[int, int, int]], late: int | None = None, note: str = "") -> str:
    """Return bars, (first and last number of tokens, documents); nothing for no documents. The bar `late` is marked."""
    bars = [*bars]
    most = max((documents for _, _, documents in bars), default=0)
    if not most:
        return ""
    rows = "".join(
        f"<tr{' class=late' * (index == late)}><th scope=row>{_range(first, last)}</th><td>{documents:,}</td>"
        f'<td><svg aria-hidden="true"><rect height="100%" rx="2" width="{100 * documents / most:.1f}%"/></svg>'
        "</td></tr>\n"
        for index, (first, last, documents) in enumerate(bars)
    )
    return (
        f'<table class="bars">\n<caption>Documents by their number of tokens.{note}</caption>\n<thead><tr>'
        "<th scope=col>tokens</th><th scope=col>documents</th><td></td></tr></thead>\n"
        f"<tbody>\n{rows}</tbody></table>\n"
    )


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

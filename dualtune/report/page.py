"""The frame of every page: one file that may not load anything, and runs only the scripts that its policy names."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from dualtune.text.escape import visible

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


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

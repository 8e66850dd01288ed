"""The frame of every page: one file without scripts that may not load anything."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from dualtune.text.escape import visible


def whole_page(title: str, style: str, body: str) -> str:
    """Return an HTML page that allows this style and nothing else. `body` is HTML, `title` is text."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    title = as_text(title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        f"{body}</main>\n</body>\n</html>\n"
    )


def as_text(text: str) -> str:
    """Return text as HTML: escaped, and with invisible characters shown."""
    return escape(visible(text))

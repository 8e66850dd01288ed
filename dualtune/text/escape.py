"""Escape untrusted text, so that a terminal or a page shows it and does not interpret it."""

from __future__ import annotations

import re

# Control characters except tab and newline; bidirectional controls; zero-width characters and line separators; tag
# characters; fillers that look like spaces; lone surrogates, as in file names that are not UTF-8.
_UNSEEN = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
_JOINERS = r"\u200c\u200d"  # used in Persian, Hindi and emoji: allowed if both neighbors are of such a script
_OTHER_SCRIPT = r"[^\x00-\x7f]"
_TO_ESCAPE = re.compile(rf"[{_UNSEEN}]|(?<!{_OTHER_SCRIPT})[{_JOINERS}]|[{_JOINERS}](?!{_OTHER_SCRIPT})")


def visible(text: str) -> str:
    r"""Replace invisible characters and terminal controls by a symbol (␛) or a JSON escape (\u202e)."""
    return _TO_ESCAPE.sub(_code, text)


def one_line(text: str) -> str:
    """Escape like `visible`, and also tabs and newlines: for a name or a table cell."""
    return visible(text).replace("\n", "␊").replace("\t", "␉")


def _code(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"

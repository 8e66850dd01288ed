"""Text from outside, such that a terminal or a page shows what it is and does nothing that it says."""

from __future__ import annotations

import re

# Control characters but for tab and line break; what turns the direction of writing; what has no width or ends a line;
# characters of tags; fillers that look like spaces; halves of surrogate pairs, as in names of files that are not UTF-8.
_UNSEEN = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
_JOINERS = r"\u200c\u200d"  # of Persian, Hindi and emoji, where both neighbours are of such a script
_OTHER_SCRIPT = r"[^\x00-\x7f]"
_TO_ESCAPE = re.compile(rf"[{_UNSEEN}]|(?<!{_OTHER_SCRIPT})[{_JOINERS}]|[{_JOINERS}](?!{_OTHER_SCRIPT})")


def visible(text: str) -> str:
    r"""The text with what cannot be seen or could steer a terminal as a picture (␛) or as JSON writes it (\u202e)."""
    return _TO_ESCAPE.sub(_code, text)


def one_line(text: str) -> str:
    """The same, and its tabs and line breaks too: a name or a cell of a table."""
    return visible(text).replace("\n", "␊").replace("\t", "␉")


def _code(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"

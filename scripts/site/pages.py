"""Markdown pages as GitHub reads them: their code blocks, their links, the anchors of their headings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"( *)```(\w*)")
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\]\([^)]*\))*\]\()([^)\s]+)(\))")
_CODE = re.compile(r"(`+)(?:.(?!\1))*.\1")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block of a page."""

    page: Path
    line: int  # of its first line of code, counted from 1
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page. One that is not closed ends with the page."""
    lines, start = page.read_text(encoding="utf-8").splitlines(), None
    for number, line in enumerate(lines, 1):
        if not (fence := _FENCE.match(line)):
            continue
        if start is None:
            start, language, indent = number, fence[2], len(fence[1])
        else:
            yield Block(page, start + 1, language, "".join(f"{each[indent:]}\n" for each in lines[start : number - 1]))
            start = None
    if start is not None:
        raise ValueError(f"{page}:{start}: a code block is not closed")


def prose(text: str, change: Callable[[str], str]) -> str:
    """Return a page with `change` applied to each line outside its code blocks."""
    in_code, lines = False, []
    for line in text.splitlines():
        is_fence = bool(_FENCE.match(line))
        lines.append(line if in_code or is_fence else change(line))
        in_code ^= is_fence
    return "\n".join(lines) + "\n"


def links(text: str) -> list[str]:
    """The targets of the links and pictures of a page, outside code."""
    found: list[str] = []
    prose(text, lambda line: with_links(line, lambda target: found.append(target) or target))
    return found


def with_links(line: str, change: Callable[[str], str]) -> str:
    """Return a line with `change` applied to the target of each of its links, except in code."""
    code = [(match.start(), match.end()) for match in _CODE.finditer(line)]

    def changed(match: re.Match[str]) -> str:
        if any(start < match.start() < end for start, end in code):
            return match[0]
        return with_links(match[1], change) + change(match[2]) + match[3]

    line = _LINK.sub(changed, line)
    return re.sub(r'((?:src|srcset|href)=")([^"]+)(")', lambda match: match[1] + change(match[2]) + match[3], line)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found: list[str] = []

    def collect(line: str) -> str:
        if heading := re.match(r"#{1,6} +(.*?)[ #]*$", line):
            slug = re.sub(r"[^\w\- ]", "", _shown(heading[1]).lower()).replace(" ", "-")
            found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
        return line

    prose(text, collect)
    return set(found)


def _shown(heading: str) -> str:
    """A heading without the marks of code and links."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip()

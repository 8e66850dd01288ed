"""The answers of a report: held-out prompts with what the base and the adapter said, from predictions.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dualtune.errors import FormatError
from dualtune.io.fields import number
from dualtune.report.json_lines import read_lines
from dualtune.report.page import as_text as _text
from dualtune.train.state.run_dir import PREDICTIONS

MAX_BYTES = 1 << 28  # of the file
MAX_LINE = 1 << 22  # bytes
MAX_TEXT = 2000  # characters of a text that is shown
MAX_SHOWN = 100  # rows of each kind: right, wrong, not judged


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A row of predictions.jsonl."""

    prompt: str
    expected: str
    base: str | None
    adapter: str
    right: bool | None
    loss: float | None

    @property
    def kind(self) -> str:
        """The name that the filter has for it."""
        return "unjudged" if self.right is None else "right" if self.right else "wrong"

    @property
    def sort_key(self) -> float:
        """What the rows are sorted by: the loss, and what has none comes last."""
        return -math.inf if self.loss is None else self.loss


def answers(run_dir: Path) -> str:
    """Return the section, with a notice on what is damaged; empty if the run has no predictions."""
    path = run_dir / PREDICTIONS
    if not path.exists():
        return ""
    found, notice = read_lines(path, prediction, max_bytes=MAX_BYTES, max_line=MAX_LINE)
    if not found:
        return f"<h2>Answers</h2>\n{notice}" if notice else ""
    rows = sorted(found, key=lambda row: row.sort_key, reverse=True)
    kinds = {kind: [row for row in rows if row.kind == kind] for kind in ("wrong", "right", "unjudged")}
    shown = sorted(
        (row for found in kinds.values() for row in found[:MAX_SHOWN]), key=lambda row: row.sort_key, reverse=True
    )
    choices = [("all", len(rows), len(shown))]
    choices += [(kind, len(found), min(MAX_SHOWN, len(found))) for kind, found in kinds.items() if found]
    labels = "".join(
        f'<label><input type="radio" name="answers" value="{kind}"{" checked" * (kind == "all")}> '
        f"{kind} ({f'{few:,} of ' if few < number else ''}{number:,})</label>\n"
        for kind, number, few in choices
    )
    return (
        f"<h2>Answers</h2>\n{notice}<fieldset>\n"
        f"<legend>Show these rows, the highest loss first</legend>\n{labels}</fieldset>\n"
        f'<div id="answers">\n{"".join(map(_row, shown))}</div>\n'
    )


def prediction(line: bytes, where: str) -> KeptAnswer:
    """Return a row of predictions.jsonl. FormatError for what is none."""
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise FormatError(f"{where}: got no JSON object on one line of at most {MAX_LINE} bytes") from None
    row = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    prompt, expected, base, adapter = (row.get(key) for key in ("prompt", "expected", "base", "adapter"))
    right = row.get("right")
    texts = isinstance(prompt, str) and isinstance(expected, str) and isinstance(adapter, str)
    if not texts or not isinstance(base, str | None) or right not in (True, False, None):
        raise FormatError(f"{where}: must have the texts prompt, expected and adapter, base or null, right or null")
    return KeptAnswer(
        _cut(str(prompt)), _cut(str(expected)), None if base is None else _cut(base), _cut(str(adapter)),
        None if right is None else bool(right), number(row.get("loss")),
    )  # fmt: skip


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _row(row: KeptAnswer) -> str:
    columns: Sequence[tuple[str, str | None]] = (
        ("base", row.base),
        ("adapter", row.adapter),
        ("expected", row.expected),
    )
    cells = "".join(
        f'<div class="{name}"><h4>{name}</h4><p dir="auto">{"–" if text is None else _text(text)}</p></div>\n'
        for name, text in columns
    )
    loss = "" if row.loss is None else f"<span>loss {row.loss:.4g}</span>"
    word = "" if row.right is None else f"<span class={row.kind}>{row.kind}</span>"
    return (
        f'<article class="answer" data-kind="{row.kind}"><p class="prompt" dir="auto">{_text(row.prompt)}</p>\n'
        f'<p class="facts">{word}{loss}</p>\n<div class="columns">\n{cells}</div></article>\n'
    )

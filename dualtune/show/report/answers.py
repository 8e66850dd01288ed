"""The answers of a report: held-out prompts with what the base and the adapter said, from predictions.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from dualtune.base.errors import FormatError
from dualtune.base.fields import number
from dualtune.base.untrusted import open_file, parse_object
from dualtune.show.report.page import as_text, notice, scrolling
from dualtune.show.report.page import as_text as _text
from dualtune.train.hooks import SampleRecord
from dualtune.train.state.run_dir import PREDICTIONS, SAMPLES

# ----------------------------------------------------------------------------------------------------------------------
# A JSON Lines file of a run, as a page shows it: a damaged row, or a damaged file, costs itself and is reported.

T = TypeVar("T")


def read_lines(path: Path, parse: Callable[[bytes, str], T], *, max_bytes: int, max_line: int) -> tuple[list[T], str]:
    """Return the rows, and a notice as HTML on what is left out, empty if nothing is.

    `parse(line, where)` raises FormatError for a line that is not a row. Longer lines than `max_line`
    bytes count as several.
    """
    rows: list[T] = []
    problem, num_problems = "", 0
    number = 0
    try:
        with open_file(path, max_bytes=max_bytes, is_own=True) as file:
            while line := file.readline(max_line):
                number += 1
                try:
                    rows += [parse(line, f"{path.name}:{number}")] if line.strip() else []
                except FormatError as error:
                    problem, num_problems = problem or str(error), num_problems + 1
    except FormatError as error:
        return rows, notice(str(error))
    except OSError as error:
        return rows, notice(f"{path}: cannot be read: {error.strerror or error}")
    return rows, notice(f"{problem}. Rows left out: {num_problems:,}") if problem else ""


# ----------------------------------------------------------------------------------------------------------------------
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
    predictions, notice = read_lines(path, prediction, max_bytes=MAX_BYTES, max_line=MAX_LINE)
    if not predictions:
        return f"<h2>Answers</h2>\n{notice}" if notice else ""
    rows = sorted(predictions, key=lambda row: row.sort_key, reverse=True)
    kinds = {kind: [row for row in rows if row.kind == kind] for kind in ("wrong", "right", "unjudged")}
    shown = sorted(
        (row for group in kinds.values() for row in group[:MAX_SHOWN]),
        key=lambda row: row.sort_key,
        reverse=True,
    )
    choices = [("all", len(rows), len(shown))]
    choices += [(kind, len(group), min(MAX_SHOWN, len(group))) for kind, group in kinds.items() if group]
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
    """Return a row of predictions.jsonl. FormatError if the line is not one."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise FormatError(f"{where}: got no JSON object on one line of at most {MAX_LINE} bytes") from None
    row = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
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


# ----------------------------------------------------------------------------------------------------------------------
# The samples of a report: how the answers to run.sample_prompts changed over the evaluations, from samples.jsonl.

MAX_SAMPLE_BYTES = 1 << 26  # of the file
MAX_SAMPLE_LINE = 1 << 20  # bytes
MAX_SAMPLES = 200  # answers to a prompt; the last ones
MAX_PROMPTS = 16  # shown; the last ones: a config has at most 8, and a resumed run may have others


def samples(run_dir: Path) -> str:
    """Return the section, with a notice on what is damaged; empty if the run has no samples."""
    path = run_dir / SAMPLES
    if not path.exists():
        return ""
    records, notice = read_lines(path, sample, max_bytes=MAX_SAMPLE_BYTES, max_line=MAX_SAMPLE_LINE)
    by_prompt: dict[str, list[SampleRecord]] = {}
    for record in records:
        by_prompt.setdefault(record.prompt, []).append(record)
    if not by_prompt and not notice:
        return ""
    shown = [*by_prompt.values()][-MAX_PROMPTS:]
    some = f"<p class=hint>The last {MAX_PROMPTS} of {len(by_prompt):,} prompts.</p>\n"
    return f"<h2>Samples</h2>\n{notice}{some * (len(shown) < len(by_prompt))}{''.join(map(_answers, shown))}"


def sample(line: bytes, where: str) -> SampleRecord:
    """Return a row of samples.jsonl, its texts cut to MAX_TEXT characters. FormatError if the line is not one."""
    row = parse_object(line, where)
    step, prompt, answer = (row.get(key) for key in ("step", "prompt", "answer"))
    if type(step) is not int or not isinstance(prompt, str) or not isinstance(answer, str):
        raise FormatError(f"{where}: must have an integer step and the texts prompt and answer")
    return SampleRecord(step, prompt[:MAX_TEXT], answer[:MAX_TEXT])


def _answers(records: list[SampleRecord]) -> str:
    rows = "".join(
        f"<tr><td>{record.step:,}</td><td>{as_text(record.answer)}</td></tr>\n" for record in records[-MAX_SAMPLES:]
    )
    table = scrolling("Samples", ("step", "answer"), rows)
    return f'<details class=events open><summary dir="auto">{as_text(records[0].prompt)}</summary>\n{table}</details>\n'

"""The answers and samples of a report: what the base and the adapter said to held-out and to chosen prompts.

Both are JSON Lines files of the run. A damaged row, or a damaged file, costs itself and is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dualtune.base.errors import FormatError
from dualtune.base.fields import number
from dualtune.base.untrusted import open_file, parse_object
from dualtune.show.report.page import cut
from dualtune.train.hooks import SampleRecord
from dualtune.train.state.run_dir import PREDICTIONS, SAMPLES

T = TypeVar("T")
MAX_BYTES, MAX_LINE = 1 << 28, 1 << 22  # of predictions.jsonl, and of a line of it
MAX_SAMPLE_BYTES, MAX_SAMPLE_LINE = 1 << 26, 1 << 20  # of samples.jsonl
MAX_TEXT = 2000  # characters of a text that is shown
MAX_SHOWN = 100  # rows of each kind: right, wrong, not judged
MAX_SAMPLES = 200  # answers to a prompt; the last ones
MAX_PROMPTS = 16  # shown; the last ones: a config has at most 8, and a resumed run may have others


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

    def sort_key(self) -> float:
        """What the rows are sorted by: the loss, and what has none comes last."""
        return -math.inf if self.loss is None else self.loss


def answers(run_dir: Path) -> dict[str, Any] | None:
    """Return the answers to show, the highest loss first, and what is damaged; None if the run has no predictions."""
    path = run_dir / PREDICTIONS
    if not path.exists():
        return None
    predictions, problem = read_lines(path, prediction, max_bytes=MAX_BYTES, max_line=MAX_LINE)
    kinds = {
        kind: sorted((row for row in predictions if row.kind == kind), key=KeptAnswer.sort_key, reverse=True)
        for kind in ("wrong", "right", "unjudged")
    }
    shown = sorted(
        (row for group in kinds.values() for row in group[:MAX_SHOWN]), key=KeptAnswer.sort_key, reverse=True
    )
    counts = [("all", len(predictions), len(shown))]
    counts += [(kind, len(group), min(MAX_SHOWN, len(group))) for kind, group in kinds.items() if group]
    choices = [(kind, f"{kind} ({f'{few:,} of ' if few < total else ''}{total:,})") for kind, total, few in counts]
    return {"shown": shown, "choices": choices, "problem": problem}


def prediction(line: bytes, where: str) -> KeptAnswer:
    """Return a row of predictions.jsonl, its texts cut. FormatError if the line is not one."""
    row = parse_object(line, where, strict=False)
    prompt, expected, base, adapter = (row.get(key) for key in ("prompt", "expected", "base", "adapter"))
    right = row.get("right")
    texts = isinstance(prompt, str) and isinstance(expected, str) and isinstance(adapter, str)
    if not texts or not isinstance(base, str | None) or right not in (True, False, None):
        raise FormatError(f"{where}: must have the texts prompt, expected and adapter, base or null, right or null")
    return KeptAnswer(
        cut(prompt, MAX_TEXT), cut(expected, MAX_TEXT), None if base is None else cut(base, MAX_TEXT),
        cut(adapter, MAX_TEXT), None if right is None else bool(right), number(row.get("loss")),
    )  # fmt: skip


def samples(run_dir: Path) -> dict[str, Any] | None:
    """Return the samples to show, by prompt, and what is damaged; None if the run has no samples."""
    path = run_dir / SAMPLES
    if not path.exists():
        return None
    records, problem = read_lines(path, sample, max_bytes=MAX_SAMPLE_BYTES, max_line=MAX_SAMPLE_LINE)
    by_prompt: dict[str, list[SampleRecord]] = {}
    for record in records:
        by_prompt.setdefault(record.prompt, []).append(record)
    if not by_prompt and not problem:
        return None
    shown = [group[-MAX_SAMPLES:] for group in by_prompt.values()][-MAX_PROMPTS:]
    return {"shown": shown, "num_prompts": len(by_prompt), "problem": problem}


def sample(line: bytes, where: str) -> SampleRecord:
    """Return a row of samples.jsonl, its texts cut to MAX_TEXT characters. FormatError if the line is not one."""
    row = parse_object(line, where)
    step, prompt, answer = (row.get(key) for key in ("step", "prompt", "answer"))
    if type(step) is not int or not isinstance(prompt, str) or not isinstance(answer, str):
        raise FormatError(f"{where}: must have an integer step and the texts prompt and answer")
    return SampleRecord(step, prompt[:MAX_TEXT], answer[:MAX_TEXT])


def read_lines(path: Path, parse: Callable[[bytes, str], T], *, max_bytes: int, max_line: int) -> tuple[list[T], str]:
    """Return the rows, and what is left out, empty if nothing is.

    `parse(line, where)` raises FormatError for a line that is not a row. Longer lines than `max_line`
    bytes count as several.
    """
    rows: list[T] = []
    problem, num_problems, line_number = "", 0, 0
    try:
        with open_file(path, max_bytes=max_bytes, is_own=True) as file:
            while line := file.readline(max_line):
                line_number += 1
                try:
                    rows += [parse(line, f"{path.name}:{line_number}")] if line.strip() else []
                except FormatError as error:
                    problem, num_problems = problem or str(error), num_problems + 1
    except FormatError as error:
        return rows, str(error)
    except OSError as error:
        return rows, f"{path}: cannot be read: {error.strerror or error}"
    return rows, f"{problem}. Rows left out: {num_problems:,}" if problem else ""

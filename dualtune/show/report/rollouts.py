"""The samples of a run that learned from them, for its report: the first, the last, the best and the worst.

`rollouts.jsonl` grows with every step, so it is read once, and only what is shown is kept.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dualtune.base.errors import FormatError
from dualtune.base.fields import number
from dualtune.base.untrusted import parse_object
from dualtune.show.report.answers import read_lines
from dualtune.show.report.page import cut
from dualtune.train.state.run_dir import ROLLOUTS

MAX_BYTES, MAX_LINE = 1 << 30, 1 << 20  # of the file, and of a line of it
MAX_TEXT = 1000  # characters of a prompt or a completion that are shown
MAX_SHOWN = 16  # of the first, the last, the best and the worst ones each
MAX_REWARDS = 8  # named beside their sum


@dataclass(frozen=True, slots=True)
class DrawnSample:
    """A row of rollouts.jsonl."""

    step: int
    prompt: str
    completion: str
    reward: float | None  # the sum; None: one of them failed
    rewards: list[tuple[str, float | None]]
    advantage: float
    tokens: int
    is_whole: bool


class ShownSamples:
    """The samples that are shown, of all that pass."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[DrawnSample] = []
        self.last: list[DrawnSample] = []
        self._best: list[tuple[float, int, DrawnSample]] = []  # heaps: the least of them first
        self._worst: list[tuple[float, int, DrawnSample]] = []

    def note(self, sample: DrawnSample) -> None:
        self.count += 1
        if len(self.first) < MAX_SHOWN:
            self.first.append(sample)
        self.last = [*self.last[1 - MAX_SHOWN :], sample]
        if sample.reward is not None:
            _push(self._best, (sample.reward, self.count, sample))
            _push(self._worst, (-sample.reward, self.count, sample))

    def kinds(self) -> list[tuple[str, list[DrawnSample]]]:
        """Return (what they are, the samples); of equal rewards the latest."""
        best, worst = ([each[-1] for each in sorted(heap, reverse=True)] for heap in (self._best, self._worst))
        return [("first", self.first), ("last", self.last), ("best", best), ("worst", worst)]


def _push(heap: list[tuple[float, int, DrawnSample]], entry: tuple[float, int, DrawnSample]) -> None:
    (heapq.heappush if len(heap) < MAX_SHOWN else heapq.heappushpop)(heap, entry)


def rollouts(run_dir: Path) -> dict[str, Any] | None:
    """Return the samples to show, and what is damaged; None if the run has drawn none."""
    path = run_dir / ROLLOUTS
    if not path.exists():
        return None
    chosen = ShownSamples()
    _, problem = read_lines(
        path, lambda line, where: chosen.note(sample(line, where)), max_bytes=MAX_BYTES, max_line=MAX_LINE
    )
    return {"kinds": chosen.kinds(), "count": chosen.count, "problem": problem} if chosen.count or problem else None


def sample(line: bytes, where: str) -> DrawnSample:
    """Return a row of rollouts.jsonl, its texts cut. FormatError if the line is not one."""
    row = parse_object(line, where)
    prompt, completion, rewards = (row.get(key) for key in ("prompt", "completion", "rewards"))
    step, tokens, advantage = row.get("step"), row.get("tokens"), number(row.get("advantage"))
    texts = isinstance(prompt, str) and isinstance(completion, str)
    if not texts or type(step) is not int or type(tokens) is not int or advantage is None or type(rewards) is not dict:
        raise FormatError(
            f"{where}: must have integers step and tokens, the texts prompt and completion, rewards and an advantage"
        )
    listed = list(cast("dict[str, object]", rewards).items())[:MAX_REWARDS]
    return DrawnSample(
        step, cut(prompt, MAX_TEXT), cut(completion, MAX_TEXT), number(row.get("reward")),
        [(cut(name, 60), number(value)) for name, value in listed], advantage, tokens, row.get("is_whole") is True,
    )  # fmt: skip

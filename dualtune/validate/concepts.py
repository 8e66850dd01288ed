"""The data that the tiers train on: made up, the same everywhere, and of a known difficulty.

A row asks for concept number i. The answer's wording is always the same, and the loss on it falls towards zero; its
keywords are drawn at random, so nothing can predict them, and what remains of the loss is the ln 16 of a fair draw from
sixteen. The loss therefore falls far, and then stays where it is, rather than ever nearer to zero, where a share of it
would be noise.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from dualtune.errors import DiskError
from dualtune.io.disk import write_file

FILE = "explain_concepts.jsonl"
NUM_ROWS = 1000  # no tier sees a row twice: the longest takes 1000 steps of one row
NUM_KEYWORDS = 6
KEYWORDS = (
    "time", "water", "light", "sound", "stone", "paper", "house", "river", "music", "color", "metal", "glass", "heart",
    "money", "world", "night",
)  # fmt: skip


def rows(count: int = NUM_ROWS, seed: int = 0) -> list[dict[str, str]]:
    """Alpaca rows, a function of the arguments alone."""
    return [_row(number, random.Random(f"{seed} {number}")) for number in range(1, count + 1)]


def write_rows(path: Path) -> Path:
    """Write the rows as JSON lines. DiskError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"{path.parent}: cannot be created: {error.strerror}") from error
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows()))
    return path


def _row(number: int, draw: random.Random) -> dict[str, str]:
    keywords = ", ".join(draw.choice(KEYWORDS) for _ in range(NUM_KEYWORDS))
    return {
        "instruction": f"Explain concept number {number}.",
        "input": "",
        "output": f"Concept number {number} is explained by these keywords: {keywords}.",
    }

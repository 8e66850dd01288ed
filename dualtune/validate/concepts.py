"""The data of the tiers: synthetic, the same on every machine, and of known difficulty.

A row asks for concept number i. The wording of the answer is always the same, so its loss falls towards zero. The
keywords are drawn at random, so nothing can predict them, and their loss stays at ln 16, for a uniform draw from
sixteen. So the loss falls far and then stays constant, instead of approaching zero, where a relative change would be
noise.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from dualtune.errors import DiskError
from dualtune.io.disk import write_file

FILE = "explain_concepts.jsonl"
NUM_ROWS = 1000  # no tier uses a row twice: the longest takes 1000 steps of one row
NUM_KEYWORDS = 6
KEYWORDS = (
    "time", "water", "light", "sound", "stone", "paper", "house", "river", "music", "color", "metal", "glass", "heart",
    "money", "world", "night",
)  # fmt: skip


def rows(count: int = NUM_ROWS, seed: int = 0) -> list[dict[str, str]]:
    """Return Alpaca rows, which depend only on the arguments."""
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

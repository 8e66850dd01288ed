"""Predictions: one row of JSON for each held-out row, for people and for the pages that show answers.

    {"prompt": text, "expected": text, "base": text or null, "adapter": text or null,
     "right": bool or null, "loss": mean over the row's target tokens, weighted as in training, or null}

`right` and `loss` are the adapter's; without an adapter they are the base's. A text is null if it was not generated,
`right` if no metric says true or false, `loss` if the row has no target within data.max_length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from dualtune.io.disk import write_file


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """A line of the file."""

    prompt: str
    expected: str
    base: str | None
    adapter: str | None
    right: bool | None
    loss: float | None


def write_predictions(path: Path, rows: Iterable[PredictedRow]) -> None:
    """Create or replace the file. DiskError if that fails; then the old one is still there."""
    write_file(path, "".join(json.dumps(asdict(row), allow_nan=False) + "\n" for row in rows))


def mean_loss(loss_sum: float, weight: float) -> float | None:
    """Return the mean, or None for a row without a target and for a loss that is not finite."""
    mean = loss_sum / weight if weight > 0 else math.nan
    return mean if math.isfinite(mean) else None

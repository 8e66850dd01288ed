"""stories260k that learns GSM8K with LoRA of rank 8: what two benchmarks of training methods start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HELD_OUT = 100  # rows of GSM8K


def base_config(folder: Path, shared: Path) -> dict[str, Any]:
    """Write the rows for training and evaluation into a folder, and return the config of the model and these data."""
    with (shared / "data/gsm8k/train.jsonl").open(encoding="utf-8") as file:
        rows = list(file)
    for name, part in (("train", rows[:-HELD_OUT]), ("held-out", rows[-HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    return {
        "model": {"name": str(shared / "models/stories260k")},
        "adapter": {"rank": 8, "alpha": 16.0, "dropout": 0.0},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "held-out.jsonl"), "max_length": 256,
                 "columns": {"prompt": "question", "completion": "answer"}},
    }  # fmt: skip

"""What a run has told so far, from its files: its rows as its hooks got them, and its newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualtune.hooks import EvalRecord, Event, Hook, StepRecord
from dualtune.io.fields import number
from dualtune.train.state import checkpoint
from dualtune.train.state.run_dir import CHECKPOINTS

MAX_TEXT = 10_000  # characters of a message
_NUMBERS = ("epoch", "lr", "grad_norm", "num_targets", "num_tokens", "step_s", "tokens_per_s", "peak_bytes")


def tell(hook: Hook, row: Mapping[str, Any]) -> None:
    """Tell a hook a row of metrics.jsonl as the run has told it."""
    if "eval_loss" in row:
        hook.on_eval(EvalRecord(row["step"], row["eval_loss"], row["eval_targets"]))
    elif "loss" in row:
        numbers: dict[str, Any] = {name: number(row.get(name)) or 0 for name in _NUMBERS}
        hook.on_step(StepRecord(step=row["step"], loss=row["loss"], skipped=row.get("skipped") is True, **numbers))
    else:
        hook.on_event(Event(row["step"], str(row["event"])[:100], str(row.get("message", ""))[:MAX_TEXT]))


def newest_checkpoint(run_dir: Path, last: int | None = None) -> tuple[int, float] | None:
    """Return the step of the newest checkpoint, of those up to step `last`, and when it was saved; None without one."""
    saved = (step for step in checkpoint.steps(run_dir / CHECKPOINTS) if last is None or step <= last)
    if (step := next(saved, None)) is None:
        return None
    return step, checkpoint.path_of(run_dir / CHECKPOINTS, step).stat().st_mtime

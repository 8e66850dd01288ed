"""metrics.jsonl: one row a step, one row an evaluation. Other programs read it; its names are a public interface."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualtune.backend import Backend, StepOutput
from dualtune.errors import NonFiniteError
from dualtune.hooks import EvalRecord, Hook, StepRecord


class Metrics:
    """Turns device results into records, writes them, and shows them to the hooks.

    A step's numbers are read from the device when the next step has been queued, so that reading never makes the
    device wait. `flush` reads the last ones.
    """

    def __init__(self, path: Path, backend: Backend, hooks: Sequence[Hook], first_step: int = 0) -> None:
        _keep_rows(path, first_step)
        self._file = path.open("a", encoding="utf-8")
        self._backend = backend
        self._hooks = hooks
        self._pending: tuple[StepOutput, dict[str, Any]] | None = None
        self._clock = time.perf_counter()

    def step(self, output: StepOutput, **known: Any) -> None:
        """Queue a step's results. `known` are the fields of StepRecord that need no device."""
        self._emit_pending()
        now = time.perf_counter()
        known["step_s"], self._clock = now - self._clock, now
        self._pending = output, known

    def eval(self, record: EvalRecord) -> None:
        self._write(asdict(record))
        for hook in self._hooks:
            hook.on_eval(record)

    def flush(self) -> None:
        self._emit_pending()

    def restart_clock(self) -> None:
        """Call after work between two steps that is not part of a step (evaluation, saving)."""
        self._clock = time.perf_counter()

    def close(self) -> None:
        self._file.close()

    def _emit_pending(self) -> None:
        if self._pending is None:
            return
        (output, known), self._pending = self._pending, None
        record = StepRecord(
            loss=float(output.loss),
            grad_norm=float(output.grad_norm),
            tokens_per_s=known["num_tokens"] / known["step_s"],
            peak_bytes=self._backend.memory().peak_bytes,
            **known,
        )
        self._write(asdict(record))
        for hook in self._hooks:
            hook.on_step(record)
        if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
            raise NonFiniteError(
                f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}. No adapter was written. "
                "Lower train.learning_rate, set train.max_grad_norm, or use model.dtype: float32"
            )

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def _keep_rows(path: Path, first_step: int) -> None:
    """Drop rows of steps that a resumed run will take again."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= first_step), encoding="utf-8")

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
        self.final_loss = math.nan
        self.eval_loss_before: float | None = None
        self.eval_loss: float | None = None
        self._eval_step = -1
        for row in _keep_rows(path, first_step):
            self._note(row)
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
        _check_finite(f"evaluation after step {record.step}", loss=record.eval_loss)

    def has_eval(self, step: int) -> bool:
        """Whether the newest evaluation was made after this many steps."""
        return self._eval_step == step

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
        _check_finite(f"step {record.step}", loss=record.loss, gradient_norm=record.grad_norm)

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._note(row)

    def _note(self, row: dict[str, Any]) -> None:
        if "loss" in row:
            self.final_loss = row["loss"]
        else:
            self._eval_step, self.eval_loss = row["step"], row["eval_loss"]
            self.eval_loss_before = self.eval_loss if row["step"] == 0 else self.eval_loss_before


def _check_finite(where: str, **numbers: float) -> None:
    if not all(map(math.isfinite, numbers.values())):
        shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in numbers.items())
        raise NonFiniteError(
            f"{where}: {shown}. No adapter was written. "
            "Lower train.learning_rate, set train.max_grad_norm, or use model.dtype: float32"
        )


def _keep_rows(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Drop rows of steps that a resumed run will take again, and a last row that was cut when the run was killed."""
    kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= first_step] if first_step else []
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
    return [json.loads(line) for line in kept]


def _whole_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]

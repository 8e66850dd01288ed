"""metrics.jsonl: one row per step, evaluation and event. Other programs read it; its keys are public.

Each row begins with `time`, when it was written (ISO 8601, UTC); rows of older runs lack it.

A number that is not finite is written as NaN or Infinity, as Python and pandas read it, and never filtered.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from dualtune.base.errors import DiskError
from dualtune.base.files import fault_of, new_file, open_own, set_aside
from dualtune.base.redaction import redact
from dualtune.base.untrusted import open_file
from dualtune.engine.backend import Backend, StepOutput
from dualtune.engine.routing import BUSIEST
from dualtune.train.hooks import EvalRecord, Event, StepRecord, Watchers

NUM_LAST = 300  # rows, of a file that is too long to parse
MAX_BYTES = 1 << 30  # of a file that is read; about four million steps
MAX_LINE = 1 << 24  # bytes; a row has some hundreds, one that lists the documents of a step some thousands
# Of a file that is too long to parse: the longest line, and the most evaluations.
MAX_MAIN_LINE, MAX_EVALS = 1 << 14, 1 << 12
_CHUNK = 1 << 20
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT
MAX_WAITING = 1 << 26  # bytes of rows that a full disk has refused: some hundred thousand steps
KINDS = ("loss", "eval_loss", "event")  # every row has one of these keys


def perplexity(loss: float) -> float:
    """Return the exponential of a loss in nats per token; infinite where no float can hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class History:
    """The rows of a run so far."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.step: int | None = None  # of the last step row
        self.losses = array("d")  # of the step rows
        # Of a run that learns from its samples, or watches its routers: the metrics of the step rows, in order.
        self.measured: dict[str, array[float]] = {}
        self.verdict: str | None = None  # the word, if no step has followed
        self.evals: dict[int, EvalRecord] = {}  # by step, in order of time
        for row in rows:
            self.note(row)

    def note(self, row: Mapping[str, Any]) -> None:
        if "eval_loss" in row:
            self.evals[row["step"]] = EvalRecord(row["step"], row["eval_loss"], row["eval_targets"], metrics_in(row))
        elif "loss" in row:
            self.step, self.verdict = row["step"], None
            self.losses.append(row["loss"])
            if "reward" in row or BUSIEST in row:
                append_row(self.measured, metrics_in(row), max(map(len, self.measured.values()), default=0))
        elif row.get("event") == "verdict" and isinstance(word := row.get("verdict"), str):
            self.verdict = word

    @property
    def metrics(self) -> list[Mapping[str, float]]:
        """The metrics of the evaluations in order, if the run compares answers."""
        return [record.metrics for record in self.evals.values() if record.metrics]

    @property
    def loss(self) -> float | None:
        """The loss of the last step."""
        return self.losses[-1] if self.losses else None

    @property
    def final_loss(self) -> float:
        """The loss of the last step; NaN before the first one."""
        return math.nan if self.loss is None else self.loss

    @property
    def eval_loss_before(self) -> float | None:
        """The loss of the evaluation before the first step."""
        return self.evals[0].eval_loss if 0 in self.evals else None

    @property
    def eval_loss(self) -> float | None:
        """The loss of the newest evaluation."""
        return self.evals[max(self.evals)].eval_loss if self.evals else None


# The keys of a row of a step or an evaluation; all others are metrics of its objective.
OWN_KEYS = frozenset({field.name for kind in (StepRecord, EvalRecord) for field in fields(kind)} | {"time"})


def append_row(columns: dict[str, array[float]], values: Mapping[str, float], num_before: int) -> None:
    """Add a row to columns that have `num_before`: NaN where it lacks a value, and where the rows before lacked one."""
    for name in dict.fromkeys((*columns, *values)):
        columns.setdefault(name, array("d", [math.nan] * num_before)).append(values.get(name, math.nan))


def metrics_in(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of the objective in the row of a step or an evaluation; empty for the loss of sft."""
    return {
        name: float(value) for name, value in row.items()
        if name not in OWN_KEYS and type(value) in (float, int) and math.isfinite(value)
    }  # fmt: skip


def row_with_metrics(record: StepRecord | EvalRecord) -> dict[str, Any]:
    """Return a record as a row: the metrics of its objective are keys beside its own, which they do not replace."""
    row = asdict(record)
    row.pop("failures", None)  # they are events
    return {**row.pop("metrics"), **row}


class Metrics:
    """Converts device results to records, writes them, and passes them to the hooks.

    A step's numbers are read from the device after the next step has been queued, so that reading never makes the
    device wait. `flush` reads the last ones. A full disk does not end the run: rows are kept in memory.
    """

    def __init__(self, path: Path, backend: Backend, watchers: Watchers, first_step: int = 0) -> None:
        try:
            self.history = _keep_rows(path, first_step)
            self._file = open_own(path, _FLAGS)
        except OSError as error:
            raise DiskError(f"{path}: cannot be written: {error.strerror}") from error
        self._path = path
        self._waiting = WaitingRows()
        self._is_failing = False
        self._backend = backend
        self._watchers = watchers
        watchers.report = lambda message: self.event(Event(self._step, "hook_failed", message))
        self._step = first_step
        self._pending: tuple[StepOutput, dict[str, Any]] | None = None
        # A CPU has computed the step when it is queued: there is nothing to wait for, and its row is not late.
        self._is_read_at_once = backend.devices()[0].kind == "cpu"
        self._clock = time.perf_counter()

    def step(self, output: StepOutput, num_documents: int, **fields: Any) -> StepRecord | None:
        """Queue a step's results and return the previous step's record. `fields`: those that need no device.

        On a CPU return this step's record, since reading it does not wait.
        """
        record = self.flush()
        now = time.perf_counter()
        step_s, self._clock = now - self._clock, now
        fields |= {
            "step_s": step_s,
            "tokens_per_s": fields["num_tokens"] / step_s,
            "documents_per_min": 60 * num_documents / step_s,
        }
        self._pending = output, fields
        return self.flush() if self._is_read_at_once else record

    def flush(self) -> StepRecord | None:
        """Read, write and return the queued record."""
        if self._pending is None:
            return None
        (output, fields), self._pending = self._pending, None
        loss, grad_norm = float(output.loss), float(output.grad_norm)
        measured = {name: float(value) for name, value in output.metrics.items()}
        fields["metrics"] = {**fields.get("metrics", {}), **measured}
        record = StepRecord(
            loss=loss,
            grad_norm=grad_norm,
            peak_bytes=self._backend.memory().peak_bytes,
            skipped=not (math.isfinite(loss) and math.isfinite(grad_norm)),
            **fields,
        )
        self._step = record.step
        self._write(row_with_metrics(record))
        self._watchers.tell("on_step", record)
        return record

    def discard(self) -> None:
        """Discard the queued record: its step is rolled back."""
        self._pending = None

    def eval(self, record: EvalRecord) -> None:
        self._write(row_with_metrics(record))
        self._watchers.tell("on_eval", record)

    def event(self, event: Event) -> None:
        event = replace(event, message=redact(event.message))
        self._write({"step": event.step, "event": event.event, "message": event.message, **event.details})
        self._watchers.tell("on_event", event)

    def restart_clock(self) -> None:
        """Call after work between two steps that is not part of a step (evaluation, saving)."""
        self._clock = time.perf_counter()

    def sync(self) -> None:
        """Make the rows durable: after a power failure no checkpoint may be newer than its rows."""
        with contextlib.suppress(OSError):
            os.fsync(self._file)

    def copy_to(self, target: Path) -> None:
        """Write all rows to `target`, even if the file itself was deleted. DiskError if that fails."""
        offset = 0
        with new_file(target) as file:
            while data := os.pread(self._file, _CHUNK, offset):
                file.write(data)
                offset += len(data)

    def restore_file(self) -> str | None:
        """Write the file again if it was deleted or replaced, and continue in it. Return notes on that."""
        if (fault := fault_of(self._path, self._file)) is None:
            return None
        try:
            aside = set_aside(self._path)
            self.copy_to(self._path)
            file = open_own(self._path, _FLAGS)
        except OSError as error:
            raise DiskError(f"{fault}, and cannot be written again: {error.strerror}") from error
        os.close(self._file)
        self._file = file
        return f"{fault}; it was written again with all rows{aside}"

    def write_rest(self) -> None:
        """Try a last time to write the rows that a full disk has refused."""
        problem, num_lost = self._waiting.write_to(self._file), self._waiting.num_lost
        if problem is not None or num_lost:
            num_lost += self._waiting.num_rows
            message = f"metrics.jsonl could not be written completely: {num_lost} rows are lost"
            self._watchers.tell("on_event", Event(self._step, "metrics_lost", message))

    def close(self) -> None:
        os.close(self._file)

    def _write(self, row: dict[str, Any]) -> None:
        self.history.note(row)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._waiting.add((json.dumps({"time": now, **row}) + "\n").encode())
        problem = self._waiting.write_to(self._file)
        was_failing, self._is_failing = self._is_failing, problem is not None
        if self._is_failing and not was_failing:
            message = f"metrics.jsonl cannot be written ({problem}). Training continues; the rows are kept in memory"
            self._watchers.tell("on_event", Event(row["step"], "metrics_failed", message))


class WaitingRows:
    """Rows that a full disk has refused: written later, in order. Above MAX_WAITING bytes the oldest are lost."""

    def __init__(self) -> None:
        self.num_lost = 0
        self._data = bytearray()
        self._is_cut = False  # whether the data begin inside a row, of which the file has the first part

    @property
    def num_rows(self) -> int:
        return self._data.count(b"\n")

    def add(self, row: bytes) -> None:
        """Add a row with the newline at its end."""
        self._data += row
        begin = self._data.index(b"\n") + 1 if self._is_cut else 0
        if (excess := len(self._data) - MAX_WAITING) > 0:
            end = self._data.index(b"\n", min(begin + excess + MAX_WAITING // 8, len(self._data) - 1)) + 1
            self.num_lost += self._data.count(b"\n", begin, end)
            del self._data[begin:end]

    def write_to(self, file: int) -> str | None:
        """Write the rows. Return the error, if any."""
        try:
            while self._data:
                num_bytes = os.write(file, self._data)
                self._is_cut = self._data[num_bytes - 1] != ord("\n")
                del self._data[:num_bytes]
        except OSError as error:
            return error.strerror
        return None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, without a row that was truncated when a run was killed."""
    return list(each_row(path))


def each_row(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file one after another, because those of a long run are large together.

    FormatError if it is not a file, or larger than MAX_BYTES.
    """
    for line in _each_line(path):
        if line.endswith(b"\n") and (row := row_of(line.decode("utf-8", errors="replace"))) is not None:
            yield row


def _each_line(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of a run; one that is longer than MAX_LINE in pieces."""
    if not os.path.lexists(path):
        return
    with open_file(path, max_bytes=MAX_BYTES, is_own=True) as file:
        while line := file.readline(MAX_LINE):
            yield line


def main_rows(path: Path) -> list[dict[str, Any]]:
    """Return the first row, the newest evaluations, and the last few hundred rows: the others are not parsed.

    FormatError as for `each_row`.
    """
    first, evals, newest = list[bytes](), deque[bytes](maxlen=MAX_EVALS), deque[bytes]()
    for line in _each_line(path):
        if len(line) > MAX_MAIN_LINE:
            continue
        newest.append(line)
        if len(newest) > NUM_LAST:
            oldest = newest.popleft()
            if not first:
                first.append(oldest)
            elif b'"eval_loss"' in oldest:
                evals.append(oldest)
    early = (*first, *evals)
    rows = (row_of(line.decode("utf-8", errors="replace")) for line in (*early, *newest))
    return [row for row in rows if row is not None]


def row_of(line: str) -> dict[str, Any] | None:
    """Return the row of a line, or None if it is truncated or foreign."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    row = cast(dict[str, Any], value)
    return row if type(row.get("step")) is int and any(key in row for key in KINDS) and _is_sound(row) else None


def time_of(row: Mapping[str, Any]) -> float | None:
    """Return when a row was written, in seconds since 1970; None if it does not say."""
    try:
        return datetime.fromisoformat(row["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None


def _is_sound(row: Mapping[str, Any]) -> bool:
    """Return whether the values that `History` uses are numbers, and integers are no larger than floats can count.

    The file may have been edited.
    """
    if any(type(value) is int and abs(value) >= 1 << 53 for value in row.values()):
        return False
    losses = [row[key] for key in ("loss", "eval_loss") if key in row]
    targets = [row.get("eval_targets")] if "eval_loss" in row else []
    return all(type(x) in (float, int) for x in losses) and all(type(n) is int for n in targets)


def _keep_rows(path: Path, first_step: int) -> History:
    """Drop truncated rows, and the rows of steps that a resumed run will repeat. Return the others' history."""
    history = History()
    if not os.path.lexists(path):
        return history
    with new_file(path) as file:
        for row in each_row(path) if first_step else ():
            if row["step"] <= first_step:
                history.note(row)
                file.write((json.dumps(row) + "\n").encode())
    return history

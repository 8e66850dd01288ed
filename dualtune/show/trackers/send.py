"""Sends the numbers of a run to a tracker, from metrics.jsonl, and remembers how far it is.

    python -m dualtune.show.trackers.send RUN NAME [--new]     while the run trains: until standard input ends

`track-NAME.json` in the run directory has the id of the tracker's run and the last row that was sent. After an error,
and in another process, it goes on there. A row that was sent just before a crash may be sent twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from dualtune.base.errors import ConfigError, DualtuneError, FormatError
from dualtune.base.files import open_own, write_file
from dualtune.base.redaction import redact
from dualtune.base.text import one_line
from dualtune.base.untrusted import read_json
from dualtune.config import load_config
from dualtune.show.trackers.tracker import TRACKERS, TrackedRow, TrackedRun, Tracker, open_tracker
from dualtune.show.view.follow import Followed
from dualtune.train.state.metrics import row_of, time_of
from dualtune.train.state.run_dir import CONFIG, METRICS

EVERY_S = 2.0  # between two looks at the file
AGAIN_S = (1.0, 5.0, 30.0)  # to wait after the first errors in a row; then always the last one
LAST_TRIES = 3  # after the run has ended
NOT_SENT = {"time", "step", "event", "skipped", "message"}
MAX_LOG_BYTES = 4 << 20  # of what a tracker prints in a process
MOST_MARK = 10_000  # bytes of track-NAME.json

Place = tuple[int, int]  # of a row: its step, and 0 for a step or 1 for an evaluation


@dataclass(slots=True)
class TrackerMark:
    """How far a tracker is."""

    path: Path
    id: str
    sent: Place

    def save(self) -> None:
        write_file(self.path, json.dumps({"id": self.id, "sent": self.sent}) + "\n")


def mark_of(run: Path, name: str) -> TrackerMark:
    """Read how far a tracker is. FormatError if the file is damaged."""
    path = run / f"track-{name}.json"
    if not path.exists():
        return TrackerMark(path, uuid.uuid4().hex[:8], (-1, 0))
    table = read_json(path, max_bytes=MOST_MARK)
    id, sent = table.get("id"), _place(table.get("sent"))
    if not (isinstance(id, str) and id.isalnum() and len(id) <= 64) or sent is None:
        raise FormatError(f"{path}: is damaged. Remove it: the tracker then begins a new run with all rows")
    return TrackerMark(path, id, sent)


@contextmanager
def only_sender(run: Path, name: str, *, waits: bool) -> Generator[None]:
    """Keep other processes from sending the same rows. ConfigError if one does, unless this one waits for its end."""
    with os.fdopen(open_own(run / f"track-{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ConfigError(
                f"{run}: another process is sending its rows to {name}. Wait until it has ended"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


class Sender:
    """A run on its way to a tracker."""

    def __init__(self, run: Path, name: str, tell: Callable[[str], None]) -> None:
        self._run, self._name, self._tell = run, name, tell
        self._mark, self._file = mark_of(run, name), Followed(run / METRICS)
        self._waiting: list[tuple[Place, TrackedRow]] = []
        self._tracker: Tracker | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def send(self) -> int:
        """Send the rows that are new, and return their number. Any error leaves the rest for the next call."""
        lines, is_new = self._file.new_lines()
        if is_new:
            self._waiting.clear()
        self._waiting += [(place, row) for place, row in _numbers(lines) if place > self._mark.sent]
        if not self._waiting:
            return 0
        if self._tracker is None:
            self._mark.save()  # the id, before the tracker has it: whatever fails then, its run is found again
            self._tracker = open_tracker(self._name, tracked(self._run, self._mark))
        sent = 0
        try:
            while batch := self._waiting[: TRACKERS[self._name].rows_at_once]:
                self._tracker.log([row for _, row in batch])
                del self._waiting[: len(batch)]
                self._mark.sent, sent = batch[-1][0], sent + len(batch)
        finally:
            if sent:
                self._mark.save()
        return sent

    def close(self) -> None:
        """Let the tracker send what it has kept."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None

    def follow(self, has_ended: threading.Event) -> bool:
        """Send until the run has ended. Return whether all was sent."""
        errors = 0
        while True:
            is_last = has_ended.is_set()
            try:
                self.send()
                errors = 0
                if is_last:
                    self.close()
                    return True
                has_ended.wait(EVERY_S)
            except Exception as error:  # noqa: BLE001  whatever a tracker raises, the run is not to know
                errors += 1
                self._tell(f"{type(error).__name__}: {one_line(str(error))[:300]}")
                if is_last and errors >= LAST_TRIES:
                    return False
                if is_last:
                    time.sleep(AGAIN_S[0])
                else:
                    has_ended.wait(AGAIN_S[min(errors, len(AGAIN_S)) - 1])


def tracked(run: Path, mark: TrackerMark) -> TrackedRun:
    """Return the run that a tracker gets, from a run directory."""
    name, config = run.resolve().name, load_config(run / CONFIG).model_dump(mode="json")
    flat = {f"{section}.{key}": _redacted(value) for section, keys in config.items() for key, value in keys.items()}
    return TrackedRun(run.resolve(), redact(name), mark.id, flat, mark.sent >= (0, 0))


def _redacted(value: Any) -> Any:
    """Return a value of JSON without the secrets in its texts."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_redacted(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


def _numbers(lines: Iterable[str]) -> Iterator[tuple[Place, TrackedRow]]:
    """Yield the rows of steps and evaluations, and their places."""
    for line in lines:
        row = row_of(line)
        if row is None or "event" in row:
            continue
        numbers = {
            name: float(value) for name, value in row.items()
            if name not in NOT_SENT and isinstance(value, int | float) and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max
        }  # fmt: skip
        yield (row["step"], int("eval_loss" in row)), TrackedRow(row["step"], time_of(row) or time.time(), numbers)


def _place(value: Any) -> Place | None:
    match value:
        case [int(step), int(kind)]:
            return step, kind
        case _:
            return None


def main() -> None:
    """Follow a run until standard input ends: the process that trains holds its other end."""
    run, name = Path(sys.argv[1]), sys.argv[2]
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()

    log = os.dup(sys.stderr.fileno())

    def tell(text: str) -> None:
        with suppress(OSError):  # a full disk
            os.write(log, f"{datetime.now():%H:%M:%S} {redact(text)}\n".encode())

    try:
        with bounded_output(log, MAX_LOG_BYTES), only_sender(run, name, waits=True):
            if "--new" in sys.argv[3:]:  # a training from its first step is another run to a tracker
                (run / f"track-{name}.json").unlink(missing_ok=True)
            is_done = Sender(run, name, tell).follow(ended)
        sys.exit(0 if is_done else 1)
    except Exception as error:  # noqa: BLE001  nothing else would say it
        tell(str(error) if isinstance(error, DualtuneError) else f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code if isinstance(error, DualtuneError) else 1)


@contextmanager
def bounded_output(log: int, most: int) -> Generator[None]:
    """Limit what this process and its children print to the log (a descriptor) to `most` bytes.

    A tracker that repeats a warning for ever would fill the disk, on which the run is to save. The rest is read and
    left out, and so is what is printed after the block. A log that is full already begins anew.
    """
    if os.fstat(log).st_size >= most:
        with suppress(OSError):  # not a file
            os.ftruncate(log, 0)
    read, write = os.pipe()
    for output in (1, 2):
        os.dup2(write, output)
    os.close(write)
    pump = threading.Thread(target=_pump, args=(read, log, most), daemon=True)
    pump.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(nowhere, output)
        os.close(nowhere)
        pump.join(1.0)  # a child of the tracker may hold the other end


def _pump(read: int, log: int, most: int) -> None:
    """Write what comes to the log, at most `most` bytes; read the rest too, so that nobody waits."""
    remaining = most
    while data := os.read(read, 1 << 16):
        if remaining >= 0:
            with suppress(OSError):  # a full disk
                os.write(log, data[:remaining])
            remaining -= len(data)
            if remaining < 0:
                with suppress(OSError):
                    os.write(log, f"\nmore than {most} bytes were printed: the rest is left out\n".encode())


if __name__ == "__main__":
    main()

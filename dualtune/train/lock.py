"""The lock of a run directory: one process at a time, and a note about who has it or had it last.

The kernel lets go of a flock when its process dies, however it dies, so a stale lock needs no cleaning. On a file
system without flock (some NFS) the note decides: it is stale when its process is known to be gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from dualtune.errors import DiskError, LockedError

LOCK_FILE = "lock"
_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(slots=True)
class Note:
    """What the lock file says. `state` is running, done, preempted or failed; a killed process leaves running."""

    pid: int
    host: str
    boot: int  # when the machine was started, seconds since 1970: tells a process from one of an earlier boot
    started: str  # for people
    state: str = "running"
    reason: str = ""

    @classmethod
    def of_this_process(cls) -> Note:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(os.getpid(), socket.gethostname(), int(psutil.boot_time()), started)


class Lock:
    """Holds a run directory from `__init__` to `release`. LockedError names the holder; DiskError if read-only."""

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / LOCK_FILE
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise DiskError(f"run.dir: {run_dir} cannot be written: {error.strerror}") from error
        try:
            held = _is_held(self._file, patient=True)
            note = _parse(_content(self._file))
            if held is None:  # no flock here
                held = note is not None and _is_alive(note)
            if held:
                raise LockedError(_refusal(run_dir, note))
            self._note = Note.of_this_process()
            self._write()
        except OSError as error:
            os.close(self._file)
            raise DiskError(f"run.dir: {path} cannot be written: {error.strerror}") from error
        except LockedError:
            os.close(self._file)
            raise

    def release(self, state: str, reason: str = "") -> None:
        self._note.state, self._note.reason = state, reason
        with contextlib.suppress(OSError):  # the run is over, and how it ended is told by the exit code too
            self._write()
        os.close(self._file)

    def _write(self) -> None:
        data = (json.dumps(asdict(self._note), indent=2) + "\n").encode()
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))


def read_note(run_dir: Path) -> tuple[Note | None, bool]:
    """(what the lock says, whether a process holds it now). Takes nothing and changes nothing."""
    try:
        file = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return None, False
    try:
        held, note = _is_held(file, fcntl.LOCK_SH), _parse(_content(file))
        return note, held if held is not None else note is not None and _is_alive(note)
    finally:
        os.close(file)


def _is_held(file: int, kind: int = fcntl.LOCK_EX, *, patient: bool = False) -> bool | None:
    """Whether another process has it; if not, it is ours from now on. None where locks are not supported.

    `patient`: somebody who only looks (`read_note`) has it for a moment, and is no reason to give up.
    """
    for wait in (0.02, 0.1, 0.0) if patient else (0.0,):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return False
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return None
            if error.errno not in _HELD:
                raise
        time.sleep(wait)
    return True


def _is_alive(note: Note) -> bool:
    """Whether the process of a note may still run. Of another machine nothing can be known."""
    if note.state != "running":
        return False
    here = Note.of_this_process()
    if note.host != here.host:
        return True
    same_boot = abs(note.boot - here.boot) <= 2  # the kernel computes it from a clock that can be set
    return same_boot and note.pid != here.pid and psutil.pid_exists(note.pid)


def _refusal(run_dir: Path, note: Note | None) -> str:
    holder = f"process {note.pid} on {note.host}, since {note.started}" if note else "another process"
    return (
        f"run.dir: {run_dir} is in use by {holder}. Wait for it, stop it, or choose another run.dir. "
        f"(If that machine is gone for good, remove {run_dir / LOCK_FILE}.)"
    )


def _content(file: int) -> bytes:
    return os.pread(file, 1 << 16, 0)


def _parse(data: bytes) -> Note | None:
    try:
        table: dict[str, Any] = json.loads(data)
        return Note(**table)
    except (ValueError, TypeError):  # empty, cut, or somebody else's file
        return None

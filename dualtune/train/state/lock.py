"""The lock of a run directory: one process at a time, and a note about its current or last holder.

The kernel releases a flock when its process dies, so a stale lock needs no cleaning. On a file system without flock
(some NFS) a claim file that only one process can create replaces it; it is stale when its process is known to be gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from dualtune.base.errors import DiskError, FormatError, LockedError
from dualtune.base.files import fault_of, hidden_sibling, open_own

LOCK_FILE = "lock"
CLAIM_FILE = "lock.claim"  # used where flock is not supported
_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class LockRecord:
    """The content of the lock file. `state` is running, done, preempted or failed; a killed process leaves running."""

    pid: int
    host: str
    boot: str  # distinguishes processes of different boots; "" if the system has no boot id
    started: str  # for people
    state: str = "running"
    reason: str = ""
    namespace: str = ""  # of the pid, since containers have separate ones; "" if the system has no name for it

    @classmethod
    def of_this_process(cls) -> LockRecord:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(os.getpid(), socket.gethostname(), _boot_id(), now, namespace=_pid_namespace())


class Lock:
    """Holds a run directory from `__init__` to `release`. LockedError names the holder; DiskError if read-only."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._claim = run_dir / LOCK_FILE, run_dir / CLAIM_FILE
        try:
            self._file = self._take()
        except OSError as error:
            advice = "Set run.dir to a directory that can be written"
            raise DiskError(f"run.dir: {run_dir} cannot be written: {error.strerror}. {advice}") from error
        self.before = _note_in(self._file)  # of the holder before this one
        try:
            self._write(LockRecord.of_this_process())
        except OSError as error:
            self._let_go(None)
            raise DiskError(f"run.dir: {self._path} cannot be written: {error.strerror}") from error

    @property
    def holder_was_killed(self) -> bool:
        """Return whether the process before left no word about its end."""
        return self.before is not None and self.before.state == "running"

    def fault(self) -> str | None:
        """Return what happened to the lock file, if another process may hold the directory now; else None."""
        return fault_of(self._path, self._file)

    def release(self, state: str, reason: str = "") -> None:
        """Release the lock, and record how the run ended."""
        self._let_go(replace(LockRecord.of_this_process(), state=state, reason=reason))

    def release_unused(self, state: str, reason: str) -> None:
        """Release the lock of a run that did not begin, and restore the previous note if there was one."""
        self._let_go(self.before or replace(LockRecord.of_this_process(), state=state, reason=reason))

    def remove(self) -> None:
        """Release the lock and remove its file. A process that has just opened it sees that it is gone."""
        try:
            self._path.unlink()
        finally:
            self._let_go(None)

    def _take(self) -> int:
        while True:
            file = open_own(self._path, os.O_RDWR | os.O_CREAT)
            try:
                is_held = _is_held(file, patient=True)
                if is_held is None:
                    self._create_claim(_note_in(file))
                if is_held:
                    raise LockedError(_refusal(self._path, _note_in(file)))
                if _is_at(file, self._path):
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # its holder has removed it

    def _create_claim(self, note: LockRecord | None) -> None:
        if note is not None and _is_alive(note):
            raise LockedError(_refusal(self._path, note))
        own, stale = hidden_sibling(self._claim), hidden_sibling(self._claim)
        own.write_bytes(_to_bytes(LockRecord.of_this_process()))
        try:
            if self._claim.exists():
                _check_dead(self._claim)
                self._claim.rename(stale)  # if two processes see it stale, one renames it…
                try:
                    _check_dead(stale)
                except LockedError:  # …and restores it if it was taken over meanwhile
                    os.link(stale, self._claim)
                    raise
            os.link(own, self._claim)  # atomic
        except (FileExistsError, FileNotFoundError):  # another process was faster
            raise LockedError(_refusal(self._claim, None)) from None
        finally:
            own.unlink()
            stale.unlink(missing_ok=True)

    def _let_go(self, note: LockRecord | None) -> None:
        with contextlib.suppress(OSError):  # the exit code reports the outcome too
            if note is not None:
                self._write(note)
            if _is_at(self._file, self._path):  # the claim next to another lock file belongs to another run
                self._claim.unlink(missing_ok=True)
        os.close(self._file)

    def _write(self, note: LockRecord) -> None:
        data = _to_bytes(note)
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))


def _check_dead(claim: Path) -> None:
    """Raise LockedError if the process that a claim names may still run."""
    file = open_own(claim, os.O_RDONLY)
    try:
        holder = _note_in(file)
    finally:
        os.close(file)
    if holder is not None and _is_alive(holder):
        raise LockedError(_refusal(claim, holder))


def _is_at(file: int, path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def read_note(run_dir: Path) -> tuple[LockRecord | None, bool]:
    """Return the note of the lock, and whether a process holds it now. Read only."""
    try:
        file = open_own(run_dir / LOCK_FILE, os.O_RDONLY)
    except (OSError, FormatError):
        return None, False
    try:
        is_held, note = _is_held(file, fcntl.LOCK_SH), _note_in(file)
        return note, is_held if is_held is not None else note is not None and _is_alive(note)
    finally:
        os.close(file)


def _is_held(file: int, kind: int = fcntl.LOCK_EX, *, patient: bool = False) -> bool | None:
    """Return whether another process holds the lock; if not, take it. None where locks are not supported.

    `patient`: retry, because a reader (`read_note`) holds it only for a moment.
    """
    for wait in (*[0.02] * 20, 0.0) if patient else (0.0,):
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


def _is_alive(note: LockRecord) -> bool:
    """Return whether the process of a note may still run. On another machine this is unknown, so it may."""
    if note.state != "running":
        return False
    if note.host != socket.gethostname():
        return True
    if note.boot != _boot_id():
        return False
    if note.namespace and note.namespace != _pid_namespace():  # the pid means another process here
        return True
    if note.pid == os.getpid():
        return False
    try:
        return psutil.Process(note.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        return ""


def _refusal(path: Path, note: LockRecord | None) -> str:
    holder = f"process {note.pid} on {note.host}, since {note.started}" if note else "another process"
    return (
        f"run.dir: {path.parent} is in use by {holder}. Wait for it, stop it, or choose another run.dir. "
        f"(If that process no longer exists, remove {path}.)"
    )


def _to_bytes(note: LockRecord) -> bytes:
    return (json.dumps(asdict(note), indent=2) + "\n").encode()


def _note_in(file: int) -> LockRecord | None:
    """Return the note in an open file, or None if it is empty, truncated or foreign. Newer keys are ignored."""
    try:
        table: Any = json.loads(os.pread(file, 1 << 16, 0))
        values: dict[str, Any] = {field.name: table[field.name] for field in fields(LockRecord) if field.name in table}
        pid = values.get("pid")
        if type(pid) is not int or not all(isinstance(values[name], str) for name in values if name != "pid"):
            return None
        return LockRecord(**values) if 0 < pid < 1 << 31 else None
    except (ValueError, TypeError, RecursionError):
        return None

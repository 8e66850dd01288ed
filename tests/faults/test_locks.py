"""Two runs in one directory: the kernel's lock, the note in it, and what takes its place where there are no locks."""

import errno
import fcntl
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from dualtune.base.errors import LockedError
from dualtune.train.state import lock as lock_module
from dualtune.train.state.lock import Lock, LockRecord


def wait_for(is_true, seconds=1800):
    """Poll what another process does."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.fault(
    row=35,
    fault="a second run in the same directory, and a stale lock",
    injection="the first process is stopped (SIGSTOP) in step 6, and later killed (SIGKILL)",
    expected="the second exits 9 and names the first's pid; the stale lock is taken over; adapter bitwise equal",
)
def test_one_run_a_directory_and_a_dead_one_does_not_block_it(box):
    straight = box.straight()
    with box.start("enter('dualtune.train.step.learning_rate', 6, send('SIGSTOP'))") as first:
        wait_for(lambda: (box.dir / "checkpoints" / "step-00000004").exists() and is_stopped(first.pid))
        before = sorted(path for path in box.dir.rglob("*"))
        complaint = box.resume(9).stderr
        assert f"run.dir: {box.dir} is in use by process {first.pid} on " in complaint
        assert sorted(path for path in box.dir.rglob("*")) == before
        first.send_signal(signal.SIGKILL)
    assert json.loads((box.dir / "lock").read_text())["state"] == "running"  # what the dead one left
    box.resume()
    assert json.loads((box.dir / "lock").read_text())["state"] == "done"
    assert box.adapter == straight


def is_stopped(pid) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@pytest.fixture
def no_flock(monkeypatch):
    """A file system without locks, as some NFS."""

    def refuse(file, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.fixture
def neighbour():
    """A process that lives as long as the test."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.stdin.close()


def leave_note(directory: Path, **changes) -> LockRecord:
    note = replace(LockRecord.of_this_process(), **changes)
    (directory / "lock").write_text(json.dumps(asdict(note)))
    return note


WITHOUT_FLOCK = "`fcntl.flock` raises ENOLCK; a note of a living process, a dead one, another host, an earlier boot"


@pytest.mark.fault(
    row=35,
    fault="two runs where the file system knows no locks",
    injection=WITHOUT_FLOCK,
    expected="by the note: a living holder and another host are refused, a dead one and an ended one are taken over",
)
@pytest.mark.parametrize("holder", ["alive", "dead", "other host", "earlier boot", "ended"])
def test_without_flock_the_note_decides(tmp_path, no_flock, neighbour, holder):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    changes = {
        "alive": {"pid": neighbour.pid},
        "dead": {"pid": dead.pid},
        "other host": {"pid": dead.pid, "host": "elsewhere"},
        "earlier boot": {"pid": neighbour.pid, "boot": "another"},
        "ended": {"pid": neighbour.pid, "state": "done"},
    }[holder]
    note = leave_note(tmp_path, **changes)
    if holder in ("alive", "other host"):
        with pytest.raises(LockedError, match=f"in use by process {note.pid} on {note.host}"):
            Lock(tmp_path)
        assert json.loads((tmp_path / "lock").read_text()) == asdict(note)
    else:
        Lock(tmp_path).release("done")
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


@pytest.mark.fault(
    row=35,
    fault="two containers of one machine where the file system knows no locks",
    injection="the note of a holder in another PID namespace, where its pid is nobody's here",
    expected="refused; taken over after a restart of the machine",
)
@pytest.mark.parametrize("boot", ["this", "earlier"])
def test_without_flock_a_pid_of_another_namespace_counts_as_alive(tmp_path, no_flock, boot):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    leave_note(tmp_path, pid=dead.pid, namespace="pid:[1]", **({} if boot == "this" else {"boot": "another"}))
    if boot == "this":
        with pytest.raises(LockedError):
            Lock(tmp_path)
    else:
        Lock(tmp_path).release("done")


@pytest.fixture
def overtaken(tmp_path, monkeypatch, neighbour):
    """Let a neighbour take the lock at the moment when this process enters a function of the lock's module."""

    def overtake(where):
        original, here = pkgutil.resolve_name(where), LockRecord.of_this_process()

        def entered(*args):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(where, original)
                patch.setattr(LockRecord, "of_this_process", lambda: replace(here, pid=neighbour.pid))
                Lock(tmp_path)
            return original(*args)

        monkeypatch.setattr(where, entered)

    return overtake


@pytest.mark.fault(
    row=35,
    fault="two runs that begin at once where the file system knows no locks",
    injection="one takes the lock between the other's look at the note and its own claim",
    expected="the other is refused",
)
def test_without_flock_two_that_begin_at_once_do_not_both_win(tmp_path, no_flock, overtaken):
    overtaken("dualtune.train.state.lock._is_alive")
    leave_note(tmp_path, state="done")
    with pytest.raises(LockedError):
        Lock(tmp_path)


@pytest.mark.fault(
    row=35,
    fault="two runs find a stale claim at once where the file system knows no locks",
    injection="one takes the lock between the other's look at the claim and its removal",
    expected="the other is refused",
)
def test_without_flock_a_stale_claim_is_taken_away_once(tmp_path, no_flock, neighbour, overtaken):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    leave_note(tmp_path, pid=dead.pid)
    (tmp_path / "lock").rename(tmp_path / "lock.claim")
    overtaken("pathlib.Path.rename")
    with pytest.raises(LockedError):
        Lock(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "lock.claim"]
    assert json.loads((tmp_path / "lock.claim").read_text())["pid"] == neighbour.pid


@pytest.mark.fault(
    row=35,
    fault="a run begins while another one that failed early takes back the lock file it made",
    injection="the second has opened the lock file when the first removes it",
    expected="the second sees that its file is gone and makes a new one; a third run is refused",
)
def test_a_lock_file_that_was_removed_meanwhile_does_not_count(tmp_path, monkeypatch):
    first = Lock(tmp_path)
    look = lock_module._is_held

    def removed_meanwhile(file, *args, **options):
        monkeypatch.setattr(lock_module, "_is_held", look)
        first.remove()
        return look(file, *args, **options)

    monkeypatch.setattr(lock_module, "_is_held", removed_meanwhile)
    second = Lock(tmp_path)
    with pytest.raises(LockedError):
        Lock(tmp_path)
    second.release("done")


@pytest.mark.fault(
    row=35,
    fault="a killed holder that nobody has waited for, where the file system knows no locks",
    injection="a zombie's pid in the note",
    expected="taken over",
)
def test_without_flock_a_zombie_holds_nothing(tmp_path, no_flock, neighbour):
    neighbour.kill()
    wait_for(lambda: psutil.Process(neighbour.pid).status() == psutil.STATUS_ZOMBIE)
    leave_note(tmp_path, pid=neighbour.pid)
    Lock(tmp_path).release("done")


@pytest.mark.fault(
    row=41,
    fault="the clock is set while a run holds a directory without flock",
    injection="the boot time that the kernel derives from the clock moves by an hour",
    expected="the living holder is still refused",
)
def test_a_clock_that_was_set_does_not_make_a_living_holder_stale(tmp_path, no_flock, neighbour, monkeypatch):
    leave_note(tmp_path, pid=neighbour.pid)
    boot = psutil.boot_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: boot - 3600)
    with pytest.raises(LockedError):
        Lock(tmp_path)

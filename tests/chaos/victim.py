"""A training run that is to be killed: a process of its own that calls the real command line, and dies by SIGKILL.

A fresh interpreter needs seconds for its imports, so the parent has imported everything, computed nothing, and forks;
but macOS wants a fresh one. In the victim a spy notes in a mapped file what is being done; the note outlives it.
"""

from __future__ import annotations

import functools
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

PHASES = ("before the first step", "training", "in a save", "in a prune", "evaluation", "writing the adapter",
          "after the end")  # fmt: skip
START, TRAINING, SAVE, PRUNE, EVALUATION, ADAPTER, END = range(len(PHASES))
PLATFORMS = {"torch": "cpu", "mlx": "mlx"}
PATIENCE = 1800.0  # seconds after which a run counts as hanging; it takes about one, and the machine may be busy
TICK = 0.002
FORKS = sys.platform != "darwin"  # Metal and Objective-C do not survive a fork
_NOTE = struct.Struct("<Bid")  # phase; first step, -1 until training begins; seconds until it began


@dataclass(frozen=True, slots=True)
class Kill:
    """When to kill: after so many seconds, or at a fault point: of dualtune/base/faults.py, or our `unlink`."""

    after: float | None = None
    fault: str | None = None

    @property
    def point(self) -> str:
        return self.fault.partition(":")[0] if self.fault else "time"


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended, and what the spy saw of it."""

    code: int | None  # None: it was killed
    phase: str
    first_step: int | None  # where training began; None if it did not come so far
    setup_seconds: float
    seconds: float
    hung: bool = False


def run(backend: str, config: Path, log: Path, kill: Kill | None = None, trace: Path | None = None) -> End:
    """Run `dualtune train` in a process of its own, and wait until it has ended or has been killed."""
    note = log.with_suffix(".spy")
    note.write_bytes(_NOTE.pack(START, -1, 0.0))
    began = time.monotonic()
    args = [str(config), PLATFORMS[backend], str(log), (kill and kill.fault) or "", str(trace or ""), str(began)]
    if FORKS:
        pid = os.fork()
        if pid == 0:
            _live(*args)
    else:
        pid = os.posix_spawn(sys.executable, [sys.executable, __file__, *args], os.environ)
    limit = kill.after if kill and kill.after is not None else PATIENCE
    status = _wait(pid, began + limit)
    hung = status is None and limit == PATIENCE
    if status is None:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    phase, first_step, setup_seconds = _NOTE.unpack(note.read_bytes())
    note.unlink()
    code = os.waitstatus_to_exitcode(status)
    killed = code == -signal.SIGKILL
    seconds = time.monotonic() - began
    return End(None if killed else code, PHASES[phase], first_step if first_step >= 0 else None, setup_seconds, seconds,
               hung)  # fmt: skip


def modules_of(trace: Path) -> Path:
    """The list of modules that a traced run has imported, a file beside the trace."""
    return trace.with_suffix(".modules")


def _wait(pid: int, deadline: float) -> int | None:
    """The exit status, or None if it still runs at the deadline."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(TICK, left))


def _live(config: str, platform: str, log: str, fault: str, trace: str, began: str) -> None:
    """What the child does. Never returns."""
    code = 70
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        os.environ.pop("DUALTUNE_FAULT", None)
        if fault:
            os.environ["DUALTUNE_FAULT"] = fault
        _make_unlink_a_fault_point()
        with Path(log).with_suffix(".spy").open("r+b") as note:
            _watch(mmap.mmap(note.fileno(), _NOTE.size), float(began))
        if trace:
            _trace(Path(trace))
        sys.argv = ["dualtune", "train", config, "--platform", platform]
        from dualtune.cli.main import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:  # noqa: BLE001  it must not come back to the parent's code
        traceback.print_exc()
    finally:
        if trace:
            modules_of(Path(trace)).write_text("\n".join(sys.modules), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _make_unlink_a_fault_point() -> None:
    """unlink:<n> dies when n files of trees have been removed: the product has no fault point in there."""
    from dualtune.base import faults

    unlink = os.unlink

    def watched(path, *, dir_fd=None):
        unlink(path, dir_fd=dir_fd)
        if dir_fd is not None:
            faults.reach("unlink")

    os.unlink = watched


def _watch(spy: mmap.mmap, began: float) -> None:
    """Note the phase while certain functions of the product run."""
    from dualtune.train import run
    from dualtune.train.state import checkpoint

    def during(owner: ModuleType, name: str, phase: int, then: int | None = None) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args, **kwargs):
            before, spy[0] = spy[0], phase
            result = function(*args, **kwargs)
            spy[0] = before if then is None else then
            return result

        setattr(owner, name, watched)

    fit = run.fit

    @functools.wraps(fit)
    def watched_fit(job):
        _NOTE.pack_into(spy, 0, TRAINING, job.first_step, time.monotonic() - began)
        return fit(job)

    run.fit = watched_fit
    during(run, "evaluate", EVALUATION)
    during(checkpoint, "save", SAVE)
    during(checkpoint, "prune", PRUNE)
    during(run, "write_result", ADAPTER, then=END)


def _trace(path: Path) -> None:
    """Write down each passing of a fault point, and which checkpoint has been saved in between."""
    from dualtune.base import faults
    from dualtune.train.saver import Saver

    reach, allowed, save = faults.reach, faults.allowed, Saver.save
    file = path.open("w", encoding="utf-8", buffering=1)

    def log(name: str, function: Callable, returned: Callable | None = None) -> Callable:
        @functools.wraps(function)
        def logged(*args):
            print(name, *args[-1:], file=file)
            return function(*args)

        return logged

    def saved(self: Saver, step: int) -> None:
        save(self, step)
        print("saved", step, file=file)

    faults.reach, faults.allowed, Saver.save = log("reach", reach), log("write", allowed), saved


if __name__ == "__main__":
    _live(*sys.argv[1:])

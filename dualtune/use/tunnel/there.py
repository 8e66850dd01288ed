"""The far end of a tunnel: `dualtune tunnel --there`, which ssh starts on the other machine.

Two processes. The keeper runs the command and outlives a lost connection. The attached one lives as long as a
connection: it passes on the output of the command and what was saved, as lines of JSON, and hears on its standard
input that somebody is there. Each sign of life is written into a file. A keeper that sees no new one for `lease_s`
seconds ends the command as a scheduler would, with SIGTERM, so a run saves its state.

    command.json   what runs, and where it saves        lease      the number of signs of life
    output         what it has said                     end        it is to be ended now
    lock           held by the keeper while it lives    code       how the command ended
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dualtune.base.errors import ConfigError
from dualtune.base.files import json_bytes
from dualtune.model.formats.directory import CONFIG_FILE
from dualtune.train.state.checkpoint_files import MANIFEST

MARK = "dualtune-tunnel "  # begins each line that is for the near end; a login shell may say more
NAME = re.compile(r"[0-9a-f]{16}")
GRACE_S = 120.0  # for the command to save and end after SIGTERM
LOOK_S, POLL_S = 2.0, 0.2  # between looks at the directory, and at all else
PIECE_BYTES = 1 << 15
STATIC = ("config.yaml", "tinker.json", "environment.json", "chat_template.jinja")  # of a run, beside what it saves
LOST = 4  # the exit code that is reported of a command whose keeper was killed, or its machine restarted
KEPT_S = 7 * 86400.0  # the files of a tunnel that has ended


@dataclass(frozen=True, slots=True)
class FarTask:
    """What the near end asks for."""

    name: str  # of the tunnel
    command: tuple[str, ...]
    watched: str  # the directory below which the command saves
    lease_s: float
    is_new: bool = True  # False: it was begun over an earlier connection

    @classmethod
    def parse(cls, text: str) -> FarTask:
        table = json.loads(text)
        task = cls(**table | {"command": tuple(table["command"])})
        if not NAME.fullmatch(task.name) or not task.command:
            raise ConfigError("--there: is for `dualtune tunnel` itself, which gives it a name and a command")
        return task

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def home_of(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "dualtune" / "tunnels" / name


def tell(kind: str, value: object) -> None:
    """Send a line to the near end."""
    sys.stdout.write(f"\n{MARK}{json.dumps({kind: value})}\n")
    sys.stdout.flush()


# ----------------------------------------------------------------------------------------------------------------------
# What was saved.


def saved(root: Path, known: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path below `root` and the files of each checkpoint and adapter that is not known as it is.

    Both get their name when they are whole; what is unfinished or being removed is hidden.
    """
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        place = Path(folder).relative_to(root).as_posix()
        if MANIFEST in files or CONFIG_FILE in files:
            unit_files = sorted(name for name in files if not name.startswith("."))
        elif unit_files := [name for name in STATIC if name in files]:
            place += "/"  # some files of a directory that has others
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile: older checkpoints are
            stamps = {name: _stamp(Path(folder, name)) for name in unit_files}
            if unit_files and known.get(place) != stamps:
                yield place, {"stamps": stamps, "files": {name: _entry(Path(folder, name)) for name in unit_files}}


def _stamp(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


# ----------------------------------------------------------------------------------------------------------------------
# The attached process.


def attach(task: FarTask) -> None:
    """Be the far end of one connection, until the command or the connection ends."""
    home = home_of(task.name)
    if not home.exists():
        if not task.is_new:
            tell("ended", LOST)
            return
        _begin(home, task)
    root = Path(task.watched).absolute()
    tell("attached", str(root))
    stamps: dict[str, Any] = {}
    beats, looked, start = time.time_ns(), 0.0, 0
    while True:
        code = _code_of(home)
        if time.monotonic() - looked > LOOK_S or code is not None:
            for place, unit in saved(root, stamps):
                stamps[place] = unit["stamps"]
                tell("saved", [place, unit["files"]])
            looked = time.monotonic()
        start = _pass_on(home / "output", start, is_over=code is not None)
        if code is not None:
            tell("ended", code)
            return
        if select.select([0], [], [], POLL_S)[0]:
            if not (heard := os.read(0, 4096)):
                return  # the connection is lost: the keeper waits for the next one
            beats += 1
            _beat(home, beats)
            if b"end" in heard:
                (home / "end").touch()


def _begin(home: Path, task: FarTask) -> None:
    """Start the keeper, which holds the lock from its first moment on. Forget tunnels that have ended long ago."""
    home.mkdir(parents=True, mode=0o700)
    for code in home.parent.glob("*/code"):
        if time.time() - code.stat().st_mtime > KEPT_S:
            shutil.rmtree(code.parent, ignore_errors=True)
    (home / "command.json").write_bytes(json_bytes(asdict(task)))
    _beat(home, 0)
    keeper = [sys.executable, "-m", "dualtune.use.tunnel.there", str(home)]
    with (home / "output").open("wb") as output, (home / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.Popen(
            keeper, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            pass_fds=[lock.fileno()],
        )  # fmt: skip


def _pass_on(output: Path, start: int, *, is_over: bool) -> int:
    """Pass on the lines behind `start`, whole ones while there may be more of the last. Return where they end."""
    with output.open("rb") as file:
        file.seek(start)
        while piece := file.read(PIECE_BYTES):
            if not is_over and len(piece) < PIECE_BYTES:
                piece = piece[: piece.rfind(b"\n") + 1]
            if not piece:
                break
            tell("output", piece.decode("utf-8", "replace"))
            start += len(piece)
            file.seek(start)
    return start


def _beat(home: Path, count: int) -> None:
    """Write a sign of life: what counts is that it is another one, because clocks jump."""
    part = home / f"lease.{os.getpid()}"
    part.write_text(str(count), encoding="utf-8")
    part.replace(home / "lease")


def _code_of(home: Path) -> int | None:
    """Return how the command ended, None while it runs."""
    is_over = not _is_held(home / "lock")
    with contextlib.suppress(FileNotFoundError):
        return int((home / "code").read_text(encoding="utf-8"))
    return LOST if is_over else None


def _is_held(lock: Path) -> bool:
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# ----------------------------------------------------------------------------------------------------------------------
# The keeper.


def keep(home: Path) -> None:
    """Run the command, and end it when it is asked to or nobody is there any more."""
    task = FarTask.parse((home / "command.json").read_text(encoding="utf-8"))
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signals.append(number))
    try:
        command = subprocess.Popen(task.command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{task.command[0]}: cannot be run: {error.strerror}", flush=True)  # into `output`
        _write_code(home, 127)
        return
    lease, seen = "", time.monotonic()
    try:
        while command.poll() is None:
            time.sleep(POLL_S)
            now = (home / "lease").read_text(encoding="utf-8")
            if now != lease:
                lease, seen = now, time.monotonic()
            if signals or (home / "end").exists() or time.monotonic() - seen > task.lease_s:
                _end(command)
    finally:
        if command.poll() is None:  # somebody has removed `home`: nobody could ask for its end
            _end(command)
    _write_code(home, command.returncode)


def _end(command: subprocess.Popen[bytes]) -> None:
    """End the command and what it has started, gently first."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(patience_s)
            return


def _write_code(home: Path, code: int) -> None:
    part = home / "code.part"
    part.write_text(str(code), encoding="utf-8")
    part.replace(home / "code")


if __name__ == "__main__":
    keep(Path(sys.argv[1]))

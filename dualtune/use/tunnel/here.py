"""The near end of a tunnel: an ssh process that forwards a port, the far end's lines, and what comes home.

The connection may be lost. The far end waits `lease_s` seconds for the next one, so this end tries that long.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from dualtune.base.errors import ConfigError, DualtuneError, EnvironmentFault, FormatError
from dualtune.base.files import fsync, new_directory
from dualtune.base.untrusted import sha256_of
from dualtune.use.transfer.remotes.retries import Cut, Patience
from dualtune.use.transfer.remotes.ssh import NO_CONNECTION, OPTIONS, SshStore, command
from dualtune.use.transfer.remotes.store import MAX_FILE_BYTES
from dualtune.use.transfer.remotes.target import parse
from dualtune.use.tunnel.there import MARK, FarTask, free_port

PORT = "{port}"  # in a command: the port there
BEATS = 6  # signs of life in the time that the other end waits for one
MOST_BEAT_S, POLL_S, PROBE_S, PAUSE_S = 5.0, 0.2, 1.0, 2.0
MOST_LINE_BYTES, MOST_ERROR_BYTES = 8 << 20, 1 << 16
LOCAL = "127.0.0.1"


class LostTunnel(EnvironmentFault):
    """The other machine could not be reached again."""


@dataclass(slots=True)
class Tunnel:
    """A command there, and the connection to it. `say` gets a word and a line; `show` what the command prints."""

    store: SshStore
    program: str  # dualtune there
    task: FarTask
    to: Path
    port_there: int | None  # None: the command has no port
    port_here: int = 0
    say: Callable[[str, str], None] = lambda word, line: None
    show: Callable[[str], None] = lambda text: None
    on_answer: Callable[[str], None] = lambda url: None
    root: str = field(default="", init=False)  # the watched directory there
    num_saved: int = field(default=0, init=False)
    was_stopped: bool = field(default=False, init=False)  # by a signal
    _is_ending: bool = field(default=False, init=False)
    _answered: bool = field(default=False, init=False)
    _probed: float = field(default=0.0, init=False)  # when

    def run(self) -> int:
        """Return the exit code of the command. LostTunnel if the machine is gone; what came home stays."""
        with self._stopped_by_signals():
            return self._keep_connected()

    def _keep_connected(self) -> int:
        lost_since: float | None = None
        while True:
            with _Session(self._arguments(), min(MOST_BEAT_S, self.task.lease_s / BEATS)) as session:
                for message in session.messages(self._tick):
                    if "ended" in message:
                        return int(message["ended"])
                    if "attached" in message and lost_since is not None:
                        self.say("connected", f"{self.store.host} again")
                    lost_since = None if "attached" in message else lost_since
                    self._take(message)
            problem = session.error_text() or f"ssh ended with exit code {session.code}"
            if session.code != NO_CONNECTION and not session.was_attached:
                raise EnvironmentFault(f"{self.store.host}: the far end of the tunnel did not start: {problem}")
            now = time.monotonic()
            is_hopeless = self._is_ending or (self.was_stopped and lost_since is not None)  # once more, to end it there
            lost_since = lost_since or now
            if is_hopeless or now - lost_since > self.task.lease_s:
                raise LostTunnel(self._lost(problem))
            self.say("lost", f"the connection to {self.store.host} ({problem}); trying again")
            time.sleep(PAUSE_S)

    @contextlib.contextmanager
    def _stopped_by_signals(self) -> Generator[None]:
        """The first signal ends the command there, the second one this end at once."""

        def stop(number: int, frame: object) -> None:
            if self.was_stopped:
                raise KeyboardInterrupt
            self.was_stopped = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _lost(self, problem: str) -> str:
        return (
            f"{self.store.host}: lost, and not reached again for {self.task.lease_s:.0f} s: {problem}. When nothing is "
            "heard there for as long, the command is ended with SIGTERM. What was fetched stays in "
            f"{self.to}: {self.num_saved} checkpoints and adapters. To continue, run the same command again"
        )

    def _arguments(self) -> list[str]:
        forward = []
        if self.port_there is not None:
            self.port_here = self.port_here or free_port()
            ends = f"{LOCAL}:{self.port_here}:{LOCAL}:{self.port_there}"
            forward = ["-o", "ExitOnForwardFailure=yes", "-L", ends]
        port = [] if self.store.port is None else ["-p", str(self.store.port)]
        text = command('exec "$@"', self.program, "tunnel", "--there", replace(self.task, is_new=not self.root).text)
        # A connection of its own: a shared one would keep the forwarded port when this process has ended.
        return [*self.store.program, *OPTIONS, "-S", "none", *forward, *port, "--", self.store.host, text]

    def _tick(self, session: _Session) -> None:
        """What is looked after between messages: a stop that was asked for, and whether the port answers."""
        if self.was_stopped and not self._is_ending and session.was_attached:
            self._is_ending = True
            self.say("ending", f"the command on {self.store.host}; Ctrl-C again does not wait for it")
            session.end()
        if self._is_ending or self._answered or self.port_there is None:
            return
        if time.monotonic() - self._probed > PROBE_S:
            self._answered = answers(self.port_here)
            self._probed = time.monotonic()
            if self._answered:
                self.on_answer(f"http://{LOCAL}:{self.port_here}")

    def _take(self, message: Mapping[str, Any]) -> None:
        try:
            if "attached" in message:
                self.root = str(message["attached"])
            elif "output" in message:
                self.show(str(message["output"]))
            elif "saved" in message:
                place, files = message["saved"]
                self._bring_home(str(place), files)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            text = (
                f"{self.store.host}: the far end of the tunnel said what this version does not know: {message!r:.200}"
            )
            raise FormatError(text) from error

    # --- what was saved ----------------------------------------------------------------------------------------------

    def _bring_home(self, place: str, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Fetch the files of a directory there, each verified, into the same place here. What is the same stays."""
        is_whole = not place.endswith("/")
        parts = [part for part in place.split("/") if part not in ("", ".")]
        check_names([*parts, *files])
        target = self.to.joinpath(*parts)
        if all(sha256_if_there(target / name) == entry["sha256"] for name, entry in files.items()):
            return
        try:
            if not is_whole:
                target.mkdir(parents=True, exist_ok=True)
                for name, entry in files.items():
                    self._fetch(place, name, entry, target / name)
                return
            with new_directory(target, by_library=True) as fresh:
                fresh.mkdir()
                for name, entry in files.items():
                    self._fetch(place, name, entry, fresh / name)
                if target.exists():  # an adapter that was saved again; a checkpoint never changes
                    shutil.rmtree(target)
        except (DualtuneError, Cut) as error:  # the run there has replaced it meanwhile, or the connection is lost
            self.say("not fetched", f"{place}: {error}")
            return
        self.num_saved += 1
        self.say("saved", f"{target}: {len(files)} files, each verified by its sha256")

    def _fetch(self, place: str, name: str, entry: Mapping[str, Any], target: Path) -> None:
        most = min(int(entry["bytes"]), MAX_FILE_BYTES)
        part = self.store.pull(f"{self.root}/{place}/{name}", target, patience=Patience(2), most=most)
        if sha256_of(part) != entry["sha256"]:
            part.unlink()
            raise FormatError(f"{name} is not what was announced")
        part.replace(target)
        fsync(target)


def check_names(names: list[str]) -> None:
    """Raise FormatError if a name of the other machine could be anything but a name in a directory."""
    for name in names:
        if name.startswith(".") or "/" in name or "\\" in name or not name.isprintable() or len(name) > 255:
            raise FormatError(f"the other machine names a file {name[:100]!r}, which is not fetched")


def sha256_if_there(file: Path) -> str | None:
    return sha256_of(file) if file.is_file() and not file.is_symlink() else None


def check_port(port: int) -> None:
    """ConfigError if a port here is in use."""
    try:
        socket.create_server((LOCAL, port)).close()
    except OSError as error:
        raise ConfigError(f"--port: got {port}: {error.strerror}. Choose another, or none: any free port") from error


def answers(port: int) -> bool:
    """Return whether something there has answered an HTTP request: ssh itself accepts any connection here."""
    with contextlib.suppress(OSError), socket.create_connection((LOCAL, port), timeout=2) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return bool(connection.recv(1))
    return False


# ----------------------------------------------------------------------------------------------------------------------
# Before the first connection.

# PROGRAM: is it there, and does it know tunnels?
PROBE = (
    'if command -v "$1" >/dev/null 2>&1; then "$1" tunnel --there probe 2>/dev/null; else echo "dualtune absent"; fi; '
    'echo "dualtune end"'
)


def machine(host: str) -> SshStore:
    """Return the machine of user@host, a name of ~/.ssh/config, or ssh://user@host:port."""
    store = parse(f"{host}/x" if "://" in host else f"{host}:x").remote
    if not isinstance(store, SshStore):
        raise ConfigError(f"HOST: got '{host}'; allowed: user@host, a name of ~/.ssh/config, or ssh://user@host:port")
    return store


def port_there(store: SshStore, program: str) -> int:
    """Return a free port of a machine that has dualtune. EnvironmentFault if it has none, or cannot be reached."""
    lines = Patience(2).keep_trying(lambda: store.ask(PROBE, program), store.host)
    if "dualtune absent" in lines:
        raise EnvironmentFault(
            f"{store.host}: there is no program '{program}' there. Install dualtune there (docs/setup.md), or say "
            "where it is: --program path/to/.venv/bin/dualtune"
        )
    for line in lines:
        if port := _parsed(line.encode()).get("free"):
            return int(port)
    raise EnvironmentFault(
        f"{store.host}: {program} there is older than `dualtune tunnel`. Install the same version there"
    )


def new_task(words: list[str], watched: str, port: int, lease_s: float) -> FarTask:
    return FarTask(secrets.token_hex(8), tuple(word.replace(PORT, str(port)) for word in words), watched, lease_s)


# ----------------------------------------------------------------------------------------------------------------------
# One connection.


class _Session:
    """An ssh process with the far end of the tunnel. Threads read its lines and give a sign of life."""

    def __init__(self, arguments: list[str], beat_s: float) -> None:
        self._arguments, self._beat_s = arguments, beat_s
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._errors = bytearray()
        self.was_attached, self.code = False, 0

    def __enter__(self) -> _Session:
        # ssh asks for a password on the terminal, so it stays in the same session. A Ctrl-C is for this end alone.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process = subprocess.Popen(
                self._arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise EnvironmentFault(
                f"{self._arguments[0]}: cannot be run: {error.strerror}. Install the OpenSSH client"
            ) from error
        finally:
            signal.signal(signal.SIGINT, before)
        for work in (self._read_lines, self._read_errors, self._give_signs):
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self.code = self._process.wait(PAUSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.code = self._process.wait()

    def messages(self, tick: Callable[[_Session], None]) -> Iterator[dict[str, Any]]:
        """Yield what the far end says, until the connection ends; between messages, `tick`."""
        while True:
            tick(self)
            try:
                line = self._lines.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if line is None:
                return
            message = _parsed(line)
            self.was_attached |= "attached" in message
            yield message

    def end(self) -> None:
        self._write(b"end\n")

    def error_text(self) -> str:
        lines = [line.strip() for line in self._errors.decode("utf-8", "replace").splitlines() if line.strip()]
        return "".join(c if c.isprintable() else " " for c in "; ".join(lines[-4:]))[-600:]

    def _write(self, raw: bytes) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(raw)
            self._process.stdin.flush()

    def _give_signs(self) -> None:
        while self._process.poll() is None:
            self._write(b"\n")
            time.sleep(self._beat_s)

    def _read_lines(self) -> None:
        assert self._process.stdout
        while line := self._process.stdout.readline(MOST_LINE_BYTES):
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr
        while raw := os.read(self._process.stderr.fileno(), 4096):
            self._errors += raw
            del self._errors[:-MOST_ERROR_BYTES]


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the message of a line, empty for what a login shell says."""
    if not line.startswith(MARK.encode()):
        return {}
    try:
        message = json.loads(line[len(MARK) :])
    except ValueError:
        return {}
    return cast("dict[str, Any]", message) if isinstance(message, dict) else {}

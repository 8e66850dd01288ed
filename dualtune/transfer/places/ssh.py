"""A machine that is reached by the system's own ssh, with the user's own ~/.ssh/config.

Two connections bring a file: one asks what is there, one sends what is missing. DUALTUNE_SSH names another command
than `ssh`, with options, as GIT_SSH_COMMAND does; no shell reads it here.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import subprocess
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from dualtune import interrupt
from dualtune.errors import ConfigError, DiskError, EnvironmentFault
from dualtune.transfer.places import ssh_script
from dualtune.transfer.places.chunks import PIECE_BYTES, Chunks, pieces_of
from dualtune.transfer.places.patience import Cut, Patience
from dualtune.transfer.places.store import Found, Upload

# A dead line is noticed after a minute. An option of DUALTUNE_SSH counts more, one of ~/.ssh/config less.
OPTIONS = ("-T", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
NO_CONNECTION = 255  # the exit code of ssh where not the command there failed, but ssh itself
_PERMANENT = re.compile(
    r"Permission denied \(|Host key verification failed|HOST IDENTIFICATION HAS CHANGED|Too many authentication"
    r"|Bad configuration option|bad configuration options|Could not resolve hostname(?!.*Temporary)|no matching"
)
_NUMBERS_OF_DD = re.compile(r"\d+\+\d+ records (in|out)|\d+ bytes .*(copied|transferred).*|\d+ truncated records?")
_LINE = re.compile(r"dualtune (final|part) (bytes|chunk) \*?([0-9a-f]{64}|\d{1,15})\b")
# No option, and nothing that a shell would read: ProxyCommand and Match exec hand it to one (CVE-2023-51385).
_HOST = re.compile(r"(?:[\w.+][\w.+\\-]*@)?[\w.:%][\w.:%-]*")
_POLL_S = 0.3


@dataclass(frozen=True, slots=True)
class SshStore:
    """Files on a machine; a path is absolute, or relative to the home directory there."""

    host: str  # as ssh takes it: [user@]host, or a name of ~/.ssh/config
    port: int | None = None
    program: tuple[str, ...] = field(default_factory=lambda: _program())

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise ConfigError(
                f"TARGET: got the host {self.host!r}; allowed is [user@]host, neither beginning with '-', of letters, "
                "digits and . _ - : %. A name of ~/.ssh/config may stand for any other"
            )

    def shown(self, path: str) -> str:
        user, at, host = self.host.rpartition("@")
        host = f"{user}{at}[{host}]" if ":" in host else self.host  # an IPv6 address
        if self.port is None:
            return f"{host}:{path.removeprefix('./')}"
        return f"ssh://{host}:{self.port}/{path.removeprefix('/') if path.startswith('/') else '~/' + path[2:]}"

    def look(self, upload: Upload) -> Found:
        lines = self._ask(ssh_script.LOOK, upload.path, upload.part, upload.chunks.num_bytes)
        return Found("dualtune there" in lines, _parsed(lines, "final"), _parsed(lines, "part"))

    def send(self, upload: Upload, runs: Sequence[range], patience: Patience) -> None:
        done = upload.chunks.num_bytes - sum(map(upload.chunks.bytes_in, runs))
        mode = "replace" if upload.force else "keep"
        finish = ssh_script.command(ssh_script.FINISH, upload.path, upload.part, upload.sha256, mode)
        lines: list[str] = []
        for i, run in enumerate(runs):
            write = ssh_script.command(ssh_script.WRITE, upload.part, upload.chunks.chunk_bytes, run.start)
            pieces = _told(pieces_of(upload.file, upload.chunks, run), done, upload.chunks.num_bytes, patience)
            done += upload.chunks.bytes_in(run)
            # The last run and the end are one connection: each costs a handshake, and may ask for a password.
            lines = self._run(f"{write} && {finish}" if i == len(runs) - 1 else write, pieces)
        if not runs:
            lines = self._run(finish)
        if "dualtune done" not in lines:
            raise Cut("what arrived there has another sha256 than the file")

    def chunks(self, path: str) -> Chunks | None:
        found = _parsed(self._ask(ssh_script.CHUNKS, path), "final")
        if found and len(found.sha256s) != -(-found.num_bytes // found.chunk_bytes):
            raise Cut(f"{self.host} listed {len(found.sha256s)} chunks of a file of {found.num_bytes} bytes")
        return found

    def read(self, path: str, chunks: Chunks, run: range) -> Generator[bytes]:
        text = ssh_script.command(ssh_script.READ, path, chunks.chunk_bytes, run.start, len(run))
        head: bytearray | None = bytearray()
        with _Connection([*self._arguments(), text]) as connection:
            for piece in connection.exchange():
                if head is None:
                    yield piece
                    continue
                head += piece
                _, mark, rest = head.partition(ssh_script.START_OF_DATA)
                if mark:
                    head = None
                    yield bytes(rest)
        self._judge(connection)

    def _ask(self, script: str, *arguments: object) -> list[str]:
        return self._run(ssh_script.command(script, *arguments))

    def _run(self, text: str, pieces: Iterator[bytes] | None = None) -> list[str]:
        """The lines that a command there answers. Cut, DiskError or EnvironmentFault if it fails."""
        with _Connection([*self._arguments(), text]) as connection:
            said = b"".join(connection.exchange(pieces))
        self._judge(connection)
        lines = said.decode("utf-8", "replace").splitlines()
        if "dualtune end" not in lines:
            raise Cut(f"{self.host} did not answer to the end")
        return lines

    def _arguments(self) -> list[str]:
        port = [] if self.port is None else ["-p", str(self.port)]
        return [*self.program, *OPTIONS, *port, "--", self.host]

    def _judge(self, connection: _Connection) -> None:
        """Raise what the end of a connection means, if it did not end well."""
        code, said = connection.code, connection.said()
        if code == 0:
            return
        interrupt.poll()  # a Ctrl-C reaches ssh too
        if code == NO_CONNECTION and _PERMANENT.search(said):
            raise EnvironmentFault(
                f"{self.host}: ssh could not connect: {said}. Until `{shlex.join([*self.program, self.host, 'true'])}` "
                "works, nothing can be transferred"
            )
        if code == NO_CONNECTION or code < 0 or code > 128:
            raise Cut(f"the connection to {self.host} failed: {said or f'exit code {code}'}")
        if code == ssh_script.NO_FILE:
            raise DiskError(f"{self.host}: cannot be written there: {said}. What has arrived is kept for another try")
        raise EnvironmentFault(f"{self.host}: the command there failed with exit code {code}: {said or 'no message'}")


class _Connection:
    """An ssh process; at the end of the block it has ended, however the block ends."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._errors = bytearray()
        self.code = 0

    def __enter__(self) -> _Connection:
        try:
            # Not in a session of its own: ssh asks for a password on the terminal.
            self._process = subprocess.Popen(
                self._arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            name = self._arguments[0]
            raise EnvironmentFault(f"{name}: cannot be run: {error.strerror}. Install OpenSSH's client") from error
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process.poll() is None:
            process.terminate()
        self.code = process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def exchange(self, pieces: Iterator[bytes] | None = None) -> Generator[bytes]:
        """Send the pieces, and yield what comes meanwhile, until the process ends."""
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        arrived: list[bytes] = []
        with selectors.DefaultSelector() as selector:

            def listen(stream: IO[bytes], take: Callable[[bytes], object]) -> Callable[[], None]:
                def receive() -> None:
                    if raw := os.read(stream.fileno(), PIECE_BYTES):
                        take(raw)
                    else:
                        selector.unregister(stream)

                return receive

            selector.register(process.stdout, selectors.EVENT_READ, listen(process.stdout, arrived.append))
            selector.register(process.stderr, selectors.EVENT_READ, listen(process.stderr, self._errors.extend))
            if pieces is None:
                process.stdin.close()
            else:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE, _sender(process.stdin, pieces, selector))
            while selector.get_map():
                interrupt.poll()
                is_over = process.poll() is not None  # asked before the select: what it wrote at last is then there
                ready = selector.select(_POLL_S)
                for key, _ in ready:
                    key.data()
                yield from arrived
                arrived.clear()
                if not ready and is_over:
                    break  # something that ssh started keeps its streams open
        while process.poll() is None:
            interrupt.poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)

    def said(self) -> str:
        """What came on standard error, without what dd counts, on one line."""
        text = self._errors.decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines()]
        kept = [line for line in lines if line and not _NUMBERS_OF_DD.fullmatch(line) and set(line) != {"@"}]
        return "".join(c if c.isprintable() else " " for c in "; ".join(kept[-6:]))[-600:]


def _sender(stream: IO[bytes], pieces: Iterator[bytes], selector: selectors.BaseSelector) -> Callable[[], None]:
    """What writes the next bytes to the stream when there is room, and closes it after the last one."""
    waiting = b""

    def send() -> None:
        nonlocal waiting
        waiting = waiting or next(pieces, b"")
        try:
            if waiting:
                waiting = waiting[os.write(stream.fileno(), waiting) :]
                return
        except BlockingIOError:
            return
        except BrokenPipeError:  # ssh has ended, and its exit code says why
            pass
        selector.unregister(stream)
        with contextlib.suppress(BrokenPipeError):
            stream.close()

    return send


def _told(pieces: Iterator[bytes], done: int, total: int, patience: Patience) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        done += len(piece)
        patience.show(done, total)


def _parsed(lines: list[str], what: str) -> Chunks | None:
    """What the script listed under a name, None where it listed nothing."""
    found = [match for line in lines if (match := _LINE.match(line)) and match[1] == what]
    sizes = [int(match[3]) for match in found if match[2] == "bytes"]
    return Chunks(sizes[0], tuple(match[3] for match in found if match[2] == "chunk")) if sizes else None


def _program() -> tuple[str, ...]:
    text = os.environ.get("DUALTUNE_SSH", "")
    try:
        return tuple(shlex.split(text)) or ("ssh",)
    except ValueError as error:
        raise ConfigError(f"DUALTUNE_SSH: got {text!r}, which is no command line: {error}") from None

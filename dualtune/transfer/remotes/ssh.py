"""A machine reached with the system's ssh and the user's ~/.ssh/config.

A push takes two connections: one asks what is there, one sends what is missing. DUALTUNE_SSH sets another command than
`ssh`, with options, like GIT_SSH_COMMAND; here no shell reads it.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from dualtune import interrupt
from dualtune.errors import ConfigError, DiskError, EnvironmentFault
from dualtune.transfer.remotes import ssh_script
from dualtune.transfer.remotes.chunks import Chunks, pieces_of
from dualtune.transfer.remotes.connection import Connection
from dualtune.transfer.remotes.pace import LEAST_DATA_BYTES, Clock, Pace, window_for
from dualtune.transfer.remotes.patience import Cut, Patience
from dualtune.transfer.remotes.store import Found, Upload

# A dead connection is noticed after a minute. Options in DUALTUNE_SSH take precedence, those in ~/.ssh/config do not.
OPTIONS = ("-T", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
NO_CONNECTION = 255  # the exit code when ssh itself failed, not the remote command
_PERMANENT = re.compile(
    r"Permission denied \(|Host key verification failed|HOST IDENTIFICATION HAS CHANGED|Too many authentication"
    r"|Bad configuration option|bad configuration options|Could not resolve hostname(?!.*Temporary)|no matching"
)
_LINE = re.compile(r"dualtune (final|part) (bytes|chunk) \*?([0-9a-f]{64}|\d{1,15})\b")
# No option, and nothing special to a shell: ProxyCommand and Match exec pass it to one (CVE-2023-51385).
_HOST = re.compile(r"(?:[\w.+][\w.+\\-]*@)?[\w.:%][\w.:%-]*")
MOST_ANSWER_BYTES = 4 << 20  # four times the hashes of two files of the largest size
MOST_GREETING_BYTES = 1 << 20  # that a login shell may print before the content of a file


@dataclass(frozen=True, slots=True)
class SshStore:
    """Files on a machine; a path is absolute, or relative to the home directory there."""

    host: str  # as ssh takes it: [user@]host, or a name of ~/.ssh/config
    port: int | None = None
    program: tuple[str, ...] = field(default_factory=lambda: _program())
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise ConfigError(
                f"TARGET: got the host {self.host!r}; allowed: [user@]host of letters, digits and . _ - : %, neither "
                "beginning with '-'. For any other host, use a name from ~/.ssh/config"
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
        hashed = upload.chunks.num_bytes  # by FINISH, which prints nothing meanwhile
        for i, run in enumerate(runs):
            write = ssh_script.command(ssh_script.WRITE, upload.part, upload.chunks.chunk_bytes, run.start)
            pieces = _counted(pieces_of(upload.file, upload.chunks, run), done, upload.chunks.num_bytes, patience)
            done += upload.chunks.bytes_in(run)
            # The last run and FINISH share a connection: each costs a handshake, and may ask for a password.
            is_last = i == len(runs) - 1
            lines = self._run(f"{write} && {finish}" if is_last else write, pieces, hashed if is_last else 0)
        if not runs:
            lines = self._run(finish, hashed_bytes=hashed)
        if "dualtune done" not in lines:
            raise Cut("the received file has the wrong sha256")

    def chunks(self, path: str) -> Chunks | None:
        found = _parsed(self._ask(ssh_script.CHUNKS, path), "final")
        if found and len(found.sha256s) != -(-found.num_bytes // found.chunk_bytes):
            raise Cut(f"{self.host} listed {len(found.sha256s)} chunks of a file of {found.num_bytes} bytes")
        return found

    def read(self, path: str, chunks: Chunks, run: range) -> Generator[bytes]:
        text = ssh_script.command(ssh_script.READ, path, chunks.chunk_bytes, run.start, len(run))
        with Connection([*self._arguments(), text], Pace(LEAST_DATA_BYTES, clock=self.clock)) as connection:
            yield from self._after_greeting(connection.exchange())
        self._raise_if_failed(connection)

    def _after_greeting(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield what follows the script's mark; a login shell may have printed something before it."""
        head, mark = bytearray(), ssh_script.START_OF_DATA
        for piece in pieces:
            searched = max(0, len(head) - len(mark))  # the mark may span two pieces
            head += piece
            if (found := head.find(mark, searched)) >= 0:
                yield bytes(head[found + len(mark) :])
                break
            if len(head) > MOST_GREETING_BYTES:
                raise self._too_much(MOST_GREETING_BYTES)
        yield from pieces

    def _ask(self, script: str, *arguments: object) -> list[str]:
        return self._run(ssh_script.command(script, *arguments))

    def _run(self, text: str, pieces: Iterator[bytes] | None = None, hashed_bytes: int = 0) -> list[str]:
        """Run a remote command and return its lines. Cut, DiskError or EnvironmentFault if it fails."""
        answer = bytearray()
        pace = Pace(window_s=window_for(hashed_bytes), clock=self.clock)
        with Connection([*self._arguments(), text], pace) as connection:
            for piece in connection.exchange(pieces):
                answer += piece
                if len(answer) > MOST_ANSWER_BYTES:
                    raise self._too_much(MOST_ANSWER_BYTES)
        self._raise_if_failed(connection)
        lines = answer.decode("utf-8", "replace").splitlines()
        if "dualtune end" not in lines:
            raise Cut(f"{self.host} sent an incomplete answer")
        return lines

    def _too_much(self, most: int) -> EnvironmentFault:
        return EnvironmentFault(
            f"{self.host}: printed more than {most} bytes, and no answer. Check what its login shell prints"
        )

    def _arguments(self) -> list[str]:
        port = [] if self.port is None else ["-p", str(self.port)]
        return [*self.program, *OPTIONS, *port, "--", self.host]

    def _raise_if_failed(self, connection: Connection) -> None:
        """Raise the error that fits the exit code of a connection, if it failed."""
        code, message = connection.code, connection.error_text()
        if code == 0:
            return
        interrupt.poll()  # a Ctrl-C reaches ssh too
        if code == NO_CONNECTION and _PERMANENT.search(message):
            raise EnvironmentFault(
                f"{self.host}: ssh cannot connect: {message}. Fix this first: "
                f"`{shlex.join([*self.program, self.host, 'true'])}` must work"
            )
        if code == NO_CONNECTION or code < 0 or code > 128:
            raise Cut(f"the connection to {self.host} failed: {message or f'exit code {code}'}")
        if code == ssh_script.NO_FILE:
            raise DiskError(f"{self.host}: cannot be written there: {message}. To resume, run the same command again")
        raise EnvironmentFault(f"{self.host}: the remote command failed, exit code {code}: {message or 'no message'}")


def _counted(pieces: Iterator[bytes], done: int, total: int, patience: Patience) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        done += len(piece)
        patience.show(done, total)


def _parsed(lines: list[str], what: str) -> Chunks | None:
    """Return what the script listed under a name, None if nothing."""
    found = [match for line in lines if (match := _LINE.match(line)) and match[1] == what]
    sizes = [int(match[3]) for match in found if match[2] == "bytes"]
    return Chunks(sizes[0], tuple(match[3] for match in found if match[2] == "chunk")) if sizes else None


def _program() -> tuple[str, ...]:
    text = os.environ.get("DUALTUNE_SSH", "")
    try:
        return tuple(shlex.split(text)) or ("ssh",)
    except ValueError as error:
        raise ConfigError(f"DUALTUNE_SSH: got {text!r}, which is not a command line: {error}") from None

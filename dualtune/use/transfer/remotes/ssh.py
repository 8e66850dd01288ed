"""A machine reached with the system's ssh and the user's ~/.ssh/config.

A push takes two connections: one asks what is there, one sends what is missing. DUALTUNE_SSH sets another command than
`ssh`, with options, like GIT_SSH_COMMAND; here no shell reads it.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DiskError, EnvironmentFault
from dualtune.use.transfer.remotes.retries import LEAST_DATA_BYTES, Clock, Cut, Pace, Patience, window_for
from dualtune.use.transfer.remotes.store import PIECE_BYTES, Chunks, ChunkStore, StoredState, Upload, pieces_of

# ----------------------------------------------------------------------------------------------------------------------
# The scripts that run on the remote machine over ssh: POSIX sh and the tools that every Linux and macOS has.
#
# dualtune is not needed there. The login shell may be any, and shells differ in quoting: in fish a backslash inside
# single quotes escapes the closing one. So a script is one line without single quotes, backslashes and `!`, which all
# shells pass on unchanged between single quotes, and the arguments (such as file names) contain only letters, digits,
# `_./-` and octal codes. A script answers in lines that begin with `dualtune`; any other output of a login shell is
# ignored.
#
# A part is a directory `.NAME.part-HASH` with mode 0700, with the bytes in a file `data`: sh cannot open a file without
# following a link, but nobody else can create a link in this directory.

NO_TOOL, NO_FILE = 69, 73  # exit codes: EX_UNAVAILABLE and EX_CANTCREAT of sysexits.h

_HASH = (
    "LC_ALL=C; export LC_ALL; "
    "if command -v sha256sum >/dev/null 2>&1; then h() { sha256sum; }; "
    "elif command -v shasum >/dev/null 2>&1; then h() { shasum -a 256; }; "
    "elif command -v openssl >/dev/null 2>&1; then h() { openssl dgst -sha256 -r; }; "
    f'else echo "sha256sum, shasum or openssl is needed, and none is installed" >&2; exit {NO_TOOL}; fi; '
)
# list WHAT FILE TOTAL: the hashes of the file's chunks, in the chunk size of a file of TOTAL bytes (see `chunks`).
_LIST = (
    'list() { [ -r "$2" ] || { echo "$2: cannot be read" >&2; exit 73; }; '
    'n=$(($(wc -c <"$2"))); c=262144; '
    'while [ "$c" -lt 8388608 ] && [ "$((c * 256))" -lt "$3" ]; do c=$((c * 2)); done; '
    'echo "dualtune $1 bytes $n"; i=0; while [ "$((i * c))" -lt "$n" ]; do '
    'echo "dualtune $1 chunk $(dd if="$2" bs="$c" skip="$i" count=1 2>/dev/null | h)"; i=$((i + 1)); done; }; '
)
_END = 'echo "dualtune end"'

# absolute PATH: set $p to the absolute path, without resolving links in its directories.
_ABSOLUTE = 'absolute() { case "$1" in /*) p=$1;; *) p=$PWD/$1;; esac; }; '
# enter PART: make it and cd into it. A non-directory is replaced; a directory of another user, or a link, is refused.
_ENTER = (
    _ABSOLUTE + 'enter() { absolute "$1"; if [ -L "$p" ]; then rm -f "$p"; fi; [ -d "$p" ] || rm -f "$p"; '
    'mkdir -m 700 "$p" 2>/dev/null; cd -P "$p" && [ "${PWD##*/}" = "${p##*/}" ] && [ -O . ] || '
    f'{{ echo "$p: is not your directory; remove it" >&2; exit {NO_FILE}; }}; }}; '
)
_REFUSE_DIRECTORY = f'if [ -d "$1" ]; then echo "$1: is a directory" >&2; exit {NO_FILE}; fi; '

# FINAL PART TOTAL: make the directory; list what is under the final name, and in the part.
LOOK = (
    _HASH + _LIST + _ENTER + f'mkdir -p "${{1%/*}}/" || exit {NO_FILE}; ' + _REFUSE_DIRECTORY + 'if [ -e "$1" ] || '
    '[ -L "$1" ]; then echo "dualtune there"; if [ -f "$1" ] && [ "$(($(wc -c <"$1")))" -eq "$3" ]; then '
    'list final "$1" "$3"; fi; fi; '
    'if [ -L "$2" ]; then :; elif [ -d "$2" ]; then enter "$2"; '
    'if [ -f data ] && [ "$(($(wc -c <data)))" -gt "$3" ]; then rm -f data; fi; '
    'if [ -f data ]; then list part data "$3"; fi; fi; ' + _END
)
# PART CHUNK FIRST: write standard input, from chunk FIRST on. dd seeks in units of CHUNK.
WRITE = _ENTER + f'enter "$1"; dd of=data bs="$2" seek="$3" conv=notrunc || exit {NO_FILE}; ' + _END
# FINAL PART SHA256 MODE: sync the part, verify it, rename it, and remove parts with other content.
FINISH = (
    _HASH + _ENTER + _REFUSE_DIRECTORY + 'absolute "$1"; f=$p; enter "$2"; '
    "if [ -f data ]; then dd if=/dev/null of=data conv=notrunc,fsync 2>/dev/null || sync; s=$(h <data); "
    'else s=none; fi; if [ "${s%% *}" = "$3" ]; then '
    f'if [ "$4" = keep ] && {{ [ -e "$f" ] || [ -L "$f" ]; }}; then '
    f'echo "$1: already exists" >&2; exit {NO_FILE}; fi; '
    f'mv -f data "$f" || exit {NO_FILE}; cd / && rm -rf "${{p%-*}}"-*; echo "dualtune done"; '
    'else echo "dualtune differs"; fi; ' + _END
)
# FILE: its size and chunks, or nothing if it does not exist.
CHUNKS = _HASH + _LIST + 'if [ -f "$1" ]; then list final "$1" "$(($(wc -c <"$1")))"; fi; ' + _END
# FILE CHUNK FIRST COUNT: these chunks.
READ = 'echo "dualtune data"; dd if="$1" bs="$2" skip="$3" count="$4"'

START_OF_DATA = b"dualtune data\n"
_DECODE = 'for a do shift; a=$(printf %b. "$a"); set -- "$@" "${a%.}"; done; '
_TO_ENCODE = re.compile(rb"[^A-Za-z0-9_./-]")


def command(script: str, *arguments: object) -> str:
    """Return the command for ssh: one text, which the remote login shell parses."""
    return shlex.join(["sh", "-c", _DECODE + script, "dualtune", *map(_encoded, arguments)])


def _encoded(argument: object) -> str:
    """Encode an argument for `printf %b`: a code such as \\0047 for each byte that a shell might interpret."""
    return _TO_ENCODE.sub(lambda byte: b"\\0%03o" % byte[0][0], os.fsencode(str(argument))).decode("ascii")


# ----------------------------------------------------------------------------------------------------------------------
# A process of ssh and its three streams. Any of them may be large, stop moving, or never end.

MOST_ERROR_BYTES = 1 << 20  # of standard error, far beyond any message and banner
_NUMBERS_OF_DD = re.compile(r"\d+\+\d+ records (in|out)|\d+ bytes .*(copied|transferred).*|\d+ truncated records?")
_POLL_S = 0.3
_GRACE_S = 5.0  # for ssh to end by itself after SIGTERM


class Connection:
    """An ssh process, ended at the latest when the `with` block ends."""

    def __init__(self, arguments: list[str], pace: Pace) -> None:
        self._arguments, self._pace = arguments, pace
        self._errors = bytearray()
        self.code = 0

    def __enter__(self) -> Connection:
        try:
            # In the same session: ssh asks for a password on the terminal.
            self._process = subprocess.Popen(
                self._arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            name = self._arguments[0]
            raise EnvironmentFault(f"{name}: cannot be run: {error.strerror}. Install the OpenSSH client") from error
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process.poll() is None:
            process.terminate()
        try:
            self.code = process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            self.code = process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def exchange(self, pieces: Iterator[bytes] | None = None) -> Generator[bytes]:
        """Send the pieces and yield what arrives, until the process ends. Cut if nothing moves for too long."""
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

            # All three at once: a process that waits for a reader of one stream answers on no other.
            selector.register(process.stdout, selectors.EVENT_READ, listen(process.stdout, arrived.append))
            selector.register(process.stderr, selectors.EVENT_READ, listen(process.stderr, self._collect_errors))
            if pieces is None:
                process.stdin.close()
            else:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE, self._sender(pieces, selector))
            while selector.get_map():
                interrupt.poll()
                self._pace.check()
                is_over = process.poll() is not None  # before the select, which then sees its last output
                ready = selector.select(_POLL_S)
                for key, _ in ready:
                    key.data()
                self._pace.moved(sum(map(len, arrived)))
                yield from arrived
                arrived.clear()
                if not ready and is_over:
                    break  # a process started by ssh keeps its streams open
        # Its streams are closed, but it may go on: its exit code is what says whether all has arrived.
        while process.poll() is None:
            interrupt.poll()
            self._pace.check()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)

    def error_text(self) -> str:
        """Return standard error on one line, without the statistics of dd."""
        text = self._errors.decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines()]
        messages = [line for line in lines if line and not _NUMBERS_OF_DD.fullmatch(line) and set(line) != {"@"}]
        return "".join(c if c.isprintable() else " " for c in "; ".join(messages[-6:]))[-600:]

    def _collect_errors(self, raw: bytes) -> None:
        self._errors += raw
        if len(self._errors) > MOST_ERROR_BYTES:
            raise EnvironmentFault(
                f"{self._arguments[-2]}: printed more than {MOST_ERROR_BYTES} bytes on standard error. Check what "
                "its login shell prints"
            )

    def _sender(self, pieces: Iterator[bytes], selector: selectors.BaseSelector) -> Callable[[], None]:
        """Return a function that writes the next bytes to standard input, and closes it after the last one."""
        stream = self._process.stdin
        assert stream
        waiting = b""

        def send() -> None:
            nonlocal waiting
            waiting = waiting or next(pieces, b"")
            try:
                if waiting:
                    num_bytes = os.write(stream.fileno(), waiting)
                    waiting = waiting[num_bytes:]
                    self._pace.moved(num_bytes)
                    return
            except BlockingIOError:
                return
            except BrokenPipeError:  # ssh has ended; its exit code says why
                pass
            selector.unregister(stream)
            with contextlib.suppress(BrokenPipeError):
                stream.close()

        return send


# ----------------------------------------------------------------------------------------------------------------------
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
class SshStore(ChunkStore):
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

    def look(self, upload: Upload) -> StoredState:
        lines = self.ask(LOOK, upload.path, upload.part, upload.chunks.num_bytes)
        return StoredState("dualtune there" in lines, _parsed(lines, "final"), _parsed(lines, "part"))

    def send(self, upload: Upload, runs: Sequence[range], patience: Patience) -> None:
        done = upload.chunks.num_bytes - sum(map(upload.chunks.bytes_in, runs))
        mode = "replace" if upload.force else "keep"
        finish = command(FINISH, upload.path, upload.part, upload.sha256, mode)
        lines: list[str] = []
        hashed = upload.chunks.num_bytes  # by FINISH, which prints nothing meanwhile
        for i, run in enumerate(runs):
            write = command(WRITE, upload.part, upload.chunks.chunk_bytes, run.start)
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
        listed = _parsed(self.ask(CHUNKS, path), "final")
        if listed and len(listed.sha256s) != -(-listed.num_bytes // listed.chunk_bytes):
            raise Cut(f"{self.host} listed {len(listed.sha256s)} chunks of a file of {listed.num_bytes} bytes")
        return listed

    def read(self, path: str, chunks: Chunks, run: range) -> Generator[bytes]:
        text = command(READ, path, chunks.chunk_bytes, run.start, len(run))
        with Connection([*self._arguments(), text], Pace(LEAST_DATA_BYTES, clock=self.clock)) as connection:
            yield from self._after_greeting(connection.exchange())
        self._raise_if_failed(connection)

    def _after_greeting(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield what follows the script's mark; a login shell may have printed something before it."""
        head, mark = bytearray(), START_OF_DATA
        for piece in pieces:
            searched = max(0, len(head) - len(mark))  # the mark may span two pieces
            head += piece
            if (start := head.find(mark, searched)) >= 0:
                yield bytes(head[start + len(mark) :])
                break
            if len(head) > MOST_GREETING_BYTES:
                raise self._too_much(MOST_GREETING_BYTES)
        yield from pieces

    def ask(self, script: str, *arguments: object) -> list[str]:
        """Run a script there, and return its lines; the last is `dualtune end`. Cut, DiskError or EnvironmentFault."""
        return self._run(command(script, *arguments))

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
        if code == NO_FILE:
            raise DiskError(f"{self.host}: cannot be written there: {message}. To resume, run the same command again")
        raise EnvironmentFault(f"{self.host}: the remote command failed, exit code {code}: {message or 'no message'}")


def _counted(pieces: Iterator[bytes], done: int, total: int, patience: Patience) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        done += len(piece)
        patience.show(done, total)


def _parsed(lines: list[str], name: str) -> Chunks | None:
    """Return what the script listed under a name, None if nothing."""
    matches = [match for line in lines if (match := _LINE.match(line)) and match[1] == name]
    sizes = [int(match[3]) for match in matches if match[2] == "bytes"]
    return Chunks(sizes[0], tuple(match[3] for match in matches if match[2] == "chunk")) if sizes else None


def _program() -> tuple[str, ...]:
    text = os.environ.get("DUALTUNE_SSH", "")
    try:
        return tuple(shlex.split(text)) or ("ssh",)
    except ValueError as error:
        raise ConfigError(f"DUALTUNE_SSH: got {text!r}, which is not a command line: {error}") from None

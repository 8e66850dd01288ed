"""A process of ssh and its three streams. Any of them may be large, stop moving, or never end."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
from collections.abc import Callable, Generator, Iterator
from typing import IO

from dualtune import interrupt
from dualtune.errors import EnvironmentFault
from dualtune.transfer.remotes.chunks import PIECE_BYTES
from dualtune.transfer.remotes.pace import Pace

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
        while process.poll() is None:
            interrupt.poll()
            self._pace.check()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)

    def error_text(self) -> str:
        """Return standard error on one line, without the statistics of dd."""
        text = self._errors.decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines()]
        kept = [line for line in lines if line and not _NUMBERS_OF_DD.fullmatch(line) and set(line) != {"@"}]
        return "".join(c if c.isprintable() else " " for c in "; ".join(kept[-6:]))[-600:]

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

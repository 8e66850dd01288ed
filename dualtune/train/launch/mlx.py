"""Start processes on this machine or on several Macs, with mlx.launch, over MLX's ring.

mlx.launch always ends with 0, forwards no signals, and waits forever for a rank that hangs. So this file reads what it
reports on each rank on standard error, signals its workers directly, and kills the rest after one has died.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import psutil

from dualtune.base.errors import ConfigError, EnvironmentFault, Preempted
from dualtune.engine.card import Card, launch_on

LOCAL = "127.0.0.1"
FIRST_PORT = 32323  # the default of mlx.launch
DIE_S, SAVE_S = 15.0, 120.0  # how long the others have to end after one rank has died, or has saved
_ENDED = re.compile(rb"Node with rank (\d+) (?:exited with code (-?\d+)|(completed)|(was killed))")


@dataclass(frozen=True, slots=True)
class MlxLaunch:
    """Starts workers with mlx.launch, on this machine or over ssh."""

    num_processes: int
    program: Path
    where: tuple[str, ...]  # options of mlx.launch that set the machines
    environment: Mapping[str, str] = field(default_factory=lambda: {})

    def command(self, worker: Sequence[str]) -> list[str]:
        # verbose: it also reports ranks that succeeded, so that silence does not count as success
        return [sys.executable, str(self.program), "--verbose", "--backend", "ring", *self.where, "--", *worker]

    def start(self, worker: Sequence[str]) -> MlxAttempt:
        pipe = subprocess.PIPE  # it forwards its standard input, which must not reach its end
        process = subprocess.Popen(self.command(worker), stdin=pipe, stderr=pipe, start_new_session=True)
        return MlxAttempt(process)


@dataclass
class MlxAttempt:
    """The processes of one start; their exit codes are read from the messages of mlx.launch."""

    process: subprocess.Popen[bytes]
    _codes: dict[int, int] = field(default_factory=lambda: {})
    _asked: bool = False
    _deadline: float | None = None
    _reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def ask_to_stop(self) -> None:
        """Signal the local ranks. A remote rank is stopped by ending its ssh, like with a closed terminal."""
        self._asked = True
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            if not children:
                self.process.kill()
            for child in children:
                child.send_signal(signal.SIGTERM if child.name() == "ssh" else signal.SIGUSR1)

    def poll(self) -> None:
        """Kill the remaining ranks some time after one has failed: they may wait for it forever."""
        failed = [code for code in self._codes.values() if code != 0]
        if failed and self._deadline is None:
            may_save = self._asked or all(code == Preempted.exit_code for code in failed)
            self._deadline = time.monotonic() + (SAVE_S if may_save else DIE_S)
        if self._deadline is not None and time.monotonic() > self._deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self.process.pid).children():
                    child.kill()

    def codes(self) -> dict[int, int]:
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()
        return self._codes

    def _read(self, stream: BinaryIO) -> None:
        tail = b""
        with contextlib.suppress(OSError):
            while data := os.read(stream.fileno(), 1 << 16):
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.buffer.write(data)
                    sys.stderr.buffer.flush()
                *lines, tail = (tail + data).split(b"\n")
                for line in lines:
                    self._note(line)
        self._note(tail)

    def _note(self, line: bytes) -> None:
        for rank, code, completed, _ in _ENDED.findall(line):
            self._codes[int(rank)] = 0 if completed else int(code or -signal.SIGTERM)


def launcher(platform: str, procs: int | None, hosts: str | None, hostfile: Path | None) -> tuple[MlxLaunch, str]:
    """Return the launcher, and a text on what it will start."""
    card, _ = launch_on("mlx", platform)
    program = _program(card)
    if hostfile is not None:
        return _by_hostfile(program, hostfile)
    if hosts is None:
        count = procs or 1
        where = ("-n", str(count), "--starting-port", str(_free_ports(count)))
        return MlxLaunch(count, program, where), f"{count} process{'es' if count > 1 else ''} on this machine"
    names = [name.strip() for name in hosts.split(",")]
    for name in names:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise ConfigError(
                f"--hosts: got {name!r}, allowed: IP addresses, for the ring and for ssh. Names for ssh go "
                "into a hostfile (see mlx.distributed_config --help): --hostfile FILE"
            ) from None
    count = len(names) * (procs or 1)
    where = ("--hosts", ",".join(names), "-n", str(procs or 1), "--starting-port", str(FIRST_PORT))
    return MlxLaunch(count, program, where), f"{count} processes on {len(names)} machines, over ssh"


def _by_hostfile(program: Path, hostfile: Path) -> tuple[MlxLaunch, str]:
    try:
        table: Any = json.loads(hostfile.read_text(encoding="utf-8"))
        listed = cast(list[Any], table["hosts"] if isinstance(table, dict) else table)
        addresses = [str(host["ips"][0]) for host in listed]
    except OSError as error:
        raise ConfigError(f"--hostfile: {hostfile} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f'--hostfile: {hostfile} is not a hostfile of mlx.launch: expected [{{"ssh": NAME, "ips": [ADDRESS]}}, …]. '
            "Write one with: mlx.distributed_config"
        ) from error
    if not addresses:
        raise ConfigError(f"--hostfile: {hostfile} lists no host")
    where = ("--hostfile", str(hostfile.absolute()), "--starting-port", str(FIRST_PORT))
    return MlxLaunch(len(addresses), program, where), f"{len(addresses)} processes, on the machines of {hostfile}"


def _program(card: Card) -> Path:
    next_to_python = Path(sys.executable).with_name("mlx.launch")
    program = next_to_python if next_to_python.is_file() else shutil.which("mlx.launch")
    if program is None:
        raise EnvironmentFault(f"mlx.launch was not found. It is part of {card}: {card.package.command}")
    return Path(program)


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports: mlx.launch would use the same ones for every run."""
    for first in range(FIRST_PORT, FIRST_PORT + 8192, max(count, 16)):
        with contextlib.ExitStack() as sockets:
            try:
                for port in range(first, first + count):
                    sockets.enter_context(socket.socket()).bind((LOCAL, port))
            except OSError:
                continue
            return first
    raise EnvironmentFault(f"no {count} consecutive free ports from {FIRST_PORT} on: end the programs that use them")

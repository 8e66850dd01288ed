"""Start processes with torchrun: on this machine only, or this machine's part of a run on several."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.engine.card import launch_on

SAVE_S = 120  # how long the others have to save and end after one process has ended


@dataclass(frozen=True, slots=True)
class Nodes:
    """This machine as one of several nodes."""

    count: int
    rank: int
    host: str  # of node 0, reachable from all nodes
    port: int

    @classmethod
    def parse(cls, count: int, rank: int, rendezvous: str) -> Nodes:
        host, colon, port = rendezvous.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"--rendezvous: got {rendezvous!r}, allowed: HOST:PORT of the machine with --node-rank 0")
        if not 0 <= rank < count:
            raise ConfigError(f"--node-rank: got {rank}, allowed: 0 to {count - 1} (--nodes is {count})")
        return cls(count, rank, host, int(port))


@dataclass(frozen=True, slots=True)
class Torchrun:
    """Starts workers with torchrun, on this machine or as one of several nodes."""

    agent: str  # the module to run: torchrun that also reports the exit codes of its workers
    num_processes: int
    nodes: Nodes | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: {})  # added to our environment

    def command(self, worker: Sequence[str]) -> list[str]:
        where = ["--standalone"]
        if self.nodes is not None:  # a static rendezvous, so that rank 0, which writes the run, is on node 0
            where = [f"--nnodes={self.nodes.count}", f"--node-rank={self.nodes.rank}"]
            where += [f"--master-addr={self.nodes.host}", f"--master-port={self.nodes.port}"]
        # We restart ourselves: torchrun would also restart a run that was preempted or has a wrong config.
        options = [f"--nproc-per-node={self.num_processes}", "--max-restarts=0", "--signals-to-handle=SIGQUIT"]
        return [sys.executable, "-P", "-m", self.agent, *where, *options, "--no-python", *worker]

    def start(self, worker: Sequence[str]) -> TorchrunAttempt:
        codes = tempfile.TemporaryDirectory(prefix="dualtune-launch-")
        environment = {
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_S),  # the default of torch is 30 s; the user may set another
            **os.environ,
            **self.environment,
            "DUALTUNE_EXIT_CODES": str(Path(codes.name) / "codes.json"),
        }
        # A separate session: a Ctrl-C in the terminal reaches the workers once, through us.
        process = subprocess.Popen(self.command(worker), env=environment, start_new_session=True)
        return TorchrunAttempt(process, codes)


@dataclass(slots=True)
class TorchrunAttempt:
    process: subprocess.Popen[bytes]
    _directory: tempfile.TemporaryDirectory[str]

    def ask_to_stop(self) -> None:
        self.process.send_signal(signal.SIGUSR1)  # torchrun forwards it

    def poll(self) -> None:
        pass

    def codes(self) -> dict[int, int]:
        with self._directory as place:
            path = Path(place) / "codes.json"
            if not path.is_file():
                return {}
            return {int(rank): int(code) for rank, code in json.loads(path.read_text(encoding="utf-8")).items()}


@dataclass(frozen=True, slots=True)
class Here:
    """The devices of this machine."""

    cores: int
    num_gpus: int
    gpu_problem: str | None = None  # why there is no GPU

    def launcher(self, platform: str, procs: int | None, nodes: Nodes | None) -> tuple[Torchrun, str]:
        """Return the launcher for a platform that torchrun can start, and a text on what was chosen and why."""
        card, launch = launch_on("local", platform)
        if not card.package.is_installed:
            missing = f"{launch.program} is part of {card}, which is missing"
            raise EnvironmentFault(f"{missing}: {card.package.command}")
        if platform == "cpu":
            return self._on_cpu(launch.agent, procs or 1, "as requested" if procs else "no --procs", nodes)
        if not self.num_gpus:
            because = f" ({self.gpu_problem})" if self.gpu_problem else ""
            raise EnvironmentFault(f"--platform cuda: no GPU was found{because}. Check with: dualtune check-gpu")
        if procs is not None and procs > self.num_gpus:
            allowed = f"1 to {self.num_gpus}, the GPUs of this machine; one process each"
            raise ConfigError(f"--procs: got {procs}, allowed: {allowed}")
        count = _counted(procs or self.num_gpus, "process")
        launcher = Torchrun(launch.agent, procs or self.num_gpus, nodes)
        return launcher, f"{count} (as requested)" if procs else f"{count}, one for each GPU"

    def _on_cpu(self, agent: str, procs: int, why: str, nodes: Nodes | None) -> tuple[Torchrun, str]:
        setting = os.environ.get("OMP_NUM_THREADS", "")
        threads = setting if setting.isdigit() else str(max(1, self.cores // procs))
        source = "OMP_NUM_THREADS is set" if setting.isdigit() else f"{self.cores} cores for {procs}"
        text = f"{_counted(procs, 'process')} ({why}), {_counted(int(threads), 'thread')} each ({source})"
        return Torchrun(agent, procs, nodes, {"OMP_NUM_THREADS": threads}), text


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"

"""Processes of one run on this machine, with the variables that torchrun gives its workers.

They are forked from a process that has torch and transformers loaded, so that a test takes no longer than its run.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

WAIT_S = 180  # after which a process no longer waits for another: what is broken fails, and does not hang
PROCESS = Path(__file__).with_name("torch_process.py")
FAULTS = Path(__file__).parents[1] / "faults" / "injection.py"


@dataclass
class Ended:
    """How one process of a run ended."""

    code: int
    output: str


@dataclass
class Running:
    """The processes of one run, and the files that they write their output to."""

    processes: list
    outputs: list[Path]

    def wait(self, seconds=1800) -> list[Ended]:
        for process in self.processes:
            process.join(seconds)
        said = [path.read_text(encoding="utf-8") for path in self.outputs]
        assert all(process.exitcode is not None for process in self.processes), "\n".join(said)
        return [Ended(process.exitcode, text) for process, text in zip(self.processes, said, strict=True)]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="session")
def start(tmp_path_factory, from_a_server):
    """Start `size` processes that each call `main` of a Python file, or a dualtune command.

    `inject`: {rank: lines of Python}, run before (see tests/faults/injection.py). Left over ones are killed at the end.
    """
    pytest.importorskip("torch")
    started = []

    def start_(size, *arguments, file=None, inject=None, env=None) -> Running:
        home = tmp_path_factory.mktemp("world")
        with socket.create_server(("127.0.0.1", 0)) as free:
            common = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
        env = {"DUALTUNE_WAIT_S": WAIT_S, **(env or {})}
        running = Running([], [home / f"{rank}.txt" for rank in range(size)])
        started.append(running)
        for rank in range(size):
            variables = env | common | {"RANK": rank, "LOCAL_RANK": rank}
            task = {
                "env": {**os.environ, **{name: str(value) for name, value in variables.items()}},
                "arguments": [str(argument) for argument in arguments],
                "file": file and str(file),
                "inject": FAULTS.read_text(encoding="utf-8") + (inject or {}).get(rank, ""),
                "output": str(running.outputs[rank]),
            }
            running.processes.append(from_a_server(PROCESS, task))
        return running

    yield start_
    for running in started:
        running.kill()

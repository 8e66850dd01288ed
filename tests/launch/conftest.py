"""A config that is only read, and launchers of processes that are not dualtune."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """A config file in the working directory; its run would be runs/first. Nothing of what it names exists."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DUALTUNE_DEVICE", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = tmp_path / "c.yaml"
    path.write_text("model: {name: m}\ndata: {train: t.jsonl}\nrun: {dir: runs/first}\n", encoding="utf-8")
    return path


@dataclass
class Program:
    """In place of `Work`: Python code that every process runs, with the number of the attempt as its argument."""

    code: str
    resumed: list[str] = field(default_factory=list)

    def first_resume(self) -> str:
        return "auto"

    def next_resume(self) -> str:
        return "auto"

    def command(self, resume=None) -> list[str]:
        self.resumed.append(resume)
        return [sys.executable, "-S", "-c", self.code, str(len(self.resumed))]


@dataclass
class Direct:
    """The simplest launcher: one process, and no program between."""

    num_processes: int = 1
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, worker):
        return list(worker)

    def start(self, worker):
        return DirectAttempt(subprocess.Popen(self.command(worker), start_new_session=True))


@dataclass
class DirectAttempt:
    process: subprocess.Popen

    def ask_to_stop(self) -> None:
        self.process.terminate()

    def poll(self) -> None:
        pass

    def codes(self) -> dict[int, int]:
        return {0: self.process.returncode}


@pytest.fixture
def program():
    return Program


@pytest.fixture
def direct():
    return Direct()

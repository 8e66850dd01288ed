"""A run in several processes, started as a user starts it, disturbed, and compared with one that was left alone.

These tests take minutes: `make test-cluster`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

DUALTUNE = [sys.executable, "-m", "dualtune.cli.main"]
STEPS = 30
STEP_S = 0.15  # so that there is time to disturb a run; the tiny model would be done at once
SLOW = f"""
import time
from dualtune.base import faults

reach = faults.reach


def slow(name):
    if name == "step":
        time.sleep({STEP_S})
    return reach(name)


faults.reach = slow
"""


@dataclass
class Run:
    """A small run with a config file of its own."""

    home: Path
    settings: dict[str, Any]
    name: str = "run"
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def dir(self) -> Path:
        return self.home / self.name

    @property
    def adapter(self) -> bytes:
        return (self.dir / "adapter" / "adapter_model.safetensors").read_bytes()

    @property
    def config_path(self) -> Path:
        return self.home / f"{self.name}.yaml"

    def config(self) -> Path:
        sections: dict[str, dict[str, Any]] = {}
        for key, value in (self.settings | {"run.dir": str(self.dir)}).items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        lines = [f"{section}: {json.dumps(fields)}\n" for section, fields in sections.items()]
        self.config_path.write_text("".join(lines))
        return self.config_path

    def command(self, *args: str) -> list[str]:
        return [*DUALTUNE, "launch", str(self.config()), *args]

    def env(self, *, slow: bool) -> dict[str, str]:
        place = self.home / "slow"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(SLOW)
        paths = [str(place)] if slow else []
        paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **self.environment}

    def launch(self, code: int, *args: str, env: dict[str, str] | None = None) -> str:
        """Run to the end, undisturbed. Returns what it said."""
        options = {"capture_output": True, "text": True, "timeout": 240, "check": False}
        result = subprocess.run(self.command(*args), env=env or self.env(slow=False), cwd=self.home, **options)
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout + result.stderr

    @contextmanager
    def started(self, *args: str) -> Iterator[subprocess.Popen[bytes]]:
        """A slow one, to be disturbed. Its output lies in `said`."""
        with (self.home / f"{self.name}.out").open("wb") as out:
            process = subprocess.Popen(self.command(*args), env=self.env(slow=True), stdout=out, stderr=out)
        try:
            yield process
        finally:
            family = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
            process.kill()
            process.wait()
            for child in family:
                if child.is_running():
                    child.kill()

    @property
    def said(self) -> str:
        return (self.home / f"{self.name}.out").read_text()

    def rows(self) -> list[dict[str, Any]]:
        path = self.dir / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def resumptions(self) -> int:
        return sum(row.get("event") == "resumed" for row in self.rows())

    def wait_for_step(self, step: int, limit_s: float = 240) -> None:
        deadline = time.monotonic() + limit_s
        while max((row["step"] for row in self.rows() if "lr" in row), default=0) < step:
            assert time.monotonic() < deadline, f"step {step} was not reached in {limit_s} s"
            time.sleep(0.05)

    def worker(self, variable: str, rank: int) -> psutil.Process:
        """The process of a rank, whoever has started it."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if words[3:5] == ["train", str(self.config_path)] and process.environ().get(variable) == str(rank):
                return process
        raise AssertionError(f"no process with {variable}={rank}")


def settings_of(model: Path, data: Path) -> dict[str, Any]:
    return {
        "model.name": str(model), "adapter.rank": 2, "adapter.alpha": 4, "adapter.dropout": 0.3,
        "adapter.targets": "all-linear", "data.train": str(data), "data.eval": 0, "data.max_length": 64,
        "train.steps": STEPS, "train.documents_per_step": 4, "train.micro_batch_tokens": 64,
        "train.learning_rate": 1e-2, "run.seed": 1, "run.log_every": 1, "run.save_every": 5,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path, tiny_llama, write_rows, qa_rows) -> Run:
    return Run(tmp_path, settings_of(tiny_llama, write_rows(qa_rows)))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The adapter of a run like this one, by the same launcher, that nothing happens to. Each kind is made once."""
    made: dict[tuple[str, ...], bytes] = {}

    def adapter(run: Run, *args: str) -> bytes:
        if args not in made:
            twin = Run(tmp_path_factory.mktemp("undisturbed"), run.settings)
            twin.launch(0, *args)
            assert not twin.resumptions()
            made[args] = twin.adapter
        return made[args]

    return adapter

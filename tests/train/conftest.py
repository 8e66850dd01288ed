"""Runs on tiny models, on the NumPy engine (everywhere) and on torch (where it is installed)."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dualtune.engine.backend import Backend
from dualtune.show.run import run
from dualtune.train.run import TrainResult


@dataclass
class Lab:
    """A backend, a model for it, and the way from overrides to a finished run."""

    backend: Backend
    model: Path
    data: Path
    make_config: Any
    tmp_path: Path

    def config(self, name="run", **overrides):
        settings = {"run.dir": self.tmp_path / name} | {key.replace("__", "."): v for key, v in overrides.items()}
        return self.make_config(self.data, settings, self.model)

    def run(self, name="run", hooks=(), resume="auto", **overrides) -> TrainResult:
        return run(self.config(name, **overrides), self.backend, hooks, resume=resume)


@pytest.fixture(params=["numpy", "torch"])
def lab(request, open_backend, make_config, write_rows, qa_rows, tmp_path) -> Lab:
    backend = open_backend(request.param)
    model = request.getfixturevalue("tiny_softmax" if request.param == "numpy" else "tiny_llama")
    return Lab(backend, model, write_rows(qa_rows), make_config, tmp_path)


@pytest.fixture(scope="session")
def rows_of():
    """(step rows, evaluation rows) of a run's metrics.jsonl."""

    def read(run_dir: Path) -> tuple[list[dict], list[dict]]:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if "loss" in row], [row for row in rows if "eval_loss" in row]

    return read


@pytest.fixture(scope="session")
def assert_some_are_lost():
    """Of rows of rollouts.jsonl: some conversations are lost, and the others are as in a run that lost none."""

    def check(good: list[dict], bad: list[dict]) -> None:
        failed = [row["reward"] is None for row in bad]
        assert 0 < sum(failed) < len(bad)
        for ours, theirs, is_lost in zip(bad, good, failed, strict=True):
            if is_lost:
                assert ours["advantage"] == 0 and ours["rewards"] == {"environment": None}
            else:
                assert (ours["completion"], ours["reward"]) == (theirs["completion"], theirs["reward"])

    return check


@pytest.fixture(scope="session")
def weights_of():
    """The bytes of a run's adapter."""

    def read(run_dir: Path) -> bytes:
        return (run_dir / "adapter" / "adapter_model.safetensors").read_bytes()

    return read


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package with this module and these entry points, as pip would leave it; until the test ends."""

    def install(code: str, points: str, name: str = "my_package") -> None:
        site, info = tmp_path / "site", tmp_path / "site" / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        as_ini = re.sub(r'\[project.entry-points."(.*)"\]', r"[\1]", points).replace('"', "")
        (info / "entry_points.txt").write_text(as_ini)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, name, raising=False)  # that of another test

    return install

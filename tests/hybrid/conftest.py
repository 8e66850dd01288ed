"""Runs with predictive training on tiny models: short phases, and a rate so low that predictions help."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dualtune.show.run import execute
from dualtune.train.hybrid.policy import Predictive
from dualtune.train.policies import policy_of
from dualtune.train.prepare import prepare
from dualtune.train.state import checkpoint
from dualtune.train.state.run_dir import open_run

SHORT = {
    "hybrid.enabled": True, "hybrid.warmup_steps": 4, "hybrid.full_steps": 6, "hybrid.correct_steps": 2,
    "hybrid.max_predict_steps": 8, "hybrid.probes": 4, "hybrid.trust_region": 9.0, "hybrid.gate": "none",
}  # fmt: skip
CALM = {
    "train.steps": 48, "train.learning_rate": 1e-3, "train.schedule": "constant", "train.warmup": 1,
    "train.documents_per_step": 12, "run.eval_every": None, "run.save_every": None, "run.keep": 99,
}  # fmt: skip


@dataclass
class Lab:
    """A backend with a model, and the way to a finished run whose policy can be asked."""

    backend: Any
    make: Any
    home: Path

    def prepared(self, name="run", saved=None, policy=None, **changes):
        settings = {"run.dir": self.home / name} | {key.replace("__", "."): value for key, value in changes.items()}
        return prepare(self.make(settings), self.backend, saved, policy=policy)

    def run(self, name="run", hooks=(), policy=None, **changes) -> "Ended":
        policies = []

        def make(config):
            policies.append((policy or policy_of(config))(config))
            return policies[-1]

        with open_run(self.prepared(name, **changes).config, "auto") as place:
            result = execute(self.prepared(name, place.saved, make, **changes), place, hooks)
        return Ended(result.run_dir, policies[-1])


@dataclass
class Ended:
    """A finished run."""

    path: Path
    policy: Predictive

    @property
    def rows(self):
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def events(self, *kinds):
        return [row for row in self.rows if row.get("event") in kinds]

    def updates(self):
        return [row["step"] for row in self.rows if "lr" in row]

    def saved(self, step):
        return checkpoint.read(checkpoint.path_of(self.path / "checkpoints", step))


@pytest.fixture
def lab_for(open_backend, make_config, write_rows, tmp_path, request):
    def make(name) -> Lab:
        model = request.getfixturevalue("tiny_softmax" if name == "numpy" else "tiny_llama")
        data = write_rows([{"prompt": f"{i} plus {i}?", "completion": f"{2 * i}{'!' * (i % 5)}"} for i in range(48)])
        return Lab(open_backend(name), lambda more: make_config(data, SHORT | CALM | more, model), tmp_path)

    return make


@pytest.fixture
def lab(lab_for) -> Lab:
    return lab_for("numpy")


@pytest.fixture(params=["numpy", "torch", "mlx"])
def any_lab(request, lab_for) -> Lab:
    return lab_for(request.param)

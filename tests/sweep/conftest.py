"""Sweeps of small configs, in this process."""

import json

import pytest
import yaml

SETTINGS = {
    "adapter": {"rank": 2, "alpha": 4, "dropout": 0, "targets": "all-linear"},
    "data": {"max_length": 64, "eval": 0.25},
    "train": {"steps": 8, "documents_per_step": 4, "learning_rate": 1e-2},
    "run": {"seed": 1, "eval_every": 2, "save_every": None, "report": False},
}


@pytest.fixture
def config_file(tmp_path, write_rows, qa_rows, tiny_softmax):
    """Write a config of this model (default: the NumPy engine's), with the run directory runs/it. Returns its path."""

    def write(model=tiny_softmax, **train):
        settings = json.loads(json.dumps(SETTINGS))
        settings["model"] = {"name": str(model)}
        settings["data"]["train"] = str(write_rows(qa_rows))
        settings["train"] |= train
        settings["run"]["dir"] = str(tmp_path / "runs" / "it")
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    return write


@pytest.fixture
def sweep(config_file, dualtune_main, tmp_path):
    """Run `dualtune sweep` on the NumPy engine. Returns what `dualtune_main` does."""

    def run(*args, platform="numpy", config=None):
        return dualtune_main("sweep", config or config_file(), "--platform", platform, *args)

    return run


@pytest.fixture
def home(tmp_path):
    """Where the runs of a sweep lie."""
    return tmp_path / "runs" / "it-sweep"

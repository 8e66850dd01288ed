"""The command line on a null GPU: a run with evaluation and checkpoints, its resume, and what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dualtune as package
from dualtune.base.errors import DeviceFault, FormatError
from dualtune.config import parse_config
from dualtune.show.run import run
from dualtune.train.hooks import Hook
from dualtune_torch.backend import TorchBackend

null_gpu = pytest.importorskip("null_gpu", reason="needs the null GPU: make test-null-gpu")

DEMO = Path(package.__file__).parent / "demo"
CONFIG = {
    "model": {"name": str(DEMO / "model")}, "data": {"train": str(DEMO / "data" / "train.jsonl")},
    "train": {"steps": 6}, "run": {"dir": "run", "save_every": 2, "eval_every": 3},
}  # fmt: skip


def dualtune(directory, *arguments):
    program = [sys.executable, "-m", "dualtune", *arguments]
    return subprocess.run(program, cwd=directory, capture_output=True, text=True)


def test_a_run_trains_evaluates_saves_and_resumes(tmp_path):
    """On the card with which torch does not prefer cuDNN, which is the real one here. All numbers are 0: training goes
    to its end, and only then is the adapter refused."""
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG))
    for begins in ("eval        0  loss 0.0000", "resume"):
        run = dualtune(tmp_path, "train", "config.yaml", "--platform", "cuda:1")
        assert begins in run.stdout, run.stdout + run.stderr
        assert "engine      torch on cuda:1, bfloat16" in run.stdout
        assert "kernels     fused: lora, attention, loss, lora_back_g" in run.stdout
        assert "A and B are all zeros; nothing is written" in run.stderr
    assert len([*(tmp_path / "run" / "checkpoints").iterdir()]) >= 2


def steps():
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "loss" in row]


class FailsAfter(Hook):
    """Lets the card fail when a step has been recorded."""

    def __init__(self, step):
        self.step = step

    def on_step(self, record):
        if record.step == self.step:
            null_gpu.set_failing(True)


def test_a_card_that_fails_in_training_ends_the_run_and_the_same_command_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, backend = parse_config(json.dumps(CONFIG)), TorchBackend("cuda:1")
    try:
        with pytest.raises(DeviceFault, match=r"in training \(CUDA error: unspecified launch failure\)"):
            run(config, backend, [FailsAfter(3)])
    finally:
        null_gpu.set_failing(False)  # as in a new process
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000002"]
    assert steps() == [1, 2, 3]
    try:
        with pytest.raises(FormatError, match="A and B are all zeros"):
            run(config, backend)
    finally:
        torch.cuda.set_device(0)
    assert steps() == [*range(1, 7)]


def test_both_cards_are_listed(tmp_path):
    found = dualtune(tmp_path, "check-gpu")
    assert found.returncode == 0, found.stdout
    assert (
        "GPU 0          Null GPU 9.0, 79.6 GiB" in found.stdout
        and "GPU 1          Null GPU 8.6, 24.0 GiB" in found.stdout
    )

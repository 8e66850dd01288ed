"""The whole journey by real commands: begun on MLX, carried over ssh with cuts, continued on torch, and back.

The machine at the other end has another home and other places for model and data. Every process is a command that a
user would type.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from dualtune.engine.testing.tolerances import RESUMED_LOSS
from dualtune.model.formats.directory import read_adapter

pytestmark = pytest.mark.journey
STEPS, HALF = 12, 6
KIB = 1 << 10


class Desk:
    """A machine as its user sees it: a home, and `dualtune` in it."""

    def __init__(self, home, **env):
        self.home, self._env = home, {"HOME": str(home), "DUALTUNE_CACHE": str(home / ".cache")} | env
        home.mkdir(exist_ok=True)

    def dualtune(self, *args) -> str:
        env = {key: value for key, value in os.environ.items() if key != "DUALTUNE_SSH"} | self._env
        command = [sys.executable, "-m", "dualtune.cli.main", *map(str, args)]
        options = {"capture_output": True, "text": True, "timeout": 1800, "check": False}
        done = subprocess.run(command, env=env, cwd=self.home, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def losses(self, run_dir) -> dict[int, float]:
        rows = map(json.loads, (self.home / run_dir / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture
def laptop(tmp_path, cluster, tiny_llama, open_backend):
    for backend in ("mlx", "torch"):
        open_backend(backend)  # skips where it is not installed
    desk = Desk(tmp_path / "laptop", DUALTUNE_SSH=cluster.ssh, DUALTUNE_DEVICE="mlx")
    shutil.copytree(tiny_llama, desk.home / "model")
    rows = [{"prompt": f"{i} plus {i}?", "completion": f"{2 * i}{'!' * (i % 5)}"} for i in range(16)]
    (desk.home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (desk.home / "config.yaml").write_text(
        f"""
model: {{name: {desk.home}/model, dtype: float32}}
adapter: {{rank: 16, alpha: 32, dropout: 0.3, targets: all-linear}}
data: {{train: {desk.home}/train.jsonl, eval: 0, max_length: 64}}
train: {{steps: {HALF}, documents_per_step: 4, learning_rate: 1.0e-3, schedule: constant, warmup: 0}}
run: {{dir: runs/first, seed: 1, save_every: 3}}
"""
    )
    return desk


@pytest.fixture
def there(cluster, tiny_llama, laptop):
    """The other machine: model and data lie elsewhere, and it reaches nobody."""
    desk = Desk(cluster.home, DUALTUNE_DEVICE="cpu")
    shutil.copytree(tiny_llama, desk.home / "models" / "tiny")
    shutil.copyfile(laptop.home / "train.jsonl", desk.home / "rows.jsonl")
    return desk


def test_a_run_travels_and_comes_home_as_if_it_had_stayed(laptop, there, cluster):
    laptop.dualtune("train", "config.yaml")
    laptop.dualtune("push", "cluster:inbox/adapter", "runs/first", "--adapter")
    cluster.relay.cuts[:] = [100 * KIB, 150 * KIB]
    said = laptop.dualtune("push", "cut:inbox/run", "runs/first", "--run")
    assert (cluster.relay.num_cut, said.count("retry       the connection to cut failed")) == (2, 2)
    assert sorted(path.name for path in (there.home / "inbox").rglob("*.*")) == ["bundle.tar", "bundle.tar"]

    # There: is it the same function, and then on with it.
    there.dualtune("pull", "inbox/adapter", "trial")
    assert "verdict: same: " in there.dualtune("verify", "trial/adapter", "--base", "models/tiny")
    said = there.dualtune("pull", "inbox/run", "runs/first")
    assert f"resume      dualtune train {there.home}/runs/first/config.yaml" in said
    there.dualtune(
        "train", "runs/first/config.yaml", "--resume", "auto", "--set", "run.dir=runs/first",
        "--set", "model.name=models/tiny", "--set", "data.train=rows.jsonl", "--set", f"train.steps={STEPS}",
    )  # fmt: skip
    assert there.losses("runs/first").keys() == {*range(HALF + 1, STEPS + 1)}  # none of them twice

    # And home again, with the connection lost once more.
    there.dualtune("push", "outbox", "runs/first", "--adapter")
    cluster.relay.cuts[:] = [50 * KIB]
    said = laptop.dualtune("pull", "cut:outbox", "trained")
    assert (cluster.relay.num_cut, said.count("retry       ")) == (3, 1)
    assert "verdict: same: " in laptop.dualtune("verify", "trained/adapter", "--base", "model")

    laptop.dualtune("train", "config.yaml", "--set", f"train.steps={STEPS}", "--set", "run.dir=runs/stayed")
    stayed, moved = laptop.losses("runs/stayed"), laptop.losses("runs/first") | there.losses("runs/first")
    assert [moved[step] for step in range(1, STEPS + 1)] == pytest.approx(
        [stayed[step] for step in range(1, STEPS + 1)], abs=RESUMED_LOSS
    )
    assert _largest_gap(laptop.home / "trained" / "adapter", laptop.home / "runs" / "stayed" / "adapter") < RESUMED_LOSS
    assert _largest_gap(laptop.home / "runs" / "first" / "adapter", laptop.home / "trained" / "adapter") > 1e-2


def _largest_gap(one, other) -> float:
    """Between the log-probabilities that two adapters recorded for the same prompts and tokens."""
    tops = [
        [dict(map(tuple, entry["top"])) for entry in read_adapter(path).metadata["fingerprints"]["adapter"]]
        for path in (one, other)
    ]
    gaps = [abs(a[token] - b[token]) for a, b in zip(*tops, strict=True) for token in a.keys() & b.keys()]
    assert len(gaps) >= 3 * len(tops[0])
    return max(gaps)

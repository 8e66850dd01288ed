"""Optimizers of other packages: the example of docs/backends.md, installed as pip would leave it."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.doctor.check_config import check_config
from dualtune.model.optimizer import OPTIMIZERS, installed_optimizer
from dualtune.show.run import run
from dualtune.train.hooks import Hook
from dualtune.use.transfer.bundles import names

ROWS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(12)]
PAGE = (Path(__file__).parents[2] / "docs" / "backends.md").read_text(encoding="utf-8")
WRONG = """
NUMBER = 3
DOTTED = Optimizer(update, slots=("../m",), defaults={"weight_decay": 0.0})
AVERAGE = Optimizer(update, slots=("offset",), defaults={"weight_decay": 0.0})
UNDECAYED = Optimizer(update, slots=(), defaults={})
"""


@pytest.fixture(autouse=True)
def my_package(install, monkeypatch):
    """The package of the page, with its entry point and these others."""
    section = PAGE.partition("### An optimizer from outside")[2]
    code, point = (re.findall(rf"```{kind}\n(.*?)```", section, re.S)[0] for kind in ("python", "toml"))
    others = (f"{name} = my_package:{name.upper()}" for name in ("number", "dotted", "average", "undecayed", "missing"))
    install(code + WRONG, point + "\n".join(others) + "\n")
    monkeypatch.setattr(OPTIMIZERS, "_installed", {})


class Stop(Hook):
    def on_step(self, record):
        if record.step == 3:
            raise KeyboardInterrupt


def test_a_run_learns_by_it_and_resumes_to_the_same_bits(lab, write_rows, rows_of, weights_of):
    lab = replace(lab, data=write_rows(ROWS, "rows.jsonl"))
    config = {
        "train__optimizer": "signs",
        "train__steps": 6,
        "train__learning_rate": 3e-3,
        "train__documents_per_step": 12,
        "run__save_every": 1,
    }
    straight = lab.run("straight", **config)
    losses = [row["loss"] for row in rows_of(straight.run_dir)[0]]
    assert losses[-1] < losses[0]
    with pytest.raises(KeyboardInterrupt):
        lab.run("killed", [Stop()], **config)
    killed = lab.run("killed", **config)
    assert weights_of(killed.run_dir) == weights_of(straight.run_dir)
    files = {path.name for path in (straight.run_dir / "checkpoints" / "step-00000006").iterdir()}
    assert "optimizer_m.safetensors" in files
    assert files <= names.files_of_checkpoint(files) | names.OPTIONAL_FILES
    with pytest.raises(ConfigError, match=r"train\.optimizer +signs +adamw"):
        lab.run("killed", **config | {"train__optimizer": "adamw", "train__steps": 8})


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_torch_and_mlx_take_the_same_steps(lab, open_backend, write_rows, rows_of):
    lab = replace(lab, data=write_rows(ROWS, "rows.jsonl"))
    config = {"train__optimizer": "signs", "train__steps": 3, "model__dtype": "float32", "train__average": "ema"}
    runs = [run(lab.config(name, **config), open_backend(name)) for name in ("torch", "mlx")]
    first, second = ([row["loss"] for row in rows_of(result.run_dir)[0]] for result in runs)
    assert first == pytest.approx(second, abs=2e-5)


def test_what_cannot_be_used_is_refused():
    for name, fault in [
        ("sings", "allowed: adamw"), ("number", "is a int"), ("dotted", "has the slot '../m'"),
        ("average", "has the slot 'offset'"), ("undecayed", "has no weight_decay"), ("missing", "cannot be loaded"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=fault):
            installed_optimizer(name)
    assert "signs" in OPTIMIZERS and "signs" not in [*OPTIMIZERS] and "sings" not in OPTIMIZERS
    w, slots = np.ones((2, 3)), {"m": np.zeros((2, 3))}
    settings = {**OPTIMIZERS["signs"].defaults}
    new, after = OPTIMIZERS["signs"].update(w, -w, slots, step=1, lr=0.5, settings=settings, xp=np)
    assert (new == 1.5).all() and after["m"] == pytest.approx(-0.1)


@pytest.mark.parametrize(("name", "level"), [("signs", "ok"), ("number", "fail")])
def test_check_config_looks_for_it(tmp_path, name, level):
    (tmp_path / "c.yaml").write_text("{model: {name: m}, data: {train: t}}")
    report = check_config(tmp_path / "c.yaml", [f"train.optimizer={name}"], platform="numpy")
    (row,) = [check for check in report.checks if check.name == "optimizer"]
    assert row.level == level

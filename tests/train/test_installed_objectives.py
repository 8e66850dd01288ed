"""Objectives of other packages: the example of docs/objectives.md, installed as pip would leave it."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.doctor.check_config import check_config
from dualtune.train.objectives.preference import Scores, installed_objective

PAIRS = [{"prompt": f"{n} + {n} =", "chosen": f" {2 * n}", "rejected": f" {2 * n + 1} or so"} for n in range(12)]
PAGE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
WRONG = """
class Bare:
    def __init__(self, config): ...

class Misnamed(PerTarget):
    name = "other"

class Three(PerTarget):
    name, answers = "three", 3

class Untrained(PerTarget):
    name, num_trained = "untrained", 0
"""


@pytest.fixture
def my_package(install):
    """The package of the page, with its entry point and these others."""
    (code,), (point,) = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S) for kind in ("python", "toml"))
    others = (f"{name.lower()} = my_package:{name}" for name in ("Bare", "Misnamed", "Three", "Untrained", "Missing"))
    install(code + WRONG, point + "\n".join(others) + "\n")


def config_with(objective, **preference):
    return parse_config(
        f"{{model: {{name: m}}, data: {{train: t}}, train: {{objective: {objective}}}, preference: {preference}}}"
    )


def test_the_page_s_objective_gets_the_config_and_returns_slopes(my_package):
    objective = installed_objective("per-target")(config_with("per-target", beta=0.5))
    logps_NA, num_targets_NA = np.array([[-2.0, -9.0], [-8.0, -3.0]]), np.array([[2, 3], [4, 1]])
    scores = Scores(logps_NA, num_targets_NA, np.full((2, 2), -4.0), np.zeros(2, np.int64))
    loss = objective(scores)
    margin_N = np.array([0.5 * (2 / 2 + 5 / 3), 0.5 * (-4 / 4 - 1 / 1)])
    assert loss.value == pytest.approx(np.log1p(np.exp(-margin_N)).mean())
    down_N = 1 / (1 + np.exp(margin_N))
    expected = 0.5 * down_N[:, None] * np.array([[-1 / 2, 1 / 3], [-1 / 4, 1 / 1]]) / 2
    np.testing.assert_allclose(loss.slopes_NA, expected, rtol=1e-12)
    assert loss.metrics == {"reward_margin": pytest.approx(margin_N.mean())}


@pytest.mark.parametrize("name", ["per-taget", "bare", "misnamed", "three", "untrained", "missing"])
def test_an_objective_that_cannot_be_used_is_refused(my_package, name, wording):
    with pytest.raises(ConfigError) as error:
        installed_objective(name)(config_with(name))
    wording(str(error.value))
    assert f"train.objective: {name}" in str(error.value) or "allowed: sft, dpo" in str(error.value)


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_the_page_s_objective_trains_a_run_and_its_resume(lab, my_package, write_rows, rows_of, weights_of):
    lab = replace(lab, data=write_rows(PAIRS, "pairs.jsonl"))
    config = {"train__objective": "per-target", "train__documents_per_step": 4, "train__schedule": "constant",
              "train__learning_rate": 0.01, "run__save_every": 2, "run__log_every": 1}  # fmt: skip
    straight = lab.run("straight", train__steps=4, **config)
    rows = rows_of(straight.run_dir)[0]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the start is the reference
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["reward_margin"] > 0
    lab.run("resumed", train__steps=2, **config)
    resumed = lab.run("resumed", train__steps=4, **config)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)


def test_check_config_asks_for_the_objective(my_package, tmp_path):
    (tmp_path / "c.yaml").write_text("model: {name: nowhere}\ndata: {train: t}\n")
    found = {}
    for name in ("dpo", "per-target", "per-taget"):
        report = check_config(tmp_path / "c.yaml", [f"train.objective={name}"], platform="numpy")
        found[name] = [(check.name, check.level) for check in report.checks if check.name in ("objective", "schema")]
    assert found["dpo"] == [("schema", "ok")] and found["per-taget"] == [("schema", "fail")]
    assert found["per-target"] == [("schema", "ok"), ("objective", "ok")]

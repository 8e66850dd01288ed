"""Step policies and hooks of other packages: the examples of docs/hooks.md, installed as pip would leave them."""

import re
from pathlib import Path

import pytest
import safetensors.numpy

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.doctor.check_config import check_config
from dualtune.train.policies import policy_of

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
WRONG = """
class Nothing:
    def __init__(self, config): ...

class Misnamed:
    num_probes = take = state = load_state = 0
    name = "other"
    def __init__(self, config): ...
"""
CONFIG = {"train__steps": 12, "train__learning_rate": 1.0, "train__schedule": "constant", "train__warmup": 1,
          "train__documents_per_step": 1, "run__save_every": 6}  # fmt: skip


@pytest.fixture
def my_package(install):
    """The package of the page, with the entry points of the page and these others."""
    code, points = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S) for kind in ("python", "toml"))
    others = "nothing = my_package:Nothing\nmisnamed = my_package:Misnamed\nmissing = my_package:Missing\n"
    install("\n".join(code) + WRONG, "\n".join(points) + others)


def test_the_page_s_hook_sees_the_gradients_of_a_run(lab, my_package):
    result = lab.run(train__steps=2)
    rows = [line.split() for line in (result.run_dir / "gradients.txt").read_text().splitlines()]
    adapter = safetensors.numpy.load_file(result.run_dir / "adapter" / "adapter_model.safetensors")
    assert {step for step, *_ in rows} == {"1", "2"} and len(rows) == 2 * len(adapter)
    assert max(float(largest) for *_, largest in rows) > 0


def test_the_page_s_policy_decides_the_steps_of_a_run_and_of_its_resume(lab, my_package, rows_of, weights_of):
    straight = lab.run("straight", train__policy="agreeing", **CONFIG)
    taken = [row["step"] for row in rows_of(straight.run_dir)[0]]
    assert 1 in taken and 1 < len(taken) < 12  # some were left out
    ordinary = lab.run("ordinary", **CONFIG)
    assert [row["step"] for row in rows_of(ordinary.run_dir)[0]] == [*range(1, 13)]
    assert weights_of(straight.run_dir) != weights_of(ordinary.run_dir)
    lab.run("resumed", train__policy="agreeing", **CONFIG | {"train__steps": 6})
    resumed = lab.run("resumed", train__policy="agreeing", **CONFIG)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)


@pytest.mark.parametrize("name", ["agreable", "nothing", "misnamed", "missing"])
def test_a_policy_that_cannot_be_used_is_refused(lab, my_package, name, wording):
    with pytest.raises(ConfigError) as error:
        lab.run(train__policy=name)
    wording(str(error.value))
    assert f"train.policy: {name}" in str(error.value) or "allowed: auto, agreeing" in str(error.value)


def test_check_config_asks_for_the_policy(my_package, tmp_path):
    (tmp_path / "c.yaml").write_text("model: {name: nowhere}\ndata: {train: t}\n")
    found = {}
    for name in ("auto", "agreeing", "agreable"):
        report = check_config(tmp_path / "c.yaml", [f"train.policy={name}"], platform="numpy")
        found[name] = [check.level for check in report.checks if check.name == "policy"]
    assert found == {"auto": [], "agreeing": ["ok"], "agreable": ["fail"]}


def test_predictive_training_is_a_policy_of_its_own():
    text = "{model: {name: m}, data: {train: t}, hybrid: {enabled: true}, train: {policy: agreeing}}"
    with pytest.raises(ConfigError, match=r"train\.policy: got agreeing, but hybrid\.enabled"):
        parse_config(text)
    assert policy_of(parse_config("{model: {name: m}, data: {train: t}}")).name == "ordinary"

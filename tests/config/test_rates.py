"""The usual learning rate of a method, an optimizer and an objective: in the starter config, and in what is said."""

from pathlib import Path

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import default_yaml, parse_config, to_yaml
from dualtune.config.combinations import PREFERENCE_KEYS
from dualtune.config.rates import OBJECTIVES, far_rate, usual_rate
from dualtune.doctor.check_config import rate_rows

DEFAULT = default_yaml()


def config(*overrides):
    return parse_config(DEFAULT, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "rate", "num_reasons"),
    [
        ([], 2e-4, 0),
        (["adapter.method=dora"], 2e-4, 0),
        (["train.objective=dpo"], 2e-5, 1),
        (["train.objective=orpo"], 1e-4, 1),
        (["adapter.method=full"], 2e-5, 1),
        (["adapter.init=pissa"], 4e-5, 1),
        (["adapter.method=full", "train.optimizer=lion"], 4e-6, 2),
        (["adapter.method=full", "train.objective=kto"], 2e-6, 2),
    ],
)
def test_the_starter_has_the_usual_rate_and_says_why(overrides, rate, num_reasons):
    text = default_yaml(overrides)
    written = parse_config(text)
    assert written.train.learning_rate == rate
    expected = config(*overrides, f"train.learning_rate={rate}")
    assert written == expected
    reasons = usual_rate(expected).reasons
    assert len(reasons) == num_reasons
    comment = " ".join(line.strip(" #") for line in text.splitlines() if line.startswith("  #"))
    assert all(reason in comment for reason in reasons)
    assert ("Less than for LoRA" in comment) == bool(reasons)


@pytest.mark.parametrize(
    ("section", "rate"),
    [
        ("adapter: {rank: 8}", 2e-4), ("train: {objective: dpo}", 2e-5), ("adapter: {method: full}", 2e-5),
        ("train: {objective: dpo, learning_rate: 0.0002}", 2e-4), ("train: {optimizer: sgd}", 2e-4),
    ],
)  # fmt: skip
def test_a_config_that_names_no_rate_has_the_usual_one(section, rate):
    text = f"model: {{name: m}}\ndata: {{train: t.jsonl}}\n{section}\n"
    written = parse_config(text)
    assert written.train.learning_rate == rate
    assert parse_config(text, overrides=["train.learning_rate=0.5"]).train.learning_rate == 0.5
    assert parse_config(to_yaml(written)) == written


def test_a_rate_that_is_given_stays():
    assert parse_config(default_yaml(["train.objective=dpo", "train.learning_rate=0.5"])).train.learning_rate == 0.5


@pytest.mark.parametrize(
    ("more", "dropout", "rewards"),
    [([], 0, ("exact",)), (["rollouts.rewards=[number]"], 0, ("number",)), (["rollouts.environment=e.py:E"], 0, ())],
)
def test_the_starter_of_training_on_samples_has_what_it_needs(more, dropout, rewards):
    starter = parse_config(default_yaml(["train.objective=grpo", *more]))
    assert (starter.adapter.dropout, starter.rollouts.rewards) == (dropout, rewards)


def test_the_starter_names_the_key_that_is_missing():
    with pytest.raises(ConfigError, match=r"^the default config:\d+: distill\.teacher: "):
        default_yaml(["train.objective=on_policy_distill"])


def test_every_objective_of_the_schema_is_known_and_others_get_no_rate():
    assert OBJECTIVES.keys() == PREFERENCE_KEYS.keys()
    plain = config("train.learning_rate=9")
    changes = ({"optimizer": "sgd"}, {"objective": "that of another package"})
    for train in (plain.train.model_copy(update=change) for change in changes):
        other = plain.model_copy(update={"train": train})
        assert usual_rate(other) is None and far_rate(other) is None


@pytest.mark.parametrize(
    ("overrides", "is_far"),
    [
        (["train.learning_rate=0.1"], False),  # of plain LoRA nothing is said
        (["adapter.method=full", "train.learning_rate=1.9e-4"], False),
        (["adapter.method=full", "train.learning_rate=2e-4"], True),
        (["train.objective=dpo", "train.learning_rate=1e-4"], False),
        (["train.objective=dpo", "train.learning_rate=1e-3"], True),
    ],
)
def test_a_rate_far_above_the_usual_one_is_said(overrides, is_far):
    found = config(*overrides)
    assert (far_rate(found) is not None) == is_far
    assert [row.level for row in rate_rows(found)] == ["advice"] * is_far


@pytest.mark.parametrize(("rate", "is_said"), [(1e-3, True), (1e-5, False)])
def test_a_run_says_it(rate, is_said, make_config, write_rows, tiny_softmax, open_backend):
    from dualtune.train.run import run

    pairs = [{"prompt": f"{i}", "chosen": "yes", "rejected": "no"} for i in range(8)]
    settings = {"train.objective": "dpo", "train.learning_rate": rate, "train.steps": 1}
    made = make_config(write_rows(pairs), settings, tiny_softmax)
    run(made, open_backend("numpy"))
    assert (far_rate(made) is not None) == is_said
    rows = Path(made.run.dir, "metrics.jsonl").read_text(encoding="utf-8")
    assert ("times what is usual" in rows) == is_said

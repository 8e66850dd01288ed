"""The presets, what the config sets instead, and what it may not."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from dualtune.base.errors import ConfigError
from dualtune.cli import train
from dualtune.config import parse_config, to_yaml
from dualtune.train.hybrid.settings import PRESETS, Settings, settings_of

BASE = "{model: {name: m}, data: {train: t}}"


def config_with(*overrides):
    return parse_config(BASE, overrides=[f"hybrid.{line}" for line in overrides])


@pytest.mark.parametrize(
    ("preset", "numbers"),
    [("balanced", (0.60, 50, 15)), ("conservative", (0.60, 50, 15)), ("aggressive", (0.55, 75, 10))],
)
def test_a_preset_has_these_numbers(preset, numbers):
    found = settings_of(config_with(f"preset={preset}"))
    assert (found.confidence_threshold, found.max_predict_steps, found.correction_interval) == numbers
    assert (found.warmup_steps, found.full_steps, found.divergence_threshold) == (100, 20, 3.0)
    assert (found.max_consecutive_predicts, found.probes, found.trust_region) == (5, 8, 0.25)


def test_what_the_config_sets_replaces_the_preset_s_value_and_survives_yaml():
    config = config_with("preset=aggressive", "max_predict_steps=7", "engine=fast_forward", "probes=3")
    found = settings_of(parse_config(to_yaml(config)))
    assert (found.max_predict_steps, found.probes, found.confidence_threshold) == (7, 3, 0.55)
    assert found.engine == "fast_forward" and not found.skips_steps


@pytest.mark.parametrize(
    "wrong",
    ["warmup_steps=0", "full_steps=3", "confidence_threshold=0", "confidence_threshold=1", "confidence_threshold=-0.1",
     "divergence_threshold=0", "divergence_threshold=-2", "max_predict_steps=0", "correction_interval=0",
     "correct_steps=0", "probes=1", "trust_region=0", "max_consecutive_predicts=0", "preset=bold", "engine=guess"],
)  # fmt: skip
def test_a_value_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"hybrid.{wrong.partition('=')[0]}"):
        config_with(wrong)


def test_the_page_has_the_presets_of_the_code():
    page = (Path(__file__).parents[2] / "docs/hybrid.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M))
    names = [each.name for each in fields(Settings) if each.name not in ("engine", "gate", "offload")]
    for name in names:
        values = [f"{getattr(PRESETS[preset], name):g}" for preset in ("conservative", "balanced", "aggressive")]
        assert rows[name].split(" | ")[:3] == values, name


@pytest.mark.parametrize("average", ["schedule=schedule_free", "average=tail"])
def test_an_average_that_would_not_follow_a_prediction_is_refused(average):
    with pytest.raises(ConfigError, match=r"hybrid\.enabled: got true, but the average of .* would not follow"):
        parse_config(BASE, overrides=["hybrid.enabled=true", f"train.{average}"])


def test_the_option_of_train_is_short_for_two_keys(dualtune_main, tmp_path):
    (tmp_path / "c.yaml").write_text("model: {name: m}\ndata: {train: missing.jsonl}\n")
    assert PRESETS.keys() == {*train.PRESETS}
    refused = dualtune_main("train", tmp_path / "c.yaml", "--hybrid", "conservative", "--set", "train.average=tail")
    assert refused.returncode == 2 and "hybrid.enabled: got true" in refused.stderr


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["hybrid.engine=schedule_free"], ("schedule_free", "none")),
        (["hybrid.engine=schedule_free", "train.schedule=schedule_free"], ("schedule_free", "none")),
        (["hybrid.engine=average"], ("constant", "tail")),
        (["hybrid.engine=average", "train.average=ema", "train.schedule=linear"], ("linear", "ema")),
        (["hybrid.engine=average", "hybrid.probes=auto", "hybrid.preset=balanced"], ("constant", "tail")),
        (["hybrid.engine=average", "hybrid.enabled=false"], ("cosine", "none")),
    ],
)
def test_two_engines_are_short_for_keys_of_train(overrides, expected):
    config = parse_config(BASE, overrides=["hybrid.enabled=true", *overrides])
    assert (config.train.schedule, config.train.average) == expected and not config.hybrid.enabled
    assert parse_config(to_yaml(config)) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hybrid.engine=schedule_free", "train.schedule=linear"],
         "got schedule_free, which is short for train.schedule: schedule_free, but train says otherwise"),
        (["hybrid.engine=average", "train.average=none"], "short for train.schedule: constant and train.average: tail"),
        (["hybrid.engine=average", "hybrid.probes=4"], "hybrid.probes.*got 4, but it has no effect with hybrid.en"),
        (["hybrid.engine=average", "hybrid.preset=aggressive"], "hybrid.preset.*got aggressive, but it has no effect"),
        (["hybrid.engine=schedule_free", "train.average=ema"], "train.average.*got ema"),
        (["hybrid.engine=schedule_free", "train.optimizer=sgd"], "train.optimizer.*got sgd"),
    ],
)  # fmt: skip
def test_such_an_engine_may_not_contradict_train(overrides, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(BASE, overrides=["hybrid.enabled=true", *overrides])

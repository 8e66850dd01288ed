"""`--set section.key=value`: what it changes, and how its faults are reported."""

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config

MINIMAL = "model:\n  name: m\ndata:\n  train: t\n"


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="c.yaml", overrides=overrides)
    return str(caught.value)


def with_(line: str) -> str:
    """The minimal config with a line of one more section, line 5: `section: {key: value}`."""
    return MINIMAL + line + "\n"


def test_overrides_win_over_the_file_and_the_last_one_over_the_others() -> None:
    text = with_("train: {steps: 5, epochs: 2}")
    config = parse_config(text, overrides=["train.steps=6", "train.steps=7", "train.learning_rate=1e-3"])
    assert (config.train.steps, config.train.epochs, config.train.learning_rate) == (7, 2.0, 1e-3)


def test_overrides_create_sections() -> None:
    config = parse_config("run:\n", overrides=["model.name=m", "data.train=t", "run.seed=7", "hybrid.enabled=true"])
    assert (config.model.name, config.run.seed, config.hybrid.enabled) == ("m", 7, True)


def test_an_override_reaches_into_a_mapping() -> None:
    text = f"{MINIMAL}  columns: {{prompt: q, completion: a}}\n"
    config = parse_config(text, overrides=["data.columns.prompt=question"])
    assert config.data.columns == {"prompt": "question", "completion": "a"}


def test_an_override_takes_yaml() -> None:
    overrides = ["adapter.targets=[a, b]", "data.columns={prompt: q}", "data.eval=null", "run.dir=a=b"]
    config = parse_config(MINIMAL, overrides=overrides)
    assert config.adapter.targets == ("a", "b")
    assert (config.data.columns, config.data.eval, config.run.dir) == ({"prompt": "q"}, None, "a=b")


def test_a_single_word_is_a_list_of_one_where_only_a_list_is_allowed(wording) -> None:
    run = parse_config(MINIMAL, overrides=["run.track=trackio", "run.sample_prompts=Two words."]).run
    assert (run.track, run.sample_prompts) == (("trackio",), ("Two words.",))
    wording(error_of(MINIMAL, "run.track=neptune"))
    wording(error_of(MINIMAL, "adapter.targets=q_proj"))


def test_an_override_heals_a_wrong_value_in_the_file() -> None:
    assert parse_config(with_("adapter: {rank: 0}"), overrides=["adapter.rank=8"]).adapter.rank == 8


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=0", "--set train.steps: got 0, must be an integer >= 1 or null"),
        ("train.stepz=1", "--set train.stepz: unknown key. Did you mean 'steps'?"),
        ("steps=1", "--set steps: unknown key. It belongs to a section: 'train.steps'"),
        ("data.columns={a: 1}", "--set data.columns: data.columns.a: got 1, must be a name"),
        ("data.columns={a: b, a: c}", "--set data.columns: data.columns.a: given twice, first at --set data.columns"),
        ("adapter.targets=[q, 1]", "--set adapter.targets: adapter.targets[1]: got 1, must be a name"),
        ("adapter.rank.x=1", "--set adapter.rank.x: 'adapter.rank' is a value, not a section"),
        (
            "adapter.alpha.x=1",
            "--set adapter.alpha.x: adapter.alpha: got a mapping, must be a number >= 1e-09 and <= 1e+09",
        ),
        ("train.steps", "--set train.steps: must have the form section.key=value, such as train.steps=100"),
        ("=1", "--set =1: must have the form"),
        ("train..steps=1", "--set train..steps=1: must have the form"),
        ("train.steps=", "--set train.steps: has no value; write null for none, '' for an empty string"),
        ("train.steps=[", "--set train.steps: not valid YAML: "),
        ("model.name=!!python/object:x y", "--set model.name: tag !!python/object:x is not allowed"),
    ],
)
def test_a_faulty_override_is_reported_like_a_faulty_line(override: str, message: str) -> None:
    error = error_of(with_("adapter: {rank: 4}"), override)
    assert error.startswith(message)
    assert "\n" not in error


def test_an_override_of_a_mapping_forgets_the_lines_of_the_file(wording) -> None:
    text = f"{MINIMAL}  columns: {{a: b}}\n"
    wording(error_of(text, "data.columns={a: 1}"))

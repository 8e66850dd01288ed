"""Sources of data: one or several, bare paths and mappings, and what everybody else sees of them."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from dualtune.base.errors import ConfigError
from dualtune.config import Config, SourceConfig, default_yaml, get_value, json_schema, parse_config, to_yaml
from dualtune.config.advice import FOREIGN_SOURCE_KEYS
from dualtune.engine.backend import OptimizerState
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.resume import check_config, table

MAPPING = "a mapping (keys: path, weight, format, columns, subset, split, roles, consecutive)"
HUB = "{path: openai/gsm8k, columns: {prompt: question, completion: answer}, subset: main, split: train}"
THREE = f"[{{path: a.jsonl, weight: 2}}, b.parquet, {HUB}]"


def text_of(data: str) -> str:
    """A config with these lines in its section data, from line 3 on."""
    return "model: {name: m}\ndata:\n  " + data.replace("\n", "\n  ") + "\n"


def config_of(data: str, *overrides: str) -> Config:
    return parse_config(text_of(data), source="c.yaml", overrides=overrides)


def errors_of(data: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_of(data, *overrides)
    return str(caught.value).splitlines()


# --- What the readers see --------------------------------------------------------------------------------------------


REST = {"roles": {}, "consecutive": "join"}  # of the section


def test_a_string_a_mapping_and_a_list_give_sources() -> None:
    plain = SourceConfig(path="a", format="auto", columns={}, **REST)
    assert config_of("train: a").data.sources() == (plain,)
    assert config_of("train: {path: a}").data.sources() == (plain,)
    assert config_of("train: [a]").data.sources() == (plain,)
    assert config_of(f"train: {THREE}").data.sources() == (
        SourceConfig(path="a.jsonl", weight=2, format="auto", columns={}, **REST),
        SourceConfig(path="b.parquet", format="auto", columns={}, **REST),
        SourceConfig(
            path="openai/gsm8k",
            subset="main",
            split="train",
            format="auto",
            columns={"prompt": "question", "completion": "answer"},
            **REST,
        ),
    )


def test_a_source_takes_format_and_columns_of_the_section_unless_it_has_its_own() -> None:
    train = "train: [a, {path: b, format: text}, {path: c, columns: {}}, {path: d, columns: {text: t}}]"
    sources = config_of(f"format: alpaca\ncolumns: {{output: o}}\n{train}").data.sources()
    assert [(source.format, source.columns) for source in sources] == [
        ("alpaca", {"output": "o"}),
        ("text", {"output": "o"}),
        ("alpaca", {}),
        ("alpaca", {"text": "t"}),
    ]


@pytest.mark.parametrize(("given", "share"), [("auto", 0.1), ("0.1", 0.1), ("0.25", 0.25), ("0", 0), ("null", 0)])
def test_a_share_is_no_eval_source(given: str, share: float) -> None:
    data = config_of(f"train: t\neval: {given}").data
    assert (data.eval_sources(), data.held_out_share) == ((), share)
    assert config_of("train: t\neval: e").data.held_out_share == 0


def test_the_default_that_an_older_version_wrote_out_is_the_default() -> None:
    text = to_yaml(config_of("train: t\neval: 0.1"))
    assert parse_config(text).data.eval == 0.1
    new = [line for line in text.splitlines() if line.split(":")[0].strip() in ("roles", "consecutive", "system")]
    old = "\n".join(line for line in text.splitlines() if line not in new)
    assert len(new) == 3
    assert parse_config(old).data.eval == "auto"
    assert parse_config(old.replace("eval: 0.1", "eval: 0.2")).data.eval == 0.2
    assert config_of("train: t\neval: 0.1\nmax_length: 64").data.eval == 0.1  # not every key: the user's own


@pytest.mark.parametrize("given", ["e", "{path: e}", "[e]"])
def test_eval_data_gives_sources_like_training_data(given: str) -> None:
    data = config_of(f"train: t\nformat: text\neval: {given}").data
    assert data.eval_sources() == (SourceConfig(path="e", format="text", columns={}, **REST),)


def test_it_is_known_whether_the_user_chose_the_held_out_share() -> None:
    assert "eval" not in config_of("train: t").data.model_fields_set
    assert "eval" in config_of("train: t\neval: 0.1").data.model_fields_set
    assert "eval" in config_of("train: t", "data.eval=0.1").data.model_fields_set


def test_overrides_take_paths_lists_and_keys_of_a_source() -> None:
    assert config_of("train: [a, b]", "data.train=x.jsonl").data.train == "x.jsonl"
    assert config_of("train: a", "data.train=[a.jsonl, b.jsonl]").data.train == ("a.jsonl", "b.jsonl")
    config = config_of("train: {path: a, weight: 2}", "data.train.weight=0.5")
    assert get_value(config, "data.train.weight") == 0.5


# --- How they are written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", ["a.jsonl", "{path: a.jsonl}", "[a.jsonl]", "[{path: a.jsonl, weight: 2}, b]", THREE])
def test_a_written_config_says_what_the_user_wrote(train: str) -> None:
    config = config_of(f"train: {train}\neval: [{{path: e, split: test}}]")
    text = to_yaml(config)
    assert parse_config(text) == config
    assert f"\n  train: {train}\n  eval: [{{path: e, split: test}}]\n" in text


def test_the_default_text_explains_the_keys_of_a_source() -> None:
    lines = default_yaml().splitlines()
    at = lines.index(
        "#   weight: How often its documents are used per epoch: 0.5 uses half of them, 2 uses each twice."
    )
    assert at < lines.index("data:")
    assert [line.split(":")[0] for line in lines[at - 1 : at + 7]] == [
        f"#   {key}" for key in SourceConfig.model_fields
    ]


@pytest.mark.parametrize(
    ("train", "is_valid"),
    [
        ("a", True),
        ({"path": "a", "weight": 2, "columns": None}, True),
        (["a", {"path": "b"}], True),
        ([], False),
        ({"path": "a", "wieght": 2}, False),
        ([{"weight": 2}], False),
        ([{"path": "a", "weight": 0}], False),
    ],
)
def test_the_json_schema_agrees_with_the_config(train: object, is_valid: bool) -> None:
    data = {"model": {"name": "m"}, "data": {"train": train}}
    assert Draft202012Validator(json_schema()).is_valid(data) is is_valid
    if is_valid:
        assert Config.model_validate(data)
    else:
        with pytest.raises(ValidationError):
            Config.model_validate(data)


def checkpoint_of(config: dict[str, Any]) -> Checkpoint:
    return Checkpoint(Path("c"), 1, {}, OptimizerState(1, {}), {"config": config})


def test_a_changed_list_is_shown_as_json() -> None:
    before = config_of("train: a.jsonl").model_dump(mode="json")
    now = config_of("train: [{path: a.jsonl, weight: 2}, é.jsonl]\npacking: false\non_bad_row: skip")
    changes = check_config(checkpoint_of(before), now)
    assert [line.split(maxsplit=2) for line in table(changes).splitlines()[1:]] == [
        ["data.train", "a.jsonl", '[{"path": "a.jsonl", "weight": 2.0}, "é.jsonl"]  recorded'],
        ["data.on_bad_row", "error", "skip                                             recorded"],
    ]


def test_a_path_compares_equal_to_that_of_an_older_checkpoint() -> None:
    before = config_of("train: a.jsonl").model_dump(mode="json")
    assert before["data"]["train"] == "a.jsonl"
    for key in ("on_bad_row", "max_bad_rows"):
        del before["data"][key]
    assert not check_config(checkpoint_of(before), config_of("train: a.jsonl"))


# --- Faults ----------------------------------------------------------------------------------------------------------


def test_every_fault_in_a_list_of_sources_has_its_line(wording) -> None:
    data = """\
train:
  - good.jsonl
  - {path: b, wieght: 2}
  - 3
  - {weight: 0}
  - {path: c, format: msg}
  - path: d
    path: e
    columns: 3
  - [f]
  - {path: g, columns: {prompt: 3}}
  - {path: h, split: }
"""
    wording(errors_of(data))


@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{path: a, wieght: 1}", "{key}.wieght: unknown key. Did you mean 'weight'?"),
        ("[{path: a, ds_type: x}]", "{key}[0].ds_type: unknown key. Did you mean 'format'?"),
        ("[{path: a, name: x}]", "{key}[0].name: unknown key. Did you mean 'subset'?"),
        (
            "[{path: a, Max-Length: 5}]",
            "{key}[0].Max-Length: unknown key. Set it for all sources: 'data.max_length'",
        ),
        (
            "[{path: a, zzz: x}]",
            "{key}[0].zzz: unknown key. Allowed here: path, weight, format, columns, subset, split, roles, consecutive",
        ),
        ("{path: a, SourceConfig: 1}", "{key}.SourceConfig: unknown key. Allowed here: path,"),
        ("{path: a, constrained-str: 1}", "{key}.constrained-str: unknown key. Allowed here: path,"),
        ("{path: a, weight: '2'}", "{key}.weight: got '2', must be a number > 0"),
        ("{}", "{key}.path: missing; 'data.{key}' needs it: a path, such as `path: data/train.jsonl`"),
        ("[a, b, ./x/../a]", "{key}: lists './x/../a' more than once; to use it more often, give it a weight"),
        ("[a, {path: a, weight: 1}]", "{key}: lists 'a' more than once"),
        ("[{path: a, split: s, subset: t}, {path: a, split: s, subset: t}]", "{key}: lists 'a' more than once"),
        ("[]", "{key}: got an empty list, must be a"),
    ],
)
def test_a_faulty_source_is_refused(key: str, value: str, message: str) -> None:
    data = f"{key}: {value}" + ("\ntrain: t" if key == "eval" else "")
    [error] = errors_of(data)
    assert error.startswith(f"c.yaml:3: data.{message.replace('{key}', key)}")


def test_other_subsets_and_splits_are_other_sources() -> None:
    assert config_of("train: [a, {path: a, split: s}, {path: a, subset: s}]\neval: {path: a, split: test}")


def test_data_to_evaluate_on_is_not_trained_on_too(wording) -> None:
    wording(errors_of("train: [a, {path: b, split: s}]\neval:\n  - c\n  - {path: ./b, split: s}\n  - {path: a}"))
    wording(errors_of("train: {path: a}\neval: ./a"))


def test_data_to_evaluate_on_has_no_weight(wording) -> None:
    wording(errors_of("train: t\neval:\n  - e\n  - {path: f,\n     weight: 0.5}"))
    wording(errors_of("train: t\neval: {path: e, weight: 2}"))
    assert config_of("train: t\neval: {path: e, weight: 1}")


def test_a_faulty_override_of_a_list_is_reported_like_a_faulty_line(wording) -> None:
    wording(errors_of("train: t", "data.train=[{path: a, wieght: 2}]"))


def test_foreign_names_lead_to_keys_of_a_source_that_exist() -> None:
    assert set(FOREIGN_SOURCE_KEYS.values()) <= SourceConfig.model_fields.keys()
    assert not FOREIGN_SOURCE_KEYS.keys() & SourceConfig.model_fields.keys()


@pytest.mark.parametrize("word", ["none", "off"])
def test_a_word_that_means_no_evaluation_is_not_taken_for_a_path(word: str) -> None:
    message = f"c.yaml:4: data.eval: got {word}, null or 0 evaluates nothing; a directory of that name is ./{word}"
    assert errors_of(f"train: a.jsonl\neval: {word}") == [message]
    assert [source.path for source in config_of(f"train: a.jsonl\neval: ./{word}").data.eval_sources()] == [f"./{word}"]

"""What is generated from the schema: the commented default, resolved configs, the JSON schema."""

import json
import re
from os.path import normpath
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from dualtune.config import Config, default_yaml, json_schema, parse_config, to_yaml
from dualtune.config.schema import sections

REQUIRED = {"model": {"name": "Qwen/Qwen3-0.6B"}, "data": {"train": "data/train.jsonl"}}


def test_the_default_text_gives_exactly_the_defaults() -> None:
    assert parse_config(default_yaml()) == Config.model_validate(REQUIRED)


def test_the_default_text_names_every_key_once_below_a_comment() -> None:
    lines = default_yaml().splitlines()
    for section, model in sections().items():
        assert lines.count(f"{section}:") == 1
        start = lines.index(f"{section}:")
        for key in model.model_fields:
            at = next(number for number, line in enumerate(lines) if number > start and line.startswith(f"  {key}: "))
            assert lines[at - 1].startswith("  # ")
    assert max(map(len, lines)) <= 120
    text = default_yaml()
    assert "  # The number of passes over the training data. Allowed: a number > 0.\n" in text


def test_pyyaml_reads_the_default_text_alike() -> None:
    assert Config.model_validate(yaml.safe_load(default_yaml())) == parse_config(default_yaml())


_text = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1).filter(lambda text: text.strip())
_names = _text | st.sampled_from(
    ["on", "1e-4", "1:30", "016", "null", "~", "a: b", "# x", "[", "- x", "'", "...", "---"]
)
_sources = st.fixed_dictionaries(
    {"path": _names.map("t/{0}".format)},
    optional={
        "weight": st.floats(0, exclude_min=True, allow_infinity=False),
        "format": st.sampled_from(["text", None]),
        "columns": st.dictionaries(_names, _names, max_size=2) | st.none(),
        "split": _names | st.none(),
    },
)
_configs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"name": _names}),
        "adapter": st.fixed_dictionaries(
            {
                "alpha": st.floats(1e-9, 1e9),
                "targets": st.lists(_names, min_size=1, max_size=3, unique=True) | st.just("all-linear"),
            }
        ),
        "data": st.fixed_dictionaries(
            {
                "train": _names.map("t/{0}".format)
                | _sources
                | st.lists(_sources, min_size=1, max_size=3, unique_by=lambda source: normpath(source["path"])),
                "eval": st.floats(0, 1, exclude_max=True) | _names | st.none(),
                "columns": st.dictionaries(_names, _names, max_size=3),
                "packing": st.booleans(),
            }
        ),
        "train": st.fixed_dictionaries(
            {"warmup": st.floats(0, 1, exclude_max=True) | st.integers(1, 2**62), "steps": st.none()}
        ),
    }
)


@given(_configs)
def test_to_yaml_round_trips(data: dict[str, Any]) -> None:
    config = Config.model_validate(data)
    text = to_yaml(config)
    assert parse_config(text) == config
    assert to_yaml(parse_config(text)) == text


@given(_configs)
def test_a_yaml_1_1_reader_reads_to_yaml_alike(data: dict[str, Any]) -> None:
    config = Config.model_validate(data)
    assert Config.model_validate(yaml.safe_load(to_yaml(config))) == config


def test_to_yaml_writes_every_key() -> None:
    text = to_yaml(Config.model_validate(REQUIRED))
    assert re.findall(r"^(\w+):", text, re.M) == list(sections())
    assert text.count("\n  ") == sum(len(model.model_fields) for model in sections().values())
    assert "  alpha: 32\n" in text


def test_to_yaml_writes_one_line_per_key_however_long() -> None:
    text = to_yaml(Config.model_validate({**REQUIRED, "run": {"dir": "a b " * 50 + "c"}}))
    assert f"\n  dir: {'a b ' * 50}c\n" in text


def _fragments(node: Any) -> list[dict[str, Any]]:
    """Every mapping in a JSON schema."""
    if isinstance(node, dict):
        return [node] + [found for inner in node.values() for found in _fragments(inner)]
    return [found for inner in node for found in _fragments(inner)] if isinstance(node, list) else []


def test_the_json_schema_is_json_and_complete() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema, allow_nan=False)) == schema
    assert schema["$schema"].startswith("https://json-schema.org/")
    for node in _fragments(schema):
        if isinstance(node.get("$ref"), str):
            assert node["$ref"].removeprefix("#/$defs/") in schema["$defs"]
        if isinstance(node.get("pattern"), str):
            re.compile(node["pattern"])
    for section, model in sections().items():
        node = schema["$defs"][schema["properties"][section]["$ref"].removeprefix("#/$defs/")]
        assert node["additionalProperties"] is False
        assert node["properties"].keys() == model.model_fields.keys()
        assert all(inner["description"] for inner in node["properties"].values())
    assert schema["additionalProperties"] is False


def test_changing_a_json_schema_changes_no_other() -> None:
    json_schema()["$defs"].clear()
    assert json_schema()["$defs"]

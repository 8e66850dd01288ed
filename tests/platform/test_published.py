"""The shapes of published models by their hub id: each has the number of parameters that its card states."""

import json
import math
import re
from pathlib import Path

import pytest

from dualtune.engine.memory import shapes
from dualtune.engine.memory.shapes import KNOWN, decoder_of, published

TABLE = json.loads(Path(shapes.__file__).with_name("published.json").read_text(encoding="utf-8"))
ROWS = [dict(zip(TABLE["columns"], row, strict=True)) for row in TABLE["models"]]


def test_the_table_has_about_a_hundred_models_with_their_origin():
    names = [row["name"] for row in ROWS]
    assert len(names) == len(set(names)) >= 100
    assert all(row["from"] for row in ROWS)
    assert {"Qwen/Qwen3-8B-Base", "meta-llama/Llama-3.1-8B", "mistralai/Mistral-Nemo-Instruct-2407"} <= {*names}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_parameters_are_those_of_the_card_and_of_the_name(row):
    billions = decoder_of(published(row["name"])).num_parameters / 1e9
    assert math.isclose(billions, row["billions_by_card"], rel_tol=0.02)
    if (size := re.search(r"(?<![\w.])(\d+(\.\d+)?)([bm])(?![a-z])", row["name"].lower())) is not None:
        named = float(size[1]) * (1 if size[3] == "b" else 1e-3)
        rounding = 0.7 if "Falcon3-1B" in row["name"] else 0.25  # "7B" of 6.7 billion; Falcon3-1B has 1.67
        assert math.isclose(billions, named, rel_tol=rounding)


def test_both_tables_agree():
    listed = {row["name"] for row in ROWS}
    for name, config in KNOWN.items():
        assert name in listed
        assert decoder_of(published(name)) == decoder_of(config)
        row = next(row for row in ROWS if row["name"] == name)
        assert decoder_of({key: row[key] for key in TABLE["columns"][1:-2]}) == decoder_of(config), name


def test_a_copy_of_unsloth_has_the_shape_and_a_stranger_none():
    assert published("unsloth/Qwen3-14B") == published("Qwen/Qwen3-14B")
    assert published("unsloth/Qwen3-14B-bnb-4bit") is None
    assert published("somebody/Qwen3-14B") is None


def test_plan_takes_the_name_of_a_model(dualtune_main):
    result = dualtune_main("plan", "Qwen/Qwen3-8B-Base", "--machine", "h100-80", "--json")
    assert result.returncode == 0
    weights = next(part for part in json.loads(result.stdout)["parts"] if part["name"] == "weights")
    assert weights["bytes"] == 2 * decoder_of(published("Qwen/Qwen3-8B")).num_parameters


def test_plan_of_an_unknown_model_asks_for_config_json_alone(dualtune_main):
    result = dualtune_main("plan", "nobody/knows-this", "--machine", "h100-80")
    assert result.returncode == 4
    assert "hf download nobody/knows-this config.json" in result.stderr
    assert dualtune_main("plan", "nobody/knows-this.yaml").returncode == 2  # a file that is not there

"""The pages for users of other trainers: what they show the import gives, and our defaults are those of the schema."""

import re
from pathlib import Path

import pytest
import yaml
from pages import ROOT, blocks

from dualtune.base.errors import ConfigError
from dualtune.config.importing.translate import import_config, to_text
from dualtune.config.schema import sections

PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
COUNTS = {7: "seven"}
TRAINERS = {
    "axolotl": ["axolotl"], "llama_factory": ["LLaMA-Factory"], "mlx_lm": ["mlx-lm", "mlx-lm-lora"], "trl": ["TRL"],
    "unsloth": ["Unsloth"],
}  # fmt: skip
SHORTEST = {
    "axolotl": {"base_model": "some/model", "adapter": "lora", "learning_rate": 1e-4, "lora_r": 8, "lora_alpha": 16,
                "datasets": [{"path": "rows.jsonl", "type": "alpaca"}]},
    "LLaMA-Factory": {"model_name_or_path": "some/model", "stage": "dpo", "dataset": "rows"},
    "mlx-lm": {"model": "some/model", "train": True, "data": "rows"},
    "mlx-lm-lora": {"model": "some/model", "train": True, "train_mode": "dpo", "data": "pairs"},
    "TRL": {"model_name_or_path": "some/model", "use_peft": True, "dataset_name": "o/n"},
    "Unsloth": {"model": "some/model", "data": {"dataset": "o/n"}, "training": {}, "lora": {}},
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_our_defaults_are_those_of_the_schema(page):
    table = page.read_text(encoding="utf-8").partition("<!-- defaults -->")[2]
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| `(\w+)\.(\w+)` \| ([^|]+) \|$", table, re.M)
    assert len(rows) >= 8
    for section, key, said in rows:
        default = sections()[section].model_fields[key].default
        shown = (
            COUNTS[len(default)]
            if isinstance(default, tuple)
            else f"{default:g}"
            if type(default) is float
            else default
        )
        assert re.match(rf"{re.escape(str(shown).lower())}\b", said), (section, key, default)


def test_the_translated_config_is_what_the_import_gives(tmp_path, monkeypatch):
    page = ROOT / "docs" / "coming_from" / "axolotl.md"
    theirs, ours = (block.text for block in blocks(page) if block.language == "yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qlora.yml").write_text(theirs, encoding="utf-8")
    assert ours == to_text(import_config(Path("qlora.yml")))


def missing():
    """Options that a page says are not here, as (trainers, option, value)."""
    for page in PAGES:
        section = re.split(r"^## What .* has and dualtune does not$", page.read_text(encoding="utf-8"), flags=re.M)[1]
        for option, value in re.findall(r"`([\w.]+)(?:: ([^`]+))?`", section):
            if option.split(".")[0] not in sections():
                name = "-".join([page.stem, option, *filter(None, [value])])
                yield pytest.param(TRAINERS[page.stem], option, value or True, id=name)


@pytest.mark.parametrize(("trainers", "option", "value"), missing())
def test_what_a_page_says_is_missing_is_not_translated(trainers, option, value, tmp_path):
    answers = []
    for trainer in trainers:
        config = {**SHORTEST[trainer]}
        *outer, name = option.split(".")
        (config.setdefault(outer[0], {}) if outer else config)[name] = value
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        try:
            imported = import_config(path, trainer)
        except ConfigError as error:
            answers.append(name in str(error))
        else:
            answers.append(option in {left.key for left in imported.lost})
    assert any(answers)

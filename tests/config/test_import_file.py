"""`dualtune config import` on files: real layouts that train, files of strangers, the table and its page."""

import json
import re
import runpy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dualtune
from dualtune.base.errors import ConfigError
from dualtune.config import load_config
from dualtune.config.advice import FOREIGN_KEYS
from dualtune.config.importing.translate import TRAINERS, import_config, to_text
from dualtune.config.schema import sections

ROOT = Path(__file__).parents[2]
OURS = {f"{section}.{key}" for section, model in sections().items() for key in model.model_fields}
PAGES = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "coming_from").glob("*.md")]
with_tables = runpy.run_path(str(ROOT / "scripts" / "coming_from_page.py"))["with_tables"]
RULES = [(name, rule) for name, module in TRAINERS.items() for rule in module.RULES]

AXOLOTL = """\
base_model: {model}
# as people write them
load_in_8bit: false
load_in_4bit: false
datasets:
  - path: {data}
    type: chat_template
    field_messages: messages
val_set_size: 0.0
output_dir: {out}
adapter: lora
lora_model_dir:
sequence_len: 64
sample_packing: true
lora_r: 4
lora_alpha: 8
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 2
micro_batch_size: 1
max_steps: 3
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 2e-3
float32: true
flash_attention: true
warmup_steps: 0
special_tokens:
  pad_token: <|end_of_text|>
"""
MLX_LM = """\
model: "{model}"
train: true
data: "{data}"
num_layers: 1
batch_size: 2
iters: 6
grad_accumulation_steps: 2
learning_rate: 1e-3
adapter_path: "{out}"
max_seq_length: 64
mask_prompt: true
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 4
  scale: 2.0
  dropout: 0.0
"""


@pytest.mark.parametrize(("text", "name"), [(AXOLOTL, "axolotl"), (MLX_LM, "mlx-lm")], ids=["axolotl", "mlx-lm"])
def test_what_was_imported_trains(text, name, tiny_llama, write_rows, tmp_path, dualtune_main):
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]}
        for i in range(12)
    ]
    theirs, ours, out = tmp_path / "theirs.yaml", tmp_path / "ours.yaml", tmp_path / "run"
    theirs.write_text(text.format(model=tiny_llama, data=write_rows(rows), out=out), encoding="utf-8")

    done = dualtune_main("config", "import", theirs, "--output", ours)
    assert done.returncode == 0, done.stderr
    assert f"a config of {name}" in ours.read_text(encoding="utf-8")

    dualtune.train(load_config(ours), platform="cpu")
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps[-1] == 3 and (out / "adapter" / "adapter_model.safetensors").is_file()
    targets = json.loads((out / "adapter" / "adapter_config.json").read_text())["target_modules"]
    if name == "mlx-lm":  # the last layer alone
        assert {target.split(".")[-1] for target in targets} == {"q_proj", "v_proj"}
        assert all("layers.1." in target for target in targets)


def test_the_config_goes_to_standard_output_and_what_is_lost_to_standard_error(tmp_path, dualtune_main):
    file = tmp_path / "a.yaml"
    file.write_text(AXOLOTL.format(model="m", data="d", out="o") + "neftune_noise_alpha: 5\n", encoding="utf-8")
    done = dualtune_main("config", "import", file)
    assert done.returncode == 0
    file.write_text(done.stdout, encoding="utf-8")
    assert load_config(file).model.name == "m"
    assert done.stderr == "not translated  neftune_noise_alpha: 5. NEFTune is not supported yet\n"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a: 1\n", (), "is not recognized as a config of axolotl or mlx-lm"),
        ("model: {name: m}\ndata: {train: t}\n", (), "is already a config of dualtune"),
        ("- 1\n", (), "must be a mapping"),
        ("a: [\n", (), "not valid YAML"),
        ("base_model: &a x\nb: *a\n", (), "aliases (*name) are not allowed"),
        ("base_model: !!python/object:os.system x\n", (), "tag !!python/object:os.system is not allowed"),
        ("base_model: a\nbase_model: b\n", (), "given twice"),
        ("model: m\n", ("--from", "axolotl"), "base_model: got null"),
        ("model: m\n", ("--from", "torchtune"), "'torchtune' is not one of"),
    ],
)
def test_another_file_is_refused(text, options, message, tmp_path, dualtune_main):
    file = tmp_path / "f.yaml"
    file.write_text(text, encoding="utf-8")
    done = dualtune_main("config", "import", file, *options)
    assert done.returncode == 2 and message in done.stderr and not done.stdout


def test_nothing_is_overwritten(tmp_path, dualtune_main):
    file = tmp_path / "f.yaml"
    file.write_text(AXOLOTL.format(model="m", data="d", out="o"), encoding="utf-8")
    before = file.read_bytes()
    done = dualtune_main("config", "import", file, "--output", file)
    assert done.returncode == 2 and "already exists" in done.stderr and file.read_bytes() == before


def test_examples_are_still_printed_by_name(dualtune_main):
    assert dualtune_main("config", "cpu_smoke").stdout.startswith("# ")
    assert dualtune_main("config", "cpu_smok").returncode == 2


# --- files of strangers ----------------------------------------------------------------------------------------------


def test_comments_can_be_left_by_no_value_and_no_key(tmp_path):
    """What is in the file cannot become a key of ours, nor steer a terminal."""
    evil = {
        "base_model": "m", "adapter": "lora", "lora_r": 1, "lora_alpha": 1,
        "datasets": [{"path": "d", "type": "alpaca", "x\nhybrid": "y\nhybrid: {enabled: true}"}],
        "learning_rate": 1, "a\nhybrid: {enabled: true}\n#": 1, "b\x1b[2J": "\x1b]0;x\x07",
        "c\u2028hybrid": ["\u2028hybrid: {enabled: true}"], "wandb_project": "\rhybrid: {enabled: true}",
    }  # fmt: skip
    file = tmp_path / "f.yaml"
    file.write_text(json.dumps(evil), encoding="utf-8")
    text = to_text(import_config(file))
    assert "\x1b" not in text and "\r" not in text
    file.write_text(text, encoding="utf-8")
    assert not load_config(file).hybrid.enabled
    assert all(line.startswith(("#", " ")) or line == "" or line[:-1] in sections() for line in text.split("\n"))


def test_a_secret_is_not_passed_on(tmp_path):
    token = "hf_" + "aB3dE6gH9j" * 4
    file = tmp_path / "f.yaml"
    keys = {
        "comet_api_key": "abc123",
        "wandb_project": token,
        "datasets": [{"path": "d", "type": "alpaca", "x": token}],
    }
    more = {"base_model": "m", "adapter": "lora", "lora_r": 1, "lora_alpha": 1, "learning_rate": 1}
    file.write_text(json.dumps(more | keys), encoding="utf-8")
    text = to_text(import_config(file))
    assert "abc123" not in text and token not in text


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=6) | st.sampled_from(
        ["lora", "qlora", "auto", "no", "adamw", "cosine", "1e-4", "alpaca", "chat_template", "9" * 400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["path", "type", "split", "rank", "scale", "keys", "dropout", "name", "arguments", "adam"]),
        inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


# The shortest config of each trainer.
RIGHT = {
    "axolotl": {"base_model": "m", "adapter": "lora", "lora_r": 1, "lora_alpha": 1, "learning_rate": 1,
                "datasets": [{"path": "d", "type": "alpaca"}]},
    "mlx-lm": {"model": "m", "data": "d"},
    "LLaMA-Factory": {"model_name_or_path": "m", "dataset": "d"},
    "TRL": {"model_name_or_path": "m", "dataset_name": "d", "use_peft": True},
    "Unsloth": {"model": "m", "data": {"dataset": "d"}},
    "axolotl-rs": {"base_model": "m", "adapter": "lora", "dataset": {"path": "d"}},
    "mlx-lm-lora": {"model": "m", "data": "d", "train_type": "lora"},
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_values_give_a_config_or_one_clear_error(name, data, tmp_path):
    keys = sorted(
        {key.replace("*", "x").partition(".")[0] for each, rule in RULES if each == name for key in rule.names}
    )
    right = RIGHT[name]
    wrong = data.draw(st.dictionaries(st.sampled_from(keys), values, max_size=3))
    file = tmp_path / "f.yaml"
    file.write_text(json.dumps(right | wrong).replace("NaN", ".nan").replace("Infinity", ".inf"), encoding="utf-8")
    try:
        imported = import_config(file, name)
        text = to_text(imported)
    except ConfigError:
        return
    spoken_for = {left.key for left in imported.lost + imported.needless}
    for key in wrong:  # a line with its name, in a comment of what is left or behind a value
        read = any(key in rule.names and rule.convert for each, rule in RULES if each == name)
        assert read or any(left.partition(".")[0].partition("[")[0] == key for left in spoken_for) or key in text


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_key_of_ours_in_the_tables_exists():
    named = [key for _, rule in RULES for key in rule.keys.replace(" or ", ", ").split(", ") if key]
    cells = [cell for page in PAGES for cell in re.findall(r"^\| [^|]+ \| ([^|]+) \|", page, re.M)]
    named += [key for cell in cells for key in re.findall(rf"`((?:{'|'.join(sections())})\.\w+)`", cell)]
    assert named and set(named) <= OURS


@pytest.mark.parametrize(("name", "rule"), RULES, ids=lambda value: value if isinstance(value, str) else value.names[0])
def test_every_key_of_the_table_is_spoken_for(name, rule, tmp_path):
    """Each key alone, with a value that is no default: it gives a line, is named among what is left, or is an error."""
    right = RIGHT[name] | ({"num_layers": -1} if name == "mlx-lm" else {})
    for key in rule.names:
        assert rule.note or rule.keys, key
        top, _, inner = key.replace("*", "x").partition(".")
        table = right | {top: {inner: 3, "rank": 8, "scale": 1} if inner else 3}
        file = tmp_path / "f.yaml"
        file.write_text(json.dumps(table), encoding="utf-8")
        try:
            imported = import_config(file, name)
        except ConfigError as error:  # 3 is no value for it
            assert top in str(error)
            continue
        comments = [setting.comment for setting in imported.settings]
        left = [each.key for each in imported.lost + imported.needless]
        assert any(top in text for text in comments + left), f"{key} is dropped in silence"


def test_no_key_has_two_rules():
    for name in TRAINERS:
        names = [key for each, rule in RULES if each == name for key in rule.names]
        assert len(names) == len(set(names))


def test_advice_and_translation_agree():
    """`Did you mean …?` on a foreign key names one of the keys that the key is translated to."""
    for _, rule in RULES:
        for key in rule.names:
            if key == "micro_batch_size":  # a part of the batch, and how much goes through the model at once
                continue
            if rule.convert and rule.keys and (advice := FOREIGN_KEYS.get(key)) and "." in advice:
                assert advice in rule.keys.replace(" or ", ", ").split(", "), key


def test_the_pages_have_the_tables_of_the_rules():
    assert list(map(with_tables, PAGES)) == PAGES, "write them anew: python scripts/coming_from_page.py"
    assert all(f"<!-- table: {name} -->" in "".join(PAGES) for name in TRAINERS)

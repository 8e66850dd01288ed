"""Unknown and missing keys: did you mean …?"""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.config.advice import FOREIGN_KEYS, NO_SUCH_KEY
from dualtune.config.schema import sections

MINIMAL = "model:\n  name: m\ndata:\n  train: t\n"
KEYS = [(section, key) for section, model in sections().items() for key in model.model_fields]


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="c.yaml", overrides=overrides)
    return str(caught.value)


def with_(line: str) -> str:
    """The minimal config with a line of one more section, line 5: `section: {key: value}`."""
    return MINIMAL + line + "\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data_: 1", "data_: unknown key. Did you mean 'data'?"),
        ("learning_rate: 1", "learning_rate: unknown key. It belongs to a section: 'train.learning_rate'"),
        ("train.steps: 1", "train.steps: unknown key. Write 'steps' below the section 'train'"),
        ("train: {max_length: 1}", "train.max_length: unknown key. It belongs to another section: 'data.max_length'"),
        ("train: {max_lenght: 1}", "train.max_lenght: unknown key. Did you mean 'data.max_length'?"),
        ("train: {Learning-Rate: 1}", "train.Learning-Rate: unknown key. Did you mean 'learning_rate'?"),
        ("train: {memory: {limit: 12GB}}", "train.memory: unknown key. 'memory' is a section; check the"),
        ("hybrid: {zzz: 1}", "hybrid.zzz: unknown key. Allowed here: enabled, engine, preset"),
        ("hybrid: 3", "hybrid: got 3, must be a section (keys: enabled, engine, preset"),
        ("train: {warmup_steps: 1}", "train.warmup_steps: unknown key. Did you mean 'warmup'?"),
        ("hybrid: {? null: 1}", "hybrid.null: unknown key."),
        ('hybrid: {"a\\e[2J": 1}', r"hybrid.'a\x1b[2J': unknown key."),
    ],
)
def test_an_unknown_key_gets_advice(line: str, message: str) -> None:
    assert error_of(with_(line)).startswith(f"c.yaml:5: {message}")


@pytest.mark.parametrize(
    ("section", "name", "ours"),
    [
        ("adapter", "lora_r", "rank"),
        ("adapter", "r", "rank"),
        ("adapter", "target_modules", "targets"),
        ("train", "lr", "learning_rate"),
        ("train", "batch_size", "documents_per_step"),
        ("train", "per_device_train_batch_size", "documents_per_step"),
        ("train", "gradient_accumulation_steps", "documents_per_step"),
        ("train", "num_train_epochs", "epochs"),
        ("train", "iters", "steps"),
        ("train", "max_seq_length", "data.max_length"),
        ("train", "load_in_4bit", "model.quantization"),
        ("train", "output_dir", "run.dir"),
        ("run", "output_dir", "dir"),
    ],
)
def test_names_of_other_trainers_are_translated(section: str, name: str, ours: str) -> None:
    error = error_of(with_(f"{section}: {{{name}: 1}}"))
    assert error == f"c.yaml:5: {section}.{name}: unknown key. Did you mean '{ours}'?"


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (
            "train: {optimizer: adam_8bit}",
            "train.optimizer: got 'adam_8bit', allowed: adamw, adamw_8bit, sgd, lion, lion_8bit, adafactor, muon. Did",
        ),
        ("train: {optim: adamw_torch}", "train.optim: unknown key. Did you mean 'optimizer'?"),
        ("train: {betas: 1}", "train.betas: unknown key. Other constants are fixed; set 'train.optimizer'"),
        (
            "adapter: {num_layers: 16}",
            "adapter.num_layers: unknown key. Did you mean 'layers'?",
        ),
        (
            "adapter: {method: vera}",
            "adapter.method: got 'vera', allowed: lora, dora, full. VeRA trains vectors between random matrices",
        ),
        (
            "run: {report_to: wandb}",
            "run.report_to: unknown key. Trackers are named in 'run.track': trackio, wandb, mlflow, tensorboard",
        ),
        ("train: {resume_from_checkpoint: x}", "train.resume_from_checkpoint: unknown key. The same command resumes"),
    ],
)
def test_a_key_of_other_trainers_that_has_no_counterpart_is_answered_in_words(line: str, answer: str) -> None:
    assert error_of(with_(line)).startswith(f"c.yaml:5: {answer}")


def test_inside_a_section_no_section_is_suggested(wording) -> None:
    wording(error_of(with_("adapter: {peft: 1}")))


def test_the_tables_of_foreign_names_lead_to_keys_that_exist() -> None:
    ours = {f"{section}.{key}" for section, key in KEYS} | sections().keys()
    names = {key for _, key in KEYS} | sections().keys()
    assert set(FOREIGN_KEYS.values()) <= ours
    assert FOREIGN_KEYS.keys() & names == {"warmup_steps"}  # ours only in the section hybrid
    assert not NO_SUCH_KEY.keys() & (names | FOREIGN_KEYS.keys())
    named = {name for answer in NO_SUCH_KEY.values() for name in re.findall(r"'(\w+\.\w+)'", answer)}
    assert named and named <= ours


def _shortened() -> list[tuple[str, str, str]]:
    """(section, key, key without one of its letters), except where that is a name in its own right."""
    taken = {name for pair in KEYS for name in pair} | FOREIGN_KEYS.keys() | NO_SUCH_KEY.keys()
    return [
        (section, key, key[:at] + key[at + 1 :])
        for section, key in KEYS
        for at in range(len(key))
        if key[:at] + key[at + 1 :] not in taken
    ]


@settings(max_examples=1000)  # stops earlier, when it has seen all
@given(st.sampled_from(_shortened()))
def test_a_key_that_lacks_one_letter_is_recognized(case: tuple[str, str, str]) -> None:
    section, key, typed = case
    assert f"--set {section}.{typed}: unknown key. Did you mean '{key}'?" in error_of(MINIMAL, f"{section}.{typed}=1")


@pytest.mark.parametrize("text", ["run: {}", "model:\ndata:\n", "model: {}\ndata: {}"])
def test_missing_keys_name_their_section(text: str, wording) -> None:
    error = error_of(text)
    wording(error)

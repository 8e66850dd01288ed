"""What check-config names where a config does not fit: settings that do, and no smaller than they have to be."""

import re

import pytest

from dualtune.base.checks import Check
from dualtune.config import load_config
from dualtune.config.render import example_path
from dualtune.doctor.check_config import memory_row
from dualtune.engine.machine import budget
from dualtune.engine.machines import named
from dualtune.engine.memory.plan import plan_of
from dualtune.engine.memory.shapes import KNOWN, decoder_of

KEEP = "memory.checkpointing=none"
# machine, changes of the H100 config -> the settings that are named
CASES = {
    ("rtx-4090-24", KEEP): "train.micro_batch_tokens",
    ("rtx-5080-16", f"{KEEP} data.max_length=2048"): "train.micro_batch_tokens",
    ("rtx-4090-24", f"{KEEP} model.quantization=none data.max_length=3072 train.micro_batch_tokens=3072"): (
        "memory.checkpointing"
    ),
    ("rtx-3060-12", "model.quantization=none"): "model.quantization",
    ("rtx-4060-8", "model.quantization=none"): "model.quantization train.micro_batch_tokens",
    ("rtx-4060-8", "data.max_length=32768 train.micro_batch_tokens=32768"): "data.max_length train.micro_batch_tokens",
    ("rtx-4060-8", "data.max_length=8192"): "train.micro_batch_tokens memory.offload",
}  # fmt: skip


def look(machine: str, *overrides: str) -> Check:
    config = load_config(example_path("training_config_h100"), overrides)
    decoder = decoder_of(KNOWN[config.model.name])
    has = budget(named(machine))
    return memory_row(plan_of(config, decoder, "torch", "cuda", has))


def settings_of(row: Check) -> list[str]:
    assert (row.level, row.exit_code) == ("fail", 4) and row.fix
    return [setting.strip("'") for setting in re.findall(r"--set ('[^']+'|\S+)", row.fix)]


@pytest.mark.parametrize(("machine", "overrides"), CASES)
def test_the_settings_that_are_named_fit(machine, overrides):
    settings = settings_of(look(machine, *overrides.split()))
    assert [setting.partition("=")[0] for setting in settings] == CASES[machine, overrides].split()
    assert look(machine, *overrides.split(), *settings).level == "ok"


@pytest.mark.parametrize(("machine", "overrides"), [case for case, named in CASES.items() if named.endswith("tokens")])
def test_more_tokens_than_are_named_do_not_fit(machine, overrides):
    """By two granules of 64, because rows are padded to a granule of their own."""
    settings = settings_of(look(machine, *overrides.split()))
    more = [re.sub(r"=(\d+)$", lambda found: f"={int(found[1]) + 128}", setting) for setting in settings]
    assert look(machine, *overrides.split(), *more).level == "fail"


@pytest.mark.parametrize(("machine", "overrides"), [case for case, named in CASES.items() if "quant" in named])
def test_the_base_is_left_as_it_is_where_that_can_fit(machine, overrides):
    """What is named last, quantization, would not be needed if the other settings alone sufficed."""
    (quantization, *others) = settings_of(look(machine, *overrides.split()))
    assert quantization == "model.quantization=nf4"
    assert look(machine, *overrides.split(), *others).level == "fail"


def test_where_nothing_fits_that_is_said():
    row = look("rtx-4060-8", "model.name=meta-llama/Llama-3.3-70B-Instruct")
    assert not settings_of(row) and row.fix.startswith("Not even the shortest documents fit")

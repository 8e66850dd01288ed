"""What check-gpu says of a machine never contradicts itself: verdict, config and fit, each estimated here again."""

from dataclasses import replace

import pytest

from dualtune.config import load_config
from dualtune.config.render import example_path
from dualtune.doctor.check_gpu import judge, qlora, start_of
from dualtune.engine.card import driver_of
from dualtune.engine.machine import GB, GIB, budget
from dualtune.engine.machines import MACHINES, named
from dualtune.engine.memory.estimate import estimate
from dualtune.engine.memory.plan import plan_of
from dualtune.engine.memory.shapes import KNOWN, decoder_of
from dualtune.engine.problems import CUDA_CONFIGS, SEVEN_B, device_of


def card(gb: float, free_gb: float | None = None):
    """An L4 with other memory."""
    total = int(gb * GB)
    free = total if free_gb is None else int(free_gb * GB)
    return replace(named("l4"), gpus=[replace(named("l4").gpus[0], total_bytes=total, free_bytes=free)])


def mac(gib: float):
    return replace(named("m1-8"), metal_limit_bytes=int(gib * GIB))


CARDS = {f"a card of {gb} GB": card(gb) for gb in (1, 2, 3, 4, 6, 8, 9.9, 10, 14, 20, 40, 60)}
BUSY = {"a busy card": card(24, 1), "a card that is half taken": card(24, 12)}
ALL = MACHINES | CARDS | BUSY | {f"a Mac with {gib} GiB for Metal": mac(gib) for gib in (0.5, 2, 3, 6, 9, 19)}
SEVEN = decoder_of(KNOWN[SEVEN_B])


def bytes_of(machine, config, settings=()):
    """The planned memory of an example config on the machine's device."""
    loaded = load_config(example_path(config), [f"{key}={value}" for key, value in settings])
    kind = device_of(machine)
    decoder = decoder_of(KNOWN[loaded.model.name])
    return plan_of(loaded, decoder, driver_of(kind).name, kind, budget(machine, kind)).estimate.total_bytes


@pytest.mark.parametrize("machine", ALL.values(), ids=ALL)
def test_verdict_config_and_fit_come_from_one_estimate(machine, wording):
    report, device = judge(machine), device_of(machine)
    have = budget(machine, device).bytes
    fails = {row.name for row in report.checks if row.level == "fail"}
    if device == "cpu":
        assert (report.label, report.config) == ("no accelerator", "cpu_smoke.yaml") and fails
        return
    seven_b_fits = estimate(SEVEN, qlora(machine, 512)).total_bytes <= have
    assert (report.label == "too small") == (not seven_b_fits) == (report.exit_code == 4)
    assert ("fit with documents up to" in report.sentence) == seven_b_fits
    largest = report.largest
    if largest is None:
        wording(report.sentence)
    else:
        assert largest.estimate.total_bytes <= have
        assert seven_b_fits or decoder_of(KNOWN[largest.name]).num_parameters < 6e9
    start = start_of(machine, largest)
    assert report.config == (start and start.config)
    if start is None:
        assert largest is None
        wording(report.sentence)
    else:
        settings = start.smaller.settings.items() if start.smaller else ()
        assert bytes_of(machine, start.config, settings) <= have
        assert (bytes_of(machine, start.config) <= have) == (start.smaller is None)
        assert ("with the settings shown" in report.sentence) == (start.smaller is not None)


def test_no_card_is_sent_to_a_config_for_a_larger_one():
    for name, machine in CARDS.items():
        config = judge(machine).config
        least = {file: gb for gb, file in CUDA_CONFIGS}
        assert config is None or least[config] <= machine.gpus[0].total_bytes / GB, name


def test_a_busy_card_says_how_much_of_it_is_free(wording):
    wording(judge(BUSY["a busy card"]).sentence)

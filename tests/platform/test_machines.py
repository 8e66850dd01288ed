"""Machines that are not here, each with the verdict, the config and the largest model that it should get.

The largest model is the largest whose QLoRA needs no more than the budget: weights (half a byte and a bit for each
linear weight, two bytes for each of embedding and head), 18 bytes for each adapter weight (r = 16, all seven
projections), and the activations of a document of the length given. The figures were worked out beside the program,
from the formulas of the memory plan: they change with these, and with nothing else.
"""

from dataclasses import replace

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import load_config
from dualtune.config.render import example_path
from dualtune.doctor.check_config import plan_config
from dualtune.doctor.check_gpu import judge
from dualtune.engine.choose import choose
from dualtune.engine.machine import GIB, Surroundings, budget
from dualtune.engine.machines import MACHINES, named

H100, RTX24, RTX16 = "training_config_h100.yaml", "rtx_24gb.yaml", "rtx_16gb.yaml"
MAC, MAC16 = "training_config_m4.yaml", "training_config_m4_16gb.yaml"
CPU, CHAT = "cpu_smoke.yaml", "lora_chat.yaml"
L70, Q32, Q14, Q8 = "meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3-32B", "Qwen/Qwen3-14B", "Qwen/Qwen3-8B"
L8, MISTRAL, Q4 = "meta-llama/Llama-3.1-8B-Instruct", "mistralai/Mistral-7B-Instruct-v0.3", "Qwen/Qwen3-4B"
L3, L1 = "meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"

PLAIN = [  # name, label, exit code, config, largest model, its length
    ("b200", "H100 class", 0, H100, L70, 8192),
    ("h200", "H100 class", 0, H100, L70, 5632),
    ("h100-80", "H100 class", 0, H100, L70, 2304),
    ("a100-80", "H100 class", 0, H100, L70, 2304),
    ("rtx-6000-ada-48", "adequate", 0, H100, Q32, 2048),
    ("l40s", "adequate", 0, H100, Q32, 1920),
    ("a100-40", "adequate", 0, H100, Q32, 1408),
    ("h100-mig-3g.40gb", "adequate", 0, H100, Q32, 1408),
    ("v100-32", "adequate", 0, RTX24, Q14, 3584),
    ("rtx-5090-32", "adequate", 0, RTX24, Q14, 3584),
    ("rtx-4090-24", "adequate", 0, RTX24, Q14, 2048),
    ("rtx-3090-24", "adequate", 0, RTX24, Q14, 2048),
    ("l4", "adequate", 0, RTX24, Q14, 1920),
    ("a10g", "adequate", 0, RTX24, Q14, 1920),
    ("rtx-4000-ada-20", "adequate", 0, RTX24, Q14, 1408),
    ("v100-16", "low", 0, RTX16, Q8, 2048),
    ("rtx-4080-16", "low", 0, RTX16, Q8, 2048),
    ("rtx-5080-16", "low", 0, RTX16, Q8, 2048),
    ("t4", "low", 0, RTX16, Q8, 1792),
    ("rtx-3060-12", "low", 0, RTX16, Q8, 1024),
    ("rtx-2080-ti-11", "low", 0, RTX16, L8, 1024),
    ("h100-mig-1g.10gb", "low", 0, RTX16, MISTRAL, 1024),
    ("rtx-4060-8", "low", 0, CHAT, Q4, 1152),
    ("p100", "no accelerator", 4, CPU, L70, 1408),  # compute capability 6.0: its host's memory is left
    ("m2-ultra-192", "good", 0, MAC, L70, 2560),
    ("m4-max-128", "good", 0, MAC, L70, 1408),
    ("m4-max-64", "good", 0, MAC, Q14, 3072),
    ("m4-pro-48", "good", 0, MAC, Q14, 2048),
    ("m1-max-64", "good", 0, MAC, Q14, 3072),
    ("m3-pro-36", "good", 0, MAC, Q14, 1024),
    ("m4-32", "good", 0, MAC, Q8, 1792),
    ("m4-24", "limited", 0, MAC16, Q8, 1152),
    ("m3-pro-18", "limited", 0, MAC16, Q4, 1152),
    ("m4-16", "limited", 0, MAC16, Q4, 1024),
    ("m1-16", "limited", 0, MAC16, Q4, 1024),
    ("m1-8", "too small", 4, CHAT, L1, 1536),
    ("cpu-16", "no accelerator", 4, CPU, L3, 1664),
    ("cpu-64", "no accelerator", 4, CPU, Q32, 1024),
    ("cpu-256", "no accelerator", 4, CPU, L70, 4096),
]


def without(machine, *packages):
    return replace(machine, packages={n: v for n, v in machine.packages.items() if n not in packages}, torch_cuda=None)


def pair(first: str, second: str, *, visible=None):
    """Two cards; `visible`: only the first one is."""
    a, b = named(first).gpus[0], named(second).gpus[0]
    if visible is None:
        return replace(named(first), gpus=[a, b])
    return replace(named(first), gpus=[a], hidden_gpus=(b,), visible_devices=visible)


WSL = replace(MACHINES["cpu-64"], surroundings=Surroundings(wsl=True, wsl_driver=True))
CROOKED = [  # what is wrong, machine, label, exit code, config, the rows that are no "ok", in words of the first fix
    ("two cards, the small one first", pair("rtx-3060-12", "rtx-4090-24"), "low", 0, RTX16,
     {"GPU 0", "larger GPU"}, "export CUDA_VISIBLE_DEVICES=GPU-NVIDIA GeForce RTX 4090"),
    ("two cards, the large one first", pair("rtx-4090-24", "rtx-3060-12"), "adequate", 0, RTX24, set(), None),
    ("two cards, the large one hidden", pair("l4", "h100-80", visible="0"), "adequate", 0, RTX24,
     {"larger GPU"}, "export CUDA_VISIBLE_DEVICES=GPU-NVIDIA H100 80GB HBM3"),
    ("no torch", without(named("h100-80"), "torch"), "H100 class", 4, H100, {"torch", "platform"},
     "pip install 'dualtune[torch]'"),
    ("torch for CPUs", replace(named("h100-80"), torch_cuda="none"), "H100 class", 4, H100, {"torch"},
     "pip install --force-reinstall torch"),
    ("torch for a newer CUDA", replace(named("a100-80"), cuda="12.4", driver="550.54"), "H100 class", 4, H100,
     {"torch"}, "driver 580 or newer"),
    ("an old driver", replace(named("v100-32"), cuda="11.4", driver="470.1"), "adequate", 4, RTX24,
     {"driver", "torch"}, "driver 580 or newer"),
    ("a Volta with torch for CUDA 13", replace(named("v100-32"), torch_cuda="13.0"), "adequate", 4, RTX24, {"torch"},
     "whl/cu126"),
    ("a Blackwell with torch for CUDA 12.6", replace(named("rtx-5090-32"), torch_cuda="12.6"), "adequate", 4, RTX24,
     {"torch"}, "pip install --force-reinstall torch"),
    ("programs on the card", replace(named("l4"), gpus=[replace(named("l4").gpus[0], free_bytes=GIB)]),
     "too small", 4, None, {"GPU 0", "config", "largest model"}, None),
    ("no MLX", without(named("m4-32"), "mlx"), "good", 4, MAC, {"MLX", "platform"}, "pip install 'dualtune[mlx]'"),
    ("Rosetta", replace(without(named("m4-32"), "mlx"), arch="x86_64", surroundings=Surroundings(rosetta=True)),
     "good", 4, MAC, {"Python", "platform"}, "python@3.12"),
    ("an old macOS", replace(named("m4-32"), macos="13.6"), "good", 4, MAC, {"macOS"}, "Software Update"),
    ("an Intel Mac", replace(MACHINES["cpu-16"], system="Darwin"), "no accelerator", 4, CPU,
     {"GPU", "largest model"}, None),
    ("WSL that does not find the driver", WSL, "no accelerator", 4, CPU,
     {"GPU", "driver", "largest model"}, "export LD_LIBRARY_PATH=/usr/lib/wsl/lib"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "label", "code", "config", "model", "length"), PLAIN, ids=[row[0] for row in PLAIN])
def test_a_machine_gets_its_verdict_config_and_largest_model(name, label, code, config, model, length):
    report = judge(named(name))
    assert (report.label, report.exit_code, report.config) == (label, code, config)
    assert (report.largest.name, report.largest.max_length) == (model, length)


def test_a_plan_for_another_machine_does_not_look_at_the_packages_of_this_one(monkeypatch):
    def looks(package):
        raise AssertionError(f"looked for {package} here")

    monkeypatch.setattr("dualtune.engine.memory.estimate._is_installed", looks)
    config = load_config(example_path(CPU), ["model.name=HuggingFaceTB/SmolLM2-135M"])
    for name, platform in (("cpu-16", "cpu"), ("m4-16", "mlx"), ("h100-80", "cuda"), ("h100-80", "cpu")):
        machine = named(name)
        assert judge(machine).largest is not None
        assert plan_config(config, machine, choose(platform, machine)).estimate["weights"] > 0


def test_every_machine_is_in_the_table():
    assert {row[0] for row in PLAIN} == MACHINES.keys()


@pytest.mark.parametrize(
    ("machine", "label", "code", "config", "notable", "fix"),
    [row[1:] for row in CROOKED],
    ids=[row[0] for row in CROOKED],
)
def test_what_is_wrong_with_a_machine_is_a_row_with_what_fixes_it(machine, label, code, config, notable, fix):
    report = judge(machine)
    rows = {row.name: row for row in report.checks if row.level not in ("ok",)}
    assert (report.label, report.exit_code, report.config) == (label, code, config)
    assert notable <= rows.keys() and rows.keys() <= notable | {"config"}
    assert fix is None or any(row.fix and fix in row.fix for row in rows.values())


def test_the_largest_model_fits_and_the_next_longer_document_does_not():
    from dualtune.doctor.check_gpu import qlora
    from dualtune.engine.memory.estimate import estimate
    from dualtune.engine.memory.shapes import KNOWN, decoder_of

    for name in ("rtx-4090-24", "m4-24"):
        machine = named(name)
        largest, have = judge(machine).largest, budget(machine).bytes
        decoder = decoder_of(KNOWN[largest.name])
        longer = qlora(machine, largest.max_length + 256)
        assert largest.estimate.total_bytes <= have < estimate(decoder, longer).total_bytes


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("h100-80", None),
        ("a100-40", None),  # it recomputes layers
        ("m4-16", None),
        ("rtx-4060-8", None),
    ],
)
def test_a_config_that_is_too_much_is_made_smaller(name, settings):
    report = judge(named(name))
    row = next(row for row in report.checks if row.name == "config")
    assert (row.level, settings is None or settings in row.found) == ("ok" if settings is None else "advice", True)
    assert ("with the settings shown" in report.sentence) == (settings is not None)


def test_no_document_is_longer_than_the_model_s_positions():
    largest = judge(replace(named("cpu-256"), available_bytes=2**44)).largest
    assert (largest.name, largest.max_length) == (L70, 131072)


def test_where_nothing_fits_no_model_is_named():
    report = judge(replace(named("cpu-16"), available_bytes=GIB // 2))
    assert report.largest is None
    assert next(row for row in report.checks if row.name == "largest model").level == "advice"


def test_of_several_larger_gpus_the_largest_is_named(wording):
    cards = [named(name).gpus[0] for name in ("t4", "l4", "h100-80", "a100-40")]
    rows = judge(replace(named("t4"), gpus=cards[:2], hidden_gpus=tuple(cards[2:]))).checks
    wording(next(row for row in rows if row.name == "larger GPU").fix)


def test_an_unknown_machine_is_answered_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"--machine: got 'h100-8', allowed: .*m4-32.*Did you mean 'h100-80'\?"):
        named("h100-8")


# --- the budget ------------------------------------------------------------------------------------------------------


def test_a_gpu_s_budget_is_its_memory_less_a_reserve(wording):
    assert budget(named("l4"), "cuda").bytes == 23034 * 2**20 - GIB // 2
    wording(budget(named("l4"), "cuda").reason)


def test_memory_that_others_hold_is_not_in_the_budget(wording):
    busy = replace(named("l4"), gpus=[replace(named("l4").gpus[0], free_bytes=3 * GIB)])
    assert budget(busy, "cuda").bytes == 3 * GIB
    wording(budget(busy, "cuda").reason)


@pytest.mark.parametrize(
    ("name", "platform", "num_bytes"),
    [
        ("m4-32", "metal", 32 * GIB * 2 // 3), ("m4-32", "auto", 32 * GIB * 2 // 3), ("m4-32", "cpu", 28 * GIB),
        ("cpu-16", "cpu", 14 * GIB), ("cpu-16", "auto", 14 * GIB), ("cpu-16", "metal", 14 * GIB), ("cpu-16", "cuda", 0),
        ("l4", "cpu", 120 * GIB), ("l4", "cuda:1", 0),
    ],
)  # fmt: skip
def test_the_budget_follows_the_platform(name, platform, num_bytes):
    assert budget(named(name), platform).bytes == num_bytes


def test_cuda_1_is_the_second_visible_gpu(wording):
    both = pair("l4", "h100-80")
    assert budget(both, "cuda:1").bytes == 81559 * 2**20 - GIB // 2
    wording(budget(both, "cuda:2").reason)

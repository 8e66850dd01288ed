"""The estimate as arithmetic: what it is asked, its parts, and the longest document that fits."""

import subprocess
import sys
from dataclasses import replace

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.data.batches import padded as padded_row
from dualtune.engine.memory import estimate as module
from dualtune.engine.memory.estimate import Ask, ask_of, estimate, longest_that_fits, num_kept, num_trained, padded
from dualtune.engine.memory.shapes import KNOWN, decoder_of
from dualtune.train.evaluation import layout_of

MISTRAL = decoder_of(KNOWN["mistralai/Mistral-7B-Instruct-v0.3"])
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
H100 = Ask("torch", "cuda", "nf4", "bfloat16", 16, SEVEN, micro_batch_tokens=4096, max_length=4096)
MAC = Ask("mlx", "metal", "affine4", "bfloat16", 16, SEVEN, micro_batch_tokens=2048, max_length=2048)
CPU = replace(H100, device="cpu", quantization="none", dtype="float32")
GIB = 2**30


def part(asked, name, decoder=MISTRAL):
    return next(part for part in estimate(decoder, asked).parts if part.name == name)


# --- the parts --------------------------------------------------------------------------------------------------------


def test_the_weights_of_a_7b_model_are_what_its_files_hold():
    assert part(replace(H100, quantization="none"), "weights").bytes == 2 * 7_248_023_552
    # QLoRA (arXiv 2305.14314, section 3): double quantization takes 0.127 bits a parameter for its constants.
    linear = MISTRAL.linear_parameters
    quantized = part(H100, "weights").bytes - 2 * (MISTRAL.num_parameters - linear)
    assert 8 * quantized / linear == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), rel=1e-4)
    # MLX's affine quantization takes half a bit for a 16-bit scale and bias of each 64, the embedding's too.
    assert 8 * part(MAC, "weights").bytes / 7_248_023_552 == pytest.approx(4.5, rel=1e-3)


def test_the_adapter_of_a_7b_model_has_the_published_number_of_weights():
    """PEFT prints 41,943,040 trainable parameters for Mistral-7B at r = 16 on the seven modules."""
    assert num_trained(MISTRAL, H100) == 41_943_040
    assert part(H100, "optimizer").bytes == 12 * 41_943_040
    assert part(H100, "adapter").bytes - 6 * 41_943_040 == 4 * 32 * (6 * 4096 + 14336)


@pytest.mark.parametrize("asked", [H100, MAC, CPU, replace(MAC, device="cpu", quantization="none")])
def test_every_part_says_how_it_came_about_and_none_is_negative(asked):
    found = estimate(MISTRAL, asked)
    assert [p.name for p in found.parts[:4]] == ["weights", "adapter", "optimizer", "activations"]
    assert found.parts[4].name in ("loss", "attention", "workspace") and found.parts[5].name == "reserve"
    assert all(p.bytes > 0 and p.formula for p in found.parts)
    assert found.total_bytes == sum(p.bytes for p in found.parts)


@pytest.mark.parametrize("asked", [H100, MAC])
@pytest.mark.parametrize(
    "more",
    [
        {"quantization": "none"},
        {"dtype": "float32"},
        {"rank": 64},
        {"micro_batch_tokens": 8192},
        {"max_length": 8192, "micro_batch_tokens": 8192},
        {"kernels": "reference"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_who_asks_for_more_gets_a_larger_estimate(asked, more):
    assert estimate(MISTRAL, replace(asked, **more)).total_bytes > estimate(MISTRAL, asked).total_bytes


@pytest.mark.parametrize(
    ("asked", "less"),
    [(H100, {"targets": ("q_proj", "v_proj")}), (MAC, {"targets": ("q_proj", "v_proj")}), (MAC, {"dropout": False})],
)
def test_who_asks_for_less_gets_a_smaller_estimate(asked, less):
    assert estimate(MISTRAL, replace(asked, **less)).total_bytes < estimate(MISTRAL, asked).total_bytes


@pytest.mark.parametrize(
    ("changes", "takes"),
    [({}, False), ({"dtype": "float32"}, True), ({"kernels": "reference"}, True), ({"device": "cpu"}, True)],
)
def test_dropout_takes_memory_where_its_mask_is_not_applied_in_registers(changes, takes):
    asked = replace(H100, **changes)
    without = estimate(MISTRAL, replace(asked, dropout=False)).total_bytes
    assert (estimate(MISTRAL, asked).total_bytes > without) == takes


def test_nothing_is_kept_below_the_lowest_adapter():
    upper = tuple(f"model.layers.{i}.self_attn.q_proj" for i in range(24, 32))
    activations = part(replace(H100, targets=upper), "activations").bytes
    assert activations < part(replace(H100, targets=("q_proj",)), "activations").bytes / 3.9


def test_all_linear_is_the_seven_modules_of_a_gated_decoder():
    assert estimate(MISTRAL, replace(H100, targets="all-linear")) == estimate(MISTRAL, H100)


def test_ranks_count_by_module_and_a_kept_start_only_where_it_computes():
    one = replace(H100, targets=("q_proj",), rank=4)
    n = num_trained(MISTRAL, one)
    assert num_trained(MISTRAL, replace(one, rank_pattern=(("layers.0.self_attn.q_proj", 8),))) == n + n // 32
    assert num_trained(MISTRAL, replace(one, init="pissa")) == n == num_kept(MISTRAL, replace(one, init="pissa"))
    assert part(replace(one, init="pissa"), "optimizer") == part(one, "optimizer")  # no gradient and no moments
    assert part(replace(one, init="pissa"), "adapter").bytes - part(one, "adapter").bytes == (4 + 2) * n
    wide = part(replace(one, rank_pattern=(("q_proj", 8),)), "activations").bytes
    assert wide == part(replace(one, rank=8), "activations").bytes > part(one, "activations").bytes
    with pytest.raises(ConfigError, match=r"adapter.rank_pattern: no adapted layer is called 'v_proj'"):
        num_trained(MISTRAL, replace(one, rank_pattern=(("v_proj", 8),)))


def test_rows_are_as_wide_as_the_layout_makes_them():
    assert [padded(n) for n in range(1, 9000)] == [padded_row(n) for n in range(1, 9000)]


# --- what is asked ----------------------------------------------------------------------------------------------------


def config(*overrides):
    return parse_config("model: {name: x}\ndata: {train: x.jsonl}", overrides=overrides)


def test_a_config_is_asked_for_as_its_layout_lays_it_out():
    for given in (config(), config("data.max_length=5000"), config("train.micro_batch_tokens=9000")):
        assert ask_of(given, MISTRAL, "torch", "cuda").micro_batch_tokens == layout_of(given).max_tokens


def test_auto_is_what_the_engines_take():
    found = {
        (b, d): ask_of(config(), MISTRAL, b, d) for b, d in (("torch", "cuda"), ("torch", "cpu"), ("mlx", "metal"))
    }
    assert [asked.dtype for asked in found.values()] == ["bfloat16", "float32", "bfloat16"]
    assert {asked.quantization for asked in found.values()} == {"none"}
    assert ask_of(config("adapter.dropout=0"), MISTRAL, "torch", "cuda").dropout is False


def test_what_cannot_be_loaded_cannot_be_asked_for():
    with pytest.raises(
        ConfigError, match=r"model\.quantization: got 'nf4', the backend 'mlx' honours: auto, none, int8, affine4"
    ):
        ask_of(config("model.quantization=nf4"), MISTRAL, "mlx", "metal")
    with pytest.raises(ConfigError, match=r"no linear layer is called 'query'\. This model has: down_proj, gate_proj"):
        ask_of(config("adapter.targets=[query]"), MISTRAL, "torch", "cuda")


# --- the longest document ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [H100, MAC, replace(CPU, quantization="nf4")])
@pytest.mark.parametrize("budget_gib", [12, 16, 24.5, 79])
def test_the_longest_document_fits_and_the_next_does_not(asked, budget_gib):
    budget = int(budget_gib * GIB)
    length = longest_that_fits(MISTRAL, asked, budget)
    need = [
        estimate(MISTRAL, replace(asked, max_length=n, micro_batch_tokens=n)).total_bytes for n in (length, length + 1)
    ]
    assert length >= 64
    assert need[0] <= budget < need[1]


def test_a_budget_decides_to_the_byte():
    need = estimate(MISTRAL, replace(H100, max_length=64, micro_batch_tokens=64)).total_bytes
    assert longest_that_fits(MISTRAL, H100, need) >= 64
    assert longest_that_fits(MISTRAL, H100, need - 1) == 0


SMALL = replace(MISTRAL, hidden=64, inner=96, layers=3, heads=32, kv_heads=1, head_dim=8, vocab=300)
ASKED = [
    H100,
    MAC,
    CPU,
    replace(H100, kernels="reference"),
    replace(MAC, device="cpu"),
    replace(MAC, kernels="reference"),
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{asked.backend}-{asked.device}-{asked.kernels}")
@pytest.mark.parametrize("decoder", [pytest.param(MISTRAL, marks=pytest.mark.long), SMALL], ids=["7b", "small"])
def test_among_lengths_that_are_attended_to_alike_a_longer_one_never_needs_less(decoder, asked):
    """Else a search by halves could miss the longest one that fits."""
    needs = {
        n: estimate(decoder, replace(asked, max_length=n, micro_batch_tokens=n)).total_bytes for n in range(64, 3000)
    }
    short, long = ([needs[n] for n in lengths] for lengths in (range(64, 513), range(513, 3000)))
    assert short == sorted(short) and long == sorted(long)


def test_the_longest_document_is_found_where_longer_ones_need_less(monkeypatch):
    """A single search by halves finds it or not, depending on where it begins."""
    deep, asked = replace(SMALL, layers=60), replace(MAC, device="cpu", rank=1)
    needs = {n: estimate(deep, replace(asked, max_length=n, micro_batch_tokens=n)).total_bytes for n in range(64, 1001)}
    assert needs[513] < needs[512]
    for longest in (700, 800, 1000):
        monkeypatch.setattr(module, "LONGEST", longest)
        for budget in (needs[300], needs[513], needs[longest - 90]):
            fitting = [n for n, need in needs.items() if n <= longest and need <= budget]
            assert longest_that_fits(deep, asked, budget) == max(fitting)


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_an_estimate_costs_next_to_nothing():
    """A plan asks for hundreds of them. 2,379 calls of functions take half a millisecond."""
    estimate(MISTRAL, H100)  # fills what is kept of the shape
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code) if event == "call" else None)
    try:
        estimate(MISTRAL, replace(H100, max_length=123))
    finally:
        sys.setprofile(None)
    assert len(calls) < 4000


def test_an_estimate_loads_neither_a_framework_nor_numpy():
    code = (
        "import sys\nfrom dualtune.engine.memory.estimate import Ask, longest_that_fits\n"
        "from dualtune.engine.memory.shapes import *\n"
        "ask = Ask('torch', 'cuda', 'nf4', 'bfloat16', 16, 'all-linear', 2048, 2048)\n"
        "assert longest_that_fits(decoder_of(KNOWN['Qwen/Qwen3-4B']), ask, 24 << 30)\n"
        "print(sorted({'torch', 'mlx', 'transformers', 'numpy', 'pydantic'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"

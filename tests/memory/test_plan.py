"""The memory planner: what `auto` means, and the cheapest changes with which a run fits."""

import math
from dataclasses import replace

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.doctor.bench.measure import Shape, training_flops
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.machine import Budget
from dualtune.engine.memory import plan as module
from dualtune.engine.memory.estimate import Ask, estimate, num_trained
from dualtune.engine.memory.plan import ROOM, choose_checkpointing, flops_per_token, plan_of, recompute_time
from dualtune.engine.memory.shapes import KNOWN, decoder_of

np = pytest.importorskip("numpy")
MISTRAL = decoder_of(KNOWN["mistralai/Mistral-7B-Instruct-v0.3"])
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CUDA = Ask("torch", "cuda", "none", "bfloat16", 16, SEVEN, micro_batch_tokens=8192, max_length=4096)
METAL = replace(CUDA, backend="mlx", device="metal", micro_batch_tokens=4096)
GIB = 2**30


def make_plan(decoder, ask, num_bytes, host_bytes=None, *, auto):
    return module.make_plan(decoder, ask, Budget(num_bytes, "free", host_bytes), auto=auto)


def total(ask):
    return estimate(MISTRAL, ask).total_bytes


def recomputing(ask, layers):
    return replace(ask, checkpointing=ActivationCheckpointing(layers))


@pytest.mark.parametrize("ask", [CUDA, METAL])
def test_auto_keeps_everything_that_fits(ask):
    enough = math.ceil(total(ask) / ROOM)
    assert choose_checkpointing(MISTRAL, ask, enough) == KEEP_ALL
    assert choose_checkpointing(MISTRAL, ask, enough - 2) != KEEP_ALL


@pytest.mark.parametrize("ask", [CUDA, METAL])
@pytest.mark.parametrize("layers", [3, 17, 30])
def test_auto_is_the_smallest_number_of_layers_that_fits(ask, layers):
    """Unless to recompute only the adapters' inputs is enough and cheaper."""
    budget = math.ceil(total(recomputing(ask, layers)) / ROOM)
    found = choose_checkpointing(MISTRAL, ask, budget)
    cheapest = recompute_time(MISTRAL, replace(ask, checkpointing=found))
    assert total(replace(ask, checkpointing=found)) <= ROOM * budget
    if not found.adapter_inputs:
        assert total(recomputing(ask, found.num_recomputed(32) - 1)) > ROOM * budget
    assert cheapest <= recompute_time(MISTRAL, recomputing(ask, layers))


def test_auto_recomputes_all_where_nothing_fits(wording):
    found = choose_checkpointing(MISTRAL, CUDA, GIB)
    assert found.layers == "all"
    wording(found.reason)


def test_the_reference_code_has_no_adapter_inputs_to_recompute():
    budget = math.ceil(total(replace(CUDA, checkpointing=ActivationCheckpointing(adapter_inputs=True))) / ROOM)
    assert choose_checkpointing(MISTRAL, CUDA, budget).adapter_inputs
    assert not choose_checkpointing(MISTRAL, replace(CUDA, kernels="reference"), budget).adapter_inputs


def test_a_value_in_the_config_is_not_the_planners_choice():
    text = "model: {name: m}\ndata: {train: d.jsonl, max_length: 4096}\nmemory: {checkpointing: %s}"
    for value, expected in (("none", KEEP_ALL), ("full", ActivationCheckpointing("all"))):
        plan = plan_of(parse_config(text % value), MISTRAL, "torch", "cuda", Budget(10 * GIB, ""))
        assert plan.ask.checkpointing == expected and not plan.fits
    with pytest.raises(ConfigError, match=r"memory.checkpointing: got 33 layers, but the model has 32; allowed: 1 to"):
        plan_of(parse_config(text % "{layers: 33}"), MISTRAL, "torch", "cuda", Budget(10 * GIB, ""))


# --- changes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gib", [40, 24, 20, 12, 8])
@pytest.mark.parametrize("ask", [CUDA, METAL])
def test_the_changes_fit_together_and_their_savings_add_up(ask, gib):
    plan = make_plan(MISTRAL, ask, gib * GIB, auto=False)
    assert not plan.fits and plan.savings
    assert gib * GIB - (total(ask) - sum(saving.saved_bytes for saving in plan.savings)) >= 0
    assert all(saving.saved_bytes > 0 and (saving.time is None or saving.time >= 1) for saving in plan.savings)


def test_what_costs_only_time_comes_before_what_changes_the_result():
    keys = {gib: [*make_plan(MISTRAL, CUDA, gib * GIB, auto=False).smaller.settings] for gib in (42, 24, 12, 2)}
    assert keys[42] == ["train.micro_batch_tokens"]
    assert keys[24] == ["train.micro_batch_tokens", "memory.checkpointing"]
    assert keys[12] == ["model.quantization", "train.micro_batch_tokens", "memory.checkpointing"]
    assert keys[2] == []


def test_the_suggestion_can_be_pasted_into_a_shell():
    plan = make_plan(MISTRAL, replace(CUDA, micro_batch_tokens=4096), 24 * GIB, auto=False)
    assert plan.smaller.settings["memory.checkpointing"].startswith("{layers: ")
    assert str(plan.smaller).startswith("--set 'memory.checkpointing={layers: ")
    assert str(plan.smaller).endswith("}' fits, and the result stays the same")


# --- streamed layers --------------------------------------------------------------------------------------------------

STREAMING = "model: {name: m}\ndata: {train: d.jsonl, max_length: 512}\nmemory: {resident_layers: 2, checkpointing: %s}"
GPT2_1B = decoder_of(
    {"model_type": "gpt2", "n_layer": 40, "n_embd": 1408, "n_head": 22, "n_positions": 1024, "vocab_size": 50257}
)


def test_streamed_layers_come_last_of_what_keeps_the_result():
    """As many as fit on the device, and every one of them is recomputed."""
    plan = make_plan(MISTRAL, CUDA, 6 * GIB, auto=False)
    keys = ["train.micro_batch_tokens", "memory.checkpointing", "memory.offload", "memory.resident_layers"]
    assert [*plan.smaller.settings] == keys
    assert plan.smaller.settings["memory.checkpointing"] == "full" and plan.savings[-1].time is None
    assert str(plan.smaller).endswith("fits, and the result stays the same")
    layers = plan.smaller.settings["memory.resident_layers"]
    offloaded = ActivationCheckpointing("all", offload=True)
    setup = replace(CUDA, micro_batch_tokens=4096, checkpointing=offloaded)
    assert total(replace(setup, resident_layers=layers)) <= 6 * GIB < total(replace(setup, resident_layers=layers + 1))


def test_layers_wait_only_where_the_host_has_room():
    """Each in a buffer of a power of two: 436 MB in bfloat16 take 512 MiB, so that 32 layers take 16 GiB."""
    keys = {
        host: {"memory.resident_layers", "model.quantization"}
        & {*make_plan(MISTRAL, CUDA, 6 * GIB, host, auto=False).smaller.settings}
        for host in (16 * GIB, 16 * GIB - 1, GIB)
    }
    both = {"memory.resident_layers", "model.quantization"}
    assert [*keys.values()] == [{"memory.resident_layers"}, both, {"model.quantization"}]


def test_a_run_does_not_fit_whose_waiting_layers_are_larger_than_the_host():
    setup = replace(CUDA, resident_layers=2, checkpointing=ActivationCheckpointing("all"))
    fits, fails = (make_plan(MISTRAL, setup, 24 * GIB, host, auto=False) for host in (16 * GIB, 16 * GIB - 1))
    assert fits.fits and not fits.savings and not fails.fits
    assert fails.compare().endswith("; layers that wait need 16.0 GiB of host memory, which has 16.0 GiB")
    assert fails.smaller.settings == {"model.quantization": "nf4"}


def test_fewer_layers_are_suggested_where_too_many_are_resident():
    setup = replace(CUDA, quantization="nf4", micro_batch_tokens=4096, resident_layers=20)
    setup = replace(setup, checkpointing=ActivationCheckpointing("all", offload=True))
    plan = make_plan(MISTRAL, setup, total(replace(setup, resident_layers=10)), auto=False)
    assert plan.smaller.settings == {"memory.resident_layers": 10}


def test_streaming_saves_nothing_where_the_device_is_the_host():
    cpu = replace(CUDA, device="cpu", checkpointing=ActivationCheckpointing("all"))
    assert total(replace(cpu, resident_layers=1)) > total(cpu)
    for gib in (30, 16, 8, 6):
        assert "memory.resident_layers" not in make_plan(MISTRAL, cpu, gib * GIB, auto=False).smaller.settings


@pytest.mark.parametrize("value", ["auto", "full"])
def test_streamed_layers_are_recomputed(value):
    plan = plan_of(parse_config(STREAMING % value), MISTRAL, "torch", "cuda", Budget(80 * GIB, ""))
    assert plan.ask.checkpointing == ActivationCheckpointing("all") and plan.ask.resident_layers == 2
    reason = {"auto": "auto: needed by memory.resident_layers=2", "full": "as configured"}[value]
    assert plan.ask.checkpointing.reason == reason


@pytest.mark.parametrize("value", ["none", "adapter_inputs", "{layers: 31}"])
def test_streamed_layers_that_are_not_recomputed_are_refused(value):
    with pytest.raises(ConfigError, match=r"got .* with memory.resident_layers=2 every layer .*; allowed: auto, full"):
        plan_of(parse_config(STREAMING % value), MISTRAL, "torch", "cuda", Budget(80 * GIB, ""))


@pytest.mark.parametrize(
    ("decoder", "layers", "targets", "gigabytes"),
    [(GPT2_1B, 2, "all-linear", 14), (MISTRAL, 1, SEVEN, 22)],
    ids=["1B in 14 GB", "7B in 22 GB"],
)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_documents_sizes_fit(decoder, layers, targets, gigabytes, quantization):
    setup = replace(
        CUDA, quantization=quantization, targets=targets, resident_layers=layers, max_length=1024,
        micro_batch_tokens=4096, checkpointing=ActivationCheckpointing("all"),
    )  # fmt: skip
    plan = make_plan(decoder, setup, gigabytes * 10**9, auto=False)
    assert plan.fits and plan.estimate.total_bytes < gigabytes * 10**9 / 2


# --- time -------------------------------------------------------------------------------------------------------------


def test_the_operations_are_those_that_bench_counts():
    adapter = num_trained(MISTRAL, CUDA)
    shape = Shape(MISTRAL.linear_parameters + 32768 * 4096, adapter, MISTRAL.width, (None,) * 32)
    counted = training_flops(shape, np.array([4096])).total / 4096
    assert flops_per_token(MISTRAL, CUDA) == pytest.approx(counted, rel=1e-3)


def test_the_operations_of_a_model_trained_whole_are_those_that_bench_counts():
    asked = replace(CUDA, method="full")
    shape = Shape(MISTRAL.linear_parameters + 32768 * 4096, 0, MISTRAL.width, (None,) * 32, is_trained=True)
    counted = training_flops(shape, np.array([4096])).total / 4096
    assert flops_per_token(MISTRAL, asked) == pytest.approx(counted, rel=1e-3)


def test_recomputing_all_layers_adds_less_than_a_forward_pass():
    assert recompute_time(MISTRAL, CUDA) == 1
    times = [recompute_time(MISTRAL, recomputing(CUDA, layers)) for layers in (8, 16, "all")]
    assert times == sorted(times) and times[0] > 1.1 and 1.4 < times[-1] < 1.5


# --- models that are trained whole ------------------------------------------------------------------------------------

# Layers, width and heads of GPT-2's sizes and of one between them; millions of parameters.
GPT2_SIZES = {
    "124M": (12, 768, 12, 124.4), "355M": (24, 1024, 16, 354.8), "774M": (36, 1280, 20, 774.0),
    "1.02B": (40, 1408, 22, 1024.5), "1.56B": (48, 1600, 25, 1557.6),
}  # fmt: skip


def gpt2_of(layers, width, heads):
    config = {"model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": 1024}
    return decoder_of(config | {"vocab_size": 50257})


@pytest.mark.parametrize(("layers", "width", "heads", "millions"), GPT2_SIZES.values(), ids=GPT2_SIZES)
def test_gpt2_trained_whole_takes_16_bytes_a_parameter(layers, width, heads, millions):
    """4 for the weight, 4 for the gradient and 8 for AdamW: 2.0 GB, 5.7 GB and 16.4 GB for 124M, 355M and 1.02B."""
    decoder = gpt2_of(layers, width, heads)
    assert decoder.num_parameters / 1e6 == pytest.approx(millions, abs=0.05)
    asked = Ask("torch", "cpu", "none", "float32", 16, (), micro_batch_tokens=512, max_length=512, method="full")
    found = estimate(decoder, asked)
    assert found["weights"] + found["optimizer"] == 16 * decoder.num_parameters
    assert "adapter" not in [part.name for part in found.parts]
    halved = estimate(decoder, replace(asked, dtype="bfloat16"))
    assert halved["weights"] == 6 * decoder.num_parameters  # the masters, and the copy to compute with


def test_a_model_trained_whole_is_never_quantized_and_has_no_adapter_inputs_to_recompute():
    asked = replace(CUDA, method="full")
    needed = total(asked)
    settings = [saving.settings for saving in make_plan(MISTRAL, asked, int(0.96 * needed), auto=False).savings]
    assert settings and not any("model.quantization" in each for each in settings)
    for gib in (1, 100, 110, 120):
        assert not choose_checkpointing(MISTRAL, asked, gib * GIB).adapter_inputs


def test_a_larger_evaluation_keeps_nothing_for_a_backward_pass():
    """Of SmolLM2-135M in float32: 2,048 tokens of an evaluation need less than 576 of a step; 200,000 need more."""
    decoder = decoder_of(KNOWN["HuggingFaceTB/SmolLM2-135M"])

    def config(tokens):
        text = "model: {name: m, dtype: float32}\ndata: {train: d.jsonl, max_length: 256}\n"
        return parse_config(f"{text}train: {{micro_batch_tokens: {tokens}}}")

    def plan(evaluated=None):
        return plan_of(config(576), decoder, "torch", "cpu", Budget(64 * GIB, ""), evaluated and config(evaluated))

    assert plan(2048) == plan()
    assert plan(200_000).estimate.total_bytes > plan().estimate.total_bytes


def test_moments_in_8_bits_are_offered_to_each_optimizer_that_has_them():
    found = {name: module._eight_bit_moments(replace(CUDA, optimizer=name)) for name in ("adamw", "lion", "muon")}
    assert {name: [stage.settings for stage in stages] for name, stages in found.items()} == {
        "adamw": [{"train.optimizer": "adamw_8bit"}], "lion": [{"train.optimizer": "lion_8bit"}], "muon": [],
    }  # fmt: skip

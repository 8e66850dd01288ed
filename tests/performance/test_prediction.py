"""The predicted time of a step: against the roofline worked out by hand, and what each limit and wait does to it."""

from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.data.batches import SequenceLayout, step_documents
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.detect import detect
from dualtune.engine.machines import MACHINES, limits_for, named, published
from dualtune.engine.memory.estimate import Ask
from dualtune.engine.memory.shapes import KNOWN, decoder_of
from dualtune.engine.step_time import predict

SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SMALL, MISTRAL = "HuggingFaceTB/SmolLM2-135M", "mistralai/Mistral-7B-Instruct-v0.3"
WITH_LIMITS = [name for name, machine in MACHINES.items() if published(machine)]


def predicted(model=MISTRAL, machine="h100-80", *, length=2048, tokens=8192, limits=None, **changes):
    is_mac = MACHINES[machine].is_apple_silicon
    backend, device = ("mlx", "metal") if is_mac else ("torch", "cuda")
    ask = Ask(backend, device, "none", "bfloat16", 16, SEVEN, tokens, length)
    documents = step_documents(np.full(tokens // length, length), SequenceLayout(tokens, tokens), "the test")
    return predict(decoder_of(KNOWN[model]), replace(ask, **changes), documents, limits or limits_for(machine))


@pytest.mark.parametrize(
    ("model", "most"),
    [(SMALL, 967e3), ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 162e3), ("meta-llama/Llama-3.2-3B-Instruct", 55.4e3),
     ("meta-llama/Llama-2-7b-hf", 27.6e3), (MISTRAL, 25.8e3), ("meta-llama/Llama-3.1-8B-Instruct", 24.5e3)],
)  # fmt: skip
def test_an_h200_is_never_faster_than_its_products_alone(model, most):
    """`most`: 788 TFLOP/s, measured on an H200, divided by the operations of a token at T = 2048, rank 16."""
    found = predicted(model, "h200")
    assert (0.1 if model == SMALL else 0.3) * most < found.tokens_per_s < most
    assert found.model_flops / found.tokens == pytest.approx(788e12 / most, rel=0.02)


@pytest.mark.parametrize("machine", WITH_LIMITS)
def test_every_machine_with_limits_gets_a_finite_time(machine):
    dtype = "float16" if machine in ("t4", "v100-16", "v100-32", "rtx-2080-ti-11") else "bfloat16"
    found = predicted(SMALL, machine, dtype=dtype)
    assert 100 < found.tokens_per_s < 1e6 and 0.01 < found.utilisation < 0.9
    assert all(part.seconds > 0 and part.bound in ("compute", "memory", "launch") for part in found.parts)
    assert {"base products", "attention", "optimizer"} <= {part.name for part in found.parts}


def test_the_bound_is_what_takes_longest():
    """Large products bound a large model, memory its norms, and the host a small model in short micro-batches."""
    large, small = predicted(), predicted(SMALL, length=512, tokens=512)
    bounds = {part.name: part.bound for part in large.parts}
    assert (large.bound, bounds["base products"], bounds["norms and residuals"]) == ("compute", "compute", "memory")
    assert small.bound == "launch" and small.step_s == small.host_s + small.waits_s
    limits = limits_for("h100-80")
    assert predicted(limits=replace(limits, bytes_per_s=limits.bytes_per_s / 50)).bound == "memory"


def test_a_limit_that_is_twice_as_high_halves_what_it_bounds():
    limits = limits_for("h100-80")
    twice = replace(limits, product_flops={"bfloat16": 2 * limits.product_flops["bfloat16"]})
    slow, fast = ({p.name: p.seconds for p in predicted(limits=each).parts} for each in (limits, twice))
    assert fast["base products"] == pytest.approx(slow["base products"] / 2)
    assert fast["norms and residuals"] == slow["norms and residuals"]


def test_a_wait_adds_its_time():
    found = predicted()
    assert (found.waits, found.waits_s) == (0, 0.0)  # tests/nogpu/test_fake_steps.py counts none
    assert replace(found, waits=2, waits_s=0.5).step_s == pytest.approx(found.step_s + 0.5)


def test_a_cpu_is_host_and_device_in_one():
    limits = replace(limits_for("h100-80"), is_asynchronous=False)
    both, apart = predicted(limits=limits), predicted()
    assert both.device_s == pytest.approx(apart.device_s + apart.host_s)


def test_what_is_computed_again_and_what_is_moved_takes_time():
    full = ActivationCheckpointing("all")
    kept, again = predicted(), predicted(checkpointing=full)
    parts = {part.name: part for part in again.parts}
    # A forward pass of the layers is about a half of what they take without, and the lowest is kept.
    assert 0.35 < parts["recomputation"].seconds / kept.device_s < 0.45
    streamed = predicted(checkpointing=full, resident_layers=2)
    moved = {part.name: part for part in streamed.parts}["transfers"]
    weights = 2 * 30 * 2 * decoder_of(KNOWN[MISTRAL]).linear_parameters / 32  # 30 layers, twice, of 2 bytes
    assert (moved.bytes, moved.bound) == (weights, "transfer")
    assert streamed.transfer_s == pytest.approx(weights / 64e9 / 0.88)
    some = predicted(checkpointing=ActivationCheckpointing(16, offload=True))
    moved = {part.name: part for part in some.parts}["transfers"]
    assert moved.bytes == 2 * 16 * 8192 * 4096 * 2


def test_dropout_and_packed_weights_take_time_and_their_absence_none():
    def names(**changes):
        return {part.name for part in predicted(**changes).parts}

    assert "dropout" in names() and "dropout" not in names(dropout=False)
    assert "unpacking" in names(quantization="nf4") and "unpacking" not in names()
    assert "unpacking" not in names(machine="m4-max-64", quantization="affine4")  # multiplied as it is stored


def test_what_cannot_be_predicted_says_why():
    with pytest.raises(EnvironmentFault, match=r"no time is predicted for model\.kernels=reference"):
        predicted(kernels="reference")
    with pytest.raises(EnvironmentFault, match="no limit is known for products in float8"):
        predicted(dtype="float8")
    with pytest.raises(EnvironmentFault, match="'mlx' does not say what its step takes on cpu"):
        predicted(backend="mlx", device="cpu")
    tiny = decoder_of(KNOWN[SMALL] | {"num_hidden_layers": 1, "vocab_size": 64})
    documents = step_documents(np.array([64]), SequenceLayout(64, 64), "the test")
    ask = Ask("torch", "cuda", "none", "bfloat16", 16, SEVEN, 64, 64)
    with pytest.raises(EnvironmentFault, match="compiles nothing below 5,000,000"):
        predict(tiny, ask, documents, limits_for("h100-80"))


def test_a_machine_without_limits_is_refused_with_the_names_of_those_that_have_some():
    with pytest.raises(ConfigError, match=r"--predict: got 'h100-81', allowed: this, h200, .*m4-max-64.*'h100-80'\?"):
        limits_for("h100-81")
    with pytest.raises(ConfigError, match="got 'cpu-16', allowed"):
        limits_for("cpu-16")


def test_a_machine_is_known_by_its_gpu_or_chip():
    assert published(named("rtx-4090-24")) == limits_for("rtx-4090-24")
    assert published(named("m4-max-128")) == limits_for("m4-max-64")
    assert published(named("cpu-16")) is None
    assert detect().gpus or published(replace(detect(), cpu="x86-64 processor")) is None

"""Activation checkpointing on torch: the same bits from less memory. Two processes: tests/distributed."""

import gc
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.conformance_losses import weighted
from dualtune.engine.testing.tiny_models import pack, random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dualtune_torch import checkpointing as checkpointing_of_torch  # noqa: E402
from dualtune_torch.checkpointing import Recomputation, SegmentedLayers  # noqa: E402
from dualtune_torch.kernels import choose  # noqa: E402

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DOCUMENTS = random_batch([9, 16, 5, 12], 96)
PACKED = pack(weighted(DOCUMENTS, 1.0, 0.3, -0.5, 2.0), [[2, 0, 3], [1]])
FULL = ActivationCheckpointing("all")
PLANS = [
    FULL, ActivationCheckpointing("all", every=2), ActivationCheckpointing(2), ActivationCheckpointing(4, every=3),
]  # fmt: skip
REMADE = [ActivationCheckpointing(adapter_inputs=True), ActivationCheckpointing(2, adapter_inputs=True)]
SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
FAMILIES = {"Qwen3": {"num_key_value_heads": 2, "head_dim": 8}, "GPT2": {}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    for family, changes in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SHAPE | changes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home / family)
    write_tiny_llama(home / "Llama", num_hidden_layers=4)
    return home


@pytest.fixture
def load(models, open_backend):
    def load_(family="Llama", *, dtype="float32", quantization="none", kernels="auto", how=KEEP_ALL, **spec):
        spec = AdapterSpec(**{"rank": 4, "alpha": 6.0, "dropout": 0.1, "targets": ("all-linear",)} | spec)
        request = LoadRequest(
            models / family, dtype, quantization, "pretrained", spec, OptimizerSpec(), seed=4, kernels=kernels,
            checkpointing=how,
        )  # fmt: skip
        engine = open_backend("torch").load(request)
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


def gradient(engine, *batches):
    """(gradient, loss) of micro-batches: one document per row, and packed with loss weights."""
    engine._adapter.flat.grad.zero_()
    engine._loss.zero_()
    for batch in batches or (DOCUMENTS, PACKED):
        engine.forward_backward(batch, divisor=30)
    return engine._adapter.flat.grad.clone(), engine._loss.clone()


def assert_same_bits(engine, plans):
    expected, names = gradient(engine), list(engine.model.state_dict())
    assert expected[0].norm() > 0.1
    for plan in [*plans, KEEP_ALL]:
        engine.set_checkpointing(plan)
        assert engine.description.checkpointing == plan.describe(4)
        assert all(map(torch.equal, gradient(engine), expected)), plan
        assert list(engine.model.state_dict()) == names


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"dtype": "bfloat16"}, {"dropout": 0.0, "scaling": "rank_stabilized"},
        {"quantization": "affine4", "dtype": "bfloat16"}, {"quantization": "nf4"},
        {"family": "Qwen3"}, {"family": "GPT2"},
    ],
    ids=["float32", "bfloat16", "no dropout, rsLoRA", "affine4", "nf4", "qwen3", "gpt2"],
)  # fmt: skip
def test_what_is_recomputed_gives_the_same_bits(load, changes):
    assert_same_bits(load(**changes), PLANS + REMADE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plain_code_gives_the_same_bits(load, dtype):
    assert_same_bits(load(dtype=dtype, kernels="reference"), PLANS)


def test_compiled_code_gives_the_same_bits(load, monkeypatch):
    """In bfloat16, in which a compiler may round elsewhere with gradients than without."""
    monkeypatch.setattr(choose, "WORTH_COMPILING", 0)
    assert_same_bits(load(dtype="bfloat16", kernels="fused"), [FULL, PLANS[-1], REMADE[-1]])


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_all_else_is_as_before(load, kernels, tmp_path):
    """Evaluation, log-probabilities, generation and merging."""

    def results(how, path):
        engine = load(kernels=kernels, how=how)
        tokens = []
        for token in engine.generate(
            np.array([5, 6, 7]), choose=lambda x: int(x.argmax()) if len(tokens) < 4 else None
        ):
            tokens.append(token)
        engine.save_merged(path)
        saved = (path / "model.safetensors").read_bytes()
        numbers = (engine.evaluate(PACKED).loss_sum, *(float(engine.target_logprobs(PACKED, dropout=on).sum())
                   for on in (False, True)), float(engine.logprobs(PACKED).sum()))  # fmt: skip
        return tokens, numbers, saved

    assert results(FULL, tmp_path / "a") == results(KEEP_ALL, tmp_path / "b")


# --- what is recomputed, and what is not ------------------------------------------------------------------------------


def runs_of_layers(engine, batch=DOCUMENTS):
    """How often each layer runs in a forward and a backward pass."""
    layers = list(engine.model.base_model.layers._modules.values())
    runs = [0] * len(layers)

    def count(layer, *_):
        runs[layers.index(layer)] += 1

    hooks = [layer.register_forward_hook(count) for layer in layers]
    engine.forward_backward(batch, divisor=30)
    for hook in hooks:
        hook.remove()
    return runs


@pytest.mark.parametrize(
    ("plan", "runs"), zip([*PLANS, KEEP_ALL], [[2, 2, 2, 1]] * 2 + [[2, 2, 1, 1], [2] * 4, [1] * 4], strict=True)
)
def test_these_layers_run_twice(load, plan, runs):
    assert runs_of_layers(load(how=plan)) == runs


def test_below_the_lowest_adapter_nothing_runs_twice(load):
    engine = load(targets=("layers.2.self_attn.q_proj",), how=FULL)
    assert runs_of_layers(engine) == [1, 1, 2, 1]
    assert_same_bits(engine, PLANS)


def test_a_forward_pass_alone_recomputes_nothing(load):
    engine = load(how=FULL)
    layers = engine.model.base_model.layers
    with torch.no_grad():
        assert [type(layer) for layer in layers] == [type(layer) for layer in layers[:4]] == [type(layers[0])] * 4
    engine.set_checkpointing(KEEP_ALL)
    assert type(layers) is torch.nn.ModuleList


def test_memory_falls(load, monkeypatch):
    """By torch's allocator, which also counts what hooks on saved tensors do not see."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from memory_storages import peak_of

    engine, batch = load(), random_batch([64] * 12, 96)
    peaks = []
    for plan in (KEEP_ALL, *REMADE[:1], ActivationCheckpointing(2), FULL):
        engine.set_checkpointing(plan)
        gradient(engine, batch)
        peaks.append(peak_of(lambda: engine.forward_backward(batch, divisor=30)))
    none, remade, half, full = peaks
    assert remade < 0.92 * none
    assert half < 0.7 * none
    assert full < 0.55 * none


def waiting() -> set[int]:
    """The segments and runners that exist, by identity."""
    gc.collect()
    kinds = (checkpointing_of_torch._Segment, checkpointing_of_torch._Runner)
    return {id(found) for found in gc.get_objects() if type(found) in kinds}


def test_after_an_error_nothing_waits(load, monkeypatch, unscanned):
    engine = load(how=ActivationCheckpointing(4, every=3))
    expected = gradient(engine)
    layer = list(engine.model.base_model.layers._modules.values())[1]
    before = waiting()
    with monkeypatch.context() as patch:
        patch.setattr(layer.mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gradient(engine)
    assert waiting() <= before  # of engines that other tests left
    assert all(map(torch.equal, gradient(engine), expected))


# --- loops of other models --------------------------------------------------------------------------------------------


def in_turn(layers, x):
    for layer in layers:
        x = layer(x)
    return x


LOOPS = {
    "slices": lambda layers, x: in_turn(layers[3:], in_turn(layers[:3], x)),
    "indices": lambda layers, x: in_turn((layers[i] for i in range(len(layers))), x),
    "keyword": lambda layers, x: in_turn([lambda x, layer=layer: layer(hidden_states=x) for layer in layers], x),
}


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, hidden_states, other=None):
        return torch.tanh(hidden_states @ self.weight)


def stack(segments):
    torch.manual_seed(1)
    layers = torch.nn.ModuleList([Layer() for _ in range(5)])
    layers.__class__ = SegmentedLayers
    layers.__dict__["segments"] = segments
    return layers


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_may_slice_and_index_the_layers(loop):
    x, gradients = torch.ones(3, 8, requires_grad=True), []
    for segments in ([], [range(0, 2), range(2, 4)]):
        layers = stack(segments)
        loop(layers, x).square().sum().backward()
        gradients.append([x.grad, *(weight.grad for weight in layers.parameters())])
        x.grad = None
    assert all(map(torch.equal, *gradients))


def test_a_loop_that_computes_between_its_layers_is_refused():
    def loop(layers, x):
        for layer in layers:
            x = layer(x) * 2
        return x

    x = torch.ones(3, 8, requires_grad=True)
    assert torch.equal(loop(stack([range(1), range(1, 2)]), x), loop(stack([]), x))
    with pytest.raises(ConfigError, match=r"computes between its layers \(Layer\); allowed: every: 1"):
        loop(stack([range(2)]), x)


@pytest.mark.parametrize("other", [{}, [], torch.ones(1, requires_grad=True), (torch.ones(1, requires_grad=True),)])
def test_layers_that_exchange_more_are_refused(other):
    with pytest.raises(
        ConfigError, match=r"\(Layer\) exchange more than the hidden states.*allowed: none, adapter_inputs"
    ):
        stack([range(1)])[0](torch.ones(3, 8), other=other)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_recomputed_is_refused(load):
    with pytest.raises(
        ConfigError, match=r"got adapter_inputs, but .* only by the fast LoRA kernel.*kernels: reference"
    ):
        load(kernels="reference", how=REMADE[0])
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM\) reads the output of a norm or of attention whose source"
    ):
        load(targets=("down_proj",), how=REMADE[0])
    with pytest.raises(ConfigError, match="got 5 layers, but the model has 4"):
        load(how=ActivationCheckpointing(5))
    engine = load(targets=("down_proj",), how=FULL)
    for impossible in (ActivationCheckpointing(5), REMADE[0]):
        with pytest.raises(ConfigError, match=r"the model has 4|LlamaForCausalLM\) reads"):
            engine.set_checkpointing(impossible)
        assert engine.description.checkpointing == "3 of 4 layers are recomputed"
        assert runs_of_layers(engine) == [2, 2, 2, 1]
    engine.model._no_split_modules = ["UnknownLayer"]
    unknown = Recomputation(engine.model, [])
    with pytest.raises(ConfigError, match="got all layers, but transformers does not list the layers of LlamaFor"):
        unknown.set(FULL, lambda: None)
    assert unknown.set(KEEP_ALL, lambda: None) == "none"

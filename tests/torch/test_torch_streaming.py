"""Layer streaming on torch: the same bits as with the whole base on the device, from slots and copies."""

import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.memory.estimate import Ask, estimate
from dualtune.engine.memory.shapes import decoder_of
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.conformance_losses import weighted
from dualtune.engine.testing.tiny_models import pack, random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dualtune_torch.host import streaming as streaming_of_torch  # noqa: E402
from dualtune_torch.host.streaming import StreamedLayers  # noqa: E402
from dualtune_torch.host.transfers import Transfers  # noqa: E402
from dualtune_torch.kernels import choose  # noqa: E402
from dualtune_torch.sharding import decide  # noqa: E402

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DTYPES = ("float32", "bfloat16")
DOCUMENTS = random_batch([9, 16, 5, 12], 96)
PACKED = pack(weighted(DOCUMENTS, 1.0, 0.3, -0.5, 2.0), [[2, 0, 3], [1]])
FULL = ActivationCheckpointing("all")
NUM_LAYERS = 4
SHAPE = {"num_hidden_layers": NUM_LAYERS, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    write_tiny_llama(home / "Llama", **SHAPE)
    torch.manual_seed(0)
    config = transformers.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home / "GPT2")
    return home


@pytest.fixture
def load(models, open_backend):
    def load_(slots=None, family="Llama", *, dtype="float32", quantization="none", kernels="auto", how=FULL, **spec):
        pytest.importorskip("bitsandbytes" if quantization == "nf4" else "torch")
        spec = AdapterSpec(**{"rank": 4, "alpha": 6.0, "dropout": 0.1, "targets": ("all-linear",)} | spec)
        request = LoadRequest(
            models / family, dtype, quantization, "pretrained", spec, OptimizerSpec(), seed=4, kernels=kernels,
            checkpointing=how, resident_layers=slots,
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


def assert_same_bits(engine, expected, *batches):
    assert expected[0].norm() > 0.1
    for _ in range(2):  # the second time the slots are full
        assert all(map(torch.equal, gradient(engine, *batches), expected))


# --- the same bits ----------------------------------------------------------------------------------------------------

# Each format once; in its other dtype in `make test-long`.
ONCE = {("none", "float32"), ("nf4", "bfloat16"), ("affine4", "float32"), ("int8", "bfloat16")}
FORMATS = [
    pytest.param(quantization, dtype, marks=[] if (quantization, dtype) in ONCE else [pytest.mark.long])
    for quantization in ("none", "nf4", "affine4", "int8")
    for dtype in DTYPES
]


@pytest.mark.parametrize(("quantization", "dtype"), FORMATS)
def test_streamed_layers_give_the_same_bits(load, quantization, dtype):
    """With dropout, packed documents and two micro-batches."""
    resident = load(quantization=quantization, dtype=dtype, how=KEEP_ALL)
    expected, loss = gradient(resident), resident.evaluate(PACKED).loss_sum
    for slots in (1, 2, 3, NUM_LAYERS):
        engine = load(slots, quantization=quantization, dtype=dtype)
        assert engine.evaluate(PACKED).loss_sum == loss
        assert_same_bits(engine, expected)


def compile_everything(monkeypatch):
    monkeypatch.setattr(choose, "WORTH_COMPILING", 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"kernels": "reference"}, {"kernels": "reference", "quantization": "nf4"}, {"family": "GPT2"},
        {"targets": ("layers.2.self_attn.q_proj",)}, {"kernels": "fused", "dtype": "bfloat16"},
        {"how": ActivationCheckpointing("all", adapter_inputs=True)}, {"how": ActivationCheckpointing(NUM_LAYERS)},
        {"method": "dora", "quantization": "affine4"}, {"init": "pissa"},
        {"method": "dora", "merge_for": "q4_0", "dtype": "bfloat16"},
    ],
    ids=["plain", "plain nf4", "gpt2", "one adapter", "compiled", "remade", "last layer too", "dora", "kept start",
         "merge of dora"],
)  # fmt: skip
def test_other_setups_give_the_same_bits(load, changes, monkeypatch):
    if changes.get("kernels") == "fused":
        compile_everything(monkeypatch)
    expected = gradient(load(**changes | {"how": KEEP_ALL}))
    engine = load(2, **changes)
    assert_same_bits(engine, expected)
    assert not any(isinstance(kept, torch.Tensor) for layer in engine._layers.values() for kept in vars(layer).values())


@pytest.mark.parametrize("spec", [{}, {"method": "dora"}], ids=["lora", "dora"])
def test_all_else_is_as_before(load, tmp_path, spec):
    """Steps, log-probabilities, generation and merging, one after another."""

    def results(engine, path):
        for _ in range(2):
            engine.forward_backward(DOCUMENTS, divisor=30)
            yield float(engine.optim_step(lr=1e-2, max_grad_norm=1.0).grad_norm)
        yield from (float(engine.target_logprobs(PACKED, dropout=on).sum()) for on in (False, True))
        yield engine.logprobs(PACKED).tobytes()
        yield [*islice(engine.generate(np.array([5, 6, 7]), choose=lambda logits_V: int(logits_V.argmax())), 3)]
        engine.save_merged(path)
        yield (path / "model.safetensors").read_bytes()
        yield engine.evaluate(PACKED).loss_sum

    assert [*results(load(2, **spec), tmp_path / "a")] == [*results(load(how=KEEP_ALL, **spec), tmp_path / "b")]


def test_after_an_error_the_next_step_is_right(load, monkeypatch):
    engine = load(2)
    expected = gradient(engine)
    layer = list(engine.model.base_model.layers._modules.values())[2]
    with monkeypatch.context() as patch:
        patch.setattr(layer.mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gradient(engine)
    engine.discard()
    assert_same_bits(engine, expected)


def test_a_frozen_weight_can_be_read(load):
    for quantization in ("none", "nf4"):
        resident, engine = (load(slots, quantization=quantization) for slots in (None, 1))
        for path in ("model.layers.3.mlp.up_proj", "model.layers.0.self_attn.q_proj"):
            assert np.array_equal(engine._frozen(path), resident._frozen(path))


# --- what is on the device, and what is copied ------------------------------------------------------------------------


def streamed_tensors(engine):
    return [layer.tensors for layer in engine._streamed._layers]


@pytest.mark.parametrize("slots", [1, 2, 3, NUM_LAYERS])
def test_copies_are_counted(load, slots):
    """2 L - slots in the first pass: the layers at the top are still there when it turns. Then those at the bottom."""
    engine = load(slots, dropout=0.0)
    engine._streamed.release()
    transfers, layer = engine._streamed.transfers, engine._streamed._layers[0]
    size = sum(tensor.nbytes for tensor in layer.tensors)
    for expected in (2 * NUM_LAYERS - slots, 2 * (NUM_LAYERS - slots), 2 * (NUM_LAYERS - slots)):
        copies, copied = transfers.num_copies, transfers.num_bytes
        engine.forward_backward(DOCUMENTS, divisor=30)
        assert (transfers.num_copies - copies, transfers.num_bytes - copied) == (expected, expected * size)


def test_the_next_layers_in_the_direction_of_travel_come_ahead(load):
    """Up to the last layer, and down again; those that were used are kept until their place is needed."""
    engine, seen = load(2, dropout=0.0), []
    for number, layer in enumerate(engine.model.base_model.layers._modules.values()):
        layer.register_forward_hook(lambda *_, number=number: seen.append((number, sorted(engine._streamed._at))))
    engine.forward_backward(DOCUMENTS, divisor=30)
    up = [(0, [0, 1]), (1, [1, 2]), (2, [2, 3]), (3, [2, 3])]
    assert seen == [*up, (2, [1, 2]), (1, [0, 1]), (0, [0, 1])]


def test_a_base_larger_than_the_device_trains(load):
    """Its layers take four times the memory that they have on the device, where they never are all at once."""
    engine = load(1, dropout=0.0)
    streaming = engine.description.streaming
    assert streaming["host_bytes"] == NUM_LAYERS * streaming["resident_bytes"]
    assert streaming["resident_bytes"] == sum(slot.buffer.nbytes for slot in engine._streamed._slots)
    buffers = {slot.buffer.data_ptr() for slot in engine._streamed._slots}
    resident = []

    def count(*_):
        on_device = [t.untyped_storage().data_ptr() in buffers for tensors in streamed_tensors(engine) for t in tensors]
        resident.append(sum(on_device))

    hooks = [layer.register_forward_hook(count) for layer in engine.model.base_model.layers._modules.values()]
    losses = []
    for _ in range(5):
        engine.forward_backward(DOCUMENTS, divisor=DOCUMENTS.num_targets)
        losses.append(float(engine.optim_step(lr=2e-2, max_grad_norm=1.0).loss))
    assert set(resident) == {7} and len(resident) == 5 * (2 * NUM_LAYERS - 1)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert all(hook.remove() is None for hook in hooks)


def test_a_slot_is_as_large_as_the_largest_layer(load):
    from transformers.models.llama.modeling_llama import LlamaMLP

    model = load(how=KEEP_ALL, kernels="reference").model
    wide = LlamaMLP(transformers.LlamaConfig(hidden_size=64, intermediate_size=512))
    model.model.layers._modules["1"].mlp = wide.requires_grad_(False)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        streamed = StreamedLayers(model, torch.device("cpu"), 2)
        assert torch.equal(model(tokens).logits, expected)
    attention = 4 * (2 * 64 * 64 + 2 * 32 * 64)
    assert streamed.describe()["resident_bytes"] == 2 * (attention + 3 * 64 * 512 * 4)


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8", "affine4"])
def test_the_estimate_is_what_is_there(load, models, quantization, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from memory_storages import storages, tensors_of

    decoder = decoder_of(json.loads((models / "Llama" / "config.json").read_text()))
    ask = Ask("torch", "cpu", quantization, "float32", 4, "all-linear", 64, 64, resident_layers=2, checkpointing=FULL)
    engine = load(2, quantization=quantization)
    engine._streamed.release()
    adapter = {engine._adapter.flat.data_ptr(), *(layer.keys_I.data_ptr() for layer in engine._layers.values())}
    on_host = {pointer: size for pointer, size in storages(tensors_of(engine.model)).items() if pointer not in adapter}
    layer, *others = [sum(storages(tensors).values()) for tensors in streamed_tensors(engine)]
    assert others == [layer] * (NUM_LAYERS - 1)
    for slots in (1, 2, 3):
        asked = replace(ask, resident_layers=slots)
        whole = sum(on_host.values())
        assert estimate(decoder, asked)["weights"] == pytest.approx(whole + slots * layer, rel=0.005)
        on_gpu = estimate(decoder, replace(asked, device="cuda"))["weights"]
        assert on_gpu == pytest.approx(whole - (NUM_LAYERS - slots) * layer, rel=0.005)


# --- a device with its own memory -------------------------------------------------------------------------------------


class LateTransfers(Transfers):
    """A device whose copies wait until the computation waits for them. Tickets count what happened before."""

    def __init__(self, device):
        super().__init__(device)
        self.clock, self.waiting, self.in_use = 0, [], {}

    def computed(self):
        self.clock += 1
        return self.clock

    def copy(self, pairs, after):
        pairs = list(pairs)
        self.clock += 1
        assert after > self.in_use.get(pairs[0][0].untyped_storage().data_ptr(), 0), "the computation still reads it"
        self.waiting.append((self.clock, pairs))
        self.num_copies += 1
        return self.clock

    def wait(self, ticket):
        while self.waiting and self.waiting[0][0] <= ticket:
            self._copy(self.waiting.pop(0)[1])


def test_the_computation_waits_for_copies_and_copies_for_the_computation(load, monkeypatch):
    """With one flat buffer on the host, as for a GPU."""
    expected = gradient(load(how=KEEP_ALL, quantization="nf4"))
    monkeypatch.setattr(streaming_of_torch, "Transfers", LateTransfers)
    monkeypatch.setattr(streaming_of_torch, "_pinned", lambda size, device: torch.empty(size, dtype=torch.uint8))
    bind_to = streaming_of_torch._HostCopy.bind_to
    for slots in (1, 2, 3):
        engine = load(slots, quantization="nf4")
        transfers = engine._streamed.transfers

        def bound(layer, buffer, transfers=transfers):
            transfers.in_use[buffer.data_ptr()] = transfers.clock
            bind_to(layer, buffer)

        monkeypatch.setattr(streaming_of_torch._HostCopy, "bind_to", bound)
        assert_same_bits(engine, expected)
        assert transfers.num_copies > NUM_LAYERS


def test_a_copy_is_on_its_own_stream_between_two_events(monkeypatch):
    log = []

    class Stream:
        def __init__(self, name="copies"):
            self.name = name

        def record_event(self):
            log.append(f"{self.name} records")
            return f"event of {self.name}"

        def wait_event(self, event):
            log.append(f"{self.name} waits for {event}")

    @contextmanager
    def on(stream):
        log.append(f"on {stream.name}")
        yield
        log.append("back")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("computation"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    transfers, to = Transfers(torch.device("cuda")), torch.zeros(3)
    transfers.wait(transfers.copy([(to, torch.ones(3))], after=transfers.computed()))
    assert log == [
        "computation records", "on copies", "copies waits for event of computation", "copies records", "back",
        "computation waits for event of copies",
    ]  # fmt: skip
    assert to.sum() == 3 and transfers.num_bytes == 12


def test_a_finished_layer_goes_to_the_host(load, monkeypatch):
    moved = []
    model = load(how=KEEP_ALL).model

    def finish(path, module):
        module = torch.nn.Linear(2, 2)
        monkeypatch.setattr(module, "to", lambda device: moved.append((path, device)) or module)
        return module

    on_host = streaming_of_torch.kept_on_host(finish, model)
    for path in ("model.embed_tokens", "model.layers.0.mlp.up_proj", "model.norm", "lm_head"):
        on_host(path, None)
    assert moved == [("model.layers.0.mlp.up_proj", "cpu")]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [KEEP_ALL, ActivationCheckpointing(2), ActivationCheckpointing("all", every=2)])
def test_layers_that_are_not_recomputed_alone_are_refused(load, how):
    with pytest.raises(ConfigError, match=r"memory.checkpointing: got .* memory.resident_layers=2 .*: auto, full"):
        load(2, how=how)
    engine = load(2)
    expected = gradient(engine)
    with pytest.raises(ConfigError, match=r"allowed: auto, full"):
        engine.set_checkpointing(how)
    assert_same_bits(engine, expected)


def test_more_layers_than_there_are_and_models_without_a_list_are_refused(load):
    with pytest.raises(ConfigError, match=r"got 5, but the model has 4 layers; allowed: 1 to 4, or all"):
        load(NUM_LAYERS + 1)
    model = load(how=KEEP_ALL).model
    model.model.layers.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"got 2, but only frozen layers can be streamed; allowed: all"):
        StreamedLayers(model, torch.device("cpu"), 2)
    model._no_split_modules = ["UnknownLayer"]
    with pytest.raises(ConfigError, match=r"does not list the layers of LlamaForCausalLM; allowed: all"):
        StreamedLayers(model, torch.device("cpu"), 2)


def test_a_split_base_is_not_streamed(models):
    spec = AdapterSpec(4, 6.0, 0.0, ("all-linear",))
    request = LoadRequest(
        models / "Llama", "float32", "none", "pretrained", spec, OptimizerSpec(), seed=4, resident_layers=2
    )

    def decided(sharding):
        return decide(replace(request, sharding=sharding), torch.float32, "none", torch.device("cpu"))[0]

    assert [decided("auto"), decided("none")] == ["none", "none"]
    with pytest.raises(ConfigError, match=r"memory.sharding: got full, but with memory.resident_layers"):
        decided("full")

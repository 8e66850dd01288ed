"""The inputs of recomputed layers in host memory. On a CPU both memories are one: what is copied when is tested."""

import gc
import weakref
from dataclasses import replace

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.engine.backend import LoadRequest
from dualtune.engine.capabilities import check_value
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.machine import Budget
from dualtune.engine.memory.estimate import Ask, checkpointing_of, estimate
from dualtune.engine.memory.plan import make_plan
from dualtune.engine.memory.shapes import KNOWN, decoder_of
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.tiny_models import pack, random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from dualtune_torch.card import CARD  # noqa: E402
from dualtune_torch.host import transfers as offload_of_torch  # noqa: E402
from dualtune_torch.host.transfers import (  # noqa: E402
    HostInputs,
    OffloadedInput,
    Transfers,
)

DOCUMENTS = random_batch([9, 16, 5, 12], 96)
PACKED = pack(DOCUMENTS, [[2, 0, 3], [1]])
FULL = ActivationCheckpointing("all", offload=True)
CONFIG = "model: {name: m}\ndata: {train: d.jsonl}\nmemory: {checkpointing: %s, offload: activations}"
MISTRAL = decoder_of(KNOWN["mistralai/Mistral-7B-Instruct-v0.3"])
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CUDA = Ask("torch", "cuda", "none", "bfloat16", 16, SEVEN, micro_batch_tokens=4096, max_length=4096, checkpointing=FULL)
GIB = 2**30


class LateTransfers(Transfers):
    """Copies that wait until the computation waits for one of them or a later one."""

    def __init__(self, device):
        super().__init__(device)
        self.waiting, self.clock = [], 0

    def copy(self, pairs, after):
        self.clock += 1
        self.waiting.append((self.clock, list(pairs)))
        return self.clock

    def wait(self, ticket):
        while self.waiting and self.waiting[0][0] <= ticket:
            self._copy(self.waiting.pop(0)[1])


@pytest.fixture
def engine(tmp_path, open_backend):
    write_tiny_llama(tmp_path, num_hidden_layers=5)
    spec = AdapterSpec(4, 6.0, 0.1, ("all-linear",))
    request = LoadRequest(tmp_path, "float32", "none", "pretrained", spec, OptimizerSpec(), seed=4)
    engine = open_backend("torch").load(request)
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    return engine


def gradient(engine):
    engine._adapter.flat.grad.zero_()
    for batch in (DOCUMENTS, PACKED):
        engine.forward_backward(batch, divisor=30)
    return engine._adapter.flat.grad.clone()


@pytest.mark.parametrize("transfers", [Transfers, LateTransfers])
def test_the_gradients_are_the_same_bits(engine, transfers, monkeypatch):
    monkeypatch.setattr(offload_of_torch, "Transfers", transfers)
    expected = gradient(engine)
    for how in (FULL, ActivationCheckpointing(3, offload=True), ActivationCheckpointing("all", every=2, offload=True)):
        engine.set_checkpointing(how)
        assert engine.description.checkpointing.endswith(", from inputs in host memory")
        moved = engine._recomputation._host.transfers
        before = moved.num_bytes
        assert torch.equal(gradient(engine), expected), how
        segments, inputs = len(how.segments(5)), (DOCUMENTS.tokens_BT.size + PACKED.tokens_BT.size) * 64 * 4
        assert moved.num_bytes - before == 2 * segments * inputs  # there and back
    engine.set_checkpointing(KEEP_ALL)
    assert torch.equal(gradient(engine), expected)


def test_two_inputs_are_on_the_device_at_a_time():
    """The one that is used, and the next one on its way."""
    host, inputs = HostInputs(torch.device("cpu")), [torch.full((4, 3), float(i)) for i in range(6)]
    moved = [host.put(x) for x in inputs]
    alive = weakref.WeakSet()
    for i in reversed(range(6)):
        x = moved[i].take()
        assert torch.equal(x, inputs[i]) and x.data_ptr() != inputs[i].data_ptr()
        coming = [each for each in moved if each._coming is not None]
        assert coming == moved[max(0, i - 1) : i]
        alive.add(x)
        assert len(alive) == 1
        del x
    assert host.transfers.num_copies == 12


def test_a_forward_pass_without_a_backward_pass_leaves_nothing(engine, unscanned):
    engine.set_checkpointing(FULL)
    expected = gradient(engine)
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) is OffloadedInput}
    engine._loss_sum(engine._inputs(DOCUMENTS))
    gc.collect()
    assert {id(each) for each in gc.get_objects() if type(each) is OffloadedInput} <= before
    assert torch.equal(gradient(engine), expected)


# --- config and plan --------------------------------------------------------------------------------------------------


def test_a_cpu_refuses_it_by_name(open_backend):
    with pytest.raises(ConfigError, match=r"memory.offload: got activations, the backend 'torch' honours: auto, none"):
        check_value(open_backend("torch"), "memory.offload", "activations")
    assert CARD.capabilities("cuda")["memory.offload"] == {"auto", "none", "activations"}


def test_inputs_are_those_of_recomputed_layers():
    assert checkpointing_of(parse_config(CONFIG % "auto")) == FULL
    assert checkpointing_of(parse_config(CONFIG % "auto")).reason == "auto: needed by memory.offload=activations"
    layers = checkpointing_of(parse_config(CONFIG % "{layers: 3}"))
    assert layers == ActivationCheckpointing(3, offload=True)
    for value in ("none", "adapter_inputs"):
        with pytest.raises(ConfigError, match=f"got {value}, but with memory.offload=activations .*: auto, full"):
            checkpointing_of(parse_config(CONFIG % value))


def test_the_estimate_has_two_inputs():
    kept = replace(CUDA, checkpointing=replace(FULL, offload=False))
    freed = estimate(MISTRAL, kept)["activations"] - estimate(MISTRAL, CUDA)["activations"]
    assert freed == (31 - 2) * 4096 * 4096 * 2


def test_the_plan_moves_inputs_after_it_has_recomputed_everything():
    kept = replace(CUDA, checkpointing=replace(FULL, offload=False))
    have = (estimate(MISTRAL, kept).total_bytes + estimate(MISTRAL, CUDA).total_bytes) // 2
    plan = make_plan(MISTRAL, replace(CUDA, checkpointing=KEEP_ALL), Budget(have, ""), auto=True)
    assert plan.smaller.settings == {"memory.offload": "activations"}
    plan = make_plan(MISTRAL, replace(CUDA, checkpointing=KEEP_ALL), Budget(have, ""), auto=False)
    assert plan.smaller.settings == {"memory.checkpointing": "full", "memory.offload": "activations"}
    metal = make_plan(
        MISTRAL, replace(CUDA, backend="mlx", device="metal", checkpointing=KEEP_ALL), Budget(have, ""), auto=False
    )
    assert "memory.offload" not in metal.smaller.settings

"""Micro-steps that are recorded: padded to few shapes, replayed with new numbers, refused where they differ."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import Batch, LoadRequest
from dualtune.engine.capabilities import check_value
from dualtune.engine.card import ActivationCheckpointing, card_of
from dualtune.engine.testing.conformance import assert_close, random_adapter
from dualtune.engine.testing.tiny_models import pack, random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")

from dualtune_torch import dora, merged  # noqa: E402
from dualtune_torch import engine as engine_module  # noqa: E402
from dualtune_torch.host.inputs import Inputs, arrays_of, padded, to_device  # noqa: E402
from dualtune_torch.kernels import graphs  # noqa: E402
from dualtune_torch.weights.stacks import PackedStack  # noqa: E402

CPU = torch.device("cpu")
SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.1, targets=("all-linear",))
PACKED = pack(random_batch([9, 16, 5, 12], 96), [[2, 0, 3], [1]])
WEIGHTED = replace(PACKED, weights_BT=np.linspace(-1, 2, PACKED.labels_BT.size, dtype=np.float32).reshape(2, -1))
FULL = replace(PACKED, labels_BT=PACKED.tokens_BT)  # every token is a target: there is none to add


@pytest.fixture
def engine(open_backend, tmp_path):
    request = LoadRequest(write_tiny_llama(tmp_path), "float32", "auto", "pretrained", SPEC, OptimizerSpec(), seed=4)
    engine = open_backend("torch").load(request)
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    return engine


@pytest.mark.parametrize("batch", [PACKED, WEIGHTED, FULL], ids=["plain", "weighted", "full"])
def test_padding_changes_no_gradient(engine, batch):
    engine.forward_backward(batch, divisor=7.0)
    loss, grads = float(engine._loss), {name: grad.clone() for name, grad in engine._adapter.grads.items()}
    engine.discard()
    sent = _sent(batch)
    engine._micro_step(Inputs.of(sent, engine._inputs(batch).documents), sent["divisor"][0])
    assert float(engine._loss) == pytest.approx(loss, rel=1e-6)
    found = {name: grad.numpy() for name, grad in engine._adapter.grads.items()}
    assert_close(found, {name: grad.numpy() for name, grad in grads.items()}, 1e-5)


def test_micro_batches_of_one_size_have_few_shapes():
    random = np.random.default_rng(0)
    shapes = set()
    for _ in range(300):
        borders = np.sort(random.choice(np.arange(1, 512), random.integers(1, 40), replace=False))
        segments_BT = 1 + np.searchsorted(borders, np.arange(512), side="right")[None].astype(np.int32)
        labels_BT = np.where(random.random((1, 512)) < random.random(), 5, -100).astype(np.int32)
        batch = Batch(labels_BT, labels_BT, segments_BT, segments_BT, segments_BT.astype(np.uint32))
        arrays = padded(arrays_of(batch, positions=True))
        assert np.unique(arrays["where"]).size == arrays["where"].size  # rows that are written twice would be wrong
        assert arrays["labels"].min() >= 0
        shapes.add(tuple(array.shape for array in arrays.values()))
    assert len(shapes) <= 9 * 6


def test_a_step_is_recorded_the_second_time_and_replayed_with_new_numbers(monkeypatch):
    """Without a GPU: what is recorded is only remembered here, and run by `replay`."""
    done, recording = [], []

    class Graph:
        def replay(self):
            done.append(("replayed", *(float(place) for place in self.places)))

    @contextmanager
    def record(graph, **options):
        assert options["capture_error_mode"] == "thread_local"
        recording.append(graph)
        yield
        recording.pop()

    def step(sent):
        if recording:
            recording[-1].places = [sent["x"][0, 0]]
        else:
            done.append(("launched", float(sent["x"][0, 0])))

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, empty=torch.empty, **kwargs: empty(*size, **kwargs)
    )
    steps = graphs.MicroStepGraphs(CPU)
    for number in (1.0, 2.0, 3.0):
        steps.run({"x": np.full((2, 3), number)}, step)
    steps.run({"x": np.full((2, 4), 4.0)}, step)  # another shape
    assert done == [("launched", 1.0), ("replayed", 2.0), ("replayed", 3.0), ("launched", 4.0)]
    steps.forget()
    steps.run({"x": np.full((2, 3), 5.0)}, step)
    assert done[-1] == ("launched", 5.0)


def test_what_cannot_be_recorded_is_refused(engine):
    kernels, plain = engine._kernels, engine.model
    for changes, message in (
        ({"method": "full"}, "adapter.method: full"),
        ({"merge_for": "q4_0", "experts": True}, "adapter.merge_for rounds the merges of experts"),
    ):
        with pytest.raises(ConfigError, match=rf"model.kernels: got graph, but {message}"):
            graphs.check_recordable(kernels, replace(SPEC, **changes), plain, moves_weights=False)
    stack = PackedStack([torch.nn.Linear(4, 4)])
    with pytest.raises(ConfigError, match=r"packed experts are unpacked for the tokens"):
        graphs.check_recordable(kernels, SPEC, torch.nn.Sequential(stack), moves_weights=False)
    with pytest.raises(ConfigError, match=r"memory.sharding"):
        graphs.check_recordable(kernels, SPEC, plain, moves_weights=True)
    with pytest.raises(ConfigError, match=r"depend on the data \(loss plain"):
        graphs.check_recordable(replace(kernels, head=None, plain=["loss plain: x"]), SPEC, plain, moves_weights=False)
    with pytest.raises(ConfigError, match=r"memory\.offload"):
        graphs.check_offload(ActivationCheckpointing("all", offload=True))
    with pytest.raises(ConfigError, match="document by document"):  # float32, and no flash kernel
        engine._recordable_step(_sent(PACKED))


@pytest.mark.parametrize(
    ("changes", "owner", "name", "place"),
    [
        ({"method": "dora"}, dora.DoRALinear, "_norms_of_sum", "norms_O"),
        ({"merge_for": "q4_0"}, merged.MergedLoRALinear, "delta", "_merge"),
    ],
    ids=["norms", "merge"],
)
def test_a_recorded_micro_step_computes_nothing_of_the_weights(
    changes, owner, name, place, open_backend, tmp_path, monkeypatch
):
    """It is computed beside the graphs after each change of the adapter, into the place that the graphs read."""
    spec = replace(SPEC, targets=("q_proj",), **changes)
    request = LoadRequest(write_tiny_llama(tmp_path), "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=4)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs.MicroStepGraphs, "run", lambda self, arrays, step: step(_sent(PACKED)))
    monkeypatch.setattr(engine_module, "check_recordable", lambda *args, **options: None)
    plain, recorded = (open_backend("torch").load(replace(request, kernels=kernels)) for kernels in ("auto", "graph"))
    computed, right = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *args: (computed.append(self), right(self, *args))[1])
    monkeypatch.setattr(recorded, "_recordable_step", lambda sent: recorded._micro_step(
        Inputs.of(sent, recorded._inputs(PACKED).documents), sent["divisor"][0]
    ))  # fmt: skip
    places = [getattr(layer, place).data_ptr() for layer in recorded._layers.values()]
    for _ in range(2):
        for engine in (recorded, plain):
            engine.load_adapter_state(random_adapter(engine.adapter_state()))
            assert len(computed) == (len(places) if engine is recorded else 0)
            computed.clear()
            engine.forward_backward(PACKED, divisor=7.0)
            assert len(computed) == (0 if engine is recorded else len(places))
            computed.clear()
        found, expected = ({n: g.numpy().copy() for n, g in each._adapter.grads.items()} for each in (recorded, plain))
        assert_close(found, expected, 1e-5)
        for engine in (recorded, plain):
            engine.optim_step(lr=1e-2, max_grad_norm=1.0)
        computed.clear()
    assert [getattr(layer, place).data_ptr() for layer in recorded._layers.values()] == places


def test_only_an_nvidia_gpu_records():
    torch_card, mlx_card = card_of("torch"), card_of("mlx")
    assert "graph" in torch_card.capabilities("cuda")["model.kernels"]
    for capabilities in (torch_card.capabilities("cpu"), mlx_card.capabilities()):
        assert "graph" not in capabilities["model.kernels"]
    with pytest.raises(ConfigError, match=r"model\.kernels: got graph"):
        check_value(mlx_card, "model.kernels", "graph")


def _sent(batch):
    arrays = {**padded(arrays_of(batch, positions=True)), "divisor": np.array([7.0], np.float32)}
    return dict(zip(arrays, to_device([*arrays.values()], CPU), strict=True))

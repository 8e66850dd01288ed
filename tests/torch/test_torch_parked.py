"""The optimizer's state in host memory while a prediction is searched: on a CPU it can be seen to leave and return."""

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.capabilities import check_value
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from dualtune_torch.card import CARD  # noqa: E402
from dualtune_torch.host.transfers import (  # noqa: E402
    ParkedState,
    Transfers,
)

BATCH = random_batch([9, 16, 5], 96)


class LateTransfers(Transfers):
    """A copy waits until the computation waits for it."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.waiting = {}

    def copy(self, pairs, after):
        self.waiting[ticket := len(self.waiting) + 1] = list(pairs)
        return ticket

    def wait(self, ticket):
        self._copy(self.waiting.pop(ticket, ()))


def engine_with(open_backend, path, rule):
    write_tiny_llama(path)
    spec = AdapterSpec(4, 8.0, 0.0, ("q_proj", "v_proj"))
    return open_backend("torch").load(LoadRequest(path, "float32", "none", "random", spec, OptimizerSpec(rule), seed=1))


def take_step(engine):
    engine.forward_backward(BATCH, divisor=BATCH.num_targets)
    engine.optim_step(lr=1e-2, max_grad_norm=None)


def bits_of(engine):
    state = engine.optimizer_state()
    slots = {f"{slot} {name}": each.tobytes() for slot, found in state.slots.items() for name, each in found.items()}
    return state.step, slots, {name: each.tobytes() for name, each in engine.adapter_state().items()}


def copies_of(engine):
    """Not by `optimizer_state`: torch does not resize storage of a CPU that NumPy has seen."""
    return [tensor.clone() for tensor in engine._optimizer.tensors()]


@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit", "schedule_free"])
def test_the_state_leaves_the_device_and_comes_back_with_its_bits(open_backend, tmp_path, rule):
    """The next step is that of an engine whose state has stayed, though the copy back is late."""
    parking, staying = (engine_with(open_backend, tmp_path, rule) for _ in range(2))
    parking._parked = ParkedState(LateTransfers())
    for engine in (parking, staying):
        take_step(engine)
    with parking.offloaded_optimizer():
        tensors = list(parking._new_optimizer.tensors())
        assert tensors and all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        inside = parking.evaluate(BATCH).loss_sum
    assert inside == staying.evaluate(BATCH).loss_sum
    assert [id(tensor) for tensor in parking._new_optimizer.tensors()] == [id(tensor) for tensor in tensors]
    take_step(parking)
    take_step(staying)
    assert bits_of(parking) == bits_of(staying)


def test_it_comes_back_when_the_search_raises(open_backend, tmp_path):
    engine = engine_with(open_backend, tmp_path, "adamw")
    take_step(engine)
    before = copies_of(engine)
    with pytest.raises(KeyError), engine.offloaded_optimizer():
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(before, engine._optimizer.tensors(), strict=True))


def test_tensors_of_one_storage_are_moved_once():
    transfers, flat = LateTransfers(), torch.arange(10.0)
    parts = [flat[:4], flat[4:]]
    state = ParkedState(transfers)
    with state.parked(parts):
        assert flat.untyped_storage().nbytes() == 0
    assert transfers.num_bytes == 40
    state.wait()
    assert transfers.num_bytes == 80 and torch.equal(torch.cat(parts), torch.arange(10.0))


def test_only_a_device_with_memory_of_its_own_honours_it(open_backend):
    assert CARD.capabilities("cuda")["hybrid.offload"] == {"none", "optimizer"}
    for name in ("torch", "mlx", "numpy"):
        with pytest.raises(ConfigError, match=rf"hybrid.offload: got optimizer, the backend '{name}' honours: none"):
            check_value(open_backend(name), "hybrid.offload", "optimizer")


def test_the_state_can_be_read_right_after(open_backend, tmp_path):
    engine = engine_with(open_backend, tmp_path, "adamw")
    take_step(engine)
    engine._parked = ParkedState(LateTransfers())
    before = np.sort(copies_of(engine)[0].numpy())
    with engine.offloaded_optimizer():
        pass
    after = engine.optimizer_state().slots["m"]
    read = np.sort(np.concatenate([each.ravel() for each in after.values()]))
    assert before.any() and np.array_equal(before[before != 0], read[read != 0])

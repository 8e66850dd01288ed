"""Other weights in an engine for a while: those of the base, of a trial, or of the result of a run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from dualtune.adapter.spec import Tensors
from dualtune.backend import Engine, OptimizerState
from dualtune.optimizer import OptimizerSpec


@contextmanager
def using(engine: Engine, adapter: Tensors) -> Generator[None]:
    """Use other adapter weights inside the block, and always restore the engine's own at its end."""
    before = engine.adapter_state()
    engine.load_adapter_state(adapter)
    try:
        yield
    finally:
        engine.load_adapter_state(before)


@contextmanager
def using_result(engine: Engine, optimizer: OptimizerSpec) -> Generator[None]:
    """Use the result's weights inside the block. If these are the trained ones, nothing is read and nothing is done."""
    if optimizer.trains_the_result:
        yield
    else:
        with using(engine, result_of(optimizer, engine.adapter_state(), engine.optimizer_state())):
            yield


def result_of(optimizer: OptimizerSpec, adapter: Tensors, state: OptimizerState) -> Tensors:
    """Return the weights of the result, float32, from a training state: that of an engine or of a checkpoint."""
    if optimizer.trains_the_result:
        return adapter
    slots = {name: {slot: tensors[name] for slot, tensors in state.slots.items()} for name in adapter}
    return {name: optimizer.result(w, slots[name]) for name, w in adapter.items()}

"""The memory of the torch engine on a CPU: every storage by part, and the peak of a step by its allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualtune.engine.backend import Batch
from dualtune_torch import profile

Storages = dict[int, int]  # address -> bytes


def found_in(engine: Any, batch: Batch) -> dict[str, int]:
    """Bytes by part of the estimate, and the peak of a forward and backward pass besides what is always there."""
    always, weights, kept = always_in(engine), storages(tensors_of(engine.model)), kept_storages(engine, batch)
    gc.collect()
    return always | {
        "activations": sum(size for pointer, size in kept.items() if pointer not in weights),
        "peak": peak_of(lambda: engine.forward_backward(batch, divisor=batch.num_targets)),
    }


def always_in(engine: Any) -> dict[str, int]:
    """Bytes by part of the estimate that exist between two steps."""
    weights, adapter, optimizer = storages(tensors_of(engine.model)), engine._adapter, engine._optimizer
    buffers = [buffer for layer in engine._layers.values() for buffer in layer.buffers(recurse=False)]
    of_adapter = storages([adapter.flat, adapter._compute, *buffers])
    return {
        "weights": sum(size for pointer, size in weights.items() if pointer not in of_adapter),
        "adapter": sum(of_adapter.values()),
        "optimizer": sum(storages([adapter.flat.grad, optimizer.count, *optimizer.tensors()]).values()),
    }


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """All that a model has, the constants of NF4 included."""
    for module in model.modules():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            yield tensor
            state = getattr(tensor, "quant_state", None)
            while state is not None:
                yield from (value for value in vars(state).values() if isinstance(value, Tensor))
                state = state.state2


def storages(tensors: Iterable[Tensor]) -> Storages:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def kept_storages(engine: Any, batch: Batch) -> Storages:
    """What autograd saves in a forward pass."""
    kept: Storages = {}

    def note(tensor: Tensor) -> Tensor:
        kept.update(storages([tensor]))
        return tensor

    engine._dropout_seeds.seeds_BT = torch.from_numpy(batch.dropout_seeds_BT.view(np.int32))
    saving = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with engine._watching(batch, batch.num_targets), saving:
        loss = engine._loss_sum(engine._inputs(batch))
    engine._dropout_seeds.seeds_BT = None
    assert loss.requires_grad
    return kept


def peak_of(work: Callable[[], object]) -> int:
    return profile.peak_of(work, torch.device("cpu"))

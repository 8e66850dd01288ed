"""CUDA graphs of the micro-step: what one micro-batch launches is recorded once and then replayed by a single call.

For small models the host takes longer to launch a micro-step than the GPU to compute it. Numbers that change from one
micro-batch to the next are in tensors of fixed places, filled by one copy. Everything else is part of the graph, so the
shapes must repeat: `host.inputs.padded` sees to that. A graph is recorded when its shapes occur for the second time,
after all code for them was compiled by the first. All graphs share the memory of one pool: they never overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualtune.base.errors import ConfigError
from dualtune.engine.card import ActivationCheckpointing
from dualtune.model.adapter import AdapterSpec
from dualtune_torch.host.inputs import pinned
from dualtune_torch.host.transfers import flat_size, views
from dualtune_torch.kernels.choose import Kernels
from dualtune_torch.weights.stacks import PackedStack

MOST_GRAPHS = 16  # micro-batches of further shapes are launched kernel by kernel
Step = Callable[[Mapping[str, Tensor]], None]


class MicroStepGraphs:
    """Micro-steps by the shapes of what they get."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: dict[Any, tuple[Any, Tensor]] = {}  # and the flat buffer that each reads
        self._seen: set[Any] = set()

    def run(self, arrays: Mapping[str, np.ndarray], step: Step) -> None:
        """Do a step with these arrays. It must launch the same for all arrays of these shapes, and not synchronize."""
        key = tuple((name, array.shape) for name, array in arrays.items())
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        if key not in self._graphs and key in self._seen and len(self._graphs) < MOST_GRAPHS:
            self._graphs[key] = self._record(tensors, step)
        self._seen.add(key)
        flat = pinned([*tensors.values()])
        if key not in self._graphs:
            step(_named(flat.to(self._device, non_blocking=True), tensors))
            return
        graph, place = self._graphs[key]
        place.copy_(flat, non_blocking=True)
        graph.replay()

    def forget(self) -> None:
        """Free all graphs and their memory."""
        self._graphs.clear()
        self._seen.clear()

    def _record(self, tensors: Mapping[str, Tensor], step: Step) -> tuple[Any, Tensor]:
        place = torch.zeros(flat_size(tensors.values()), dtype=torch.uint8, device=self._device)
        graph = torch.cuda.CUDAGraph()
        # Another thread may pin memory at the same time, which is forbidden only in the thread that records.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step(_named(place, tensors))
        return graph, place


def check_recordable(kernels: Kernels, adapter: AdapterSpec, model: nn.Module, *, moves_weights: bool) -> None:
    """Raise ConfigError if a micro-step of this model does not launch the same each time, and add the graphs to the
    kernels in use if it does."""
    if adapter.trains_model:
        raise _refusal("adapter.method: full adds gradients to the float32 ones from Python")
    if adapter.beside:
        raise _refusal(f"{adapter.beside.keys} trains parameters of the base")
    if any(isinstance(module, PackedStack) for module in model.modules()):
        raise _refusal("packed experts are unpacked for the tokens that they have")
    if moves_weights:
        raise _refusal("memory.resident_layers and memory.sharding move weights while a step computes")
    if not kernels.attention or kernels.head is None:
        raise _refusal(f"this model keeps code whose shapes depend on the data ({'; '.join(kernels.plain)})")
    kernels.used.append("micro-steps as CUDA graphs")


def check_offload(checkpointing: ActivationCheckpointing) -> None:
    """Raise ConfigError if activations are moved to the host."""
    if checkpointing.offload:
        raise _refusal("memory.offload: activations uses host memory while a step computes")


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"model.kernels: got graph, but {reason}; allowed here: auto, fused, reference")


def _named(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(like, views(flat, [*like.values()]), strict=True))

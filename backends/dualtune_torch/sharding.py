"""Sharding of the frozen base: each process holds a part of every weight, and gathers a whole layer to compute with it.

This uses FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao et al., PyTorch FSDP, arXiv 2304.11277). The decoder layers,
the embedding and the output head are sharded, each as a separate group. The last norm, and an embedding that is also
the output head, stay whole in every process: FSDP2 would need the two in one group, which would keep them whole from
the first layer to the loss. The adapter is created afterwards and FSDP2 never sees it, so no gradient is scattered: the
only collective here is the all-gather.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from dualtune.base.errors import ConfigError, PeerLost
from dualtune.base.world import wait_limit_s
from dualtune.engine.backend import EngineDescription, LoadRequest
from dualtune.model.copies import staged
from dualtune_torch.distributed import joined, peer_lost
from dualtune_torch.kernels.allocator import is_out_of_memory
from dualtune_torch.weights.packed import PackedLayer
from dualtune_torch.weights.text_part import empty_model

# A base stays whole if it takes at most this share of a device's free memory: a step needs the rest.
LARGEST_SHARE = 0.8
GIB = 1 << 30
POLL_S = 1.0  # how often a process that waits for a part of a layer checks that the others are alive
FAILED = "dualtune/failed"  # a key in the store of all processes


def decide(
    request: LoadRequest, dtype: torch.dtype, quantization: str, device: torch.device
) -> tuple[Literal["none", "full"], str]:
    """Decide whether to shard the base, and say why. All processes get the same answer, whatever memory each has."""
    if request.adapter.trains_model:
        return "none", "the base is trained: adapter.method: full"
    if beside := request.adapter.beside:
        if request.sharding == "full":
            raise ConfigError(
                f"memory.sharding: got full, but {beside.keys} trains parameters of the base; allowed: auto, none"
            )
        return "none", f"parameters of the base are trained: {beside.keys}"
    if request.sharding == "none":
        return "none", "as configured"
    if request.resident_layers is not None:
        if request.sharding == "full":
            raise ConfigError(
                "memory.sharding: got full, but with memory.resident_layers the base stays in host memory; allowed: "
                "auto, none. Or set memory.resident_layers=all"
            )
        return "none", "the layers of the base are streamed"
    if request.sharding == "full":
        _check_full(quantization)
        return "full", "as configured"
    if not joined():
        return "none", "one process"
    if device.type == "cpu":
        return "none", "processes on CPUs share memory or run on separate machines; set full to shard anyway"
    # Each process sees its own device; the one with the least free memory decides for all.
    needed, free = _base_bytes(request, dtype, quantization), torch.cuda.mem_get_info(device)[0]
    fits = torch.tensor(float(needed <= LARGEST_SHARE * free))
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    size = f"a base of {needed / GIB:.1f} GiB"
    if fits:
        return "none", f"{size} fits in {LARGEST_SHARE:.0%} of each device's free memory"
    why = f"{size} does not fit in {LARGEST_SHARE:.0%} of each device's free memory (here {free / GIB:.1f} GiB)"
    if quantization == "nf4":
        return "none", f"{why}, but an nf4 base cannot be sharded; affine4 can"
    return "full", why


class Shards:
    """The processes that shard a base. All of them must create one at the same time."""

    def __init__(self, device: torch.device) -> None:
        wait = datetime.timedelta(seconds=wait_limit_s())  # as long as the watchdog
        # A separate group: if one process fails inside a layer and the others wait there, the loop's messages still
        # reach all processes (`dualtune.train.team`).
        self._group = dist.new_group(timeout=wait)
        self._mesh = DeviceMesh.from_group(cast(dist.ProcessGroup, self._group), device.type)
        self._store = dist.distributed_c10d._get_default_store()

    def split(self, model: PreTrainedModel, device: torch.device) -> None:
        """Shard a model that lies on the host: move this process's part, and what stays whole, to the device.

        The device never holds more of the base than this and one whole group.
        """
        for module in [*_layers(model), *_embedding_and_head(model)]:
            _buffers_to_parameters(module)
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
            if device.type == "cpu":
                module.set_custom_all_gather(_AllGather(self._store))  # type: ignore[attr-defined]
        whole = {parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)}
        # torch warns that a hook may get lost if an output is a view and is changed in place. The root's hook gathers
        # nothing, and the logits of a head are not changed in place.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDP\w*(Model|Linear)\) returned a view tensor")
        # An empty group as the root: it lets FSDP2 fetch the next layer while one computes.
        fully_shard(model.base_model, mesh=self._mesh, reshard_after_forward=True, ignored_params=whole)
        cast(nn.Module, model).to(device)

    @contextmanager
    def together(self) -> Generator[None]:
        """Context for all computation with the model: if this process fails in it, the others stop waiting for it."""
        try:
            yield
        except PeerLost:
            raise
        except Exception:
            self._store.set(FAILED, "1")
            raise


@contextmanager
def whole(layer: nn.Module) -> Generator[None]:
    """Context in which the weights of a layer can be read without calling the layer."""
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


def group_of(model: PreTrainedModel, part: nn.Module) -> nn.Module:
    """Return the module that is gathered when this part of a model computes; the part itself if nothing is."""
    groups = (module for module in model.modules() if isinstance(module, FSDPModule) and module is not model.base_model)
    return next((group for group in groups if any(module is part for module in group.modules())), part)


def is_split(model: PreTrainedModel) -> bool:
    return isinstance(model.base_model, FSDPModule)


def class_of(layer: nn.Module) -> type[nn.Module]:
    """Return the layer's class without the one that FSDP2 put before it."""
    return type(layer).__mro__[2] if isinstance(layer, FSDPModule) else type(layer)


class _AllGather:
    """gloo's all-gather, which stops when another process has failed instead of waiting for the time limit."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        try:
            parts = list(output_tensor.chunk(dist.get_world_size(group)))
            work = dist.all_gather(parts, input_tensor, group=group, async_op=True)
            assert work is not None
            while not _wait_briefly(work):
                if self._store.check([FAILED]):
                    raise PeerLost("another process of the run has failed. Check its output")
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise peer_lost(error) from error


def _wait_briefly(work: dist.Work) -> bool:
    """Wait briefly for a collective, and return whether it has ended. Raises RuntimeError if it has failed."""
    try:
        work.wait(datetime.timedelta(seconds=POLL_S))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


def check_whole(description: EngineDescription) -> None:
    """Raise ConfigError if the base is sharded, for operations that need all of it."""
    if description.sharding != "none":
        raise ConfigError(
            "merge: the base is sharded (memory.sharding: full). Merge in one process: dualtune adapter merge, with "
            "--platform cpu if the base does not fit on a device"
        )


def _check_full(quantization: str) -> None:
    if not joined():
        raise ConfigError("memory.sharding: got full, but this is one process; allowed: auto or none")
    if quantization == "nf4":
        raise ConfigError(
            "memory.sharding: got full, but bitsandbytes' NF4 weights cannot be sharded. Allowed with full: a plain "
            "base, or model.quantization: affine4; allowed with nf4: none"
        )


def _base_bytes(request: LoadRequest, dtype: torch.dtype, quantization: str) -> int:
    """Bytes of the base as it will be loaded, assuming that all matrices are quantized."""
    with torch.device("meta"), staged(request.model_dir, None) as place:
        config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        model = empty_model(config, dtype)
    bits = dtype.itemsize * 8
    bits_by_quantization = {"nf4": 4.127, "int8": 8, "affine4": 4 + 2 * bits / 64, "affine8": 8 + 2 * bits / 64}
    packed = bits_by_quantization.get(quantization, bits)
    return int(sum(p.numel() * (packed if p.dim() > 1 else bits) for p in model.parameters()) / 8)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, which transformers names in `_no_split_modules`."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"memory.sharding: got full, but transformers does not list the layers of {type(model).__name__}. "
            "Allowed: none (each process then holds the whole base)"
        )
    return layers


def _embedding_and_head(model: PreTrainedModel) -> list[nn.Module]:
    if model.all_tied_weights_keys:
        return []
    return [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]


def _buffers_to_parameters(module: nn.Module) -> None:
    """Turn packed weights, which are buffers, into parameters: FSDP2 shards only parameters."""
    for layer in module.modules():
        if isinstance(layer, PackedLayer):
            for name in layer.parts:
                tensor = getattr(layer, name)
                delattr(layer, name)
                layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

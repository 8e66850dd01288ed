"""The processes that torchrun has started this one with: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from dualtune.backend import Alone, World
from dualtune.errors import EnvironmentFault, PeerLost

# A process may wait long while another reads data; hung ones are the watchdog's (`dualtune.train.watchdog`).
TIMEOUT = datetime.timedelta(days=1)


def launched() -> bool:
    """Whether torchrun has started this process, with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def local_rank() -> int:
    """The number of this process on its machine: which of its GPUs it takes."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@cache
def world(device_type: str) -> World:
    """Join the others. EnvironmentFault if they cannot be reached."""
    if not launched():
        return Alone()
    try:
        # The loop's own notes go between CPUs, so that no GPU is waited for.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise EnvironmentFault(f"the other processes cannot be reached by way of {place}: {error}") from error
    return TorchWorld(dist.get_rank(), dist.get_world_size())


class TorchWorld:
    """See `dualtune.backend.World`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, data: bytes) -> list[bytes]:
        mine = _tensor(data)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        _reached(lambda: dist.all_gather(parts, mine))
        return [part.numpy().tobytes() for part in parts]

    def broadcast(self, data: bytes) -> bytes:
        tensor = _tensor(data)
        _reached(lambda: dist.broadcast(tensor, src=0))
        return tensor.numpy().tobytes()


def joined() -> bool:
    """Whether this process works with others: it was launched with them, and asked for its world."""
    return dist.is_initialized()


def add_up(tensors: list[Tensor]) -> None:
    """Sum tensors over all processes, in place. Without others there is nothing to do."""
    if joined():
        for tensor in tensors:
            _reached(lambda tensor=tensor: dist.all_reduce(tensor))


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _reached(collective: Callable[[], object]) -> None:
    try:
        collective()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise PeerLost(f"another process of the run is gone: {reason}. Look at its output") from error

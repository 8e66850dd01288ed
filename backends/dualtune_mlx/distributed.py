"""The processes that mlx.launch has started this one with, in a ring of TCP connections."""

from __future__ import annotations

import os
from functools import cache

import mlx.core as mx
import numpy as np

from dualtune.base.errors import EnvironmentFault
from dualtune.base.world import Alone, World


@cache
def world() -> World:
    """Join the other processes. Raises EnvironmentFault if they cannot be reached."""
    if not os.environ.get("MLX_HOSTFILE"):  # empty where mlx.launch starts one process
        return Alone()
    try:
        group = mx.distributed.init(strict=True, backend="ring")
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"the other processes of {os.environ['MLX_HOSTFILE']} cannot be reached: {error}"
        ) from error
    return MlxWorld(group.rank(), group.size())


class MlxWorld:
    """See `dualtune.base.world.World`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, data: bytes) -> list[bytes]:
        # The CPU stream: MLX runs its work in the order of the calls, as the ring requires.
        gathered = mx.distributed.all_gather(mx.array(np.frombuffer(data, np.uint8)), stream=mx.cpu)
        whole = np.array(gathered).tobytes()
        return [whole[start : start + len(data)] for start in range(0, len(whole), len(data))]

    def broadcast(self, data: bytes) -> bytes:
        if not data:
            return data
        mine = np.frombuffer(data, np.uint8) if self.rank == 0 else np.zeros(len(data), np.uint8)
        return np.array(mx.distributed.all_sum(mx.array(mine), stream=mx.cpu)).tobytes()


def added_up(array: mx.array) -> mx.array:
    """Return the sum of an array over all processes; in a single process, the array itself."""
    if world().size == 1:
        return array
    return mx.distributed.all_sum(array, stream=mx.cpu)

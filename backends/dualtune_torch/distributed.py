"""The processes that torchrun has started this one with: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import datetime
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from dualtune.base.errors import EnvironmentFault, PeerLost
from dualtune.base.world import MAX_PORT, Alone, World, launched_number, wait_limit_s
from dualtune_torch.kernels.allocator import is_out_of_memory

# Long, because one process may wait while another reads data. The watchdog ends hung processes
# (`dualtune.train.team`).
PATIENCE_S = 5.0  # before printing that the other processes are still missing
TIMEOUT = datetime.timedelta(days=1)


def launched() -> bool:
    """Whether torchrun has started this process together with others."""
    return launched_number("WORLD_SIZE", 1) > 1 and "RANK" in os.environ


def local_rank() -> int:
    """The number of this process on its machine, and so of the GPU that it uses."""
    return launched_number("LOCAL_RANK", 0)


@cache
def world(device_type: str) -> World:
    """Join the other processes. Raises EnvironmentFault if they cannot be reached."""
    if not launched():
        return Alone()
    size = launched_number("WORLD_SIZE", 1)
    rank = launched_number("RANK", None, below=size)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    who = f"process {rank} of {size} (RANK and WORLD_SIZE are set) waits for the others at {address}"
    advice = "To train in one process: unset RANK WORLD_SIZE"
    notice = threading.Timer(PATIENCE_S, lambda: print(f"waiting     {who}. {advice}", file=sys.stderr, flush=True))
    notice.start()
    try:
        store = _store(rank, size)
        # The loop's own messages go between CPUs, so that they synchronize no GPU.
        kinds = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(kinds, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentFault(f"{who}, but cannot reach them: {reason}. {advice}") from error
    finally:
        notice.cancel()
    return TorchWorld(rank, size)


def _store(rank: int, size: int) -> dist.TCPStore:
    """Create the store where the processes find each other: torch's own for `env://`, with two changes.

    By default its server listens on every address of the machine, even if all processes run on this one, and it waits
    for the other processes as long as for a collective.
    """
    host, port = os.environ["MASTER_ADDR"], launched_number("MASTER_PORT", None, below=MAX_PORT)
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener = listen(host, port).detach() if is_server and is_local(host) else None
    patience = datetime.timedelta(seconds=wait_limit_s())
    store = dist.TCPStore(host, port, size, is_server, patience, multi_tenant=True, master_listen_fd=listener)
    store.set_timeout(TIMEOUT)
    return store


def is_local(host: str) -> bool:
    """Whether only processes of this machine can reach an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens only on this address. Port 0 picks a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


class TorchWorld:
    """See `dualtune.base.world.World`."""

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
    """Whether this process is part of a group: it was launched with others and has called `world`."""
    return dist.is_initialized()


def add_up(tensors: list[Tensor]) -> None:
    """Sum tensors over all processes, in place. Does nothing in a single process."""
    if joined():
        for tensor in tensors:
            _reached(lambda tensor=tensor: dist.all_reduce(tensor))


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _reached(collective: Callable[[], object]) -> None:
    try:
        collective()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise peer_lost(error) from error


def peer_lost(error: RuntimeError) -> PeerLost:
    """Return the error for a collective that has failed because another process has ended."""
    reason = str(error).strip().splitlines()[0]
    return PeerLost(f"another process of the run is gone: {reason}. Check its output")

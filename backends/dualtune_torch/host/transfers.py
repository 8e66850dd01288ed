"""Copies between host and device, beside the computation on a CUDA stream of their own; on a CPU they happen at once.

A ticket stands for the work of a stream so far: a CUDA event, or None where everything happens at once. The host never
waits for a ticket: one stream waits for the other.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# ----------------------------------------------------------------------------------------------------------------------
# Where the host waits for a GPU, as torch's synchronization debug mode reports it.

MESSAGE = "called a synchronizing CUDA operation"  # of the warning, in c10/cuda/CUDAFunctions.cpp


@contextmanager
def counted_waits() -> Generator[list[str]]:
    """Yield a list that has, after the block, the file and line of each call in it that waited for the GPU.

    https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html
    """
    places: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
            waits = [warning for warning in caught if MESSAGE in str(warning.message)]
            places += [f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits]


# ----------------------------------------------------------------------------------------------------------------------
ALIGNMENT = 256  # bytes, as of CUDA's own allocations
Ticket = Any


class Transfers:
    """Copies in both directions, in the order in which they were asked for."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = self.num_copies = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def computed(self) -> Ticket:
        """Return a ticket for all computation that was queued until now."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Ticket) -> Ticket:
        """Copy (to, from) after this computation, and return a ticket for `wait`."""
        self.num_copies += 1
        if self._stream is None:
            return self._copy(pairs)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            self._copy(pairs)
            return self._stream.record_event()

    def wait(self, ticket: Ticket) -> None:
        """Let the computation that is queued from now on wait for a copy."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(ticket)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for to, source in pairs:
            to.copy_(source, non_blocking=True)
            self.num_bytes += source.nbytes
            for tensor in (to, source):
                if self._stream is not None and tensor.is_cuda:
                    tensor.record_stream(self._stream)  # not used for anything else before the copy is done


def flat_size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of a flat buffer for these tensors."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return parts of a flat buffer with the dtypes and shapes of these tensors."""
    parts, start = [], 0
    for tensor in like:
        parts.append(flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor.nbytes)
    return parts


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# ----------------------------------------------------------------------------------------------------------------------
# The kept inputs of recomputed segments in host memory, between the forward pass and their segment's backward pass.
#
# The backward pass needs them in reverse order. While it computes with one, the next is on its way back, so that two
# are on the device at a time.


class HostInputs:
    """Moves inputs of segments to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self.transfers = Transfers(device)
        self._last: Callable[[], OffloadedInput | None] = lambda: None  # of this forward pass, while its graph exists

    def put(self, x: Tensor) -> OffloadedInput:
        """Move an input to the host. The caller drops the tensor, and keeps what this returns."""
        moved = OffloadedInput(x, self.transfers, before=self._last)
        self._last = weakref.ref(moved)
        return moved


class OffloadedInput:
    """An input of a segment on the host."""

    def __init__(
        self, x: Tensor, transfers: Transfers, before: Callable[[], OffloadedInput | None] = lambda: None
    ) -> None:
        """`before` returns the input that the backward pass needs after this one."""
        self._transfers, self._before, self._device = transfers, before, x.device
        # torch keeps pinned blocks for reuse, and knows which copies still need one.
        self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        transfers.copy([(self._host, x.detach())], after=transfers.computed())
        self._coming: tuple[Tensor, Ticket] | None = None

    def take(self) -> Tensor:
        """Return the input on its device, and let the one before it come."""
        self._come()
        assert self._coming is not None
        (x, ticket), self._coming = self._coming, None
        if before := self._before():
            before._come()
        self._transfers.wait(ticket)
        return x

    def _come(self) -> None:
        """Start to copy it to the device, unless it is on its way. The stream of copies keeps their order."""
        if self._coming is None:
            x = torch.empty_like(self._host, device=self._device)
            self._coming = x, self._transfers.copy([(x, self._host)], after=self._transfers.computed())


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer's state in host memory while only forward passes run, and on the device again for the next update.


class ParkedState:
    """Takes tensors off the device for a while. They stay the same objects and come back with the same bits.

    The way back overlaps with what the device computes next: `wait` before the tensors are used.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._back: Ticket = None
        self._host: Sequence[Tensor] = ()  # while they are copied back

    @contextmanager
    def parked(self, tensors: Iterable[Tensor]) -> Generator[None]:
        """Free the device memory of the tensors inside the block; also if it raises, they come back."""
        self.wait()
        transfers = self._transfers
        storages = list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values())
        sizes = [storage.nbytes() for storage in storages]
        on_device = [_bytes_of(storage) for storage in storages]
        host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in on_device]
        transfers.wait(transfers.copy(zip(host, on_device, strict=True), transfers.computed()))
        for storage in storages:
            storage.resize_(0)
        try:
            yield
        finally:
            for storage, size in zip(storages, sizes, strict=True):
                storage.resize_(size)
            on_device = [_bytes_of(storage) for storage in storages]
            self._back = transfers.copy(zip(on_device, host, strict=True), transfers.computed())
            self._host = host

    def wait(self) -> None:
        """Let the computation that is queued from now on wait until the tensors are back."""
        if self._host:
            self._transfers.wait(self._back)
            self._back, self._host = None, ()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""The optimizer's state in host memory while only forward passes run, and on the device again for the next update."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dualtune_torch.host.transfers import Ticket, Transfers


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
        host = [torch.empty(each.shape, dtype=each.dtype, pin_memory=each.is_cuda) for each in on_device]
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

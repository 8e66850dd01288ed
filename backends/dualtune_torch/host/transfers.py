"""Copies between host and device, beside the computation on a CUDA stream of their own; on a CPU they happen at once.

A ticket stands for the work of a stream so far: a CUDA event, or None where everything happens at once. The host never
waits for a ticket: one stream waits for the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

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
    found, start = [], 0
    for tensor in like:
        found.append(flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor.nbytes)
    return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

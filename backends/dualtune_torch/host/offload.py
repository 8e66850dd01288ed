"""The kept inputs of recomputed segments in host memory, between the forward pass and their segment's backward pass.

The backward pass needs them in reverse order. While it computes with one, the next is on its way back, so that two are
on the device at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from dualtune_torch.host.transfers import Ticket, Transfers


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

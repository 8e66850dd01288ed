"""Mistakes that a change could make in the hot path. Each is made here on purpose: the counts must show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def change_nothing(hidden_MD: Tensor) -> None:
    """The counts without a fault."""


def read_a_number(hidden_MD: Tensor) -> None:
    """Read a value of the device on the host."""
    hidden_MD[0, 0].item()


def copy_pageable_memory(hidden_MD: Tensor) -> None:
    """Send a tensor without pinning it."""
    torch.ones(4).to(hidden_MD.device, non_blocking=True)


def compute_in_float32(hidden_MD: Tensor) -> None:
    """Multiply in a wider dtype than the model's."""
    hidden_MD.float() @ torch.ones(hidden_MD.shape[1], 2, device="cuda")


def compute_in_float64(hidden_MD: Tensor) -> None:
    """Let a float64 tensor slip in."""
    hidden_MD.double().sum()


def launch_more(hidden_MD: Tensor) -> None:
    """Launch a kernel that was not there."""
    torch.add(hidden_MD, 1)


@contextmanager
def made(engine: Any, fault: Callable[[Tensor], None]) -> Iterator[None]:
    """Make a mistake after each forward pass inside the block, with the hidden states at the targets."""
    right = engine._target_states

    def wrong(*output_and_inputs: Any) -> Tensor:
        hidden_MD = right(*output_and_inputs)
        fault(hidden_MD.detach())
        return hidden_MD

    engine._target_states = wrong
    try:
        yield
    finally:
        del engine._target_states


FAULTS = {
    fault.__name__: fault
    for fault in (
        change_nothing, read_a_number, copy_pageable_memory, compute_in_float32, compute_in_float64, launch_more,
    )
}  # fmt: skip

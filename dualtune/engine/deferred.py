"""A backend whose framework is imported when it is first needed: what its card says is known before.

An import takes seconds, so a wrong config, a missing file or a full disk is reported first.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from typing import Any, cast

import psutil

from dualtune.base.world import Alone, World
from dualtune.engine.backend import Backend, DeviceInfo, Engine, LoadRequest, MemoryStats
from dualtune.engine.card import Card, card_of
from dualtune.engine.choose import PlatformChoice, open_backend
from dualtune.engine.detect import detect


def deferred(choice: PlatformChoice, opened: Callable[[PlatformChoice], Backend] = open_backend) -> Backend:
    """Return the backend of a choice, which `opened` imports; at once where its card does not say enough."""
    card = card_of(choice.backend)
    device = _device(choice, card)
    is_launched = any(os.environ.get(name) for launch in card.launches for name in launch.variables)
    if device is None or is_launched or not card.package.is_installed:
        return opened(choice)
    return cast(Backend, DeferredBackend(card, device, lambda: opened(choice)))


def _device(choice: PlatformChoice, card: Card) -> DeviceInfo | None:
    """Return the device that the backend will compute on; None if only its framework knows."""
    machine = detect()
    if choice.device == "cpu" or set(machine.kinds) == {"cpu"}:
        name = platform.processor() or platform.machine()
        return DeviceInfo(name, "cpu", psutil.virtual_memory().total) if card.device("cpu") else None
    kind, _, number = choice.device.partition(":")
    index = int(number or 0)
    if kind != "cuda" or card.device("cuda") is None or index >= len(machine.gpus):
        return None
    gpu = machine.gpus[index]
    return DeviceInfo(gpu.name, "cuda", gpu.total_bytes, index)


class DeferredBackend:
    """Answers from the card what a run asks before it loads a model; all else is the backend's."""

    def __init__(self, card: Card, device: DeviceInfo, opened: Callable[[], Backend]) -> None:
        self.name = card.name
        self._card, self._device, self._opened = card, device, opened
        self._backend: Backend | None = None

    def capabilities(self) -> Mapping[str, frozenset[Any]]:
        return self._backend.capabilities() if self._backend else self._card.capabilities(self._device.kind)

    def devices(self) -> list[DeviceInfo]:
        return self._backend.devices() if self._backend else [self._device]

    def world(self) -> World:
        return self._backend.world() if self._backend else Alone()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return self._backend.is_out_of_memory(error) if self._backend else isinstance(error, MemoryError)

    def is_device_fault(self, error: BaseException) -> bool:
        return self._backend is not None and self._backend.is_device_fault(error)

    def memory(self) -> MemoryStats:
        return self._open().memory()

    def load(self, request: LoadRequest) -> Engine:
        return self._open().load(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._open(), name)

    def _open(self) -> Backend:
        if self._backend is None:
            self._backend = self._opened()
        return self._backend

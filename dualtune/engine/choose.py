"""The choice of a backend for a machine, always with the reason."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import psutil

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.base.world import Alone, World
from dualtune.engine.backend import DeviceInfo, Engine, LoadRequest, MemoryStats
from dualtune.engine.card import Card, automatic_cards, card_of, cards, platforms
from dualtune.engine.detect import detect, is_installed
from dualtune.engine.machine import Machine

if TYPE_CHECKING:
    from dualtune.engine.backend import Backend

__all__ = ["PlatformChoice", "choose", "is_installed", "open_backend"]


@dataclass(frozen=True, slots=True)
class PlatformChoice:
    platform: str  # a value of --platform: "cuda", "cuda:1", "cpu", or the name of a backend
    backend: str
    device: str  # to open the backend with
    reason: str


def choose(platform: str, machine: Machine | None = None) -> PlatformChoice:
    """Return the backend and device for `--platform`. EnvironmentFault if no backend that can train is installed."""
    if platform == "auto":
        return _automatic(machine or detect())
    for card in cards():
        if platform == card.name or card.has_platform(platform):
            return _choice(card, platform, "as requested")
    raise ConfigError(f"--platform: got '{platform}', allowed: {', '.join(platforms())}")


def open_backend(choice: PlatformChoice) -> Backend:
    from dualtune.engine.backend import get_backend

    return get_backend(choice.backend, choice.device)


def _choice(card: Card, platform: str, reason: str) -> PlatformChoice:
    return PlatformChoice(platform, card.name, "auto" if platform == card.name else platform, reason)


def _automatic(machine: Machine) -> PlatformChoice:
    """Choose the preferred installed backend, for the machine's accelerator or else for its CPU."""
    known = automatic_cards()
    installed = [card for card in known if card.package.framework in (None, *machine.packages)]
    for kind, description in _accelerators(machine):
        if card := _first(installed, kind):
            return _choice(card, card.platform_for(kind), f"{description} with {card} installed")
    card = _first(installed, "cpu")
    if card is None:
        kinds = [kind for kind, _ in _accelerators(machine)]
        preferred = next((card for kind in kinds if (card := _first(known, kind))), known[0])
        names = " nor ".join(map(str, known))
        raise EnvironmentFault(f"neither {names} is installed. Install one with: {preferred.package.command}")
    remark = next((f", {device.remark}" for device in card.devices if device.kind == "cpu" and device.remark), "")
    reason = f"{_why_no_accelerator(machine, known, card)}; {card} on the CPU{remark}"
    return _choice(card, card.platform_for("cpu"), reason)


def _first(among: list[Card], kind: str) -> Card | None:
    return next((card for card in among if card.device(kind)), None)


def _accelerators(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield kind and name of the accelerators that this Python can use, best first."""
    if machine.is_apple_silicon:
        yield "metal", f"Apple silicon ({machine.cpu})"
    if machine.gpus:
        yield "cuda", f"NVIDIA GPU ({machine.gpus[0].name})"


def _why_no_accelerator(machine: Machine, known: list[Card], chosen: Card) -> str:
    for kind, _ in _accelerators(machine):
        if driver := _first(known, kind):
            return f"{'an NVIDIA GPU, but ' if kind == 'cuda' else ''}{driver} is not installed"
    preferred = [str(card) for card in known[: known.index(chosen)]]  # none of them is installed
    return " and no ".join(["no NVIDIA GPU", *preferred])


# ----------------------------------------------------------------------------------------------------------------------
# A backend whose framework is imported when it is first needed: what its card says is known before.
#
# An import takes seconds, so a wrong config, a missing file or a full disk is told first.


def deferred(choice: PlatformChoice, opened: Callable[[PlatformChoice], Backend] = open_backend) -> Backend:
    """Return the backend of a choice, which `opened` imports; at once where its card does not say enough."""
    card = card_of(choice.backend)
    device = _device(choice, card)
    is_launched = any(os.environ.get(name) for launch in card.launches for name in launch.variables)
    if device is None or is_launched or not card.package.is_installed:
        return opened(choice)
    return cast("Backend", DeferredBackend(card, device, lambda: opened(choice)))


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

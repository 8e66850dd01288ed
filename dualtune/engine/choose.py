"""The choice of a backend for a machine, always with the reason. Without NumPy: `check-gpu` imports it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.engine.card import Card, automatic_cards, cards, platforms
from dualtune.engine.detect import detect
from dualtune.engine.machine import Machine

if TYPE_CHECKING:
    from dualtune.engine.backend import Backend


@dataclass(frozen=True, slots=True)
class PlatformChoice:
    """A backend and a device, and why these."""

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
    registered = automatic_cards()
    installed = [card for card in registered if card.package.framework in (None, *machine.packages)]
    for kind, description in _accelerators(machine):
        if card := _first(installed, kind):
            return _choice(card, card.platform_for(kind), f"{description} with {card} installed")
    card = _first(installed, "cpu")
    if card is None:
        kinds = [kind for kind, _ in _accelerators(machine)]
        preferred = next((card for kind in kinds if (card := _first(registered, kind))), registered[0])
        names = " nor ".join(map(str, registered))
        raise EnvironmentFault(f"neither {names} is installed. Install one with: {preferred.package.command}")
    remark = next((f", {device.remark}" for device in card.devices if device.kind == "cpu" and device.remark), "")
    # An accelerator without its backend is the reason; else what would be preferred, none of which is installed.
    drivers = [(kind, driver) for kind, _ in _accelerators(machine) if (driver := _first(registered, kind))]
    if drivers:
        kind, driver = drivers[0]
        why = f"{'an NVIDIA GPU, but ' if kind == 'cuda' else ''}{driver} is not installed"
    else:
        why = " and no ".join(["no NVIDIA GPU", *map(str, registered[: registered.index(card)])])
    reason = f"{why}; {card} on the CPU{remark}"
    return _choice(card, card.platform_for("cpu"), reason)


def _first(among: list[Card], kind: str) -> Card | None:
    return next((card for card in among if card.device(kind)), None)


def _accelerators(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield kind and name of the accelerators that this Python can use, best first."""
    if machine.is_apple_silicon:
        yield "metal", f"Apple silicon ({machine.cpu})"
    if machine.gpus:
        yield "cuda", f"NVIDIA GPU ({machine.gpus[0].name})"

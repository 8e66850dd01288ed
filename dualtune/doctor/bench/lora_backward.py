"""The time of `dualtune.engine.kernels.lora_backward` on given shapes, beside autograd."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import Backend


@dataclass(frozen=True, slots=True)
class LoRAShape:
    """A LoRA layer with as many output as input features, and what its documentation promises."""

    batch: int
    tokens: int  # of a row
    features: int
    rank: int
    promised_cpu_ms: float
    promised_gpu_ms: float

    def __str__(self) -> str:
        return f"b{self.batch} s{self.tokens} h{self.features} r{self.rank}"


# By the name for --shapes: the table of the original documents.
SHAPES = {
    "seed2": (
        LoRAShape(4, 512, 768, 16, 45, 15),
        LoRAShape(8, 256, 1024, 32, 85, 22),
        LoRAShape(2, 1024, 2048, 16, 120, 28),
    )
}


class LoRATimer(Protocol):
    """A backend that can time the function."""

    def time_lora_backward(self, shape: LoRAShape, *, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of each round, by name: "ours" and "autograd"; on a GPU also "autograd on the CPU"."""
        ...


@dataclass(frozen=True, slots=True)
class LoRATimes:
    """Medians over the rounds, which alternate between what is compared."""

    shape: LoRAShape
    seconds: dict[str, list[float]]
    ours_ms: float
    autograd_ms: float
    cpu_ms: float | None  # autograd on the CPU of this machine, if the device is another
    ratio_to_autograd: float  # above 1: ours takes less time
    ratio_to_cpu: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def time_lora_backward(backend: Backend, shape: LoRAShape, *, rounds: int) -> LoRATimes:
    """Measure one shape in float32. Raises ConfigError for a backend without the function."""
    timer: Any = backend
    if not hasattr(timer, "time_lora_backward"):
        raise ConfigError(
            f"--platform: the backend '{backend.name}' has no lora_backward. Use --platform cpu, or cuda where "
            "there is an NVIDIA GPU"
        )
    seconds: dict[str, list[float]] = timer.time_lora_backward(shape, rounds=rounds)
    ours, autograd = (1000 * statistics.median(seconds[name]) for name in ("ours", "autograd"))
    cpu = 1000 * statistics.median(seconds["autograd on the CPU"]) if "autograd on the CPU" in seconds else None
    return LoRATimes(shape, seconds, ours, autograd, cpu, autograd / ours, None if cpu is None else cpu / ours)

"""The time of `dualtune.engine.kernels.lora_backward` on given shapes, beside autograd."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

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


def time_lora_backward(backend: Backend, shape: LoRAShape, *, rounds: int) -> dict[str, Any]:
    """Measure one shape in float32: the seconds of each round, their medians, and ratios above 1 where ours is faster.

    A backend that has the function times it by its method `time_lora_backward`, which returns the seconds of each round
    as "ours" and "autograd"; on a GPU also as "autograd on the CPU". ConfigError for another backend.
    """
    timer: Any = backend
    if not hasattr(timer, "time_lora_backward"):
        raise ConfigError(
            f"--platform: the backend '{backend.name}' has no lora_backward. Use --platform cpu, or cuda where "
            "there is an NVIDIA GPU"
        )
    seconds: dict[str, list[float]] = timer.time_lora_backward(shape, rounds=rounds)
    ms = {name: 1000 * median(times) for name, times in seconds.items()}
    cpu_ms = ms.get("autograd on the CPU")
    return {
        "shape": asdict(shape), "seconds": seconds, "ours_ms": ms["ours"], "autograd_ms": ms["autograd"],
        "cpu_ms": cpu_ms, "ratio_to_autograd": ms["autograd"] / ms["ours"],
        "ratio_to_cpu": None if cpu_ms is None else cpu_ms / ms["ours"],
    }  # fmt: skip

"""Activation checkpointing: what the backward pass computes again instead of keeping it from the forward pass.

Chen et al., Training deep nets with sublinear memory cost, arXiv 1604.06174. The gradients are bitwise the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dualtune.errors import ConfigError

LAYERS = "{layers: …}"  # in a card: any mapping as the value of memory.checkpointing


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """The first `layers` layers of the model, in segments of `every`: a segment keeps only its input.

    The first ones, because the peak of memory is at the end of the forward pass, when the last layers are still needed
    anyway. Time depends on the number of recomputed layers, hardly on the length of a segment.
    """

    layers: int | Literal["all"] = 0  # "all": all but the last, whose recomputation would save nothing
    every: int = 1
    remade: bool = False  # recompute only the adapters' inputs, from what other operations keep anyway
    offload: bool = False  # the inputs of segments wait in host memory
    reason: str = field(default="as configured", compare=False)

    def num_recomputed(self, num_layers: int) -> int:
        """Return how many layers of a model with `num_layers` are recomputed. ConfigError if it has too few."""
        if self.layers == "all":
            return num_layers - 1
        if self.layers > num_layers:
            raise ConfigError(
                f"memory.checkpointing: got {self.layers} layers, but the model has {num_layers}; allowed: 1 to "
                f"{num_layers}, or full"
            )
        return self.layers

    def segments(self, num_layers: int) -> list[range]:
        """Return the recomputed layers, segment by segment, from the first."""
        end = self.num_recomputed(num_layers)
        return [range(start, min(start + self.every, end)) for start in range(0, end, self.every)]

    def describe(self, num_layers: int) -> str:
        """Return what is recomputed in a model with `num_layers`, for logs."""
        if self.remade:
            return "the adapters' inputs are recomputed"
        if not (recomputed := self.num_recomputed(num_layers)):
            return "none"
        at_once = f", {self.every} at a time" if self.every > 1 else ""
        on_host = ", from inputs in host memory" if self.offload else ""
        return f"{recomputed} of {num_layers} layers are recomputed{at_once}{on_host}"


KEEP_ALL = ActivationCheckpointing()

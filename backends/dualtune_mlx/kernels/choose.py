"""Choose the fast kernels for a model, and describe the choice in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn

from dualtune.base.errors import ConfigError
from dualtune_mlx.card import CARD
from dualtune_mlx.kernels import attention, compiled, cross_entropy, gated_delta, recurrences
from dualtune_mlx.kernels.attention import Attention
from dualtune_mlx.kernels.compiled import Compiled
from dualtune_mlx.kernels.cross_entropy import Head


@dataclass
class Kernels:
    """The kernels that were chosen for a model."""

    attention: Attention | None = None
    loss: tuple[Callable[..., mx.array], Head] | None = None  # the model's body, and its head
    compiles: bool = False
    follows_documents: bool = False  # layers with a state: the shapes of packed rows depend on their documents
    used: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)  # what stayed plain, and why

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, compiled if that was chosen."""
        if not self.compiles:
            return function
        compiled = Compiled(function, state=lambda: self.attention and self.attention.reach)
        if not self.follows_documents:
            return compiled

        def call(*arrays: Any) -> Any:
            is_packed = any(isinstance(array, dict) and "segments_BT" in array for array in arrays)
            return (function if is_packed else compiled)(*arrays)

        return call

    def __str__(self) -> str:
        """Return one line for logs."""
        return "; ".join([f"fused: {', '.join(self.used)}" if self.used else "reference", *self.plain])


def choose(
    model: nn.Module,
    kernels: str,
    *,
    pieces: Collection[str] | None = None,
    streams: bool = False,
    trained: Collection[nn.Module] = (),
) -> Kernels:
    """Install the kernels that work on this model. Raises ConfigError if `kernels` is "fused" and one does not.

    `pieces`: use these of the card's alone. `streams`: its layers are read from files while it computes, which compiled
    code cannot do. `trained`: the modules that are trained whole.
    """
    chosen, names = Kernels(), CARD.pieces if pieces is None else pieces
    if kernels == "reference":
        if recurrences.install(model, recurrences.WITHOUT_DERIVATIVE):
            chosen.plain.append("recurrences in chunks: mlx-lm's kernel for Metal has no derivative")
        return chosen
    if "lora" in names and not any(module is model for module in trained):
        chosen.used.append("lora")
    if "loss" in names:
        parts = cross_entropy.split(model, trained)
        if isinstance(parts, str):
            chosen.plain.append(f"loss plain: {parts}")
        else:
            chosen.loss = parts
            chosen.used.append("loss")
    if "attention" in names:
        by_document = Attention()
        if attention.install(model, by_document):
            chosen.attention = by_document
            chosen.used.append("attention")
        else:
            chosen.plain.append("attention plain: this model does not call mlx-lm's function")
        if gated_delta.install(model):
            chosen.used.append("gated delta rule")
        if recurrences.install(model):
            chosen.used.append("recurrences")
    # Compiling comes last: it compiles what was chosen before.
    if "compiled step" in names:
        reason = compiled.why_not() if kernels == "fused" or pieces is not None else compiled.why_not_worth_it()
        if streams:
            reason = "its layers are read while it computes (memory.resident_layers)"
        if reason is None:
            chosen.compiles = True
            chosen.used.append("compiled step")
        else:
            chosen.plain.append(f"nothing is compiled: {reason}")
    if kernels == "fused" and chosen.plain:
        raise ConfigError(
            f"model.kernels: got fused, but not all fast kernels work for this model ({type(model).__module__}): "
            f"{'; '.join(chosen.plain)}. Set auto to use those that work"
        )
    return chosen

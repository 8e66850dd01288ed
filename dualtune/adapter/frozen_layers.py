"""What all engines know of the layers below the lowest adapter."""

from __future__ import annotations

from collections.abc import Iterable, Set

from dualtune.errors import ConfigError

KEY = "train.activation_cache"


def num_below(layers: Iterable[Iterable[object]], adapted: Iterable[object], head: object) -> int:
    """Return how many layers, given by their modules, lie below the lowest one with an adapted module.

    There are none if anything but a layer or the output head is adapted.
    """
    wanted: Set[int] = {id(module) for module in adapted}
    has = [{id(module) for module in layer} & wanted for layer in layers]
    if wanted - {id(head)} - set().union(*has):
        return 0
    return next((i for i, inside in enumerate(has) if inside), len(has))


def more_than_states(layer: str) -> ConfigError:
    """Return the error for a model whose layers return more than hidden states. `layer` names their kind."""
    return ConfigError(
        f"{KEY}: got disk, but the layers of this model ({layer}) return more than their hidden states; allowed: none"
    )

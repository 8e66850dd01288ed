"""Test whether a loaded model computes the same with hidden states from the cache, by running it on a few documents.

Layers can exchange more than their hidden states: keys and values that upper layers share, inputs that each layer gets
from the embedding. What of it a model does cannot be seen from outside, but its loss shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualtune.adapter.frozen_layers import KEY
from dualtune.backend import NOISE, Backend, Batch, Engine
from dualtune.data.batching.batches import make_batch
from dualtune.data.documents import Documents, in_memory
from dualtune.errors import ConfigError
from dualtune.memory.ask import adapted
from dualtune.memory.counted import Shape

DOCUMENTS, LONGEST = 3, 16  # what is tried: so many documents, cut to so many tokens
BY_PATH = "Name modules of upper layers by their paths, as in adapter.targets: [layers.10.self_attn.q_proj, …]"


def check_layers(layers_below: int | None, targets: Sequence[str]) -> None:
    """Raise ConfigError if no layer lies below the lowest adapted module."""
    if not layers_below:
        shown = ", ".join(targets[:4]) + (", …" if len(targets) > 4 else "")
        reason = "this model does not list its layers" if layers_below is None else f"adapter.targets ({shown}) adapts"
        rest = "" if layers_below is None else " the first layer, or a module outside of the layers"
        raise ConfigError(
            f"{KEY}: got disk, but {reason}{rest}, so there is no layer whose output could be cached. {BY_PATH}, or "
            f"set {KEY}=none"
        )


def layers_below(decoder: Shape, targets: Sequence[str]) -> int:
    """Return how many layers lie below the lowest adapted module. ConfigError if there are none."""
    below = decoder.layers - adapted(decoder, tuple(targets)).layers
    check_layers(below, targets)
    return below


def check_engine(engine: Engine) -> None:
    """Raise ConfigError if the base is split, so that every layer needs all processes."""
    if engine.description.sharding == "full":
        raise ConfigError(
            f"{KEY}: got disk, but the base is split among the processes ({engine.description.sharding_reason}); "
            f"set memory.sharding=none, or {KEY}=none"
        )


def try_on(engine: Engine, backend: Backend, documents: Documents, *, packs: bool) -> np.ndarray:
    """Return hidden states of a few documents. ConfigError unless the loss with them is that without.

    With `packs`, those that were computed in separate rows are used in one row. An error for lack of memory is raised
    as it is.
    """
    few = _first(documents)
    separate = [[i] for i in range(len(few))]
    rows = [[i for (i,) in separate]] if packs else separate
    expected = _loss(engine, make_batch(few, rows, seed=0, step=0))
    try:
        batch = make_batch(few, separate, seed=0, step=0)
        states_BTD = engine.hidden_states(batch)
        if states_BTD.shape[:-1] != batch.tokens_BT.shape:
            raise _refusal(engine, f"has hidden states {[*states_BTD.shape]} for tokens {[*batch.tokens_BT.shape]}")
        few.hidden = [states_TD[:length] for states_TD, length in zip(states_BTD, few.lengths, strict=True)]
        found = _loss(engine, make_batch(few, rows, seed=0, step=0))
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
        if backend.is_out_of_memory(error):
            raise
        raise _refusal(engine, f"fails with them ({type(error).__name__}: {error})".replace("\n", " ")) from error
    if not abs(found - expected) <= NOISE[engine.description.dtype]:  # also true for NaN
        raise _refusal(engine, f"computes another loss with them ({found:.6g}, without {expected:.6g})")
    return states_BTD


def _first(documents: Documents) -> Documents:
    cut = [documents[i].tokens[:LONGEST] for i in range(min(DOCUMENTS, len(documents)))]
    return in_memory([(tokens, np.arange(len(tokens)) > 0) for tokens in cut])


def _loss(engine: Engine, batch: Batch) -> float:
    loss = engine.evaluate(batch)
    return loss.loss_sum / loss.num_targets


def _refusal(engine: Engine, reason: str) -> ConfigError:
    model = engine.description.model_class or "of unknown class"
    return ConfigError(
        f"{KEY}: got disk, but the hidden states between the layers of this model ({model}) are not all that its upper "
        f"layers get: it {reason}; allowed: none"
    )

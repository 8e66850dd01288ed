"""From an engine to the hidden states of documents: found on disk, or computed now, always to the same bits.

They are computed in rows of one document, grouped by length alone: whatever the rows of a run are, now or after memory
ran out, a cache that was deleted is computed again as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dualtune import interrupt
from dualtune.activation_cache.store import StatesShape, StoredStates, directory_of, read_store, write_store
from dualtune.activation_cache.trial import check_engine, try_on
from dualtune.backend import Backend, Engine
from dualtune.card import card_of
from dualtune.data.batching.batches import grouped, make_batch
from dualtune.data.documents import Documents
from dualtune.distributed.team import Team
from dualtune.versions import VERSION, versions_of

TOKENS_AT_ONCE = 4096  # a forward pass through a few layers that keeps nothing; a longer document goes alone
FORMAT = 1
OF_THE_ENGINE = ("model_class", "dtype", "quantization", "kernels", "threads", "layers_below_adapter")


def use_cache(
    engine: Engine, backend: Backend, parts: Sequence[Documents], base: Mapping[str, Any], team: Team, *, packs: bool
) -> None:
    """Give all documents of these parts their hidden states, and compute those that are not on disk.

    `base` is what tells the base model from others. With several processes the first one computes, and the others use
    its file, or compute one if they have another disk. Raises ConfigError if there is nothing to cache, or if the model
    computes something else with them; DiskError; Preempted.
    """
    check_engine(engine)
    like = try_on(engine, backend, parts[0], packs=packs)
    engine_key = _engine_key(engine, backend, base)
    for documents in parts:
        if len(documents):
            shape = StatesShape(documents.lengths, like.shape[-1], like.dtype)
            key = {**engine_key, "documents": hashlib.sha256(documents.digests().tobytes()).hexdigest()}
            documents.hidden = team.first_alone(partial(_opened, engine, documents, key, shape))


def _opened(engine: Engine, documents: Documents, key: Mapping[str, Any], shape: StatesShape) -> StoredStates:
    directory = directory_of(key)
    return read_store(directory, shape) or write_store(directory, shape, _computed(engine, documents))


def _computed(engine: Engine, documents: Documents) -> Iterator[tuple[int, np.ndarray]]:
    lengths = documents.lengths
    for rows in grouped(lengths, [[i] for i in range(len(documents))], TOKENS_AT_ONCE):
        interrupt.poll()
        states_BTD = engine.hidden_states(make_batch(documents, rows, seed=0, step=0))
        for b, (document,) in enumerate(rows):
            yield document, states_BTD[b, : lengths[document]]


def _engine_key(engine: Engine, backend: Backend, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that the bits of hidden states depend on, besides the tokens."""
    device = backend.devices()[0]
    return {
        "format": [FORMAT, TOKENS_AT_ONCE],
        "base": dict(base),
        "engine": {name: getattr(engine.description, name) for name in OF_THE_ENGINE},
        "device": [backend.name, device.kind, device.name],
        "versions": {"dualtune": VERSION, **versions_of(("numpy", *card_of(backend.name).package.recorded))},
    }

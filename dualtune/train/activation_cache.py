"""Hidden states of the documents below the lowest adapter: computed once, stored in a file, and tried on the model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DataError, DiskError
from dualtune.base.files import cache_dir, existing, json_bytes, new_directory, remove_directory
from dualtune.base.text import in_bytes
from dualtune.base.versions import VERSION, versions_of
from dualtune.data.batches import SequenceLayout, make_batch, plan, sizes_of
from dualtune.data.documents import Documents, in_memory
from dualtune.data.tokens.store import forget_unused
from dualtune.engine.backend import NOISE, Backend, Batch, Engine
from dualtune.engine.card import card_of
from dualtune.engine.memory.counted import Shape
from dualtune.engine.memory.estimate import adapted
from dualtune.model.targets import ALL_LAYERS
from dualtune.train.team import Team

# ----------------------------------------------------------------------------------------------------------------------
# The file of hidden states: those of one document after another, in the order of the documents.
#
# `hidden.bin` holds the numbers of each document, [T, D], in the dtype in which they were computed. `crc32.bin` has the
# checksum of each document. Both are read on demand, not mapped, like tokens (decision 0011). A store is written whole
# or not at all; a damaged one is made again, or is an error once the run uses it. Creating one removes those that have
# not been used for thirty days.

STATES, CHECKSUMS, TABLE = "hidden.bin", "crc32.bin", "store.json"

Computed = Iterable[tuple[int, np.ndarray]]  # document and its hidden states [T, D], in any order


@dataclass(frozen=True, slots=True)
class StatesShape:
    """What the hidden states of all documents look like."""

    lengths: np.ndarray  # int64 [documents]: tokens
    width: int  # D
    dtype: np.dtype[Any]

    @property
    def starts(self) -> np.ndarray:
        """The byte at which each document begins, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.lengths)]) * self.width * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return int(self.starts[-1])


class StoredStates:
    """The hidden states of documents, in a file."""

    def __init__(self, path: Path, shape: StatesShape, checksums: np.ndarray) -> None:
        self.path = path
        self.shape, self._starts, self._checksums = shape, shape.starts, checksums
        self._descriptor = os.open(path / STATES, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __str__(self) -> str:
        return f"hidden states of {len(self.shape.lengths)} documents, {in_bytes(self.shape.num_bytes)}, in {self.path}"

    def __getitem__(self, document: int) -> np.ndarray:
        """Read those of a document, [T, D]. Raises DataError if they differ from what was written."""
        start, end = (int(at) for at in self._starts[document : document + 2])
        raw = os.pread(self._descriptor, end - start, start)
        if len(raw) != end - start or zlib.crc32(raw) != self._checksums[document]:
            raise DataError(
                f"{self.path}: the cache of hidden states is damaged. Remove this directory and run again: they are "
                f"computed again, to the same bits. Without a cache: {KEY}=none"
            )
        return np.frombuffer(raw, self.shape.dtype).reshape(-1, self.shape.width)


def directory_of(key: Mapping[str, Any]) -> Path:
    """Return where the store of this key is, or would be."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_dir() / "activations" / name


def read_store(directory: Path, shape: StatesShape) -> StoredStates | None:
    """Return the store in this directory; None if there is no complete one of this shape."""
    try:
        table = json.loads((directory / TABLE).read_text(encoding="utf-8"))
        sizes = {name: (directory / name).stat().st_size for name in (STATES, CHECKSUMS)}
        checksums = np.frombuffer((directory / CHECKSUMS).read_bytes(), "<u4")
        if table != _table(shape) or sizes[STATES] != shape.num_bytes or len(checksums) != len(shape.lengths):
            return None
        with contextlib.suppress(OSError):
            os.utime(directory)  # marks it as used now
        return StoredStates(directory, shape, checksums)
    except (OSError, ValueError):
        return None


def write_store(directory: Path, shape: StatesShape, computed: Computed) -> StoredStates:
    """Write what is computed, and return the store. Raises DiskError if it cannot be written, or does not fit."""
    _check_space(directory, shape)
    try:
        if os.path.lexists(directory):
            remove_directory(directory)  # damaged
        with new_directory(directory) as temporary:
            forget_unused(directory.parent)
            _write(temporary, shape, computed)
    except DiskError as error:
        if (store := read_store(directory, shape)) is not None:  # another process was faster
            return store
        raise DiskError(f"{error} Set DUALTUNE_CACHE to a directory on another disk, or {KEY}=none") from error
    store = read_store(directory, shape)
    if store is None:
        raise DiskError(f"{directory}: the hidden states were written, but are not there. Set {KEY}=none")
    return store


def _write(directory: Path, shape: StatesShape, computed: Computed) -> None:
    checksums, starts = np.zeros(len(shape.lengths), "<u4"), shape.starts
    with contextlib.ExitStack() as files:

        def open_file(name: str) -> BinaryIO:
            return files.enter_context((directory / name).open("xb"))

        states, sums, table = open_file(STATES), open_file(CHECKSUMS), open_file(TABLE)
        for document, states_TD in computed:
            raw = np.ascontiguousarray(states_TD, shape.dtype).tobytes()
            assert len(raw) == starts[document + 1] - starts[document]
            checksums[document] = zlib.crc32(raw)
            states.seek(int(starts[document]))
            states.write(raw)
        sums.write(checksums.tobytes())
        table.write(json_bytes(_table(shape)))
        for file in (states, sums, table):
            file.flush()
            os.fsync(file.fileno())


def _table(shape: StatesShape) -> dict[str, Any]:
    return {"dtype": shape.dtype.str, "width": shape.width, "documents": len(shape.lengths), "bytes": shape.num_bytes}


def _check_space(directory: Path, shape: StatesShape) -> None:
    free = shutil.disk_usage(existing(directory)).free
    if free < shape.num_bytes:
        tokens = f"{int(shape.lengths.sum())} tokens of {shape.width * shape.dtype.itemsize} bytes each"
        needs = f"{in_bytes(shape.num_bytes)} for {tokens}"
        raise DiskError(
            f"{KEY}: {directory.parent} needs {needs}, but the disk has {in_bytes(free)} free. Free some space, "
            f"set DUALTUNE_CACHE to a directory on another disk, or {KEY}=none"
        )


# ----------------------------------------------------------------------------------------------------------------------
# From an engine to the hidden states of documents: found on disk, or computed now, always to the same bits.
#
# They are computed in rows of one document, grouped by length alone: whatever the rows of a run are, now or after
# memory ran out, a cache that was deleted is computed again as it was.

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
    of_the_engine = engine_key(engine, backend, base)
    for documents in parts:
        if len(documents):
            shape = StatesShape(documents.lengths, like.shape[-1], like.dtype)
            key = {**of_the_engine, "documents": hashlib.sha256(documents.digests().tobytes()).hexdigest()}
            with team.in_turn():
                directory, computed = directory_of(key), _computed(engine, documents)
                documents.hidden = read_store(directory, shape) or write_store(directory, shape, computed)


def _computed(engine: Engine, documents: Documents) -> Iterator[tuple[int, np.ndarray]]:
    for batch in each_alone(documents):
        states_BTD = engine.hidden_states(batch)
        for b, (document,) in enumerate(batch.documents):
            yield document, states_BTD[b, : documents.lengths[document]]


def each_alone(documents: Documents, ids: Iterable[int] | None = None) -> Iterator[Batch]:
    """Yield the micro-batches in which what is cached is computed: each document is alone in its row.

    Answers that share a beginning have a row for themselves. `ids`: only of these documents.
    """
    ids = range(len(documents)) if ids is None else ids
    for rows in plan(sizes_of(documents), ids, SequenceLayout(TOKENS_AT_ONCE)):
        interrupt.poll()
        yield make_batch(documents, rows, seed=0, step=0)


def engine_key(engine: Engine, backend: Backend, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that the bits depend on that a new engine computes of documents, besides their tokens."""
    device = backend.devices()[0]
    return {
        "format": [FORMAT, TOKENS_AT_ONCE],
        "base": dict(base),
        "engine": {name: getattr(engine.description, name) for name in OF_THE_ENGINE},
        "device": [backend.name, device.kind, device.name],
        "versions": {"dualtune": VERSION, **versions_of(("numpy", *card_of(backend.name).package.recorded))},
    }


# ----------------------------------------------------------------------------------------------------------------------
# Whether a loaded model computes the same with hidden states from the cache: run it on a few documents.
#
# Layers can exchange more than their hidden states: keys and values that upper layers share, inputs that each layer
# gets from the embedding. What of it a model does cannot be seen from outside, but its loss shows it.

DOCUMENTS, LONGEST = 3, 16  # documents that are tried, and the tokens they are cut to
KEY = "train.activation_cache"
UPPER = "Choose upper layers, as in adapter.layers: last 8"


def check_layers(layers_below: int | None, targets: Sequence[str], layers: str) -> None:
    """Raise ConfigError if no layer lies below the lowest adapted module."""
    if not layers_below:
        shown = ", ".join(targets[:4]) + (", …" if len(targets) > 4 else "")
        shown += "" if layers == ALL_LAYERS else f" in layers {layers}"
        reason = "this model does not list its layers" if layers_below is None else f"adapter.targets ({shown}) adapts"
        where = "" if layers_below is None else " the first layer, or a module outside of the layers"
        raise ConfigError(
            f"{KEY}: got disk, but {reason}{where}, so there is no layer whose output could be cached. {UPPER}, or "
            f"set {KEY}=none"
        )


def layers_below(decoder: Shape, targets: Sequence[str], layers: str, experts: bool = False) -> int:
    """Return how many layers lie below the lowest adapted module. ConfigError if there are none."""
    below = decoder.layers - adapted(decoder, tuple(targets), layers, experts).layers
    check_layers(below, targets, layers)
    return below


def check_engine(engine: Engine) -> None:
    """Raise ConfigError if the base is split, so that every layer needs all processes."""
    if engine.description.sharding == "full":
        raise ConfigError(
            f"{KEY}: got disk, but the base is sharded among the processes ({engine.description.sharding_reason}); "
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
        loss = _loss(engine, make_batch(few, rows, seed=0, step=0))
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
        if backend.is_out_of_memory(error):
            raise
        raise _refusal(engine, f"fails with them ({type(error).__name__}: {error})".replace("\n", " ")) from error
    if not abs(loss - expected) <= NOISE[engine.description.dtype]:  # also true for NaN
        raise _refusal(engine, f"computes another loss with them ({loss:.6g}, without {expected:.6g})")
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

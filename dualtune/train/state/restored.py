"""An engine in the state of a checkpoint, whatever the names in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dualtune.adapter.formats.naming import rename_modules
from dualtune.adapter.spec import modules_of
from dualtune.backend import Engine
from dualtune.backend.checks import check_state
from dualtune.base_model.places import file_names
from dualtune.errors import FormatError
from dualtune.train.state.checkpoint import Checkpoint


def restore(engine: Engine, saved: Checkpoint) -> None:
    """Restore an engine from a checkpoint. FormatError, with nothing changed, if it belongs to another adapter."""
    saved = in_names_of(engine.adapter_shapes, saved)
    try:
        check_state(engine.adapter_shapes, saved.adapter, f"{saved.path}: adapter.safetensors")
    except ValueError as error:
        raise FormatError(f"{error}. It is from another run, or was changed afterwards") from None
    engine.load_adapter_state(saved.adapter)
    engine.load_optimizer_state(saved.optimizer)


def in_names_of(tensors: Collection[str], saved: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the names of an engine's tensors: older ones have others inside a wrapper."""
    if saved.adapter.keys() == {*tensors}:
        return saved
    names = file_names(modules_of(saved.adapter), modules_of(tensors))
    slots = {slot: rename_modules(each, names) for slot, each in saved.optimizer.slots.items()}
    return replace(saved, adapter=rename_modules(saved.adapter, names), optimizer=replace(saved.optimizer, slots=slots))

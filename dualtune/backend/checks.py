"""Checks that all engines share: a base that loads and can be merged, tensors that fit, the slots of the optimizer."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dualtune.adapter.spec import Tensors
from dualtune.backend import Backend, EngineDescription, LoadRequest, OptimizerState
from dualtune.base_model import BaseWeights
from dualtune.errors import ConfigError, DualtuneError, EnvironmentFault
from dualtune.io.fields import shown
from dualtune.optimizer import OptimizerSpec

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name


def check_state(shapes: Shapes, given: Tensors, what: str) -> None:
    """Raise ValueError unless the tensors have these names and shapes: the contract of the `load_*_state` methods."""
    missing, foreign = sorted(shapes.keys() - given.keys()), sorted(given.keys() - shapes.keys())
    reshaped = [n for n in shapes.keys() & given.keys() if tuple(shapes[n]) != given[n].shape]
    for problem, names in (("missing", missing), ("not in this model", foreign), ("of another shape", reshaped)):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ValueError(f"{what}: tensors {problem}: {shown}")


def check_slots(optimizer: OptimizerSpec, adapter: Shapes, state: OptimizerState) -> None:
    """Raise ValueError unless the state has the slots of this optimizer, with the adapter's names and shapes."""
    if {*state.slots} != {*optimizer.slots}:
        got, needed = (", ".join(sorted(slots)) or "none" for slots in (state.slots, optimizer.slots))
        raise ValueError(f"optimizer {optimizer.name}: got the slots {got}, it has {needed}")
    for slot, tensors in state.slots.items():
        check_state(adapter, tensors, f"optimizer {slot}")


def check_mergeable(description: EngineDescription) -> None:
    """Raise ConfigError if the base is quantized: rounding it again would erase what the adapter adds."""
    if description.quantization != "none":
        raise ConfigError(
            f"merge: the base is quantized ({description.quantization}), and merging into packed weights loses the "
            "adapter. Load the plain base with model.quantization: none"
        )


def merge_base(request: LoadRequest) -> BaseWeights:
    """Return the files of the base into which an adapter is merged. ConfigError if it is in no file."""
    weights = request.base_weights()
    if weights is None:
        raise ConfigError("merge: the base was initialized at random (model.init: random), and is in no file")
    return weights


@contextmanager
def loading(backend: Backend, model_dir: Path, library: str) -> Generator[None]:
    """Raise EnvironmentFault in place of what a library raises on a model: of any class, for what it does not check.

    A shortage of memory and a fault of the device are not the model's, and stay as they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DualtuneError) or backend.is_out_of_memory(error) or backend.is_device_fault(error):
            raise
        text = " ".join(str(error).split())
        reason = shown(re.sub(r"[^\s'\"]*/dualtune-model-\w+", str(model_dir), text), 300)  # of `staged`
        reason = reason.removesuffix(".")
        kind = "" if isinstance(error, (OSError, ValueError)) and reason else f"{type(error).__name__}: "
        raise EnvironmentFault(
            f"{model_dir}: {library} cannot load this model: {kind}{reason}. If its config.json was changed, take the "
            "publisher's; the other backend may know more models"
        ) from error

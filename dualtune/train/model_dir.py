"""The result of a run: the adapter, or if all parameters are trained a model directory, which loads like its base.

config.json, tokenizer, chat template  as in the base, or as in the training; they name where it stops
model.safetensors                      the trained parameters, in float32: whoever loads them rounds once
dualtune.json                          the base, the training, and fingerprints of what the model computes
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base.errors import EnvironmentFault
from dualtune.base.files import json_bytes, write_whole
from dualtune.data.tokens.stop_tokens import write_stop_tokens
from dualtune.engine.backend import Engine
from dualtune.engine.peft_trial import named
from dualtune.model.adapter import ALL_LINEAR, AdapterSpec, Tensors, lacks, modules_of
from dualtune.model.base_model import read_config
from dualtune.model.formats.chat_template import write_training_template
from dualtune.model.formats.directory import MANIFEST_FILE, Adapter
from dualtune.model.formats.naming import is_fan_in_fan_out
from dualtune.train.prepare import Prepared


def write_model(path: Path, engine: Engine, template: str | None, record: Mapping[str, Any]) -> None:
    """Write the trained model, whole or not at all. `template`: the source of its training's chat template."""

    def write(directory: Path) -> None:
        engine.save_merged(directory)
        write_training_template(directory, template, record)
        with contextlib.suppress(EnvironmentFault):  # a tokenizer of another kind
            write_stop_tokens(directory)
        (directory / MANIFEST_FILE).write_bytes(json_bytes(record))

    write_whole(path, write)


def trained_adapter(prepared: Prepared, tensors: Tensors, template: str | None) -> Adapter:
    """Return the adapter that a run has trained. `template`: the source of its chat template."""
    directory = prepared.model.directory
    adapter = Adapter(
        _written_spec(prepared, tensors), tensors, prepared.config.model.name, template=template,
        fan_in_fan_out=is_fan_in_fan_out(read_config(directory)),
    )  # fmt: skip
    return named(adapter, directory)


def notes_before_training(prepared: Prepared, engine: Engine) -> tuple[str, ...]:
    """Return what PEFT will not load of the adapter, by its shapes: an array of one number takes any without memory."""
    empty = {name: np.broadcast_to(np.float32(0), shape) for name, shape in engine.adapter_shapes.items()}
    return trained_adapter(prepared, empty, None).naming.notes


def _written_spec(prepared: Prepared, tensors: Tensors) -> AdapterSpec:
    """Return the spec with short target names instead of "all-linear" or a list of all modules."""
    if prepared.start is not None:
        return replace(prepared.spec, targets=prepared.start.spec.targets)
    if prepared.spec.targets == (ALL_LINEAR,) or lacks(modules_of(tensors), prepared.spec.targets):
        return replace(prepared.spec, targets=tuple(sorted({m.split(".")[-1] for m in modules_of(tensors)})))
    return prepared.spec

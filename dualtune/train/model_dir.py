"""The result of a run that trains all parameters: a model directory, which every tool loads like its base.

config.json, tokenizer, chat template  as in the base, or as in the training; they name where it stops
model.safetensors                      the trained parameters, in float32: whoever loads them rounds once
dualtune.json                          the base, the training, and fingerprints of what the model computes
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualtune.adapter.formats.chat_template import write_training_template
from dualtune.adapter.formats.manifest import MANIFEST_FILE
from dualtune.backend import Engine
from dualtune.data.tokens.stop_tokens import write_stop_tokens
from dualtune.errors import EnvironmentFault
from dualtune.io.disk import json_bytes, write_whole


def write_model(path: Path, engine: Engine, template: str | None, record: Mapping[str, Any]) -> None:
    """Write the trained model, whole or not at all. `template`: the source of its training's chat template."""

    def write(directory: Path) -> None:
        engine.save_merged(directory)
        write_training_template(directory, template, record)
        with contextlib.suppress(EnvironmentFault):  # a tokenizer of another kind
            write_stop_tokens(directory)
        (directory / MANIFEST_FILE).write_bytes(json_bytes(record))

    write_whole(path, write)

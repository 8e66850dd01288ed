"""The system message of a training: the one that its rows share, so that a model is asked as it was trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from dualtune.data.chat.examples import Example
from dualtune.data.documents import OpenedSource

KEY = "system_message"  # in the entry "training" of dualtune.json
FIRST_ROWS = 2000  # of each source
NEARLY_ALL = 0.95  # of the rows; what fewer share is not the system message of the training
MOST_CHARACTERS = 1 << 16


def shared_system_message(sources: Sequence[OpenedSource]) -> str | None:
    """Return the system message that (nearly) all rows begin with, by the first ones of each source; None if none."""
    counts = Counter(
        next((message.content for message in example.messages[:1] if message.role == "system"), "")
        for source in sources
        for example in islice(source.examples(), FIRST_ROWS)
        if isinstance(example, Example)
    )
    text, number = counts.most_common(1)[0] if counts else ("", 0)
    return text if 0 < len(text) <= MOST_CHARACTERS and number >= NEARLY_ALL * counts.total() else None


def recorded_system_message(manifest: Mapping[str, Any] | None) -> str | None:
    """Return the system message of the training that dualtune.json records; None if it records none."""
    training: object = (manifest or {}).get("training")
    text = cast("dict[str, Any]", training).get(KEY) if isinstance(training, dict) else None
    return text if isinstance(text, str) and 0 < len(text) <= MOST_CHARACTERS else None


def trained_system_message(directory: Path) -> str | None:
    """Return the system message of the training of an adapter, a run, or a model that was trained whole."""
    from dualtune.model.formats.directory import adapter_directory, read_manifest

    return recorded_system_message(read_manifest(adapter_directory(directory)))

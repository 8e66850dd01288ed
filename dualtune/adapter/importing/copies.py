"""Copies of a base's embedding or output head beside an adapter, compared with the base and left out if they are equal.

PEFT saves them by itself where the vocabulary was resized or `save_embedding_layers` is set, and Unsloth lists them
under `modules_to_save`. An equal copy changes nothing; a changed one was trained, which no LoRA adapter can express.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.adapter.importing.foreign import Finding, WeightFile
from dualtune.adapter.spec import PREFIX
from dualtune.base_model.weights import StoredTensor, weights_in
from dualtune.io import fields

ROWS = 4096  # compared at once
_COPY = re.compile(
    r"(?P<module>(?:.+\.)?(?P<last>embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|lm_head|embed_out))"
    r"(?:\.base_layer|\.original_module|\.modules_to_save(?:\.[\w-]+)?)?\.weight"
)
_HEADS = {"lm_head", "embed_out"}
_NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def without_copies(
    config: dict[str, Any], weights: Mapping[str, WeightFile], base: Path, findings: list[Finding]
) -> tuple[dict[str, Any], dict[str, WeightFile], tuple[str, ...]]:
    """Return config and weight files without the copies that equal the base's tensors, and a note on each.

    A copy that differs is a finding without a repair, with both shapes.
    """
    stored, notes = dict(weights_in(base).tensors), list[str]()
    equal, result = set[str](), dict[str, WeightFile]()
    for layout, file in weights.items():
        foreign = dict(file.foreign)
        for name in [*foreign]:
            if (match := _COPY.fullmatch(name.removeprefix(PREFIX))) is None:
                continue
            module = match["module"]
            if (original := _original(module, match["last"], stored)) is None:
                continue  # the strict reader refuses it by name
            if difference := _difference(foreign[name], original):
                fault = f"{file.file.name}: {module}: is a changed copy of the base's ({difference})"
                findings.append(Finding(f"{fault}: it was trained or resized, which a LoRA adapter cannot express"))
            equal.add(module)
            notes.append(f"{module}: a copy of the base's, equal bit for bit, is left out")
            del foreign[name]
        result[layout] = file._replace(foreign=foreign)
    return _without_saved(config, equal), result, tuple(dict.fromkeys(notes))


def _original(module: str, last: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return the base's tensor; for an output head that is tied, the embedding. None if it is not unambiguous."""
    if (exact := stored.get(f"{module}.weight")) is not None:
        return exact
    names = [name for name in stored if name.endswith(f"{last}.weight")]
    if not names and last in _HEADS:
        names = [name for name in stored if (match := _COPY.fullmatch(name)) and match["last"] not in _HEADS]
    return stored[names[0]] if len(names) == 1 else None


def _difference(copy: np.ndarray, original: StoredTensor) -> str | None:
    """Return how a copy (float32) differs from the base's tensor, None if it is that tensor in its own precision."""
    shapes = f"the copy has {list(copy.shape)}, the base {list(original.shape)}"
    if copy.shape != original.shape or original.dtype not in _NUMPY:
        return shapes if original.dtype in _NUMPY else f"{shapes} in {original.dtype}"
    changed = sum(_changed(copy[start : start + len(rows)], rows) for start, rows in _blocks(original))
    return f"{shapes}; {changed} rows differ" if changed else None


def _changed(copy: np.ndarray, original: np.ndarray) -> int:
    """Return the number of rows that differ, also from the base rounded to the precision of the copy."""
    same = (copy == original).all(-1)
    for rounded in (_as_bfloat16(original), original.astype(np.float16).astype(np.float32)):
        same |= (copy == rounded).all(-1)
    return int((~same).sum())


def _as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to bfloat16, to the even neighbour of two that are equally near."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def _blocks(tensor: StoredTensor) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, rows in float32) of a stored table, a block after another."""
    kind, (count, width) = np.dtype(_NUMPY[tensor.dtype]), tensor.shape
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.begin)
        for start in range(0, count, ROWS):
            data = stream.read(min(ROWS, count - start) * width * kind.itemsize)
            values = np.frombuffer(data, kind).reshape(-1, width)
            is_bfloat16 = tensor.dtype == "BF16"
            yield start, (values.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else values.astype(np.float32)


def _without_saved(config: dict[str, Any], equal: set[str]) -> dict[str, Any]:
    """Return the config without `modules_to_save`, if all of them are equal copies: nothing of them was trained."""
    saved = config.get("modules_to_save")
    if not isinstance(saved, list) or not saved or not equal:
        return config
    names = fields.texts(config, "modules_to_save", "adapter_config.json") or []
    are_copies = all(any(module == name or module.endswith(f".{name}") for module in equal) for name in names)
    return config | {"modules_to_save": None} if are_copies else config

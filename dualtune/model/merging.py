"""Merging: the base's own files, tensor by tensor, with the change of the adapter added to the matrices it adapts.

Names, shards, dtypes and metadata are the base's. A tensor that nothing adapts is copied byte by byte, whatever it is:
the towers of a multimodal model, experts, tensors that no class reads. No more than one tensor is in memory.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dualtune.base import tensors
from dualtune.base.errors import ConfigError
from dualtune.base.tensors import FLOATS, SIZES, StoredForm, bytes_of, floats_of, rounded, write_safetensors
from dualtune.base.untrusted import open_file, read_metadata
from dualtune.model.adapter import Tensors
from dualtune.model.config_file import CODE, read_config, tables_of
from dualtune.model.copies import copy_index, copy_without_weights
from dualtune.model.embeddings import is_head
from dualtune.model.places import FilePlace
from dualtune.model.spellings import both_spellings
from dualtune.model.weight_files import BaseWeights, StoredTensor

Delta = Callable[[str], np.ndarray]  # of an adapted module: its ΔW, float32 [out, in]
Edit = Callable[[np.ndarray], None]  # of a tensor in float32, in place
PRECISIONS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_merged(
    base: BaseWeights,
    out: Path,
    places: Mapping[str, FilePlace],
    delta: Delta,
    dtype: str,
    edits: Mapping[str, Edit] = MappingProxyType({}),
) -> None:
    """Write a model directory: the base with `delta(module)` added, in float32, to the matrix of each adapted module.

    `edits`: what changes tensors that were trained under their own names. Each tensor keeps its precision; but in
    another `dtype` than that of the base as a whole, all are rounded to it.
    ConfigError if an adapted matrix is not stored in floating point.
    """
    adapted = _by_tensor(base, places)
    precision_name = PRECISIONS[dtype]
    keeps = precision_name == precision(base)
    forms = {
        name: StoredForm(tensor.dtype if keeps or tensor.dtype not in FLOATS else precision_name, tensor.shape)
        for name, tensor in base.tensors.items()
    }

    def content(name: str) -> memoryview:
        stored, form = base.tensors[name], forms[name]
        raw = stored_bytes(stored)
        if name not in adapted and name not in edits and form.dtype == stored.dtype:
            return raw.data
        values = floats_of(raw, stored.dtype).reshape(stored.shape)
        for module in adapted.get(name, ()):
            _add(values, delta(module), places[module])
        if name in edits:
            values = values.copy()
            edits[name](values)
        return bytes_of(rounded(values, form.dtype))

    copy_without_weights(base.directory, out)
    _write_config(base, out, None if keeps else dtype)
    _write_files(base, out, forms, content)


def write_trained(source: Path, base: BaseWeights | None, out: Path, trained: Tensors) -> None:
    """Write a model that was trained whole, float32; what else the files of its base hold is copied from them.

    An output head in the files of a model that uses its embedding instead is not written.
    """
    has_head = any(map(is_head, trained))
    stored = dict(base.tensors) if base else dict[str, StoredTensor]()
    copied = {
        name: tensor for name, tensor in stored.items() if name not in trained and (has_head or not is_head(name))
    }
    forms = {name: StoredForm("F32", values.shape) for name, values in trained.items()}
    forms |= {name: StoredForm(tensor.dtype, tensor.shape) for name, tensor in copied.items()}
    copy_without_weights(source, out)

    def content(name: str) -> memoryview:
        return bytes_of(trained[name]) if name in trained else stored_bytes(copied[name]).data

    tensors.write_model_weights(out, forms, content)


def _write_files(
    base: BaseWeights, out: Path, forms: Mapping[str, StoredForm], content: Callable[[str], memoryview]
) -> None:
    """Write the files of the base; or where one would be larger than the hub takes, shards of our own."""
    files = {file: [name for name, tensor in base.tensors.items() if tensor.file == file] for file in base.files}
    if max(sum(forms[name].num_bytes for name in names) for names in files.values()) > tensors.SHARD_BYTES:
        tensors.write_model_weights(out, forms, content)
        return
    for file, names in files.items():
        metadata = read_metadata(file) or {"format": "pt"}
        write_safetensors(out / file.name, {name: forms[name] for name in names}, content, metadata)
    copy_index(base.directory, out, sum(form.num_bytes for form in forms.values()))


def precision(base: BaseWeights) -> str | None:
    """Return the dtype in which most numbers of a model are stored, None if it has no floating-point tensors."""
    sizes: Counter[str] = Counter()
    for tensor in base.tensors.values():
        if tensor.dtype in FLOATS:
            sizes[tensor.dtype] += tensor.num_bytes // SIZES[tensor.dtype]
    return sizes.most_common(1)[0][0] if sizes else None


def _by_tensor(base: BaseWeights, places: Mapping[str, FilePlace]) -> dict[str, list[str]]:
    """Return the adapted modules of each tensor."""
    adapted: dict[str, list[str]] = defaultdict(list)
    for module, place in places.items():
        stored = base.tensors.get(place.tensor)
        if stored is None or stored.dtype not in FLOATS:
            problem = "is not there" if stored is None else f"is stored as {stored.dtype}"
            raise ConfigError(
                f"merge: {base.directory}: {place.tensor} {problem}, so the adapter of {module} cannot be added to it. "
                "Give the plain model as --base"
            )
        adapted[place.tensor].append(module)
    return adapted


def stored_bytes(stored: StoredTensor) -> np.ndarray:
    """Return the bytes of a tensor."""
    with open_file(stored.file) as stream:
        stream.seek(stored.begin)
        return np.frombuffer(stream.read(stored.num_bytes), np.uint8)


def _add(values: np.ndarray, delta: np.ndarray, place: FilePlace) -> None:
    """Add the change of a layer to its place in a tensor. The sum is in float32."""
    stored = values if place.expert is None else values[place.expert]
    target = stored.T if place.transposed else stored
    if place.rows is not None:
        target = target[slice(*place.rows)]
    if target.shape != delta.shape:
        raise ConfigError(
            f"merge: {place.tensor}: the base stores {list(values.shape)}, which does not fit the change "
            f"{list(delta.shape)} of the adapter"
        )
    target += delta


def _write_config(base: BaseWeights, out: Path, dtype: str | None) -> None:
    """Write the base's config, with both spellings of what mlx-lm and transformers spell differently."""
    read = read_config(base.directory)
    config = both_spellings(read)
    if "tie_word_embeddings" not in config and "lm_head.weight" in base.tensors:
        config["tie_word_embeddings"] = False  # transformers' default; mlx-lm's Llama would tie
    for table in tables_of(config):
        table.pop(CODE, None)  # the code that it names is not copied
    if dtype is not None:
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    if config != read:
        (out / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""The fingerprint of a base model: hashes of the files that decide what it computes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dualtune.base.untrusted import read_json, sha256_of
from dualtune.model.config_file import read_config
from dualtune.model.weight_files import BaseWeights, StoredTensor, has_weights, weights_in

SAMPLED_TENSORS, SAMPLED_BYTES = 8, 65_536
PROBED_TENSORS, PROBED_BYTES = 256, 4096
MAX_TOKENIZER_CONFIG_BYTES = 64 << 20  # speech models add 65,000 tokens and describe each


def fingerprint(path: Path, weights: BaseWeights | None = None) -> dict[str, Any]:
    """Return hashes of config, tokenizer, chat template and weights, and the quantization of the stored weights.

    Weights are sampled, because hashing 15 GB would take longer than loading them. "tensors" has the first 64 KiB of a
    few tensors, as in every dualtune so far. "weights_sha256" covers the names, dtypes and shapes of all, and the
    beginning, middle and end of many. Pass `weights` if they are already known. For random weights, the directory needs
    none.
    """
    if weights is None:
        weights = weights_in(path) if has_weights(path) else BaseWeights(path, (), {})
    config = read_config(path)
    heads = {
        name: _sha256(f"{x.dtype}{list(x.shape)}".encode("utf-8", "replace") + _read(x, 0, SAMPLED_BYTES))
        for name, x in _spread(weights, SAMPLED_TENSORS).items()
    }
    probed = hashlib.sha256()
    for name, x in sorted(weights.tensors.items()):
        probed.update(json.dumps([name, x.dtype, x.shape]).encode())
    for x in _spread(weights, PROBED_TENSORS).values():
        for begin in (0, x.num_bytes // 2, max(0, x.num_bytes - PROBED_BYTES)):
            probed.update(_read(x, begin, PROBED_BYTES))
    return {
        "config_sha256": _sha256(json.dumps(config, sort_keys=True).encode()),
        "tokenizer_sha256": _sha256_of(path / "tokenizer.json") or _sha256_of(path / "tokenizer.model"),
        "chat_template_sha256": _template_hash(path),
        "quantization": config.get("quantization") or config.get("quantization_config"),
        "tensors": heads,
        "weights_sha256": probed.hexdigest(),
    }


def _spread(weights: BaseWeights, count: int) -> dict[str, StoredTensor]:
    """Return about `count` tensors, spread evenly over the sorted names."""
    names = sorted(weights.tensors)
    return {name: weights.tensors[name] for name in names[:: max(1, len(names) // count)][:count]}


def _read(tensor: StoredTensor, begin: int, num_bytes: int) -> bytes:
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.begin + begin)
        return stream.read(min(num_bytes, tensor.num_bytes - begin))


def _template_hash(path: Path) -> str | None:
    if (path / "chat_template.jinja").is_file():
        return _sha256_of(path / "chat_template.jinja")
    config = path / "tokenizer_config.json"
    if not config.is_file():
        return None
    table = read_json(config, max_bytes=MAX_TOKENIZER_CONFIG_BYTES, strict=False, allowance=4)
    template = table.get("chat_template")
    return _sha256(json.dumps(template).encode()) if template else None


def _sha256_of(path: Path) -> str | None:
    """Return the hash of a file, read in pieces: a tokenizer.json may have 33 MiB."""
    return sha256_of(path) if path.is_file() else None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

"""The base model on disk: found from a directory or a hub id, checked before anything loads, and fingerprinted."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from dualtune.adapter.files import (
    MAX_BYTES,
    MAX_HEADER_BYTES,
    is_lfs_pointer,
    open_file,
    parse_object,
    read_json,
    sha256_of,
)
from dualtune.errors import EnvironmentFault, FormatError

# No `*.py` and no pickle: a base model is data, never code.
HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt"]
# The same weights once more in their maker's own names (Mistral, Llama): twice the download, and nobody's business.
CONSOLIDATED = "consolidated*.safetensors"
NOT_FROM_HUB = [CONSOLIDATED, "original/*"]
SAMPLED_TENSORS = 8
SAMPLED_BYTES = 65_536
MAX_CONFIG_BYTES = 4 << 20
MAX_TOKENIZER_CONFIG_BYTES = 64 << 20  # models of speech add 65,000 tokens, and describe each


def resolve_model(name: str, *, weights: bool = True) -> Path:
    """The directory of a model given as a directory or a Hugging Face hub id, downloaded if needed.

    `weights=False` asks only for config and tokenizer (`model.init: random`). EnvironmentFault, naming every place
    that was looked at, if the model cannot be found or has no safetensors weights; FormatError for a broken config.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        path = _download(name, weights)
    if not (path / "config.json").is_file():
        raise EnvironmentFault(
            f"model.name: {path} has no config.json; a model directory in Hugging Face layout is needed"
        )
    read_config(path)  # so that nobody after us meets a broken one
    if weights and not weight_files(path):
        found = sorted(p.name for p in path.iterdir())
        unsafe = [n for n in found if n.endswith((".bin", ".pt", ".pth", ".gguf"))]
        hint = (
            f" It has {', '.join(unsafe[:3])}: convert to safetensors, other formats are not loaded." if unsafe else ""
        )
        raise EnvironmentFault(
            f"model.name: {path} has no weights (*.safetensors); it holds: {', '.join(found) or 'nothing'}.{hint}"
        )
    return path


def _download(name: str, weights: bool) -> Path:
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or Path(name).exists():
        raise EnvironmentFault(f"model.name: there is no model directory {Path(name).expanduser()}")
    from huggingface_hub import constants, snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = HUB_PATTERNS if weights else [p for p in HUB_PATTERNS if p != "*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=NOT_FROM_HUB))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentFault(
            f"model.name: '{name}' was not found. Looked for a directory {Path(name).resolve()}, in the hub cache "
            f"{constants.HF_HUB_CACHE}, and on {constants.ENDPOINT} ({type(error).__name__}: {reason}). "
            "Give a directory, or download the model while online."
        ) from error


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a model directory. FormatError for a broken one."""
    return read_json(path / "config.json", max_bytes=MAX_CONFIG_BYTES, strict=False)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that hold a model, without copies of it in other names."""
    return sorted(file for file in path.glob("*.safetensors") if not file.match(CONSOLIDATED))


def copy_without_weights(source: Path, target: Path) -> None:
    """Make `target` a new model directory with the config, tokenizer and template files of `source`."""
    target.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)


def fingerprint(path: Path) -> dict[str, Any]:
    """What identifies a base model: hashes of config, tokenizer, chat template and sampled tensors; its quantization.

    Weights are sampled (first 64 KiB of a few tensors, by name) because hashing 15 GB would take longer than loading.
    """
    config = read_config(path)
    quantization = config.get("quantization") or config.get("quantization_config")
    return {
        "config_sha256": _sha256(json.dumps(config, sort_keys=True).encode()),
        "tokenizer_sha256": _sha256_of(path / "tokenizer.json") or _sha256_of(path / "tokenizer.model"),
        "chat_template_sha256": _template_hash(path),
        "quantization": quantization,
        "tensors": sampled_tensors(path),
    }


def sampled_tensors(path: Path) -> dict[str, str]:
    """sha256 over dtype, shape and the first 64 KiB of a few tensors, spread evenly over the sorted names."""
    located: dict[str, tuple[Path, int, Any]] = {}
    for file in weight_files(path):
        with open_file(file) as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 0 < size <= min(MAX_HEADER_BYTES, file.stat().st_size - 8) or is_lfs_pointer(file):
                raise EnvironmentFault(f"{file}: not a safetensors file. If it is a git-lfs pointer, run: git lfs pull")
            header = parse_object(stream.read(size), f"{file}: header", strict=False)
        located |= {name: (file, 8 + size, meta) for name, meta in header.items() if name != "__metadata__"}
    names = sorted(located)
    chosen = names[:: max(1, len(names) // SAMPLED_TENSORS)][:SAMPLED_TENSORS]
    return {name: _tensor_hash(*located[name]) for name in chosen}


def _tensor_hash(file: Path, data_start: int, meta: Any) -> str:
    match meta:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if (
            all(type(n) is int and 0 <= n <= MAX_BYTES for n in (*shape, begin, end)) and begin <= end
        ):
            pass
        case _:
            raise FormatError(f"{file}: a tensor without dtype, shape and two data_offsets. Download the model again")
    with file.open("rb") as stream:
        stream.seek(data_start + begin)
        head = stream.read(min(end - begin, SAMPLED_BYTES))
    return _sha256(f"{dtype}{shape}".encode("utf-8", "replace") + head)


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
    """Of a file, in pieces: a tokenizer.json may have 33 MiB."""
    return sha256_of(path) if path.is_file() else None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

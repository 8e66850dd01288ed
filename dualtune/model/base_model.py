"""The base model on disk: found, checked before anything is loaded, and fingerprinted.

A model directory is untrusted. `find_weights` is the only place that decides which of its files are the model; exactly
these files are checked, fingerprinted and loaded, on either backend.
"""

from __future__ import annotations

import re
from pathlib import Path

from dualtune.base.errors import DualtuneError, EnvironmentFault
from dualtune.base.files import did_you_mean_path, expanded
from dualtune.base.hub import Tell, check_announced, guard_hub, why_download_failed
from dualtune.model.config_file import check_counts, check_storage, read_config
from dualtune.model.gguf import is_gguf, model_from_gguf
from dualtune.model.weight_files import BaseWeights, weights_in

# No `*.py` and no pickle: a base model is data, never code.
HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
# The same weights again under their publisher's names (Mistral, Llama): they would double the download.
CONSOLIDATED = "consolidated*.safetensors"
_LOCAL = re.compile(r"[/~.]|[A-Za-z]:|file:")
_FEW_BITS = re.compile(r"(?:-unsloth)?-bnb-4bit(?:-\w+)?$|-[2-8]-?bit$|-(?:AWQ|GPTQ)(?:-\w+)*$", re.IGNORECASE)
NOT_FROM_HUB = [CONSOLIDATED, "original/*"]


def resolve_model(name: str, *, weights: bool = True, tell: Tell = lambda share: None) -> Path:
    """Return the directory of a model, given as a directory, a GGUF file or a hub id; download it if needed.

    `weights=False` needs only config and tokenizer (`model.init: random`). EnvironmentFault, with every place that was
    searched, if the model is not found or has no safetensors weights; FormatError for a broken or unsafe config, for
    damaged weights, for links that leave the directory, and for a download that is not what the hub announced. `tell`
    gets the share of a download that is compared with that, where it is used for the first time.
    """
    path = model_here(name, tell) or _download(name, weights)
    if not (path / "config.json").is_file():
        raise EnvironmentFault(f"model.name: {path} has no config.json; {_instead_of(path)}")
    if path.parent.name == "snapshots":  # of the hub's cache
        check_announced((file for file in path.rglob("*") if weights or file.suffix != ".safetensors"), tell)
    if weights:
        find_weights(path)
    else:
        read_config(path)
    return path


def _instead_of(path: Path) -> str:
    """Return what to give instead of a directory that is not a model, such as a run or an export."""
    if (path / "model" / "config.json").is_file():
        return f"give the model in it: {path / 'model'}"
    if file := next(iter(sorted(path.glob("*.gguf")) or sorted(path.glob("dualtune/*/*.gguf"))), None):
        return f"give the GGUF file in it: {file}"
    if any((path / name).is_file() for name in ("adapter_config.json", "adapter/adapter_config.json")):
        return "it holds an adapter, which goes into --adapter or adapter.init_from. Give the base model here"
    return "a model directory in Hugging Face layout is needed"


def model_here(name: str, tell: Tell = lambda share: None) -> Path | None:
    """Return the directory of a model that is named by its path on this machine, as a directory or a GGUF file."""
    path = expanded(name)
    if not is_here(name):
        return None
    return model_from_gguf(path, tell) if path.is_file() else path


def is_here(name: str) -> bool:
    """Return whether a name is the path of a directory or a GGUF file."""
    path = expanded(name)
    return path.is_dir() or (is_gguf(name) and path.is_file())


def is_elsewhere(name: str) -> bool:
    """Return whether a name is a path, of this machine or another, at which there is no model."""
    looks_local = _LOCAL.match(name) or name.count("/") > 1 or "\\" in name or "…" in name
    return bool(looks_local) and not is_here(name)


def plain_name(name: str) -> str:
    """Return a name without the ending of a copy in few bits, as `unsloth/llama-3-8b-bnb-4bit` has one."""
    if is_here(name):
        return name
    return _FEW_BITS.sub("", name)


def find_weights(path: Path) -> BaseWeights:
    """Return the weights of a model directory, checked by config.json and the headers of the files."""
    config, weights = read_config(path), weights_in(path)
    check_storage(config, weights)
    check_counts(config, weights)
    return weights


def _download(name: str, weights: bool) -> Path:
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or Path(name).exists():
        raise EnvironmentFault(f"model.name: there is no model directory {expanded(name)}")
    from huggingface_hub import constants, snapshot_download  # pyright: ignore[reportUnknownVariableType]

    guard_hub()
    patterns = HUB_PATTERNS if weights else [p for p in HUB_PATTERNS if p != "*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=NOT_FROM_HUB))
    except DualtuneError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP client share no class of errors
        looked = f"a directory {Path(name).resolve()}, in the hub cache {constants.HF_HUB_CACHE}"
        # Only the first models of the hub have no owner.
        owner = "" if "/" in name else f" A hub id has an owner: OWNER/{name}."
        if constants.HF_HUB_OFFLINE:
            reason, nearest = str(error).strip().splitlines()[0], did_you_mean_path(name) or "."
            raise EnvironmentFault(
                f"model.name: '{name}' was not found. Looked for {looked}, and on {constants.ENDPOINT} "
                f"({type(error).__name__}: {reason}).{owner} Give a directory, or download the model while online"
                f"{nearest}"
            ) from error
        raise EnvironmentFault(
            f"model.name: '{name}' could not be downloaded from {constants.ENDPOINT}: {why_download_failed(error)}."
            f"{owner} Before that, looked for {looked}{did_you_mean_path(name)}"
        ) from error

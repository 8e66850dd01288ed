"""Checks of the directories, files and tokens that a run needs, before it starts. Nothing is downloaded."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from dualtune.base.checks import Check
from dualtune.base.files import cache_dir, did_you_mean_path, existing, expanded
from dualtune.config import Config
from dualtune.data.sources.readers import is_hub_name, kind_of
from dualtune.engine.machine import GB
from dualtune.model.base_model import HUB_PATTERNS, model_here

RUN_GB = 5  # for several checkpoints, each with an adapter and its two moments in float32
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def hub_cache() -> Path:
    """Return the directory of downloaded models: HF_HUB_CACHE, HF_HOME/hub or ~/.cache/huggingface/hub."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def directory_checks(run_dir: Path) -> list[Check]:
    """Check that the directories for runs, models, tokenized data and temporary files are writable."""
    directories = {
        "run directory": (run_dir, "set run.dir"),
        "hub cache": (hub_cache(), "set HF_HOME"),
        "data cache": (cache_dir(), "set DUALTUNE_CACHE"),
        "temporary files": (Path(tempfile.gettempdir()), "set TMPDIR"),
    }
    return [writable(name, path, other) for name, (path, other) in directories.items()]


def writable(name: str, path: Path, other: str) -> Check:
    """Check that a file can be written there, or in the nearest existing parent directory."""
    place = existing(path)
    remark = "" if place == path.absolute() else f" (will be created in {place})"
    try:
        with tempfile.TemporaryFile(dir=place):  # not os.access, which ignores read-only file systems
            return Check(name, "ok", f"{path}{remark}")
    except OSError as error:
        fix = f"Make it writable, or {other} to a directory that is"
        return Check(name, "fail", f"{path}: {place} cannot be written: {error.strerror}", fix)


def disk_checks(run_dir: Path, download_gb: int) -> list[Check]:
    """Check that there is room for downloads and for the checkpoints of a run; together if on one disk."""
    models = hub_cache()
    needs = {"disk for models": (models, download_gb), "disk for runs": (run_dir, RUN_GB)}
    if _disk(models) == _disk(run_dir):
        needs = {"disk": (models, max(download_gb, RUN_GB))}
    rows: list[Check] = []
    for name, (path, need_gb) in needs.items():
        free = shutil.disk_usage(existing(path)).free
        text = f"{free / GB:.0f} GB free at {path}, {need_gb} GB needed"
        enough = free >= need_gb * GB
        fix = None if enough else "Make room, or set HF_HOME and run.dir to directories on a larger disk"
        rows.append(Check(name, "ok" if enough else "fail", text, fix))
    return rows


def _disk(path: Path) -> int:
    return existing(path).stat().st_dev


def data_checks(config: Config) -> list[Check]:
    """Check that the files exist. `dualtune check-data` checks their rows."""
    sources = [*config.data.sources(), *config.data.eval_sources()]
    return [_data_check(path) for path in dict.fromkeys(source.path for source in sources)]


def _data_check(name: str) -> Check:
    path = expanded(name)
    if path.exists():
        return Check("data", "ok", f"{path}; its rows: dualtune check-data {name}")
    if is_hub_name(name) and not kind_of(path):
        return Check("data", "skipped", f"{name}: no such file, so a dataset of the hub; it is not downloaded now")
    return Check(
        "data",
        "fail",
        f"{path.absolute()}: no such file or directory",
        f"Put it there, or correct the path in the config{did_you_mean_path(path)}",
    )


def model_checks(config: Config) -> list[Check]:
    """Check that model and tokenizer are here: as a directory, or complete in the hub cache."""
    name = config.model.name
    path = local_model(name)
    if path is None:
        return [_absent(name)]
    missing = missing_files(path, weights=config.model.init == "pretrained")
    model = Check("model", "ok", str(path))
    if missing:
        listed = f"{', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}"
        model = Check("model", "fail", f"{path} lacks {listed}", _download(name))
    tokenizers = [file for file in TOKENIZERS if (path / file).is_file()]
    if tokenizers:
        return [model, Check("tokenizer", "ok", tokenizers[0])]
    return [model, Check("tokenizer", "fail", f"{path} has none of {', '.join(TOKENIZERS)}", _download(name))]


def local_model(name: str) -> Path | None:
    """Return the directory of a model on this machine, complete or not, without access to the hub."""
    if (path := model_here(name)) is not None:
        return path
    if not is_hub_name(name):
        return None
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def missing_files(model: Path, *, weights: bool) -> list[str]:
    """Return the files missing in a model directory: its config and, with `weights`, every shard of its index."""
    needed = ["config.json"]
    index = model / "model.safetensors.index.json"
    if weights and index.is_file():
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            needed += sorted({str(name) for name in shards})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            needed.append(f"a readable {index.name}")
    elif weights and not list(model.glob("*.safetensors")):
        needed.append("model.safetensors")
    return [name for name in needed if not (model / name).exists()]


def _absent(name: str) -> Check:
    from huggingface_hub import constants

    if not is_hub_name(name):
        return Check("model", "fail", f"there is no model directory {expanded(name).absolute()}", "Set model.name")
    where = f"{name} is neither a directory nor in the hub cache {hub_cache()}"
    if constants.HF_HUB_OFFLINE:
        return Check("model", "fail", f"{where}, and HF_HUB_OFFLINE is set", f"HF_HUB_OFFLINE=0 {_download(name)}")
    return Check("model", "advice", f"{where}; the first run downloads it", _download(name))


def _download(name: str) -> str:
    return f"hf download {name}" if is_hub_name(name) else "Copy the whole model directory"


def hub_token(*, download: bool) -> Check:
    """Check that the hub token is set, without showing it. `download`: a model must still be downloaded."""
    from huggingface_hub import get_token

    if get_token():
        return Check("hub token", "ok", "set")
    text = "not set; models with a licence to accept (Llama, Gemma and others) need one"
    return Check("hub token", "advice" if download else "ok", text, "hf auth login" if download else None)

"""Pack the files of a run or an adapter directory into one file, without the paths of this machine.

The same content under the same name gives the same bytes: names are sorted, a header holds neither times nor owners,
and the date of a bundle is that of the newest file in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, cast

from dualtune.base.errors import ConfigError, FormatError
from dualtune.base.files import file_in, json_bytes, new_file, write_file
from dualtune.base.redaction import SecretSearch
from dualtune.base.untrusted import open_file
from dualtune.base.versions import VERSION
from dualtune.config import Config, load_config, to_yaml
from dualtune.model.base_model import resolve_model
from dualtune.model.formats.chat_template import hash_of, read_template
from dualtune.model.formats.directory import MANIFEST_FILE, read_adapter
from dualtune.train.state import checkpoint
from dualtune.train.state.checkpoint import MANIFEST, Checkpoint
from dualtune.train.state.run_dir import ADAPTER, CHECKPOINTS, MODEL, is_run_dir, served_run
from dualtune.use.transfer.bundles import archive, manifest, names, signature
from dualtune.use.transfer.bundles.archive import Content
from dualtune.use.transfer.bundles.bundle import BundleReport, name_of
from dualtune.use.transfer.bundles.manifest import Bundle, File

# The keys of a JSON file that may hold a path of this machine. Elsewhere "/" may be a token or a text.
_PATHS = {
    "dualtune.json": {"base"},
    "state.json": {"config"},
    "tokenizer_config.json": {"name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"},
}
_LOCAL = re.compile(r"/|~|\\\\|[A-Za-z]:[\\/]|file:")  # the beginning of a path that is valid on one machine only


@dataclass(slots=True)
class Payload:
    """The content of a bundle. A Path is read when the bundle is written."""

    kind: str
    files: dict[str, bytes | Path] = field(default_factory=lambda: {})
    manifests: dict[str, dict[str, Any]] = field(default_factory=lambda: {})  # files that list the others next to them
    step: int | None = None
    base: dict[str, Any] = field(default_factory=lambda: {})
    data: dict[str, Any] = field(default_factory=lambda: {})
    relocate: list[str] = field(default_factory=lambda: [])  # keys of the config
    notes: list[str] = field(default_factory=lambda: [])


def pack(
    source: Path, target: Path, *, step: int | None = None, adapter: bool = False, tokenizer: str | None = None,
    key: Path | None = None, name: str | None = None,
) -> BundleReport:  # fmt: skip
    """Write a bundle of a run directory or an adapter directory, and report what was written, with notes for the user.

    Of a run, the bundle holds the newest valid checkpoint, the one of `step`, or the adapter. It is bound to a name: by
    default that of the target. ConfigError, FormatError (damaged, or a secret in a file) or DiskError; nothing is
    written then.
    """
    for path in (target, signature.path_of(target)) if key else (target,):
        if os.path.lexists(path):
            raise ConfigError(f"{path}: already exists. Choose another name or remove it")
    # The date is that of the newest file of the run or the adapter: a tokenizer may come from a later download.
    payload = _gather(source, step, adapter)
    seconds = max(int(content.stat().st_mtime) for content in payload.files.values() if isinstance(content, Path))
    if tokenizer is not None:
        _add_tokenizer(payload, resolve_model(tokenizer, weights=False))

    # BUNDLE.json lists the files as they will be packed, without paths of this machine. Reading it back refuses here
    # what a reader would refuse there.
    files = _measure_all(payload)
    bundle = Bundle(
        kind=payload.kind, name=name or name_of(target), created=datetime.fromtimestamp(seconds, UTC).isoformat(),
        version=VERSION, step=payload.step, base=payload.base, data=payload.data,
        relocate=tuple(sorted(payload.relocate)), files=files, digest="",
    )  # fmt: skip
    raw = manifest.to_bytes(bundle)
    search = SecretSearch()
    search.feed(raw)
    _refuse_secret(names.BUNDLE_FILE, search)
    bundle = manifest.parse(raw, target)

    # The signature is over the file that was written here, also if another user may write in this directory.
    signed_text = None
    with new_file(target) as file:
        sha256, num_bytes = _write(file, payload, files, raw), file.tell()
        if key is not None:
            file.flush()
            with Path(file.name).open("rb") as written:
                signed_text, signed_sha256 = signature.sign(written, key)
            if signed_sha256 != sha256:
                raise FormatError(f"{target}: was changed while it was signed. Pack it where no other user can write")
    if signed_text is not None:
        write_file(signature.path_of(target), signed_text)
    return BundleReport(target, num_bytes, sha256, bundle, None, payload.notes)


def _gather(source: Path, step: int | None, adapter: bool) -> Payload:
    if (source / "adapter_config.json").is_file():
        if step is not None or adapter:
            raise ConfigError(f"{source}: is an adapter directory; --checkpoint and --adapter are for a run directory")
        return _adapter(source, None)
    if not (source.is_dir() and is_run_dir(source)):
        raise ConfigError(f"{source}: got neither a run directory (see `dualtune runs`) nor an adapter directory")
    if adapter and step is not None:
        raise ConfigError("--adapter and --checkpoint: give one of them; the adapter is the result of the run")
    run = None if served_run(source) else source
    if run is None and not adapter:
        raise ConfigError(
            f"{source}: is of `dualtune serve --train`, whose states no run resumes. Pack its adapter: --adapter"
        )
    if not adapter:
        return _checkpoint(source, step)
    if (source / MODEL).is_dir():
        raise ConfigError(
            f"{source}: trained the whole model, so it has no adapter. Without --adapter its checkpoint is packed. "
            f"{source / MODEL} is a model directory: share it with `hf upload`, or copy it"
        )
    if not (source / ADAPTER).is_dir():
        raise ConfigError(
            f"{source}: has no adapter yet: the run has not ended. Without --adapter its checkpoint is packed"
        )
    return _adapter(source / ADAPTER, run)


def _adapter(directory: Path, run: Path | None) -> Payload:
    read_adapter(directory)  # FormatError if it is damaged
    payload = Payload(manifest.ADAPTER)
    for name in names.ADAPTER_FILES:
        if os.path.lexists(directory / name):
            payload.files[f"adapter/{name}"] = file_in(directory, name, "adapter")
    config = _without_local_paths(payload, f"adapter/{names.ADAPTER_FILES[0]}")
    payload.base = {"name": config.get("base_model_name_or_path") or config.get("model")}
    if (directory / MANIFEST_FILE).is_file():
        table = _without_local_paths(payload, f"adapter/{MANIFEST_FILE}")
        payload.base |= cast("dict[str, Any]", table.get("base") or {})
        del payload.files[f"adapter/{MANIFEST_FILE}"]  # written anew, when the other files are known
        payload.manifests[f"adapter/{MANIFEST_FILE}"] = table
    if run is not None:
        _add_config(payload, run)
        if (saved := checkpoint.newest(run / CHECKPOINTS)[0]) is not None:
            payload.data = _fingerprints(saved)[1]
    return payload


def _checkpoint(run: Path, step: int | None) -> Payload:
    directory = run / CHECKPOINTS
    payload = Payload(manifest.CHECKPOINT)
    if step is None:
        saved, problems = checkpoint.newest(directory)
        payload.notes += [f"ignored {problem}" for problem in problems]
        if saved is None:
            raise FormatError("\n".join([f"{run}: has no valid checkpoint", *problems[:5]]))
    elif step not in (steps := checkpoint.steps(directory)):
        raise ConfigError(f"--checkpoint: got {step}, {run} has {', '.join(map(str, steps)) or 'none'}")
    else:
        saved = checkpoint.read(checkpoint.path_of(directory, step))
    payload.step = saved.step
    of_base, payload.data = _fingerprints(saved)
    payload.base = {"name": _portable(saved.state["config"])["model"]["name"], **of_base}
    config = _add_config(payload, run)
    _add_template(payload, run, saved)
    _add_checkpoint(payload, saved)
    best = cast("dict[str, Any]", saved.state.get("guards") or {}).get("best_step")
    if config.guards.restore_best and best is not None and best != saved.step:
        try:
            _add_checkpoint(payload, checkpoint.read(checkpoint.path_of(directory, best)))
            payload.notes.append(f"the checkpoint of step {best} is packed too: guards.restore_best may return to it")
        except FormatError as problem:  # the run itself resumes without it
            payload.notes.append(f"the checkpoint for guards.restore_best is left out: {problem}")
    return payload


def _fingerprints(saved: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fingerprints of the base and of the data."""
    recorded: dict[str, Any] = saved.state.get("fingerprints", {})
    of_data = {key: value for key, value in recorded.items() if key.endswith("documents")}
    return {key: value for key, value in recorded.items() if key not in of_data}, of_data


def _add_template(payload: Payload, run: Path, saved: Checkpoint) -> None:
    """Add the chat template of the checkpoint: data.template may name a file of this machine."""
    template = read_template(run)
    if template is None:
        return
    if hash_of(template) == saved.state.get("fingerprints", {}).get("chat template"):
        payload.files[names.TEMPLATE] = run / names.TEMPLATE
    else:
        payload.notes.append(f"left out {run / names.TEMPLATE}: it is not the template of the checkpoint")


def _add_checkpoint(payload: Payload, saved: Checkpoint) -> None:
    folder = f"{CHECKPOINTS}/{saved.path.name}"
    payload.files |= {f"{folder}/{name}": saved.path / name for name in checkpoint.files_of(saved) if name != MANIFEST}
    _without_local_paths(payload, f"{folder}/state.json")
    payload.manifests[f"{folder}/{MANIFEST}"] = json.loads((saved.path / MANIFEST).read_text(encoding="utf-8"))


def _add_config(payload: Payload, run: Path) -> Config:
    config = load_config(run / names.CONFIG)
    before = config.model_dump()
    after = _portable(before)
    payload.files[names.CONFIG] = to_yaml(Config.model_validate(after)).encode()
    changed = (f"{s}.{k}" for s, keys in before.items() for k in keys if _portable(keys[k]) != keys[k])
    payload.relocate += [key for key in changed if key != "run.dir"]
    return config


def _add_tokenizer(payload: Payload, directory: Path) -> None:
    present = [name for name in names.TOKENIZER_FILES if os.path.lexists(directory / name)]
    if not {"tokenizer.json", "tokenizer.model"} & {*present}:
        raise ConfigError(f"--tokenizer: {directory} has neither tokenizer.json nor tokenizer.model")
    for name in present:
        payload.files[f"tokenizer/{name}"] = file_in(directory, name)
    if "tokenizer_config.json" in present:
        _without_local_paths(payload, "tokenizer/tokenizer_config.json")


def _without_local_paths(payload: Payload, name: str) -> dict[str, Any]:
    """Return the JSON of a file without paths of this machine, and pack it like this."""
    before: dict[str, Any] = json.loads(cast(Path, payload.files[name]).read_text(encoding="utf-8"))
    keys = _PATHS.get(name.rpartition("/")[2], {*before})
    after = before | {key: _portable(before[key]) for key in keys & {*before}}
    if after != before:
        payload.files[name] = json_bytes(after)
    return after


def _portable(value: Any) -> Any:
    """Return the value (a table, list or scalar) with every path of this machine reduced to its last part."""
    if isinstance(value, str):
        return (PureWindowsPath(value).name or PurePosixPath(value).name or ".") if _LOCAL.match(value) else value
    if isinstance(value, Mapping):
        return {key: _portable(inner) for key, inner in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_portable(inner) for inner in cast("list[Any]", value)]
    if isinstance(value, tuple):
        return tuple(_portable(inner) for inner in cast("tuple[Any, ...]", value))
    return value


def _measure_all(payload: Payload) -> dict[str, File]:
    """Return size and sha256 of every file by name, and complete the manifests: they list files as they are packed."""
    files = {name: _measure(name, content) for name, content in payload.files.items()}
    for name, table in payload.manifests.items():
        folder = name.rpartition("/")[0]
        listed = {inner: files[f"{folder}/{inner}"] for inner in sorted(table["files"])}
        table["files"] = {inner: {"bytes": file.num_bytes, "sha256": file.sha256} for inner, file in listed.items()}
        payload.files[name] = json_bytes(table)
        files[name] = _measure(name, payload.files[name])
    return dict(sorted(files.items()))


def _measure(name: str, content: bytes | Path) -> File:
    """Return size and sha256 of a file. FormatError if it holds a secret, or anything that a reader refuses.

    The file is read once, because it may change. What is written later must have this sha256.
    """
    num_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
    if num_bytes > names.max_bytes(name):
        raise FormatError(f"{name}: has {num_bytes} bytes, at most {names.max_bytes(name)} are allowed in a bundle")
    digest, check, search = hashlib.sha256(), Content(name, num_bytes, "cannot be packed"), SecretSearch()
    done = text_bytes = 0  # text may hold a secret; a tokenizer.model may be anything, such as a renamed key
    for chunk in _pieces(content):
        if not done:
            is_tensors = name.endswith(".safetensors")  # text in its header alone
            text_bytes = 8 + int.from_bytes(chunk[:8], "little") if is_tensors else names.max_bytes(name)
        digest.update(chunk)
        check.feed(chunk)
        search.feed(chunk[: max(0, text_bytes - done)])
        done += len(chunk)
    check.finish()
    _refuse_secret(name, search)
    return File(done, digest.hexdigest())


def _refuse_secret(name: str, search: SecretSearch) -> None:
    if search.found:
        raise FormatError(f"{name}: holds {search.found} (not shown). Remove it, and revoke it if the file was shared")


def _write(file: BinaryIO, payload: Payload, files: Mapping[str, File], raw: bytes) -> str:
    """Write the whole bundle and return its sha256."""
    digest = hashlib.sha256()

    def write(data: bytes) -> None:
        digest.update(data)
        file.write(data)

    _write_member(write, names.BUNDLE_FILE, raw, File(len(raw), hashlib.sha256(raw).hexdigest()))
    for name, entry in files.items():
        _write_member(write, name, payload.files[name], entry)
    write(archive.END)
    return digest.hexdigest()


def _write_member(write: Callable[[bytes], None], name: str, content: bytes | Path, entry: File) -> None:
    write(archive.header(name, entry.num_bytes))
    digest, num_bytes = hashlib.sha256(), 0
    for chunk in _pieces(content):
        digest.update(chunk)
        num_bytes += len(chunk)
        write(chunk)
    if (num_bytes, digest.hexdigest()) != (entry.num_bytes, entry.sha256):
        raise FormatError(f"{content}: changed while it was packed. Pack again when nothing writes there")
    write(bytes(archive.padding(entry.num_bytes)))


def _pieces(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with open_file(content) as file:
        while chunk := file.read(archive.CHUNK):
            yield chunk

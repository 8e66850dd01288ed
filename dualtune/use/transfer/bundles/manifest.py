"""BUNDLE.json: what a bundle holds, with the size and sha256 of every file, and a digest of itself.

schema_version   2; 1 has neither name nor created, and is still read
kind             adapter | checkpoint
name             the name it was packed for: the last part of its target path
created          when the newest file of the adapter or the checkpoints was written: 2026-01-31T23:59:59+00:00
dualtune         the version that packed it
step             of the checkpoint to resume from; null for an adapter
base             the base model: its name and what identifies it
data             fingerprints of the data, if known
relocate         keys of config.yaml with paths, reduced to the last part: their directories differ on every machine
files            name -> {bytes, sha256}, sorted by name, without BUNDLE.json
digest           sha256 of this table without this key
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

from dualtune.base import fields
from dualtune.base.checks import Check
from dualtune.base.errors import ConfigError, FormatError
from dualtune.base.files import json_bytes
from dualtune.base.untrusted import open_file, parse_object, sha256_of
from dualtune.use.transfer.bundles import names
from dualtune.use.transfer.bundles.names import BUNDLE_FILE, MAX_BUNDLE_FILE_BYTES

SCHEMA_VERSION = 2
ADAPTER, CHECKPOINT = "adapter", "checkpoint"
KINDS = (ADAPTER, CHECKPOINT)
_BINDING = ("name", "created")
KEYS = ("schema_version", "kind", *_BINDING, "dualtune", "step", "base", "data", "relocate", "files", "digest")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", re.ASCII)
MAX_NAME = 200
_CONFIG_KEY = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+", re.ASCII)


class File(NamedTuple):
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """The content of BUNDLE.json."""

    kind: str
    version: str  # of the dualtune that packed it
    step: int | None
    base: dict[str, Any]
    data: dict[str, Any]
    relocate: tuple[str, ...]
    files: dict[str, File]
    digest: str
    name: str | None = None  # None in schema version 1, as is `created`
    created: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


def to_bytes(bundle: Bundle) -> bytes:
    """Return BUNDLE.json with its digest."""
    is_bound = bundle.created is not None
    table = {
        "schema_version": SCHEMA_VERSION if is_bound else 1,
        "kind": bundle.kind,
        **({"name": bundle.name, "created": bundle.created} if is_bound else {}),
        "dualtune": bundle.version,
        "step": bundle.step,
        "base": bundle.base,
        "data": bundle.data,
        "relocate": list(bundle.relocate),
        "files": {name: {"bytes": f.num_bytes, "sha256": f.sha256} for name, f in sorted(bundle.files.items())},
    }
    return json_bytes(table | {"digest": hashlib.sha256(json_bytes(table)).hexdigest()})


def parse(raw: bytes, where: object) -> Bundle:
    """Parse an untrusted BUNDLE.json. FormatError unless every key and every name is valid."""
    where = f"{where}: {names.BUNDLE_FILE}"
    table = parse_object(raw, where)
    if (version := fields.rank(table, "schema_version", where)) > SCHEMA_VERSION:
        raise FormatError(f"{where}: schema_version {version}, this dualtune reads up to {SCHEMA_VERSION}: upgrade it")
    keys = KEYS if version == SCHEMA_VERSION else tuple(key for key in KEYS if key not in _BINDING)
    if wrong := sorted(table.keys() ^ set(keys)):
        state = "missing" if wrong[0] in keys else "unknown"
        raise FormatError(f"{where}: {names.shown(wrong[0])}: {state}; the keys are {', '.join(keys)}")
    kind, step = table["kind"], table["step"]
    if kind not in KINDS:
        raise fields.wrong(where, "kind", kind, " or ".join(KINDS))
    if kind == ADAPTER and step is not None:
        raise fields.wrong(where, "step", step, "null for an adapter")
    if kind == CHECKPOINT and not (type(step) is int and step >= 0):
        raise fields.wrong(where, "step", step, "an integer >= 0")
    relocate = fields.texts(table, "relocate", where) or []
    for key in relocate:
        if not _CONFIG_KEY.fullmatch(key):
            raise fields.wrong(where, "relocate", key, "keys of a config")
    base = fields.subtable(table, "base", where)
    fields.name(base, "name", where)
    name, created = _binding(table, where) if version == SCHEMA_VERSION else (None, None)
    bundle = Bundle(
        kind=kind,
        name=name,
        created=created,
        version=fields.name(table, "dualtune", where) or "",
        step=step,
        base=base,
        data=fields.subtable(table, "data", where),
        relocate=tuple(relocate),
        files=_files(fields.subtable(table, "files", where), where),
        digest=str(table["digest"]),
    )
    _check_completeness(bundle, where)
    # Last, because a single wrong value has a better message: the bytes must be exactly those that `to_bytes` writes.
    try:
        is_unchanged = to_bytes(bundle) == raw
    except (ValueError, RecursionError):  # lone surrogates, numbers beyond float64, a thousand brackets
        is_unchanged = False
    if not is_unchanged:
        raise FormatError(f"{where}: was changed: its digest is not that of its content. Get the bundle again")
    return bundle


def _binding(table: Mapping[str, Any], where: str) -> tuple[str, str]:
    name, created = table["name"], table["created"]
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise fields.wrong(where, "name", name, f"1 to {MAX_NAME} printable characters")
    try:
        is_date = isinstance(created, str) and bool(_CREATED.fullmatch(created) and datetime.fromisoformat(created))
    except ValueError:  # the 31st of February
        is_date = False
    if not is_date:
        raise fields.wrong(where, "created", created, "a date and time such as 2026-01-31T23:59:59+00:00")
    return name, created


def _files(table: Mapping[str, Any], where: str) -> dict[str, File]:
    if not 1 <= len(table) <= names.MAX_ENTRIES:
        raise FormatError(f"{where}: lists {len(table)} files, allowed are 1 to {names.MAX_ENTRIES}")
    files = {name: _file(name, entry, where) for name, entry in table.items()}
    if list(files) != sorted(files):
        raise FormatError(f"{where}: files: not sorted by name")
    if (total := sum(file.num_bytes for file in files.values())) > names.MAX_TOTAL_BYTES:
        raise FormatError(f"{where}: lists {total} bytes in all, at most {names.MAX_TOTAL_BYTES} are allowed")
    return files


def _file(name: str, entry: Any, where: str) -> File:
    if problem := names.problem_of(name):
        raise FormatError(f"{where}: {names.shown(name)} {problem}")
    if name == names.BUNDLE_FILE:
        raise FormatError(f"{where}: lists itself")
    match entry:
        case {"bytes": int(num_bytes), "sha256": str(sha256), **rest} if not rest and type(num_bytes) is int:
            pass
        case _:
            raise FormatError(f"{where}: {name}: needs bytes and sha256, and nothing else")
    if not 0 <= num_bytes <= names.max_bytes(name):
        raise FormatError(f"{where}: {name}: lists {num_bytes} bytes, at most {names.max_bytes(name)} are allowed")
    if not _SHA256.fullmatch(sha256):
        raise FormatError(f"{where}: {name}: its sha256 is not 64 hexadecimal digits")
    return File(num_bytes, sha256)


def _check_completeness(bundle: Bundle, where: str) -> None:
    """Check that the bundle has the files that its kind needs, and none of the other kind."""
    listed = bundle.files.keys()
    steps = {step for name in listed if (step := names.step_of(name)) is not None}
    if bundle.kind == ADAPTER:
        if steps:
            raise FormatError(f"{where}: kind is adapter, but it lists a checkpoint")
        needed = {"adapter/adapter_config.json"}
        if not listed & {"adapter/adapter_model.safetensors", "adapter/adapters.safetensors"}:
            raise FormatError(f"{where}: kind is adapter, but it lists no weights")
    else:
        if any(name.startswith("adapter/") for name in listed):
            raise FormatError(f"{where}: kind is checkpoint, but it lists an adapter")
        if len(steps) > names.MAX_CHECKPOINTS or (steps and bundle.step not in steps):
            raise FormatError(f"{where}: lists the checkpoints of steps {sorted(steps)}, but step is {bundle.step}")
        expected = steps or {cast(int, bundle.step)}
        needed = {names.CONFIG}
        for folder in (f"checkpoints/step-{step:08d}/" for step in expected):
            files = [name.removeprefix(folder) for name in listed if name.startswith(folder)]
            needed |= {folder + name for name in names.files_of_checkpoint(files)}
    if missing := sorted(needed - listed):
        raise FormatError(f"{where}: {missing[0]} is missing, which a bundle of kind {bundle.kind} needs")


# ----------------------------------------------------------------------------------------------------------------------
# The binding of a bundle, covered by its signature: the name it was packed for, its base model, and a date.
#
# A signature tells who wrote a file, not that it is the requested one. An old bundle, or one of another run, has a
# valid signature too, and whoever controls the remote could offer it under any name. So BUNDLE.json holds both, and a
# reader compares: the name always, the date if the reader sets a limit.

UNBOUND = "BUNDLE.json has neither a name nor a date: an older dualtune packed it"
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGE = re.compile(r"(\d{1,6}) ?([mhdw])", re.ASCII)
_SKEW = timedelta(hours=1)  # allowed difference between two clocks


@dataclass(frozen=True, slots=True)
class RequiredBinding:
    """What a reader requires."""

    found_as: str | None = None  # the name on the remote, if that is not the name of the file
    name: str | None = None  # the name that it must be bound to, whatever its file is called
    max_age: timedelta | None = None


ANY = RequiredBinding()


def check(
    bundle: Bundle,
    required: RequiredBinding,
    found_as: str | None,
    where: object,
    *,
    is_signed: bool,
    now: datetime | None = None,
) -> list[str]:
    """Return notes for the user on the binding. FormatError if it is not what was required.

    Without a signature the name proves nothing, because whoever can replace the file can also change the name in it:
    then a name that differs from the one it was found under is only a note.
    """
    if bundle.created is None:
        if required.name is not None or required.max_age is not None:
            raise FormatError(f"{where}: {UNBOUND}. --name and --max-age need them: pack it again")
        return [UNBOUND]
    if required.max_age is not None:
        _check_age(bundle.created, required.max_age, where, now or datetime.now(UTC))
    if required.name is not None:
        if required.name != bundle.name:
            raise FormatError(f"{where}: is the bundle {bundle.name!r}, --name requires {required.name!r}")
    elif found_as != bundle.name:
        mismatch = f"is the bundle {bundle.name!r}, found under the name {found_as!r}"
        if is_signed:
            raise FormatError(
                f"{where}: {mismatch}: it was renamed or replaced. If it is the one you want, add --name {bundle.name}"
            )
        return [f"{mismatch}; without a signature, neither name is proven"]
    return []


def _check_age(created: str, max_age: timedelta, where: object, now: datetime) -> None:
    age = now - datetime.fromisoformat(created)
    if age > max_age:
        raise FormatError(
            f"{where}: its content was written {created}, {in_days(age)} ago; --max-age allows {in_days(max_age)}. "
            "Get a newer bundle"
        )
    if age < -_SKEW:
        raise FormatError(f"{where}: its content was written {created}, which is in the future. Check both clocks")


def parse_age(text: str) -> timedelta:
    """Parse `90m`, `12h`, `7d` or `2w`. ConfigError for anything else."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--max-age: got {text!r}; allowed: a number and one of m, h, d and w, such as 7d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def in_days(age: timedelta) -> str:
    hours = age.total_seconds() / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"


# ----------------------------------------------------------------------------------------------------------------------
# A directory that was unpacked from a bundle: what its BUNDLE.json says about the bundle and its files.


def find(directory: Path, required: RequiredBinding) -> tuple[Path, list[Check]]:
    """Return the adapter directory, and a check of the bundle that it was unpacked from, if any.

    `directory` is that of the adapter or of the whole bundle. FormatError if the bundle is not the wanted one.
    """
    if (directory / BUNDLE_FILE).exists() and (directory / ADAPTER).is_dir():
        directory = directory / ADAPTER
    root = directory.parent
    if not (directory.name == ADAPTER and (root / BUNDLE_FILE).exists()):
        if required.name is not None or required.max_age is not None:
            raise FormatError(
                f"{directory}: has no {BUNDLE_FILE} next to it, which --name and --max-age need. Give a directory "
                "written by `dualtune pull` or `dualtune bundle unpack`"
            )
        return directory, []
    with open_file(root / BUNDLE_FILE, max_bytes=MAX_BUNDLE_FILE_BYTES) as file:
        bundle = parse(file.read(MAX_BUNDLE_FILE_BYTES), root)
    check(bundle, required, bundle.name, root, is_signed=False)
    return directory, [_check(root, bundle)]


def _check(root: Path, bundle: Bundle) -> Check:
    files = {name: entry for name, entry in bundle.files.items() if name.startswith(f"{ADAPTER}/")}
    changed = [name for name, entry in files.items() if not _is_same(root / name, entry)]
    if changed:
        return Check("bundle", "advice", f"{changed[0]} differs from {BUNDLE_FILE}: it was changed after unpacking")
    if bundle.created is None:
        return Check("bundle", "advice", UNBOUND)
    base = bundle.base.get("name") or "no name"
    return Check("bundle", "ok", f"{bundle.name!r}, written {bundle.created}, on the base model {base}")


def _is_same(path: Path, entry: File) -> bool:
    return path.is_file() and path.stat().st_size == entry.num_bytes and sha256_of(path) == entry.sha256

"""dualtune.json: the files of an adapter directory when it was written, and all other recorded facts.

    {"schema_version": 1, "files": {"<name>": {"bytes": …, "sha256": …}, …}, "notes": [what was converted], …}

The other keys are metadata of the writer: fingerprints of the base model, a summary of the training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dualtune.errors import FormatError
from dualtune.io import fields
from dualtune.io.disk import Content, listing
from dualtune.io.untrusted import LFS_ADVICE, is_lfs_pointer, read_json, sha256_of

MANIFEST_FILE = "dualtune.json"
SCHEMA_VERSION = 1
MAX_BYTES = 1 << 20


def make_manifest(files: Mapping[str, Content], notes: Collection[str], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of dualtune.json for these files. Metadata from another directory may be passed as it is."""
    return {
        **metadata,
        "schema_version": SCHEMA_VERSION,
        "files": listing(files),
        "notes": [*(metadata.get("notes") or []), *notes],
    }


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the content of dualtune.json, None if there is none."""
    path = directory / MANIFEST_FILE
    if not path.is_file():
        return None
    manifest = read_json(path, max_bytes=MAX_BYTES)
    if (version := fields.rank(manifest, "schema_version", path)) > SCHEMA_VERSION:
        raise FormatError(f"{path}: schema_version {version} is newer than {SCHEMA_VERSION}. Update dualtune.")
    fields.texts(manifest, "notes", path)
    return manifest


def integrity_problems(directory: Path, manifest: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return where the `known` files differ from the manifest. Other names are refused and never read."""
    listed = fields.subtable(manifest, "files", directory / MANIFEST_FILE)
    problems = [
        f"{MANIFEST_FILE} lists {fields.shown(name)!r}, which is not part of an adapter"
        for name in listed
        if name not in known
    ]
    for name in known:
        path = directory / name
        if name not in listed:
            problems += [f"{name} is not listed in {MANIFEST_FILE}: it was added later"] if path.exists() else []
        elif not path.is_file():
            problems.append(f"{name} is missing, though {MANIFEST_FILE} lists it")
        else:
            entry = fields.subtable(listed, name, directory / MANIFEST_FILE)
            problems += _file_problems(path, num_bytes=entry.get("bytes"), sha256=entry.get("sha256"))
    return problems


def _file_problems(path: Path, *, num_bytes: Any, sha256: Any) -> list[str]:
    if is_lfs_pointer(path):
        return [f"{path.name} {LFS_ADVICE}"]
    if (size := path.stat().st_size) != num_bytes:
        expected = fields.shown(fields.text_of(num_bytes))
        return [f"{path.name} has {size} bytes, expected {expected}: truncated or replaced. Copy it again."]
    if sha256_of(path) != sha256:
        return [f"{path.name} was changed: its sha256 is not the one in {MANIFEST_FILE}. Copy it again."]
    return []

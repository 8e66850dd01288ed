"""A bundle: one file that carries an adapter, or a checkpoint to be continued, to another machine.

Reading trusts nothing: not the container (`archive`), nor the names (`names`), the list (`manifest`), the content
(`content`). Everything streams, in pieces of 256 KiB. docs/adapter_format.md is the specification.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dualtune.adapter import fields
from dualtune.adapter.files import parse_object
from dualtune.disk import existing, fsync, new_directory
from dualtune.errors import ConfigError, DiskError, FormatError
from dualtune.show import in_bytes, in_columns
from dualtune.transfer import archive, manifest, signature
from dualtune.transfer.content import Content
from dualtune.transfer.manifest import Bundle
from dualtune.transfer.names import BUNDLE_FILE, LISTINGS
from dualtune.transfer.signature import Trust

Write = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Report:
    """A bundle that holds what it says."""

    path: Path
    num_bytes: int
    bundle: Bundle
    signed_by: str | None  # None where no signature was asked for

    def to_json(self) -> dict[str, Any]:
        b = self.bundle
        return {
            "path": str(self.path), "ok": True, "bytes": self.num_bytes, "kind": b.kind, "step": b.step,
            "dualtune": b.version, "base": b.base, "data": b.data, "relocate": list(b.relocate), "digest": b.digest,
            "signed_by": self.signed_by,
            "files": {name: {"bytes": f.num_bytes, "sha256": f.sha256} for name, f in b.files.items()},
        }  # fmt: skip

    def to_text(self) -> str:
        b = self.bundle
        facts = {"base model" if key == "name" else key: text for key, text in (b.base | b.data).items()}
        kind = b.kind if b.step is None else f"{b.kind} after step {b.step}"
        rows = [
            ("bundle", f"{self.path}, {in_bytes(self.num_bytes)}"),
            ("kind", f"{kind}, packed by dualtune {b.version}"),
            *((_shown(key), _shown(text)) for key, text in facts.items() if isinstance(text, str)),  # tables: --json
            ("signature", f"of {self.signed_by}" if self.signed_by else "not asked for"),
            ("digest", b.digest),
        ]
        files = [(name, in_bytes(f.num_bytes), f.sha256[:16], "ok") for name, f in b.files.items()]
        return in_columns(rows) + "\n\n" + in_columns([("file", "size", "sha256", ""), *files])


def inspect(path: Path, trust: Trust | None = None) -> Report:
    """Read all of a bundle and write nothing. FormatError, with the reason, if it cannot be trusted."""
    with _opened(path, trust) as (file, num_bytes, bundle):
        _read(file, path, bundle, lambda name: contextlib.nullcontext(lambda chunk: None))
    return Report(path, num_bytes, bundle, trust.identity if trust else None)


def unpack(path: Path, target: Path, trust: Trust | None = None) -> Report:
    """Write a bundle's files to a new directory, whole or not at all, and nothing outside of it.

    Raises FormatError if it cannot be trusted, ConfigError if the directory is taken, DiskError if the disk refuses.
    """
    target = Path(os.path.abspath(target.expanduser()))  # noqa: PTH100  resolve() would follow a link at the target
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: already exists and is not an empty directory. Choose another path or remove it")
    with _opened(path, trust) as (file, num_bytes, bundle):
        _check_space(target, bundle.num_bytes)
        with new_directory(target) as directory:

            @contextlib.contextmanager
            def create(name: str) -> Generator[Write]:
                place = directory / name
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("xb") as out:
                    yield out.write
                    out.flush()
                    fsync(place)

            _read(file, path, bundle, create)
            with create(BUNDLE_FILE) as write:
                write(manifest.to_bytes(bundle))
    return Report(path, num_bytes, bundle, trust.identity if trust else None)


@contextlib.contextmanager
def _opened(path: Path, trust: Trust | None) -> Generator[tuple[BinaryIO, int, Bundle]]:
    """The file, its size and its list, once signature, list and structure are known to be right."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FormatError(
                f"{path}: is not a file. `dualtune bundle pack` makes one of a run or an adapter directory"
            )
        file = path.open("rb")
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        with file:
            if trust is not None:
                signature.verify(file, path, trust)
            raw = archive.read_first(file, path)
            bundle = manifest.parse(raw, path)
            num_bytes = os.fstat(file.fileno()).st_size
            sizes = {BUNDLE_FILE: len(raw)} | {name: entry.num_bytes for name, entry in bundle.files.items()}
            archive.check_structure(file, num_bytes, sizes, path)
            file.seek(0)
            yield file, num_bytes, bundle
    except OSError as error:  # of reading: what is written has its own
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error


def _read(
    file: BinaryIO, path: Path, bundle: Bundle, create: Callable[[str], contextlib.AbstractContextManager[Write]]
) -> None:
    """Stream every member past its checks into what `create` gives for its name."""
    first = len(manifest.to_bytes(bundle))
    for _ in archive.chunks(file, BUNDLE_FILE, first, path):
        pass
    for name, entry in bundle.files.items():
        digest, content = hashlib.sha256(), Content(name, entry.num_bytes, path)
        kept = bytearray() if name.endswith(LISTINGS) else None  # small, by the cap of these names
        with create(name) as write:
            for chunk in archive.chunks(file, name, entry.num_bytes, path):
                digest.update(chunk)
                content.feed(chunk)
                if kept is not None:
                    kept += chunk
                write(chunk)
            content.finish()
        if digest.hexdigest() != entry.sha256:
            raise FormatError(
                f"{path}: {name} was changed: its sha256 is not that of the list. Ask for the bundle again"
            )
        if kept is not None:
            _check_listing(bytes(kept), name, bundle, path)


def _check_listing(raw: bytes, name: str, bundle: Bundle, path: Path) -> None:
    """What a checkpoint or an adapter says of its own files is what BUNDLE.json says of them."""
    where = f"{path}: {name}"
    folder = name.rpartition("/")[0]
    listed = fields.subtable(parse_object(raw, where), "files", where)
    for file, entry in bundle.files.items():
        inner = file.removeprefix(folder + "/")
        is_beside = file.startswith(folder + "/") and file != name
        if is_beside and listed.pop(inner, None) != {"bytes": entry.num_bytes, "sha256": entry.sha256}:
            raise FormatError(
                f"{where}: says something else of {inner} than {BUNDLE_FILE} does: one of them was changed"
            )
    if listed:
        raise FormatError(f"{where}: lists {ascii(min(listed))[:120]}, which is not in the bundle")


def _check_space(target: Path, num_bytes: int) -> None:
    try:
        free = shutil.disk_usage(existing(target)).free
    except OSError as error:
        raise DiskError(f"{target}: cannot be written: {error.strerror}") from error
    if free < num_bytes:
        raise DiskError(f"{target}: needs {in_bytes(num_bytes)}, and the disk has {in_bytes(free)} free. Free some")


def _shown(text: str) -> str:
    """A text of a stranger, safe for a terminal."""
    return (text if text.isprintable() else ascii(text)[1:-1])[:100]

"""A bundle: one file that carries an adapter, or a checkpoint to resume from, to another machine.

Reading trusts nothing: not the container (`archive`), the names (`names`), the list (`manifest`) or the content
(`content`). Everything streams, in pieces of 256 KiB. docs/adapter_format.md is the specification.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dualtune.base import fields
from dualtune.base.errors import ConfigError, DiskError, FormatError
from dualtune.base.files import NotRegular, existing, expanded, fsync, new_directory, open_regular
from dualtune.base.text import in_bytes, in_columns
from dualtune.base.untrusted import parse_object
from dualtune.use.transfer.bundles import archive, manifest, signature
from dualtune.use.transfer.bundles.archive import Content
from dualtune.use.transfer.bundles.manifest import ANY, Bundle, RequiredBinding
from dualtune.use.transfer.bundles.names import BUNDLE_FILE, IN_DIRECTORY, LISTINGS
from dualtune.use.transfer.bundles.signature import Trust

Write = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class BundleReport:
    """A bundle that has passed all checks."""

    path: Path
    num_bytes: int
    sha256: str  # of the whole file
    bundle: Bundle
    signed_by: str | None  # None if no signature was required
    notes: list[str]  # for the user, on its name and date

    def to_json(self) -> dict[str, Any]:
        b = self.bundle
        return {
            "path": str(self.path), "ok": True, "bytes": self.num_bytes, "kind": b.kind, "name": b.name,
            "created": b.created, "step": b.step, "dualtune": b.version, "base": b.base,
            "data": b.data, "relocate": list(b.relocate), "digest": b.digest,
            "signed_by": self.signed_by, "notes": self.notes,
            "files": {name: {"bytes": f.num_bytes, "sha256": f.sha256} for name, f in b.files.items()},
        }  # fmt: skip

    def to_text(self) -> str:
        b = self.bundle
        facts = {"base model" if key == "name" else key: text for key, text in (b.base | b.data).items()}
        kind = b.kind if b.step is None else f"{b.kind} after step {b.step}"
        rows = [
            ("bundle", f"{self.path}, {in_bytes(self.num_bytes)}"),
            ("kind", f"{kind}, packed by dualtune {b.version}"),
            *(
                (key, fields.shown(text))
                for key, text in (("name", b.name), ("created", b.created))
                if text is not None
            ),
            *(("note", note) for note in self.notes),
            *(
                (fields.shown(key), fields.shown(text)) for key, text in facts.items() if isinstance(text, str)
            ),  # tables: --json
            ("signature", f"by {self.signed_by}" if self.signed_by else "not checked"),
            ("digest", b.digest),
        ]
        files = [(name, in_bytes(f.num_bytes), f.sha256[:16], "ok") for name, f in b.files.items()]
        return in_columns(rows) + "\n\n" + in_columns([("file", "size", "sha256", ""), *files])


def inspect(path: Path, trust: Trust | None = None, required: RequiredBinding = ANY) -> BundleReport:
    """Read a whole bundle and write nothing. FormatError, with the reason, if it cannot be trusted."""
    with _opened(path, trust, required) as (file, num_bytes, bundle, notes):
        sha256 = _read(file, path, bundle, lambda name: contextlib.nullcontext(lambda chunk: None))
    return BundleReport(path, num_bytes, sha256, bundle, trust.identity if trust else None, notes)


def unpack(path: Path, target: Path, trust: Trust | None = None, required: RequiredBinding = ANY) -> BundleReport:
    """Write the files of a bundle to a new directory: all or none, and nothing outside of it.

    FormatError if the bundle cannot be trusted, ConfigError if the directory is in use, DiskError if writing fails.
    """
    target = Path(os.path.abspath(expanded(target)))  # noqa: PTH100  resolve() would follow a link at the target
    if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: already exists and is not an empty directory. Choose another path or remove it")
    with _opened(path, trust, required) as (file, num_bytes, bundle, notes):
        _check_space(target, bundle.num_bytes)
        with new_directory(target) as directory:

            @contextlib.contextmanager
            def create(name: str) -> Generator[Write]:
                path = directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as out:
                    yield out.write
                    out.flush()
                    fsync(path)

            sha256 = _read(file, path, bundle, create)
            with create(BUNDLE_FILE) as write:
                write(manifest.to_bytes(bundle))
    return BundleReport(path, num_bytes, sha256, bundle, trust.identity if trust else None, notes)


@contextlib.contextmanager
def _opened(
    path: Path, trust: Trust | None, required: RequiredBinding
) -> Generator[tuple[BinaryIO, int, Bundle, list[str]]]:
    """Yield the file, its size, its list and notes, after signature, list, binding and structure are verified.

    The file is opened once and its list read once: everything else is compared with that list, which the signature
    covers.
    """
    try:
        file = open_regular(path)
    except NotRegular:
        raise FormatError(
            f"{path}: is not a file. Pack a run or an adapter directory with `dualtune bundle pack`"
        ) from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        with file:
            # What the signature was verified over is what is parsed, not what the file holds a moment later.
            head = file if trust is None else io.BytesIO(signature.verify(file, path, trust))
            raw = archive.read_first(head, path)
            bundle = manifest.parse(raw, path)
            notes = manifest.check(
                bundle, required, required.found_as or name_of(path), path, is_signed=trust is not None
            )
            # The headers alone show that the members are those of the list; their content is checked as it is read.
            num_bytes = os.fstat(file.fileno()).st_size
            sizes = {BUNDLE_FILE: len(raw)} | {name: entry.num_bytes for name, entry in bundle.files.items()}
            archive.check_structure(file, num_bytes, sizes, path)
            file.seek(0)
            yield file, num_bytes, bundle, notes
    except OSError as error:  # from reading: writing has its own handler
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error


def name_of(path: Path) -> str:
    """Return the name that a bundle at this path should be bound to: that of its file or of its directory."""
    return path.absolute().parent.name if path.name == IN_DIRECTORY else path.stem


def _read(
    file: BinaryIO, path: Path, bundle: Bundle, create: Callable[[str], contextlib.AbstractContextManager[Write]]
) -> str:
    """Check every member while it streams into what `create(name)` opens. Return the sha256 of the whole file."""
    raw, whole = manifest.to_bytes(bundle), hashlib.sha256()
    # BUNDLE.json has been read, and its signature verified: these bytes count, not what the file holds by now.
    for _ in archive.chunks(file, BUNDLE_FILE, len(raw), path):
        pass
    whole.update(archive.header(BUNDLE_FILE, len(raw)) + raw + bytes(archive.padding(len(raw))))
    for name, entry in bundle.files.items():
        # A member is checked while it is written; it is removed with all others if its end shows that it was changed.
        digest, content = hashlib.sha256(), Content(name, entry.num_bytes, path)
        listing = bytearray() if name.endswith(LISTINGS) else None  # small: these names have a size limit
        whole.update(archive.header(name, entry.num_bytes))
        with create(name) as write:
            for chunk in archive.chunks(file, name, entry.num_bytes, path):
                digest.update(chunk)
                whole.update(chunk)
                content.feed(chunk)
                if listing is not None:
                    listing += chunk
                write(chunk)
            content.finish()
        whole.update(bytes(archive.padding(entry.num_bytes)))
        if digest.hexdigest() != entry.sha256:
            raise FormatError(
                f"{path}: {name} was changed: its sha256 is not that in {BUNDLE_FILE}. Get the bundle again"
            )
        if listing is not None:
            _check_listing(bytes(listing), name, bundle, path)
    whole.update(archive.END)
    return whole.hexdigest()


def _check_listing(raw: bytes, name: str, bundle: Bundle, path: Path) -> None:
    """Check that the manifest of a checkpoint or an adapter agrees with BUNDLE.json about its files."""
    where = f"{path}: {name}"
    folder = name.rpartition("/")[0]
    listed = fields.subtable(parse_object(raw, where), "files", where)
    for file, entry in bundle.files.items():
        inner = file.removeprefix(folder + "/")
        is_in_folder = file.startswith(folder + "/") and file != name
        if is_in_folder and listed.pop(inner, None) != {"bytes": entry.num_bytes, "sha256": entry.sha256}:
            raise FormatError(
                f"{where}: its entry of {inner} differs from that in {BUNDLE_FILE}: one of them was changed"
            )
    if listed:
        raise FormatError(f"{where}: lists {ascii(min(listed))[:120]}, which is not in the bundle")


def _check_space(target: Path, num_bytes: int) -> None:
    try:
        free = shutil.disk_usage(existing(target)).free
    except OSError as error:
        raise DiskError(f"{target}: cannot be written: {error.strerror}") from error
    if free < num_bytes:
        raise DiskError(f"{target}: needs {in_bytes(num_bytes)}, the disk has {in_bytes(free)} free. Free some space")

"""A directory that was unpacked from a bundle: what its BUNDLE.json says about the bundle and its files."""

from __future__ import annotations

from pathlib import Path

from dualtune.checks import Check
from dualtune.errors import FormatError
from dualtune.io.folder import open_regular
from dualtune.io.untrusted import sha256_of
from dualtune.transfer.bundles import binding, manifest
from dualtune.transfer.bundles.binding import UNBOUND, RequiredBinding
from dualtune.transfer.bundles.manifest import Bundle
from dualtune.transfer.bundles.names import BUNDLE_FILE, MAX_BUNDLE_FILE_BYTES

ADAPTER = "adapter"


def find(directory: Path, wanted: RequiredBinding) -> tuple[Path, list[Check]]:
    """Return the adapter directory, and a check of the bundle that it was unpacked from, if any.

    `directory` is that of the adapter or of the whole bundle. FormatError if the bundle is not the wanted one.
    """
    if (directory / BUNDLE_FILE).exists() and (directory / ADAPTER).is_dir():
        directory = directory / ADAPTER
    root = directory.parent
    if not (directory.name == ADAPTER and (root / BUNDLE_FILE).exists()):
        if wanted.name is not None or wanted.max_age is not None:
            raise FormatError(
                f"{directory}: has no {BUNDLE_FILE} next to it, which --name and --max-age need. Give a directory "
                "written by `dualtune pull` or `dualtune bundle unpack`"
            )
        return directory, []
    bundle = _read(root)
    binding.check(bundle, wanted, bundle.name, root, is_signed=False)
    return directory, [_check(root, bundle)]


def _read(root: Path) -> Bundle:
    try:
        with open_regular(root / BUNDLE_FILE) as file:
            raw = file.read(MAX_BUNDLE_FILE_BYTES + 1)
    except OSError as error:
        raise FormatError(f"{root / BUNDLE_FILE}: cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_BUNDLE_FILE_BYTES:
        raise FormatError(f"{root / BUNDLE_FILE}: has more than the allowed {MAX_BUNDLE_FILE_BYTES} bytes")
    return manifest.parse(raw, root)


def _check(root: Path, bundle: Bundle) -> Check:
    files = {name: entry for name, entry in bundle.files.items() if name.startswith(f"{ADAPTER}/")}
    changed = [name for name, entry in files.items() if not _is_same(root / name, entry)]
    if changed:
        return Check("bundle", "advice", f"{changed[0]} differs from {BUNDLE_FILE}: it was changed after unpacking")
    if bundle.created is None:
        return Check("bundle", "advice", UNBOUND)
    base = bundle.base.get("name") or "no name"
    return Check("bundle", "ok", f"{bundle.name!r}, written {bundle.created}, on the base model {base}")


def _is_same(path: Path, entry: manifest.File) -> bool:
    return path.is_file() and path.stat().st_size == entry.num_bytes and sha256_of(path) == entry.sha256

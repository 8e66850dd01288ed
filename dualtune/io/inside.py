"""Files that are really inside a directory: a link in a stranger's may lead to a private key of the user."""

from __future__ import annotations

from pathlib import Path

from dualtune.errors import FormatError


def file_in(directory: Path, name: str, kind: str = "model") -> Path:
    """Return the regular file of this name in a directory of that kind. FormatError if none, or if a link leaves it.

    The hub's cache is the exception: there each file of models--ORG--NAME/snapshots/REVISION is a link to
    models--ORG--NAME/blobs/HASH.
    """
    path = directory / name
    try:
        root, target = directory.resolve(), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links
        reason = error.strerror if isinstance(error, OSError) else "its links form a loop"
        raise FormatError(f"{path}: cannot be read: {reason}") from None
    is_blob = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    if not (target.is_relative_to(root) or is_blob):
        raise FormatError(
            f"{path}: is a link to {target}, outside of the {kind} directory. If that file belongs to the {kind}, "
            "replace the link with a copy"
        )
    if not target.is_file():
        raise FormatError(f"{path}: is not a regular file")
    return path

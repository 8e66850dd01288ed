"""Open the data that a user names: a file, a directory with files for each role, or a hub dataset.

Each row keeps its file and line, so that later error messages can name them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from dualtune.data.sources.data_file import Rows, open_regular, reading
from dualtune.data.sources.hub import hub_has_role, is_hub_name, open_hub
from dualtune.data.sources.kinds import KINDS, Tell, kind_of, read_file
from dualtune.data.sources.rows import printable
from dualtune.data.sources.saved import files_of, splits_of
from dualtune.errors import DataError

Role = Literal["train", "valid", "test"]
ROLE_NAMES: dict[Role, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
_PART = re.compile(r"(?:[-_.](?:part[-_.]?)?(?P<part>\d+)(?:[-_.]of[-_.](?P<parts>\d+))?)?")  # after the role's name
SHOWN_NAMES = 20


class SourceFiles(Protocol):
    """A source of rows with an identity."""

    @property
    def name(self) -> str:
        """The name as the user wrote it."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The files to read, in order; none for a hub dataset."""
        ...

    def identity(self) -> str:
        """Return a string that is equal for equal data read in the same way."""
        ...

    def rows(self, tell: Tell = ...) -> Rows:
        """Yield all rows in order. `tell` is called regularly with the fraction read, in [0, 1]."""
        ...


@dataclass(frozen=True, slots=True)
class FileSource:
    """One file, or several that are read in sequence."""

    name: str
    files: tuple[Path, ...]

    def identity(self) -> str:
        """Return a hash of the kind and content of the files, in order, without their names."""
        whole = hashlib.sha256()  # faster than BLAKE2 with the CPU's SHA instructions
        for path in self.files:
            with reading(path), open_regular(path) as file:
                digest = hashlib.file_digest(cast(Any, file), "sha256")
            whole.update(f"{kind_of(path)} {digest.hexdigest()}\n".encode())
        return f"sha256:{whole.hexdigest()}"

    def rows(self, tell: Tell = lambda _: None) -> Rows:
        sizes: list[int] = []
        for path in self.files:
            with reading(path):
                sizes.append(path.stat().st_size)
        total = max(1, sum(sizes))
        for i, (path, size) in enumerate(zip(self.files, sizes, strict=True)):
            before = sum(sizes[:i])
            yield from read_file(path, lambda share, before=before, size=size: tell((before + share * size) / total))


def open_source(path: str, *, role: Role = "train", subset: str | None = None, split: str | None = None) -> SourceFiles:
    """Find the data that a user names. `subset` and `split` select within a hub dataset.

    In a directory, the files of the role are taken, or of the role that `split` names. Raises DataError if there is
    nothing to read; the files are opened when their rows are read.
    """
    location, found = _locate(path)
    if found == "nothing" and _may_be_in_the_hub(path):
        return open_hub(path, role, subset, split)
    if found == "nothing":
        raise DataError(f"{location}: no such file or directory")
    if subset is not None:
        raise DataError(f"{location}: subset: got '{subset}', allowed only for a dataset of the hub")
    if found == "directory" and (saved := splits_of(location)) is not None:
        return FileSource(path, files_of(saved[_saved_split(location, saved, role, split)]))
    if found == "directory":
        return FileSource(path, _files_for(location, role if split is None else _role_named(location, split)))
    if split is not None:
        raise DataError(f"{location}: split: got '{split}', allowed only for a dataset of the hub or a directory")
    if not kind_of(location):
        got = f"a '{location.suffix}' file" if location.suffix else "a file without a suffix"
        raise DataError(f"{location}: got {got}, allowed: {KINDS}")
    return FileSource(path, (location,))


def has_role(path: str, role: Role, subset: str | None = None) -> bool:
    """Return whether `open_source` finds data for this role. A single file has only the role "train".

    A hub dataset is downloaded to find out.
    """
    location, found = _locate(path)
    if found == "nothing" and _may_be_in_the_hub(path):
        return hub_has_role(path, role, subset)
    if found == "directory" and (saved := splits_of(location)) is not None:
        return role == "train" if "" in saved else any(name in saved for name in ROLE_NAMES[role])
    return bool(_candidates(location, role)) if found == "directory" else found == "file" and role == "train"


def _may_be_in_the_hub(path: str) -> bool:
    return is_hub_name(path) and not kind_of(Path(path))


def _locate(path: str) -> tuple[Path, Literal["file", "directory", "nothing"]]:
    try:
        location = Path(os.path.expanduser(path))  # noqa: PTH111  unlike Path's, no error for ~name of no user
        if location.is_dir():
            return location, "directory"
        if location.exists() and not location.is_file():
            raise DataError(f"{location}: is not a regular file; write the data to a file first")
        return location, "file" if location.exists() else "nothing"
    except (OSError, ValueError, RuntimeError) as error:  # no permission, an invalid name, no home directory
        raise DataError(f"{path}: cannot be read: {error}") from error


def _saved_split(location: Path, saved: Mapping[str, Path], role: Role, split: str | None) -> str:
    """Return the split to read of what save_to_disk wrote: the named one, or the one for the role."""
    if "" in saved and split is None and role == "train":
        return ""
    wanted = ROLE_NAMES[role] if split is None else (split,)
    name = next((name for name in wanted if name and name in saved), None)
    if name is None:
        names = "one Dataset without splits" if "" in saved else ", ".join(map(printable, saved))
        raise DataError(f"{location}: has no split {' or '.join(wanted)}; it has: {names}. Name one with split")
    return name


def _role_named(location: Path, split: str) -> Role:
    for role, names in ROLE_NAMES.items():
        if split in names:
            return role
    allowed = ", ".join(name for names in ROLE_NAMES.values() for name in names)
    raise DataError(f"{location}: split: got '{split}', allowed for a directory: {allowed}")


@dataclass(frozen=True, slots=True)
class _Candidate:
    path: Path
    group: tuple[str, str, str]  # (name of the role, number of parts, suffixes): equal for the parts of one set
    part: int | None


def _candidates(directory: Path, role: Role) -> list[_Candidate]:
    found: list[_Candidate] = []
    with reading(directory):
        paths = sorted(directory.iterdir())
    for path in paths:
        kind = kind_of(path)
        if not kind:
            continue
        suffix = path.name[path.name.lower().rindex(kind) :].lower()
        stem = path.name[: -len(suffix)].lower()
        for name in ROLE_NAMES[role]:
            if stem.startswith(name) and (match := _PART.fullmatch(stem, len(name))):
                part, parts = match["part"], match["parts"]
                group = (name, parts or ("parts" if part else "whole"), suffix)
                found.append(_Candidate(path, group, int(part) if part else None))
    return found


def _files_for(directory: Path, role: Role) -> tuple[Path, ...]:
    """Return the one file of a role, or all its numbered parts in order."""
    found = _candidates(directory, role)
    if not found:
        names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
        shown = ", ".join(names[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
        wanted = " or ".join(f"{name}.*" for name in ROLE_NAMES[role])
        raise DataError(f"{directory}: needs {wanted} (.*: {KINDS}); it holds: {shown or 'nothing'}")
    if len({candidate.group for candidate in found}) > 1:
        names = ", ".join(candidate.path.name for candidate in found)
        raise DataError(f"{directory}: several files fit the role {role}: {names}. Name one file")
    parts = found[0].group[1]
    if parts.isdigit() and int(parts) != len(found):
        raise DataError(f"{directory}: has only {len(found)} of the {int(parts)} parts of {found[0].path.name}")
    return tuple(candidate.path for candidate in sorted(found, key=lambda candidate: candidate.part or 0))

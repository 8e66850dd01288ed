"""Open the data that a user names: a file, a directory with files for each role, or a hub dataset.

Each row keeps its file and line, so that later error messages can name them.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import unquote

from dualtune.base.errors import DataError, DualtuneError, EnvironmentFault, FormatError
from dualtune.base.files import did_you_mean_path
from dualtune.base.hub import check_announced, guard_hub
from dualtune.data.sources.arrow_pieces import pieces
from dualtune.data.sources.data_file import HOLDS_NUL, DataFile, Rows, open_regular, opened, reading
from dualtune.data.sources.json_file import json_object, read_json, read_jsonl
from dualtune.data.sources.rows import BadRow, RawRow, RowError, printable
from dualtune.data.sources.tables import INSTALL_DATASETS, arrow_rows, read_csv, read_parquet

Role = Literal["train", "valid", "test"]
ROLE_NAMES: dict[Role, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
_PART = re.compile(r"(?:[-_.](?:part[-_.]?)?(?P<part>\d+)(?:[-_.]of[-_.](?P<parts>\d+))?)?")  # after the role's name
SHOWN_NAMES = 20


@dataclass(frozen=True, slots=True)
class FileSource:
    """One file, or several that are read in sequence."""

    name: str  # as the user wrote it
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
        """Yield all rows in order. `tell` is called regularly with the fraction read, in [0, 1]."""
        sizes: list[int] = []
        for path in self.files:
            with reading(path):
                sizes.append(path.stat().st_size)
        total = max(1, sum(sizes))
        for i, (path, size) in enumerate(zip(self.files, sizes, strict=True)):
            before = sum(sizes[:i])
            yield from read_file(path, lambda share, before=before, size=size: tell((before + share * size) / total))


def open_source(
    path: str, *, role: Role = "train", subset: str | None = None, split: str | None = None
) -> FileSource | HubSource:
    """Find the data that a user names. `subset` and `split` select within a hub dataset.

    In a directory, the files of the role are taken, or of the role that `split` names. Raises DataError if there is
    nothing to read; the files are opened when their rows are read.
    """
    # What is on this machine comes before a dataset of the hub with the same name.
    location, kind = _locate(path)
    if kind == "nothing" and _may_be_in_the_hub(path):
        if split is not None:
            return HubSource(path, _load(path, subset, split))
        splits = _load(path, subset, None)
        name = _split_for(role, list(splits))
        if name is None:
            names = ", ".join(splits)
            raise DataError(f"{path}: has no split for the role {role}; it has: {names}. Name one with split")
        return HubSource(path, splits[name])
    if kind == "nothing":
        raise DataError(f"{location}: no such file or directory{did_you_mean_path(location)}")
    if subset is not None:
        raise DataError(f"{location}: subset: got '{subset}', allowed only for a dataset of the hub")
    if kind == "directory" and (saved := splits_of(location)) is not None:
        return FileSource(path, files_of(saved[_saved_split(location, saved, role, split)]))
    if kind == "directory":
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
    location, kind = _locate(path)
    if kind == "nothing" and _may_be_in_the_hub(path):
        return _split_for(role, list(_load(path, subset, None))) is not None
    if kind == "directory" and (saved := splits_of(location)) is not None:
        return role == "train" if "" in saved else any(name in saved for name in ROLE_NAMES[role])
    return bool(_candidates(location, role)) if kind == "directory" else kind == "file" and role == "train"


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
    choices = ROLE_NAMES[role] if split is None else (split,)
    name = next((name for name in choices if name and name in saved), None)
    if name is None:
        names = "one Dataset without splits" if "" in saved else ", ".join(map(printable, saved))
        raise DataError(f"{location}: has no split {' or '.join(choices)}; it has: {names}. Name one with split")
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
    candidates: list[_Candidate] = []
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
                candidates.append(_Candidate(path, group, int(part) if part else None))
    return candidates


def _files_for(directory: Path, role: Role) -> tuple[Path, ...]:
    """Return the one file of a role, or all its numbered parts in order."""
    candidates = _candidates(directory, role)
    if not candidates:
        names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
        shown = ", ".join(names[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
        patterns = " or ".join(f"{name}.*" for name in ROLE_NAMES[role])
        raise DataError(f"{directory}: needs {patterns} (.*: {KINDS}); it holds: {shown or 'nothing'}")
    if len({candidate.group for candidate in candidates}) > 1:
        names = ", ".join(candidate.path.name for candidate in candidates)
        raise DataError(f"{directory}: several files fit the role {role}: {names}. Name one file")
    parts = candidates[0].group[1]
    if parts.isdigit() and int(parts) != len(candidates):
        raise DataError(
            f"{directory}: has only {len(candidates)} of the {int(parts)} parts of {candidates[0].path.name}"
        )
    return tuple(candidate.path for candidate in sorted(candidates, key=lambda candidate: candidate.part or 0))


# ----------------------------------------------------------------------------------------------------------------------
# The kinds of files by suffix, and a reader for each.
#
# A reader takes an open file and yields its rows, bad rows included.

TEXT_BLOCK = 1 << 14  # bytes of a plain-text document, several thousand tokens
TELL_ROWS = 1000

Tell = Callable[[float], None]  # called with the fraction read so far, in [0, 1]


def read_file(path: Path, tell: Tell) -> Rows:
    """Yield the rows of a file of a known kind. Raises DataError if it has no rows or cannot be read.

    A row is known by its line. One that begins on the line of the row before it, as in an array on one line, has the
    next number.
    """
    number = line = 0
    with opened(path) as file:
        for number, row in enumerate(READERS[kind_of(path)](file), start=1):
            line = max(row.line, line + 1)
            yield row if row.line == line else replace(row, line=line)
            if number % TELL_ROWS == 0:
                tell(file.share())
    if not number:
        raise DataError(f"{path}: has no rows")
    tell(1.0)


def kind_of(path: Path) -> str:
    """Return the suffix that selects the reader, without .gz; "" if it is unknown."""
    name = path.name.lower()
    kind = Path(name.removesuffix(".gz")).suffix
    return kind if kind in READERS and not (kind in TABLES and name.endswith(".gz")) else ""


def read_text(file: DataFile) -> Rows:
    """Split plain text into documents of at most TEXT_BLOCK bytes, at the end of a paragraph, or else of a line.

    A longer line is cut between two characters.
    """
    line, uncut = 1, b""
    while block := uncut + file.stream.read(TEXT_BLOCK - len(uncut)):
        at_end = len(block) < TEXT_BLOCK
        cut = len(block) if at_end else _end_of_paragraph(block)
        piece = block[:cut] if cut else block
        try:
            text, used = codecs.utf_8_decode(piece, "strict", cut > 0)  # no line end: up to the last whole character
            bad = HOLDS_NUL if "\0" in text else ""
        except UnicodeDecodeError as error:
            bad_line = line + piece.count(b"\n", 0, error.start)
            column = error.start - piece.rfind(b"\n", 0, error.start)
            text, used, bad = "", len(piece), f"not UTF-8 at byte {column} of line {bad_line}"
        if bad:
            yield BadRow(file.name, line, bad)
        elif text.strip():
            yield RawRow(file.name, line, {"text": text.replace("\r\n", "\n")})
        line += piece.count(b"\n", 0, used)
        uncut = block[used:]


def _end_of_paragraph(block: bytes) -> int:
    """Return the end of the last blank line in the second half, else of the last line; 0 if there is no whole line."""
    for blank in (b"\n\n", b"\n\r\n"):
        if (at := block.rfind(blank, len(block) // 2)) >= 0:
            return at + len(blank)
    return block.rfind(b"\n") + 1


READERS: dict[str, Callable[[DataFile], Rows]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),  # quotes included
    ".parquet": read_parquet,
    ".arrow": read_parquet,
    ".txt": read_text,
    ".text": read_text,
    ".md": read_text,
}
TABLES = (".parquet", ".arrow")  # compressed inside, if at all
KINDS = f"{', '.join(READERS)}; all except {' and '.join(TABLES)} also with .gz appended"

# ----------------------------------------------------------------------------------------------------------------------
# Directories that `save_to_disk` of the datasets library wrote: a Dataset, or a DatasetDict with one for each split.
#
# Their rows are in Arrow files, which are read like any other file. Nothing else of the directory is used, so no code
# of the library runs.

DICT_FILE, STATE_FILE = "dataset_dict.json", "state.json"
MAX_STATE = 3 << 20  # bytes: it names each file, and a large dataset has thousands


def splits_of(directory: Path) -> Mapping[str, Path] | None:
    """Return the directory of each split; of a Dataset, "" for its own one; None for any other directory.

    Raises DataError if the file that lists them is not what `save_to_disk` writes.
    """
    if (directory / DICT_FILE).is_file():
        names = _listed(directory / DICT_FILE, "splits")
        return {name: directory / _plain(name, directory / DICT_FILE) for name in names}
    return {"": directory} if (directory / STATE_FILE).is_file() else None


def files_of(directory: Path) -> tuple[Path, ...]:
    """Return the Arrow files of a Dataset in order. Raises DataError if there is none, or one is missing."""
    state = directory / STATE_FILE
    entries = _listed(state, "_data_files")
    names = [cast(dict[str, Any], entry).get("filename") if isinstance(entry, dict) else None for entry in entries]
    files = tuple(directory / _plain(name, state) for name in names)
    if not files:
        raise DataError(f"{directory}: has no rows; {STATE_FILE} lists no Arrow file")
    missing = [path.name for path in files if path.suffix != ".arrow" or not path.is_file()]
    if missing:
        raise DataError(
            f"{directory}: lacks {printable(missing[0])}, which {STATE_FILE} lists; copy the whole directory"
        )
    return files


def _listed(path: Path, key: str) -> list[Any]:
    with reading(path), open_regular(path) as file:
        text = file.read(MAX_STATE + 1)
    try:
        if len(text) > MAX_STATE:
            raise RowError(f"it has more than {MAX_STATE >> 20} MiB")
        items = json_object(text).get(key)
    except RowError as error:
        raise DataError(f"{path}: is not what save_to_disk writes: {error}") from error
    if not isinstance(items, list):
        raise DataError(f"{path}: is not what save_to_disk writes: it has no list '{key}'")
    return cast(list[Any], items)


def _plain(name: Any, path: Path) -> str:
    """Return the name of a file or directory in this one. Raises DataError for a path to anywhere else."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise DataError(f"{path}: got the name {printable(repr(name))[:80]}, allowed: a name in this directory")
    return name


# ----------------------------------------------------------------------------------------------------------------------
# Datasets of the Hugging Face hub, by the `datasets` library, which is imported late, here only.
#
# Data only: since version 4 the library runs no code from a dataset, and older versions are refused. Of its readers
# only those of rows are used. A dataset's card may name files of other places, also of this machine: they are not read.
# The answers of the hub are checked as those about models are, and its files compared with the hashes that it
# announced.

SPLITS = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}  # the first one that exists
_READERS = ("arrow", "csv", "json", "parquet", "text")  # of the library: plain rows, no pickles or pictures
_FROM_CACHE = "cache"  # what it reads offline: the tables that it made of the files before
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubSource:
    """One split of a hub dataset."""

    name: str
    dataset: Any  # datasets.Dataset, memory-mapped
    files: tuple[Path, ...] = ()

    def identity(self) -> str:
        """Return the library's fingerprint of the loaded data.

        It is a hash of the names of the dataset, subset and split, the version and the hub commit: it identifies the
        content, but is not computed from it.
        """
        return f"hub:{self.dataset._fingerprint}"

    def rows(self, tell: Tell = lambda _: None) -> Rows:
        total = len(self.dataset)
        if not total:
            raise DataError(f"{self.name}: has no rows")
        # In the Arrow format images and audio stay bytes, so no library is needed to decode them.
        tables = self.dataset.with_format("arrow").iter(TELL_ROWS)
        batches = (batch for table in tables for batch in table.to_batches())
        for row in arrow_rows(self.name, (piece for batch in batches for piece in pieces(batch))):
            yield row
            if row.line % TELL_ROWS == 0 or row.line == total:
                tell(row.line / total)


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form owner/name."""
    return _NAME.fullmatch(name) is not None


def _split_for(role: str, splits: Sequence[str]) -> str | None:
    return next((name for name in SPLITS[role] if name in splits), None)


def _load(name: str, subset: str | None, split: str | None) -> Any:
    missing = f"{name}: no such file or directory"
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentFault(f"{missing}; a dataset of the hub needs `datasets`. {INSTALL_DATASETS}") from error
    library = cast(Any, datasets)
    if int(library.__version__.partition(".")[0]) < 4:
        raise EnvironmentFault(f"{name}: got datasets {library.__version__}, 4 or newer is needed. {INSTALL_DATASETS}")
    guard_hub()
    try:
        builder = library.load_dataset_builder(name, subset)
        _check_files(name, builder)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)
    except Exception as error:  # the library, huggingface_hub and its HTTP client share no class of errors
        if isinstance(unsafe := _origin(error), DualtuneError):
            raise unsafe from None
        cause = f": {error.__cause__}" if isinstance(error, library.exceptions.DatasetGenerationError) else ""
        reason = " ".join(f"{error}{cause}".split())[:500]
        raise DataError(f"{missing}, and it cannot be loaded as a dataset of the hub: {reason}") from error


def _check_files(name: str, builder: Any) -> None:
    """Check which files a dataset is made of, download them, and compare them with their hashes, before they are read.

    Raises FormatError for a file that is none of the dataset's own, of another kind, or not what the hub announced.
    """
    kind = type(builder).__module__.rpartition(".")[2]
    if kind == _FROM_CACHE:
        return
    if kind not in _READERS:
        raise FormatError(
            f"{name}: its files are read as {kind}, allowed: {', '.join(_READERS)}. Download what you need, write "
            "its rows to a JSONL or Parquet file, and name that"
        )
    files = {str(file): _place(name, str(file)) for files in builder.config.data_files.values() for file in files}
    if (Path(builder.cache_dir) / "dataset_info.json").is_file():
        return  # the library has made its tables of them
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]

    for revision, path in files.values():
        check_announced([Path(hf_hub_download(name, path, repo_type="dataset", revision=revision))])


def _place(name: str, file: str) -> tuple[str, str]:
    """Return the revision and path of a file in the dataset's repository. FormatError if it is somewhere else."""
    match = re.fullmatch(rf"hf://datasets/{re.escape(name)}@([^/]+)/(.+)", file, re.IGNORECASE | re.DOTALL)
    parts = re.split(r"[/\\]", match[2]) if match else []
    if not match or not file.isprintable() or {"", ".", ".."} & {*parts}:
        raise FormatError(
            f"{name}: its card names the file {file[:200]!r}, which is not in its repository, and is not read. Look at "
            "the dataset's page; files that you trust can be named in data.train"
        )
    return unquote(match[1]), match[2]


def _origin(error: BaseException) -> BaseException:
    """Return the error that others were raised from."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error

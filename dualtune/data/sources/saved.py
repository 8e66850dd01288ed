"""Directories that `save_to_disk` of the datasets library wrote: a Dataset, or a DatasetDict with one for each split.

Their rows are in Arrow files, which are read like any other file. Nothing else of the directory is used, so no code of
the library runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from dualtune.data.sources.data_file import open_regular, reading
from dualtune.data.sources.json_rows import json_object
from dualtune.data.sources.rows import RowError, printable
from dualtune.errors import DataError

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

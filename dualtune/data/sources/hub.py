"""Read datasets of the Hugging Face hub with the `datasets` library, which is imported late, here only.

Data only: since version 4 the library runs no code from a dataset, and older versions are refused. Of its readers only
those of rows are used. A dataset's card may name files of other places, also of this machine: they are not read. The
answers of the hub are checked as those about models are, and its files compared with the hashes that it announced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from dualtune.data.sources.arrow_pieces import pieces
from dualtune.data.sources.data_file import Rows
from dualtune.data.sources.kinds import TELL_ROWS, Tell
from dualtune.data.sources.tables import INSTALL_DATASETS, arrow_rows
from dualtune.errors import DataError, DualtuneError, EnvironmentFault, FormatError
from dualtune.io.announced import check_announced
from dualtune.io.hub import guard_hub

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


def open_hub(name: str, role: str, subset: str | None, split: str | None) -> HubSource:
    """Load a dataset from the hub or the library's cache, and select the named split or the one for the role."""
    if split is not None:
        return HubSource(name, _load(name, subset, split))
    splits = _load(name, subset, None)
    chosen = _split_for(role, list(splits))
    if chosen is None:
        raise DataError(f"{name}: has no split for the role {role}; it has: {', '.join(splits)}. Name one with split")
    return HubSource(name, splits[chosen])


def hub_has_role(name: str, role: str, subset: str | None) -> bool:
    return _split_for(role, list(_load(name, subset, None))) is not None


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
    found = re.fullmatch(rf"hf://datasets/{re.escape(name)}@([^/]+)/(.+)", file, re.IGNORECASE | re.DOTALL)
    parts = re.split(r"[/\\]", found[2]) if found else []
    if not found or not file.isprintable() or {"", ".", ".."} & {*parts}:
        raise FormatError(
            f"{name}: its card names the file {file[:200]!r}, which is not in its repository, and is not read. Look at "
            "the dataset's page; files that you trust can be named in data.train"
        )
    return unquote(found[1]), found[2]


def _origin(error: BaseException) -> BaseException:
    """Return the error that others were raised from."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error

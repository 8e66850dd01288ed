"""Read datasets of the Hugging Face hub with the `datasets` library, which is imported late, here only.

Data only: since version 4 the library runs no code from a dataset, and older versions are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dualtune.data.sources.arrow_pieces import pieces
from dualtune.data.sources.data_file import Rows
from dualtune.data.sources.kinds import TELL_ROWS, Tell
from dualtune.data.sources.tables import INSTALL_DATASETS, arrow_rows
from dualtune.errors import DataError, EnvironmentFault

SPLITS = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}  # the first one that exists
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
    try:
        return library.load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError) as error:
        cause = f": {error.__cause__}" if isinstance(error, library.exceptions.DatasetGenerationError) else ""
        reason = " ".join(f"{error}{cause}".split())[:500]
        raise DataError(f"{missing}, and it cannot be loaded as a dataset of the hub: {reason}") from error

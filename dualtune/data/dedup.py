"""data.dedup: the rows of the training sources that repeat another one, left out before any row is held out."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dualtune import interrupt
from dualtune.data.chat.formats import Example
from dualtune.data.similarity.repeats import Repeat, Repeats
from dualtune.data.similarity.shingles import NEAR
from dualtune.data.sources.rows import BadRow
from dualtune.errors import DiskError

if TYPE_CHECKING:
    from dualtune.data.documents import OpenedSource


class Dedup:
    """Which rows of the training sources repeat a row of the evaluation sources, or an earlier one of their own.

    Evaluation sources stay whole. The rows are read and compared when this is first asked for: with the tokenized data
    in the cache, never. Whatever process asks, the answer is the same.
    """

    def __init__(
        self, mode: str, training: Sequence[OpenedSource], evaluation: Callable[[], Sequence[OpenedSource]]
    ) -> None:
        """`mode` is the value of data.dedup. `evaluation` opens the evaluation sources of the config."""
        self._mode, self._training, self._evaluation = mode, training, evaluation

    def key(self, source: int) -> dict[str, Any]:
        """Return what, besides its own content, decides which rows of this training source are left out."""
        return {} if self._mode == "off" else {"dedup": self._mode, "source": source, "beside": self._beside}

    def sift(
        self, source: int, examples: Iterable[Example | BadRow], counts: Counter[str] | None = None
    ) -> Iterator[Example | BadRow]:
        """Yield the rows of this training source without those to leave out, which are counted by kind."""
        if self._mode == "off":
            yield from examples
            return
        left_out, number = self._found[source], 0
        for example in examples:
            if isinstance(example, Example):
                repeat = left_out.get(number)
                number += 1
                if repeat is not None:
                    if counts is not None:
                        counts["exact" if repeat.is_exact else "near"] += 1
                    continue
            yield example

    @functools.cached_property
    def _sources(self) -> list[OpenedSource]:
        return [*self._evaluation(), *self._training]

    @functools.cached_property
    def _beside(self) -> list[Any]:
        return [[o.files.identity(), o.source.format, o.source.columns] for o in self._sources]

    @functools.cached_property
    def _found(self) -> list[dict[int, Repeat]]:
        """For each training source, its rows to leave out by their number among the good ones."""
        starts: list[int] = []
        try:
            with Repeats(NEAR if self._mode == "near" else None) as repeats:
                for opened in self._sources:
                    starts.append(len(repeats))
                    for example in opened.trainable():
                        interrupt.poll()
                        if isinstance(example, Example):
                            repeats.add(example)
                starts = starts[len(self._sources) - len(self._training) :]
                repeated = repeats.find(protected=starts[0])
        except OSError as error:
            raise DiskError(
                f"data.dedup: the texts to compare cannot be kept in a temporary file: {error.strerror or error}. "
                "Free disk space, or set TMPDIR to a directory on another disk"
            ) from error
        found: list[dict[int, Repeat]] = [{} for _ in starts]
        for row, repeat in repeated.items():
            source = bisect_right(starts, row) - 1  # a source may have no row
            found[source][row - starts[source]] = repeat
        return found

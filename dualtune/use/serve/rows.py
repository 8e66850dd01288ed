"""The rows of the requests that are answered at once: one batch where they can be, else one row after another.

A row that is alone is continued as one text. When a second one comes, the two are a batch, which others enter at their
next token. Of a text that begins as one that its adapter has read, here or there, only the rest is computed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dualtune.engine.adapter_bank import NO_ADAPTER, AdapterBank, bank_batches, why_not_bankable
from dualtune.engine.decoding import CannotBatch
from dualtune.train.generation.batched import Bounds, PromptedRow, RowBatch, check_decoding
from dualtune.train.generation.token_logprobs import TokenLogprobs, token_logprobs
from dualtune.use.chat import BASE, AdapterSet

Judge = Callable[[BaseException], bool]


@dataclass(frozen=True, slots=True, eq=False)
class BatchGroup:
    """Models by name whose rows can be one batch: those of a bank by number, then perhaps the base; or a single one."""

    names: Sequence[str]
    bank: AdapterBank | None = None

    def number_of(self, name: str) -> int:
        return NO_ADAPTER if self.bank is None or name == BASE else self.names.index(name)

    def name_of(self, number: int) -> str:
        if number != NO_ADAPTER:
            return self.names[number]
        return BASE if self.bank is not None else self.names[0]


def batch_groups(adapters: AdapterSet, most_numbers: int, tell: Callable[[str], object]) -> list[BatchGroup]:
    """Return the groups of the models of a set, and tell why an adapter is left out of a bank."""
    plain = [None, *((adapter.spec, adapter.tensors) for adapter in adapters.adapters.values())]
    for name, adapter in zip(adapters.names, plain, strict=True):
        if adapter is not None and (reason := why_not_bankable(*adapter)):
            tell(f"batches     {name}: only with requests for itself, because {reason}")
    groups = list[BatchGroup]()
    for indices, is_bank in bank_batches(plain, most_numbers):
        members = [adapter for adapter in (plain[i] for i in indices) if adapter is not None]
        groups.append(BatchGroup([adapters.names[i] for i in indices], AdapterBank(members) if is_bank else None))
    return groups


class ServedRows:
    """What continues rows, by a token at each step. Those of a batch are of one group."""

    def __init__(
        self, adapters: AdapterSet, groups: Sequence[BatchGroup], bounds: Bounds, is_shortage: Judge, is_over: Judge,
        tell: Callable[[str], object],
    ) -> None:  # fmt: skip
        """`is_shortage`: whether an error is one of memory; `is_over`: whether nothing can be computed after it."""
        self._adapters, self._engine, self._bounds, self._tell = adapters, adapters.engine, bounds, tell
        self._is_shortage, self._is_over = is_shortage, is_over
        self._groups = {name: group for group in groups for name in group.names}
        self._group = groups[0]
        self._can_batch = bounds.rows > 1
        self._batch: RowBatch | None = None  # kept while the group is the same, with its adapters on the device
        self._is_full = False  # the batch: rows wait for memory
        self._apart = deque[tuple[str, PromptedRow]]()  # by model, continued one after another; of the first one…
        self._tokens: Iterator[int] | None = None  # …the next tokens

    @property
    def is_empty(self) -> bool:
        return not self._apart and (self._batch is None or self._batch.is_empty)

    def has_room(self, name: str) -> bool:
        """Return whether a row of this model can be added now."""
        if self.is_empty:
            return True
        if not self._can_batch or len(self._apart) > 1 or self._groups[name] is not self._group:
            return False
        count = len(self._apart) + (len(self._batch.active) + len(self._batch.waiting) if self._batch else 0)
        return count < self._bounds.rows and not self._is_full

    def add(self, name: str, row: PromptedRow) -> None:
        """Add a row of a model for which there is room: to the batch of all rows, or behind them if they can be none.

        Raises only an error after which nothing can be computed.
        """
        if self.is_empty and self._groups[name] is not self._group:
            self._group, self._batch = self._groups[name], None
        self._apart.append((name, row))
        if len(self._apart) == 1 and (self._batch is None or self._batch.is_empty):
            return
        batch = self._common_batch()
        if batch is not None:
            batch.waiting.extend(self._numbered(*each) for each in self._apart)
            self._apart.clear()
            self._tokens = None

    def _numbered(self, name: str, row: PromptedRow) -> PromptedRow:
        caches = self._adapters.caches
        row.adapter, row.cache = self._group.number_of(name), caches.longest(name, row.text)
        row.keep = partial(caches.put, name)
        return row

    def _common_batch(self) -> RowBatch | None:
        """Return the batch that all rows are in, or can be in."""
        if self._batch is None:
            bank, prompts = self._group.bank, [row.prompt for _, row in self._apart]
            self._adapters.use(self._apart[0][0])
            try:
                check_decoding(self._engine, prompts, bank)
                self._batch = RowBatch(
                    self._engine, self._bounds, self._is_shortage, self._tell, bank, self._adapters.caches.forget
                )
            except Exception as error:
                if self._is_over(error):
                    raise
                self._forgo(str(error) if isinstance(error, CannotBatch) else type(error).__name__)
        return self._batch

    def _forgo(self, reason: str) -> None:
        """Do without a bank, or else without batches, from here on."""
        if self._group.bank is None:
            self._can_batch = False
            self._tell(f"batches     none, answers one by one: {reason}")
            return
        self._split(self._group, reason)
        self._group = self._groups[self._apart[0][0]]

    def _split(self, group: BatchGroup, reason: str) -> None:
        """Do without the bank of a group."""
        self._tell(f"batches     of one adapter each: {reason}")
        self._groups |= {each: BatchGroup([each]) for each in group.names}

    def step(self) -> list[tuple[PromptedRow, Exception | None]]:
        """Append a token to each row, or to one. Return the rows that have ended, with the error of one that failed."""
        if self._apart:
            return self._step_apart(*self._apart[0])
        if self._batch is None or self._batch.is_empty:
            return []
        if self._group.bank is None:  # a prompt of another adapter may have been scored meanwhile
            self._adapters.use(self._group.names[0])
        try:
            ended = self._batch.step()
            self._is_full = bool(self._batch.waiting)
            return [(row, None) for row in ended]
        except Exception as error:
            if self._is_over(error):
                raise
        # One of the rows is the cause, so each goes on by itself, without what the traceback held in memory.
        rows = [*self._batch.active, *self._batch.waiting]
        self._apart.extend((self._group.name_of(row.adapter), row) for row in rows)
        self._batch, self._is_full = None, False
        self._engine.discard()
        return []

    def _step_apart(self, name: str, row: PromptedRow) -> list[tuple[PromptedRow, Exception | None]]:
        self._group = self._groups[name]  # rows of unlike groups wait for each other when a bank has failed
        self._adapters.use(name)
        failure = None
        try:
            if self._tokens is None:
                cache = self._adapters.caches.cache_for(name, row.text)
                self._tokens = self._engine.generate(row.text, choose=row.choose, cache=cache)
            if not row.has_ended:
                row.append(next(self._tokens, None))
        except Exception as error:
            if self._is_over(error):
                raise
            failure = error
        if failure is None and not row.has_ended:
            return []
        self._apart.popleft()
        self._tokens = None
        return [(row, failure)]

    def scores(self, asked: Sequence[tuple[str, np.ndarray]], top: int) -> list[TokenLogprobs]:
        """Return what models, by name, say of texts (int32 [T]) as `token_logprobs` does: a group's in one batch."""
        scores = dict[int, TokenLogprobs]()
        by_group = defaultdict[BatchGroup, list[int]](list)
        for i, (name, _) in enumerate(asked):
            by_group[self._groups[name]].append(i)
        for group, indices in by_group.items():
            names, texts = zip(*(asked[i] for i in indices), strict=True)
            scores |= zip(indices, self._scores_of(group, names, texts, top), strict=True)
        return [scores[i] for i in range(len(asked))]

    def _scores_of(
        self, group: BatchGroup, names: Sequence[str], texts: Sequence[np.ndarray], top: int
    ) -> list[TokenLogprobs]:
        if len({*names}) == 1:
            self._adapters.use(names[0])
            return token_logprobs(self._engine, texts, top)
        adapters = [group.number_of(name) for name in names]
        try:
            check_decoding(self._engine, texts, group.bank)
            return token_logprobs(self._engine, texts, top, bank=group.bank, adapters=adapters)
        except CannotBatch as error:
            self._split(group, str(error))
        return self.scores([*zip(names, texts, strict=True)], top)

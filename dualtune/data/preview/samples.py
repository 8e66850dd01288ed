"""Sample rows of a run's data for a person to look at: the first ones, and notable ones of several kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dualtune.data.batching.order import Order
from dualtune.data.chat.formats import Example
from dualtune.data.documents import Data, Documents, OpenedSource
from dualtune.data.preview.survey import Survey, duplicates, show_document
from dualtune.data.preview.turns import Turn, turns_of
from dualtune.data.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Kind:
    """A reason to look at a row. The page has a filter for each kind."""

    name: str
    title: str
    total: int  # the number of rows of this kind in the data; some of them are samples


@dataclass(frozen=True, slots=True)
class Sample:
    """A document and its kinds."""

    where: str
    kinds: frozenset[str]
    turns: list[Turn]
    num_tokens: int
    num_targets: int
    lost: int  # tokens of the row lost by truncation
    original: str | None  # path:line of the document that it repeats


def kinds_of(found: Survey) -> list[Kind]:
    """Return the kinds in display order."""
    return [
        Kind("first", "Trained first", found.documents),
        Kind("bad", "Bad", found.bad_rows),
        Kind("cut", "Cut", found.cut),
        Kind("duplicate", "Duplicates", found.duplicates),
        Kind("longest", "Longest", found.documents),
        Kind("control", "Control tokens in text", found.control_text_rows),
        Kind("evaluation", "Evaluation", found.eval_documents),
    ]


def samples(
    data: Data, train: Documents, eval_: Documents, order: Order, tokenizer: Tokenizer, number: int
) -> list[Sample]:
    """Return up to `number` documents of each kind, each document once, in the order of the kinds."""
    repeated = dict(duplicates(train.digests()))
    chosen = {
        "first": islice((int(i) for step in range(order.num_steps) for i in order.step(step).documents), number),
        "cut": np.flatnonzero(train.is_cut())[:number].tolist(),
        "duplicate": islice(repeated, number),
        "longest": np.argsort(-train.lengths, kind="stable")[:number].tolist(),
        "control": np.flatnonzero(train.has_control_text())[:number].tolist(),
    }
    kinds: dict[int, set[str]] = {}
    for kind, ids in chosen.items():
        for i in ids:
            kinds.setdefault(i, set()).add(kind)
    shown = [(train, i, frozenset(names)) for i, names in kinds.items()]
    shown += [(eval_, i, frozenset({"evaluation"})) for i in range(min(number, len(eval_)))]
    examples = _examples(data.sources, {documents[i].where for documents, i, _ in shown})
    return [
        _sample(documents, i, names, examples, tokenizer, train[repeated[i]].where if "duplicate" in names else None)
        for documents, i, names in shown
    ]


def _sample(
    documents: Documents, i: int, kinds: frozenset[str], examples: dict[str, Example], tokenizer: Tokenizer,
    original: str | None,
) -> Sample:  # fmt: skip
    document = show_document(documents[i], tokenizer.decode_all, tokenizer.special_ids)
    lost = int(documents.row_lengths()[i]) - len(document.tokens) if documents.is_cut()[i] else 0
    turns = turns_of(document, examples.get(document.where), tokenizer)
    return Sample(document.where, kinds, turns, len(document.tokens), document.num_targets, lost, original)


def _examples(sources: Sequence[OpenedSource], wanted: Iterable[str]) -> dict[str, Example]:
    """Read the examples at these locations (path:line) again."""
    missing, found = set(wanted), dict[str, Example]()
    for opened in sources:
        for example in opened.examples():
            if not missing:
                return found
            if isinstance(example, Example) and example.where in missing:
                found[example.where] = example
                missing.remove(example.where)
    return found

"""Counts of a run's documents for its report: cheap enough for every run, and read without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from dualtune.base.redaction import redact
from dualtune.config import Config
from dualtune.data.documents import Documents
from dualtune.data.preview import first_indices, histogram, lengths_of, show_document

# Of a sample row, in characters: what is context, at each end of a part; a part that is target; all of it.
CONTEXT, TARGET, SAMPLE = 200, 8_000, 20_000
SAMPLE_TOKENS = 8192  # that are decoded for it


def counts(
    config: Config, train: Documents, eval_: Documents, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Return what environment.json records of the data; of no training document, nothing.

    `decode` gives the text of token ids: a few sample rows are recorded, without secrets, their targets whole.
    """
    if not len(train):
        return {}
    digests = train.digests()
    return {
        "rows": train.num_rows,
        "bad_rows": train.num_bad,
        "dropped": train.dropped,
        "cut": train.num_truncated,
        "split": train.num_split,
        "documents": len(train),
        "tokens": train.num_tokens,
        "trained_tokens": train.num_targets,
        "lengths": asdict(lengths_of(train.lengths)),
        "histogram": [asdict(bar) for bar in histogram(train.lengths)],
        "left_out": dict(train.left_out),
        "duplicates": len(digests) - len(np.unique(digests)),
        "eval_documents": len(eval_),
        "eval_in_training": int((first_indices(digests, eval_.digests()) >= 0).sum()),
        "sources": [
            {"path": source.path, **_of_source(train, number)} for number, source in enumerate(config.data.sources())
        ],
        "samples": [_sample_row(train, i, decode) for i in sorted({0, len(train) // 2, len(train) - 1})],
    }


def _sample_row(documents: Documents, i: int, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return a document to be shown: its place, its text, and [start, end) of each run of targets in the text.

    Long context loses its middle, so that the targets are there whole. A text with a secret has no targets: without the
    secret, the places in it are others.
    """
    document = documents[i]
    tokens, loss_mask = document.tokens[:SAMPLE_TOKENS], document.loss_mask[:SAMPLE_TOKENS]
    runs = [*show_document(replace(document, tokens=tokens, loss_mask=loss_mask, weights=None), decode).runs()]
    whole = "".join(part for _, part in runs)
    if (shown := redact(whole)) != whole:
        return {"where": document.where, "text": _without_middle(shown, TARGET // 2), "targets": []}
    text, targets = "", list[tuple[int, int]]()
    for weight, part in runs:
        if len(text) >= SAMPLE:
            break
        part = _without_middle(part, TARGET // 2 if weight else CONTEXT)
        if weight:
            targets.append((len(text), len(text) + len(part)))
        text += part
    is_whole = len(document.tokens) <= SAMPLE_TOKENS and len(text) < SAMPLE
    return {"where": document.where, "text": text if is_whole else f"{text}…", "targets": targets}


def _without_middle(text: str, end: int) -> str:
    """Return a text of which at most `end` characters at both ends are left."""
    return text if len(text) <= 2 * end else f"{text[:end]} … {text[-end:]}"


def _of_source(documents: Documents, number: int) -> dict[str, int]:
    mine = documents.sources == number
    tokens, targets = (int(numbers[mine].sum()) for numbers in (documents.lengths, documents.targets))
    return {"documents": int(mine.sum()), "tokens": tokens, "trained_tokens": targets}

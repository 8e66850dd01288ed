"""The conformance checks of `data.packing`: documents that share a row give the same numbers as in separate rows.

The checks pass at once if a backend does not honour packing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dualtune.backend import IGNORE_INDEX
from dualtune.testing import tolerances
from dualtune.testing.conformance_case import Case, assert_same_loss_and_gradient
from dualtune.testing.oracles import loss_of
from dualtune.testing.tiny_models import pack, row_of, with_other_padding

ROWS = [[2, 0, 3], [1]]  # the documents of `Case.batch()`: three in a row, and one followed by padding


def packs(case: Case) -> bool:
    return True in case.backend.capabilities().get("data.packing", frozenset())


def check_packed_equals_separate(case: Case) -> None:
    """The loss of every document is the same as in a separate row, and all log-probabilities equal the oracle's."""
    if not packs(case):
        return
    engine, batch = case.engine(), case.batch()
    packed = pack(batch, ROWS)
    expected = case.oracle(packed, engine.adapter_state(), case.spec.scale)
    gap = np.abs(engine.logprobs(packed) - expected)[packed.segments_BT > 0].max()
    assert gap <= tolerances.LOGPROBS, f"log-probabilities differ by {gap:.2e}"
    total = engine.evaluate(packed).loss_sum
    assert abs(total - loss_of(expected, packed)) <= tolerances.LOGPROBS * packed.num_targets
    for b, row in enumerate(ROWS):
        for number, document in enumerate(row, start=1):
            there = (packed.segments_BT == number) & (np.arange(len(ROWS)) == b)[:, None]
            shared = engine.evaluate(replace(packed, labels_BT=np.where(there, packed.labels_BT, IGNORE_INDEX)))
            alone = engine.evaluate(row_of(batch, document))
            assert shared.num_targets == alone.num_targets
            gap = abs(shared.loss_sum - alone.loss_sum) / alone.num_targets
            assert gap <= tolerances.LOGPROBS, (
                f"document {number} of row {b + 1}: differs by {gap:.2e} per token from a separate row"
            )


def check_packed_gradient_is_the_padded_gradient(case: Case) -> None:
    """The same documents packed and in separate rows give the same gradient, with dropout too."""
    if not packs(case):
        return
    for dropout in (0.0, 0.3):
        assert_same_loss_and_gradient(case, pack(case.batch(), ROWS), case.batch(), dropout=dropout)


def check_padding_behind_packed_rows_does_not_matter(case: Case) -> None:
    """Padding, other token ids in it, and a row without a document change neither loss nor gradient."""
    if not packs(case):
        return
    assert_same_loss_and_gradient(case, with_other_padding(pack(case.batch(), ROWS, pad=7)), pack(case.batch(), ROWS))

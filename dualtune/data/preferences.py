"""What a person should know of preferences before they are learned: how long the two answers of a pair are and which is
longer, where they begin to differ, and how the labels of unpaired answers are balanced."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dualtune.data.chat.call_notations import common_prefix
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import EQUAL_PAIR, EQUAL_TEXTS, Example, answers, num_shared
from dualtune.data.similarity import text_of_message
from dualtune.data.sources.rows import BadRow, Tie
from dualtune.data.tokens.tokenize import TokenizedRow

MOST_LONGER = 0.8  # a larger share of pairs in which the same answer is the longer one is a warning
# What desirable answers should count for each undesirable one, by number times weight (Ethayarajh et al., KTO, arXiv
# 2402.01306, equation 8).
BALANCE = (1.0, 4 / 3)
BEFORE = 60  # characters shown of what two answers have in common, before they differ
SHOWN = 400  # characters shown of each from there on


# ----------------------------------------------------------------------------------------------------------------------
# Numbers. `--json` prints them under these names.


@dataclass(frozen=True, slots=True)
class Spread:
    """The lengths of the chosen or of the rejected answers."""

    min: int
    median: float
    mean: float
    max: int
    cut: int | None  # how many are cut at max_length; None: not known without a tokenizer


@dataclass(frozen=True, slots=True)
class PairNumbers:
    pairs: int
    unit: Literal["tokens", "characters"]  # of the lengths: tokens with the prompt, or characters of the answers
    chosen: Spread
    rejected: Spread
    chosen_longer: int  # pairs
    rejected_longer: int


@dataclass(frozen=True, slots=True)
class LabelNumbers:
    desirable: int
    undesirable: int
    balance: float | None  # of both, by number times weight; None: all answers are of one kind
    weights: dict[str, tuple[float, float]]  # key of the config -> values that make the balance one of BALANCE


def pair_numbers(
    chosen: np.ndarray, rejected: np.ndarray, unit: Literal["tokens", "characters"], max_length: int | None = None
) -> PairNumbers | None:
    """Compare int64 [pairs] lengths, before truncation; None if there is no pair."""
    if not len(chosen):
        return None
    longer, shorter = int((chosen > rejected).sum()), int((chosen < rejected).sum())
    return PairNumbers(len(chosen), unit, _spread(chosen, max_length), _spread(rejected, max_length), longer, shorter)


def _spread(lengths: np.ndarray, max_length: int | None) -> Spread:
    cut = None if max_length is None else int((lengths > max_length).sum())
    return Spread(int(lengths.min()), float(np.median(lengths)), float(lengths.mean()), int(lengths.max()), cut)


def label_numbers(desirable: int, undesirable: int, weights: tuple[float, float] = (1.0, 1.0)) -> LabelNumbers | None:
    """Return how labels are balanced with the weights of desirable and undesirable answers; None if there are none."""
    if not desirable or not undesirable:
        return LabelNumbers(desirable, undesirable, None, {}) if desirable + undesirable else None
    ratio = desirable / undesirable
    balance = ratio * weights[0] / weights[1]
    least, most = BALANCE
    advised: dict[str, tuple[float, float]] = {}
    if not least <= balance <= most:  # the rarer kind is made to count more
        if ratio < 1:
            advised = {"preference.desirable_weight": (least / ratio, most / ratio)}
        else:
            advised = {"preference.undesirable_weight": (ratio / most, ratio / least)}
    return LabelNumbers(desirable, undesirable, balance, advised)


def describe_pairs(numbers: PairNumbers) -> list[tuple[str, str]]:
    """Return rows of (label, value)."""

    def spread_text(spread: Spread, longer: int) -> str:
        text = f"{spread.min} to {spread.max} {numbers.unit}, median {spread.median:g}, mean {spread.mean:.1f}"
        text += f"; longer in {longer / numbers.pairs:.0%} of the pairs"
        return f"{text}; {spread.cut} cut at max_length" if spread.cut else text

    return [
        ("chosen", spread_text(numbers.chosen, numbers.chosen_longer)),
        ("rejected", spread_text(numbers.rejected, numbers.rejected_longer)),
    ]


def describe_labels(numbers: LabelNumbers) -> str:
    return f"{numbers.desirable} desirable, {numbers.undesirable} undesirable answers"


def preference_warnings(pairs: PairNumbers | None, labels: LabelNumbers | None) -> list[str]:
    """Return warnings about what would be learned instead of what the answers say."""
    texts: list[str] = []
    longer = {"chosen": pairs.chosen_longer, "rejected": pairs.rejected_longer} if pairs else {}
    for name, number in longer.items():
        if pairs and number > MOST_LONGER * pairs.pairs:
            share = f"the {name} answer is the longer one in {number / pairs.pairs:.0%} of the pairs"
            texts.append(f"{share}, so length alone could be learned; add pairs where it is the shorter one")
    if labels and labels.balance is None:
        kind = "desirable" if labels.desirable else "undesirable"
        texts.append(f"all answers are {kind}; kto needs answers of both kinds")
    if labels and labels.weights:
        ((key, (low, high)),) = labels.weights.items()
        texts.append(
            f"desirable answers count {labels.balance:.2g} times as much as undesirable ones, and kto learns best "
            f"between {BALANCE[0]:g} and {BALANCE[1]:.2f}: set {key} to a value from {low:.2f} to {high:.2f}"
        )
    return texts


# ----------------------------------------------------------------------------------------------------------------------
# The preferences of a stream of rows.


class PreferenceCounts:
    """Counts over preferences while their rows go by. 24 bytes of each row stay in memory."""

    def __init__(self, max_length: int | None = None, weights: tuple[float, float] = (1.0, 1.0)) -> None:
        """With `max_length`, lengths are those of tokenized rows. `weights`: of desirable and undesirable answers."""
        self.num_equal = 0  # pairs of equal answers, which are bad rows
        self.num_ties = 0  # pairs of which neither answer is better, which are left out
        self.first: Example | None = None  # the first pair
        self._max_length, self._weights = max_length, weights
        self._prompts: set[int] = set()
        self._labels: Counter[int] = Counter()
        self._chosen, self._rejected = array("q"), array("q")

    def examples(self, examples: Iterable[Example | BadRow]) -> Iterator[Example | BadRow]:
        """Pass a stream on unchanged."""
        for example in examples:
            if isinstance(example, BadRow):
                self.num_equal += example.reason == EQUAL_PAIR
                self.num_ties += isinstance(example, Tie)
            elif example.rejected is not None or example.label:
                self._prompts.add(hash(_prompt_of(example)))
                self._labels[example.label] += 1
                if example.rejected is not None:
                    self.first = self.first or example
                    if self._max_length is None:
                        self._add(*(_length(answer) for answer in answers(example)))
            yield example

    def rows(self, rows: Iterable[TokenizedRow | BadRow]) -> Iterator[TokenizedRow | BadRow]:
        """Pass a tokenized stream on unchanged."""
        for row in rows:
            if isinstance(row, BadRow):
                self.num_equal += row.reason == EQUAL_TEXTS
            elif row.answers == 2 and not row.label:
                self._add(*row.lengths)
            yield row

    def _add(self, chosen: int, rejected: int) -> None:
        self._chosen.append(chosen)
        self._rejected.append(rejected)

    @property
    def num_prompts(self) -> int:
        """The number of different prompts."""
        return len(self._prompts)

    @property
    def num_rows(self) -> int:
        return self._labels.total()

    @property
    def pairs(self) -> PairNumbers | None:
        chosen, rejected = (np.array(lengths, np.int64) for lengths in (self._chosen, self._rejected))
        return pair_numbers(chosen, rejected, "characters" if self._max_length is None else "tokens", self._max_length)

    @property
    def labels(self) -> LabelNumbers | None:
        return label_numbers(self._labels[1], self._labels[-1], self._weights)


def _prompt_of(example: Example) -> tuple[object, ...]:
    """Return what is before the first message that is trained on."""
    first = next((i for i, m in enumerate(example.messages) if m.role == "assistant" and m.train), 0)
    if example.rejected is not None:
        first = num_shared(example.messages, example.rejected.messages)
    return (*((m.role, text_of_message(m)) for m in example.messages[:first]), example.prompt)


def _length(example: Example) -> int:
    """Return the characters of an answer."""
    trained = [message for message in example.messages if message.role == "assistant" and message.train]
    return sum(len(text_of_message(message)) for message in trained)


# ----------------------------------------------------------------------------------------------------------------------
# Where two answers differ.


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the answers of a pair begin to differ."""

    where: str
    message: int  # the number of the first message that differs, from 1
    character: int  # the number of its first character that differs, from 1
    chosen: str  # the messages from there on, as text
    rejected: str


def difference(pair: Example) -> Difference:
    chosen, rejected = (answer.messages for answer in answers(pair))
    shared = num_shared(chosen, rejected)
    texts = [text_of_message(messages[shared]) for messages in (chosen, rejected)]
    character = len(common_prefix(*texts)) + 1
    return Difference(pair.where, shared + 1, character, _text_of(chosen[shared:]), _text_of(rejected[shared:]))


def _text_of(messages: Iterable[Message]) -> str:
    return "\n".join(f"{message.role}: {text_of_message(message)}" for message in messages)


def from_difference(chosen: str, rejected: str) -> tuple[str, str]:
    """Return the texts with ▸ where they begin to differ, without most of what is far from there."""
    at = len(common_prefix(chosen, rejected))
    start = at - BEFORE if at > 2 * BEFORE else 0
    texts = [
        f"{'…' if start else ''}{text[start:at]}▸{text[at : at + SHOWN]}{'…' if len(text) > at + SHOWN else ''}"
        for text in (chosen, rejected)
    ]
    return texts[0], texts[1]

"""What is compared on held-out rows: the base with its adapter, the rows with the training data, formats of the base.

Differences have paired confidence intervals of 95 %. Shares of right answers: method 10 of Newcombe, Improved
confidence intervals for the difference between binomial proportions based on paired data, Statistics in Medicine 17
(1998), with Wilson's score intervals; it also holds where all rows agree. Losses and other numbers: the paired
bootstrap, by rows (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13: percentiles; for language
models Koehn, EMNLP 2004). Shape suffix: N rows.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DataError, EnvironmentFault
from dualtune.config import Config
from dualtune.data.chat.examples import Example
from dualtune.data.documents import Data, tokenize
from dualtune.data.similarity import NEAR, jaccard, shingles, sketch, text_of
from dualtune.engine.backend import Backend
from dualtune.train.evaluation import evaluate, layout_of
from dualtune.train.generation.inference import load_model

Z = 1.959963984540054  # of the normal distribution, for 95 %
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """One metric of both. The interval is of the difference, adapter minus base; None for one row, or if not finite."""

    metric: str
    base: float
    adapter: float
    difference: float
    low: float | None
    high: float | None
    rows: int
    method: str  # of the interval: "newcombe" or "bootstrap"

    @property
    def verdict(self) -> str:
        """Return what the interval says, in words."""
        if self.low is None or self.high is None:
            return "too few rows" if self.rows < 2 else "not finite"
        return "adapter higher" if self.low > 0 else "adapter lower" if self.high < 0 else "no difference shown"


def compare_losses(base_N2: np.ndarray, adapter_N2: np.ndarray) -> PairedComparison:
    """Compare losses, each given as the sum over a row's targets and the row's total weight.

    The loss of either is Σ sums / Σ weights, so a row counts by its target tokens.
    """
    weighs = base_N2[:, 1] > 0
    weights_N = base_N2[weighs, 1]
    return _bootstrapped("loss", base_N2[weighs, 0] / weights_N, adapter_N2[weighs, 0] / weights_N, weights_N)


def compare_scores(metric: str, base_N: np.ndarray, adapter_N: np.ndarray) -> PairedComparison:
    """Compare scores by row: bool for right and wrong, float64 for numbers."""
    if base_N.dtype != bool or adapter_N.dtype != bool:
        return _bootstrapped(metric, base_N.astype(np.float64), adapter_N.astype(np.float64), np.ones(len(base_N)))
    base, adapter = float(base_N.mean()), float(adapter_N.mean())
    low, high = newcombe(base_N, adapter_N) if len(base_N) > 1 else (None, None)
    return PairedComparison(metric, base, adapter, adapter - base, low, high, len(base_N), "newcombe")


def newcombe(base_N: np.ndarray, adapter_N: np.ndarray) -> tuple[float, float]:
    """Return Newcombe's interval of the difference of two shares of the same rows, adapter minus base."""
    n = len(base_N)
    both, none = int((base_N & adapter_N).sum()), int((~base_N & ~adapter_N).sum())
    only_adapter, only_base = int((adapter_N & ~base_N).sum()), int((base_N & ~adapter_N).sum())
    p1, p2 = (both + only_adapter) / n, (both + only_base) / n
    (low1, high1), (low2, high2) = _wilson(p1, n), _wilson(p2, n)
    margins = (both + only_adapter) * (only_base + none) * (both + only_base) * (only_adapter + none)
    product = both * none - only_adapter * only_base
    corrected = max(product - n / 2, 0.0) if product > 0 else product
    phi = corrected / math.sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    return p1 - p2 - reach(p1 - low1, high2 - p2), p1 - p2 + reach(high1 - p1, p2 - low2)


def _wilson(p: float, n: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share (Journal of the American Statistical Association 22, 1927)."""
    middle, half = p + Z * Z / (2 * n), Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return (middle - half) / (1 + Z * Z / n), (middle + half) / (1 + Z * Z / n)


def _bootstrapped(metric: str, base_N: np.ndarray, adapter_N: np.ndarray, weights_N: np.ndarray) -> PairedComparison:
    """Compare weighted means: rows are drawn with replacement, the same for both. The same rows give the same draws."""
    n = len(weights_N)
    base, adapter = (float((weights_N * x_N).sum() / weights_N.sum()) for x_N in (base_N, adapter_N))
    low = high = None
    if n > 1 and math.isfinite(adapter - base):
        gains_N, rng = weights_N * (adapter_N - base_N), np.random.default_rng([n, 7])
        drawn = (rng.integers(0, n, n) for _ in range(RESAMPLES))
        differences = [float(gains_N[rows].sum() / weights_N[rows].sum()) for rows in drawn]
        low, high = map(float, np.percentile(differences, (2.5, 97.5)))
    return PairedComparison(metric, base, adapter, adapter - base, low, high, n, "bootstrap")


# ----------------------------------------------------------------------------------------------------------------------
# Held-out rows that the training data also hold, exactly or nearly: such rows measure memory, not learning.
#
# Rows are near duplicates if the sets of their shingles have a Jaccard similarity of at least 0.8. Candidates are found
# by their sketches in 16 bands of 4 hashes, which find a pair of similarity 0.8 with a probability of 0.9998, and are
# then compared exactly. Only the held-out rows are kept in memory; the training data stream past. See decision 0046.
# Shape suffix: S shingles of a row.

HASHES_PER_BAND = 4


@dataclass(frozen=True, slots=True)
class Leaks:
    """How many of the held-out rows are in the training data. A row counts once: as exact if it is both."""

    rows: int
    exact: int
    near: int
    first: tuple[str, str] | None  # path:line of the first such held-out row, and of the training row


def find_leaks(
    held_out: Sequence[Example], training: Iterable[Example], show: Callable[[int], None] = lambda done: None
) -> Leaks:
    """Compare each training row with the held-out rows. `show` gets the number of training rows read."""
    index = _HeldOut(held_out)
    for done, example in enumerate(training, start=1):
        interrupt.poll()
        show(done)
        index.look_up(example)
    leaked = index.near | index.exact
    first = min(leaked, default=None)
    pair = None if first is None else (held_out[first].where, leaked[first])
    return Leaks(len(held_out), len(index.exact), len(leaked) - len(index.exact), pair)


class _HeldOut:
    """The held-out rows by text and by band, and which of them training rows have matched: index -> path:line."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.exact: dict[int, str] = {}
        self.near: dict[int, str] = {}
        self._by_text: dict[str, list[int]] = defaultdict(list)
        self._by_band: dict[bytes, list[int]] = defaultdict(list)
        self._sets = [shingles(text_of(example)) for example in examples]
        self._shingles = np.unique(np.concatenate(self._sets)) if self._sets else np.zeros(0, np.uint64)
        for i, example in enumerate(examples):
            self._by_text[text_of(example)].append(i)
            for band in _bands(self._sets[i]):
                self._by_band[band].append(i)

    def look_up(self, example: Example) -> None:
        text = text_of(example)
        for i in self._by_text.get(text, ()):
            self.exact.setdefault(i, example.where)
        hashes = shingles(text)
        # A row that is near to one of these shares at least that part of its own shingles with it.
        if not len(self._shingles) or _share_in(hashes, self._shingles) < NEAR:
            return
        for i in {i for band in _bands(hashes) for i in self._by_band.get(band, ())} - self.near.keys():
            if jaccard(hashes, self._sets[i]) >= NEAR:
                self.near[i] = example.where


def _share_in(some: np.ndarray, whole: np.ndarray) -> float:
    """Return which share of a set is in another; both sorted."""
    at = np.minimum(np.searchsorted(whole, some), len(whole) - 1)
    return float((whole[at] == some).mean())


def _bands(shingles_S: np.ndarray) -> Iterator[bytes]:
    """Yield a key for each band: rows that share one are candidates."""
    for band, hashes in enumerate(sketch(shingles_S).reshape(-1, HASHES_PER_BAND)):
        yield bytes([band]) + hashes.tobytes()


# ----------------------------------------------------------------------------------------------------------------------
# What a format of the base costs before any training: its loss on a few rows, beside the unquantized base's.

ROWS = 20
UNQUANTIZED = "none"


@dataclass(frozen=True, slots=True)
class FormatLoss:
    """The loss of the base in one format, or why there is none."""

    quantization: str  # as in model.quantization
    loss: float | None  # nats for a target, on rows that are the same for all formats
    problem: str = ""


@dataclass(frozen=True, slots=True)
class FormatComparison:
    """The losses of a base in each format of a backend. The unquantized one is the first."""

    model: str
    backend: str
    dtype: str  # in which it was computed
    rows: int
    targets: int
    formats: tuple[FormatLoss, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all as plain values; `above` is how much more than unquantized a loss is, in nats."""
        plain = self.formats[0].loss
        formats = [
            asdict(entry) | {"above": None if entry.loss is None or plain is None else entry.loss - plain}
            for entry in self.formats
        ]
        return asdict(self) | {"formats": formats}


def formats_of(backend: Backend) -> list[str]:
    """Return the values of model.quantization that a backend has, the unquantized one first."""
    names = {str(value) for value in backend.capabilities()["model.quantization"]} - {"auto", UNQUANTIZED}
    return [UNQUANTIZED, *sorted(names)]


def compare_formats(
    config: Config, backend: Backend, rows: int = ROWS, formats: Sequence[str] = (),
    tell: Callable[[str], None] = lambda quantization: None,
    on_result: Callable[[FormatLoss], None] = lambda measured: None,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> FormatComparison:  # fmt: skip
    """Measure the loss of the base, without an adapter, on the first usable rows in each format; one after another.

    `tell` hears each format before it is loaded, `show` the micro-batches that are done of how many, and `on_result`
    what was measured. A format that this device or model cannot have gives a problem and no loss. DataError if no
    row has a target.
    """
    trainable = chain.from_iterable(source.examples() for source in Data(config).train)
    examples = list(islice((row for row in trainable if isinstance(row, Example)), rows))
    losses: list[FormatLoss] = []
    dtype, targets = "", 0
    for quantization in formats or formats_of(backend):
        tell(quantization)
        try:
            loss, dtype, targets = _measured(config, backend, quantization, examples, show)
            losses.append(FormatLoss(quantization, loss))
        except (ConfigError, EnvironmentFault) as error:
            losses.append(FormatLoss(quantization, None, str(error).splitlines()[0]))
        on_result(losses[-1])
        gc.collect()  # an engine is part of reference cycles: there may be no room for two
    return FormatComparison(config.model.name, backend.name, dtype, len(examples), targets, tuple(losses))


def _measured(
    config: Config, backend: Backend, quantization: str, examples: Sequence[Example], show: Callable[[int, int], None]
) -> tuple[float, str, int]:
    """Return the loss, the dtype that it was computed in, and the number of targets."""
    model = load_model(
        backend, config.model.name, dtype=config.model.dtype, quantization=quantization, template=config.data.template,
        special_tokens_in_text=config.data.special_tokens_in_text, kernels=config.model.kernels,
        init=config.model.init, seed=config.run.seed, new_tokens=config.data.added_tokens,
    )  # fmt: skip
    documents = tokenize(examples, model.tokenizer, config.data.loss_on, config.data.max_length)
    if not len(documents) or not documents.num_targets:
        raise DataError("data.train: none of the first rows has a target token within data.max_length")
    result = evaluate(model.engine, documents, layout_of(config), show=show)
    return result.eval_loss, model.engine.description.dtype, result.eval_targets

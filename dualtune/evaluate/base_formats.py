"""What a format of the base costs before any training: its loss on a few rows, beside the unquantized base's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

from dualtune.backend import Backend
from dualtune.config import Config
from dualtune.data.chat.formats import Example
from dualtune.data.documents import Data, tokenize
from dualtune.errors import ConfigError, DataError, EnvironmentFault
from dualtune.evaluate.evaluation import evaluate, layout_of
from dualtune.evaluate.inference import load_model

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
            asdict(each) | {"above": None if each.loss is None or plain is None else each.loss - plain}
            for each in self.formats
        ]
        return asdict(self) | {"formats": formats}


def formats_of(backend: Backend) -> list[str]:
    """Return the values of model.quantization that a backend has, the unquantized one first."""
    found = {str(value) for value in backend.capabilities()["model.quantization"]} - {"auto", UNQUANTIZED}
    return [UNQUANTIZED, *sorted(found)]


def compare_formats(
    config: Config, backend: Backend, rows: int = ROWS, formats: Sequence[str] = (),
    tell: Callable[[str], None] = lambda quantization: None,
    told: Callable[[FormatLoss], None] = lambda measured: None,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> FormatComparison:  # fmt: skip
    """Measure the loss of the base, without an adapter, on the first usable rows in each format; one after another.

    `tell` hears each format before it is loaded, `show` the micro-batches that are done of how many, and `told` the
    result of the format. A format that this device or model cannot have gives a problem and no loss. DataError if no
    row has a target.
    """
    examples = list(islice(_examples(Data(config)), rows))
    losses: list[FormatLoss] = []
    dtype, targets = "", 0
    for quantization in formats or formats_of(backend):
        tell(quantization)
        try:
            loss, dtype, targets = _measured(config, backend, quantization, examples, show)
            losses.append(FormatLoss(quantization, loss))
        except (ConfigError, EnvironmentFault) as error:
            losses.append(FormatLoss(quantization, None, str(error).splitlines()[0]))
        told(losses[-1])
        gc.collect()  # an engine is part of reference cycles: there may be no room for two
    return FormatComparison(config.model.name, backend.name, dtype, len(examples), targets, tuple(losses))


def _examples(data: Data) -> Iterator[Example]:
    rows = chain.from_iterable(source.trainable() for source in data.train)
    return (row for row in rows if isinstance(row, Example))


def _measured(
    config: Config, backend: Backend, quantization: str, examples: Sequence[Example], show: Callable[[int, int], None]
) -> tuple[float, str, int]:
    """Return the loss, the dtype that it was computed in, and the number of targets."""
    model = load_model(
        backend, config.model.name, dtype=config.model.dtype, quantization=quantization, template=config.data.template,
        special_tokens_in_text=config.data.special_tokens_in_text, kernels=config.model.kernels,
        init=config.model.init, seed=config.run.seed,
    )  # fmt: skip
    documents = tokenize(examples, model.tokenizer, config.data.loss_on, config.data.max_length)
    if not len(documents) or not documents.num_targets:
        raise DataError("data.train: none of the first rows has a target token within data.max_length")
    found = evaluate(model.engine, documents, layout_of(config), show=show)
    return found.eval_loss, model.engine.description.dtype, found.eval_targets

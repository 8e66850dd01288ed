"""Whether a model can be shown several documents in a row, found out by showing it some.

Positions that run on, a state that is carried through the row, a mask of the model's own: a model has many ways to let
one document into the next, and none of them says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualtune.backend import Batch, Engine
from dualtune.data.batching.batches import make_batch
from dualtune.data.documents import in_memory
from dualtune.errors import ConfigError, NonFiniteError

LENGTHS = (5, 7, 4)  # tokens of the documents; short, because what comes in from the one before fades
ROWS = ((0, 1, 2), (2, 0))  # unlike each other: a mask of the first row must not serve for all
HIGHEST_TOKEN = 100  # ids below are text in most vocabularies; images and the like come at the end
# Nats per token by which rounding may move a document's loss when its row gets another shape.
NOISE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}


def check_packing(engine: Engine) -> None:
    """ConfigError unless documents that share a row have the losses that they have alone.

    NonFiniteError where a document that is alone has none: no packing is to blame for that.

    They may be apart by a tenth of what it does to make one document of them all, and in any case by the noise of the
    dtype, but never by ten times as much.
    """
    documents = _documents(engine)
    alone = np.concatenate([_losses(engine, documents, [[i]]) for i in range(len(documents))])
    if (broken := alone[~np.isfinite(alone)]).size:
        raise NonFiniteError(
            f"model.name: before any training the model computes losses that are not finite ({broken[0]}) in "
            f"{engine.description.dtype}. Its weights hold NaN or Inf, or are too large for this dtype: use "
            "model.dtype: float32, or download the model again"
        )
    glued = _losses(engine, documents, ROWS, glue=True)
    try:
        packed = _losses(engine, documents, ROWS)
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
        # Whatever a model's code stumbles over. Rows of this shape went well just now, so it is the packing.
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise _refusal(engine, f"takes no packed documents ({reason})") from error
    gaps, noise = np.abs(packed - alone), NOISE[engine.description.dtype]
    allowed = np.clip(np.abs(glued - alone).max() / 10, noise, 10 * noise)
    worst = int(np.argmax(gaps))
    if not gaps[worst] <= allowed:  # nor is NaN
        numbers = f"got {packed[worst]:.6g}, alone {alone[worst]:.6g}"
        raise _refusal(engine, f"computes another loss for packed documents ({numbers})")


def _refusal(engine: Engine, reason: str) -> ConfigError:
    model = engine.description.model_class or "of no known class"
    return ConfigError(f"data.packing: this model ({model}) {reason}; set data.packing: false")


def _documents(engine: Engine) -> list[np.ndarray]:
    two = np.ones((1, 2), np.int32)
    vocab = engine.logprobs(Batch(two, two, two, np.arange(2, dtype=np.int32)[None], two.astype(np.uint32))).shape[-1]
    rng = np.random.default_rng(0)
    return [rng.integers(0, min(vocab, HIGHEST_TOKEN), length, np.int32) for length in LENGTHS]


def _losses(
    engine: Engine, documents: Sequence[np.ndarray], rows: Sequence[Sequence[int]], *, glue: bool = False
) -> np.ndarray:
    """The mean loss of each document that is in these rows, by its index; glued, each row is shown as one document."""
    losses: list[float] = []
    for i in sorted({i for row in rows for i in row}):
        # To be predicted is this document alone, but for its first token: a glued one before it would do that too.
        shown = [(tokens, (np.arange(len(tokens)) > 0) & (j == i)) for j, tokens in enumerate(documents)]
        layout = [list(row) for row in rows]
        if glue:
            pairs = [[shown[j] for j in row] for row in rows]
            shown = [(np.concatenate([t for t, _ in row]), np.concatenate([m for _, m in row])) for row in pairs]
            layout = [[b] for b in range(len(rows))]
        loss = engine.evaluate(make_batch(in_memory(shown), layout, seed=0, step=0))
        losses.append(loss.loss_sum / loss.num_targets)
    return np.array(losses)

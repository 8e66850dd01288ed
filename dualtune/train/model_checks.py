"""Test whether a model keeps apart what it must, by running it: tokens from later ones, the documents of a packed row.

A model can leak one document into the next in many ways: positions that are not reset, a recurrent state that is
carried along the row, an attention mask that it builds itself. None of these is visible from outside.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualtune.base.errors import ConfigError, NonFiniteError
from dualtune.data.batches import make_batch
from dualtune.data.documents import Documents, in_memory, units_in_memory
from dualtune.engine.backend import NOISE, Backend, Batch, CannotShare, Engine

LENGTHS = (5, 7, 5)  # tokens of the documents; short, because the influence of the previous document fades
# The longer row has 17 tokens, before padding: no head size of a small model, with which a wrong mask might fit.
ROWS = ((0, 1, 2), (2, 0))  # different, so that the mask of the first row cannot be right for both
HIGHEST_TOKEN = 100  # smaller ids are text in most vocabularies; image tokens and the like come last


def check_causality(engine: Engine) -> None:
    """Raise ConfigError if a later token, or padding, changes what the model says of earlier tokens."""
    first, second, _ = _documents(engine)
    longer = [np.concatenate([first, tail]) for tail in (second, second[::-1])]
    rows = [
        _logprobs(engine, documents, len(first)) for documents in ([first], longer[:1], longer[1:], [first, longer[0]])
    ]
    if not all(np.isfinite(row).all() for row in rows):
        return  # the loss will not be, either
    gap = max(float(np.abs(row - rows[0]).max()) for row in rows[1:])
    if gap > NOISE[engine.description.dtype] * max(1.0, float(np.abs(rows[0]).max())):
        raise ConfigError(
            f"model.name: this model ({engine.description.model_class or 'of unknown class'}) is not causal: later "
            f"tokens, or padding, change the log-probabilities of earlier ones (by {gap:.2g}). dualtune trains "
            "models that predict each token from those before it; use such a model"
        )


def _logprobs(engine: Engine, documents: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Return what the model says of the first tokens of the first of these documents, each in a row, [length, V]."""
    shown = [(tokens, np.arange(len(tokens)) > 0) for tokens in documents]
    batch = make_batch(in_memory(shown), [[i] for i in range(len(shown))], seed=0, step=0)
    return engine.logprobs(batch)[0, :length]


def check_packing(engine: Engine, backend: Backend | None = None) -> None:
    """Raise ConfigError unless packed documents have the same losses as separate ones.

    Raise NonFiniteError if a separate document has a loss that is not finite: then packing is not the cause.

    The losses may differ by a tenth of the effect of joining all documents into one; at least by the rounding noise of
    the dtype, and at most by ten times that noise. With a backend, an error for lack of memory is raised as it is.
    """
    documents = _documents(engine)
    separate = np.concatenate([_losses(engine, documents, [[i]]) for i in range(len(documents))])
    if (broken := separate[~np.isfinite(separate)]).size:
        raise NonFiniteError(
            f"model.name: before training, the loss of the model is not finite ({broken[0]}) in "
            f"{engine.description.dtype}. Its weights hold NaN or Inf, or are too large for this dtype: use "
            "model.dtype: float32, or download the model again"
        )
    joined = _losses(engine, documents, ROWS, join=True)
    try:
        packed = _losses(engine, documents, ROWS)
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
        if backend is not None and backend.is_out_of_memory(error):
            raise
        # Any error in the model's code. Rows of this shape worked just before, so packing is the cause.
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise _refusal(engine, f"fails on packed documents ({reason})") from error
    gaps, noise = np.abs(packed - separate), NOISE[engine.description.dtype]
    allowed = np.clip(np.abs(joined - separate).max() / 10, noise, 10 * noise)
    worst = int(np.argmax(gaps))
    if not gaps[worst] <= allowed:  # also true for NaN
        numbers = f"packed {packed[worst]:.6g}, separate {separate[worst]:.6g}"
        raise _refusal(engine, f"computes another loss for packed documents ({numbers})")


def why_not_shared(engine: Engine, backend: Backend) -> str | None:
    """Return why the engine cannot compute the beginning once that two answers share; None if it can.

    Both answers then lose what they lose alone, by the measure of `check_packing`; the effect to see is that of an
    answer which does not see its prompt. An error for lack of memory is raised as it is.
    """
    prompt, first, second = _documents(engine)
    answers = [
        (np.concatenate([prompt, answer]), np.arange(len(prompt) + len(answer)) >= len(prompt))
        for answer in (first, second[::-1])
    ]
    documents = units_in_memory([answers])
    alone = _pair_losses(engine, documents, [[0], [1]])
    without = _pair_losses(
        engine, units_in_memory([[(t[len(prompt) :], m[len(prompt) :]) for t, m in answers]]), [[0], [1]]
    )
    documents.shares = True
    try:
        together = _pair_losses(engine, documents, [[0, 1]])
    except CannotShare as error:
        return str(error)
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
        if backend.is_out_of_memory(error):
            raise
        return f"the model fails ({type(error).__name__}: {error})".replace("\n", " ")
    gap, noise = float(np.abs(together - alone).max()), NOISE[engine.description.dtype]
    if not gap <= np.clip(np.abs(without - alone).max() / 10, noise, 10 * noise):  # also true for NaN
        return f"the model computes another loss (by {gap:.2g} a token)"
    return None


def _pair_losses(engine: Engine, documents: Documents, rows: Sequence[list[int]]) -> np.ndarray:
    """Return the mean loss of both answers of a pair in these rows, [2]."""
    batch = make_batch(documents, rows, seed=0, step=0)
    logprobs_BT = engine.target_logprobs(batch)
    starts = [(b, number) for b, row in enumerate(rows) for number in range(1, 1 + len(row))]
    return np.array([
        -logprobs_BT[b][(batch.segments_BT[b] == number) & batch.is_target_BT[b]].mean() for b, number in starts
    ])  # fmt: skip


def _refusal(engine: Engine, reason: str) -> ConfigError:
    model = engine.description.model_class or "of unknown class"
    return ConfigError(f"data.packing: this model ({model}) {reason}; set data.packing: false")


def _documents(engine: Engine) -> list[np.ndarray]:
    two = np.ones((1, 2), np.int32)
    vocab = engine.logprobs(Batch(two, two, two, np.arange(2, dtype=np.int32)[None], two.astype(np.uint32))).shape[-1]
    rng = np.random.default_rng(0)
    return [rng.integers(0, min(vocab, HIGHEST_TOKEN), length, np.int32) for length in LENGTHS]


def _losses(
    engine: Engine, documents: Sequence[np.ndarray], rows: Sequence[Sequence[int]], *, join: bool = False
) -> np.ndarray:
    """Return the mean loss of each document in these rows, by its index. With `join`, each row is one document."""
    losses: list[float] = []
    for i in sorted({i for row in rows for i in row}):
        # Only this document has targets, and not its first token, which a preceding document would predict.
        shown = [(tokens, (np.arange(len(tokens)) > 0) & (j == i)) for j, tokens in enumerate(documents)]
        layout = [list(row) for row in rows]
        if join:
            pairs = [[shown[j] for j in row] for row in rows]
            shown = [(np.concatenate([t for t, _ in row]), np.concatenate([m for _, m in row])) for row in pairs]
            layout = [[b] for b in range(len(rows))]
        loss = engine.evaluate(make_batch(in_memory(shown), layout, seed=0, step=0))
        losses.append(loss.loss_sum / loss.num_targets)
    return np.array(losses)

"""Preference training between the loop and an engine: what the model and the reference say of the answers.

The objective is a function of a whole step (`preference.py`). So a step has two passes: the first gets Σ w·log p of
every answer, in all processes; the second adds the gradient, with the weight −slope·w for each target of an answer. The
reference does not change, so its sums are computed once and kept in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base.errors import ConfigError, DiskError, FormatError
from dualtune.base.files import cache_dir, new_file
from dualtune.base.untrusted import open_file, parse_object
from dualtune.config import Config
from dualtune.config.combinations import PREFERENCE_KEYS
from dualtune.config.values import ON_POLICY, POLICY_OBJECTIVES
from dualtune.data.documents import Documents, Show
from dualtune.data.tokens.store import forget_unused
from dualtune.engine.backend import Backend, Batch, Engine, routing_weights
from dualtune.model.adapter import Tensors
from dualtune.model.methods import KEPT_INITS, dora
from dualtune.train.activation_cache import each_alone, engine_key
from dualtune.train.evaluation import measure_share, using
from dualtune.train.hooks import EvalRecord
from dualtune.train.objectives.preference import OBJECTIVES, Objective, Scores, installed_objective, objective_of
from dualtune.train.recovery import Recovery
from dualtune.train.team import Team

REFERENCE = "the log-probabilities of the reference"  # as `show` names them


def configured_objective(config: Config) -> Objective | None:
    """Return the objective of preference training that a config chooses; None for one that compares no answers."""
    name = config.train.objective
    if name in ("sft", "distill", ON_POLICY, *POLICY_OBJECTIVES):
        return None
    if name not in OBJECTIVES:
        return installed_objective(name)(config)
    keys = (key for key in PREFERENCE_KEYS[name] if key != "reference")
    return objective_of(name, **{key: getattr(config.preference, key) for key in keys})


def check_answers(objective: Objective | None, *parts: Documents) -> None:
    """Raise ConfigError if the objective, which may be of another package, does not fit the rows."""
    needed = 1 if objective is None else objective.answers
    for documents in parts:
        if len(documents) and documents.answers != needed:
            name = "sft" if objective is None else objective.name
            raise ConfigError(
                f"train.objective: {name} compares {needed} answers a row, but {', '.join(documents.names)} has "
                f"{documents.answers}. Choose other data, or another objective: docs/objectives.md"
            )


def answer_sums(logprobs_BT: np.ndarray, batch: Batch) -> dict[int, float]:
    """Return Σ w·log p over the targets of each document of a micro-batch, in float64."""
    logprobs_BT = logprobs_BT.astype(np.float64)
    if (weights_BT := batch.target_weights_BT) is not None:
        logprobs_BT *= weights_BT
    return {document: float(own.sum()) for document, own in at_targets(logprobs_BT, batch).items()}


def at_targets(values_BT: np.ndarray, batch: Batch) -> dict[int, np.ndarray]:
    """Return the values at the targets of each document of a micro-batch, [T], or [T, K] of K targets each."""
    return {document: values_BT[b, targets_T] for document, b, targets_T in _targets(batch)}


def from_all(team: Team, values: Mapping[int, np.ndarray], counts: Mapping[int, int]) -> dict[int, np.ndarray]:
    """Return the values of each document in all processes; each has some. `counts`: how many values each has."""
    mine = [values.get(document, np.zeros(count)) for document, count in counts.items()]
    ends = np.cumsum(list(counts.values()))[:-1]
    return dict(zip(counts, np.split(team.totals(np.concatenate(mine)), ends), strict=True))


def with_slopes(batch: Batch, slopes: Mapping[int, float | np.ndarray], total_weight: float = 1.0) -> Batch:
    """Return the micro-batch with the weight −slope·w for each target of a document, w its own weight.

    `slopes`: of each document one number, or one for each of its targets. Routers see w / total_weight, the sum of w
    over the step, because slopes are those of the step's loss as it is.
    """
    factors_BT = np.zeros(batch.labels_BT.shape)
    for document, b, targets_T in _targets(batch):
        factors_BT[b, targets_T] = -slopes[document]
    weights_BT = factors_BT if batch.weights_BT is None else factors_BT * batch.weights_BT
    routing_BT = (routing_weights(batch) / total_weight).astype(np.float32)
    return replace(batch, weights_BT=weights_BT.astype(np.float32), routing_weights_BT=routing_BT)


def _targets(batch: Batch) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield each document of a micro-batch, its row, and at which positions of that its targets are, bool [T].

    The label of a position belongs to its own document: that of the last token has none.
    """
    is_target_BT = batch.is_target_BT
    for b, row in enumerate(batch.documents):
        for segment, document in enumerate(row, start=1):
            yield document, b, is_target_BT[b] & (batch.segments_BT[b] == segment)


@dataclass(frozen=True)
class AnswerComparison:
    """The objective of a run, and the reference's Σ w·log p of each document, float64 [documents]."""

    objective: Objective
    train: np.ndarray | None  # None: the objective needs no reference
    eval: np.ndarray | None

    def scores(
        self, documents: Documents, ids: Sequence[int], sums: np.ndarray, reference: np.ndarray | None
    ) -> Scores:
        """Return the scores of the units whose documents are `ids`, side by side; `sums`: Σ w·log p of each."""
        shape = (-1, self.objective.answers)
        return Scores(
            sums.reshape(shape),
            documents.targets[ids].reshape(shape),
            None if reference is None else reference[ids].reshape(shape),
            documents.labels[ids].reshape(shape)[:, 0],
        )


def evaluate_answers(
    engine: Engine, documents: Documents, recovery: Recovery, step: int = 0,
    show: Callable[[int, int], None] = lambda done, total: None, team: Team | None = None, *,
    comparison: AnswerComparison,
) -> EvalRecord:  # fmt: skip
    """Return the objective's loss and metrics over all evaluation data at once; the options are those of `evaluate`."""
    team, sums = team or Team(), None
    while sums is None:
        sums = _shared_sums(engine, documents, recovery, step, show, team)
    ids = range(len(documents))
    totals = team.totals([sums.get(i, 0.0) for i in ids])
    scores = comparison.scores(documents, list(ids), totals, comparison.eval)
    loss = comparison.objective(scores)
    metrics = {f"eval_{name}": value for name, value in {**loss.metrics, **_of_lengths(scores)}.items()}
    return EvalRecord(step=step, eval_loss=loss.value, eval_targets=documents.num_targets, metrics=metrics)


def evaluate_against(
    engine: Engine, documents: Documents, recovery: Recovery, objective: Objective, reference: Tensors,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> EvalRecord:  # fmt: skip
    """Return the objective's loss and metrics of an adapter, with that of the reference loaded for a while."""
    sums: dict[int, float] | None = None
    if objective.needs_reference:
        with using(engine, reference):
            while sums is None:
                sums = _shared_sums(engine, documents, recovery, 0, show, Team())
    reference_N = None if sums is None else np.array([sums[i] for i in range(len(documents))])
    return evaluate_answers(
        engine, documents, recovery, show=show, comparison=AnswerComparison(objective, None, reference_N)
    )


MIN_PAIRS = 10  # to speak of a correlation


def _of_lengths(scores: Scores) -> dict[str, float]:
    """Return how the pairs' margins against the reference correlate with their differences in length (Pearson)."""
    if scores.reference_NA is None or scores.labels_N.any() or len(scores.labels_N) < MIN_PAIRS:
        return {}
    ratios_NA, lengths_NA = scores.logps_NA - scores.reference_NA, scores.num_targets_NA.astype(np.float64)
    margins_N, differences_N = (values[:, 0] - values[:, 1] for values in (ratios_NA, lengths_NA))
    if np.std(margins_N) < 1e-3 or not np.std(differences_N):  # nats: before training there is rounding alone
        return {}
    return {"length_correlation": float(np.corrcoef(margins_N, differences_N)[0, 1])}


def _shared_sums(
    engine: Engine, documents: Documents, recovery: Recovery, step: int, show: Callable[[int, int], None], team: Team
) -> dict[int, float] | None:
    """Return Σ w·log p of this process's documents. None if memory ran out, in any process: try again, smaller."""
    sums = dict[int, float]()
    is_done = measure_share(
        documents, recovery, lambda batch: sums.update(answer_sums(engine.target_logprobs(batch), batch)), step, show,
        team,
    )  # fmt: skip
    return sums if is_done else None


# ----------------------------------------------------------------------------------------------------------------------
# The reference: the base without an adapter, or with the one that the run starts from.


def comparison_of(
    engine: Engine, backend: Backend, config: Config, objective: Objective, parts: tuple[Documents, Documents],
    base: Mapping[str, Any], team: Team, show: Show = lambda what, share: None,
) -> AnswerComparison:  # fmt: skip
    """Return the objective with its reference for training and evaluation data. The engine is new: as a run starts it.

    `base` is what tells the base model from others. Raises DiskError if the cache cannot be written.
    """
    if not objective.needs_reference:
        return AnswerComparison(objective, None, None)
    adapter = config.adapter
    is_start = adapter.init_from is not None and config.preference.reference != "base"
    state = engine.adapter_state() if is_start else None
    # A start that is made of the weight changes nothing but the last bits, which what is cached must not depend on.
    is_neutral = adapter.init_from is None and adapter.init not in KEPT_INITS
    with contextlib.nullcontext() if is_start or is_neutral else using(engine, engine.neutral_state()):
        key = _key(engine, backend, base, state, config)
        train, eval_ = (_sums(engine, documents, key, team, show) for documents in parts)
    return AnswerComparison(objective, train, eval_)


_MAX_HEADER, _MAX_BYTES = 1 << 12, 1 << 34


def _sums(engine: Engine, documents: Documents, key: Mapping[str, Any], team: Team, show: Show) -> np.ndarray:
    """Return Σ w·log p of each document, from the cache or computed now."""
    if not len(documents):
        return np.zeros(0)
    if engine.description.sharding == "full":  # the processes compute together, whatever is in their caches
        return _computed(engine, documents, show)
    key = {**key, "documents": documents.fingerprint()} | ({"shares": True} if documents.shares else {})
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode())
    path = cache_dir() / "reference" / digest.hexdigest()[:32]
    with team.in_turn():
        sums = _read(path, len(documents))
        if sums is None:
            sums = _computed(engine, documents, show)
            _write(path, sums)
        return sums


def _computed(engine: Engine, documents: Documents, show: Show) -> np.ndarray:
    sums, done = np.zeros(len(documents)), 0
    show(REFERENCE, 0.0)
    for batch in each_alone(documents):
        for document, total in answer_sums(engine.target_logprobs(batch), batch).items():
            sums[document] = total
        done += sum(map(len, batch.documents))
        show(REFERENCE, done / len(documents))
    return sums


def _key(
    engine: Engine, backend: Backend, base: Mapping[str, Any], state: Tensors | None, config: Config
) -> dict[str, Any]:
    """Return all that the bits depend on, besides the documents."""
    digest, adapter = hashlib.sha256(), config.adapter
    for name, tensor in sorted((state or {}).items()):
        digest.update(name.encode() + tensor.tobytes())
    own = None
    if state is not None:
        patterns = [[*adapter.rank_pattern.items()], [*adapter.alpha_pattern.items()]]
        own = [digest.hexdigest(), adapter.rank, adapter.alpha, adapter.scaling, *patterns]
    # What computes the reference otherwise too: a rounding of the merge, and lengths of rows that divide by their own.
    others = {"merge_for": adapter.merge_for} if adapter.merge_for != "none" else {}
    others |= {"method": adapter.method} if adapter.method == dora.METHOD.name else {}
    return {**engine_key(engine, backend, base), "adapter": own, **others}


def _read(path: Path, number: int) -> np.ndarray | None:
    """Return the sums in a file of the cache; None if there is none, or it is damaged."""
    try:
        with open_file(path, max_bytes=_MAX_BYTES, is_own=True) as file:
            header = parse_object(file.readline(_MAX_HEADER), path)
            raw = file.read()
    except (OSError, FormatError):
        return None
    is_whole = len(raw) == 8 * number and header.get("crc32") == zlib.crc32(raw)
    return np.frombuffer(raw, "<f8").astype(np.float64) if is_whole else None


def _write(path: Path, sums: np.ndarray) -> None:
    raw = sums.astype("<f8").tobytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        forget_unused(path.parent)
        with new_file(path) as file:
            file.write(json.dumps({"documents": len(sums), "crc32": zlib.crc32(raw)}).encode() + b"\n" + raw)
    except OSError as error:
        raise DiskError(
            f"{path.parent}: the log-probabilities of the reference cannot be written: {error.strerror or error}. Free "
            "disk space, or set DUALTUNE_CACHE to a directory on another disk"
        ) from error

"""Distillation: a student learns, at every target, a teacher's log-probabilities of its most probable tokens.

The teacher's distributions are recorded once, on any machine (`dualtune distill record`), and training reads the file:
no second model is in memory. Or a teacher answers while the run trains (`teachers.py`), of the data's answers or of the
student's own samples (`on_policy.py`). At a target, the k tokens that the teacher finds most probable are labels of
their own with loss weights (`Batch.labels_BT`), so no engine knows what a divergence is.

Legend: N targets, k recorded tokens of each, K = 1 + k labels of each: its own, then the recorded ones. q is the
teacher's probability, p the student's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, SupportsFloat

import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DataError, FormatError
from dualtune.base.files import expanded
from dualtune.base.tensors import bytes_of
from dualtune.base.untrusted import open_file, read_header, read_metadata
from dualtune.config import Config
from dualtune.config.values import ON_POLICY
from dualtune.data.documents import Documents
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import IGNORE_INDEX, Batch, Engine, routing_weights
from dualtune.train.evaluation import measure_share
from dualtune.train.hooks import EvalRecord
from dualtune.train.recovery import Recovery
from dualtune.train.team import Team

# ----------------------------------------------------------------------------------------------------------------------
# The file of a teacher's distributions: safetensors, with the documents by their digests. So it does not matter in
# which order, or in which split, a run uses them, and a document that has changed is not in it.

FORMAT = "dualtune-distributions-1"
FORMS = {"documents": "U8", "ends": "I64", "logprobs": "F32", "tokens": "I32"}
_DTYPES = {"documents": "u1", "ends": "<i8", "logprobs": "<f4", "tokens": "<i4"}
_BITS = {"U8": 8, "I64": 64, "F32": 32, "I32": 32}


@dataclass(frozen=True)
class Distributions:
    """A teacher's most probable tokens at the targets of documents, in a file."""

    path: Path
    teacher: str  # its name, for people
    content: str  # the hash of all numbers
    ends: np.ndarray  # int64 [documents]: where the targets of each document end
    tokens_Nk: np.ndarray  # int32: the most probable ones
    logprobs_Nk: np.ndarray  # float32: ln q of each
    places: Mapping[bytes, int]  # of documents, by digest

    @property
    def k(self) -> int:
        return self.tokens_Nk.shape[1]

    def of(self, documents: Documents) -> np.ndarray:
        """Return int64 [documents]: the places of these documents. DataError if one is not in the file."""
        digests = documents.digests()
        places = np.array([self.places.get(digest.tobytes(), -1) for digest in digests], np.int64)
        if (missing := np.flatnonzero(places < 0)).size:
            raise DataError(
                f"distill.distributions: {self.path} has nothing on {len(missing)} of {len(places)} documents, the "
                f"first of them {documents[int(missing[0])].where}. It was recorded for other rows, another template, "
                "data.max_length or data.loss_on: record it again with `dualtune distill record`"
            )
        return places

    def at(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and log-probabilities [n, k] of the targets of a document, in their order."""
        rows = slice(int(self.ends[place - 1]) if place else 0, int(self.ends[place]))
        return self.tokens_Nk[rows], self.logprobs_Nk[rows]


def read_distributions(path: Path) -> Distributions:
    """Open a file that `recording.py` has written, without reading all of it into memory. FormatError for another."""
    with open_file(path) as file:
        entries, start = read_header(file, path, _BITS)
    notes, forms = read_metadata(path), {entry.name: entry.dtype for entry in entries}
    if notes.get("format") != FORMAT or forms != FORMS:
        raise FormatError(f"{path}: is not a file of distributions. Write one with `dualtune distill record`")
    maps = {
        entry.name: np.memmap(path, _DTYPES[entry.name], "r", start + entry.begin, entry.shape) for entry in entries
    }
    content = _content_of(maps[name] for name in FORMS)
    ends, tokens_Nk = np.array(maps["ends"]), maps["tokens"]
    fits = maps["documents"].shape == (len(ends), 16) and maps["logprobs"].shape == tokens_Nk.shape
    fits = fits and tokens_Nk.ndim == 2 and ends[-1] == len(tokens_Nk) and (np.diff(ends, prepend=0) >= 0).all()
    if content != notes.get("content") or not fits:
        raise FormatError(f"{path}: is damaged: its numbers are not those that were recorded. Copy it again")
    places = {digest.tobytes(): place for place, digest in enumerate(maps["documents"])}
    return Distributions(path, notes.get("teacher", ""), content, ends, tokens_Nk, maps["logprobs"], places)


def _content_of(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(bytes_of(array))
        interrupt.poll()
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Divergences of N targets: functions of the student's and the teacher's log-probabilities of the recorded tokens.

_LEAST = 1e-6  # a probability of all other tokens below this is taken to be this: it is a difference from 1


@dataclass(frozen=True, slots=True)
class Divergence:
    values_N: np.ndarray
    weights_NK: np.ndarray
    """−∂values/∂ln p of each label."""


def forward_kl(logq_NK: np.ndarray) -> Divergence:
    """Σ q̃·(ln q̃ − ln p), q̃ the recorded probabilities divided by their sum: Hinton et al., arXiv 1503.02531, eq. 4.

    −∞ is the log-probability of a label that was not recorded. The weights do not depend on p, so a step needs one
    forward pass; and the values here are without the student's part, Σ −q̃·ln p, which is the engine's loss.
    """
    logq_NK = logq_NK.astype(np.float64)
    logq_NK -= np.logaddexp.reduce(logq_NK, axis=-1, keepdims=True)
    q_NK = np.exp(logq_NK)
    return Divergence((q_NK * np.where(q_NK > 0, logq_NK, 0)).sum(-1), q_NK)


def softened_forward_kl(logp_NK: np.ndarray, logq_NK: np.ndarray, temperature: float) -> Divergence:
    """Σ q̃·(ln q̃ − ln p̃) over the recorded tokens, q̃ ∝ q^(1/T) of these alone, p̃ ∝ p^(1/T) also of all others as one.

    Hinton et al., arXiv 1503.02531, section 2, without their factor T². The weights depend on p.
    """
    is_class_NK, p_NC, _ = _classes(logp_NK, logq_NK)
    soft_NC = _softened(p_NC, is_class_NK, temperature)
    logq_NK = np.where(is_class_NK, logq_NK.astype(np.float64) / temperature, -np.inf)
    q_NK = np.exp(logq_NK - np.logaddexp.reduce(logq_NK, axis=-1, keepdims=True))
    values_N = np.where(q_NK > 0, q_NK * np.log(np.maximum(q_NK, 1e-300) / soft_NC[:, :-1]), 0).sum(-1)
    slopes_NC = np.concatenate([-q_NK / soft_NC[:, :-1], np.zeros((len(q_NK), 1))], axis=-1)
    return Divergence(values_N, _weights_by_label(p_NC, soft_NC, slopes_NC, is_class_NK, temperature))


def generalized_jsd(logp_NK: np.ndarray, logq_NK: np.ndarray, beta: float, temperature: float = 1.0) -> Divergence:
    """β·KL(q ‖ m) + (1−β)·KL(p ‖ m), m = (1−β)·p + β·q: Agarwal et al., arXiv 2306.13649, equation 1, as TRL has it.

    Of the recorded tokens, and of all others as one: a lower bound of the divergence over the whole vocabulary. At 0
    and 1 it is KL(q ‖ p) and KL(p ‖ q), which TRL takes there in place of the formula's 0. At another temperature both
    are softened over these classes, as by logits that are divided by it.
    """
    is_class_NK, *plain = _classes(logp_NK, logq_NK)
    is_class_NC = np.concatenate([is_class_NK, np.ones((len(logp_NK), 1), bool)], axis=-1)
    p_NC, q_NC = (x_NC if temperature == 1 else _softened(x_NC, is_class_NK, temperature) for x_NC in plain)
    if beta == 0:
        terms_NC, slopes_NC = q_NC * np.log(q_NC / p_NC), -q_NC / p_NC
    elif beta == 1:
        terms_NC, slopes_NC = p_NC * np.log(p_NC / q_NC), np.log(p_NC / q_NC) + 1
    else:
        m_NC = (1 - beta) * p_NC + beta * q_NC
        terms_NC = beta * q_NC * np.log(q_NC / m_NC) + (1 - beta) * p_NC * np.log(p_NC / m_NC)
        slopes_NC = (1 - beta) * np.log(p_NC / m_NC)
    values_N = np.where(is_class_NC, terms_NC, 0).sum(-1)
    return Divergence(values_N, _weights_by_label(plain[0], p_NC, slopes_NC, is_class_NK, temperature))


def _classes(logp_NK: np.ndarray, logq_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which labels were recorded, bool [N, K], and p and q of these and of all others as one, [N, K + 1].

    1 in the place of a label that was not recorded.
    """
    is_class_NK = np.isfinite(logq_NK)
    p_NC, q_NC = (
        np.concatenate([x_NK, np.maximum(1 - x_NK.sum(-1, keepdims=True), _LEAST)], axis=-1)
        for x_NK in (np.where(is_class_NK, np.exp(logx_NK.astype(np.float64)), 0) for logx_NK in (logp_NK, logq_NK))
    )
    is_class_NC = np.concatenate([is_class_NK, np.ones((len(p_NC), 1), bool)], axis=-1)
    p_NC, q_NC = (np.where(is_class_NC, np.maximum(x_NC, 1e-300), 1.0) for x_NC in (p_NC, q_NC))
    return is_class_NK, p_NC, q_NC


def _softened(x_NC: np.ndarray, is_class_NK: np.ndarray, temperature: float) -> np.ndarray:
    """Return x^(1/T) over its sum, and 1 in the place of a label that was not recorded."""
    is_class_NC = np.concatenate([is_class_NK, np.ones((len(x_NC), 1), bool)], axis=-1)
    logx_NC = np.where(is_class_NC, np.log(x_NC) / temperature, -np.inf)
    soft_NC = np.exp(logx_NC - np.logaddexp.reduce(logx_NC, axis=-1, keepdims=True))
    return np.where(is_class_NC, np.maximum(soft_NC, 1e-300), 1.0)


def _weights_by_label(
    p_NC: np.ndarray, soft_NC: np.ndarray, slopes_NC: np.ndarray, is_class_NK: np.ndarray, temperature: float
) -> np.ndarray:
    """Return −∂D/∂ln p of each label, by the slopes ∂D/∂p̃, p̃ the softened probabilities."""
    # The probability of all other tokens is 1 minus those of the recorded ones, and follows each of them.
    if temperature == 1:
        weights_NK = -p_NC[:, :-1] * (slopes_NC[:, :-1] - slopes_NC[:, -1:])
    else:
        soft_NC = np.where(np.concatenate([is_class_NK, np.ones((len(p_NC), 1), bool)], axis=-1), soft_NC, 0)
        own_NC = soft_NC * (slopes_NC - (soft_NC * slopes_NC).sum(-1, keepdims=True)) / temperature
        weights_NK = p_NC[:, :-1] / p_NC[:, -1:] * own_NC[:, -1:] - own_NC[:, :-1]
    return np.where(is_class_NK, weights_NK, 0)


def sampled_reverse_kl(logp_NK: np.ndarray, logq_NK: np.ndarray) -> Divergence:
    """ln p − ln q of the first label, a token that was drawn from p: its mean is KL(p ‖ q).

    The weights are those of the policy gradient with the advantage ln q − ln p: that of Σ p·(ln p − ln q) is
    Σ p·(ln p − ln q)·∇ln p, because Σ p·∇ln p is 0.
    """
    values_N = (logp_NK[:, 0] - logq_NK[:, 0]).astype(np.float64)
    weights_NK = np.zeros(logp_NK.shape)
    weights_NK[:, 0] = -values_N
    return Divergence(values_N, weights_NK)


# ----------------------------------------------------------------------------------------------------------------------
# Training on soft targets.


class SoftTargets(Protocol):
    """A teacher's distributions by document: tokens int32 and their ln q float32, [n, k], at its n targets."""

    def __getitem__(self, document: int, /) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True, slots=True)
class RecordedTargets:
    """The soft targets of a file."""

    distributions: Distributions
    places: np.ndarray
    """Of the documents in the distributions, int64 [documents]."""

    def __getitem__(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        return self.distributions.at(int(self.places[document]))


class Contribution(NamedTuple):
    """What a micro-batch adds to the loss of a step."""

    loss: float  # less what the engine adds
    values_N: np.ndarray  # the divergence at each target; of forward_kl less the engine's part
    logp_N: np.ndarray | None  # of the targets' own tokens by the student, if the step has asked for it


@dataclass(frozen=True)
class Distillation:
    """The objective of a run that distils: the mean over the targets of divergence + sft_weight · (−ln p of the label).

    The weight of a target's message is a factor of both.
    """

    k: int
    """The number of the teacher's tokens at a target. 0: the sampled token alone."""
    divergence: str
    beta: float
    temperature: float
    sft_weight: float
    asks_first: bool
    """Whether a step needs the student's log-probabilities before it computes a gradient: one more forward pass."""
    train: SoftTargets | None = None
    eval: SoftTargets | None = None
    """The recorded soft targets of a run's documents. None: a teacher answers while it trains."""

    def labelled(self, batch: Batch, soft_targets: SoftTargets) -> tuple[Batch, np.ndarray]:
        """Return the micro-batch with K labels for each target, and the teacher's ln q of them, float32 [N, K].

        The first label is the target's own; its ln q is −∞ unless it is among the teacher's tokens. If it is, the label
        that would repeat it is a token that no other label is, with ln q = −∞.
        """
        tokens_Nk, logprobs_Nk = self._of_targets(batch, soft_targets)
        own_N1 = batch.labels_BT[batch.is_target_BT][:, None]
        is_own_Nk = tokens_Nk == own_N1
        own_logq_N1 = np.where(is_own_Nk, logprobs_Nk, -np.inf).max(-1, keepdims=True)
        labels_NK = np.concatenate([own_N1, np.where(is_own_Nk, _unused(tokens_Nk)[:, None], tokens_Nk)], axis=-1)
        logq_NK = np.concatenate([own_logq_N1, np.where(is_own_Nk, -np.inf, logprobs_Nk)], axis=-1)
        labels_BTK = np.full((*batch.tokens_BT.shape, labels_NK.shape[-1]), IGNORE_INDEX, np.int32)
        labels_BTK[batch.is_target_BT] = labels_NK
        labelled = replace(batch, labels_BT=labels_BTK, weights_BT=None, routing_weights_BT=routing_weights(batch))
        return labelled, logq_NK

    def _of_targets(self, batch: Batch, soft_targets: SoftTargets) -> tuple[np.ndarray, np.ndarray]:
        parts = [soft_targets[document] for row in batch.documents for document in row]
        none = np.zeros((0, self.k or 1), np.int32)
        tokens_Nk = np.concatenate([none, *(tokens_nk for tokens_nk, _ in parts)])
        return tokens_Nk, np.concatenate([none.astype(np.float32), *(logprobs_nk for _, logprobs_nk in parts)])

    def add_gradient(self, engine: Engine, batch: Batch, divisor: float, soft_targets: SoftTargets) -> Contribution:
        """Add the gradient of a micro-batch / divisor, and return its loss; of forward_kl, less the engine's loss."""
        labelled, logq_NK = self.labelled(batch, soft_targets)
        weights_N, loss, logp_N = _weights_of(batch), 0.0, None
        if self.asks_first:
            logp_NK = engine.target_logprobs(labelled, dropout=True)[labelled.is_target_BT]
            divergence, logp_N = self._divergence(logp_NK, logq_NK), logp_NK[:, 0]
            loss -= self.sft_weight * float((weights_N * logp_N).sum())
        else:
            divergence = forward_kl(logq_NK)
        weights_NK = divergence.weights_NK * weights_N[:, None]
        weights_NK[:, 0] += self.sft_weight * weights_N
        weights_BTK = np.zeros(labelled.labels_BT.shape, np.float32)
        weights_BTK[labelled.is_target_BT] = weights_NK
        engine.forward_backward(replace(labelled, weights_BT=weights_BTK), divisor=divisor)
        loss += float((weights_N * divergence.values_N).sum())
        return Contribution(loss / divisor, divergence.values_N, logp_N)

    def loss(self, of_engine: SupportsFloat, rest: float) -> SupportsFloat:
        """Return the loss of a step from the engine's, still on the device, and the sum of `add_gradient`."""
        return rest if self.asks_first else _Sum(of_engine, rest)

    def _divergence(self, logp_NK: np.ndarray, logq_NK: np.ndarray) -> Divergence:
        if self.k == 0:
            return sampled_reverse_kl(logp_NK, logq_NK)
        if self.divergence == "forward_kl":
            return softened_forward_kl(logp_NK, logq_NK, self.temperature)
        beta = 1.0 if self.divergence == "reverse_kl" else self.beta
        return generalized_jsd(logp_NK, logq_NK, beta, self.temperature)

    def evaluate(
        self, engine: Engine, documents: Documents, recovery: Recovery, step: int = 0,
        show: Callable[[int, int], None] = lambda done, total: None, team: Team | None = None, *,
        soft_targets: SoftTargets, before: Callable[[], bool] = lambda: True,
    ) -> EvalRecord:  # fmt: skip
        """Return the loss of sft over all evaluation data, and the divergence; the options are those of `evaluate`.

        `before`: called before each attempt; it returns False if memory ran out in it, and is then called again.
        """
        team, sums = team or Team(), np.zeros(4)

        def measure(batch: Batch) -> None:
            labelled, logq_NK = self.labelled(batch, soft_targets)
            logp_NK, weights_N = engine.target_logprobs(labelled)[labelled.is_target_BT], _weights_of(batch)
            values_N = self._values(logp_NK.astype(np.float64), logq_NK)
            losses = weights_N @ np.stack([-logp_NK[:, 0], values_N, np.ones_like(values_N)], axis=-1)
            sums[:] += [*losses, len(weights_N)]

        while not (before() and measure_share(documents, recovery, measure, step, show, team)):
            sums[:] = 0
        loss, divergence, weight, num_targets = team.totals(sums).tolist()
        metrics = {"eval_divergence": divergence / weight}
        return EvalRecord(step=step, eval_loss=loss / weight, eval_targets=int(num_targets), metrics=metrics)

    def _values(self, logp_NK: np.ndarray, logq_NK: np.ndarray) -> np.ndarray:
        if self.asks_first:
            return self._divergence(logp_NK, logq_NK).values_N
        divergence = forward_kl(logq_NK)
        return divergence.values_N - (divergence.weights_NK * logp_NK).sum(-1)


@dataclass(frozen=True, slots=True)
class _Sum:
    """A number that is still on the device, and another one. Reading it synchronizes the device."""

    on_device: SupportsFloat
    number: float

    def __float__(self) -> float:
        return float(self.on_device) + self.number


def _weights_of(batch: Batch) -> np.ndarray:
    """Return the loss weights of the targets, float64 [N]."""
    weights_BT = batch.target_weights_BT
    return (np.ones(batch.labels_BT.shape) if weights_BT is None else weights_BT.astype(np.float64))[batch.is_target_BT]


def _unused(tokens_Nk: np.ndarray) -> np.ndarray:
    """Return a token for each row that is not in it, int32 [N]: the lowest one."""
    candidates = range(tokens_Nk.shape[1] + 1)
    is_used_NC = np.stack([(tokens_Nk == candidate).any(axis=1) for candidate in candidates], axis=-1)
    return is_used_NC.argmin(axis=-1).astype(np.int32)


def configured_distillation(
    config: Config, train: Documents, eval_: Documents, tokenizer: Tokenizer
) -> Distillation | None:
    """Return the objective of a config that distils; None for another one. ConfigError, DataError, FormatError."""
    if config.train.objective not in ("distill", ON_POLICY):
        return None
    settings = config.distill
    values = (
        config.divergence, settings.beta_or_default, settings.temperature, settings.sft_weight, config.looks_first,
    )  # fmt: skip
    if settings.distributions is None:
        return Distillation(settings.top_k, *values)
    distributions = read_distributions(expanded(settings.distributions))
    size, largest = tokenizer.vocabulary_size, int(distributions.tokens_Nk.max(initial=0))
    if size is not None and largest >= size:
        raise ConfigError(
            f"distill.distributions: {distributions.path} has token {largest}, but the model has embeddings for {size} "
            f"tokens. Its teacher ({distributions.teacher}) has another vocabulary: choose a teacher of the same family"
        )
    recorded = (RecordedTargets(distributions, distributions.of(documents)) for documents in (train, eval_))
    return Distillation(distributions.k, *values, *recorded)

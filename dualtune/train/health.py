"""The verdict on a run: one word for its outcome, computed from its losses, and the numbers behind it.

Losses vary from batch to batch, so single losses decide nothing. Each window is a tenth of the steps; the medians of
windows are compared with the noise of such a median. The noise is estimated from the differences between successive
steps, which hardly contain the trend, by the median absolute deviation (MAD), which is robust to outliers. An
evaluation always uses the same documents, so its only noise is the change of the weights; if there are evaluations,
they decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np

from dualtune.config.values import ON_POLICY, POLICY_OBJECTIVES

# ----------------------------------------------------------------------------------------------------------------------
# The score of a run: the one loss by which a sweep, a table and a picture compare it with others.

LAST_SHARE = 10  # the training loss at the end is the mean of this part of the steps: the last tenth


@dataclass(frozen=True, slots=True)
class Score:
    """A loss in nats per token. None if it is not finite, or if nothing has been measured."""

    loss: float | None
    step: int  # after which it was measured; 0: nothing has been
    is_held_out: bool = False  # an evaluation, not a training loss

    @property
    def order(self) -> tuple[bool, float]:
        """What scores are sorted by: the lowest loss first, what has none last."""
        return (self.loss is None, 0.0 if self.loss is None else self.loss)

    @classmethod
    def of(cls, losses: Sequence[float], evals: Mapping[int, float], step: int, *, best: bool) -> Score:
        """Return the evaluation loss of the weights that a run writes; without one, the training loss at the end.

        `losses`: those of the steps, in order, up to `step`. `evals`: by step; that of the base model, step 0, does not
        count. `best`: the run writes the weights of its best evaluation (guards.restore_best), not the last ones.
        """
        after = {step: loss for step, loss in evals.items() if step > 0}
        if after:
            finite = {step: loss for step, loss in after.items() if math.isfinite(loss)}
            chosen = min(finite, key=finite.__getitem__) if best and finite else max(after)
            return cls(finite.get(chosen), chosen, is_held_out=True)
        loss = end_loss(losses)
        return cls(loss if loss is not None and math.isfinite(loss) else None, step if losses else 0)


def scored_loss(config: Mapping[str, Mapping[str, Any]], *, held_out: bool) -> str:
    """Return what the score of a run is a loss of: equal texts for losses that can be compared.

    `config`: its values by section and key. `held_out`: the score is an evaluation.
    """
    train, rollouts = config.get("train", {}), config.get("rollouts", {})
    name = train.get("objective", "sft")
    if name in ("sft", "distill") and held_out:  # evaluations of both have the plain loss of sft
        return "sft"
    if name in POLICY_OBJECTIVES:  # −reward
        return repr([rollouts.get(key) for key in ("rewards", "weights", "environment", "environment_args")])
    section = "distill" if name in ("distill", ON_POLICY) else "preference"
    settings = train.get("label_smoothing") or 0 if name == "sft" else config.get(section)
    return repr((name, settings))


def end_loss(losses: Sequence[float]) -> float | None:
    """Return the mean of the finite losses of the last tenth; NaN if the last one is not finite, None without any."""
    if not losses:
        return None
    last = losses[-max(1, len(losses) // LAST_SHARE) :]
    return fmean(filter(math.isfinite, last)) if math.isfinite(last[-1]) else math.nan


# ----------------------------------------------------------------------------------------------------------------------
MIN_STEPS = 20  # with fewer, warm-up and decay of the learning rate are most of the run
WINDOWS = 10
SURE = 5.0  # standard errors; of a million runs that learn nothing, about one gets another verdict
NEGLIGIBLE = 0.01  # of the loss: a smaller change is ignored
OVERFIT_RISE = 0.03  # of the best evaluation: a later loss this much higher means overfitting
DIVERGED_RISE = 0.1  # of the lowest loss: a rise this large is more than noise
LATE_SHARE = 0.15  # of the whole fall, in the last third; a straight line has 0.33, a converged run 0
MIN_EVALS = 6  # to separate the noise of evaluations from their trend

# Of a run that compares answers, by its evaluations.
MOST_KL = 50.0  # nats by which the model may have moved from the reference on answers that are not a preference at all
OF_LENGTH = 0.9  # the correlation of the pairs' margins with the difference of their lengths
BOTH_FALL = 0.1  # the part of its log-probability that a chosen answer may lose

Word = Literal[
    "learning", "still falling", "flat", "diverged", "overfitting", "too few steps", "both fall", "length", "far away",
    "rewards failed", "constant reward", "gamed", "collapsed", "few experts",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The outcome of a run."""

    word: Word
    because: str
    advice: str = ""

    def __str__(self) -> str:
        return ". ".join(filter(None, (f"{self.word}: {self.because}", self.advice)))


def judge(
    losses: Sequence[float], evals: Mapping[int, float], metrics: Sequence[Mapping[str, float]] = (),
    of_rewards: RunVerdict | None = None,
) -> RunVerdict:  # fmt: skip
    """Return the verdict on a run from its training losses, in order, and its evaluation losses by step.

    `metrics`: of a run that compares answers or is rewarded, those of its evaluations in order. `of_rewards`: what its
    rewards say against it.
    """
    train, judged = _Train(losses), _Evals(evals, compares=bool(metrics))
    if of_rewards and of_rewards.word == "rewards failed":  # a loss of rewards that are not there is not finite
        return of_rewards
    return (
        _diverged(train, judged)
        or of_rewards
        or _too_few(train, judged)
        or _overfitting(train, judged)
        or _flat(train, judged)
        or (_of_answers(metrics[0], metrics[-1]) if metrics else None)
        or _still_falling(train, judged)
        or RunVerdict("learning", _both(train, judged))
    )


class _Train:
    """The training losses in windows."""

    def __init__(self, losses: Sequence[float]) -> None:
        everything = np.asarray(losses, np.float64)
        finite = everything[np.isfinite(everything)]
        self.num_steps = len(everything)
        self.num_lost = int(np.count_nonzero(~np.isfinite(everything[-max(1, len(everything) // 5) :])))
        size = max(3, len(finite) // WINDOWS) if self.num_steps >= MIN_STEPS else max(1, len(finite) // 3)
        self.size = size  # steps of a window
        parts = np.array_split(finite, max(1, len(finite) // size))
        self.windows = [float(np.median(part)) for part in parts if len(part)]
        self.noise = _noise(np.diff(finite)) / math.sqrt(2)  # of one step
        self.error = 1.25 * self.noise / math.sqrt(size)  # of the median of a window
        self.first = float(finite[0]) if len(finite) else math.nan  # before any update

    @property
    def start(self) -> float:
        return self.windows[0]

    @property
    def end(self) -> float:
        return self.windows[-1]

    def at(self, step: float) -> float:
        """The median of the window around a step."""
        index = int(step / max(1, self.num_steps) * len(self.windows))
        return self.windows[min(index, len(self.windows) - 1)]

    def has_fallen(self, since: float, by: float) -> bool:
        """Return whether the end is significantly below a window's median `since`, by at least the share `by` of it."""
        fall = since - self.end
        return fall > SURE * math.sqrt(2) * self.error and fall > by * abs(since)


class _Evals:
    """The evaluation losses in order. `known`: there are at least two, so they can be compared."""

    def __init__(self, evals: Mapping[int, float], *, compares: bool = False) -> None:
        self._compares = compares
        self.steps = sorted(evals)
        self.losses = [evals[step] for step in self.steps]
        self.known = len(self.steps) > 1
        # From second differences, which contain neither level nor slope, and from third ones, which contain less of a
        # curve that bends: what is left of the curve makes each too large. Without the base model's loss, the start of
        # the fall.
        after = [x for x in self.losses[1:] if math.isfinite(x)]
        noises = _noise(np.diff(after, 2)) / math.sqrt(3), _noise(np.diff(after, 3)) / math.sqrt(10)
        self.jitter = min(noises) if len(self.steps) >= MIN_EVALS else 0.0

    @property
    def start(self) -> float:
        return self.losses[0]

    @property
    def end(self) -> float:
        return self.losses[-1]

    @property
    def best_step(self) -> int:
        return min(zip(self.losses, self.steps, strict=True))[1]

    @property
    def best(self) -> float:
        return min(self.losses)

    @property
    def scale(self) -> float:
        """What a rise is compared with: a loss in nats per token, or the largest of another objective.

        The loss of a comparison goes to 0 where all pairs are learned, and a rise from there means little; that of
        samples is −reward, and begins at 0 where none is right.
        """
        return max(map(abs, self.losses)) if self._compares else self.best

    def before(self, share: float) -> float | None:
        """Return the evaluation nearest to a share of the steps, or None if none is near."""
        last = self.steps[-1]
        distances = [(abs(step / last - share), x) for step, x in zip(self.steps[1:-1], self.losses[1:-1], strict=True)]
        distance, loss = min(distances, default=(1.0, math.nan))
        return loss if distance < 0.25 else None


def _noise(differences: np.ndarray) -> float:
    """Estimate √2 times the standard deviation of the values whose differences these are, by 1.4826 · MAD."""
    if not len(differences):
        return 0.0
    return 1.4826 * float(np.median(np.abs(differences - np.median(differences))))


def _diverged(train: _Train, evals: _Evals) -> RunVerdict | None:
    advice = "Lower train.learning_rate and train again; do not use this adapter"
    if train.num_lost and 2 * train.num_lost > max(1, train.num_steps // 5):
        return RunVerdict("diverged", f"{train.num_lost} of the last steps had a loss that is not finite", advice)
    if evals.known and not math.isfinite(evals.end):
        return RunVerdict("diverged", f"the last evaluation loss is {evals.end}", advice)
    if not train.windows:
        return None
    low = min(train.windows)
    rise = train.end - low
    is_sure = rise > (SURE + 2) * train.error and rise > DIVERGED_RISE * abs(low) and 2 * rise > train.start - low
    is_sure |= train.end - train.first > max(SURE * train.noise, DIVERGED_RISE * abs(train.first))
    if evals.known:
        risen = evals.end - evals.start > DIVERGED_RISE * abs(evals.start)
        is_sure |= risen and not train.has_fallen(train.start, NEGLIGIBLE)
        is_sure |= risen and train.end - train.first > DIVERGED_RISE * abs(train.first)  # both are above the base
    if train.num_steps < MIN_STEPS:  # too few to know the noise
        is_sure = train.end > 2 * abs(train.start) or (evals.known and evals.end > 1.5 * abs(evals.start))
    return RunVerdict("diverged", _both(train, evals), advice) if is_sure else None


def _too_few(train: _Train, evals: _Evals) -> RunVerdict | None:
    if train.num_steps >= MIN_STEPS:
        return None
    steps = f"{train.num_steps} optimizer step{'' if train.num_steps == 1 else 's'}"
    because = f"{steps}; {_both(train, evals)}" if train.windows else steps
    advice = "Raise train.epochs or train.steps, or lower train.documents_per_step or train.tokens_per_step"
    return RunVerdict("too few steps", because, advice)


def _overfitting(train: _Train, evals: _Evals) -> RunVerdict | None:
    if not evals.known:
        return None
    rise = evals.end - evals.best
    has_turned = rise > max(OVERFIT_RISE * abs(evals.scale), 2 * evals.jitter)
    if has_turned and train.end < train.at(evals.best_step):
        because = f"{_both(train, evals)}; the best evaluation was {evals.best:.4f} after step {evals.best_step}"
        return RunVerdict("overfitting", because, "Train fewer epochs, use more data, or set guards.restore_best: true")
    if evals.start - evals.best < NEGLIGIBLE * abs(evals.start) and train.has_fallen(train.start, DIVERGED_RISE):
        advice = "Use more data, or a data.eval of the same kind as data.train"
        return RunVerdict("overfitting", f"{_both(train, evals)}: only the training loss has fallen", advice)
    return None


def _flat(train: _Train, evals: _Evals) -> RunVerdict | None:
    if evals.known:
        is_flat = evals.start - evals.end <= NEGLIGIBLE * abs(evals.start)
    else:
        is_flat = not train.has_fallen(train.start, NEGLIGIBLE)
    if not is_flat:
        return None
    noise = "" if evals.known else f", within the noise of {SURE * math.sqrt(2) * train.error:.2g}"
    advice = "Raise train.learning_rate or train.steps, and check the data with dualtune preview"
    return RunVerdict("flat", f"{_both(train, evals)}{noise}", advice)


def _of_answers(first: Mapping[str, float], last: Mapping[str, float]) -> RunVerdict | None:
    """Return what the loss of a comparison does not show; see docs/objectives.md."""
    if (kl := last.get("eval_kl", 0.0)) > MOST_KL:
        because = f"the model has moved {kl:.0f} nats from the reference on answers to other prompts"
        return RunVerdict(
            "far away", because, "Lower train.learning_rate or the number of steps, or raise preference.beta"
        )
    if abs(correlation := last.get("eval_length_correlation", 0.0)) > OF_LENGTH:
        kind = "longer" if correlation > 0 else "shorter"
        because = f"what is preferred is the {kind} answer: margins and lengths correlate by {correlation:.2f}"
        return RunVerdict(
            "length", because, "Balance the lengths of data.train, or use simpo, which compares per token"
        )
    chosen, rejected = ([row.get(f"eval_{kind}_logp", 0.0) for row in (first, last)] for kind in ("chosen", "rejected"))
    if chosen[1] < chosen[0] - BOTH_FALL * abs(chosen[0]) and rejected[1] < rejected[0]:
        because = (
            f"the chosen answers became less probable too: log-probability {chosen[0]:.1f} -> {chosen[1]:.1f}, that of "
            f"the rejected ones {rejected[0]:.1f} -> {rejected[1]:.1f}"
        )
        return RunVerdict("both fall", because, "Set preference.sft_weight: 1, or lower train.learning_rate")
    return None


def _still_falling(train: _Train, evals: _Evals) -> RunVerdict | None:
    middle = evals.before(2 / 3) if evals.known else None
    if middle is not None:
        fall, late, end, error = evals.start - evals.end, middle - evals.end, evals.end, evals.jitter
    else:
        fall, end, error = train.start - train.end, train.end, math.sqrt(2) * train.error
        late = train.at(2 / 3 * train.num_steps) - train.end
    if late > LATE_SHARE * fall and late > NEGLIGIBLE * abs(end) and late > SURE * error:
        because = f"{_both(train, evals)}, {late / fall:.0%} of the fall in the last third"
        return RunVerdict("still falling", because, "More train.steps or train.epochs should lower it further")
    return None


def _both(train: _Train, evals: _Evals) -> str:
    """Return both curves in numbers. The training loss is not that of the last step, so it says what it is."""
    basis = f"medians of {train.size} steps" if train.size > 1 else "of the first and the last step"
    text = f"training loss {train.start:.4f} -> {train.end:.4f} ({basis})"
    return f"{text}, evaluation loss {evals.start:.4f} -> {evals.end:.4f}" if evals.known else text

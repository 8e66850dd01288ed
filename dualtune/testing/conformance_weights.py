"""The conformance checks of loss weights and of the log-probabilities of the targets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dualtune.adapter.spec import Tensors
from dualtune.backend import IGNORE_INDEX, Batch
from dualtune.testing import tolerances
from dualtune.testing.conformance_case import Case, assert_close, gradient, norm_of
from dualtune.testing.oracles import loss_of, target_logprobs_of

WEIGHTS = (0.25, 0.0, -1.5, 3.0)  # a fraction, no loss at all, a token to avoid, more than the others


def weighted(batch: Batch, *weights: float) -> Batch:
    """Return the batch with these loss weights, repeated. Without a target they are NaN, which no engine may read."""
    weights_BT = np.resize(np.array(weights, np.float32), batch.labels_BT.shape)
    return replace(batch, weights_BT=np.where(batch.labels_BT == IGNORE_INDEX, np.float32(np.nan), weights_BT))


def sum_of(*scaled: tuple[float, Tensors]) -> Tensors:
    """Return Σ factor · tensors."""
    return {name: sum(factor * tensors[name] for factor, tensors in scaled) for name in scaled[0][1]}  # type: ignore[misc]


def check_weights_of_one_are_no_weights(case: Case) -> None:
    batch = case.batch()
    ones = weighted(batch, 1.0)
    losses = [case.engine().evaluate(b) for b in (ones, batch)]
    assert losses[0].num_targets == losses[1].num_targets == ones.total_weight
    assert abs(losses[0].loss_sum - losses[1].loss_sum) <= tolerances.LOGPROBS * batch.num_targets
    for dropout in (0.0, 0.3):
        found, plain = (gradient(case.engine(dropout=dropout), b) for b in (ones, batch))
        assert_close(found, plain, tolerances.GRADIENT)


def check_weighted_loss_equals_the_oracle(case: Case) -> None:
    """evaluate() = −Σ w·log p, and the step reports it divided by the given `num_targets`."""
    engine, batch = case.engine(), weighted(case.batch(), *WEIGHTS)
    expected = loss_of(case.oracle(batch, engine.adapter_state(), case.spec.scale), batch)
    allowed = tolerances.LOGPROBS * batch.num_targets
    assert abs(engine.evaluate(batch).loss_sum - expected) <= allowed
    engine.forward_backward(batch, divisor=2.5)
    reported = float(engine.optim_step(lr=0.0, max_grad_norm=None).loss)
    assert abs(reported - expected / 2.5) <= allowed


def check_weights_scale_the_gradient(case: Case) -> None:
    """A loss weight of 2 doubles the gradient, -1 negates it, 0 gives no gradient."""
    batch = case.batch()
    plain = gradient(case.engine(), batch)
    for weight in (2.0, -1.0, 0.125):
        found = gradient(case.engine(), weighted(batch, weight))
        assert_close(found, {name: weight * g for name, g in plain.items()}, tolerances.GRADIENT)
    assert norm_of(gradient(case.engine(), weighted(batch, 0.0))) == 0.0


def check_weighted_gradients_add_up(case: Case) -> None:
    """The gradient of a weighted loss is the weighted sum of the gradients of its targets, with dropout too."""
    batch = case.batch()
    for dropout in (0.0, 0.3):
        parts: list[tuple[float, Tensors]] = []
        for i, weight in enumerate(WEIGHTS):
            mine_BT = np.arange(batch.labels_BT.size).reshape(batch.labels_BT.shape) % len(WEIGHTS) == i
            part = replace(batch, labels_BT=np.where(mine_BT, batch.labels_BT, IGNORE_INDEX))
            share = part.num_targets / batch.num_targets  # `gradient` divides by the targets of its batches
            parts.append((weight * share, gradient(case.engine(dropout=dropout), part)))
        found = gradient(case.engine(dropout=dropout), weighted(batch, *WEIGHTS))
        assert_close(found, sum_of(*parts), tolerances.GRADIENT)


def check_weighted_and_plain_micro_batches_share_a_step(case: Case) -> None:
    batch = case.batch()
    is_first_BT = np.broadcast_to(np.arange(len(batch.labels_BT))[:, None] < 2, batch.labels_BT.shape)
    first, rest = (
        replace(batch, labels_BT=np.where(mine_BT, batch.labels_BT, IGNORE_INDEX))
        for mine_BT in (is_first_BT, ~is_first_BT)
    )
    together = gradient(case.engine(), replace(batch, weights_BT=np.where(is_first_BT, np.float32(0.5), np.float32(1))))
    assert_close(gradient(case.engine(), weighted(first, 0.5), rest), together, tolerances.GRADIENT)


def check_target_logprobs(case: Case) -> None:
    """target_logprobs() equals the oracle at the targets and is 0 elsewhere, with any loss weights."""
    engine, batch = case.engine(dropout=0.4), weighted(case.batch(), *WEIGHTS)
    expected = target_logprobs_of(case.oracle(batch, engine.adapter_state(), case.spec.scale), batch)
    found = engine.target_logprobs(batch)
    assert found.dtype == np.float32 and found.shape == batch.labels_BT.shape
    assert not found[batch.labels_BT == IGNORE_INDEX].any()
    assert np.abs(found - expected).max() <= tolerances.LOGPROBS
    none = replace(batch, labels_BT=np.full_like(batch.labels_BT, IGNORE_INDEX))
    assert not engine.target_logprobs(none).any()


def check_most_probable(case: Case) -> None:
    """most_probable() is the arg max of logprobs() at the targets, and -1 elsewhere; a batch may have no target."""
    engine, batch = case.engine(dropout=0.4), case.batch()
    logprobs_BTV, is_target_BT = engine.logprobs(batch), batch.labels_BT != IGNORE_INDEX
    found = engine.most_probable(batch)
    assert found.dtype == np.int32 and found.shape == batch.labels_BT.shape
    assert np.array_equal(found, np.where(is_target_BT, logprobs_BTV.argmax(-1), -1))
    assert len(np.unique(found[is_target_BT])) > 1, "one token everywhere shows nothing"
    none = replace(batch, labels_BT=np.full_like(batch.labels_BT, IGNORE_INDEX))
    assert (engine.most_probable(none) == -1).all()


def check_target_logprobs_with_dropout_are_those_of_the_gradient(case: Case) -> None:
    """With dropout, target_logprobs() adds up to the loss that the step reports; without, it differs."""
    engine, batch = case.engine(dropout=0.4), case.batch()
    found = engine.target_logprobs(batch, dropout=True)
    assert np.array_equal(found, engine.target_logprobs(batch, dropout=True))
    engine.forward_backward(batch, divisor=1)
    loss = float(engine.optim_step(lr=0.0, max_grad_norm=None).loss)
    assert abs(loss + float(found.sum(dtype=np.float64))) <= tolerances.LOGPROBS * batch.num_targets
    assert np.abs(found - engine.target_logprobs(batch)).max() > 100 * tolerances.LOGPROBS

"""The conformance checks of loss weights and of the log-probabilities of the targets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dualtune.engine.backend import IGNORE_INDEX, Batch
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance_case import (
    Case,
    assert_close,
    gradient,
    moved,
    norm_of,
    random_adapter,
)
from dualtune.engine.testing.oracles import loss_of, target_logprobs_of
from dualtune.model.adapter import Tensors

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
        actual, plain = (gradient(case.engine(dropout=dropout), b) for b in (ones, batch))
        assert_close(actual, plain, tolerances.GRADIENT)


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
        actual = gradient(case.engine(), weighted(batch, weight))
        assert_close(actual, {name: weight * g for name, g in plain.items()}, tolerances.GRADIENT)
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
        actual = gradient(case.engine(dropout=dropout), weighted(batch, *WEIGHTS))
        assert_close(actual, sum_of(*parts), tolerances.GRADIENT)


def check_weighted_and_plain_micro_batches_share_a_step(case: Case) -> None:
    batch = case.batch()
    is_first_BT = np.broadcast_to(np.arange(len(batch.labels_BT))[:, None] < 2, batch.labels_BT.shape)
    first, others = (
        replace(batch, labels_BT=np.where(mine_BT, batch.labels_BT, IGNORE_INDEX))
        for mine_BT in (is_first_BT, ~is_first_BT)
    )
    together = gradient(case.engine(), replace(batch, weights_BT=np.where(is_first_BT, np.float32(0.5), np.float32(1))))
    assert_close(gradient(case.engine(), weighted(first, 0.5), others), together, tolerances.GRADIENT)


def check_target_logprobs(case: Case) -> None:
    """target_logprobs() equals the oracle at the targets and is 0 elsewhere, with any loss weights."""
    engine, batch = case.engine(dropout=0.4), weighted(case.batch(), *WEIGHTS)
    expected = target_logprobs_of(case.oracle(batch, engine.adapter_state(), case.spec.scale), batch)
    actual = engine.target_logprobs(batch)
    assert actual.dtype == np.float32 and actual.shape == batch.labels_BT.shape
    assert not actual[batch.labels_BT == IGNORE_INDEX].any()
    assert np.abs(actual - expected).max() <= tolerances.LOGPROBS
    none = replace(batch, labels_BT=np.full_like(batch.labels_BT, IGNORE_INDEX))
    assert not engine.target_logprobs(none).any()


def check_weights_of_the_logprobs(case: Case) -> None:
    """`forward_backward_of` is `target_logprobs`, then `forward_backward` with the weights that follow from it.

    With dropout, of one label and of several; labels without weight take no part, not even in the loss. The weights of
    the batch itself may say where those are, rightly (of each third) or not.
    """
    batch = case.batch()
    marked = [replace(batch, weights_BT=(np.indices(batch.labels_BT.shape)[1] % n != 0).astype("f4")) for n in (3, 2)]
    for labels in (batch, *marked, with_labels(batch, 3)):
        engine, twin = case.engine(dropout=0.2), case.engine(dropout=0.2)
        logprobs = twin.target_logprobs(labels, dropout=True)
        weights = np.where(np.indices(logprobs.shape)[1] % 3 == 0, 0, np.exp(logprobs) - 0.3).astype(np.float32)
        told: list[np.ndarray] = []

        def weigh(seen: np.ndarray, told: list[np.ndarray] = told, weights: np.ndarray = weights) -> np.ndarray:
            told.append(seen)
            return weights

        returned = engine.forward_backward_of(labels, weigh, divisor=2.0)
        twin.forward_backward(replace(labels, weights_BT=weights), divisor=2.0)
        assert len(told) == 1 and np.array_equal(told[0], returned)
        gap = float(np.abs(returned - logprobs).max())
        assert gap <= tolerances.LOGPROBS, f"log-probabilities differ by {gap:.2e}"
        assert_close(engine.gradient(), twin.gradient(), tolerances.GRADIENT)
        outputs = [one.optim_step(lr=1e-3, max_grad_norm=None) for one in (engine, twin)]
        assert abs(float(outputs[0].loss) - float(outputs[1].loss)) <= 1e-3 * abs(float(outputs[1].loss))


def with_labels(batch: Batch, num_labels: int) -> Batch:
    """Return a batch with this many distinct labels for each target, the first its own, and with weights for them."""
    rng, vocab = np.random.default_rng(5), 1 + int(batch.tokens_BT.max())
    labels_BTK = (batch.labels_BT[..., None] + np.arange(num_labels) * (1 + vocab // (2 * num_labels))) % vocab
    labels_BTK = np.where(batch.is_target_BT[..., None], labels_BTK, IGNORE_INDEX).astype(np.int32)
    return replace(batch, labels_BT=labels_BTK, weights_BT=rng.normal(size=labels_BTK.shape).astype(np.float32))


def check_several_labels(case: Case) -> None:
    """With K labels a target, log-probabilities, loss and gradient are those of K batches with one label each."""
    for dropout in (0.0, 0.3):
        engine, batch = case.engine(dropout=dropout), with_labels(case.batch(), 3)
        assert batch.weights_BT is not None
        alone = [
            replace(batch, labels_BT=batch.labels_BT[..., k], weights_BT=batch.weights_BT[..., k]) for k in range(3)
        ]
        actual, expected = engine.target_logprobs(batch), [engine.target_logprobs(each) for each in alone]
        assert actual.dtype == np.float32 and np.abs(actual - np.stack(expected, -1)).max() <= tolerances.LOGPROBS
        allowed = tolerances.LOGPROBS * 3 * batch.num_targets
        assert engine.evaluate(batch).num_targets == batch.num_targets
        assert abs(engine.evaluate(batch).loss_sum - sum(engine.evaluate(each).loss_sum for each in alone)) <= allowed
        parts = [(1.0, gradient(case.engine(dropout=dropout), each)) for each in alone]
        assert_close(gradient(case.engine(dropout=dropout), batch), sum_of(*parts), tolerances.GRADIENT)
    none = replace(batch, labels_BT=np.full_like(batch.labels_BT, IGNORE_INDEX))
    assert not engine.target_logprobs(none).any() and norm_of(gradient(case.engine(), batch, none)) > 0


def check_temperature(case: Case) -> None:
    """With a temperature, log-probabilities, loss and gradient are those of logits that are divided by it."""
    engine, temperature = case.engine(), 0.7
    state = engine.adapter_state()

    def expected(batch: Batch, adapter: Tensors) -> np.ndarray:
        logits_BTV = case.oracle(batch, adapter, case.spec.scale) / temperature
        return logits_BTV - np.logaddexp.reduce(logits_BTV, axis=-1, keepdims=True)

    for plain in (weighted(case.batch(), *WEIGHTS), with_labels(case.batch(), 3)):
        batch = replace(plain, temperature=temperature)
        logprobs_BTV = expected(batch, state)
        labels = target_logprobs_of(logprobs_BTV, batch)
        assert np.abs(engine.target_logprobs(batch) - labels).max() <= tolerances.LOGPROBS
        assert np.abs(engine.target_logprobs(plain) - labels).max() > 100 * tolerances.LOGPROBS
        assert np.abs(engine.logprobs(batch) - logprobs_BTV)[batch.segments_BT > 0].max() <= tolerances.LOGPROBS
        tops_Mk = np.sort(logprobs_BTV[batch.is_target_BT], -1)[:, ::-1][:, :3]
        assert np.abs(engine.top_logprobs(batch, 3)[1] - tops_Mk).max() <= tolerances.LOGPROBS
        loss, allowed = loss_of(logprobs_BTV, batch), tolerances.LOGPROBS * 3 * batch.num_targets
        assert abs(engine.evaluate(batch).loss_sum - loss) <= allowed
        grads, direction = gradient(case.engine(), batch), random_adapter(state, seed=100)
        up, down = (
            loss_of(expected(batch, moved(case, state, direction, epsilon)), batch) for epsilon in (1e-3, -1e-3)
        )
        along = sum(float((grads[n].astype(np.float64) * direction[n]).sum()) for n in state)
        slope = (up - down) / 2e-3 / batch.num_targets
        assert abs(along - slope) <= tolerances.GRADIENT * (abs(slope) + norm_of(grads)), (along, slope)


def check_top_logprobs(case: Case) -> None:
    """top_logprobs() has the largest of logprobs() at the targets, in falling order; a batch may have no target."""
    engine, batch = case.engine(dropout=0.4), case.batch()
    logprobs_MV = engine.logprobs(batch)[batch.is_target_BT]
    for k in (1, 5, logprobs_MV.shape[-1]):
        tokens_Mk, logprobs_Mk = engine.top_logprobs(batch, k)
        assert tokens_Mk.dtype == np.int32 and logprobs_Mk.dtype == np.float32
        assert tokens_Mk.shape == logprobs_Mk.shape == (batch.num_targets, k)
        assert np.abs(logprobs_Mk - np.take_along_axis(logprobs_MV, tokens_Mk, -1)).max() <= tolerances.LOGPROBS
        assert np.abs(logprobs_Mk - np.sort(logprobs_MV, -1)[:, ::-1][:, :k]).max() <= tolerances.LOGPROBS
        assert (np.diff(logprobs_Mk, axis=-1) <= 0).all()
        assert all(len(set(tokens.tolist())) == k for tokens in tokens_Mk)
    none = replace(batch, labels_BT=np.full_like(batch.labels_BT, IGNORE_INDEX))
    assert engine.top_logprobs(none, 2)[0].shape == (0, 2)


def check_most_probable(case: Case) -> None:
    """most_probable() is the arg max of logprobs() at the targets, and -1 elsewhere; a batch may have no target."""
    engine, batch = case.engine(dropout=0.4), case.batch()
    logprobs_BTV, is_target_BT = engine.logprobs(batch), batch.labels_BT != IGNORE_INDEX
    actual = engine.most_probable(batch)
    assert actual.dtype == np.int32 and actual.shape == batch.labels_BT.shape
    assert np.array_equal(actual, np.where(is_target_BT, logprobs_BTV.argmax(-1), -1))
    assert len(np.unique(actual[is_target_BT])) > 1, "one token everywhere shows nothing"
    none = replace(batch, labels_BT=np.full_like(batch.labels_BT, IGNORE_INDEX))
    assert (engine.most_probable(none) == -1).all()


def check_target_logprobs_with_dropout_are_those_of_the_gradient(case: Case) -> None:
    """With dropout, target_logprobs() adds up to the loss that the step reports; without, it differs."""
    engine, batch = case.engine(dropout=0.4), case.batch()
    actual = engine.target_logprobs(batch, dropout=True)
    assert np.array_equal(actual, engine.target_logprobs(batch, dropout=True))
    engine.forward_backward(batch, divisor=1)
    loss = float(engine.optim_step(lr=0.0, max_grad_norm=None).loss)
    assert abs(loss + float(actual.sum(dtype=np.float64))) <= tolerances.LOGPROBS * batch.num_targets
    assert np.abs(actual - engine.target_logprobs(batch)).max() > 100 * tolerances.LOGPROBS

"""The conformance checks of what is trained beside an adapter: whole modules, and rows of embedding and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import Batch, Engine
from dualtune.engine.card import NAMES
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance_case import (
    Case,
    assert_close,
    assert_equal,
    gradient,
    norm_of,
    random_adapter,
)
from dualtune.engine.testing.oracles import loss_of
from dualtune.engine.testing.tiny_models import row_of
from dualtune.model.beside import BesideAdapter, parameter_name, parse_beside

ROWS = (7, 3, 20)  # token ids, out of order


def kinds_of(case: Case) -> Iterator[BesideAdapter]:
    """Yield what this backend can train beside an adapter: modules, rows, and rows of one table with another whole."""
    embedding, head = case.tables
    honoured = case.backend.capabilities()
    if NAMES in honoured.get("adapter.train_modules", ()):
        yield BesideAdapter(modules=(embedding, head, *case.norms))
    if NAMES in honoured.get("adapter.train_rows", ()):
        yield BesideAdapter(rows=ROWS)
        yield BesideAdapter(modules=(head,), rows=ROWS, row_modules=(embedding,))


def with_each_kind(check: Callable[[Case], None]) -> Callable[[Case], None]:
    """Repeat a check with each kind of parameters of the base that the backend can train."""

    @wraps(check)
    def check_each(case: Case) -> None:
        for beside in kinds_of(case):
            try:
                check(replace(case, spec=replace(case.spec, beside=beside, targets=case.inner)))
            except AssertionError as error:
                error.add_note(f"with {beside}")
                raise

    return check_each


@with_each_kind
def check_beside_starts_as_the_base(case: Case) -> None:
    """A new engine computes what the base does, and so does a trained one with its neutral state."""
    batch, engine = case.batch(), case.engine()
    base, fresh = case.engine(trained=False, targets=(), beside=BesideAdapter()), case.engine(trained=False)
    real = batch.segments_BT > 0
    assert np.abs(fresh.logprobs(batch) - base.logprobs(batch))[real].max() <= tolerances.LOGPROBS
    assert np.abs(engine.logprobs(batch) - base.logprobs(batch))[real].max() > 100 * tolerances.LOGPROBS
    engine.load_adapter_state(engine.neutral_state())
    assert_equal(engine.adapter_state(), fresh.adapter_state())
    assert np.array_equal(engine.logprobs(batch), fresh.logprobs(batch))


@with_each_kind
def check_beside_gradient_equals_finite_differences(case: Case) -> None:
    """The loss, and along random directions the gradient, are those of the float64 oracle."""
    engine, batch, beside = case.engine(), case.batch(), case.spec.beside
    state, epsilon = engine.adapter_state(), 1e-3
    oracle = case.oracle_with(beside)
    loss = loss_of(oracle(batch, state, case.spec.scale), batch)
    assert abs(engine.evaluate(batch).loss_sum - loss) <= tolerances.LOGPROBS * batch.num_targets
    expected_BT = np.take_along_axis(
        oracle(batch, state, case.spec.scale), np.maximum(batch.labels_BT, 0)[..., None], -1
    )
    targets = batch.labels_BT >= 0
    assert np.abs(engine.target_logprobs(batch) - expected_BT[..., 0])[targets].max() <= tolerances.LOGPROBS
    best_BT = oracle(batch, state, case.spec.scale).argmax(-1)
    assert np.array_equal(engine.most_probable(batch)[targets], best_BT[targets])
    grads = gradient(engine, batch)
    for only in (None, *(name for name in state if parse_beside(name))):
        direction = random_adapter(state, seed=100)
        if only is not None:  # of the tensor alone: an error in a small one would hide behind the large ones
            direction = {name: x * (name == only) for name, x in direction.items()}
        up, down = (
            loss_of(oracle(batch, {n: w + sign * epsilon * direction[n].astype(np.float64) for n, w in state.items()},
                           case.spec.scale), batch)
            for sign in (1, -1)
        )  # fmt: skip
        expected = (up - down) / (2 * epsilon) / batch.num_targets
        got = sum(float((grads[n].astype(np.float64) * direction[n]).sum()) for n in state)
        size = norm_of(grads if only is None else {only: grads[only]})
        assert abs(got - expected) <= tolerances.GRADIENT * (abs(expected) + size), (only, got, expected)


@with_each_kind
def check_beside_gradients_add_up(case: Case) -> None:
    """The gradient of a step does not depend on how it is cut into micro-batches."""
    batch = case.batch()
    rows = [row_of(batch, b) for b in range(len(batch.tokens_BT))]
    apart, at_once = gradient(case.engine(dropout=0.3), *rows), gradient(case.engine(dropout=0.3), batch)
    assert_close(apart, at_once, tolerances.GRADIENT)


@with_each_kind
def check_beside_resumes_bitwise(case: Case) -> None:
    """With adapter and optimizer state in a new engine, the next steps are bitwise equal."""
    batches = [case.batch(seed=seed) for seed in range(4)]
    straight, first, second = case.engine(), case.engine(), case.engine(trained=False)

    def train(engine: Engine, part: list[Batch]) -> None:
        for batch in part:
            engine.forward_backward(batch, divisor=batch.num_targets)
            engine.optim_step(lr=1e-2, max_grad_norm=1.0)

    train(straight, batches)
    train(first, batches[:2])
    second.load_adapter_state(first.adapter_state())
    second.load_optimizer_state(first.optimizer_state())
    train(second, batches[2:])
    assert_equal(second.adapter_state(), straight.adapter_state())


@with_each_kind
def check_beside_merge_equals_adapter(case: Case) -> None:
    """A model directory with what was trained written into it computes the same."""
    engine, batch = case.engine(), case.batch()
    names = [name for name in engine.adapter_shapes if parse_beside(name)]
    merged_dir = case.model_dir.parent / f"merged-{'-'.join(names)}"
    engine.save_merged(merged_dir)
    merged = case.engine(model_dir=merged_dir, trained=False, targets=(), beside=BesideAdapter())
    gap = np.abs(merged.logprobs(batch) - engine.logprobs(batch))[batch.segments_BT > 0].max()
    assert gap <= tolerances.MERGE, f"log-probabilities differ by {gap:.2e}"


@with_each_kind
def check_beside_leaves_the_rest(case: Case) -> None:
    """Only what is named is in the state, in the right shape, and nothing below the embedding is left frozen."""
    engine, beside = case.engine(), case.spec.beside
    for name in engine.adapter_shapes:
        place = parse_beside(name)
        if place and place[1].startswith("token_adapter"):
            assert engine.adapter_shapes[name][0] == len(beside.rows)
    assert engine.description.layers_below_adapter == 0
    assert engine.description.trainable_parameters == sum(np.prod(shape) for shape in engine.adapter_shapes.values())


def check_beside_refuses_by_name(case: Case) -> None:
    """An unknown module, one that has an adapter too, and an id without a row are errors that name their key."""
    embedding, head = case.tables
    kinds = list(kinds_of(case))
    wrong = {
        "adapter.train_modules": [BesideAdapter(modules=("no_such_module",)), BesideAdapter(modules=(case.inner[0],))],
        "adapter.train_rows": [
            BesideAdapter(rows=(case.vocab,)), BesideAdapter(rows=(1,), row_modules=(case.inner[0],)),
            BesideAdapter(modules=(embedding,), rows=(1,)),
        ],
    }  # fmt: skip
    for key, many in wrong.items():
        for beside in many:
            if not any(kind.modules if key.endswith("modules") else kind.rows for kind in kinds):
                continue
            try:
                case.engine(beside=beside, targets=case.inner)
            except ConfigError as error:
                assert str(error).startswith(key), error
            else:
                raise AssertionError(f"{beside} was accepted")
    assert parse_beside(parameter_name(f"{head}.weight")) == (head, "weight")

"""The conformance checks of an engine's state: the adapter, the optimizer's slots and the count of updates."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import numpy as np

from dualtune.adapter.spec import Tensors
from dualtune.backend import IGNORE_INDEX, Batch, Engine, OptimizerState
from dualtune.backend.shared_base import SharedBase
from dualtune.testing.conformance_case import Case, assert_equal, with_each_optimizer
from dualtune.testing.tiny_models import row_of


def train(engine: Engine, *batches: Batch) -> None:
    """Train one step on each batch."""
    for batch in batches:
        engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=1e-2, max_grad_norm=1.0)


def forward_backward_with_bad_weight(engine: Engine, batch: Batch, value: float, *, num_targets: int) -> None:
    """Run forward_backward through an adapter with one weight replaced by `value`, then restore the adapter."""
    good = engine.adapter_state()
    bad = {n: w.copy() for n, w in good.items()}
    next(iter(bad.values())).flat[0] = value
    engine.load_adapter_state(bad)
    with np.errstate(invalid="ignore"):  # a NumPy engine would warn, but the value is intended
        engine.forward_backward(batch, divisor=num_targets)
    engine.load_adapter_state(good)


def state_of(engine: Engine) -> tuple[Tensors, OptimizerState]:
    return engine.adapter_state(), engine.optimizer_state()


def assert_same_state(engine: Engine, adapter: Tensors, optimizer: OptimizerState) -> None:
    """Assert that weights, slots and count are bitwise equal."""
    now = engine.optimizer_state()
    assert now.step == optimizer.step, f"{now.step} updates, expected {optimizer.step}"
    assert_equal(engine.adapter_state(), adapter)
    assert now.slots.keys() == optimizer.slots.keys()
    for slot, tensors in optimizer.slots.items():
        assert_equal(now.slots[slot], tensors)


# --- the checks -------------------------------------------------------------------------------------------------------


@with_each_optimizer
def check_state_round_trip(case: Case) -> None:
    """With adapter and optimizer state loaded into a new engine, the next steps are bitwise equal."""
    batches = [case.batch(seed=s) for s in range(4)]
    straight = case.engine(dropout=0.2)
    train(straight, *batches)
    first = case.engine(dropout=0.2)
    train(first, *batches[:2])
    second = case.engine(trained=False, dropout=0.2)
    second.load_adapter_state(first.adapter_state())
    second.load_optimizer_state(first.optimizer_state())
    assert_same_state(second, *state_of(first))
    assert second.evaluate(batches[0]) == first.evaluate(batches[0])  # the forward pass uses them
    train(second, *batches[2:])
    assert_same_state(second, *state_of(straight))


def check_states_are_copies(case: Case) -> None:
    """More training does not change a state that was returned before."""
    engine, batch = case.engine(), case.batch()
    engine.forward_backward(batch, divisor=batch.num_targets)
    engine.optim_step(lr=1e-2, max_grad_norm=1.0)
    adapter, optimizer = engine.adapter_state(), engine.optimizer_state()
    handed_out = (adapter, *optimizer.slots.values())
    kept = [{n: w.copy() for n, w in tensors.items()} for tensors in handed_out]
    engine.forward_backward(batch, divisor=batch.num_targets)
    engine.optim_step(lr=1e-2, max_grad_norm=1.0)
    for now, then in zip(handed_out, kept, strict=True):
        assert_equal(now, then)


def check_foreign_state_is_refused(case: Case) -> None:
    engine = case.engine()
    state = engine.adapter_state()
    name = next(iter(state))
    for bad in (
        {n: w for n, w in state.items() if n != name},
        state | {"x": state[name]},
        state | {name: state[name].T},
    ):
        if bad.keys() == state.keys() and bad[name].shape == state[name].shape:
            continue  # a square tensor: its transpose has the same shape
        try:
            engine.load_adapter_state(bad)
        except ValueError:
            continue
        raise AssertionError("a state with missing, foreign or reshaped tensors was accepted")
    assert_equal(engine.adapter_state(), state)


@with_each_optimizer
def check_foreign_slots_are_refused(case: Case) -> None:
    """Slots of another optimizer, or with a missing tensor, are refused and change nothing."""
    engine = case.engine()
    train(engine, case.batch())
    before = state_of(engine)
    good, adapter = before[1].slots, before[0]
    some = {n: adapter[n] for n in list(adapter)[1:]}
    for slots in ({**good, "x": adapter}, *({**good, slot: some} for slot in good), *({} for _ in good)):
        try:
            engine.load_optimizer_state(OptimizerState(0, slots))
        except ValueError:
            continue
        raise AssertionError("slots of another optimizer, or with a missing tensor, were accepted")
    assert_same_state(engine, *before)


@with_each_optimizer
def check_a_step_that_is_not_finite_changes_nothing(case: Case) -> None:
    """A NaN or Inf weight in some micro-batches of a step is reported and changes nothing.

    Training continues exactly as if the step, the first or a later one, had not happened.
    """
    engine, twin = case.engine(dropout=0.2), case.engine(dropout=0.2)
    bad = case.batch(seed=99)
    for seed, (spoiled, value, max_norm) in enumerate((((0, 1), math.nan, 1.0), ((0,), math.inf, None),
                                                       ((1,), -math.inf, 1.0), ((1,), math.nan, None))):  # fmt: skip
        before = state_of(engine)
        for b in (0, 1):
            if b in spoiled:
                forward_backward_with_bad_weight(engine, row_of(bad, b), value, num_targets=bad.num_targets)
            else:
                engine.forward_backward(row_of(bad, b), divisor=bad.num_targets)
        output = engine.optim_step(lr=1e-2, max_grad_norm=max_norm)
        assert not math.isfinite(float(output.loss)), f"the loss was reported as {float(output.loss)}"
        assert not math.isfinite(float(output.grad_norm)), f"the norm was reported as {float(output.grad_norm)}"
        assert_same_state(engine, *before)
        for one in (engine, twin):
            train(one, case.batch(seed=seed))
        assert_same_state(engine, *state_of(twin))


def check_an_interrupted_step_leaves_nothing(case: Case) -> None:
    """After discard(), a step has bitwise the gradient and the loss of a new engine, also after a failed batch."""
    batch, other = case.batch(), case.batch(seed=5)
    expected, engine = case.engine(dropout=0.2), case.engine(dropout=0.2)
    expected.forward_backward(batch, divisor=batch.num_targets)
    loss = float(expected.optim_step(lr=0.0, max_grad_norm=None).loss)
    before = state_of(engine)
    engine.forward_backward(other, divisor=other.num_targets)
    impossible = replace(other, dropout_seeds_BT=other.dropout_seeds_BT[:, :3])
    with contextlib.suppress(Exception):
        engine.forward_backward(impossible, divisor=other.num_targets)
    engine.discard()
    assert_same_state(engine, *before)
    assert engine.evaluate(batch) == case.engine().evaluate(batch)
    engine.forward_backward(batch, divisor=batch.num_targets)
    assert float(engine.optim_step(lr=0.0, max_grad_norm=None).loss) == loss
    assert_same_state(engine, *state_of(expected))
    assert engine.evaluate(batch) == expected.evaluate(batch)


@with_each_optimizer
def check_a_gradient_that_is_not_finite_changes_nothing(case: Case) -> None:
    """A NaN weight in a micro-batch without targets leaves the loss finite.

    The gradient is 0 or, as 0 · NaN, NaN: either the step is done or nothing changes, and the reported norm says which.
    """
    engine, batch = case.engine(), case.batch()
    train(engine, batch)
    adapter, optimizer = state_of(engine)
    engine.forward_backward(batch, divisor=batch.num_targets)
    none = replace(batch, labels_BT=np.full_like(batch.labels_BT, IGNORE_INDEX))
    forward_backward_with_bad_weight(engine, none, math.nan, num_targets=batch.num_targets)
    output = engine.optim_step(lr=1e-2, max_grad_norm=1.0)
    assert math.isfinite(float(output.loss))
    if math.isfinite(float(output.grad_norm)):
        assert engine.optimizer_state().step == optimizer.step + 1
    else:
        assert_same_state(engine, adapter, optimizer)


def check_shared_base(case: Case) -> None:
    """An engine on a base that another engine has used computes bitwise what one with a base of its own does."""
    shared, batches = SharedBase(), [case.batch(seed=s) for s in range(2)]
    train(case.engine(shared_base=shared), *batches)
    states: list[tuple[Tensors, OptimizerState]] = []
    for base in (shared, None):
        engine = case.engine(shared_base=base, rank=7, alpha=3.0)
        train(engine, *batches)
        states.append(state_of(engine))
    assert shared.num_loaded == 1, f"the base was loaded {shared.num_loaded} times"
    (adapter, optimizer), (expected, expected_optimizer) = states
    assert_equal(adapter, expected)
    for slot, tensors in expected_optimizer.slots.items():
        assert_equal(optimizer.slots[slot], tensors)

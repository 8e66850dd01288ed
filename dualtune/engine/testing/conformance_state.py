"""The conformance checks of an engine's state: the adapter, the optimizer's slots and the count of updates."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import IGNORE_INDEX, Batch, CannotShare, Engine, OptimizerState, SharedBase
from dualtune.engine.card import KEEP_ALL, LAYERS, ActivationCheckpointing
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance_case import (
    Case,
    assert_close,
    assert_equal,
    assert_same_loss_and_gradient,
    gradient,
    with_each_method,
    with_each_optimizer,
)
from dualtune.engine.testing.oracles import loss_of
from dualtune.engine.testing.tiny_models import pack, row_of, with_common_beginning, with_other_padding
from dualtune.model.adapter import Tensors


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
    copies = [{n: w.copy() for n, w in tensors.items()} for tensors in handed_out]
    engine.forward_backward(batch, divisor=batch.num_targets)
    engine.optim_step(lr=1e-2, max_grad_norm=1.0)
    for now, then in zip(handed_out, copies, strict=True):
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
    some = {slot: dict(list(own.items())[1:]) for slot, own in good.items() if own}
    for slots in ({**good, "x": adapter}, *({**good, slot: own} for slot, own in some.items()), *({} for _ in some)):
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


@with_each_method
def check_a_gradient_can_be_added(case: Case) -> None:
    """A gradient that was read and discarded, and is added again, is as if it had never been away."""
    engine, twin, batch = case.engine(), case.engine(), case.batch()
    for one in (engine, twin):
        one.forward_backward(row_of(batch, 0), divisor=batch.num_targets)
    read = engine.gradient()
    engine.discard()
    engine.add_gradient(read)
    assert_equal(engine.gradient(), read)
    for one in (engine, twin):
        one.forward_backward(row_of(batch, 1), divisor=batch.num_targets)
    assert_close(engine.gradient(), twin.gradient(), tolerances.UPDATE)
    for bad in ({}, {name: g[:0] for name, g in read.items()}):
        try:
            engine.add_gradient(bad)
        except ValueError:
            continue
        raise AssertionError("a gradient with missing or reshaped tensors was accepted")


@with_each_optimizer
def check_hyperparameters_can_change(case: Case) -> None:
    """After a change, steps are bitwise those of an engine that has the hyperparameters from the start."""
    engine, batches = case.engine(), [case.batch(seed=s) for s in range(2)]
    changes = {"weight_decay": 0.5, **({"beta1": 0.7} if "beta1" in case.optimizer_spec.settings else {})}
    train(engine, batches[0])
    other = replace(case, changes=changes).engine(trained=False)
    other.load_adapter_state(engine.adapter_state())
    other.load_optimizer_state(engine.optimizer_state())
    engine.set_hyperparameters(changes)
    for one in (engine, other):
        train(one, batches[1])
    assert_same_state(engine, other.adapter_state(), other.optimizer_state())
    try:
        engine.set_hyperparameters({"no such": 1.0})
    except ConfigError:
        return
    raise AssertionError("an unknown hyperparameter was accepted")


def check_shared_base(case: Case) -> None:
    """An engine on a base that another engine has used computes bitwise what one with a base of its own does."""
    shared, batches = SharedBase(), [case.batch(seed=s) for s in range(2)]
    train(replace(case, shared_base=shared).engine(), *batches)
    states: list[tuple[Tensors, OptimizerState]] = []
    for base in (shared, None):
        engine = replace(case, shared_base=base).engine(rank=7, alpha=3.0)
        train(engine, *batches)
        states.append(state_of(engine))
    assert shared.num_loaded == 1, f"the base was loaded {shared.num_loaded} times"
    (adapter, optimizer), (expected, expected_optimizer) = states
    assert_equal(adapter, expected)
    for slot, tensors in expected_optimizer.slots.items():
        assert_equal(optimizer.slots[slot], tensors)


# ----------------------------------------------------------------------------------------------------------------------
# The conformance checks of `data.packing`: documents that share a row give the same numbers as in separate rows.
#
# The checks pass at once if a backend does not honour packing.

ROWS = [[2, 0, 3], [1]]  # the documents of `Case.batch()`: three in a row, and one followed by padding


def packs(case: Case) -> bool:
    return True in case.backend.capabilities().get("data.packing", frozenset())


def check_packed_equals_separate(case: Case) -> None:
    """The loss of every document is the same as in a separate row, and all log-probabilities equal the oracle's."""
    if not packs(case):
        return
    engine, batch = case.engine(), case.batch()
    packed = pack(batch, ROWS)
    expected = case.oracle(packed, engine.adapter_state(), case.spec.scale)
    gap = np.abs(engine.logprobs(packed) - expected)[packed.segments_BT > 0].max()
    assert gap <= tolerances.LOGPROBS, f"log-probabilities differ by {gap:.2e}"
    total = engine.evaluate(packed).loss_sum
    assert abs(total - loss_of(expected, packed)) <= tolerances.LOGPROBS * packed.num_targets
    for b, row in enumerate(ROWS):
        for number, document in enumerate(row, start=1):
            is_document_BT = (packed.segments_BT == number) & (np.arange(len(ROWS)) == b)[:, None]
            shared = engine.evaluate(
                replace(packed, labels_BT=np.where(is_document_BT, packed.labels_BT, IGNORE_INDEX))
            )
            alone = engine.evaluate(row_of(batch, document))
            assert shared.num_targets == alone.num_targets
            gap = abs(shared.loss_sum - alone.loss_sum) / alone.num_targets
            assert gap <= tolerances.LOGPROBS, (
                f"document {number} of row {b + 1}: differs by {gap:.2e} per token from a separate row"
            )


def check_packed_gradient_is_the_padded_gradient(case: Case) -> None:
    """The same documents packed and in separate rows give the same gradient, with dropout too."""
    if not packs(case):
        return
    for dropout in (0.0, 0.3):
        assert_same_loss_and_gradient(case, pack(case.batch(), ROWS), case.batch(), dropout=dropout)


def check_padding_behind_packed_rows_does_not_matter(case: Case) -> None:
    """Padding, other token ids in it, and a row without a document change neither loss nor gradient."""
    if not packs(case):
        return
    assert_same_loss_and_gradient(case, with_other_padding(pack(case.batch(), ROWS, pad=7)), pack(case.batch(), ROWS))


def check_a_common_beginning_is_computed_once(case: Case) -> None:
    """Documents without the beginning that they share with another one have the numbers that they have with it.

    An engine may refuse them.
    """
    once, apart = with_common_beginning((11, 9, 13), case.vocab, 6, pad=3)
    engine = case.engine()
    try:
        logprobs = engine.logprobs(once)
    except CannotShare:
        return
    real = once.segments_BT > 0
    gap = np.abs(logprobs - case.oracle(once, engine.adapter_state(), case.spec.scale))[real].max()
    assert gap <= tolerances.LOGPROBS, f"log-probabilities differ by {gap:.2e}"
    for dropout in (0.0, 0.3):
        assert_same_loss_and_gradient(case, once, apart, dropout=dropout)


PACKING_CHECKS = [
    check_a_common_beginning_is_computed_once,
    check_packed_equals_separate,
    check_packed_gradient_is_the_padded_gradient,
    check_padding_behind_packed_rows_does_not_matter,
]


# ----------------------------------------------------------------------------------------------------------------------
# The conformance check of `memory.checkpointing`: what is recomputed is what would have been kept, to the bit.

VALUES = {
    "adapter_inputs": ActivationCheckpointing(adapter_inputs=True),
    LAYERS: ActivationCheckpointing(1),
    "full": ActivationCheckpointing("all"),
    "none": KEEP_ALL,
}


@with_each_method
def check_checkpointing_changes_no_bit(case: Case) -> None:
    """Every value gives the same gradient, with dropout and accumulation; one that an engine lacks is refused."""
    honoured = case.backend.capabilities().get("memory.checkpointing", frozenset({"auto"}))
    engine, batch = case.engine(dropout=0.3), case.batch()
    fresh = engine.optimizer_state()
    expected, loss = gradient(engine, batch, row_of(batch, 1)), engine.evaluate(batch).loss_sum
    for value, checkpointing in VALUES.items():
        try:
            engine.set_checkpointing(checkpointing)
        except ConfigError:
            # The plain code may have nothing that could be recomputed from what it keeps anyway.
            assert value not in honoured or value == "adapter_inputs", f"{value} is honoured, but refused"
            continue
        assert value in honoured or value == "none", f"{value} is not honoured, but accepted"
        assert (engine.description.checkpointing == "none") == (value == "none")
        engine.load_optimizer_state(fresh)
        assert_equal(gradient(engine, batch, row_of(batch, 1)), expected)
        assert engine.evaluate(batch).loss_sum == loss


# ----------------------------------------------------------------------------------------------------------------------
# The conformance checks of `train.activation_cache`: hidden states that are given are those that would be computed.
#
# The checks pass at once if a backend does not honour the cache.

TOP = {"softmax": ("head",)}  # what to adapt, by the name of the model's directory
TOP_LAYER = ("layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj", "layers.1.mlp.down_proj")


def caches(case: Case) -> bool:
    return "disk" in case.backend.capabilities().get("train.activation_cache", frozenset())


def top_engine(case: Case, *, dropout: float = 0.0) -> Engine:
    """Return an engine that adapts only the top layer."""
    return case.engine(targets=TOP.get(case.model_dir.name, TOP_LAYER), dropout=dropout)


def with_hidden_states(engine: Engine, batch: Batch) -> Batch:
    """Return the batch with its hidden states, 0 for padding."""
    states_BTD = engine.hidden_states(batch)
    return replace(batch, hidden_BTD=np.where(batch.segments_BT[..., None] > 0, states_BTD, states_BTD.dtype.type(0)))


def check_given_hidden_states_are_the_computed_ones(case: Case) -> None:
    """Loss, log-probabilities and gradient are the same with them, with dropout and accumulation, packed too."""
    if not caches(case):
        return
    engine, plain = top_engine(case, dropout=0.3), case.batch()
    assert engine.description.layers_below_adapter == 1
    with_states, fresh = with_hidden_states(engine, plain), engine.optimizer_state()
    assert with_states.hidden_BTD is not None and np.any(with_states.hidden_BTD)
    pairs = [(plain, with_states)]
    if packs(case):  # from separate rows, where every document was computed alone
        pairs.append((pack(plain, ROWS, pad=3), pack(with_states, ROWS, pad=3)))
    for computed, from_host in pairs:
        loss, expected = (engine.evaluate(batch).loss_sum for batch in (from_host, computed))
        assert abs(loss - expected) <= tolerances.LOGPROBS * plain.num_targets
        for dropout in (False, True):
            actual, reference = (engine.target_logprobs(batch, dropout=dropout) for batch in (from_host, computed))
            assert np.abs(actual - reference).max() <= tolerances.LOGPROBS
        grads = list[dict[str, np.ndarray]]()
        for batch in (from_host, computed):
            engine.load_optimizer_state(fresh)
            grads.append(gradient(engine, batch, row_of(batch, 1)))
        assert_close(grads[0], grads[1], tolerances.GRADIENT)


def check_given_hidden_states_are_used(case: Case) -> None:
    """Other hidden states give another loss and gradient, and none of them stays for the next micro-batch."""
    if not caches(case):
        return
    engine, plain = top_engine(case), case.batch()
    before, logprobs, fresh = engine.evaluate(plain).loss_sum, engine.logprobs(plain), engine.optimizer_state()
    grads = gradient(engine, plain)
    good = with_hidden_states(engine, plain)
    assert good.hidden_BTD is not None
    other = replace(good, hidden_BTD=good.hidden_BTD[:, ::-1].copy())
    assert abs(engine.evaluate(other).loss_sum - before) > 1e-3
    gap = np.abs(engine.target_logprobs(other) - engine.target_logprobs(plain)).max()
    assert gap > 1e-3, "target_logprobs computes the hidden states itself"
    wrong = replace(good, hidden_BTD=good.hidden_BTD[:, :, :-1].copy())
    for broken in (other, wrong):
        with contextlib.suppress(Exception):  # of the framework, for states of another width
            engine.forward_backward(broken, divisor=plain.num_targets)
        engine.discard()
        assert np.array_equal(engine.logprobs(plain), logprobs)
        assert engine.evaluate(plain).loss_sum == before
        assert np.array_equal(engine.hidden_states(plain), engine.hidden_states(plain))
    engine.load_optimizer_state(fresh)
    assert_equal(gradient(engine, plain), grads)
    engine.load_optimizer_state(fresh)
    assert any((gradient_now != grads[name]).any() for name, gradient_now in gradient(engine, other).items())


def check_recomputation_takes_given_hidden_states(case: Case) -> None:
    """Every honoured value of memory.checkpointing gives the same gradient with them, to the bit."""
    if not caches(case):
        return
    engine = top_engine(case, dropout=0.3)
    batch, fresh = with_hidden_states(engine, case.batch()), engine.optimizer_state()
    expected = gradient(engine, batch)
    honoured = case.backend.capabilities().get("memory.checkpointing", frozenset())
    ways = {value: VALUES[value] for value in VALUES if value in honoured}
    if LAYERS in honoured:  # one segment that begins below the adapter
        ways["every: 2"] = ActivationCheckpointing(2, every=2)
    for value, checkpointing in ways.items():
        try:
            engine.set_checkpointing(checkpointing)
        except ConfigError:
            assert value == "adapter_inputs"  # there may be nothing that could be recomputed from what is kept anyway
            continue
        engine.load_optimizer_state(fresh)
        assert_equal(gradient(engine, batch), expected)

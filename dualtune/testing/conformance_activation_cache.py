"""The conformance checks of `train.activation_cache`: hidden states that are given are those that would be computed.

The checks pass at once if a backend does not honour the cache.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from dualtune.activation_checkpointing import LAYERS, ActivationCheckpointing
from dualtune.backend import Batch, Engine
from dualtune.errors import ConfigError
from dualtune.testing import tolerances
from dualtune.testing.conformance_case import Case, assert_close, assert_equal, gradient
from dualtune.testing.conformance_checkpointing import VALUES
from dualtune.testing.conformance_packing import ROWS, packs
from dualtune.testing.tiny_models import pack, row_of

TOP = {"softmax": ("head",)}  # what to adapt, by the name of the model's directory
TOP_LAYER = ("layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj", "layers.1.mlp.down_proj")


def caches(case: Case) -> bool:
    return "disk" in case.backend.capabilities().get("train.activation_cache", frozenset())


def top_engine(case: Case, *, dropout: float = 0.0) -> Engine:
    """Return an engine that adapts only the top layer."""
    return case.engine(targets=TOP.get(case.model_dir.name, TOP_LAYER), dropout=dropout)


def given(engine: Engine, batch: Batch) -> Batch:
    """Return the batch with its hidden states, 0 for padding."""
    states_BTD = engine.hidden_states(batch)
    return replace(batch, hidden_BTD=np.where(batch.segments_BT[..., None] > 0, states_BTD, states_BTD.dtype.type(0)))


def check_given_hidden_states_are_the_computed_ones(case: Case) -> None:
    """Loss, log-probabilities and gradient are the same with them, with dropout and accumulation, packed too."""
    if not caches(case):
        return
    engine, plain = top_engine(case, dropout=0.3), case.batch()
    assert engine.description.layers_below_adapter == 1
    with_states, fresh = given(engine, plain), engine.optimizer_state()
    assert with_states.hidden_BTD is not None and np.any(with_states.hidden_BTD)
    pairs = [(plain, with_states)]
    if packs(case):  # from separate rows, where every document was computed alone
        pairs.append((pack(plain, ROWS, pad=3), pack(with_states, ROWS, pad=3)))
    for computed, from_host in pairs:
        loss, expected = (engine.evaluate(batch).loss_sum for batch in (from_host, computed))
        assert abs(loss - expected) <= tolerances.LOGPROBS * plain.num_targets
        for dropout in (False, True):
            found, wanted = (engine.target_logprobs(batch, dropout=dropout) for batch in (from_host, computed))
            assert np.abs(found - wanted).max() <= tolerances.LOGPROBS
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
    good = given(engine, plain)
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
    assert any((found != grads[name]).any() for name, found in gradient(engine, other).items())


def check_recomputation_takes_given_hidden_states(case: Case) -> None:
    """Every honoured value of memory.checkpointing gives the same gradient with them, to the bit."""
    if not caches(case):
        return
    engine = top_engine(case, dropout=0.3)
    batch, fresh = given(engine, case.batch()), engine.optimizer_state()
    expected = gradient(engine, batch)
    honoured = case.backend.capabilities().get("memory.checkpointing", frozenset())
    ways = {value: VALUES[value] for value in VALUES if value in honoured}
    if LAYERS in honoured:  # one segment that begins below the adapter
        ways["every: 2"] = ActivationCheckpointing(2, every=2)
    for value, checkpointing in ways.items():
        try:
            engine.set_checkpointing(checkpointing)
        except ConfigError:
            assert value == "remade"  # there may be nothing that could be recomputed from what is kept anyway
            continue
        engine.load_optimizer_state(fresh)
        assert_equal(gradient(engine, batch), expected)

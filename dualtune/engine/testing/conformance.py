"""The checks that every engine must pass, as functions that raise AssertionError.

    from dualtune.engine.testing.conformance import CHECKS, llama_case

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check, tmp_path):
        check(llama_case(get_backend("mine"), tmp_path))

The checks use only the `Engine` protocol. A gradient is observed through the optimizer: after one step from a new
state, AdamW's m is (1 − β1) · g.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

from dualtune.engine.backend import CLIP_EPS, IGNORE_INDEX, Batch, EngineDescription
from dualtune.engine.capabilities import BACKEND_KEYS
from dualtune.engine.decoding import GenerationCache
from dualtune.engine.testing import (
    conformance_beside,
    conformance_decoding,
    conformance_losses,
    conformance_state,
    tolerances,
)
from dualtune.engine.testing.conformance_case import (
    DECAY,
    Case,
    assert_close,
    assert_close_codes,
    assert_equal,
    assert_same_loss_and_gradient,
    gradient,
    gradient_in,
    in_float64,
    llama_case,
    moved,
    norm_of,
    random_adapter,
    softmax_case,
    with_each_method,
    with_each_optimizer,
)
from dualtune.engine.testing.oracles import loss_of
from dualtune.engine.testing.tiny_models import row_of, with_other_padding
from dualtune.model.adapter import Tensors, modules_of, parse_name, tensor_name
from dualtune.model.optimizer import OFFSET, SLOT_BYTES

__all__ = [
    "CHECKS",
    "PACKING_CHECKS",
    "Case",
    "assert_close",
    "assert_equal",
    "gradient",
    "llama_case",
    "norm_of",
    "random_adapter",
    "softmax_case",
]

# --- the checks -------------------------------------------------------------------------------------------------------


def check_capabilities_are_declared(case: Case) -> None:
    honoured = case.backend.capabilities()
    unknown = honoured.keys() - set(BACKEND_KEYS)
    assert not unknown, f"no such keys: {unknown}"
    assert all(honoured.values()), "a key without an honoured value can never be used"


def check_description_is_complete(case: Case) -> None:
    """The description has all that `dualtune train` shows and the run directory records."""
    engine = case.engine(trained=False)
    assert isinstance(engine.description, EngineDescription)
    assert engine.description.trainable_parameters == sum(w.size for w in engine.adapter_state().values())
    json.dumps(engine.description.as_json())


def check_new_adapter_is_initialized_by_the_core(case: Case) -> None:
    """The core draws A from the seed, or makes A and B of the weight: the same start on every backend."""
    weights = load_file(case.model_dir / "model.safetensors")
    for init in case.backend.capabilities().get("adapter.init", {case.spec.init}):
        state = case.engine(trained=False, init=init).adapter_state()
        shapes = {
            parsed[0]: (b.shape[0], state[n.replace("lora_B", "lora_A")].shape[1])
            for n, b in state.items()
            if (parsed := parse_name(n)) and parsed[1] == "B"
        }
        spec = replace(case.spec, init=init)
        assert_equal(state, spec.initial(shapes, 7, lambda module: weights[f"{module}.weight"]))
        assert all(w.dtype == np.float32 for w in state.values())


@with_each_method
def check_loss_equals_the_oracle(case: Case) -> None:
    """evaluate() = −Σ log p of an independent forward pass, and logprobs() equals all its log-probabilities."""
    engine, batch = case.engine(), case.batch()
    expected = case.oracle(batch, engine.adapter_state(), case.spec.scale)
    real = batch.segments_BT > 0
    gap = np.abs(engine.logprobs(batch) - expected)[real].max()
    assert gap <= tolerances.LOGPROBS, f"log-probabilities differ by {gap:.2e}"
    result = engine.evaluate(batch)
    assert result.num_targets == np.count_nonzero(batch.labels_BT != IGNORE_INDEX)
    assert abs(result.loss_sum - loss_of(expected, batch)) <= tolerances.LOGPROBS * result.num_targets


@with_each_method
def check_gradient_equals_finite_differences(case: Case) -> None:
    """Along random directions, the gradient equals central differences of the float64 oracle's loss."""
    engine, batch = case.engine(), case.batch()
    state = engine.adapter_state()
    grads = gradient(engine, batch)
    for seed in range(4):
        direction = random_adapter(state, seed=100 + seed)
        epsilon = 1e-3
        up, down = (
            loss_of(case.oracle(batch, moved(case, state, direction, sign * epsilon), case.spec.scale), batch)
            for sign in (1, -1)
        )
        expected = (up - down) / (2 * epsilon) / batch.num_targets
        got = sum(float((grads[n].astype(np.float64) * direction[n]).sum()) for n in state)
        assert abs(got - expected) <= tolerances.GRADIENT * (abs(expected) + norm_of(grads)), (got, expected)


def check_the_gradient_can_be_read(case: Case) -> None:
    """`gradient()` is what the optimizer gets, over all micro-batches of a step; reading it changes nothing."""
    engine, twin, batch = case.engine(), case.engine(), case.batch()
    assert norm_of(engine.gradient()) == 0.0
    for b in (0, 1):
        for one in (engine, twin):
            one.forward_backward(row_of(batch, b), divisor=batch.num_targets)
        read = engine.gradient()
    for one in (engine, twin):
        one.optim_step(lr=1e-3, max_grad_norm=None)
    assert read.keys() == engine.adapter_shapes.keys()
    assert_close(read, gradient_in(engine.optimizer_state()), tolerances.GRADIENT)
    assert_equal(engine.adapter_state(), twin.adapter_state())
    assert norm_of(engine.gradient()) == 0.0


def check_every_adapter_tensor_has_a_gradient(case: Case) -> None:
    grads = gradient(case.engine(), case.batch())
    dead = [n for n, g in grads.items() if not np.any(g)]
    assert not dead, f"no gradient reaches {dead}"


@with_each_method
def check_accumulation_does_not_matter(case: Case) -> None:
    """One micro-batch of four rows, or four of one row: the same gradient, with dropout too."""
    for dropout in (0.0, 0.3):
        batch = case.batch()
        whole = gradient(case.engine(dropout=dropout), batch)
        parts = gradient(case.engine(dropout=dropout), *(row_of(batch, b) for b in range(4)))
        assert_close(parts, whole, tolerances.GRADIENT)


def check_padding_does_not_matter(case: Case) -> None:
    """More padding, other token ids in it, and rows without a document change neither loss nor gradient."""
    assert_same_loss_and_gradient(case, with_other_padding(case.batch(pad=7)), case.batch())


def check_ignored_labels_do_not_matter(case: Case) -> None:
    """The losses of two disjoint sets of targets add up to the whole; a batch without targets adds nothing."""
    engine, batch = case.engine(), case.batch()
    half = replace(batch, labels_BT=np.where(batch.positions_BT % 2, batch.labels_BT, IGNORE_INDEX))
    other = replace(batch, labels_BT=np.where(batch.positions_BT % 2, IGNORE_INDEX, batch.labels_BT))
    total = engine.evaluate(half).loss_sum + engine.evaluate(other).loss_sum
    assert abs(total - engine.evaluate(batch).loss_sum) <= tolerances.LOGPROBS * batch.num_targets
    none = replace(batch, labels_BT=np.full_like(batch.labels_BT, IGNORE_INDEX))
    assert engine.evaluate(none).loss_sum == 0.0
    assert_equal(gradient(case.engine(), none, batch), gradient(case.engine(), batch))


def check_step_output(case: Case) -> None:
    """The step reports the mean loss over all its targets and the gradient norm before clipping."""
    engine, batch = case.engine(), case.batch()
    expected_loss = engine.evaluate(batch).loss_sum / batch.num_targets
    expected_norm = norm_of(gradient(case.engine(), batch))
    for b in range(4):
        engine.forward_backward(row_of(batch, b), divisor=batch.num_targets)
    output = engine.optim_step(lr=0.0, max_grad_norm=0.01)
    assert abs(float(output.loss) - expected_loss) <= tolerances.LOGPROBS
    assert abs(float(output.grad_norm) - expected_norm) <= tolerances.GRADIENT * expected_norm


def check_clipping(case: Case) -> None:
    """Gradients are scaled by min(1, max_norm / (norm + 1e-6))."""
    batch = case.batch()
    free = gradient(case.engine(), batch)
    norm = norm_of(free)
    for max_norm in (norm / 3, norm * 3):
        engine = case.engine()
        engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=0.0, max_grad_norm=max_norm)
        scale = min(1.0, max_norm / (norm + CLIP_EPS))
        assert_close(
            gradient_in(engine.optimizer_state()), {n: g * scale for n, g in free.items()}, tolerances.GRADIENT
        )


@with_each_optimizer
def check_optimizer_is_its_formula(case: Case) -> None:
    """Weights and slots equal the formula in float64 after each of three steps; the second one clips the gradient.

    The gradient is measured by AdamW's first step, in another engine with the same weights.
    """
    engine, lr, max_norms = case.engine(), 1e-2, (None, 0.05, 1e9)
    optimizer, twin = case.optimizer_spec, replace(case, optimizer="adamw", average=None, lr_factors={}).engine()
    fresh = twin.optimizer_state()
    w, state = engine.adapter_state(), engine.optimizer_state()
    assert state.slots.keys() == {*optimizer.slots}
    assert not any(x.any() for tensors in state.slots.values() for x in tensors.values())
    for step, max_norm in enumerate(max_norms, start=1):
        batch = case.batch(seed=step)
        twin.load_adapter_state(w)
        twin.load_optimizer_state(fresh)
        g = in_float64(gradient(twin, batch))
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm_of(g) + CLIP_EPS))
        slots = {slot: in_float64(tensors) for slot, tensors in state.slots.items()}
        expected = {
            n: optimizer.update(
                a,
                clip * g[n],
                {slot: x[n] for slot, x in slots.items() if n in x},
                step=step,
                lr=lr * optimizer.lr_factor(n),
            )
            for n, a in in_float64(w).items()
        }
        engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=lr, max_grad_norm=max_norm)
        w, state = engine.adapter_state(), engine.optimizer_state()
        assert state.step == step
        assert_close(w, {n: a for n, (a, _) in expected.items()}, tolerances.GRADIENT)
        for slot, tensors in state.slots.items():
            is_coded = optimizer.entry.slot_bytes != SLOT_BYTES and slot != OFFSET
            close = assert_close_codes if is_coded else assert_close
            expected_slot = {n: after[slot] for n, (_, after) in expected.items() if slot in after}
            close(tensors, expected_slot, tolerances.GRADIENT)


@with_each_optimizer
def check_weight_decay_without_gradient(case: Case) -> None:
    """A weight with gradient zero is multiplied by exactly 1 − lr · decay, with its own learning rate."""
    engine, factor = case.engine(), case.optimizer_spec.lr_factor
    before, lr = engine.adapter_state(), 0.1
    none = replace(case.batch(), labels_BT=np.full_like(case.batch().labels_BT, IGNORE_INDEX))
    engine.forward_backward(none, divisor=1)
    engine.optim_step(lr=lr, max_grad_norm=1.0)
    assert_close(
        engine.adapter_state(), {n: w * (1 - lr * factor(n) * DECAY) for n, w in before.items()}, tolerances.UPDATE
    )


def check_neutral_state_is_the_base_model(case: Case) -> None:
    """With every honoured method, the neutral state of a trained engine is that of a new one, and gives the base."""
    batch = case.batch()
    base = case.engine(trained=False, targets=()).logprobs(batch)
    for method in case.backend.capabilities().get("adapter.method", {"lora"}):
        fresh, engine = case.engine(trained=False, method=method), case.engine(method=method)
        trained = engine.logprobs(batch)
        engine.load_adapter_state(engine.neutral_state())
        assert_equal(engine.adapter_state(), fresh.adapter_state())
        assert np.array_equal(fresh.logprobs(batch), engine.logprobs(batch))
        assert np.abs(trained - base).max() > 100 * tolerances.LOGPROBS
        assert np.abs(engine.logprobs(batch) - base)[batch.segments_BT > 0].max() <= tolerances.LOGPROBS


def check_rank_stabilized_scale(case: Case) -> None:
    """rsLoRA: the factor is alpha / √rank in loss, gradient and merged weights (arXiv 2312.03732)."""
    engine, batch = case.engine(scaling="rank_stabilized"), case.batch()
    scale = case.spec.alpha / case.spec.rank**0.5
    assert scale != case.spec.scale
    state = engine.adapter_state()
    np.testing.assert_allclose(
        engine.logprobs(batch)[batch.segments_BT > 0], case.oracle(batch, state, scale)[batch.segments_BT > 0],
        atol=tolerances.LOGPROBS, rtol=0,
    )  # fmt: skip
    # The same function with another alpha has the same gradient.
    twin = case.engine(alpha=scale * case.spec.rank)
    assert_close(gradient(engine, batch), gradient(twin, batch), tolerances.GRADIENT)


@with_each_optimizer
def check_a_start_that_is_kept(case: Case) -> None:
    """PiSSA: nothing at first, then what LoRA of twice the rank computes, half of which no step moves."""
    if "pissa" not in case.backend.capabilities().get("adapter.init", ()):
        return
    case = replace(case, spec=replace(case.spec, init="pissa", scaling="rank_stabilized"))
    engine, batch = case.engine(trained=False), case.batch()
    start = engine.adapter_state()
    moving, held = case.spec.split(start)
    engine.load_adapter_state(engine.neutral_state())
    base = engine.logprobs(batch)
    engine.load_adapter_state(start)
    np.testing.assert_allclose(engine.logprobs(batch), base, atol=tolerances.LOGPROBS, rtol=0)
    assert engine.description.trainable_parameters == sum(w.size for w in moving.values())
    slopes: Tensors = {}
    for _ in range(2):
        engine.forward_backward(batch, divisor=batch.num_targets)
        slopes, output = engine.gradient(), engine.optim_step(lr=1e-2, max_grad_norm=0.5)
        assert abs(float(output.grad_norm) - norm_of(slopes)) <= tolerances.GRADIENT * norm_of(slopes)
    state, saved = engine.adapter_state(), engine.optimizer_state()
    shapes = {name: w.shape for name, w in moving.items()}
    assert {name: g.shape for name, g in slopes.items()} == shapes
    slots = {slot: {name: w.shape for name, w in own.items()} for slot, own in saved.slots.items()}
    assert slots == case.optimizer_spec.slot_shapes(shapes)
    moved, same = case.spec.split(state)
    assert_equal(same, held)
    assert all((moved[name] != moving[name]).mean() > 0.9 for name in moving)
    again = case.engine(trained=False)
    again.load_adapter_state(state)
    again.load_optimizer_state(saved)
    assert_equal(again.adapter_state(), state)
    plain = replace(case, spec=case.spec.plain).engine()
    plain.load_adapter_state(state)
    assert np.array_equal(plain.logprobs(batch), engine.logprobs(batch))


@with_each_method
def check_rank_and_alpha_per_module(case: Case) -> None:
    """Layers of other ranks and scales compute, and learn, what the same layers of one rank and scale do."""
    from dualtune.model.formats.canonical import unified

    modules = modules_of(case.engine().adapter_state())
    spec = replace(
        case.spec,
        rank_pattern=tuple((m, 2) for m in modules[::3]),
        alpha_pattern=tuple((m, 5.0) for m in modules[1::3]),
    )
    batch, engine = case.batch(), replace(case, spec=spec).engine(dropout=0.3)
    state = engine.adapter_state()
    assert {state[tensor_name(m, "A")].shape[0] for m in modules} == {2, case.spec.rank}
    alike, tensors, _ = unified(spec, state)
    twin = replace(case, spec=alike).engine(dropout=0.3)
    twin.load_adapter_state(tensors)
    np.testing.assert_allclose(engine.logprobs(batch), twin.logprobs(batch), atol=tolerances.LOGPROBS, rtol=0)
    found, padded = gradient(engine, batch), gradient(twin, batch)
    expected = {name: padded[name][tuple(map(slice, x.shape))] for name, x in found.items()}
    for module in modules:  # B of the twin is B times this
        expected[tensor_name(module, "B")] *= np.float32(spec.scale_of(module) / alike.scale)
    assert_close(found, expected, tolerances.GRADIENT)


def check_zero_b_is_the_base_model(case: Case) -> None:
    """With B = 0 the numbers do not depend on A, bitwise."""
    batch = case.batch()
    fresh = case.engine(trained=False)
    zeroed = case.engine()
    zeroed.load_adapter_state({n: w * ("lora_A" in n) for n, w in zeroed.adapter_state().items()})
    assert np.array_equal(fresh.logprobs(batch), zeroed.logprobs(batch))


@with_each_method
def check_base_stays_frozen(case: Case) -> None:
    """After training, with the adapter reset to its start, the model computes the same as before, bitwise."""
    engine, batch = case.engine(trained=False), case.batch()
    start, before = engine.adapter_state(), engine.logprobs(batch)
    for seed in range(3):
        other = case.batch(seed=seed)
        engine.forward_backward(other, divisor=other.num_targets)
        engine.optim_step(lr=1e-1, max_grad_norm=None)
    assert np.abs(engine.logprobs(batch) - before).max() > 1e-3, "training changed nothing, so the check shows nothing"
    engine.load_adapter_state(start)
    assert np.array_equal(engine.logprobs(batch), before)


@with_each_method
def check_dropout_is_a_function_of_the_seeds(case: Case) -> None:
    """The same dropout seeds give the same gradient, others give another; evaluation has no dropout."""
    batch = case.batch()
    other = replace(batch, dropout_seeds_BT=batch.dropout_seeds_BT[:, ::-1].copy())
    first, again, else_ = (gradient(case.engine(dropout=0.4), b) for b in (batch, batch, other))
    assert_equal(first, again)
    assert norm_of({n: first[n] - else_[n] for n in first}) > 1e-3 * norm_of(first)
    assert case.engine(dropout=0.4).evaluate(batch) == case.engine().evaluate(batch)


def check_greedy_generation_follows_logprobs(case: Case) -> None:
    """Each generated token is the arg max of logprobs() after everything before it."""
    engine = case.engine()
    tokens = [int(t) for t in case.batch().tokens_BT[0, :6]]
    generated: list[int] = []

    def choose(logits_V: np.ndarray) -> int | None:
        return int(np.argmax(logits_V)) if len(generated) < 8 else None

    for token in engine.generate(np.array(tokens, np.int32), choose=choose):
        generated.append(token)
    assert len(generated) == 8
    for i, token in enumerate(generated):
        row = np.array([tokens + generated[:i]], np.int32)
        filled = np.ones_like(row)
        batch = Batch(row, filled * IGNORE_INDEX, filled, np.arange(row.size)[None], filled.astype(np.uint32))
        assert token == int(np.argmax(engine.logprobs(batch)[0, -1]))


def check_a_cache_changes_no_token(case: Case) -> None:
    """A prompt that begins like the text in the cache, or differs early, is continued as without a cache."""
    engine, cache = case.engine(), GenerationCache()
    tokens = case.batch().tokens_BT[0]

    def continued(prompt: np.ndarray, cache: GenerationCache | None) -> list[int]:
        words = engine.generate(prompt, choose=lambda logits_V: int(np.argmax(logits_V)), cache=cache)
        return [*islice(words, 4)]

    first = tokens[:5]
    answer = continued(first, cache)
    longer = np.array([*first, *answer, *tokens[5:8]], np.int32)
    for prompt in (longer, longer, tokens[:7], first[:1], tokens[3:8]):
        assert continued(prompt, cache) == continued(prompt, None)


@with_each_method
def check_merge_equals_adapter(case: Case) -> None:
    """A model directory with merged weights computes the same as base and adapter."""
    engine, batch = case.engine(), case.batch()
    merged_dir = case.model_dir.parent / f"merged-{case.spec.method}"
    engine.save_merged(merged_dir)
    merged = case.engine(model_dir=merged_dir, trained=False)
    gap = np.abs(merged.logprobs(batch) - engine.logprobs(batch)).max()
    assert gap <= tolerances.MERGE, f"log-probabilities differ by {gap:.2e}"


def check_backend_can_be_measured(case: Case) -> None:
    """`dualtune bench` gets a product in the engine's dtype, `synchronize`, and a profile or a reason for none."""
    engine, batch = case.engine(), case.batch()
    case.backend.matmul(16, engine.description.dtype)()
    calls: list[None] = []

    def work() -> None:
        calls.append(None)
        engine.forward_backward(batch, divisor=batch.num_targets)
        case.backend.synchronize()

    profile = case.backend.profile(work, case.model_dir.parent)
    assert len(calls) == (profile.trace is not None), "the work is done once, or not at all without a profiler"
    assert profile.note and (profile.trace is None or profile.trace.exists())
    assert not profile.seconds or sum(profile.seconds.values()) > 0 <= min(profile.seconds.values())


def check_world_of_one_process(case: Case) -> None:
    """The suite is one process, so its world has size 1; test several processes in your own tests."""
    world = case.backend.world()
    assert (world.rank, world.size) == (0, 1)
    assert world.gather(b"note") == [b"note"]
    assert (world.broadcast(b"state"), world.broadcast(b"")) == (b"state", b"")


def _checks_in(part: Mapping[str, Any]) -> list[Callable[[Case], None]]:
    return [check for name, check in part.items() if name.startswith("check_")]


_PARTS = tuple(map(vars, (conformance_losses, conformance_state, conformance_decoding, conformance_beside)))
CHECKS = [check for part in (globals(), *_PARTS) for check in _checks_in(part)]
PACKING_CHECKS = conformance_state.PACKING_CHECKS

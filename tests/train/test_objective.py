"""Objectives are NumPy functions of the core: their gradient on every engine is that of a float64 oracle."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import EnvironmentFault
from dualtune.engine.backend import get_backend
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import (
    assert_close,
    gradient,
    llama_case,
    norm_of,
    random_adapter,
    softmax_case,
)
from dualtune.engine.testing.conformance_losses import WEIGHTS, weighted
from dualtune.engine.testing.oracles import target_logprobs_of
from dualtune.model.optimizer import OPTIMIZERS
from dualtune.train.objective import add_gradient, sft

REQUIRED = [name for name in os.environ.get("DUALTUNE_TEST_BACKENDS", "").split(",") if name]


def dpo(reference_BT, beta):
    """Direct Preference Optimization (Rafailov et al., arXiv 2305.18290, equation 7).

    Rows 0, 2, … are the chosen answers, rows 1, 3, … the rejected ones; `reference_BT` are the log-probabilities of
    the model before training.
    """

    def objective(logprobs_BT, batch):
        gain_B = (logprobs_BT - reference_BT).sum(axis=1, dtype=np.float64)  # log π/π_ref of each answer
        margin_P = beta * (gain_B[0::2] - gain_B[1::2])
        slope_P = beta / (1 + np.exp(margin_P))  # −∂loss/∂(gain of the chosen answer)
        weight_B = np.stack([slope_P, -slope_P], axis=1).ravel()
        loss = np.logaddexp(0, -margin_P).sum()  # −log σ(margin)
        return float(loss), np.repeat(weight_B[:, None], logprobs_BT.shape[1], axis=1)

    return objective


@pytest.fixture(params=["numpy", "torch", "mlx"])
def case(request, tmp_path):
    try:
        backend = get_backend(request.param)
    except EnvironmentFault as error:
        if request.param in REQUIRED:
            raise
        pytest.skip(str(error))
    return (softmax_case if backend.name == "numpy" else llama_case)(backend, tmp_path)


def gradient_of(engine, batch, objective):
    """(the objective's value, its gradient) divided by 2.0, read from AdamW's first moment."""
    value = add_gradient(engine, batch, objective, divisor=2.0)
    engine.optim_step(lr=0.0, max_grad_norm=None)
    first = 1 - OPTIMIZERS["adamw"].defaults["beta1"]  # of the gradient, in the moment after one update
    return value, {n: m.astype(np.float64) / first for n, m in engine.optimizer_state().slots["m"].items()}


def slope(value_of, state, direction, epsilon=1e-3):
    """The derivative of a function of the adapter in a direction, by central differences."""
    up, down = (
        value_of({n: state[n] + sign * epsilon * direction[n].astype(np.float64) for n in state}) for sign in (1, -1)
    )
    return (up - down) / (2 * epsilon)


def along(grads, direction):
    return sum(float((grads[n] * direction[n]).sum()) for n in grads)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_dpo_has_the_gradient_of_a_float64_oracle(case, kernels):
    if kernels not in case.backend.capabilities().get("model.kernels", {"auto"}):
        pytest.skip("has one kind of code")
    case, batch = replace(case, kernels=kernels), case.batch()
    reference_BT = case.engine(trained=False).target_logprobs(batch)  # B is 0: the base model
    engine = case.engine()
    state = engine.adapter_state()

    def exact(adapter):
        return target_logprobs_of(case.oracle(batch, adapter, case.spec.scale), batch)

    base_BT = exact({n: w * ("lora_A" in n) for n, w in state.items()})
    value, grads = gradient_of(engine, batch, dpo(reference_BT, beta=0.7))
    assert abs(value - dpo(base_BT, beta=0.7)(exact(state), batch)[0]) <= 1e-4
    for seed in range(4):
        direction = random_adapter(state, seed=100 + seed)
        expected = slope(lambda adapter: dpo(base_BT, beta=0.7)(exact(adapter), batch)[0], state, direction) / 2.0
        assert abs(along(grads, direction) - expected) <= tolerances.GRADIENT * (abs(expected) + norm_of(grads))


def test_with_dropout_the_weights_belong_to_the_masks_of_the_gradient(tmp_path):
    """The NumPy engine computes in float64, so its own log-probabilities can be differentiated numerically."""
    case = softmax_case(get_backend("numpy"), tmp_path)
    batch, engine = case.batch(), case.engine(dropout=0.4)
    objective = dpo(case.engine(trained=False).target_logprobs(batch), beta=0.7)
    state = engine.adapter_state()

    def value_of(adapter):
        shifted = case.engine(dropout=0.4)
        shifted.load_adapter_state({n: w.astype(np.float32) for n, w in adapter.items()})
        return objective(shifted.target_logprobs(batch, dropout=True), batch)[0]

    _, grads = gradient_of(engine, batch, objective)
    for seed in range(4):
        direction = random_adapter(state, seed=100 + seed)
        expected = slope(value_of, state, direction, epsilon=1e-2) / 2.0
        assert abs(along(grads, direction) - expected) <= 1e-3 * (abs(expected) + norm_of(grads))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_sft_as_an_objective_is_the_engine_s_own_loss(case, dropout):
    for batch in (case.batch(), weighted(case.batch(), *WEIGHTS)):
        value, grads = gradient_of(case.engine(dropout=dropout), batch, sft)
        engine = case.engine(dropout=dropout)
        plain = gradient(engine, batch)  # divided by the number of targets
        assert_close({n: 2.0 * g / batch.num_targets for n, g in grads.items()}, plain, tolerances.GRADIENT)
        if not dropout:
            assert math.isclose(value, case.engine().evaluate(batch).loss_sum, rel_tol=1e-5)

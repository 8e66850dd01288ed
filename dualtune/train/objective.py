"""Objectives: what a run minimizes, as a NumPy function of the log-probabilities of the targets.

An engine knows one loss, Σ −w·log p. That is enough for every other loss: by the chain rule the gradient of L(log p) is
Σ (∂L/∂log p)·∇log p, which is the gradient of the engine's loss with the weights w = −∂L/∂log p. So an objective
returns its value and these weights, and no engine needs to know it. See docs/objectives.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from dualtune.backend import Batch, Engine


class Objective(Protocol):
    def __call__(self, logprobs_BT: np.ndarray, batch: Batch, /) -> tuple[float, np.ndarray]:
        """Return the loss of a micro-batch and −∂loss/∂logprobs_BT.

        Log-probabilities and weights are float32 [B, T]. Where there is no target, log-probabilities are 0 and weights
        are ignored. The loss of a step is the sum over its micro-batches, so documents that are compared with each
        other must be in the same micro-batch.
        """
        ...


def sft(logprobs_BT: np.ndarray, batch: Batch, /) -> tuple[float, np.ndarray]:
    """Supervised fine-tuning: Σ −w·log p.

    Its weights are those of the batch and do not depend on the log-probabilities, so one call of
    `Engine.forward_backward(batch)` computes it, with one forward pass instead of two.
    """
    weights_BT = batch.target_weights_BT
    if weights_BT is None:
        weights_BT = np.ones_like(logprobs_BT)
    return -float((weights_BT * logprobs_BT).sum(dtype=np.float64)), weights_BT


def add_gradient(engine: Engine, batch: Batch, objective: Objective, *, divisor: float) -> float:
    """Add the gradient of objective / divisor for this micro-batch, and return the objective's value.

    The engine runs the forward pass twice with the same dropout masks, because the weights must match the
    log-probabilities that are differentiated. `optim_step` reports Σ −w·log p / divisor, which differs from the
    value of a non-linear objective: report the returned value instead.
    """
    logprobs_BT = engine.target_logprobs(batch, dropout=True)
    value, weights_BT = objective(logprobs_BT, batch)
    engine.forward_backward(replace(batch, weights_BT=weights_BT.astype(np.float32)), divisor=divisor)
    return value

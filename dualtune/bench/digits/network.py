"""A network of two layers in NumPy: 64 pixels, 64 hidden units with ReLU, 10 classes, softmax cross-entropy.

Its engine has the part of `dualtune.backend.Engine` that a step policy uses. As in every engine, weights and the slots
of the optimizer are float32; all arithmetic is float64.

Legend: D images, I pixels, H hidden units, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dualtune.adapter.spec import Tensors
from dualtune.backend import CLIP_EPS, OptimizerState, StepOutput
from dualtune.backend.checks import check_slots, check_state
from dualtune.bench.digits.data import Images
from dualtune.optimizer import OptimizerSpec

PIXELS, HIDDEN, CLASSES = 64, 64, 10
# The multiplications of an image. The gradient of a layer's weights takes as many as its forward pass, and so does that
# of its input, which the first layer does not need.
FORWARD = PIXELS * HIDDEN + HIDDEN * CLASSES
BACKWARD = FORWARD + HIDDEN * CLASSES
STEP_COST = 1 + BACKWARD / FORWARD  # of a computed step, in forward passes of its batch


def starting_weights(seed: int) -> dict[str, np.ndarray]:
    """Return the weights before the first step: He et al., arXiv 1502.01852, equation 10. Biases are zero.

    This is the only place of the experiment with random numbers of its own.
    """
    rng = np.random.default_rng([seed, 6])
    shapes = {"hidden.weight": (HIDDEN, PIXELS), "classes.weight": (CLASSES, HIDDEN)}
    weights = {name: rng.normal(0.0, math.sqrt(2 / shape[1]), shape) for name, shape in shapes.items()}
    biases = {"hidden.bias": np.zeros(HIDDEN), "classes.bias": np.zeros(CLASSES)}
    return {name: w.astype(np.float32) for name, w in {**weights, **biases}.items()}


def _forward(weights: Mapping[str, np.ndarray], images: Images) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden units after ReLU [D, H], and log p of all classes [D, C]."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    hidden_DH = np.maximum(images.pixels_DI @ w["hidden.weight"].T + w["hidden.bias"], 0.0)
    logits_DC = hidden_DH @ w["classes.weight"].T + w["classes.bias"]
    logits_DC -= logits_DC.max(-1, keepdims=True)
    return hidden_DH, logits_DC - np.log(np.exp(logits_DC).sum(-1, keepdims=True))


def losses(weights: Mapping[str, np.ndarray], images: Images) -> np.ndarray:
    """Return −log p of the label of each image, float64 [D]."""
    _, logp_DC = _forward(weights, images)
    return -logp_DC[np.arange(len(images)), images.labels_D]


def accuracy(weights: Mapping[str, np.ndarray], images: Images) -> float:
    """Return the share of the images whose label is the most likely class."""
    _, logp_DC = _forward(weights, images)
    return float((logp_DC.argmax(-1) == images.labels_D).mean())


def gradients(weights: Mapping[str, np.ndarray], images: Images) -> tuple[float, dict[str, np.ndarray]]:
    """Return the mean loss of the images, and its gradient in float64."""
    hidden_DH, logp_DC = _forward(weights, images)
    d = np.arange(len(images))
    loss = float(-logp_DC[d, images.labels_D].mean())
    g_DC = np.exp(logp_DC)
    g_DC[d, images.labels_D] -= 1
    g_DC /= len(images)
    g_DH = (g_DC @ weights["classes.weight"].astype(np.float64)) * (hidden_DH > 0)
    return loss, {
        "classes.weight": g_DC.T @ hidden_DH, "classes.bias": g_DC.sum(0),
        "hidden.weight": g_DH.T @ images.pixels_DI, "hidden.bias": g_DH.sum(0),
    }  # fmt: skip


class DigitsEngine:
    """The network with its optimizer. Its "adapter" is the whole network, as of every model that is trained whole."""

    def __init__(self, weights: Tensors, optimizer: OptimizerSpec) -> None:
        self._weights, self._optimizer, self._step = dict(weights), optimizer, 0
        self._slots = {slot: {name: np.zeros_like(w) for name, w in weights.items()} for slot in optimizer.slots}
        self._loss, self._grads = 0.0, dict[str, np.ndarray]()

    @property
    def weights(self) -> Tensors:
        """The weights themselves: to read, not to keep."""
        return self._weights

    def forward_backward(self, images: Images) -> None:
        """Compute the gradient of the mean loss, in place of the one before."""
        self._loss, self._grads = gradients(self._weights, images)

    def optim_step(self, *, lr: float, max_grad_norm: float | None) -> StepOutput:
        """Clip and update, as `Engine.optim_step`: numbers that are not finite change nothing."""
        norm = math.sqrt(sum(float((g**2).sum()) for g in self._grads.values()))
        clip = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + CLIP_EPS))
        if math.isfinite(self._loss) and math.isfinite(norm):
            self._update(lr, clip)
        self._grads = {}
        return StepOutput(self._loss, norm)

    def _update(self, lr: float, clip: float) -> None:
        self._step += 1
        for name, w in self._weights.items():
            before = {slot: tensors[name] for slot, tensors in self._slots.items()}
            new, after = self._optimizer.update(w, self._grads[name] * clip, before, step=self._step, lr=lr)
            self._weights[name] = new.astype(np.float32)
            for slot, tensor in after.items():
                self._slots[slot][name] = tensor.astype(np.float32)

    @property
    def adapter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: w.shape for name, w in self._weights.items()}

    def adapter_state(self) -> Tensors:
        return {name: w.copy() for name, w in self._weights.items()}

    def load_adapter_state(self, state: Tensors) -> None:
        check_state(self.adapter_shapes, state, "weights")
        self._weights = {name: state[name].copy() for name in self._weights}

    def optimizer_state(self) -> OptimizerState:
        return OptimizerState(self._step, {slot: dict(tensors) for slot, tensors in self._slots.items()})

    def load_optimizer_state(self, state: OptimizerState) -> None:
        check_slots(self._optimizer, self.adapter_shapes, state)
        self._step, self._slots = state.step, {slot: dict(tensors) for slot, tensors in state.slots.items()}

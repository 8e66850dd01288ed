"""The presets of predictive training on the images of digits, each beside a shorter ordinary run of equal cost."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import numpy as np

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.config import Config, load_config
from dualtune.data.documents import held_out, probe_documents
from dualtune.data.order import Order, without
from dualtune.doctor.bench.intervals import Interval, paired
from dualtune.engine.backend import CLIP_EPS, OptimizerState, StepOutput, check_slots, check_state
from dualtune.model.adapter import Tensors
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.evaluation import using
from dualtune.train.hybrid.policy import Predictive
from dualtune.train.objective import learning_rate, optimizer_spec
from dualtune.train.policies import policy_of
from dualtune.train.policy import Update

# ----------------------------------------------------------------------------------------------------------------------
# The images: 1,797 handwritten digits that scikit-learn brings, and which of them no run may see before its end.

HELD_OUT = 0.2  # of the images
SPLIT = 0  # the seed of the split: the held-out images are the same in every run
BRIGHTEST = 16.0  # the largest value of a pixel


@dataclass(frozen=True, slots=True)
class Images:
    """Images with their labels. Legend: D images, I pixels."""

    pixels_DI: np.ndarray  # float64, from 0 to 1
    labels_D: np.ndarray  # from 0 to 9

    def __len__(self) -> int:
        return len(self.labels_D)

    def chosen(self, which_D: Any) -> Images:
        """Return some of the images, by their indices or by a mask."""
        return Images(self.pixels_DI[which_D], self.labels_D[which_D])


@dataclass(frozen=True, slots=True)
class DigitsData:
    """Images to train on (a run takes its probes from them), and others that only measure the result."""

    train: Images
    held_out: Images


def read_digits() -> DigitsData:
    """Return the images of scikit-learn, which has them in its package. EnvironmentFault if it is not installed."""
    try:
        load_digits: Any = import_module("sklearn.datasets").load_digits
    except ImportError as error:
        raise EnvironmentFault(
            f"the images of digits: they come with scikit-learn, which could not be imported ({error}). "
            "Install it with: pip install 'dualtune[bench]'"
        ) from error
    pixels_DI, labels_D = load_digits(return_X_y=True)
    return split(Images(pixels_DI / BRIGHTEST, labels_D), SPLIT)


def split(images: Images, seed: int) -> DigitsData:
    """Hold out a fifth of the images."""
    is_held_out = held_out(len(images), HELD_OUT, seed)
    return DigitsData(images.chosen(~is_held_out), images.chosen(is_held_out))


# ----------------------------------------------------------------------------------------------------------------------
# A network of two layers in NumPy: 64 pixels, 64 hidden units with ReLU, 10 classes, softmax cross-entropy.
#
# Its engine has the part of `dualtune.engine.backend.Engine` that a step policy uses. As in every engine, weights and
# the slots
# of the optimizer are float32; all arithmetic is float64.
#
# Legend: D images, I pixels, H hidden units, C classes.

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


# ----------------------------------------------------------------------------------------------------------------------
# What a step policy may do in a step of this experiment: `dualtune.train.policy.StepActions` on images.


class DigitsStep:
    """One step after another of a run: the same methods as `dualtune.train.step.TrainingStep` has for a policy.

    An image is a document of one token.
    """

    def __init__(self, config: Config, images: Images, engine: DigitsEngine, num_probes: int) -> None:
        self.index = 0
        self.engine: Any = engine  # the part of `Engine` that policies use
        self._config, self._images = config, images
        self.probe_documents: Sequence[int] = probe_documents(len(images), num_probes, config.run.seed)
        sources = without(np.zeros(len(images), np.int64), self.probe_documents)
        self._order = Order(config, np.ones(len(images), np.int64), sources)

    @property
    def max_steps(self) -> int:
        return self.steps_left  # nothing is saved or evaluated before the end

    @property
    def steps_left(self) -> int:
        return self._order.num_steps - self.index

    @property
    def documents(self) -> np.ndarray:
        """The images that this step trains on, by their indices."""
        return self._order.step(self.index).documents

    def add_gradients(self) -> None:
        self.engine.forward_backward(self._images.chosen(self.documents))

    def update(self) -> Update:
        lr, number = self.rate(), len(self.documents)
        output = self.engine.optim_step(lr=lr, max_grad_norm=self._config.train.max_grad_norm)
        return Update(output, lr, number, number)

    def rate(self, ahead: int = 0) -> float:
        num_steps = self._order.num_steps
        return learning_rate(self._config, max(0, min(self.index + ahead, num_steps - 1)), num_steps)

    def tokens_of(self, documents: Sequence[int]) -> int:
        return len(documents)

    def document_losses(self, documents: Sequence[int]) -> np.ndarray:
        return losses(self.engine.weights, self._images.chosen(list(documents)))

    def from_first(self, number: float) -> float:
        return number

    def trying(self, adapter: Tensors) -> AbstractContextManager[None]:
        return using(self.engine, adapter)


# ----------------------------------------------------------------------------------------------------------------------
# One run on the images of digits: trained through the step policy of its config, then measured on held-out images.

BATCH = 64  # images
REPORTED = ("attempts", "accepted", "undone", "divergences", "backward_reduction_pct", "disabled")


@dataclass(frozen=True, slots=True)
class DigitsTrial:
    """What a run cost, and what came of it. Costs are in forward passes of a batch."""

    seed: int
    steps: int  # of the schedule
    accuracy: float  # on held-out images, from 0 to 1
    eval_loss: float  # on the same images, in nats
    cost: float
    wall_s: float
    peak_bytes: int  # that the run has allocated at once, by tracemalloc: arrays and Python's objects, not the images
    hybrid: Mapping[str, Any] = field(default_factory=lambda: {})  # what predictive training reports; empty without it

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "hybrid" or value}


def config_of(seed: int, num_steps: int, learning_rate: float, hybrid: Mapping[str, Any]) -> Config:
    """Return the config of a run, with the default schedule and optimizer. Model and data in it are only names."""
    train = {"steps": num_steps, "documents_per_step": BATCH, "learning_rate": learning_rate, "max_grad_norm": None}
    names = {"model": {"name": "digits"}, "data": {"train": "digits"}, "adapter": {"method": "full"}}
    hybrid = {"gate": "none", **hybrid}  # costs are judged, and no clock decides what an arm does
    return load_config({**names, "train": train, "run": {"seed": seed, "dir": "digits"}, "hybrid": hybrid})


def train(data: DigitsData, config: Config) -> tuple[DigitsEngine, float, Mapping[str, Any]]:
    """Train, and return the engine, the cost of the run, and what predictive training reports of itself."""
    policy, num_steps = policy_of(config)(config), config.train.steps
    assert num_steps is not None
    engine = DigitsEngine(starting_weights(config.run.seed), optimizer_spec(config, num_steps))
    step = DigitsStep(config, data.train, engine, policy.num_probes)
    while step.index < num_steps:
        step.index += policy.take(step).num_steps
    if not isinstance(policy, Predictive):
        return engine, num_steps * STEP_COST, {}
    # The controller decides by the costs of a language model. What is reported are those of this network.
    statistics = replace(policy.statistics(), step_cost=STEP_COST)
    return engine, statistics.cost, {name: statistics.as_json()[name] for name in REPORTED}


def run_trial(data: DigitsData, config: Config) -> DigitsTrial:
    """Train twice, with the same result: once by the clock, and once with all allocations counted, which is slower."""
    began = time.perf_counter()
    engine, cost, hybrid = train(data, config)
    seconds = time.perf_counter() - began
    tracemalloc.start()
    try:
        train(data, config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert config.train.steps is not None
    result = accuracy(engine.weights, data.held_out), float(losses(engine.weights, data.held_out).mean())
    return DigitsTrial(config.run.seed, config.train.steps, *result, cost, seconds, peak, hybrid)


# ----------------------------------------------------------------------------------------------------------------------
# The comparison: every arm over several seeds, beside a baseline and a control of equal cost.

STEPS = 600
# benchmarks/digits.py tunes the rate for the baseline, on parts of the images for training.
CASES: Mapping[str, float] = MappingProxyType({"tuned": 2e-2, "a tenth": 2e-3, "a twentieth": 1e-3})
BASELINE = "baseline"
ARMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        BASELINE: {},
        "conservative": {"enabled": True, "preset": "conservative"},
        "aggressive": {"enabled": True, "preset": "aggressive"},
    }
)


@dataclass(frozen=True, slots=True)
class DigitsRow:
    """An arm's runs, one for each seed. All rows have the same seeds, so their differences are paired."""

    case: str
    learning_rate: float
    arm: str
    trials: tuple[DigitsTrial, ...]
    baseline: tuple[DigitsTrial, ...]
    control: tuple[DigitsTrial, ...] | None = None  # baselines whose whole schedule has as many steps as this arm costs

    @property
    def rate(self) -> str:
        return f"{self.learning_rate:g} ({self.case})"

    def values(self, name: str) -> list[float]:
        return [getattr(trial, name) for trial in self.trials]

    def against(self, other: Sequence[DigitsTrial], name: str) -> Interval:
        """Return this arm's accuracy or loss minus that of other runs with the same seeds."""
        return paired(self.values(name), [getattr(trial, name) for trial in other])

    def counted(self, name: str) -> int:
        """Return a number of predictive training, summed over the seeds."""
        return sum(trial.hybrid.get(name, 0) for trial in self.trials)

    @property
    def backward_reduction_pct(self) -> float:
        return fmean(trial.hybrid.get("backward_reduction_pct", 0.0) for trial in self.trials)

    @property
    def cost_ratio(self) -> float:
        """The cost in times of the baseline's."""
        return fmean(self.values("cost")) / fmean(trial.cost for trial in self.baseline)

    @property
    def verdict(self) -> str:
        """Say what the runs prove about a predictive arm's loss against its control; empty for the others."""
        if self.control is None:
            return ""
        gap = self.against(self.control, "eval_loss")
        if not gap.excludes_zero:
            return "no evidence of a difference from its control"
        return "better than its control" if gap.mean < 0 else "worse than its control"

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"case": self.case, "learning_rate": self.learning_rate, "arm": self.arm}
        for name in ("accuracy", "eval_loss", "cost", "wall_s", "peak_bytes"):
            values = self.values(name)
            row[name] = {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else None}
        row["cost_ratio"] = self.cost_ratio
        for which, other in (("baseline", self.baseline), ("control", self.control)):
            if self.control is not None and other is not None:
                for name in ("accuracy", "eval_loss"):
                    row[f"{name}_minus_{which}"] = self.against(other, name).as_json()
        if self.control is not None:
            row["backward_reduction_pct"] = self.backward_reduction_pct
            row |= {name: self.counted(name) for name in ("attempts", "accepted", "undone", "divergences")}
            row["verdict"] = self.verdict
        return row | {"trials": [trial.as_json() for trial in self.trials]}


@dataclass(frozen=True, slots=True)
class DigitsResult:
    """The whole comparison: for each case its baseline, then each arm with its control."""

    rows: tuple[DigitsRow, ...]
    held_out_images: int

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": STEPS,
            "held_out_images": self.held_out_images,
            "step_cost": STEP_COST,
            "rows": [row.as_json() for row in self.rows],
        }


def digits(seeds: int = 5, tell: Callable[[str], None] = lambda text: None) -> DigitsResult:
    """Train every arm of every case with the seeds 1 to `seeds`. `tell` hears what is trained.

    ConfigError for less than one seed; EnvironmentFault without scikit-learn.
    """
    if seeds < 1:
        raise ConfigError(f"seeds: got {seeds}, allowed: 1 or more; intervals need 2 or more")
    data = read_digits()
    rows = (row for case in CASES for row in _rows(data, case, range(1, seeds + 1), tell))
    return DigitsResult(tuple(rows), len(data.held_out))


def _rows(data: DigitsData, case: str, seeds: Sequence[int], tell: Callable[[str], None]) -> Iterator[DigitsRow]:
    """Yield the baseline of a case, then each predictive arm and its control."""
    rate = CASES[case]

    def trained(arm: str, hybrid: Mapping[str, Any], steps: Sequence[int]) -> tuple[DigitsTrial, ...]:
        tell(f"{case}, {arm}")
        configs = (config_of(seed, n, rate, hybrid) for seed, n in zip(seeds, steps, strict=True))
        return tuple(run_trial(data, config) for config in configs)

    baseline = trained(BASELINE, {}, [STEPS] * len(seeds))
    yield DigitsRow(case, rate, BASELINE, baseline, baseline)
    for arm, hybrid in ARMS.items():
        if arm == BASELINE:
            continue
        trials = trained(arm, hybrid, [STEPS] * len(seeds))
        control = trained(f"control of {arm}", {}, [max(1, round(trial.cost / STEP_COST)) for trial in trials])
        yield DigitsRow(case, rate, arm, trials, baseline, control)
        yield DigitsRow(case, rate, f"control of {arm}", control, baseline)

"""The boundary between the training loop and a machine: all that the core knows about a framework.

The loop owns data, schedule, checkpoints, hooks and logging. An engine owns the model, the adapter on its device, the
optimizer and the kernels. Only NumPy arrays, numbers and paths cross; base weights never do.

To add a backend, implement `Backend` and `Engine`, register the backend object under the entry-point group
`dualtune.backends`, and run the conformance suite (`dualtune.testing.conformance`). `dualtune.testing.numpy_engine` is
a small complete example.

Shape suffixes: B rows of the micro-batch, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

import numpy as np

from dualtune.adapter.spec import LoraSpec, Tensors
from dualtune.base_model import BaseWeights, find_weights
from dualtune.card import BACKENDS_GROUP, backend_names, card_of
from dualtune.errors import ConfigError, EnvironmentFault
from dualtune.optimizer import OptimizerSpec

IGNORE_INDEX = -100  # a label that carries no loss

# The numbers on which the backends must agree, here once; those of the optimizers are in `optimizer.py`.
CLIP_EPS = 1e-6  # gradients are scaled by min(1, max_norm / (norm + CLIP_EPS))
FLOAT16_LOSS_SCALE = 1024.0  # float16 flushes gradients under 6e-8 to zero; the scale is taken out again in float32


WAIT_VARIABLE, WAIT_S = "DUALTUNE_WAIT_S", 600.0


def wait_limit_s() -> float:
    """How long a process waits for the others of its world before they count as hung."""
    return float(os.environ.get(WAIT_VARIABLE, WAIT_S))


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: rows of documents, padded on the right. All arrays are [B, T].

    A row holds its documents one behind another, each with positions from 0; padding has segment 0 and position 0.
    A token sees those before it in its own document and itself, nothing else. More than one document in a row is for
    engines that honour `data.packing`.
    """

    tokens_BT: np.ndarray  # int32
    labels_BT: np.ndarray  # int32, already shifted: labels[b, t] is the token to predict after tokens[b, t]
    segments_BT: np.ndarray  # int32, number of the document inside its row, from 1; 0 is padding
    positions_BT: np.ndarray  # int32, position of the token inside its document
    noise_BT: np.ndarray  # uint32, the token's random key for dropout: a function of (seed, step, document, position)
    weights_BT: np.ndarray | None = None  # float32, the weight of each target's loss, also below 0; None: all are 1

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.labels_BT != IGNORE_INDEX))

    @property
    def total_weight(self) -> float:
        """The sum of the targets' weights: their number where nothing is weighted."""
        weights_BT = self.target_weights_BT
        return float(self.num_targets) if weights_BT is None else float(weights_BT.sum(dtype=np.float64))

    @property
    def target_weights_BT(self) -> np.ndarray | None:
        """float32, the weights with 0 where there is no target, whatever stood there; None: all are 1."""
        if self.weights_BT is None:
            return None
        return np.where(self.labels_BT == IGNORE_INDEX, np.float32(0), self.weights_BT)

    @property
    def num_tokens(self) -> int:
        """Tokens without the padding."""
        return int(np.count_nonzero(self.segments_BT))


def needs_positions(batch: Batch, num_positions: int | None) -> bool:
    """Whether a model has to be told positions: else it counts them from the start of a row to its end.

    Padding may run past the table of a model that has one, which is wrong on torch and unseen on MLX.
    """
    is_wide = num_positions is not None and batch.tokens_BT.shape[1] > num_positions
    return is_wide or int(batch.segments_BT.max()) > 1


@dataclass(frozen=True, slots=True)
class LossSum:
    """The sum of −w·log p over the targets (natural logarithm; w is the target's weight), still on the device, and the
    number of targets."""

    on_device: SupportsFloat
    num_targets: int

    @property
    def loss_sum(self) -> float:
        """The number. Reading it synchronizes the device."""
        return float(self.on_device)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of an optimizer step, still on the device: `float(...)` waits for them, so call it late."""

    loss: SupportsFloat  # the step's Σ −w·log p, divided by the `num_targets` that `forward_backward` was given
    grad_norm: SupportsFloat  # global L2 norm before clipping


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes of device memory (of the process's memory on a CPU)."""

    used_bytes: int
    peak_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    name: str
    kind: str  # "cuda", "metal" or "cpu"
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What was built, for logs and run files. None: the engine has nothing to say of it."""

    model_class: str | None = None
    device: str
    dtype: str  # the compute dtype
    dtype_reason: str
    quantization: str  # of the base, as it lies in memory
    quantization_reason: str
    sharding: str | None = None  # "none", or "full" where each process holds a part of the base
    sharding_reason: str | None = None
    num_parameters: int  # of the base
    adapted_modules: int | None = None
    adapted_weights: Mapping[str, int] | None = None  # how many lie in 4 bits, their parameters and bytes
    trainable_parameters: int
    kernels: str | None = None  # which fast code is used, and where not, why

    def as_json(self) -> dict[str, Any]:
        """What is known, as JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The number of updates made, and the optimizer's slots: tensors in the adapter's names and shapes, float32."""

    step: int
    slots: Mapping[str, Tensors]  # by the names that `dualtune.optimizer` has, such as m and v; empty for plain SGD


@dataclass(frozen=True, slots=True)
class Profile:
    """What the profiler of a framework saw of some work."""

    trace: Path | None  # the file that it wrote; None: there is no profiler here
    note: str  # what opens the file, or why there is none and what to do about it
    seconds: Mapping[str, float]  # of the device (of the processor, on a CPU) by kind of operation; may be empty


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What `Backend.load` needs to build an engine."""

    model_dir: Path
    dtype: str  # "auto", "float32", "bfloat16" or "float16": the compute dtype
    quantization: str  # "auto" (as stored), "none", "nf4", ...
    init: str  # "pretrained" or "random"
    adapter: LoraSpec
    optimizer: OptimizerSpec
    seed: int
    longest: int = 0  # tokens of the longest document that will be shown, where that is known
    kernels: str = "auto"  # "auto", "fused" or "reference"
    sharding: str = "auto"  # "auto", "none" or "full": whether each process of the world holds a part of the base only
    weights: BaseWeights | None = None  # of model_dir, where they were found already

    def base_weights(self) -> BaseWeights | None:
        """Exactly the files to load. None where the weights are drawn."""
        return None if self.init == "random" else self.weights or find_weights(self.model_dir)


class World(Protocol):
    """The processes that train one run together. All of them call the same methods in the same order.

    An engine of such a world sums loss and gradient over its processes in `optim_step`, so adapter, optimizer and
    `StepOutput` are the same in each; everything else here is for the loop. Where a process is gone, EnvironmentFault.
    """

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        ...

    @property
    def size(self) -> int: ...

    def gather(self, data: bytes) -> list[bytes]:
        """What each process has given, by rank; equally many bytes each. Does not wait for the device."""
        ...

    def broadcast(self, data: bytes) -> bytes:
        """What the process of rank 0 has given; the others give as many bytes of anything."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The world of a run in one process."""

    rank: int = 0
    size: int = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data


class Engine(Protocol):
    """A base model with one LoRA adapter on a device. A fresh engine's adapter is `init_adapter` of its seed.

    Dropout acts in `forward_backward`, and in `target_logprobs` where it is asked for; its masks are a function of the
    batch's `noise_BT`.
    """

    @property
    def description(self) -> EngineDescription: ...

    def evaluate(self, batch: Batch) -> LossSum: ...

    def forward_backward(self, batch: Batch, *, num_targets: float) -> None:
        """Add the gradient of Σ −w·log p over the targets of this micro-batch, divided by `num_targets`.

        `num_targets` is the caller's number for the whole step: how many targets it has, or the sum of their weights.
        """
        ...

    def target_logprobs(self, batch: Batch, *, dropout: bool = False) -> np.ndarray:
        """log p of the label of every target, float32 [B, T]; 0 where there is no target. Weights do not matter.

        Computed as the loss is: not from logits [B, T, V] where the loss does without them. With `dropout`, by the
        masks that `forward_backward` has for this batch: these are the numbers whose gradient it adds. Where the base
        is split among processes, all of them call it equally often.
        """
        ...

    def optim_step(self, *, lr: float, max_grad_norm: float | None) -> StepOutput:
        """Clip by the global norm, update the weights as the request's optimizer does, zero the gradients.

        In a world of several processes the gradient is the sum of theirs.

        Where the step's loss or norm is not finite, nothing is updated: weights, slots and count stay bitwise as
        they were, and the output reports the loss and norm as they are. The device decides this; nobody waits for it.
        """
        ...

    def adapter_state(self) -> Tensors: ...

    def neutral_state(self) -> Tensors:
        """The adapter of a fresh engine, with which the model computes what its base computes alone."""
        ...

    def load_adapter_state(self, state: Tensors) -> None:
        """Replace the adapter. Names and shapes must be exactly those of `adapter_state()`; ValueError otherwise."""
        ...

    def optimizer_state(self) -> OptimizerState: ...

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Replace it. ValueError unless slots, names and shapes are those of `optimizer_state()`."""
        ...

    def logprobs(self, batch: Batch) -> np.ndarray:
        """log p of every vocabulary entry after every token, float32 [B, T, V]. For verification of small batches."""
        ...

    def generate(self, prompt: np.ndarray, *, choose: Callable[[np.ndarray], int | None]) -> Iterator[int]:
        """Continue a prompt (int32 [T]): yield `choose(logits_V float32)` until it answers None.

        The caller's `choose` holds temperature, random stream, stop tokens and length, so that both backends sample
        alike.
        """
        ...

    def save_merged(self, path: Path) -> None:
        """Write a Hugging Face model directory with W + scale·B·A in place of W. Refuses a quantized base."""
        ...


class Backend(Protocol):
    name: str

    def capabilities(self) -> Mapping[str, frozenset[Any]]:
        """The values honoured for each key of BACKEND_KEYS. A key that is absent is honoured at its default alone."""
        ...

    def devices(self) -> list[DeviceInfo]: ...

    def memory(self) -> MemoryStats: ...

    def reset_peak_memory(self) -> None: ...

    def load(self, request: LoadRequest) -> Engine: ...

    def world(self) -> World:
        """The processes that a launcher has started this one with; `Alone` without a launcher. Joined at first call."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done everything that it was given. For measurements; training never waits so."""
        ...

    def matmul(self, size: int, dtype: str) -> Callable[[], object]:
        """A function that multiplies two [size, size] matrices of an engine's dtype and waits for the product."""
        ...

    def profile(self, work: Callable[[], object], directory: Path) -> Profile:
        """Call `work` once under the framework's profiler, which writes its trace into the directory.

        Where there is no profiler, `work` is not called and the profile says why.
        """
        ...


def get_backend(name: str, device: str = "auto") -> Backend:
    """Import a backend by its entry-point name and build it for a device ("auto", "cpu", "cuda").

    The entry point is a callable `(device: str) -> Backend`. ConfigError for an unknown name; EnvironmentFault, with
    the line that installs it, if it cannot be imported.
    """
    for point in entry_points(group=BACKENDS_GROUP, name=name):
        try:
            factory = point.load()
        except ImportError as error:
            raise EnvironmentFault(
                f"Backend '{name}' could not be imported: {error}. Install it with: {card_of(name).package.command}"
            ) from error
        return factory(device)
    raise ConfigError(f"backend: got '{name}', allowed: {', '.join(backend_names())}")


def check_state(current: Tensors, given: Tensors, what: str) -> None:
    """ValueError unless both dictionaries have the same names and shapes: the contract of the `load_*_state` verbs."""
    missing, foreign = sorted(current.keys() - given.keys()), sorted(given.keys() - current.keys())
    reshaped = [n for n in current.keys() & given.keys() if current[n].shape != given[n].shape]
    for problem, names in (("missing", missing), ("not in this model", foreign), ("of another shape", reshaped)):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ValueError(f"{what}: tensors {problem}: {shown}")


def check_slots(optimizer: OptimizerSpec, adapter: Tensors, state: OptimizerState) -> None:
    """ValueError unless the state has the slots of this optimizer, each with the adapter's names and shapes."""
    if {*state.slots} != {*optimizer.entry.slots}:
        got, needed = (", ".join(sorted(slots)) or "none" for slots in (state.slots, optimizer.entry.slots))
        raise ValueError(f"optimizer {optimizer.name}: got the slots {got}, it has {needed}")
    for slot, tensors in state.slots.items():
        check_state(adapter, tensors, f"optimizer {slot}")


def check_mergeable(description: EngineDescription) -> None:
    """ConfigError if the base is quantized: rounding it again would erase what the adapter adds."""
    if description.quantization != "none":
        raise ConfigError(
            f"merge: the base is quantized ({description.quantization}), and merging into packed weights loses the "
            "adapter. Load the plain base with model.quantization: none"
        )

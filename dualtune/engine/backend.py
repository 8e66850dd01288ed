"""The boundary between the training loop and a machine: all that the core knows about a framework.

The loop owns data, schedule, checkpoints, hooks and logging. An engine owns the model, the adapter on its device, the
optimizer and the kernels. Only NumPy arrays, numbers and paths cross; base weights never do.

To add a backend, implement `Backend` and `Engine`, register the backend object under the entry-point group
`dualtune.backends`, and run the conformance suite (`dualtune.engine.testing.conformance`).
`dualtune.engine.testing.numpy_engine` is a small complete example.

Shape suffixes: B rows of the micro-batch, T tokens of a row, D hidden size, V vocabulary.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, TypeVar, cast

import numpy as np

from dualtune.base.errors import ConfigError, DualtuneError, EnvironmentFault
from dualtune.base.fields import shown
from dualtune.base.plugins import points_of
from dualtune.base.world import World
from dualtune.engine.adapter_bank import AdapterBank
from dualtune.engine.card import BACKENDS_GROUP, KEEP_ALL, ActivationCheckpointing, backend_names, card_of
from dualtune.engine.decoding import Decoding, GenerationCache
from dualtune.model.adapter import AdapterSpec, Tensors
from dualtune.model.base_model import find_weights
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.update_rules import Settings
from dualtune.model.weight_files import BaseWeights

if TYPE_CHECKING:
    from dualtune.config import Config

IGNORE_INDEX = -100  # a label that carries no loss

# Constants that all backends share; those of the optimizers are in `optimizer.py`.
CLIP_EPS = 1e-6  # gradients are scaled by min(1, max_norm / (norm + CLIP_EPS))
FLOAT16_LOSS_SCALE = 1024.0  # float16 flushes gradients under 6e-8 to zero; gradients are unscaled in float32
# Nats per token by which a document's loss may change from rounding alone when its row gets another shape.
NOISE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: rows of documents, padded on the right. All arrays but the hidden states are [B, T].

    A row holds its documents one after another, each with positions from 0; padding has segment 0 and position 0.
    A token attends to itself and to the earlier tokens of its own document, nothing else. Only engines that honour
    `data.packing` get more than one document in a row.

    A document that begins as another one of its row does may lack this beginning, which is then computed once: it has a
    parent, its positions begin after what is shared, and its tokens see the parent's tokens before that position, too.
    An engine that cannot do this raises `CannotShare`.
    """

    tokens_BT: np.ndarray  # int32
    # int32, already shifted: labels[b, t] is the token to predict after tokens[b, t]. Or [B, T, K]: K distinct tokens
    # that have log-probabilities and loss weights of their own; a token that is not a target has IGNORE_INDEX for each.
    labels_BT: np.ndarray
    segments_BT: np.ndarray  # int32, number of the document inside its row, from 1; 0 is padding
    positions_BT: np.ndarray  # int32, position of the token inside its document
    dropout_seeds_BT: np.ndarray  # uint32, the token's dropout seed: a function of (seed, step, document, position)
    weights_BT: np.ndarray | None = None  # float32, loss weight of each label, may be negative; None: all are 1
    # What `Engine.hidden_states` returns for these tokens, 0 for padding. An engine that gets it does not compute it.
    hidden_BTD: np.ndarray | None = None
    # For the core, engines have no use for it: which documents of the run are in each row, in the order of segments.
    documents: tuple[tuple[int, ...], ...] = ()
    # int32, the segment of the token's parent, which has no parent itself; 0: it has none. None: no document has one.
    parents_BT: np.ndarray | None = None
    # Every log p of these tokens, and so their loss, is that of softmax(logits / temperature).
    temperature: float = 1.0
    # float32 [B, T], the weights of targets in the loss of `dualtune.engine.routing`, where those of the labels are an
    # objective's slopes; None: those of the labels.
    routing_weights_BT: np.ndarray | None = None

    @property
    def is_target_BT(self) -> np.ndarray:
        """Whether there is a target after each token, bool [B, T]."""
        return (self.labels_BT if self.labels_BT.ndim == 2 else self.labels_BT[..., 0]) != IGNORE_INDEX

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.is_target_BT))

    @property
    def total_weight(self) -> float:
        """The sum of the loss weights of the labels; without loss weights, their number."""
        weights_BT = self.target_weights_BT
        if weights_BT is None:
            return float(np.count_nonzero(self.labels_BT != IGNORE_INDEX))
        return float(weights_BT.sum(dtype=np.float64))

    @property
    def target_weights_BT(self) -> np.ndarray | None:
        """The loss weights in float32, of the shape of the labels, with 0 where there is no target; None: all are 1."""
        if self.weights_BT is None:
            return None
        return np.where(self.labels_BT == IGNORE_INDEX, np.float32(0), self.weights_BT)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of its documents, without padding; those that documents share count for each."""
        number = self.num_computed
        if self.parents_BT is not None:
            is_first_BT = np.diff(self.segments_BT, axis=1, prepend=0) != 0
            number += int(self.positions_BT[is_first_BT & (self.parents_BT > 0)].sum())
        return number

    @property
    def num_computed(self) -> int:
        """The number of tokens that are computed, without padding."""
        return int(np.count_nonzero(self.segments_BT))


def with_weights(batch: Batch, weights_BT: np.ndarray) -> Batch:
    """Return a micro-batch with these loss weights, without the labels that have none. Routers keep those it had."""
    has_weight_BT = weights_BT != 0
    if has_weight_BT.ndim == 3:  # of several labels, all or none are there
        has_weight_BT = np.broadcast_to(has_weight_BT.any(-1, keepdims=True), weights_BT.shape)
    labels_BT = np.where(has_weight_BT, batch.labels_BT, IGNORE_INDEX)
    return replace(batch, labels_BT=labels_BT, weights_BT=weights_BT, routing_weights_BT=routing_weights(batch))


def routing_weights(batch: Batch) -> np.ndarray:
    """Return the weights by which the targets of a micro-batch count in the loss of its routers, float32 [B, T]."""
    if batch.routing_weights_BT is not None:
        return batch.routing_weights_BT
    weights_BT = batch.target_weights_BT
    return batch.is_target_BT.astype(np.float32) if weights_BT is None else weights_BT


class CannotShare(Exception):
    """An engine, with its model, cannot compute documents that have a parent."""


def needs_positions(batch: Batch, num_positions: int | None) -> bool:
    """Return whether the model needs explicit positions; without them it counts from the start of each row.

    Padding may exceed the position table of a model that has one, which fails on torch and goes unnoticed on MLX.
    """
    is_wide = num_positions is not None and batch.tokens_BT.shape[1] > num_positions
    return is_wide or int(batch.segments_BT.max()) > 1


@dataclass(frozen=True, slots=True)
class LossSum:
    """The sum of −w·ln p over the targets, w their loss weights, still on the device; and the number of targets."""

    on_device: SupportsFloat
    num_targets: int

    @property
    def loss_sum(self) -> float:
        """The sum as a number. Reading it synchronizes the device."""
        return float(self.on_device)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of an optimizer step, still on the device: `float(...)` synchronizes it, so call it late."""

    loss: SupportsFloat  # Σ −w·log p of the step, divided by the `divisor` passed to `forward_backward`
    grad_norm: SupportsFloat  # global L2 norm before clipping
    metrics: Mapping[str, SupportsFloat] = field(default_factory=lambda: {})  # others, for the row of the step


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes of device memory (on a CPU: of the process)."""

    used_bytes: int
    peak_bytes: int
    total_bytes: int
    cached_bytes: int | None = None  # that the allocator keeps for later, not part of used_bytes; None: not known


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device as the framework sees it."""

    name: str
    kind: str  # "cuda", "metal" or "cpu"
    total_bytes: int
    index: int = 0  # among the devices of its kind


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What the engine built, for logs and run files. None: the engine does not report it."""

    model_class: str | None = None
    device: str
    dtype: str  # the compute dtype
    dtype_reason: str
    quantization: str  # of the base in memory
    quantization_reason: str
    sharding: str | None = None  # "none", or "full": each process holds a part of the base
    sharding_reason: str | None = None
    num_parameters: int  # of the base
    adapted_modules: int | None = None
    adapted_as: str | None = None  # which layers replace the default targets, and why; None: those that were asked for
    adapted_weights: Mapping[str, int] | None = None  # how many are stored in 4 bits, their parameters and bytes
    trained_beside: Mapping[str, int] | None = None  # parameters of the base that are trained too, by module
    trainable_parameters: int
    kernels: str | None = None  # which fast kernels are used, and why others are not
    checkpointing: str | None = None  # which activations are recomputed
    checkpointing_reason: str | None = None
    layers_below_adapter: int | None = None  # of the base: what leaves them is a function of the tokens alone
    streaming: Mapping[str, int] | None = None  # layers of the base, how many are on the device, their bytes there and
    # on the host; None: all are on the device
    threads: int | None = None  # that compute on a CPU, if the rounding depends on their number

    def as_json(self) -> dict[str, Any]:
        """Return the fields that are known, as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The number of updates done, and the slots: float32 tensors with the names of the adapter.

    In the shapes that `OptimizerSpec.slot_shapes` gives, mostly those of the adapter.
    """

    step: int
    slots: Mapping[str, Tensors]  # by their names in `dualtune.model.optimizer`, such as m and v; empty for plain SGD


@dataclass(frozen=True, slots=True)
class Profile:
    """The result of a framework's profiler."""

    trace: Path | None  # the trace file; None: no profiler is available
    note: str  # which program opens the file, or why there is none and what to do about it
    seconds: Mapping[str, float]  # of the device (or the CPU), by kind of operation; may be empty
    # The most bytes in tensors at once; None: not counted, because `Backend.memory` counts them all the time.
    peak_bytes: int | None = None


# The fields of a LoadRequest that are values of a config: a new key for engines is a field, and a line here.
CONFIG_KEYS = {
    "dtype": "model.dtype", "quantization": "model.quantization", "init": "model.init", "kernels": "model.kernels",
    "seed": "run.seed", "deterministic": "run.deterministic", "sharding": "memory.sharding",
    "resident_layers": "memory.resident_layers_or_none", "memory_limit_bytes": "memory.limit_bytes",
    "label_smoothing": "train.label_smoothing", "router_aux_loss_coef": "train.router_aux_loss_coef",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What `Backend.load` needs to build an engine."""

    model_dir: Path
    dtype: str  # "auto", "float32", "bfloat16" or "float16": the compute dtype
    quantization: str  # "auto" (as stored), "none", "nf4", ...
    init: str  # "pretrained" or "random"
    adapter: AdapterSpec
    optimizer: OptimizerSpec
    seed: int
    longest: int = 0  # tokens of the longest document the engine will get; 0: not known
    kernels: str = "auto"  # "auto", "fused", "reference", or "graph": as auto, and recorded
    pieces: frozenset[str] | None = None  # of the card's, to use alone, however small the model; None: all
    sharding: str = "auto"  # "auto", "none" or "full": each process of the world holds only a part of the base
    checkpointing: ActivationCheckpointing = KEEP_ALL
    deterministic: bool = False  # the same bits each time, on devices that do not compute so by themselves
    resident_layers: int | None = None  # how many layers of the base are on the device at once; None: all
    memory_limit_bytes: int | None = None  # that the run may use; refused by backends that do not honour memory.limit
    label_smoothing: float = 0.0  # in training, the share of −log p averaged over the vocabulary in a target's loss
    router_aux_loss_coef: float | None = None  # of the loss of `dualtune.engine.routing`; None: routers are not watched
    reused_bytes: int | None = None  # that a step allocates and frees, by the plan; None: there is no plan
    weights: BaseWeights | None = None  # of model_dir, if they were found already
    shared_base: SharedBase | None = None  # where the next engine finds the base of this one; None: it loads its own

    @classmethod
    def of(cls, config: Config, **others: Any) -> LoadRequest:
        """Return what a config asks of an engine. `others`: the fields that are not values of a config."""
        return cls(**{name: attrgetter(key)(config) for name, key in CONFIG_KEYS.items()}, **others)

    def base_weights(self) -> BaseWeights | None:
        """Return exactly the files to load. None if the weights are initialized at random."""
        return None if self.init == "random" else self.weights or find_weights(self.model_dir)

    def shared(self, load: Callable[[], Base]) -> Base:
        """Return the base that `load` returns, from `shared_base` if it has it."""
        return load() if self.shared_base is None else self.shared_base.get(self._base_key(), load)

    def _base_key(self) -> Hashable:
        """Return what the base depends on; None if it cannot be shared, because it is trained or moves while it is."""
        if self.adapter.trains_base or self.resident_layers is not None:
            return None
        seed = self.seed if self.init == "random" else None
        return self.model_dir, self.dtype, self.quantization, self.init, seed, self.sharding


def state_size(engine: Engine) -> int:
    """Return how many numbers `adapter_state()` has: those that are trained, and a start that is kept."""
    return sum(map(math.prod, engine.adapter_shapes.values()))


# A function of log p of every label that returns their loss weights: float32, of the shape of the labels.
Weigh = Callable[[np.ndarray], np.ndarray]


class Engine(Protocol):
    """A base model with one LoRA adapter on a device. A new engine has the adapter that its spec's `initial` gives
    for its seed. A start that is kept (`AdapterSpec.split`) never changes: gradient and optimizer state leave it out.

    If the spec trains the model whole, "adapter" below means all parameters of the model, by their own names: a new
    engine has those of the base, which `neutral_state` reads again, and `save_merged` writes the trained ones.

    Dropout is active in `forward_backward`, and in `target_logprobs` with `dropout`; its masks are a function of the
    batch's `dropout_seeds_BT`.
    """

    @property
    def description(self) -> EngineDescription: ...

    def evaluate(self, batch: Batch) -> LossSum: ...

    def forward_backward(self, batch: Batch, *, divisor: float) -> None:
        """Add the gradient of Σ −w·log p over the targets of this micro-batch, divided by `divisor`.

        `divisor` is that of the whole step: its number of targets, or the sum of their loss weights.
        """
        ...

    def forward_backward_of(self, batch: Batch, weigh: Weigh, *, divisor: float) -> np.ndarray:
        """Do the same with the loss weights that `weigh` returns for the log-probabilities; return these.

        They are those of `target_logprobs` with dropout. Equal to a call of that and one of `forward_backward`, in one
        forward pass where the engine can. A label whose weights are 0 takes no part in the backward pass. The weights
        of the batch itself say which labels may have one: an engine is faster where that is right.
        """
        ...

    def gradient(self) -> Tensors:
        """Return a copy of what `forward_backward` has added since the last update, float32, by the adapter's names.

        Of this process alone, and not clipped: `optim_step` adds up and clips. Synchronizes, and changes nothing.
        """
        ...

    def add_gradient(self, gradient: Tensors) -> None:
        """Add one that `gradient` has returned. Where nothing was added since the last update, that returns it again,
        bitwise.

        ValueError unless names and shapes are those of what is trained.
        """
        ...

    def target_logprobs(self, batch: Batch, *, dropout: bool = False) -> np.ndarray:
        """Return log p of every label, float32, of the shape of the labels; 0 elsewhere. Loss weights are not applied.

        Computed the same way as the loss: without logits [B, T, V] if the loss needs none. `dropout` applies the same
        masks as `forward_backward` does for this batch, so the gradient added there is that of these numbers. If the
        base is sharded, all processes must call it equally often.
        """
        ...

    def hidden_states(self, batch: Batch) -> np.ndarray:
        """Return the hidden states after `layers_below_adapter` layers, [B, T, D], as `Batch.hidden_BTD` takes them.

        In the dtype in which they are computed; bfloat16, which NumPy does not have, as its bits in uint16. Only for
        engines that honour train.activation_cache, and only where that number is not 0.
        """
        ...

    def optim_step(self, *, lr: float, max_grad_norm: float | None) -> StepOutput:
        """Clip by the global norm, update the weights with the request's optimizer, zero the gradients.

        With several processes, the gradient is the sum over all of them.

        If the loss or norm of the step is not finite, nothing is updated: weights, slots and count stay bitwise equal,
        and the output reports the loss and norm as they are. The device decides this, without synchronizing.
        """
        ...

    def set_hyperparameters(self, changes: Settings) -> None:
        """Change the optimizer's hyperparameters, from the next update on, to these and the defaults of the others.

        Its slots and count stay. ConfigError for one that the optimizer does not have.
        """
        ...

    def set_checkpointing(self, checkpointing: ActivationCheckpointing) -> None:
        """Change which activations are recomputed, from the next micro-batch on. ConfigError if this engine cannot.

        A new engine does what its request says. No value changes a gradient, not even in its last bit, and
        `description` names the current one.
        """
        ...

    @property
    def adapter_shapes(self) -> Mapping[str, tuple[int, ...]]: ...  # of `adapter_state()`, by name

    def adapter_state(self) -> Tensors: ...

    def neutral_state(self) -> Tensors:
        """Return an adapter with which the model computes the same as its base: that of a new engine, unless its start
        is kept (`AdapterSpec.keeps_start`)."""
        ...

    def discard(self) -> None:
        """Drop what an interrupted step has left: gradient, loss, dropout seeds, and products that layers wait for.

        Adapter, optimizer and count stay, and cached device memory is freed. A method may have raised anywhere before;
        the next step is bitwise that of an engine in which nothing was interrupted.
        """
        ...

    def load_adapter_state(self, state: Tensors) -> None:
        """Replace the adapter. Names and shapes must be exactly `adapter_shapes`; ValueError otherwise."""
        ...

    def optimizer_state(self) -> OptimizerState: ...

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Replace the optimizer state. ValueError unless slots, names and shapes match `optimizer_state()`."""
        ...

    def most_probable(self, batch: Batch) -> np.ndarray:
        """Return the most probable token at every target, the first of equals, int32 [B, T]; -1 elsewhere."""
        ...

    def top_logprobs(self, batch: Batch, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the k most probable tokens at every target, int32 [M, k], and their log p, float32 [M, k].

        M targets in the order of the rows; the most probable token first, of equals the one with the lower number. `k`
        is at most the size of the vocabulary. Without logits [B, T, V] if the loss needs none.
        """
        ...

    def logprobs(self, batch: Batch) -> np.ndarray:
        """Return log p of the whole vocabulary after every token, float32 [B, T, V]. To verify small batches."""
        ...

    def generate(
        self, prompt: np.ndarray, *, choose: Callable[[np.ndarray], int | None], cache: GenerationCache | None = None
    ) -> Iterator[int]:
        """Continue a prompt (int32 [T]): yield `choose(logits_V float32)` until it returns None.

        Temperature, random numbers, stop tokens and length are up to `choose`, so all backends sample alike. With a
        cache, what it shares with the prompt is not computed again, and it then holds the prompt and what was yielded.
        """
        ...

    def decoding(self, bank: AdapterBank | None = None) -> Decoding:
        """Return a Decoding without rows, for the present adapter. CannotBatch if the cache holds only one text.

        With a bank each row computes with one of its adapters, or with none, and the present one takes no part.
        CannotBatch if they do not fit the model, or if this engine cannot leave its own out. The bank's numbers are on
        the device from the first row on, as long as the Decoding is referred to.
        """
        ...

    def scoring(self, bank: AdapterBank, adapters: Sequence[int]) -> AbstractContextManager[None]:
        """Let `target_logprobs` and `top_logprobs` compute the rows of batches with adapters of a bank, in the block.

        `adapters`: each row's by its number, or NO_ADAPTER; batches have as many rows. CannotBatch as for `decoding`,
        and as there the present adapter takes no part. A Decoding that is kept has the bank's numbers on the device.
        """
        ...

    def save_merged(self, path: Path) -> None:
        """Write a Hugging Face model directory with W + scale·B·A in place of W. Refuses a quantized base."""
        ...


class Backend(Protocol):
    """A framework on one device: what it can do, what its device has, and the engines that it loads."""

    name: str

    def capabilities(self) -> Mapping[str, frozenset[Any]]:
        """Return the values honoured for each key of BACKEND_KEYS.

        Of an absent key the default is honoured; of train.schedule all that the core computes by itself.
        """
        ...

    def devices(self) -> list[DeviceInfo]:
        """Return the visible devices, first the one that this backend computes on."""
        ...

    def memory(self) -> MemoryStats:
        """Return the memory in use now. The timeline of a run calls it several times a step: it must take microseconds.

        It does not synchronize: on a GPU it is the view of the allocator, while queued work may still run.
        """
        ...

    def reset_peak_memory(self) -> None: ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether the error, raised by this backend or NumPy, says that a smaller micro-batch could succeed.

        Memory could not be allocated, or the system has ended the work because it took the device for too long.
        """
        ...

    def is_device_fault(self, error: BaseException) -> bool:
        """Return whether the error says that this process can use the device no more. A shortage of memory is none."""
        ...

    def load(self, request: LoadRequest) -> Engine: ...

    def world(self) -> World:
        """Return the processes started together by a launcher, joined at the first call; `Alone` without a launcher."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished all its work. For measurements; training never calls it."""
        ...

    def matmul(self, size: int, dtype: str) -> Callable[[], object]:
        """Return a function that multiplies two [size, size] matrices of an engine's dtype and synchronizes."""
        ...

    def profile(self, work: Callable[[], object], directory: Path) -> Profile:
        """Call `work` once under a profiler that writes its trace into the directory; without one, only say why."""
        ...


def get_backend(name: str, device: str = "auto") -> Backend:
    """Import a backend by its entry-point name and build it for a device ("auto", "cpu", "cuda").

    The entry point is a callable `(device: str) -> Backend`. ConfigError for an unknown name; EnvironmentFault, with
    the command that installs it, if it cannot be imported.
    """
    return backend_factory(name)(device)


def backend_factory(name: str) -> Callable[[str], Backend]:
    """Import a backend without choosing a device, which building it does for the whole process. Errors as above."""
    point = next((point for point in points_of(BACKENDS_GROUP) if point.name == name), None)
    if point is None:
        raise ConfigError(f"backend: got '{name}', allowed: {', '.join(backend_names())}")
    try:
        return cast(Callable[[str], Backend], point.load())
    except ImportError as error:
        raise EnvironmentFault(
            f"Backend '{name}' could not be imported: {error}. Install it with: {card_of(name).package.command}"
        ) from error


# ----------------------------------------------------------------------------------------------------------------------
# What all engines check alike: states that fit, a base that loads and can be merged, layers below the adapter.

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name


def check_state(shapes: Shapes, tensors: Tensors, title: str) -> None:
    """Raise ValueError unless the tensors have these names and shapes: the contract of the `load_*_state` methods."""
    missing, foreign = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    reshaped = [n for n in shapes.keys() & tensors.keys() if tuple(shapes[n]) != tensors[n].shape]
    for problem, names in (("missing", missing), ("not in this model", foreign), ("of another shape", reshaped)):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ValueError(f"{title}: tensors {problem}: {shown}")


def check_slots(optimizer: OptimizerSpec, trained: Shapes, state: OptimizerState) -> None:
    """Raise ValueError unless the state has the slots of this optimizer for tensors of these shapes.

    A slot that no tensor has may be absent.
    """
    shapes = optimizer.slot_shapes(trained)
    if not {slot for slot, own in shapes.items() if own} <= {*state.slots} <= {*shapes}:
        got, needed = (", ".join(sorted(slots)) or "none" for slots in (state.slots, shapes))
        raise ValueError(f"optimizer {optimizer.name}: got the slots {got}, it has {needed}")
    for slot, own in shapes.items():
        check_state(own, state.slots.get(slot, {}), f"optimizer {slot}")


def weighed_in_two_passes(engine: Engine, batch: Batch, weigh: Weigh, divisor: float) -> np.ndarray:
    """Do `forward_backward_of` where an engine cannot in one forward pass."""
    logprobs_BT = engine.target_logprobs(batch, dropout=True)
    engine.forward_backward(with_weights(batch, weigh(logprobs_BT)), divisor=divisor)
    return logprobs_BT


def check_mergeable(description: EngineDescription) -> None:
    """Raise ConfigError if the base is quantized: rounding it again would erase what the adapter adds."""
    if description.quantization != "none":
        raise ConfigError(
            f"merge: the base is quantized ({description.quantization}), and merging into packed weights loses the "
            "adapter. Load the plain base with model.quantization: none"
        )


def merge_base(request: LoadRequest) -> BaseWeights:
    """Return the files of the base into which an adapter is merged. ConfigError if it is in no file."""
    weights = request.base_weights()
    if weights is None:
        raise ConfigError("merge: the base was initialized at random (model.init: random), and is in no file")
    return weights


def most_probable_first(tokens_Mk: np.ndarray, logprobs_Mk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both arrays in the order of `Engine.top_logprobs`: by log-probability, then by token."""
    order_Mk = np.lexsort((tokens_Mk, -logprobs_Mk), axis=-1)
    return np.take_along_axis(tokens_Mk, order_Mk, -1), np.take_along_axis(logprobs_Mk, order_Mk, -1)


def num_layers_below(layers: Iterable[Iterable[object]], adapted: Iterable[object], head: object) -> int:
    """Return how many layers, given by their modules, lie below the lowest one with an adapted module.

    There are none if anything but a layer or the output head is adapted.
    """
    adapted_ids: Set[int] = {id(module) for module in adapted}
    in_layers = [{id(module) for module in layer} & adapted_ids for layer in layers]
    if adapted_ids - {id(head)} - set().union(*in_layers):
        return 0
    return next((i for i, ids in enumerate(in_layers) if ids), len(in_layers))


def returns_more_than_states(layer: str) -> ConfigError:
    """Return the error for a model whose layers return more than hidden states. `layer` names their kind."""
    return ConfigError(
        f"train.activation_cache: got disk, but the layers of this model ({layer}) return more than their hidden "
        "states; allowed: none"
    )


@contextmanager
def loading(backend: Backend, model_dir: Path, library: str) -> Generator[None]:
    """Raise EnvironmentFault in place of what a library raises on a model: of any class, for what it does not check.

    A shortage of memory and a fault of the device are not the model's, and stay as they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DualtuneError) or backend.is_out_of_memory(error) or backend.is_device_fault(error):
            raise
        text = " ".join(str(error).split())
        reason = shown(re.sub(r"[^\s'\"]*/dualtune-model-\w+", str(model_dir), text), 300)  # of `staged`
        reason = reason.removesuffix(".")
        kind = "" if isinstance(error, (OSError, ValueError)) and reason else f"{type(error).__name__}: "
        raise EnvironmentFault(
            f"{model_dir}: {library} cannot load this model: {kind}{reason}. If its config.json was changed, take the "
            "publisher's; the other backend may know more models"
        ) from error


# ----------------------------------------------------------------------------------------------------------------------
# The base model of several engines, one after another: it is loaded once.

Base = TypeVar("Base")


class SharedBase:
    """Keeps the base model of an engine for the next one. One engine at a time; each frees what it adds to the base."""

    def __init__(self) -> None:
        self.num_loaded = 0
        self._key: Hashable = None
        self._base: Any = None

    def get(self, key: Hashable, load: Callable[[], Base]) -> Base:
        """Return what `load` returns, without calling it if it has returned this before. None as a key keeps nothing.

        What was kept for another key is freed first, so that there is never room needed for two.
        """
        is_kept = key is not None and key == self._key
        if not is_kept:
            self._key = self._base = None
        gc.collect()  # an engine is part of reference cycles
        if is_kept:
            return cast(Base, self._base)
        base = load()
        self.num_loaded += 1
        if key is not None:
            self._key, self._base = key, base
        return base

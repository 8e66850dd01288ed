"""A backend's card: everything that the core wants to know of a backend before its framework is imported.

A package registers its card under the entry-point group `dualtune.cards`, by the same name as its backend under
`dualtune.backends`. Importing the module of a card must stay cheap: `check-gpu` reads every card. A backend without a
card can only be chosen by name, has no memory estimate, and cannot be launched in several processes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any, Literal

from dualtune.base.checks import Check
from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.base.plugins import points_of
from dualtune.model.merge_rounding import ROUNDINGS
from dualtune.model.methods import INITS

# ----------------------------------------------------------------------------------------------------------------------
# Activation checkpointing: what the backward pass computes again instead of keeping it from the forward pass.
#
# Chen et al., Training deep nets with sublinear memory cost, arXiv 1604.06174. The gradients are bitwise the same.

LAYERS = "{layers: …}"  # in a card: any mapping as the value of memory.checkpointing


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """The first `layers` layers of the model, in segments of `every`: a segment keeps only its input.

    The first ones, because the peak of memory is at the end of the forward pass, when the last layers are still needed
    anyway. Time depends on the number of recomputed layers, hardly on the length of a segment.
    """

    layers: int | Literal["all"] = 0  # "all": all but the last, whose recomputation would save nothing
    every: int = 1
    adapter_inputs: bool = False  # recompute only the adapters' inputs, from what other operations keep anyway
    offload: bool = False  # the inputs of segments wait in host memory
    reason: str = field(default="as configured", compare=False)

    def num_recomputed(self, num_layers: int) -> int:
        """Return how many layers of a model with `num_layers` are recomputed. ConfigError if it has too few."""
        if self.layers == "all":
            return num_layers - 1
        if self.layers > num_layers:
            raise ConfigError(
                f"memory.checkpointing: got {self.layers} layers, but the model has {num_layers}; allowed: 1 to "
                f"{num_layers}, or full"
            )
        return self.layers

    def segments(self, num_layers: int) -> list[range]:
        """Return the recomputed layers, segment by segment, from the first."""
        end = self.num_recomputed(num_layers)
        return [range(start, min(start + self.every, end)) for start in range(0, end, self.every)]

    def describe(self, num_layers: int) -> str:
        """Return what is recomputed in a model with `num_layers`, for logs."""
        if self.adapter_inputs:
            return "the adapters' inputs are recomputed"
        if not (recomputed := self.num_recomputed(num_layers)):
            return "none"
        at_once = f", {self.every} at a time" if self.every > 1 else ""
        on_host = ", from inputs in host memory" if self.offload else ""
        return f"{recomputed} of {num_layers} layers are recomputed{at_once}{on_host}"


KEEP_ALL = ActivationCheckpointing()

# ----------------------------------------------------------------------------------------------------------------------
SIZE = "a size such as 12GB"  # any size as the value of memory.limit
NAMES = "a list of names"  # any list that is not empty as the value of a key in `WITH_NAMES`
INSTALLED = "one of another package"  # the name of anything that its package has registered by an entry point
NUMBER = "a number such as 2"  # any number as the value of a key in `WITH_NUMBERS`

# What an engine honours that does all that both of ours do: a card adds what its own does beside it.
BY_BOTH: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "model.init": ("pretrained", "random"),
        "model.kernels": ("auto", "fused", "reference"),
        "adapter.method": ("lora", "dora", "full"),
        "adapter.init": INITS,
        "adapter.merge_for": ("none", *ROUNDINGS),
        "adapter.master_weights": ("float32", "bfloat16"),
        "adapter.train_modules": ((), NAMES),
        "adapter.train_rows": ((), NAMES),
        "adapter.bias": ("none", "all", "lora_only"),
        "data.packing": (False, True),
        "train.optimizer": ("adamw", "adamw_8bit", "sgd", "lion", "lion_8bit", "adafactor", "muon", INSTALLED),
        "train.schedule": ("constant", "linear", "cosine", "schedule_free"),
        "train.average": ("none", "ema", "tail"),
        "train.lora_plus_ratio": (None, NUMBER),
        "train.label_smoothing": (0.0, NUMBER),
        "train.router_aux_loss_coef": (None, NUMBER),
        "train.embedding_learning_rate": (None, NUMBER),
        "train.activation_cache": ("none", "disk"),
        "memory.checkpointing": ("auto", "none", "adapter_inputs", "full", LAYERS),
        "memory.resident_layers": ("all", NUMBER),
        "memory.limit": ("auto", SIZE),
        "run.deterministic": (False, True),
    }
)

BACKENDS_GROUP, CARDS_GROUP = "dualtune.backends", "dualtune.cards"

# The functions of a card take types that this file must not import: a `Machine` of dualtune.engine.machine, the
# `Decoder` and the `Ask` of dualtune.engine.memory. Each function annotates its own types.
Rows = Callable[[Any], Iterable[Check]]
Parts = Callable[[Any, Any], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device that a backend computes on."""

    kind: str  # as in `DeviceInfo`
    auto_dtype: str  # for model.dtype: auto
    dtypes: tuple[str, ...] = ()  # allowed for model.dtype
    quantizations: tuple[str, ...] = ("none",)  # allowed for model.quantization
    four_bit: str | None = None  # the quantization to suggest when memory is short
    offloads: tuple[str, ...] = ()  # allowed for memory.offload, besides auto and none
    records_graphs: bool = False  # for model.kernels: graph
    # Fast pieces that only this device has, with the quantization of a base on which each is used.
    pieces: Mapping[str, str] = field(default_factory=lambda: {})
    offloads_optimizer: bool = False  # for hybrid.offload: it has memory of its own
    enforces_limit: bool = False  # whether an allocation beyond memory.limit fails; elsewhere only the plan keeps it
    remark: str = ""  # shown when `--platform auto` chooses this device, such as "which is slow"


@dataclass(frozen=True, slots=True)
class Package:
    """What has to be installed."""

    framework: str | None = None  # the module that drives the devices; None: nothing besides dualtune
    distribution: str = "dualtune"  # `dualtune check-env` looks at its requirements
    extra: str = ""  # of that distribution
    recorded: tuple[str, ...] = ()  # packages whose versions a run records, the framework's first
    detected: tuple[str, ...] = ()  # packages whose versions `dualtune check-gpu` shows

    @property
    def command(self) -> str:
        """The command that installs it."""
        return f"pip install '{self.distribution}[{self.extra}]'" if self.extra else f"pip install {self.distribution}"

    @property
    def is_installed(self) -> bool:
        """Return whether the framework can be found, without importing it."""
        return self.framework is None or importlib.util.find_spec(self.framework) is not None


@dataclass(frozen=True, slots=True)
class MemoryFormulas:
    """How much memory a training step takes, by formula."""

    parts: Parts
    borders: tuple[int, ...] = ()  # document lengths in tokens above which a step takes less memory than at them
    # Of models without a formula: "module:function" that counts the shapes of the model of a config.json by the
    # framework (`dualtune.engine.memory.counted`), and the parts for what was counted.
    count: str = ""
    counted_parts: Parts | None = None


# By part of a step: what it takes forward and backward, for each of a unit of `dualtune.engine.step_time`.
PassCosts = Mapping[str, Mapping[str, tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a training step takes on one kind of device besides the products that the model's shape prescribes.

    It describes the kernels that model.kernels: auto chooses for a model that is large enough to be compiled.
    """

    launches: PassCosts  # operator calls
    numbers: PassCosts  # numbers in the compute dtype that are read or written
    operations: PassCosts  # elementwise operations: an exponential is about 20 of them
    loss_rows: Callable[[int], int]  # vocabulary -> rows of a chunk of logits
    # flash: FlashAttention over ragged documents. documents, rows: products and a softmax over each document or row, in
    # blocks of queries that skip the keys after them.
    attention: Literal["flash", "documents", "rows"]
    attention_block: int = 64  # queries
    attention_short: int = 0  # tokens of the longest document that is computed in a batch with others
    least_parameters: int = 0  # of a model that is compiled; a smaller one takes other operators
    waits: int = 0  # of the host for the device, in a micro-batch
    # Quantization -> operator calls for a matrix that is unpacked; numbers moved and operations for each weight,
    # besides reading it as stored and writing the result. A quantization that is not listed is multiplied as stored.
    unpacking: Mapping[str, tuple[float, float, float]] = field(default_factory=lambda: {})


@dataclass(frozen=True, slots=True)
class Launch:
    """How several processes are started: by which program, for which values of `dualtune launch --on`."""

    on: tuple[str, ...]
    program: str  # its name in messages
    platforms: tuple[str, ...]  # values of --platform that can be launched, the accelerator's first
    agent: str = ""  # the module to run in place of the program, if the backend brings one
    variables: tuple[str, ...] = ()  # of the environment; a process that has one was launched with others


@dataclass(frozen=True, slots=True)
class Twin:
    """What `dualtune validate` changes in the small CPU version (the twin) of a tier."""

    peak_bytes: int = 256 * 10**6  # memory limit of its run, with a model of 407 000 weights
    # Tier -> the factor by which the twin takes fewer steps: all twins together should take a minute.
    divisors: Mapping[str, int] = field(default_factory=lambda: {})


@dataclass(frozen=True, slots=True)
class Card:
    """The properties of a backend that are known before its framework is imported (decision 0020)."""

    name: str  # the same under both entry-point groups
    title: str = ""  # its name in messages; "": the name
    devices: tuple[Device, ...] = ()  # best first
    platforms: tuple[str, ...] = ()  # values of --platform; with ":N" at the end if devices are numbered
    preference: int | None = None  # for --platform auto, the lowest first; None: only if chosen by name
    # Of BACKEND_KEYS, without those that each device states itself.
    honoured: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: {})
    package: Package = field(default_factory=Package)
    memory: MemoryFormulas | None = None
    costs: Mapping[str, StepCosts] = field(default_factory=lambda: {})  # by kind of device
    launches: tuple[Launch, ...] = ()
    # What model.kernels: fused consists of. An engine can be built with some of them alone (`LoadRequest.pieces`).
    pieces: tuple[str, ...] = ()
    problems: Rows | None = None  # what keeps its framework from working on a machine; no rows if nothing does
    environment: Rows | None = None  # rows of `dualtune check-env` on a machine with its accelerator
    twin: Twin = field(default_factory=Twin)
    # "module:function" that tries what PEFT would do with an adapter: (config.json, adapter_config.json,
    # the shapes of the tensors) -> for each auto class of transformers what goes wrong, or "".
    peft_trial: str = ""
    # Other libraries that load an adapter, by name: "module:class" of an `OtherLibrary` (engine/libraries.py).
    libraries: Mapping[str, str] = field(default_factory=lambda: {})

    def __str__(self) -> str:
        return self.title or self.name

    def capabilities(self, kind: str | None = None) -> Mapping[str, frozenset[Any]]:
        """Return the values honoured for each key of BACKEND_KEYS, on one kind of device or on any of them."""
        devices = [device for device in self.devices if kind in (None, device.kind)]
        dtypes = {dtype for device in devices for dtype in device.dtypes}
        quantizations = {name for device in devices for name in device.quantizations}
        offloads = {name for device in devices for name in device.offloads}
        graphs = {"graph"} if any(device.records_graphs for device in devices) else set[str]()
        own = {
            "model.dtype": {"auto", *dtypes}, "model.quantization": {"auto", *quantizations},
            "memory.offload": {"auto", "none", *offloads},
            "hybrid.offload": {"none", *("optimizer" for device in devices if device.offloads_optimizer)},
        }  # fmt: skip
        if "model.kernels" in self.honoured:
            own["model.kernels"] = {*self.honoured["model.kernels"], *graphs}
        return {key: frozenset(values) for key, values in (dict(self.honoured) | own).items()}

    def device(self, kind: str) -> Device | None:
        return next((device for device in self.devices if device.kind == kind), None)

    def kind_for(self, platform: str, present: Collection[str]) -> str | None:
        """Return the kind of device for a value of --platform on a machine with these kinds; None if unknown."""
        kind = platform.partition(":")[0]
        if kind in {device.kind for device in self.devices}:
            return kind
        return next((device.kind for device in self.devices if device.kind in present), None)

    def platform_for(self, kind: str) -> str:
        """Return the value of --platform for a kind of device."""
        return kind if kind in self.platforms else self.name

    def has_platform(self, platform: str) -> bool:
        name, colon, number = platform.partition(":")
        return f"{name}:N" in self.platforms and number.isdecimal() if colon else name in self.platforms


def backend_names() -> list[str]:
    """Return the names of the registered backends, installed or not."""
    return sorted({point.name for point in points_of(BACKENDS_GROUP)})


@cache
def cards() -> tuple[Card, ...]:
    """Return a card for every registered backend, sorted by name."""
    by_name = {point.name: _loaded(point) for point in points_of(CARDS_GROUP)}
    return tuple(by_name.get(name) or Card(name) for name in backend_names())


def _loaded(point: EntryPoint) -> Card:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise EnvironmentFault(
            f"The card of the backend '{point.name}' ({point.value}) cannot be read: {error}. Reinstall the "
            "package of this backend, or remove it"
        ) from error


def by_preference() -> list[Card]:
    """Return all cards, those without a preference last."""
    return sorted(cards(), key=lambda card: (card.preference is None, card.preference or 0))


def automatic_cards() -> list[Card]:
    """Return the cards that `--platform auto` may choose, the preferred ones first."""
    return [card for card in by_preference() if card.preference is not None]


def card_of(name: str) -> Card:
    """Return the card of a backend. ConfigError for an unknown name."""
    card = next((card for card in cards() if card.name == name), None)
    if card is None:
        raise ConfigError(f"backend: got '{name}', allowed: {', '.join(backend_names())}")
    return card


def driver_of(kind: str) -> Card:
    """Return the card of the backend for a kind of device. ConfigError if none is registered."""
    card = next((card for card in automatic_cards() if card.device(kind)), None)
    if card is None:
        raise ConfigError(f"device: got '{kind}', but no registered backend computes on it")
    return card


def platforms() -> list[str]:
    """Return the values of --platform to list in help and messages."""
    return ["auto", *dict.fromkeys(platform for card in cards() for platform in card.platforms)]


def launch_on(on: str, platform: str) -> tuple[Card, Launch]:
    """Return what `dualtune launch --on` starts for a value of --platform. ConfigError if no backend supports it."""
    able = [(card, launch) for card in by_preference() for launch in card.launches if on in launch.on]
    for card, launch in able:
        if platform in ("auto", *launch.platforms):
            return card, launch
    takes = [f"{' or '.join(launch.platforms)}: {launch.program} runs {card}" for card, launch in able]
    raise ConfigError(f"--platform: got {platform!r}, --on {on} takes {'; '.join(takes) or 'no registered backend'}")

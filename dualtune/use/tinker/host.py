"""Training runs over one base model, driven from outside a step at a time: what is behind `dualtune serve --train`.

No HTTP here, and no protocol. A host belongs to one thread: none of its methods is called from two at once, except
the functions that only read files. A request that cannot be honoured is a ConfigError, which names what
is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class Datum:
    """What a client sends: the model's input, and arrays of the loss, one value a token, or [T, K]."""

    tokens: np.ndarray  # int32 [T]
    inputs: Mapping[str, np.ndarray]  # target_tokens int64, weights, logprobs, advantages, mask ... float32


@dataclass(frozen=True, slots=True)
class LossResult:
    outputs: Sequence[Mapping[str, np.ndarray]]  # of each datum: logprobs, elementwise_loss, float32, shape of targets
    metrics: Mapping[str, float]  # names end in the way they add up over parts of a call, as in loss:sum


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int
    seed: int | None = None  # None: chosen here
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """The constants of one update; the defaults are those of Tinker."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0: not clipped


@dataclass(frozen=True, slots=True)
class SampleRequest:
    source: str | None  # what `save_sampler` returned, or the path of any checkpoint; None: the base
    prompt: np.ndarray  # int32 [T]
    num_samples: int = 1
    max_tokens: int | None = None  # None: what the model's positions allow
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    seed: int | None = None
    stop: Sequence[str] | Sequence[int] | None = None  # None: the end of a turn; empty: nothing
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    tokens: np.ndarray  # int32 [T, K]; of the first token of a prompt -1
    logprobs: np.ndarray  # float32 [T, K]; of the first token of a prompt NaN


@dataclass(frozen=True, slots=True)
class SampledSequence:
    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    stop_reason: Literal["stop", "length"]
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    sequences: Sequence[SampledSequence]
    prompt_logprobs: np.ndarray | None = None  # float32 [T], NaN for the first
    prompt_top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RunInfo:
    name: str
    base: str  # the model as the client names it
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    created: float  # seconds since the epoch
    steps: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    run: str
    kind: Literal["weights", "sampler_weights"]
    name: str
    created: float
    num_bytes: int
    directory: Path  # holds adapter_model.safetensors and adapter_config.json in PEFT's format

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass
class TrainingHost:
    """Runs over one base model, each with its adapter, its gradient and its optimizer."""

    base: str  # a model directory or a hub name; what clients call it is its name
    runs_dir: Path
    overrides: Mapping[str, object] = field(default_factory=dict[str, object])  # config keys, e.g. model.dtype

    def close(self) -> None:
        raise NotImplementedError

    @property
    def tokenizer_dir(self) -> Path:
        """The directory of the base: clients load its tokenizer from there."""
        raise NotImplementedError

    @property
    def max_length(self) -> int | None:
        """The number of positions of the base; None: not limited by the model."""
        raise NotImplementedError

    # Runs. Names are chosen by the server: letters, digits, `-`, `_`, `.`, `:`.

    def create_run(self, name: str, settings: LoraSettings) -> RunInfo:
        raise NotImplementedError

    def create_run_from(self, name: str, source: str, *, optimizer: bool) -> RunInfo:
        """Create a run from a checkpoint `tinker://RUN/weights/NAME`, of this server or of one before it."""
        raise NotImplementedError

    def run_info(self, name: str) -> RunInfo:
        """Of a run in memory, or one that `runs_dir` has."""
        raise NotImplementedError

    def unload(self, name: str) -> None:
        """Free the memory of a run. Its checkpoints stay."""
        raise NotImplementedError

    # Training.

    def forward(self, run: str, data: Sequence[Datum], loss: str, config: Mapping[str, float | str]) -> LossResult:
        raise NotImplementedError

    def forward_backward(
        self, run: str, data: Sequence[Datum], loss: str, config: Mapping[str, float | str]
    ) -> LossResult:
        """Add the gradient of the loss to that of the next update."""
        raise NotImplementedError

    def optim_step(self, run: str, settings: AdamSettings) -> Mapping[str, float]:
        """Update the adapter by AdamW with the gradient added since the last update; return metrics."""
        raise NotImplementedError

    # Checkpoints.

    def save_state(self, run: str, name: str, *, overwrite: bool = False) -> CheckpointInfo:
        raise NotImplementedError

    def load_state(self, run: str, source: str, *, optimizer: bool) -> None:
        """Put the adapter of a checkpoint into a run, and its optimizer state or none. The gradient is dropped."""
        raise NotImplementedError

    def save_sampler(self, run: str, name: str | None) -> str:
        """Keep the weights of now for sampling and return their path; without a name in memory, until it is freed."""
        raise NotImplementedError

    def free_sampler(self, path: str) -> None:
        """Free a sampler in memory. One with a name stays on disk."""
        raise NotImplementedError

    # Sampling.

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, SampleResult | Exception]]:
        """Yield each request's index and result, or what refuses it, as they end. Those of one source are one batch."""
        raise NotImplementedError


# Files only: these may be called by any thread.


def list_runs(runs_dir: Path) -> list[RunInfo]:
    raise NotImplementedError


def list_checkpoints(runs_dir: Path, run: str | None = None) -> list[CheckpointInfo]:
    raise NotImplementedError


def find_checkpoint(runs_dir: Path, path: str) -> CheckpointInfo:
    """Return the checkpoint of a `tinker://` path; ConfigError if there is none, or it is no such path."""
    raise NotImplementedError


def delete_checkpoint(runs_dir: Path, path: str) -> None:
    raise NotImplementedError

"""What a client asks of a training host, and what it answers: NumPy arrays and numbers, in no protocol's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from dualtune.base.errors import ConfigError


class Cancelled(ConfigError):
    """What a client asked for, and then no more."""

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


# ----------------------------------------------------------------------------------------------------------------------
# Training.


@dataclass(frozen=True, slots=True)
class Datum:
    """The tokens of a text, and arrays of the loss, with a value for each token or, of several targets each, [T, K]."""

    tokens: np.ndarray  # int32 [T]
    # target_tokens int64: what follows each token. weights, logprobs, advantages … float32
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class LossResult:
    outputs: Sequence[Mapping[str, np.ndarray]]  # of each datum: logprobs, float32, in the shape of its targets
    metrics: Mapping[str, float]  # a name ends in how the parts of a call combine, as in loss:sum


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int
    seed: int | None = None  # None: chosen at random
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """The constants of one update by AdamW. The defaults are Tinker's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0: the gradient is not clipped


# ----------------------------------------------------------------------------------------------------------------------
# Sampling.


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to continue a prompt."""

    source: str | None  # what `save_sampler` returned, or the path of a checkpoint; None: the base
    prompt: np.ndarray  # int32 [T]
    num_samples: int = 1
    max_tokens: int | None = None  # None: as many as the host allows
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    seed: int | None = None  # None: chosen at random
    stop: Sequence[str] | Sequence[int] | None = None  # None: the end of a turn; empty: nothing but max_tokens
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0


class TopLogprobs(NamedTuple):
    """The most probable tokens in the place of each token, the most probable one first."""

    tokens: np.ndarray  # int32 [T, K]; -1 in the place of the first token of a prompt
    logprobs: np.ndarray  # float32 [T, K]; NaN there


@dataclass(frozen=True, slots=True)
class SampledSequence:
    tokens: np.ndarray  # int32 [T], with the token that ended it
    logprobs: np.ndarray  # float32 [T], at temperature 1 whatever it was sampled at
    stop_reason: Literal["stop", "length"]
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    sequences: Sequence[SampledSequence]
    prompt_logprobs: np.ndarray | None = None  # float32 [T], NaN for the first token
    prompt_top: TopLogprobs | None = None


# ----------------------------------------------------------------------------------------------------------------------
# Runs and their checkpoints.


@dataclass(frozen=True, slots=True)
class ServedRun:
    name: str
    base: str  # the base model, as the server calls it
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool  # False too where the output head is the embedding, which has no adapter
    created: float  # seconds since the epoch
    steps: int = 0  # updates done, of a run in memory
    adapter: Mapping[str, Any] | None = None  # as a config has it, of a run that `dualtune train` began; else as above


CheckpointKind = Literal["weights", "sampler_weights"]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    run: str
    kind: CheckpointKind
    name: str
    created: float
    num_bytes: int
    directory: Path  # the adapter, in PEFT's format

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

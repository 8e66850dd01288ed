"""The config: every key with its type, default and a one-sentence description.

Defaults and descriptions are only defined here, those of the section `data` in `data_section.py`. The commented default
(`render.py`), the JSON schema, the documentation and the error messages are generated from them. The names are a public
interface.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from dualtune.adapter.methods import FULL
from dualtune.adapter.targets import DEFAULT_TARGETS
from dualtune.config.data_section import DataConfig
from dualtune.config.engines import with_train_keys
from dualtune.config.pairs import impossible_pairs
from dualtune.config.problem import dotted
from dualtune.config.values import (
    RULES,
    Count,
    Factor,
    Fraction,
    Location,
    MethodName,
    ModuleNames,
    Name,
    Positive,
    Prompts,
    Section,
    Share,
    Size,
    Trackers,
)
from dualtune.optimizer import OptimizerName

_SIZE_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class ModelConfig(Section):
    """The base model."""

    name: Annotated[Name, Field(examples=["Qwen/Qwen3-0.6B"], json_schema_extra={"format": "model"})]
    """The base model to adapt; a GGUF file is unpacked once, into the cache."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The compute dtype; auto uses the best one that the device supports."""
    quantization: Literal["auto", "none", "nf4", "int8", "affine4", "affine8"] = "auto"
    """How the base weights are stored in memory; auto keeps the format of the files."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Whether to load the weights, or to initialize them at random, in the real shapes, to measure speed and memory."""
    kernels: Literal["auto", "fused", "reference", "graph"] = "auto"
    """The code that computes the model: reference is the plain code, fused the fast code, auto fused where possible,
    graph the same as auto, recorded and replayed as a whole, for small models on an NVIDIA GPU."""


class AdapterConfig(Section):
    """The adapter."""

    method: MethodName = "lora"
    """What is trained: lora trains the matrices A and B of each target, which add scale · B·A·x to its output; full
    trains all parameters of the model, without an adapter."""
    rank: Count = 16
    """The inner dimension r of the adapter."""
    alpha: Factor = 32.0
    """The adapter's output is multiplied by alpha / rank; `scaling` can change that."""
    scaling: Literal["standard", "rank_stabilized"] = "standard"
    """standard multiplies by alpha / rank, rank_stabilized by alpha / √rank (rsLoRA), for high ranks."""
    dropout: Fraction = 0.05
    """The fraction of the adapter's inputs that is set to zero in training."""
    targets: Literal["all-linear"] | ModuleNames = DEFAULT_TARGETS
    """The linear layers to adapt, each named by its path or the end of its path; all-linear replaces the default names
    in a model that lacks one of them."""
    init_from: Location | None = None
    """An adapter directory, in any supported format, to start training from."""

    @property
    def trains_model(self) -> bool:
        """Whether all parameters of the model are trained, without an adapter."""
        return self.method == FULL


class TrainConfig(Section):
    """The optimization."""

    epochs: Positive = 3.0
    """The number of passes over the training data."""
    steps: Count | None = None
    """The number of optimizer steps; if set, it overrides epochs."""
    tokens_per_step: Literal["auto"] | Count = "auto"
    """The number of tokens in an optimizer step, at least one document; auto is 16384, or less if that would give fewer
    than 100 steps."""
    documents_per_step: Count | None = None
    """The number of documents in an optimizer step; if set, it overrides tokens_per_step."""
    micro_batch_tokens: Literal["auto"] | Count = "auto"
    """How many tokens go through the model at once; this changes memory and speed, but not the result."""
    learning_rate: Positive = 2.0e-4
    """The peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "schedule_free"] = "cosine"
    """How the learning rate changes after the warm-up; schedule_free keeps it, and the result is an average that AdamW
    trains along with the weights."""
    warmup: Fraction | Count = 0.03
    """The warm-up of the learning rate: below 1 a fraction of the steps, from 1 on a number of steps."""
    optimizer: OptimizerName = "adamw"
    """How gradients update the weights; adamw_8bit keeps its moments in 8 bits: 2 bytes for a trained weight instead of
    8; sgd keeps no state and needs a much larger learning_rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """The decoupled weight decay: each update also multiplies the weights by 1 - learning rate · weight_decay."""
    average: Literal["none", "ema", "tail"] = "none"
    """Which average of the weights is evaluated and written: tail the mean of those after the last steps, ema an
    exponential moving average; the training itself does not change."""
    average_over: Share | Count = 0.4
    """How many steps tail averages, or the time constant of ema: below 1 a fraction of the steps, from 1 on a number of
    steps."""
    activation_cache: Literal["none", "disk"] = "none"
    """Whether the hidden states below the lowest adapted layer are computed once for each document and kept on disk;
    disk saves that part of every step and evaluation, and needs adapter.targets that leave the first layers alone."""
    max_grad_norm: Positive | None = 0.3
    """The largest gradient norm; larger gradients are scaled down to it; null turns clipping off."""


class CheckpointedLayers(Section):
    """Layers whose activations are recomputed in the backward pass."""

    layers: Annotated[int, Field(ge=1, examples=[8])]
    """How many, from the first layer on."""
    every: Count = 1
    """How many layers keep one input together and are recomputed at once."""


class MemoryConfig(Section):
    """How to save memory."""

    checkpointing: Literal["auto", "none", "remade", "full"] | CheckpointedLayers = "auto"
    """Which activations are recomputed in the backward pass: remade only the adapters' inputs, {layers: 8} those of the
    first 8 layers, full of all; auto as few layers as fit; no value changes a gradient."""
    offload: Literal["auto", "none", "activations"] = "auto"
    """What moves to host memory until the backward pass needs it: activations moves the inputs of recomputed layers."""
    resident_layers: Literal["all"] | Count = "all"
    """How many layers of the base model are on the device at once; the others are copied to it before they are used."""
    sharding: Literal["auto", "none", "full"] = "auto"
    """Whether each process of a run holds only a part of the base model; auto only if it would not fit whole."""
    limit: Literal["auto"] | Size = "auto"
    """The memory that the run may use: of a GPU, or of the process on a CPU; auto is what is free."""

    @property
    def resident_layers_or_none(self) -> int | None:
        """Return the number of resident layers, or None for all."""
        return None if self.resident_layers == "all" else self.resident_layers

    @property
    def limit_bytes(self) -> int | None:
        """Return the limit in bytes, or None for auto."""
        if self.limit == "auto":
            return None
        match = re.fullmatch(r"([0-9.]+) ?(\w+)", self.limit)
        assert match is not None  # the pattern of Size
        return int(float(match[1]) * _SIZE_UNITS[match[2]])


class HybridConfig(Section):
    """Predictive training: some steps are predicted from the last ones instead of computed, on evidence only."""

    enabled: bool = False
    """Whether to train predictively; false costs nothing."""
    engine: Literal["predict", "fast_forward", "schedule_free", "average"] = "predict"
    """What a prediction does: predict skips the steps it stands for, with their data; fast_forward skips none;
    schedule_free and average predict nothing, they are short for the keys of train with these names."""
    preset: Literal["conservative", "balanced", "aggressive"] = "balanced"
    """The values of the keys below that are auto: see docs/hybrid.md."""
    warmup_steps: Literal["auto"] | Count = "auto"
    """The number of ordinary steps before anything is predicted."""
    full_steps: Literal["auto"] | Annotated[int, Field(ge=4)] = "auto"
    """The number of ordinary steps between two attempts; the last 16 of them, or fewer, give the velocity."""
    max_predict_steps: Literal["auto"] | Count = "auto"
    """The largest number of steps that one prediction stands for."""
    confidence_threshold: Literal["auto"] | Share = "auto"
    """The smallest probability, measured on probe documents, at which a prediction is accepted."""
    correction_interval: Literal["auto"] | Count = "auto"
    """The number of predicted steps from which on each multiple of it is probed, instead of each power of two."""
    correct_steps: Literal["auto"] | Count = "auto"
    """The number of ordinary steps after a prediction, before it is checked on other probe documents."""
    divergence_threshold: Literal["auto"] | Positive = "auto"
    """How far above its mean a loss may be, in standard deviations, before that is a warning; twice as far undoes a
    prediction."""
    max_consecutive_predicts: Literal["auto"] | Count = "auto"
    """The largest number of predictions in a row, without an ordinary step between."""
    probes: Literal["auto"] | Annotated[int, Field(ge=2)] = "auto"
    """The number of training documents in each of the two probe sets; no step trains on them."""
    trust_region: Literal["auto"] | Positive = "auto"
    """The largest change of the weights by predictions, relative to how far they are from where the run began."""
    offload: Literal["none", "optimizer"] = "none"
    """What moves to host memory while a prediction is searched; optimizer moves the optimizer's state."""


class GuardsConfig(Section):
    """How to react to bad numbers."""

    nonfinite_limit: Count = 5
    """How many steps in a row may be skipped because a loss or gradient is not finite, before the run ends."""
    on_spike: Literal["ignore", "warn", "rollback"] = "warn"
    """What to do at a loss spike; rollback returns to the checkpoint before it and skips the data since then."""
    spike_threshold: Positive = 8.0
    """How far a spike is above the median of the last losses, in robust standard deviations."""
    early_stopping: Count | None = None
    """The run ends after this many evaluations in a row without a new best; null never stops early."""
    restore_best: bool = False
    """Whether to write the adapter with the best evaluation instead of the last one."""


class RunConfig(Section):
    """The run directory, and what is written to it."""

    dir: Location = "runs/first"
    """The directory to which the run writes everything."""
    seed: Annotated[int, Field(ge=0)] = 42
    """The seed of all random numbers."""
    deterministic: bool = False
    """Whether a GPU has to give the same bits each time, which is slower; a CPU always does."""
    log_every: Count = 10
    """The number of optimizer steps between two log lines; where it is not set, a short run has about ten."""
    eval_every: Count | None = 100
    """The number of optimizer steps between two evaluations; null evaluates only at the end; where it is not set, a
    short run has about four."""
    save_every: Count | None = 100
    """The number of optimizer steps between two checkpoints; null saves at the best evaluations and at the end."""
    keep: Count = 3
    """How many of the newest checkpoints are kept, at least two; the best one is kept too."""
    report: bool = True
    """Whether the run writes a page for a browser at its end: report.html."""
    track: Trackers = ()
    """The trackers of experiments that are sent the numbers of the run."""
    sample_prompts: Prompts = ()
    """Prompts whose greedy answers are shown at each evaluation and kept in samples.jsonl, at most 8."""


class Config(BaseModel):
    """The settings of a run."""

    model_config = RULES

    model: ModelConfig
    adapter: AdapterConfig = AdapterConfig()
    data: DataConfig
    train: TrainConfig = TrainConfig()
    memory: MemoryConfig = MemoryConfig()
    hybrid: HybridConfig = HybridConfig()
    guards: GuardsConfig = GuardsConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="before")
    @classmethod
    def _engine_as_train_keys(cls, data: Any) -> Any:
        return with_train_keys(data)

    @model_validator(mode="after")
    def _pairs_are_possible(self) -> Config:
        if pairs := list(impossible_pairs(self)):
            message = "; ".join(f"{dotted(path)}: {message}" for path, _, message in pairs)
            raise PydanticCustomError("impossible_pairs", "{message}", {"message": message, "pairs": pairs})
        return self


def sections() -> dict[str, type[Section]]:
    """Return the sections by name, in order."""
    return {name: cast(type[Section], cast(Any, field.annotation)) for name, field in Config.model_fields.items()}

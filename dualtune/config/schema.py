"""The config: every key with its type, default and a one-sentence description.

Defaults and descriptions are only defined here, those of the section `data` in `data_section.py`. The commented default
(`render.py`), the JSON schema, the documentation and the error messages are generated from them. The names are a public
interface.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dualtune.base.text import closest, did_you_mean
from dualtune.config.data_section import DataConfig
from dualtune.config.values import (
    RULES,
    Alphas,
    Count,
    Factor,
    Fraction,
    InitName,
    KeyPath,
    Layers,
    MethodName,
    ModuleNames,
    Name,
    Names,
    NotNegative,
    Numbers,
    PathText,
    Positive,
    Prompts,
    Ranks,
    Section,
    Share,
    Size,
    StopTexts,
    TokenRows,
    Trackers,
    dotted,
    refuse,
)
from dualtune.model.beside import Biases
from dualtune.model.merge_rounding import MergeFor
from dualtune.model.methods import FULL, INITS
from dualtune.model.optimizer import OPTIMIZERS, OptimizerName
from dualtune.model.stochastic_rounding import MasterWeights
from dualtune.model.targets import ALL_LAYERS, DEFAULT_TARGETS

# ----------------------------------------------------------------------------------------------------------------------
# Engines of `hybrid` that are a kind of optimizer or result, not a step policy: short for keys of `train`.

# What each sets in `train`, unless the config does. An average of weights is worth most where the rate stays high.
SHORT_FOR: Mapping[str, Mapping[str, str]] = {
    "schedule_free": {"schedule": "schedule_free"},
    "average": {"schedule": "constant", "average": "tail"},
}
# Objectives that learn from the model's own samples (`train/policy_gradient.py`).
PolicyObjectiveName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
POLICY_OBJECTIVES: tuple[str, ...] = get_args(PolicyObjectiveName)
ON_POLICY = "on_policy_distill"  # the other one that draws samples: a teacher judges each token of them
BASE_TEACHER, SELF_TEACHER = "base", "self"  # values of distill.teacher that name no other model
DEFAULT_TOP_K = 32
_NOTHING = {"auto", "balanced", "none"}  # values of the other keys of `hybrid` that ask for nothing


def with_train_keys(data: Any) -> Any:
    """Return the data of a config with such an engine replaced by the keys it is short for; without one, unchanged.

    An engine that contradicts other keys stays, for `engine_conflicts`.
    """
    if not isinstance(data, dict):
        return data
    config = cast(dict[str, Any], data)
    sections: tuple[Any, Any] = config.get("hybrid"), config.get("train") or {}
    if not all(isinstance(section, dict) for section in sections):
        return config
    hybrid, train = cast(tuple[dict[str, Any], dict[str, Any]], sections)
    engine = hybrid.get("engine")
    if hybrid.get("enabled") is not True or not isinstance(engine, str) or engine not in SHORT_FOR:
        return config
    if _without_effect(hybrid) or _contradicts(engine, train):
        return config
    return config | {"hybrid": {}, "train": {**SHORT_FOR[engine], **train}}


def engine_conflicts(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield (key, conflicting key, message) for such an engine that could not be replaced."""
    hybrid = config.hybrid
    if not hybrid.enabled or hybrid.engine not in SHORT_FOR:
        return
    key: KeyPath = ("hybrid", "engine")
    for name in _without_effect({name: getattr(hybrid, name) for name in hybrid.model_fields_set}):
        rule = f"has no effect with hybrid.engine: {hybrid.engine}, which predicts nothing; remove it"
        yield ("hybrid", name), key, f"got {getattr(hybrid, name)}, but it {rule}"
    if _contradicts(hybrid.engine, {name: getattr(config.train, name) for name in config.train.model_fields_set}):
        short = " and ".join(f"train.{name}: {value}" for name, value in SHORT_FOR[hybrid.engine].items())
        yield key, ("train",), f"got {hybrid.engine}, which is short for {short}, but train says otherwise; remove one"


def _without_effect(hybrid: Mapping[str, Any]) -> list[str]:
    """Return the keys of `hybrid` whose values have no effect with such an engine."""
    return [name for name, value in hybrid.items() if name not in ("enabled", "engine") and value not in _NOTHING]


def _contradicts(engine: str, train: Mapping[str, Any]) -> bool:
    """Return whether keys that the config sets in `train` say something else. An average may be of either kind."""
    if engine == "average":
        return train.get("average") == "none" or train.get("schedule") == "schedule_free"
    return train.get("schedule", "schedule_free") != "schedule_free"


# ----------------------------------------------------------------------------------------------------------------------
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
    """What is trained: lora trains the matrices A and B of each target, which add scale · B·A·x to its output; dora
    also the length of each row of weight + scale · B·A; full trains all parameters of the model, without an adapter."""
    master_weights: MasterWeights = "float32"
    """How method: full keeps the weights that it trains: bfloat16 takes a third of the memory where the model computes
    in bfloat16, and rounds each update up or down at random, so that on average none is lost."""
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
    layers: Layers = ALL_LAYERS
    """The layers in which the targets are adapted: all, first 8, last 8, or numbers from 0 and ranges, as in 0,4-11."""
    experts: bool = False
    """Whether the targets name layers of the experts of a mixture too; each expert has an adapter of its own."""
    rank_pattern: Ranks = {}  # noqa: RUF012  pydantic copies it
    """The rank of modules that have another one, each named as in targets; the first name that selects one counts."""
    alpha_pattern: Alphas = {}  # noqa: RUF012
    """The same for alpha: a module with another rank and the alpha of all has another alpha / rank."""
    merge_for: MergeFor = "none"
    """The format to which the merged model will be quantized: training and its evaluations see the merge rounded as it
    rounds; none leaves the merge as it is."""
    train_modules: Names = ()
    """Modules of the base whose own parameters are trained beside the adapter, named by the path or its end, such as
    embed_tokens, lm_head or norm."""
    train_rows: Literal["new"] | TokenRows = ()
    """Tokens, by id or text, of which the rows in the embedding and in the output head are trained, beside those
    that data.new_tokens adds; new is these alone."""
    bias: Biases = "none"
    """The biases of the base that are trained beside the adapter: none, all, or lora_only, those of adapted layers."""
    init: InitName = INITS[0]
    """The start: A drawn from run.seed and B zero, where kaiming is uniform within ±1/√in, normal has deviation 0.02
    and gaussian 1 / rank; or, of the weight, pissa its largest singular values and olora its QR decomposition."""
    init_from: PathText | None = None
    """An adapter directory, in any supported format, to start training from."""

    @property
    def rows(self) -> tuple[int | str, ...]:
        """The tokens that train_rows names."""
        return () if isinstance(self.train_rows, str) else self.train_rows

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
    optimizer: OptimizerName | Name = "adamw"
    """How gradients update the weights; adamw_8bit keeps its moments in 8 bits: 2 bytes for a trained weight instead of
    8; lion 4 and lion_8bit 1, at a third to a tenth of the learning_rate; adafactor almost none; muon makes the updates
    of matrices orthogonal, and 4; sgd keeps no state and needs a much larger learning_rate; else the name of an
    installed one."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """The decoupled weight decay: each update also multiplies the weights by 1 - learning rate · weight_decay."""
    embedding_learning_rate: Positive | None = None
    """The peak learning rate of embedding and output head where they are trained, or rows of them: null is
    learning_rate."""
    lora_plus_ratio: Factor | None = None
    """The learning rate of the adapter's B divided by that of A, which is learning_rate (LoRA+): null is 1."""
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
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the mean over the whole vocabulary in the loss of a target, in training with train.objective: sft;
    evaluations have none."""
    policy: Literal["auto"] | Name = "auto"
    """What decides each step: auto as hybrid.enabled says, else the name of an installed step policy."""
    objective: (
        Literal["sft", "dpo", "orpo", "simpo", "cpo", "kto", "distill", "on_policy_distill"]
        | PolicyObjectiveName
        | Name
    ) = "sft"
    """What is minimized: sft −log p of the answers; dpo, orpo, simpo and cpo compare two answers to a prompt, kto needs
    one with a label; distill learns a teacher's distributions of them, on_policy_distill those of the model's own
    samples; else the name of an installed objective."""

    @field_validator("optimizer")
    @classmethod
    def _optimizer_is_there(cls, name: str) -> str:
        """Refuse a name that is neither ours nor that of an installed package: it may be a slip of the pen."""
        if name in OPTIMIZERS:
            return name
        own = get_args(OptimizerName)
        meant = closest(name.lower(), own)
        advice = did_you_mean(meant) if meant else "Or install the package that registers it"
        raise refuse(f"got '{name}', allowed: {', '.join(own)}. {advice}")


class PreferenceConfig(Section):
    """Preference training; auto is the value that the objective's paper recommends."""

    loss: Literal["auto", "sigmoid", "hinge", "ipo", "robust", "apo_zero"] = "auto"
    """The loss of dpo as a function of the margin between the two answers; auto is sigmoid."""
    beta: Literal["auto"] | Positive = "auto"
    """How much a log-probability counts: the strength of the tie to the reference (dpo, kto), or of the comparison
    beside the loss of sft (orpo); auto is 0.1, and 2 for simpo."""
    gamma: Literal["auto"] | NotNegative = "auto"
    """The margin that simpo asks for between the two answers; auto is half of beta."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The fraction of pairs whose answers are taken to be swapped, for cpo and the losses sigmoid and robust of dpo."""
    sft_weight: Literal["auto"] | NotNegative = "auto"
    """The weight of the loss of sft on the chosen answers; auto is 1 for orpo and cpo, 0 for dpo and simpo."""
    desirable_weight: Positive = 1.0
    """The weight of kto's desirable answers."""
    undesirable_weight: Positive = 1.0
    """The weight of kto's undesirable answers."""
    reference: Literal["auto", "base", "start"] = "auto"
    """The model that dpo and kto stay close to: base is without adapter, start has that of adapter.init_from; auto is
    start where there is one."""


class DistillConfig(Section):
    """Distillation: what a run learns of a teacher."""

    distributions: PathText | None = None
    """The file that `dualtune distill record` has written: what the teacher says of the data of this config."""
    teacher: Name | None = None
    """A teacher that answers while the run trains: a model, base (this one without its adapter), self (as it is in each
    step), or the address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1."""
    teacher_adapter: PathText | None = None
    """The adapter of a teacher that is a model or base."""
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The compute dtype of a teacher that is a model."""
    teacher_quantization: Literal["auto", "none", "nf4", "int8", "affine4", "affine8"] = "auto"
    """How its weights are stored in memory."""
    served_as: Name | None = None
    """The name of the teacher on its server; null is the only one that is there."""
    teacher_system: Annotated[str, Field(pattern=r"\S", json_schema_extra={"format": "prompt"})] | None = None
    """A system message that the teacher alone reads, in place of the row's own."""
    hint: Annotated[str, Field(pattern=r"\S", json_schema_extra={"format": "prompt"})] | None = None
    """A text that the teacher alone reads after the last question; {expected} is the answer of the row."""
    top_k: Annotated[int, Field(ge=0)] = DEFAULT_TOP_K
    """How many of its most probable tokens a teacher says at each place; 0 is the sampled token alone."""
    divergence: Literal["auto", "forward_kl", "reverse_kl", "jsd"] = "auto"
    """The distance to the teacher: forward_kl of its most probable tokens alone, in one forward pass; reverse_kl, or
    jsd with beta, of these and of all other tokens as one, in two; auto is forward_kl of the data's answers and
    reverse_kl of samples."""
    beta: Literal["auto"] | Share = "auto"
    """Where jsd lies between the KL divergence from the teacher (0) and that from the student (1); auto is 0.5."""
    temperature: Positive = 1.0
    """What the logits of both are divided by: above 1, less probable tokens count more; any but 1 takes two passes."""
    sft_weight: NotNegative = 0.0
    """The weight of the loss of sft on the data's own answers, which is added."""

    @property
    def beta_or_default(self) -> float:
        return 0.5 if self.beta == "auto" else self.beta

    @property
    def is_served(self) -> bool:
        """Whether the teacher is on a server."""
        return self.teacher is not None and self.teacher.startswith(("http://", "https://"))

    @property
    def has_context(self) -> bool:
        """Whether the teacher reads more than the student."""
        return self.teacher_system is not None or self.hint is not None


class RolloutsConfig(Section):
    """Training on the model's own samples; auto is the value of the objective's paper."""

    rewards: Names = ()
    """What rewards an answer: exact, contains, number, json, regex:PATTERN, brief:CHARACTERS, sql:SCRIPT, or a Python
    function as FILE.py:FUNCTION."""
    environment: Name | None = None
    """A Python class as FILE.py:CLASS, with which the model holds a conversation; null: it answers once."""
    turns: Count = 8
    """The most answers of the model in a conversation with the environment."""
    weights: Numbers = ()
    """The weight of each reward in their sum; empty is 1 for each."""
    samples: Count = 8
    """How many answers to each prompt a step draws: one is enough for a teacher, rewards compare two or more."""
    updates: Count = 1
    """How many updates a step makes with its answers; from the second on, ratios are clipped."""
    max_tokens: Count = 256
    """The maximum number of tokens per answer."""
    temperature: Positive = 1.0
    """The temperature of the sampling; training computes log-probabilities at 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most probable tokens whose probabilities add up to this; 1 is all tokens."""
    stop: StopTexts = ()
    """Texts that end an answer."""
    advantage_scale: Literal["auto", "group", "step", "none"] = "auto"
    """What an advantage is divided by: the standard deviation of the rewards of its prompt, of the step, or nothing."""
    clip_low: Literal["auto"] | NotNegative = "auto"
    """How far below 1 the ratio of a token's probability to that when it was sampled counts."""
    clip_high: Literal["auto"] | NotNegative = "auto"
    """How far above 1 it counts."""
    kl: NotNegative = 0.0
    """The weight of the KL divergence from the base without the adapter."""
    reward_timeout_s: Positive = 10.0
    """How many seconds a Python function may take for an answer, which has no reward then."""


class CheckpointedLayers(Section):
    """Layers whose activations are recomputed in the backward pass."""

    layers: Annotated[int, Field(ge=1, examples=[8])]
    """How many, from the first layer on."""
    every: Count = 1
    """How many layers keep one input together and are recomputed at once."""


class MemoryConfig(Section):
    """How to save memory."""

    checkpointing: Literal["auto", "none", "adapter_inputs", "full"] | CheckpointedLayers = "auto"
    """Which activations are recomputed in the backward pass: adapter_inputs only those, {layers: 8} those of the first
    8 layers, full of all layers; auto as few layers as fit; no value changes a gradient."""
    offload: Literal["auto", "none", "activations"] = "auto"
    """What moves to host memory until the backward pass needs it: activations moves the inputs of recomputed layers."""
    resident_layers: Literal["all"] | Count = "all"
    """How many layers of the base model are on the device at once; the others are copied to it before they are used."""
    sharding: Literal["auto", "none", "full"] = "auto"
    """Whether each process of a run holds only a part of the base model; auto only if it would not fit whole."""
    limit: Literal["auto"] | Size = "auto"
    """The memory that the run may use: of a GPU, or of the process on a CPU; auto is what is free."""

    @field_validator("checkpointing", mode="before")
    @classmethod
    def _renamed_checkpointing(cls, value: object) -> object:
        return "adapter_inputs" if value == "remade" else value  # the old name, read in configs and checkpoints

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
    gate: Literal["auto", "clock", "none"] = "auto"
    """Whether predictions end for the rest of the run before they make it more than 3 % slower by the clock; auto is
    clock, or none with run.deterministic, since two runs measure different times."""
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

    dir: PathText = "runs/first"
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
    preference: PreferenceConfig = PreferenceConfig()
    distill: DistillConfig = DistillConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    memory: MemoryConfig = MemoryConfig()
    hybrid: HybridConfig = HybridConfig()
    guards: GuardsConfig = GuardsConfig()
    run: RunConfig = RunConfig()

    @property
    def looks_first(self) -> bool:
        """Whether a step asks for log-probabilities before it computes a gradient: one more forward pass."""
        objective = self.train.objective
        if objective == "distill":
            return self.divergence != "forward_kl" or self.distill.temperature != 1
        return objective != "sft"

    @property
    def divergence(self) -> str:
        """The divergence of a run that distils: forward_kl, reverse_kl or jsd."""
        if self.distill.divergence != "auto":
            return self.distill.divergence
        return "reverse_kl" if self.train.objective == ON_POLICY else "forward_kl"

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


# ----------------------------------------------------------------------------------------------------------------------
# Values of a config that are valid separately but not together.

# The keys of the section `preference` that each objective uses.
PREFERENCE_KEYS: Mapping[str, tuple[str, ...]] = {
    "sft": (),
    "distill": (),
    ON_POLICY: (),
    "dpo": ("loss", "beta", "label_smoothing", "sft_weight", "reference"),
    "orpo": ("beta", "sft_weight"),
    "simpo": ("beta", "gamma", "sft_weight"),
    "cpo": ("beta", "label_smoothing", "sft_weight"),
    "kto": ("beta", "desirable_weight", "undesirable_weight", "reference"),
    **dict.fromkeys(POLICY_OBJECTIVES, ()),
}
OF_DRAWING = ("samples", "max_tokens", "temperature", "top_p", "stop")  # the keys of `rollouts` that are not of rewards
_SMOOTHED = ("auto", "sigmoid", "robust")  # losses of dpo with label smoothing

# Keys of the section `adapter` that have no meaning with adapter.method: full.
_ADAPTER_ONLY = (
    "rank", "alpha", "scaling", "dropout", "targets", "layers", "rank_pattern", "alpha_pattern", "train_modules",
    "train_rows", "bias", "init", "merge_for",
)  # fmt: skip


def impossible_pairs(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield (key, conflicting key, message) for values that are valid separately but not together."""
    data, train = config.data, config.train
    train_sources = {source.identity for source in data.sources()}
    for index, source in enumerate(data.eval_sources()):
        path: KeyPath = ("data", "eval", index) if isinstance(data.eval, tuple) else ("data", "eval")
        if source.identity in train_sources:
            rule = "must be other data, or a fraction of data.train to hold out"
            yield path, ("data", "train"), f"got {source.path!r}, which is also in data.train; {rule}"
        if source.weight != 1:
            yield (*path, "weight"), path, f"got {source.weight:g}, must be 1 here: every document is evaluated once"
    if data.on_bad_row == "error" and data.max_bad_rows != type(data).model_fields["max_bad_rows"].default:
        rule = "has no effect while data.on_bad_row is error; set on_bad_row: skip"
        yield ("data", "max_bad_rows"), ("data", "on_bad_row"), f"got {data.max_bad_rows:g}, {rule}"
    if isinstance(train.warmup, int) and train.steps is not None and train.warmup >= train.steps:
        rule = f"must be below train.steps ({train.steps})"
        yield ("train", "warmup"), ("train", "steps"), f"got {train.warmup} steps, {rule}"
    yield from _impossible_averages(config)
    if config.adapter.init_from is not None:
        for key, default in (("init", INITS[0]), ("layers", ALL_LAYERS)):
            if (value := getattr(config.adapter, key)) != default:
                rule = f"but adapter.init_from gives the {'start' if key == 'init' else key}; remove one of the two"
                yield ("adapter", key), ("adapter", "init_from"), f"got {value}, {rule}"
    if isinstance(train.micro_batch_tokens, int) and train.micro_batch_tokens < data.max_length:
        rule = f"must be >= data.max_length ({data.max_length}), because one document must fit"
        yield ("train", "micro_batch_tokens"), ("data", "max_length"), f"got {train.micro_batch_tokens}, {rule}"
    guards = config.guards
    for key, value in (("early_stopping", guards.early_stopping), ("restore_best", guards.restore_best)):
        if value and not data.eval:
            rule = "needs evaluation data, but data.eval is 0 or null"
            yield ("guards", key), ("data", "eval"), f"got {str(value).lower()}, {rule}"
    if guards.on_spike == "rollback" and config.run.save_every is None:
        rule = "needs checkpoints to return to, but run.save_every is null"
        yield ("guards", "on_spike"), ("run", "save_every"), f"got rollback, {rule}"
    if train.activation_cache != "none":
        yield from _impossible_with_cache(config)
    yield from _impossible_preference(config)
    yield from _impossible_distillation(config)
    yield from _impossible_rollouts(config)
    yield from _impossible_masters(config)
    if config.adapter.merge_for != "none":
        yield from _impossible_with_merges(config)
    if config.adapter.trains_model:
        yield from _impossible_with_full(config)
    else:
        yield from _impossible_beside(config)


def _impossible_averages(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield what contradicts train.schedule: schedule_free, which has an average of its own, or train.average."""
    train = config.train
    schedule: KeyPath = ("train", "schedule")
    if train.schedule == "schedule_free":
        if train.optimizer != "adamw":
            rule = "but schedule_free is a form of AdamW; allowed: adamw"
            yield ("train", "optimizer"), schedule, f"got {train.optimizer}, {rule}"
        if train.average != "none":
            rule = "but the result of schedule_free is an average already; allowed: none"
            yield ("train", "average"), schedule, f"got {train.average}, {rule}"
    yield from engine_conflicts(config)
    yield from _impossible_rates(config)
    yield from _impossible_smoothing(config)
    if train.policy != "auto" and config.hybrid.enabled:
        rule = "but hybrid.enabled chooses that of predictive training; allowed: auto, or hybrid.enabled: false"
        yield ("train", "policy"), ("hybrid", "enabled"), f"got {train.policy}, {rule}"
    if (
        config.hybrid.enabled
        and config.hybrid.engine not in SHORT_FOR
        and (train.schedule == "schedule_free" or train.average != "none")
    ):
        rule = "but the average of train.schedule: schedule_free or train.average would not follow a prediction"
        yield ("hybrid", "enabled"), schedule, f"got true, {rule}; allowed: false"
    over = train.average_over
    if train.average == "none" and over != type(train).model_fields["average_over"].default:
        rule = "has no effect while train.average is none; set average: tail or ema"
        yield ("train", "average_over"), ("train", "average"), f"got {over:g}, {rule}"
    if isinstance(over, int) and train.steps is not None and over > train.steps:
        rule = f"must be at most train.steps ({train.steps})"
        yield ("train", "average_over"), ("train", "steps"), f"got {over} steps, {rule}"


def _impossible_smoothing(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield label smoothing of what is no plain loss of labels."""
    smoothing: KeyPath = ("train", "label_smoothing")
    if not (got := config.train.label_smoothing):
        return
    if (name := config.train.objective) != "sft":
        yield smoothing, ("train", "objective"), f"got {got:g}, but only sft has it, not {name}; allowed: 0"
    if config.hybrid.enabled:
        rule = "but predictive training compares the losses of training and evaluation; allowed: 0"
        yield smoothing, ("hybrid", "enabled"), f"got {got:g}, {rule}"


def _impossible_rates(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield a learning rate of tables that are not trained."""
    rate, adapter = config.train.embedding_learning_rate, config.adapter
    trains = adapter.trains_model or adapter.train_modules or adapter.train_rows or config.data.added_tokens
    if rate is not None and not trains:
        rule = "but neither embedding nor output head is trained; set adapter.train_rows, adapter.train_modules, "
        message = f"got {rate:g}, {rule}data.new_tokens or adapter.method: full"
        yield ("train", "embedding_learning_rate"), ("adapter", "method"), message


def _impossible_preference(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield keys of `preference` that the objective does not use, and what does not go with comparing answers."""
    preference, name = config.preference, config.train.objective
    objective: KeyPath = ("train", "objective")
    used = PREFERENCE_KEYS.get(name, tuple(type(preference).model_fields))  # an installed one may use any
    for key, field in type(preference).model_fields.items():
        if key not in used and (value := getattr(preference, key)) != field.default:
            users = ", ".join(one for one, keys in PREFERENCE_KEYS.items() if key in keys)
            rule = f"but train.objective: {name} does not use it; remove it, or choose an objective that does: {users}"
            yield ("preference", key), objective, f"got {value}, {rule}"
    if "label_smoothing" in used and preference.label_smoothing and preference.loss not in _SMOOTHED:
        rule = f"but preference.loss: {preference.loss} has no label smoothing; allowed: 0, or loss: sigmoid, robust"
        yield ("preference", "label_smoothing"), ("preference", "loss"), f"got {preference.label_smoothing:g}, {rule}"
    if preference.reference == "start" and config.adapter.init_from is None:
        rule = "but the run starts from no adapter; set adapter.init_from, or reference: base"
        yield ("preference", "reference"), ("adapter", "init_from"), f"got start, {rule}"
    if name == "sft":
        return
    if name != "distill" and config.data.loss_on == "all":
        rule = f"but train.objective: {name} learns from answers, not from prompts; allowed: assistant, last"
        yield ("data", "loss_on"), objective, f"got all, {rule}"
    if config.hybrid.enabled:
        rule = f"but predictive training judges its steps by the loss of sft, and train.objective is {name}"
        yield ("hybrid", "enabled"), objective, f"got true, {rule}; allowed: false"


def _impossible_distillation(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield keys of `distill` that are missing, or that the objective, the divergence or the teacher does not use."""
    distill, name = config.distill, config.train.objective
    objective: KeyPath = ("train", "objective")
    if name not in ("distill", ON_POLICY):
        for key, value in _changed(distill):
            rule = f"but train.objective: {name} does not use it; remove it, or set train.objective: distill"
            yield ("distill", key), objective, f"got {value}, {rule}"
        return
    if distill.teacher is None and (distill.distributions is None or name == ON_POLICY):
        rule = f"got null, but train.objective: {name} needs one that answers while it trains" + (
            "" if name == ON_POLICY else ", or distill.distributions, which dualtune distill record writes"
        )
        yield ("distill", "teacher"), objective, rule
    if distill.distributions is not None and (name == ON_POLICY or distill.teacher is not None):
        rule = "but a teacher that answers while the run trains needs no recording; remove one of the two"
        yield ("distill", "distributions"), ("distill", "teacher"), f"got {distill.distributions}, {rule}"
    if config.divergence != "jsd" and distill.beta != "auto":
        rule = f"but distill.divergence: {config.divergence} has no beta; remove it, or set divergence: jsd"
        yield ("distill", "beta"), ("distill", "divergence"), f"got {distill.beta:g}, {rule}"
    if name == ON_POLICY and distill.sft_weight:
        rule = "but the model's own samples are no answers to learn; allowed: 0"
        yield ("distill", "sft_weight"), objective, f"got {distill.sft_weight:g}, {rule}"
    is_estimate = name == ON_POLICY and config.divergence == "reverse_kl" and distill.temperature == 1
    if distill.top_k == 0 and not is_estimate:
        rule = f"but the sampled token alone estimates reverse_kl of {ON_POLICY} alone, at temperature 1; allowed: >= 1"
        yield ("distill", "top_k"), ("distill", "divergence"), f"got 0, {rule}"
    if distill.teacher is not None or name == ON_POLICY:
        yield from _impossible_teacher(config)
        return
    for key, value in _changed(distill, "teacher_", "served_as", "hint", "top_k"):
        rule = "but distill.distributions has what the teacher said; remove it, or set distill.teacher instead"
        yield ("distill", key), ("distill", "distributions"), f"got {value}, {rule}"


# The keys that belong to each kind of teacher.
_OF_TEACHER: Mapping[str, tuple[str, ...]] = {
    "model": ("teacher_adapter", "teacher_dtype", "teacher_quantization"),
    BASE_TEACHER: ("teacher_adapter",),
    SELF_TEACHER: (),
    "server": ("served_as",),
}


def _impossible_teacher(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield keys of a teacher that one of its kind does not use, and teachers that teach nothing."""
    distill, at = config.distill, ("distill", "teacher")
    kind = "server" if distill.is_served else distill.teacher
    used = _OF_TEACHER.get(kind or "", _OF_TEACHER["model"])
    for key, value in _changed(distill, *{key for keys in _OF_TEACHER.values() for key in keys}.difference(used)):
        rule = f"but a teacher that is {distill.teacher} has none of its own; remove it"
        yield ("distill", key), at, f"got {value}, {rule}"
    if kind == SELF_TEACHER and not distill.has_context:
        yield at, at, "got self, but it says what the student says; set distill.hint or distill.teacher_system too"
    is_start = not (distill.has_context or distill.teacher_adapter or config.adapter.init_from)
    if kind == BASE_TEACHER and is_start:
        rule = "but that is what the run starts as; set distill.teacher_system, distill.hint or distill.teacher_adapter"
        yield at, at, f"got base, {rule}"
    if kind == BASE_TEACHER and config.adapter.trains_model:
        rule = "but with adapter.method: full no base is left beside what is trained; name a model"
        yield at, ("adapter", "method"), f"got base, {rule}"


def _changed(section: Section, *starts: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a section, or those that begin so, whose values are not the defaults."""
    for key, field in type(section).model_fields.items():
        if key.startswith(starts or "") and (value := getattr(section, key)) != field.default:
            yield key, value


def _impossible_rollouts(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield keys of `rollouts` that are missing or not used, and what does not go with samples of the model."""
    rollouts, name, adapter = config.rollouts, config.train.objective, config.adapter
    objective: KeyPath = ("train", "objective")
    if name not in (*POLICY_OBJECTIVES, ON_POLICY):
        for key, value in _changed(rollouts):
            rule = f"but train.objective: {name} does not use it; remove it, or choose one of"
            yield ("rollouts", key), objective, f"got {value}, {rule} {', '.join((*POLICY_OBJECTIVES, ON_POLICY))}"
        return
    if name == ON_POLICY:
        for key, value in _changed(rollouts):
            if key not in OF_DRAWING:
                rule = f"but train.objective: {name} asks a teacher, not rewards; remove it. It uses"
                yield ("rollouts", key), objective, f"got {value}, {rule} {', '.join(OF_DRAWING)}"
    else:
        yield from _impossible_rewards(config)
    if adapter.dropout and not adapter.trains_model:
        rule = "but samples are drawn without dropout, and their ratios would be noise; set adapter.dropout: 0"
        yield ("adapter", "dropout"), objective, f"got {adapter.dropout:g}, {rule}"
    if config.train.activation_cache != "none":
        rule = f"but train.objective: {name} draws new documents in every step; allowed: none"
        yield ("train", "activation_cache"), objective, f"got {config.train.activation_cache}, {rule}"
    if config.memory.sharding == "full":
        rule = "but the processes of a sharded base cannot draw samples together; allowed: none"
        yield ("memory", "sharding"), objective, f"got full, {rule}"


def _impossible_rewards(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield what objectives that learn from rewards lack, or cannot use."""
    rollouts, name, adapter = config.rollouts, config.train.objective, config.adapter
    objective: KeyPath = ("train", "objective")
    if rollouts.samples < 2:
        rule = f"but train.objective: {name} compares the answers to a prompt with each other; allowed: an integer >= 2"
        yield ("rollouts", "samples"), objective, f"got {rollouts.samples}, {rule}"
    if rollouts.environment is None and rollouts.turns != type(rollouts).model_fields["turns"].default:
        rule = "but without rollouts.environment the model answers once; name one, or remove it"
        yield ("rollouts", "turns"), ("rollouts", "environment"), f"got {rollouts.turns}, {rule}"
    if rollouts.updates > 1 and config.train.policy != "auto":
        rule = f"but train.policy: {config.train.policy} makes its own updates; allowed: 1"
        yield ("rollouts", "updates"), ("train", "policy"), f"got {rollouts.updates}, {rule}"
    if not rollouts.rewards and rollouts.environment is None:
        rule = f"got none, but train.objective: {name} needs what rewards an answer, such as exact or rewards.py:name"
        yield ("rollouts", "rewards"), objective, rule
    if rollouts.weights and len(rollouts.weights) != len(rollouts.rewards):
        rule = f"must be one for each of the {len(rollouts.rewards)} rewards, or none"
        yield ("rollouts", "weights"), ("rollouts", "rewards"), f"got {len(rollouts.weights)}, {rule}"
    if rollouts.kl and adapter.trains_model:
        rule = "but with adapter.method: full no base is left to compare with; allowed: 0"
        yield ("rollouts", "kl"), ("adapter", "method"), f"got {rollouts.kl:g}, {rule}"
    if name == "rloo" and rollouts.advantage_scale not in ("auto", "none"):
        rule = "but rloo compares with the other samples and divides by nothing; allowed: auto, none"
        yield ("rollouts", "advantage_scale"), objective, f"got {rollouts.advantage_scale}, {rule}"


def _impossible_with_merges(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield what does not go with training on the merge as a format rounds it."""
    merge_for: KeyPath = ("adapter", "merge_for")
    adapter, memory, got = config.adapter, config.memory, f"got {config.adapter.merge_for}"
    if adapter.experts:
        yield merge_for, ("adapter", "experts"), f"{got}, but experts do not train on their merges; allowed: false"
    if config.model.quantization not in ("auto", "none"):
        rule = f"but an adapter is merged into the plain base, not into {config.model.quantization}; set it to none"
        yield merge_for, ("model", "quantization"), f"{got}, {rule}"
    if config.model.kernels == "graph":
        yield merge_for, ("model", "kernels"), f"{got}, but a recorded step cannot round a merge; allowed: auto"
    if memory.resident_layers != "all":
        rule = "but layers that are streamed keep no merge; allowed: all"
        yield merge_for, ("memory", "resident_layers"), f"{got}, {rule}"


def _impossible_masters(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield what does not go with weights in bfloat16."""
    masters: KeyPath = ("adapter", "master_weights")
    if (got := config.adapter.master_weights) == "float32":
        return
    if not config.adapter.trains_model:
        rule = f"but adapter.method: {config.adapter.method} always trains in float32; remove the key"
        yield masters, ("adapter", "method"), f"got {got}, {rule}"
    if config.model.dtype not in ("auto", got):
        rule = f"but the model computes in {config.model.dtype}; allowed: float32, or model.dtype: {got}"
        yield masters, ("model", "dtype"), f"got {got}, {rule}"
    if config.hybrid.enabled:
        rule = "but a prediction moves float32 weights; allowed: float32, or hybrid.enabled: false"
        yield masters, ("hybrid", "enabled"), f"got {got}, {rule}"


def _impossible_with_cache(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield what leaves no layer to cache, or needs every layer to be called."""
    cache: KeyPath = ("train", "activation_cache")
    got, memory = f"got {config.train.activation_cache}", config.memory
    if config.adapter.trains_model:
        rule = "but adapter.method: full trains the first layer too, so nothing stays the same over the epochs"
        yield cache, ("adapter", "method"), f"{got}, {rule}; allowed: none"
    elif (
        isinstance(config.adapter.targets, str) and config.adapter.layers == ALL_LAYERS and not config.adapter.init_from
    ):
        rule = f"but adapter.targets: {config.adapter.targets} adapts the first layer too; choose upper layers"
        yield cache, ("adapter", "targets"), f"{got}, {rule}, such as adapter.layers: last 8"
    if memory.sharding == "full":
        rule = "but memory.sharding: full needs all processes for every layer"
        yield cache, ("memory", "sharding"), f"{got}, {rule}; allowed: none, or memory.sharding: none"
    if memory.resident_layers != "all":
        rule = "but memory.resident_layers counts on every layer being computed"
        yield cache, ("memory", "resident_layers"), f"{got}, {rule}; allowed: none, or memory.resident_layers: all"


def _impossible_beside(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield what needs a base that is frozen, where parameters of it are trained beside an adapter."""
    adapter, data, memory = config.adapter, config.data, config.memory
    asked = [key for key in ("train_modules", "train_rows") if getattr(adapter, key)]
    asked += ["bias"] * (adapter.bias != "none")
    of_data = [key for key in ("new_tokens", "new_special_tokens") if getattr(data, key)]
    keys: list[KeyPath] = [*(("adapter", key) for key in asked), *(("data", key) for key in of_data)]
    if adapter.train_rows == "new" and not of_data:
        rule = "but no token is new; name them in data.new_tokens or data.new_special_tokens"
        yield ("adapter", "train_rows"), ("data", "new_tokens"), f"got new, {rule}"
    if twice := [text for text in data.new_tokens if text in data.new_special_tokens]:
        rule = "but data.new_tokens names it too; a token is special or not, remove one of the two"
        yield ("data", "new_special_tokens"), ("data", "new_tokens"), f"got {twice[0]}, {rule}"
    for path in keys[:1]:
        rule = f"but {dotted(path)} trains parameters of the base"
        if config.train.activation_cache != "none":
            message = f"got {config.train.activation_cache}, {rule}, so nothing stays the same over the epochs"
            yield ("train", "activation_cache"), path, f"{message}; allowed: none"
        if memory.sharding == "full":
            yield (
                ("memory", "sharding"),
                path,
                f"got full, {rule}, so it cannot be sharded; allowed: auto, none",
            )
        if memory.resident_layers != "all":
            message = f"got {memory.resident_layers}, {rule}, and only a frozen one is streamed"
            yield ("memory", "resident_layers"), path, f"{message}; allowed: all"
    for key in asked:
        if adapter.init_from is not None:
            rule = "but adapter.init_from gives what is trained; remove one of the two"
            yield (
                ("adapter", key),
                ("adapter", "init_from"),
                f"got {', '.join(map(str, getattr(adapter, key)))}, {rule}",
            )


# What saves memory where all parameters are trained, in place of a base that is packed or streamed.
_LEAST_WITH_FULL = "With full, train.optimizer: adamw_8bit and memory.checkpointing: full take the least memory"


def _impossible_with_full(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield what has no meaning, or cannot be done, where all parameters of the model are trained."""
    method: KeyPath = ("adapter", "method")
    for key in _ADAPTER_ONLY:
        value = getattr(config.adapter, key)
        if value != type(config.adapter).model_fields[key].default:
            shown = value if isinstance(value, str | int | float) else ", ".join(map(str, value))
            yield ("adapter", key), method, f"got {shown}, but adapter.method: full has no adapter; remove the key"
    if config.train.lora_plus_ratio not in (None, 1.0):
        rule = "but adapter.method: full has no B; remove the key"
        yield ("train", "lora_plus_ratio"), method, f"got {config.train.lora_plus_ratio:g}, {rule}"
    if config.adapter.init_from is not None:
        rule = "but adapter.method: full has no adapter; merge it, and set model.name to the result"
        yield ("adapter", "init_from"), method, f"got {config.adapter.init_from!r}, {rule}"
    if config.model.quantization not in ("auto", "none"):
        rule = (
            "but packed weights cannot be trained (adapter.method: full); allowed: auto, none, or adapter.method: lora"
        )
        yield ("model", "quantization"), method, f"got {config.model.quantization}, {rule}. {_LEAST_WITH_FULL}"
    if config.memory.checkpointing == "adapter_inputs":
        rule = "which recomputes the inputs of adapters, and adapter.method: full has none"
        message = f"got adapter_inputs, {rule}; allowed: auto, none, full, {{layers: …}}"
        yield ("memory", "checkpointing"), method, message
    if config.memory.sharding == "full":
        rule = "but only a frozen base can be sharded, and adapter.method: full trains it; allowed: auto, none"
        yield ("memory", "sharding"), method, f"got full, {rule}"
    if config.memory.resident_layers != "all":
        rule = "but only a frozen base can be streamed; allowed: all, or adapter.method: lora"
        message = f"got {config.memory.resident_layers}, {rule}. {_LEAST_WITH_FULL}"
        yield ("memory", "resident_layers"), method, message

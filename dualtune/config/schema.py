"""The config: every key with its type, default and a one-sentence description.

Defaults and descriptions are only defined here, those of the section `data` in `data_section.py`. The commented default
(`render.py`), the JSON schema, the documentation and the error messages are generated from them. The names are a public
interface.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dualtune.base.plugins import points_of
from dualtune.base.text import closest, did_you_mean
from dualtune.config.combinations import impossible_pairs, with_train_keys
from dualtune.config.data_section import DataConfig
from dualtune.config.values import (
    BASE_TEACHER,
    DEFAULT_TOP_K,
    OBJECTIVE_NAMES,
    OBJECTIVES_GROUP,
    ON_POLICY,
    RULES,
    SELF_TEACHER,
    Alphas,
    Arguments,
    Count,
    Factor,
    Fraction,
    InitName,
    Layers,
    MethodName,
    ModuleNames,
    Name,
    Names,
    NotNegative,
    Numbers,
    OwnObjectiveName,
    PathText,
    PolicyObjectiveName,
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
    init_optimizer: bool = False
    """Whether to start with the optimizer's state too, from the checkpoint that holds the adapter of init_from."""

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
    """The peak learning rate; where it is not set, it is less for whole models, comparisons of answers, rewards, lion,
    pissa and olora."""
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
    router_aux_loss_coef: NotNegative | None = None
    """How much the loss counts that spreads the tokens of each document over the experts of a mixture, in training;
    with 0 the metrics only say what its routers do, with null not even that."""
    policy: Literal["auto"] | Name = "auto"
    """What decides each step: auto as hybrid.enabled says, else the name of an installed step policy."""
    objective: OwnObjectiveName | PolicyObjectiveName | Name = "sft"
    """What is minimized: sft −log p of the answers; dpo, orpo, simpo and cpo compare two answers to a prompt, kto needs
    one with a label; distill learns a teacher's distributions of them, on_policy_distill those of the model's own
    samples; else the name of an installed objective."""

    @field_validator("objective")
    @classmethod
    def _objective_is_there(cls, name: str) -> str:
        """Refuse a name that is neither ours nor that of an installed package: it may be a slip of the pen."""
        if name in OBJECTIVE_NAMES or any(point.name == name for point in points_of(OBJECTIVES_GROUP)):
            return name
        meant = closest(name.lower(), OBJECTIVE_NAMES)
        advice = did_you_mean(meant) if meant else "Or install the package that registers it: docs/objectives.md"
        raise refuse(f"got '{name}', allowed: {', '.join(OBJECTIVE_NAMES)}. {advice}")

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
    """The file that `dualtune distill record` has written: the teacher's distributions on the data of this config."""
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
    """How many of the teacher's most probable tokens count at each place; 0 is the sampled token alone."""
    divergence: Literal["auto", "forward_kl", "reverse_kl", "jsd"] = "auto"
    """The distance to the teacher: forward_kl of its most probable tokens alone, in one forward pass; reverse_kl, or
    jsd with beta, of these and of all other tokens as one, in two; auto is forward_kl of the data's answers and
    reverse_kl of samples."""
    beta: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = "auto"
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
    def loads_model(self) -> bool:
        """Whether the teacher is another model, which is loaded beside the run's own."""
        return self.teacher not in (None, BASE_TEACHER, SELF_TEACHER) and not self.is_served

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
    """With what the model holds a conversation: a Python class as FILE.py:CLASS, or an environment of the package
    verifiers as verifiers:NAME; null: it answers once."""
    environment_args: Arguments = {}  # noqa: RUF012  pydantic copies it
    """With which arguments the environment is made, such as {difficulty: 2}."""
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
    """The temperature at which answers are drawn, and at which an objective with rewards trains the model."""
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

    @property
    def reads_columns(self) -> bool:
        """Whether a function or an environment may read any column of the data."""
        return self.environment is not None or any(".py:" in reward for reward in self.rewards)


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

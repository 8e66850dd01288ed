"""Values of a config that are valid separately but not together, and those that are short for others.

Each function yields (key, conflicting key, message). `Config` asks for them when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from dualtune.config.values import (
    BASE_TEACHER,
    ON_POLICY,
    POLICY_OBJECTIVES,
    SELF_TEACHER,
    KeyPath,
    Section,
    dotted,
)
from dualtune.model.methods import INITS
from dualtune.model.optimizer import is_of_a_table
from dualtune.model.targets import ALL_LAYERS

if TYPE_CHECKING:
    from dualtune.config.schema import Config

# ----------------------------------------------------------------------------------------------------------------------
# Engines of `hybrid` that are a kind of optimizer or result, not a step policy: short for keys of `train`.

# What each sets in `train`, unless the config does. An average of weights is worth most where the rate stays high.
SHORT_FOR: Mapping[str, Mapping[str, str]] = {
    "schedule_free": {"schedule": "schedule_free"},
    "average": {"schedule": "constant", "average": "tail"},
}
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
    "train_rows", "bias", "init", "merge_for", "experts",
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
    elif config.adapter.init_optimizer:
        rule = "but adapter.init_from names no run that has an optimizer; set it to one, such as runs/first"
        yield ("adapter", "init_optimizer"), ("adapter", "init_from"), f"got true, {rule}"
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
    yield from _impossible_balance(config)
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
    """Yield label smoothing with other losses than the plain one of labels."""
    smoothing: KeyPath = ("train", "label_smoothing")
    if not (got := config.train.label_smoothing):
        return
    if (name := config.train.objective) != "sft":
        yield smoothing, ("train", "objective"), f"got {got:g}, but only sft has it, not {name}; allowed: 0"
    if config.hybrid.enabled:
        rule = "but predictive training compares the losses of training and evaluation; allowed: 0"
        yield smoothing, ("hybrid", "enabled"), f"got {got:g}, {rule}"


def _impossible_balance(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield what does not compute all layers, whose experts are balanced, in one pass."""
    key: KeyPath = ("train", "router_aux_loss_coef")
    if (coefficient := config.train.router_aux_loss_coef) is None:
        return
    got = f"got {coefficient:g}"
    if config.train.activation_cache != "none":
        rule = "but train.activation_cache skips the layers below the adapter, whose routers count too; allowed: null"
        yield key, ("train", "activation_cache"), f"{got}, {rule}"
    if config.model.kernels == "graph":
        rule = "but a step that is recorded as a whole watches no routers; allowed: null, or model.kernels: auto"
        yield key, ("model", "kernels"), f"{got}, {rule}"
    if config.memory.resident_layers != "all":
        rule = "but routers of layers that are streamed are not watched; allowed: null, or memory.resident_layers: all"
        yield key, ("memory", "resident_layers"), f"{got}, {rule}"


def _impossible_rates(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield a learning rate of tables that are not trained. What an adapter to start from trains is not known here."""
    rate, adapter = config.train.embedding_learning_rate, config.adapter
    if rate is None or adapter.init_from is not None:
        return
    has_tables = any(is_of_a_table(f"{name}.weight") for name in adapter.train_modules)
    if not (adapter.trains_model or has_tables or adapter.train_rows or config.data.added_tokens):
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
        rule = "but the model's own samples are not answers to learn; allowed: 0"
        yield ("distill", "sft_weight"), objective, f"got {distill.sft_weight:g}, {rule}"
    is_plain = distill.temperature == config.rollouts.temperature == 1
    if distill.top_k == 0 and not (name == ON_POLICY and config.divergence == "reverse_kl" and is_plain):
        rule = (
            f"but the sampled token alone estimates reverse_kl of {ON_POLICY} alone, with distill.temperature and "
            "rollouts.temperature 1; allowed: >= 1"
        )
        yield ("distill", "top_k"), ("distill", "divergence"), f"got 0, {rule}"
    if distill.teacher is not None or name == ON_POLICY:
        yield from _impossible_teacher(config)
        return
    for key, value in _changed(distill, "teacher_", "served_as", "hint", "top_k"):
        rule = "but distill.distributions has a teacher's answers already; remove it, or set distill.teacher instead"
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
        yield at, at, "got self, which answers as the student does; set distill.hint or distill.teacher_system too"
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
            yield key, ", ".join(map(str, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else value


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
    if rollouts.environment is None and rollouts.environment_args:
        names = ", ".join(rollouts.environment_args)
        rule = "but without rollouts.environment there is nothing that takes them; name one, or remove them"
        yield ("rollouts", "environment_args"), ("rollouts", "environment"), f"got {names}, {rule}"
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
    if name == "cispo" and rollouts.clip_low != "auto":
        rule = "but cispo limits ratios from above alone (rollouts.clip_high); remove it"
        yield ("rollouts", "clip_low"), objective, f"got {rollouts.clip_low:g}, {rule}"
    if name == "rloo" and rollouts.advantage_scale not in ("auto", "none"):
        rule = "but rloo compares with the other samples and divides by nothing; allowed: auto, none"
        yield ("rollouts", "advantage_scale"), objective, f"got {rollouts.advantage_scale}, {rule}"


def _impossible_with_merges(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield what does not go with training on the merge as a format rounds it."""
    merge_for: KeyPath = ("adapter", "merge_for")
    got = f"got {config.adapter.merge_for}"
    if config.model.quantization not in ("auto", "none"):
        rule = f"but an adapter is merged into the plain base, not into {config.model.quantization}; set it to none"
        yield merge_for, ("model", "quantization"), f"{got}, {rule}"


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
    beside = [key for key in ("train_modules", "train_rows") if getattr(adapter, key)]
    beside += ["bias"] * (adapter.bias != "none")
    of_data = [key for key in ("new_tokens", "new_special_tokens") if getattr(data, key)]
    keys: list[KeyPath] = [*(("adapter", key) for key in beside), *(("data", key) for key in of_data)]
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
    for key in beside:
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
            shown = "true" if value is True else shown
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

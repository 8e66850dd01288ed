"""Values of a config that are valid separately but not together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dualtune.config.engines import SHORT_FOR, engine_conflicts
from dualtune.config.problem import KeyPath

if TYPE_CHECKING:
    from dualtune.config.schema import Config


# Keys of the section `adapter` that have no meaning with adapter.method: full.
_ADAPTER_ONLY = ("rank", "alpha", "scaling", "dropout", "targets")


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
    if config.adapter.trains_model:
        yield from _impossible_with_full(config)


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


def _impossible_with_cache(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield what leaves no layer to cache, or needs every layer to be called."""
    cache: KeyPath = ("train", "activation_cache")
    got, memory = f"got {config.train.activation_cache}", config.memory
    if config.adapter.trains_model:
        rule = "but adapter.method: full trains the first layer too, so nothing stays the same over the epochs"
        yield cache, ("adapter", "method"), f"{got}, {rule}; allowed: none"
    elif isinstance(config.adapter.targets, str) and config.adapter.init_from is None:
        rule = f"but adapter.targets: {config.adapter.targets} adapts the first layer too; name modules of upper layers"
        yield cache, ("adapter", "targets"), f"{got}, {rule} by their paths, such as layers.10.self_attn.q_proj"
    if memory.sharding == "full":
        rule = "but memory.sharding: full needs all processes for every layer"
        yield cache, ("memory", "sharding"), f"{got}, {rule}; allowed: none, or memory.sharding: none"
    if memory.resident_layers != "all":
        rule = "but memory.resident_layers counts on every layer being computed"
        yield cache, ("memory", "resident_layers"), f"{got}, {rule}; allowed: none, or memory.resident_layers: all"


def _impossible_with_full(config: Config) -> Iterator[tuple[KeyPath, KeyPath, str]]:
    """Yield what has no meaning, or cannot be done, where all parameters of the model are trained."""
    method: KeyPath = ("adapter", "method")
    for key in _ADAPTER_ONLY:
        value = getattr(config.adapter, key)
        if value != type(config.adapter).model_fields[key].default:
            shown = value if isinstance(value, str | int | float) else ", ".join(value)
            yield ("adapter", key), method, f"got {shown}, but adapter.method: full has no adapter; remove the key"
    if config.adapter.init_from is not None:
        rule = "but adapter.method: full has no adapter; merge it, and set model.name to the result"
        yield ("adapter", "init_from"), method, f"got {config.adapter.init_from!r}, {rule}"
    if config.model.quantization not in ("auto", "none"):
        rule = "but packed weights cannot be trained (adapter.method: full); allowed: auto, none"
        yield ("model", "quantization"), method, f"got {config.model.quantization}, {rule}"
    if config.memory.checkpointing == "remade":
        rule = "which recomputes the inputs of adapters, and adapter.method: full has none"
        yield ("memory", "checkpointing"), method, f"got remade, {rule}; allowed: auto, none, full, {{layers: …}}"
    if config.memory.sharding == "full":
        rule = "but only a frozen base can be split, and adapter.method: full trains it; allowed: auto, none"
        yield ("memory", "sharding"), method, f"got full, {rule}"
    if config.memory.resident_layers != "all":
        rule = "but only a frozen base can be streamed, and adapter.method: full trains it; allowed: all"
        yield ("memory", "resident_layers"), method, f"got {config.memory.resident_layers}, {rule}"

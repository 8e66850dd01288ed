"""Translate configs of Unsloth's command line and Studio (`unsloth train --config FILE`), and their meaning here.

Based on unsloth_cli/config.py and studio/backend/core/training/ of August 2026.
"""

from __future__ import annotations

from typing import Any, cast

from dualtune.config.importing.arguments import NO_PREFERENCES, Arguments, module_names
from dualtune.config.importing.table import NAMED_OUTSIDE, Given, Note, Settings, absent, needless, translated

DEFAULTS: dict[str, Any] = {
    "training.training_type": "lora", "training.max_seq_length": 2048, "training.load_in_4bit": True,
    "training.output_dir": "./outputs", "training.num_epochs": 3, "training.learning_rate": 2e-4,
    "training.batch_size": 2, "training.gradient_accumulation_steps": 4, "training.warmup_steps": 5,
    "training.weight_decay": 0.01, "training.random_seed": 3407, "training.max_grad_norm": 1.0,
    "training.optim": "adamw_8bit", "training.lr_scheduler_type": "linear", "training.warmup_ratio": 0.0,
    "lora.lora_r": 64, "lora.lora_alpha": 16, "lora.lora_dropout": 0.0, "data.format_type": "auto",
    "lora.target_modules": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
}  # fmt: skip
_ARGS = Arguments(
    {"num_train_epochs": "num_epochs", "per_device_train_batch_size": "batch_size", "seed": "random_seed"}, "training."
)
_FORMATS = {"auto": None, "alpaca": "alpaca", "chatml": "messages", "sharegpt": "sharegpt"}


def _model(given: Given) -> Settings:
    if (name := given.text("model")) is None:
        raise given.wrong("model", "the file names no base model; write model: and a hub id or a directory")
    return {"model.name": name}


def _method(given: Given) -> Settings:
    kind = given.get("training.training_type")
    if kind not in ("lora", "full"):
        raise given.wrong("training.training_type", f"only lora and full can be translated; {NO_PREFERENCES}")
    return {"adapter.method": given.note("full", "training.training_type")} if kind == "full" else {}


def _is_full(given: Given) -> bool:
    return given.get("training.training_type") == "full"


def _quantization(given: Given) -> Settings:
    if given.flag("training.load_in_4bit") and not _is_full(given):
        return {"model.quantization": given.note("nf4", "training.load_in_4bit")}
    return {}


def _adapter(given: Given) -> Settings:
    if _is_full(given):
        return {}
    settings: Settings = {
        "adapter.rank": given.note(given.count("lora.lora_r"), "lora.lora_r"),
        "adapter.alpha": given.note(given.number("lora.lora_alpha"), "lora.lora_alpha"),
        "adapter.dropout": given.note(given.number("lora.lora_dropout"), "lora.lora_dropout"),
    }
    if given.flag("lora.use_rslora"):
        settings["adapter.scaling"] = given.note("rank_stabilized", "lora.use_rslora")
    return settings | module_names(given, "lora.target_modules")


def _data(given: Given) -> Settings:
    name, files = given.text("data.dataset"), given.get("data.local_dataset")
    paths = cast(list[Any], files) if isinstance(files, list) else [files] if files else [name]
    if paths == [None]:
        raise given.wrong("data.dataset", "the file names no data; write data: {dataset: …} or {local_dataset: […]}")
    if name and files:
        given.skip("data.dataset", "data.local_dataset wins over it")
    format = given.get("data.format_type")
    if format not in _FORMATS:
        given.lose("data.format_type", "the format is detected from the columns; allowed are those of data.format")
    train = paths if len(paths) > 1 else paths[0]
    settings: Settings = {"data.train": given.note(train, "data.local_dataset" if files else "data.dataset")}
    if ours := _FORMATS.get(str(format)):
        settings["data.format"] = given.note(ours, "data.format_type")
    return settings | {"data.eval": Note(0, "Unsloth evaluates nothing")}


def _loss_on(given: Given) -> Settings:
    on = "assistant" if given.flag("training.train_on_completions") else "all"
    return {"data.loss_on": given.note(on, "training.train_on_completions")}


def _checkpointing(given: Given) -> Settings:
    value = given.get("training.gradient_checkpointing")
    if value in ("unsloth", "true", True):
        return {"memory.checkpointing": given.note("full", "training.gradient_checkpointing")}
    return {"memory.checkpointing": given.note("none", "training.gradient_checkpointing")} if value == "none" else {}


def _trackers(given: Given) -> Settings:
    switches = {"wandb": "logging.enable_wandb", "tensorboard": "logging.enable_tensorboard"}
    on = {name: key for name, key in switches.items() if given.flag(key)}
    for key in ("logging.wandb_project", "logging.tensorboard_dir"):
        if key in given and on:
            given.lose(key, NAMED_OUTSIDE)
        elif key in given:
            given.skip(key, "no tracker is turned on")
    return {"run.track": given.note([*on], *on.values())} if on else {}


def _intervals(given: Given) -> Settings:
    if "logging.log_frequency" in given:
        every = given.note(given.count("logging.log_frequency"), "logging.log_frequency")
        return _ARGS.intervals(given) | {"run.log_every": every}
    return _ARGS.intervals(given)


RULES = (
    translated("model", "model.name", _model),
    translated("training.training_type", "adapter.method", _method, "`lora` and `full`"),
    translated("training.load_in_4bit", "model.quantization", _quantization, "`nf4`; it is off by default here"),
    translated("lora.lora_r lora.lora_alpha lora.lora_dropout lora.use_rslora lora.target_modules",
               "adapter.rank, adapter.alpha, adapter.dropout, adapter.scaling, adapter.targets", _adapter),
    translated("data.dataset data.local_dataset data.format_type", "data.train, data.format", _data,
               "chatml is `messages`"),
    translated("training.max_seq_length", "data.max_length", lambda given: {
        "data.max_length": given.note(given.count("training.max_seq_length", 2), "training.max_seq_length")}),
    translated("training.batch_size training.gradient_accumulation_steps training.packing",
               "data.packing, train.tokens_per_step or train.documents_per_step",
               lambda given: _ARGS.batch(given, "training.max_seq_length"),
               "their product; packed, times max_seq_length"),
    translated("training.num_epochs training.max_steps", "train.epochs, train.steps", _ARGS.length),
    translated("training.learning_rate training.lr_scheduler_type training.warmup_steps training.warmup_ratio",
               "train.learning_rate, train.schedule, train.warmup", _ARGS.schedule),
    translated("training.optim training.weight_decay training.max_grad_norm",
               "train.optimizer, train.weight_decay, train.max_grad_norm", _ARGS.optimizer,
               "names with 8bit become adamw_8bit, whose codes are its own"),
    translated("training.train_on_completions", "data.loss_on", _loss_on, "false is `all`, true is `assistant`"),
    translated("training.gradient_checkpointing", "memory.checkpointing", _checkpointing, "`full`"),
    translated("training.save_steps training.eval_steps logging.log_frequency",
               "run.save_every, run.eval_every, run.log_every", _intervals, "0 is null"),
    translated("training.output_dir", "run.dir", _ARGS.directory),
    translated("training.random_seed", "run.seed", _ARGS.seed, "the random numbers differ"),
    translated("logging.enable_wandb logging.enable_tensorboard logging.wandb_project logging.tensorboard_dir",
               "run.track", _trackers, "W&B is offline by default"),
    absent("lora.use_loftq", "LoRA starts at zero"),
    absent("lora.use_dora", "DoRA is not supported yet; this is LoRA of the same rank"),
    absent("training.trust_remote_code", "code from a model's repository is never run; use a model that needs none"),
    needless("lora.vision_all_linear lora.finetune_vision_layers lora.finetune_language_layers "
             "lora.finetune_attention_modules lora.finetune_mlp_modules",
             "it is for models with pictures: here adapter.targets names the layers"),
    needless("inference", "it belongs to generation: `dualtune chat`, `generate`, `serve`"),
    needless("logging.wandb_token logging.hf_token", "log in with `wandb login` and `hf auth login`"),
)  # fmt: skip

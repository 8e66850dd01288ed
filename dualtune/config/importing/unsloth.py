"""Translate configs of Unsloth's command line and Studio (`unsloth train --config FILE`), and their meaning here.

Based on unsloth_cli/config.py and studio/backend/core/training/ of August 2026.
"""

from __future__ import annotations

from typing import Any, cast

from dualtune.config.importing.arguments import DETECTED, NAMED_OUTSIDE, NO_REWARDS, Arguments, dora, lora, module_names
from dualtune.config.importing.table import ForeignFile, Note, Settings, absent, needless, renamed, translated

DEFAULTS: dict[str, Any] = {
    "training.training_type": "lora", "training.max_seq_length": 2048, "training.load_in_4bit": True,
    "training.output_dir": "./outputs", "training.num_epochs": 3, "training.learning_rate": 2e-4,
    "training.batch_size": 2, "training.gradient_accumulation_steps": 4, "training.warmup_steps": 5,
    "training.weight_decay": 0.01, "training.random_seed": 3407, "training.max_grad_norm": 1.0,
    "training.optim": "adamw_8bit", "training.lr_scheduler_type": "linear", "training.warmup_ratio": 0.0,
    "lora.lora_r": 64, "lora.lora_alpha": 16, "lora.lora_dropout": 0.0, "data.format_type": "auto",
    "lora.target_modules": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
}  # fmt: skip
_ARGS = Arguments({"num_train_epochs": "num_epochs", "per_device_train_batch_size": "batch_size"}, "training.")
_FORMATS = {"auto": None, "alpaca": "alpaca", "chatml": "messages", "sharegpt": "sharegpt"}


def _method(file: ForeignFile) -> Settings:
    kind = file.get("training.training_type")
    if kind not in ("lora", "full"):
        raise file.wrong("training.training_type", f"only lora and full can be translated; {NO_REWARDS}")
    if kind == "full":
        return {"adapter.method": file.note(kind, "training.training_type")}
    return dora(file, "lora.use_dora")


def _is_full(file: ForeignFile) -> bool:
    return file.get("training.training_type") == "full"


def _quantization(file: ForeignFile) -> Settings:
    if file.flag("training.load_in_4bit") and not _is_full(file):
        return {"model.quantization": file.note("nf4", "training.load_in_4bit")}
    return {}


def _adapter(file: ForeignFile) -> Settings:
    if _is_full(file):
        return {}
    settings = lora(file, "lora.lora_r", "lora.lora_alpha", "lora.lora_dropout")
    if file.flag("lora.use_rslora"):
        settings["adapter.scaling"] = file.note("rank_stabilized", "lora.use_rslora")
    return settings | module_names(file, "lora.target_modules")


def _data(file: ForeignFile) -> Settings:
    name, files = file.text("data.dataset"), file.get("data.local_dataset")
    paths: list[Any] = cast(list[Any], files) if isinstance(files, list) and files else [cast(Any, files) or name]
    if paths == [None]:
        raise file.wrong("data.dataset", "the file names no data; write data: {dataset: …} or {local_dataset: […]}")
    if name and files:
        file.skip("data.dataset", "data.local_dataset wins over it")
    format = str(file.get("data.format_type"))
    if format not in _FORMATS:
        file.lose("data.format_type", DETECTED)
    train = paths if len(paths) > 1 else paths[0]
    settings: Settings = {"data.train": file.note(train, "data.local_dataset" if files else "data.dataset")}
    if detected := _FORMATS.get(format):
        settings["data.format"] = file.note(detected, "data.format_type")
    return settings | {"data.eval": Note(0, "Unsloth evaluates nothing")}


def _loss_on(file: ForeignFile) -> Settings:
    on = "assistant" if file.flag("training.train_on_completions") else "all"
    return {"data.loss_on": file.note(on, "training.train_on_completions")}


def _checkpointing(file: ForeignFile) -> Settings:
    value = file.get("training.gradient_checkpointing")
    if value in ("unsloth", "true", True):
        return {"memory.checkpointing": file.note("full", "training.gradient_checkpointing")}
    return {"memory.checkpointing": file.note("none", "training.gradient_checkpointing")} if value == "none" else {}


def _trackers(file: ForeignFile) -> Settings:
    switches = {"wandb": "logging.enable_wandb", "tensorboard": "logging.enable_tensorboard"}
    on = {name: key for name, key in switches.items() if file.flag(key)}
    for key in ("logging.wandb_project", "logging.tensorboard_dir"):
        if key in file and on:
            file.lose(key, NAMED_OUTSIDE)
        elif key in file:
            file.skip(key, "no tracker is turned on")
    return {"run.track": file.note([*on], *on.values())} if on else {}


def _intervals(file: ForeignFile) -> Settings:
    key = "logging.log_frequency"
    logging = {"run.log_every": file.note(file.count(key), key)} if key in file else {}
    return _ARGS.intervals(file) | logging


RULES = (
    renamed("model", "model.name", ForeignFile.model),
    translated("training.training_type lora.use_dora", "adapter.method", _method, "`lora` and `full`"),
    translated("training.load_in_4bit", "model.quantization", _quantization, "`nf4`; it is off by default here"),
    translated("lora.lora_r lora.lora_alpha lora.lora_dropout lora.use_rslora lora.target_modules",
               "adapter.rank, adapter.alpha, adapter.dropout, adapter.scaling, adapter.targets", _adapter),
    translated("data.dataset data.local_dataset data.format_type", "data.train, data.format", _data,
               "chatml is `messages`"),
    renamed("training.max_seq_length", "data.max_length", ForeignFile.count, least=2),
    translated("training.batch_size training.gradient_accumulation_steps training.packing",
               "data.packing, train.tokens_per_step or train.documents_per_step",
               lambda file: _ARGS.batch(file, "training.max_seq_length"),
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
    renamed("training.output_dir", "run.dir", ForeignFile.text),
    renamed("training.random_seed", "run.seed", ForeignFile.count, "the random numbers differ", least=0),
    translated("logging.enable_wandb logging.enable_tensorboard logging.wandb_project logging.tensorboard_dir",
               "run.track", _trackers, "W&B is offline by default"),
    absent("lora.use_loftq", "LoRA starts at zero"),
    absent("training.trust_remote_code", "code from a model's repository is never run; use a model that needs none"),
    needless("lora.vision_all_linear lora.finetune_vision_layers lora.finetune_language_layers "
             "lora.finetune_attention_modules lora.finetune_mlp_modules",
             "it is for models with pictures: here adapter.targets names the layers"),
    needless("inference", "it belongs to generation: `dualtune chat`, `generate`, `serve`"),
    needless("logging.wandb_token logging.hf_token", "log in with `wandb login` and `hf auth login`"),
)  # fmt: skip

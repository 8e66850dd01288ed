"""Translate configs of axolotl-rs: `base_model`, `adapter`, and the sections lora, quantization, dataset and training.

The defaults are those that its documents state; where they are silent, a key keeps the default that it has here.
"""

from __future__ import annotations

from typing import Any, get_args

from dualtune.config.importing.arguments import (
    DETECTED,
    EIGHT_BITS,
    Arguments,
    dora,
    listed,
    lora,
    module_names,
    nf4_only,
)
from dualtune.config.importing.table import ForeignFile, Note, Settings, absent, needless, renamed, translated
from dualtune.model.beside import Biases

DEFAULTS: dict[str, Any] = {
    "output_dir": "./outputs", "seed": 42, "lora.r": 8, "lora.alpha": 16,
    "lora.target_modules": ["q_proj", "v_proj"], "quantization.bits": 4, "quantization.quant_type": "nf4",
    "quantization.double_quant": True, "quantization.block_size": 64, "dataset.max_length": 512,
    "dataset.train_split": 1.0, "training.epochs": 1, "training.batch_size": 1,
    "training.gradient_accumulation_steps": 1, "training.learning_rate": 2e-4, "training.weight_decay": 0.01,
    "training.warmup_ratio": 0.1, "training.lr_scheduler": "cosine", "training.optimizer": "adamw_torch",
    "training.max_grad_norm": 0.3,
}  # fmt: skip
SECTIONS = ("lora", "dataset", "training", "quantization")
_NF4 = tuple(f"quantization.{name}" for name in ("bits", "quant_type", "double_quant", "block_size"))
_ARGS = Arguments(
    {"num_train_epochs": "epochs", "per_device_train_batch_size": "batch_size", "lr_scheduler_type": "lr_scheduler",
     "optim": "optimizer"}, "training.",
)  # fmt: skip
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text", "text": "text", "chat": "messages",
            "chat_template": "messages", "messages": "messages", "chatml": "messages"}  # fmt: skip


def is_in_sections(keys: dict[str, Any]) -> bool:
    """Return whether a file with base_model has these sections; `quantization` of axolotl itself has no bits."""
    quantization = keys.get("quantization")
    has_bits = isinstance(quantization, dict) and "bits" in quantization
    return has_bits or any(isinstance(keys.get(name), dict) for name in SECTIONS[:3])


def _bias(file: ForeignFile) -> Settings:
    if (name := file.get("lora.bias")) in (None, "none"):
        return {}
    if name not in get_args(Biases):
        raise file.wrong("lora.bias", f"allowed are {', '.join(get_args(Biases))}")
    return {"adapter.bias": file.note(name, "lora.bias")}


def _method(file: ForeignFile) -> Settings:
    if file.get("adapter") in (None, "none", "full"):
        return {"adapter.method": Note("full", "no adapter: all parameters are trained")}
    if file.get("adapter") not in ("lora", "qlora"):
        raise file.wrong("adapter", "only lora and qlora can be translated, or none: all parameters are trained")
    return dora(file, "lora.use_dora")


def _quantization(file: ForeignFile) -> Settings:
    if file.get("adapter") != "qlora" and "quantization" not in file:
        return {}
    if file.get("adapter") == "lora" and "quantization" in file:
        file.lose("quantization", "adapter: lora keeps the base as it is stored; write qlora to quantize it")
        return {}
    bits = file.count("quantization.bits")
    if bits != 4:
        file.lose("quantization.bits", EIGHT_BITS if bits == 8 else "nf4 has 4 bits, int8 has 8")
        return {}
    nf4_only(file, "quantization.quant_type", "quantization.double_quant")
    if file.count("quantization.block_size") != 64:
        file.lose("quantization.block_size", "the blocks of nf4 have 64 weights")
    return {"model.quantization": file.note("nf4", "adapter", *_NF4)}


def _adapter(file: ForeignFile) -> Settings:
    if file.get("adapter") not in ("lora", "qlora"):
        return {}
    return lora(file, "lora.r", "lora.alpha", "lora.dropout") | module_names(file, "lora.target_modules")


def _optimizer(file: ForeignFile) -> Settings:
    """Translate what the file says: its documents have no defaults for these."""
    settings = _ARGS.optimizer(file)
    for name in ("weight_decay", "max_grad_norm"):
        if f"training.{name}" not in file:
            del settings[f"train.{name}"]
    return settings


def _data(file: ForeignFile) -> Settings:
    path, kind, share = file.text("dataset.path"), file.get("dataset.type"), file.number("dataset.train_split")
    if path is None:
        path = "data/train.jsonl"
        file.lose("dataset.path", f"the file names no data; write the path of your rows in place of {path}", "not set")
        settings: Settings = {"data.train": Note(path, "the file names no data: write its path here")}
    else:
        settings = {"data.train": file.note(path, "dataset.path")}
    if not 0 < share <= 1:
        raise file.wrong("dataset.train_split", "must be a fraction of the rows, above 0 and at most 1")
    settings["data.eval"] = file.note(round(1 - share, 6), "dataset.train_split")
    if kind is not None and str(kind) not in _FORMATS:
        file.lose("dataset.type", DETECTED)
    elif kind is not None:
        settings["data.format"] = file.note(_FORMATS[str(kind)], "dataset.type")
        if kind == "alpaca":
            settings["data.template"] = Note("none", "dataset.type: alpaca, which has its own prompt")
    length = file.note(file.count("dataset.max_length", 2), "dataset.max_length")
    return settings | {"data.max_length": length}


RULES = (
    renamed("base_model", "model.name", ForeignFile.model),
    translated("adapter lora.use_dora", "adapter.method", _method, "lora and qlora; without an adapter, full"),
    translated("quantization.bits quantization.quant_type quantization.double_quant quantization.block_size",
               "model.quantization", _quantization, "adapter: qlora becomes nf4"),
    translated("lora.r lora.alpha lora.dropout lora.target_modules",
               "adapter.rank, adapter.alpha, adapter.dropout, adapter.targets", _adapter),
    translated("dataset.path dataset.type dataset.max_length dataset.train_split",
               "data.train, data.eval, data.format, data.max_length", _data,
               "train_split is the part that is trained on, data.eval the rest"),
    translated("training.batch_size training.gradient_accumulation_steps training.packing",
               "data.packing, train.documents_per_step", lambda file: _ARGS.batch(file, "dataset.max_length"),
               "their product"),
    translated("training.epochs training.max_steps", "train.epochs, train.steps", _ARGS.length),
    translated("training.learning_rate training.lr_scheduler training.warmup_ratio training.warmup_steps",
               "train.learning_rate, train.schedule, train.warmup", _ARGS.schedule),
    translated("training.optimizer training.weight_decay training.max_grad_norm",
               "train.optimizer, train.weight_decay, train.max_grad_norm", _optimizer),
    translated("training.logging_steps training.eval_steps training.save_steps training.save_total_limit",
               "run.log_every, run.eval_every, run.save_every, run.keep", _ARGS.intervals),
    translated("training.gradient_checkpointing", "memory.checkpointing", _ARGS.checkpointing),
    renamed("output_dir", "run.dir", ForeignFile.text),
    renamed("seed", "run.seed", ForeignFile.count, "the random numbers differ", least=0),
    translated("lora.modules_to_save", "adapter.train_modules",
               lambda file: listed(file, "lora.modules_to_save", "adapter.train_modules")),
    translated("lora.bias", "adapter.bias", _bias),
    absent("hybrid", "predictive training has the section hybrid here: see docs/hybrid.md"),
    needless("device", "it is set by --platform"),
)  # fmt: skip

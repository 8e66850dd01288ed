"""Translate mlx-lm configs (`mlx_lm.lora --config`): its keys and defaults, and their meaning here.

Based on mlx_lm/lora.py, mlx_lm/tuner/utils.py, trainer.py and datasets.py of mlx-lm 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from dualtune.config.importing.arguments import OF_SOURCES, lora, reported_to, template_variables
from dualtune.config.importing.table import (
    ForeignFile,
    Note,
    Settings,
    absent,
    needless,
    renamed,
    table_in,
    translated,
)

DEFAULTS: dict[str, Any] = {
    "fine_tune_type": "lora", "optimizer": "adam", "data": "mlx-community/WikiSQL", "seed": 0, "num_layers": 16,
    "batch_size": 4, "iters": 1000, "learning_rate": 1e-5, "steps_per_report": 10, "steps_per_eval": 200,
    "adapter_path": "adapters", "save_every": 100, "max_seq_length": 2048, "grad_accumulation_steps": 1,
    "lora_parameters.rank": 8, "lora_parameters.dropout": 0.0, "lora_parameters.scale": 20.0,
    "model": "Qwen/Qwen3-0.6b",
}  # fmt: skip

_WEIGHT_DECAY = {"adam": 0.0, "adamw": 0.01, "muon": 0.01}
# What mlx-lm's optimizers that are also ours do otherwise.
_OWN = {
    "muon": "here an update is as long as one of AdamW: choose AdamW's learning rate",
    "adafactor": "here the learning rate is train.learning_rate, neither relative to the step nor to the weights",
}
_SCHEDULES = {"cosine_decay": "cosine", "linear_schedule": "linear"}


def _method(file: ForeignFile) -> Settings:
    if (kind := file.get("fine_tune_type")) not in ("lora", "dora"):
        rule = "only lora and dora can be translated: adapter.method: full trains all of the model, not its last layers"
        raise file.wrong("fine_tune_type", rule)
    if "train" in file and not file.flag("train"):
        raise file.wrong("train", "without training there is nothing to translate; to evaluate, use `dualtune eval`")
    return {"adapter.method": file.note(kind, "fine_tune_type")} if kind == "dora" else {}


def _adapter(file: ForeignFile) -> Settings:
    if "lora_parameters" in file and "lora_parameters.scale" not in file:
        raise file.wrong("lora_parameters.scale", "mlx-lm needs it if there are other lora_parameters: alpha / rank")
    rank, scale = file.count("lora_parameters.rank"), file.number("lora_parameters.scale")
    alpha = Note(rank * scale, f"lora_parameters.scale × rank = {scale:g} × {rank}")
    settings = lora(file, "lora_parameters.rank", "lora_parameters.scale", "lora_parameters.dropout")
    return settings | {"adapter.alpha": alpha}


def _targets(file: ForeignFile) -> Settings:
    keys = file.get("lora_parameters.keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in cast(list[Any], keys))):
        raise file.wrong("lora_parameters.keys", "must be a list of names")
    return last_layers(file, cast(list[str] | None, keys))


def last_layers(file: ForeignFile, keys: list[str] | None) -> Settings:
    """Translate num_layers: these modules, or all, of the last layers. -1 means all layers."""
    count, model = file.count("num_layers", least=-1), file.get("model")
    num_layers = file.count_layers(model) if isinstance(model, str) else None
    if count > (num_layers or count):
        raise file.wrong("num_layers", f"the model has {num_layers} layers")
    # The experts of a layer, which most classes of mlx-lm call so; the base's files do not.
    names = [key.replace("switch_mlp.", "experts.") for key in keys or ()]
    settings: Settings = {"adapter.targets": names or "all-linear"}
    if count <= 0 or count == num_layers:
        return settings
    return settings | {"adapter.layers": file.note(f"last {count}", "num_layers")}


def data_of(file: ForeignFile, names: Mapping[str, str]) -> Settings:
    """Translate the data. `names`: the keys that name a column, and ours for it."""
    columns = {column: file.get(key) for key, column in names.items() if key in file}
    settings: Settings = {"data.columns": file.note(columns, *names)} if columns else {}
    if "hf_dataset" in file:
        if "data" in file:
            file.skip("data", "hf_dataset wins over it")
        return settings | _hub(file, names)
    reason = (
        "The valid file of the directory is used; without one, a tenth of the rows is held out, unless data.eval is 0"
    )
    if "test" in file and file.flag("test"):
        file.lose("test", "training reads no test set; evaluate on it with `dualtune eval RUN --data FILE`")
    file.skip("data (valid)", reason, value="valid.jsonl")
    return settings | {"data.train": file.note(file.text("data"), "data")}


COLUMNS = {
    "prompt_feature": "prompt", "completion_feature": "completion", "text_feature": "text", "chat_feature": "messages",
}  # fmt: skip


def _hub(file: ForeignFile, names: Mapping[str, str]) -> Settings:
    entries = file.tables("hf_dataset")
    for entry in entries:
        for name in entry.keys() - {"path", "train_split", "valid_split", "config", *names}:
            file.lose(f"hf_dataset.{name}", OF_SOURCES, value=entry[name])
        for name, value in table_in(entry.get("config")).items():
            if name != "name":
                reason = "of the options of load_dataset, only subset is supported"
                file.lose(f"hf_dataset.config.{name}", reason, value=value)
    return {
        "data.train": [_hub_source(entry, names, entry.get("train_split") or "train[:80%]") for entry in entries],
        "data.eval": [_hub_source(entry, names, entry.get("valid_split") or "train[-10%:]") for entry in entries],
    }


def _hub_source(entry: dict[str, Any], names: Mapping[str, str], split: Any) -> dict[str, Any]:
    source = {"path": entry["path"], "split": split}
    if columns := {column: entry[key] for key, column in names.items() if entry.get(key)}:
        source["columns"] = columns
    if subset := table_in(entry.get("config")).get("name"):
        source["subset"] = subset
    return source


def loss_on(file: ForeignFile) -> Settings:
    if file.flag("mask_prompt"):
        return {"data.loss_on": Note("last", "mask_prompt: true; everything before the last message is masked")}
    return {"data.loss_on": Note("all", "mask_prompt: false")}


def _steps(file: ForeignFile) -> Settings:
    iters, accumulated = file.count("iters"), file.count("grad_accumulation_steps")
    if iters < accumulated:
        raise file.wrong("iters", f"must be at least grad_accumulation_steps ({accumulated}), or nothing is trained")
    documents = file.count("batch_size") * accumulated
    return {
        "train.steps": Note(iters // accumulated, f"iters: {iters} // grad_accumulation_steps: {accumulated}"),
        "train.documents_per_step": Note(
            documents, f"batch_size: {documents // accumulated} × grad_accumulation_steps: {accumulated}"
        ),
    }


def _intervals(file: ForeignFile) -> Settings:
    accumulated = file.count("grad_accumulation_steps")
    keys = {"steps_per_report": "log_every", "steps_per_eval": "eval_every", "save_every": "save_every"}
    return {f"run.{key}": file.note(max(1, file.count(name) // accumulated), name) for name, key in keys.items()}


def _learning_rate(file: ForeignFile) -> Settings:
    settings: Settings = {
        "train.learning_rate": file.note(file.number("learning_rate"), "learning_rate"),
        "train.schedule": Note("constant", "no lr_schedule that can be translated"),
        "train.warmup": Note(0, "no lr_schedule.warmup"),
    }
    if "lr_schedule" not in file:
        return settings
    if "learning_rate" in file:
        file.skip("learning_rate", "lr_schedule wins over it")
    name, arguments = file.text("lr_schedule.name"), file.get("lr_schedule.arguments")
    numbers = cast(list[Any], arguments) if isinstance(arguments, list) else []
    if not numbers or any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise file.wrong("lr_schedule.arguments", "must be a list of numbers")
    settings["train.learning_rate"] = Note(numbers[0], f"the first argument of {name}")
    if "lr_schedule.warmup" in file:
        settings["train.warmup"] = file.note(file.count("lr_schedule.warmup", least=0), "lr_schedule.warmup")
    if file.get("lr_schedule.warmup_init"):
        file.lose("lr_schedule.warmup_init", "the warm-up begins at learning_rate / (warmup + 1)")
    if name in _SCHEDULES:
        settings["train.schedule"] = file.note(_SCHEDULES[name], "lr_schedule.name")
        _check_end(file, name, numbers)
    else:
        file.lose("lr_schedule.name", "the schedules are constant, linear and cosine; constant is used")
    return settings


def _check_end(file: ForeignFile, name: str, numbers: list[float]) -> None:
    """Report a schedule with a different end: ours fall to zero over the whole run."""
    steps = file.count("iters") // file.count("grad_accumulation_steps")
    end, over = (numbers[2:3], numbers[1:2]) if name == "cosine_decay" else (numbers[1:2], numbers[2:3])
    if any(end) or over not in ([], [steps]):
        reason = "here the learning rate falls to 0 over the whole run; arguments after the first have no effect"
        file.lose("lr_schedule.arguments", reason)


def _optimizer(file: ForeignFile) -> Settings:
    name = str(file.get("optimizer")).lower()
    own = f"optimizer_config.{name}"
    for key in ("optimizer_config", own):
        if not isinstance(file.get(key) or {}, dict):
            raise file.wrong(key, "must be a mapping")
    options = table_in(file.get(own))
    if name in _OWN:
        file.lose("optimizer", _OWN[name])
    elif name not in _WEIGHT_DECAY:
        file.lose("optimizer", "AdamW is used instead; choose a new learning rate and weight decay")
    elif not options.get("bias_correction"):
        reason = "AdamW corrects the bias of its moments, mlx-lm only if bias_correction is set: the first steps differ"
        file.lose("optimizer", reason)
    for other in table_in(file.get("optimizer_config")).keys() - {name}:
        file.skip(f"optimizer_config.{other}", f"the optimizer is {name}")
    for key in options.keys() - {"weight_decay", "bias_correction"}:
        file.lose(f"{own}.{key}", "AdamW always has betas of 0.9 and 0.999 and an eps of 1e-8", value=options[key])
    decay = f"{own}.weight_decay"
    weight_decay = file.number(decay) if decay in file else _WEIGHT_DECAY.get(name, 0.0)
    chosen: Settings = {"train.optimizer": file.note(name, "optimizer")} if name in _OWN else {}
    return chosen | {
        "train.weight_decay": file.note(weight_decay, decay),
        "train.max_grad_norm": Note(None, "mlx-lm does not clip"),
    }


def _init_from(file: ForeignFile) -> Settings:
    path = file.text("resume_adapter_file")
    if path is None:
        return {}
    directory = path.removesuffix("adapters.safetensors").rstrip("/") or "."
    if not path.endswith("adapters.safetensors"):
        file.lose("resume_adapter_file", "adapter.init_from is a directory that also holds the adapter's config")
        return {}
    return {"adapter.init_from": directory}


RULES = (
    renamed("model", "model.name", ForeignFile.text),
    translated("fine_tune_type train", "adapter.method", _method,
               "lora and dora; mlx-lm's full trains the last num_layers layers, adapter.method: full all parameters"),
    translated("lora_parameters.rank lora_parameters.scale lora_parameters.dropout",
               "adapter.rank, adapter.alpha, adapter.dropout", _adapter,
               "alpha is scale × rank: mlx-lm multiplies by scale, dualtune by alpha / rank"),
    translated("chat_template_args chat_template_config", "data.template_variables",
               lambda file: template_variables(file, "chat_template_args", "chat_template_config"),
               "options of mlx_lm.server and mlx_lm.generate: here the training has them too"),
    translated("lora_parameters.keys num_layers", "adapter.targets, adapter.layers", _targets,
               "num_layers counts from the last layer: `last 16`; -1 is `all`"),
    translated("resume_adapter_file", "adapter.init_from", _init_from, "the directory of the file"),
    translated("data hf_dataset test prompt_feature completion_feature text_feature chat_feature",
               "data.train, data.eval, data.columns", lambda file: data_of(file, COLUMNS),
               "the valid file of a directory is found automatically"),
    translated("mask_prompt", "data.loss_on", loss_on, "false is `all`, true is `last`"),
    renamed("max_seq_length", "data.max_length", ForeignFile.count, "longer documents are cut, as in mlx-lm", least=2),
    translated("iters batch_size grad_accumulation_steps", "train.steps, train.documents_per_step", _steps,
               "iters counts micro-batches: steps are iters // grad_accumulation_steps, of batch_size × "
               "grad_accumulation_steps documents"),
    translated("learning_rate lr_schedule lr_schedule.name lr_schedule.arguments lr_schedule.warmup "
               "lr_schedule.warmup_init", "train.learning_rate, train.schedule, train.warmup", _learning_rate,
               "without lr_schedule the learning rate is constant; ours falls to 0 over the whole run"),
    translated("optimizer optimizer_config", "train.weight_decay, train.max_grad_norm", _optimizer,
               "always AdamW, with bias correction; mlx-lm clips no gradient, so max_grad_norm is null"),
    translated("grad_checkpoint", "memory.checkpointing", lambda file: (
        {"memory.checkpointing": "full"} if file.flag("grad_checkpoint") else {}), "`full`; `auto`: as little as fits"),
    translated("steps_per_report steps_per_eval save_every", "run.log_every, run.eval_every, run.save_every",
               _intervals, "in optimizer steps; mlx-lm counts micro-batches"),
    renamed("adapter_path", "run.dir", ForeignFile.text, "the adapter is in the folder adapter of the run directory"),
    renamed("seed", "run.seed", ForeignFile.count, "the random numbers differ", least=0),
    needless("val_batches", "every document of the evaluation data is evaluated"),
    needless("test_batches", "every document is evaluated"),
    needless("clear_cache_threshold", "the allocator's cache needs no setting"),
    needless("config", "it names a config file"),
    translated("report_to", "run.track", lambda file: reported_to(file, ("wandb",)),
               "`wandb`; its project is WANDB_PROJECT"),
    absent("project_name", "the environment variable WANDB_PROJECT says it"),
    absent("trust_remote_code", "code from a model's repository is never run; use a model that needs none"),
)  # fmt: skip

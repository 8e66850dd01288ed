"""Translate mlx-lm configs (`mlx_lm.lora --config`): its keys and defaults, and their meaning here.

Based on mlx_lm/lora.py, mlx_lm/tuner/utils.py, trainer.py and datasets.py of mlx-lm 0.32.
"""

from __future__ import annotations

from typing import Any, cast

from dualtune.config.importing.arguments import template_variables
from dualtune.config.importing.table import Given, Note, Settings, absent, needless, trackers_of_mlx_lm, translated

DEFAULTS: dict[str, Any] = {
    "fine_tune_type": "lora", "optimizer": "adam", "data": "mlx-community/WikiSQL", "seed": 0, "num_layers": 16,
    "batch_size": 4, "iters": 1000, "learning_rate": 1e-5, "steps_per_report": 10, "steps_per_eval": 200,
    "adapter_path": "adapters", "save_every": 100, "max_seq_length": 2048, "grad_accumulation_steps": 1,
    "lora_parameters.rank": 8, "lora_parameters.dropout": 0.0, "lora_parameters.scale": 20.0,
    "model": "Qwen/Qwen3-0.6b",
}  # fmt: skip

# The default of `keys` for model families with Llama's architecture.
_LINEAR = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
_WEIGHT_DECAY = {"adam": 0.0, "adamw": 0.01}
_SCHEDULES = {"cosine_decay": "cosine", "linear_schedule": "linear"}


def _model(given: Given) -> Settings:
    return {"model.name": given.text("model")}


def _method(given: Given) -> Settings:
    if given.get("fine_tune_type") != "lora":
        raise given.wrong(
            "fine_tune_type",
            "only lora can be translated: DoRA is not supported, and adapter.method: full trains all of the model, "
            "not its last layers",
        )
    if "train" in given and not given.flag("train"):
        raise given.wrong("train", "without training there is nothing to translate; to evaluate, use `dualtune eval`")
    return {}


def _adapter(given: Given) -> Settings:
    if "lora_parameters" in given and "lora_parameters.scale" not in given:
        raise given.wrong("lora_parameters.scale", "mlx-lm needs it if there are other lora_parameters: alpha / rank")
    rank, scale = given.count("lora_parameters.rank"), given.number("lora_parameters.scale")
    return {
        "adapter.rank": given.note(rank, "lora_parameters.rank"),
        "adapter.alpha": Note(rank * scale, f"lora_parameters.scale × rank = {scale:g} × {rank}"),
        "adapter.dropout": given.note(given.number("lora_parameters.dropout"), "lora_parameters.dropout"),
    }


def _targets(given: Given) -> Settings:
    keys = given.get("lora_parameters.keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in cast(list[Any], keys))):
        raise given.wrong("lora_parameters.keys", "must be a list of names")
    wanted, available = given.count("num_layers", least=-1), given.num_layers
    if wanted > 0 and available is None:
        reason = (
            "the model is not on this machine, so its layers cannot be counted, and all of them get an adapter; "
            "download it and import again, or list names such as layers.27.self_attn.q_proj in adapter.targets"
        )
        given.lose("num_layers", reason)
    if wanted > (available or wanted):
        raise given.wrong("num_layers", f"the model has {available} layers")
    if wanted <= 0 or available is None or wanted == available:
        return {"adapter.targets": keys or "all-linear"}
    layers, modules = range(available - wanted, available), cast(list[str], keys) or _LINEAR
    names = [f"layers.{layer}.{module}" for layer in layers for module in modules]
    return {"adapter.targets": Note(names, f"num_layers: the last {wanted} of {available}")}


def _data(given: Given) -> Settings:
    columns = {ours: given.get(theirs) for theirs, ours in _COLUMNS.items() if theirs in given}
    settings: Settings = {"data.columns": given.note(columns, *_COLUMNS)} if columns else {}
    if "hf_dataset" in given:
        if "data" in given:
            given.skip("data", "hf_dataset wins over it")
        return settings | _hub(given)
    reason = (
        "The valid file of the directory is used; without one, a tenth of the rows is held out, unless data.eval is 0"
    )
    if "test" in given and given.flag("test"):
        given.lose("test", "training reads no test set; evaluate on it with `dualtune eval RUN --data FILE`")
    given.skip("data (valid)", reason, value="valid.jsonl")
    return settings | {"data.train": given.note(given.text("data"), "data")}


_COLUMNS = {
    "prompt_feature": "prompt", "completion_feature": "completion", "text_feature": "text", "chat_feature": "messages",
}  # fmt: skip


def _hub(given: Given) -> Settings:
    value = given.get("hf_dataset")
    sets: list[Any] = cast(list[Any], value) if isinstance(value, list) else [value]
    if not all(isinstance(each, dict) and isinstance(cast(dict[str, Any], each).get("path"), str) for each in sets):
        raise given.wrong("hf_dataset", "must be a mapping with a path, or a list of such mappings")
    train = [_hub_source(given, each, "train_split", "train[:80%]") for each in sets]
    valid = [_hub_source(given, each, "valid_split", "train[-10%:]") for each in sets]
    return {"data.train": train, "data.eval": valid}


def _hub_source(given: Given, each: dict[str, Any], key: str, split: str) -> dict[str, Any]:
    source: dict[str, Any] = {"path": each["path"], "split": each.get(key) or split}
    if columns := {ours: each[theirs] for theirs, ours in _COLUMNS.items() if each.get(theirs)}:
        source["columns"] = columns
    options: Any = each.get("config") or {}
    if isinstance(options, dict) and cast(dict[str, Any], options).get("name"):
        source["subset"] = options["name"]
    known = {"path", "train_split", "valid_split", "config", *_COLUMNS}
    if key == "train_split":  # report it once
        for name in each.keys() - known:
            given.lose(f"hf_dataset.{name}", "a source has only path, subset, split, format, columns and weight",
                       value=each[name])  # fmt: skip
        for name in cast(dict[str, Any], options).keys() - {"name"} if isinstance(options, dict) else ():
            given.lose(f"hf_dataset.config.{name}", "of the options of load_dataset, only subset is supported",
                       value=options[name])  # fmt: skip
    return source


def _loss_on(given: Given) -> Settings:
    if given.flag("mask_prompt"):
        return {"data.loss_on": Note("last", "mask_prompt: true; everything before the last message is masked")}
    return {"data.loss_on": Note("all", "mask_prompt: false")}


def _steps(given: Given) -> Settings:
    iters, accumulated = given.count("iters"), given.count("grad_accumulation_steps")
    if iters < accumulated:
        raise given.wrong("iters", f"must be at least grad_accumulation_steps ({accumulated}), or nothing is trained")
    documents = given.count("batch_size") * accumulated
    return {
        "train.steps": Note(iters // accumulated, f"iters: {iters} // grad_accumulation_steps: {accumulated}"),
        "train.documents_per_step": Note(
            documents, f"batch_size: {documents // accumulated} × grad_accumulation_steps: {accumulated}"
        ),
    }


def _intervals(given: Given) -> Settings:
    accumulated = given.count("grad_accumulation_steps")
    keys = {"steps_per_report": "log_every", "steps_per_eval": "eval_every", "save_every": "save_every"}
    return {
        f"run.{ours}": given.note(max(1, given.count(theirs) // accumulated), theirs) for theirs, ours in keys.items()
    }


def _learning_rate(given: Given) -> Settings:
    settings: Settings = {
        "train.learning_rate": given.note(given.number("learning_rate"), "learning_rate"),
        "train.schedule": Note("constant", "no lr_schedule that can be translated"),
        "train.warmup": Note(0, "no lr_schedule.warmup"),
    }
    if "lr_schedule" not in given:
        return settings
    if "learning_rate" in given:
        given.skip("learning_rate", "lr_schedule wins over it")
    name, arguments = given.text("lr_schedule.name"), given.get("lr_schedule.arguments")
    numbers = cast(list[Any], arguments) if isinstance(arguments, list) else []
    if not numbers or any(isinstance(each, bool) or not isinstance(each, int | float) for each in numbers):
        raise given.wrong("lr_schedule.arguments", "must be a list of numbers")
    settings["train.learning_rate"] = Note(numbers[0], f"the first argument of {name}")
    if "lr_schedule.warmup" in given:
        settings["train.warmup"] = given.note(given.count("lr_schedule.warmup", least=0), "lr_schedule.warmup")
    if given.get("lr_schedule.warmup_init"):
        given.lose("lr_schedule.warmup_init", "the warm-up begins at learning_rate / (warmup + 1)")
    if name in _SCHEDULES:
        settings["train.schedule"] = given.note(_SCHEDULES[name], "lr_schedule.name")
        _check_end(given, name, numbers)
    else:
        given.lose("lr_schedule.name", "the schedules are constant, linear and cosine; constant is used")
    return settings


def _check_end(given: Given, name: str, numbers: list[float]) -> None:
    """Report a schedule with a different end: ours fall to zero over the whole run."""
    steps = given.count("iters") // given.count("grad_accumulation_steps")
    end, over = (numbers[2:3], numbers[1:2]) if name == "cosine_decay" else (numbers[1:2], numbers[2:3])
    if any(end) or any(each != steps for each in over):
        reason = f"here the learning rate falls to 0 over all {steps} steps; arguments after the first have no effect"
        given.lose("lr_schedule.arguments", reason)


def _optimizer(given: Given) -> Settings:
    name = str(given.get("optimizer")).lower()
    configs: Any = given.get("optimizer_config") or {}
    if not isinstance(configs, dict):
        raise given.wrong("optimizer_config", "must be a mapping")
    options: Any = given.get(f"optimizer_config.{name}") or {}
    if not isinstance(options, dict):
        raise given.wrong(f"optimizer_config.{name}", "must be a mapping")
    if name not in _WEIGHT_DECAY:
        given.lose("optimizer", "AdamW is used instead; choose a new learning rate and weight decay")
    elif not cast(dict[str, Any], options).get("bias_correction"):
        reason = "AdamW corrects the bias of its moments, mlx-lm only if bias_correction is set: the first steps differ"
        given.lose("optimizer", reason)
    for other in cast(dict[str, Any], configs).keys() - {name}:
        key = f"optimizer_config.{other}"
        given.skip(key, f"the optimizer is {name}", value=given.get(key))
    for key in cast(dict[str, Any], options).keys() - {"weight_decay", "bias_correction"}:
        given.lose(f"optimizer_config.{name}.{key}", "AdamW always has betas of 0.9 and 0.999 and an eps of 1e-8",
                   value=options[key])  # fmt: skip
    decay = f"optimizer_config.{name}.weight_decay"
    weight_decay = given.number(decay) if decay in given else _WEIGHT_DECAY.get(name, 0.0)
    return {
        "train.weight_decay": given.note(weight_decay, decay),
        "train.max_grad_norm": Note(None, "mlx-lm does not clip"),
    }


def _checkpointing(given: Given) -> Settings:
    return {"memory.checkpointing": given.note("full", "grad_checkpoint")} if given.flag("grad_checkpoint") else {}


def _init_from(given: Given) -> Settings:
    path = given.text("resume_adapter_file")
    if path is None:
        return {}
    directory = path.removesuffix("adapters.safetensors").rstrip("/") or "."
    if not path.endswith("adapters.safetensors"):
        given.lose("resume_adapter_file", "adapter.init_from is a directory that also holds the adapter's config")
        return {}
    return {"adapter.init_from": directory}


RULES = (
    translated("model", "model.name", _model),
    translated("fine_tune_type train", "", _method,
               "only lora; mlx-lm's full trains the last num_layers layers, adapter.method: full all parameters"),
    translated("lora_parameters.rank lora_parameters.scale lora_parameters.dropout",
               "adapter.rank, adapter.alpha, adapter.dropout", _adapter,
               "alpha is scale × rank: mlx-lm multiplies by scale, dualtune by alpha / rank"),
    translated("chat_template_args chat_template_config", "data.template_variables",
               lambda given: template_variables(given, "chat_template_args", "chat_template_config"),
               "options of mlx_lm.server and mlx_lm.generate: here the training has them too"),
    translated("lora_parameters.keys num_layers", "adapter.targets", _targets,
               "num_layers counts from the last layer: the targets name these layers one by one"),
    translated("resume_adapter_file", "adapter.init_from", _init_from, "the directory of the file"),
    translated("data hf_dataset test prompt_feature completion_feature text_feature chat_feature",
               "data.train, data.eval, data.columns", _data, "the valid file of a directory is found automatically"),
    translated("mask_prompt", "data.loss_on", _loss_on, "false is `all`, true is `last`"),
    translated("max_seq_length", "data.max_length", lambda given: {"data.max_length": given.count("max_seq_length", 2)},
               "longer documents are cut, as in mlx-lm"),
    translated("iters batch_size grad_accumulation_steps", "train.steps, train.documents_per_step", _steps,
               "iters counts micro-batches: steps are iters // grad_accumulation_steps, of batch_size × "
               "grad_accumulation_steps documents"),
    translated("learning_rate lr_schedule lr_schedule.name lr_schedule.arguments lr_schedule.warmup "
               "lr_schedule.warmup_init", "train.learning_rate, train.schedule, train.warmup", _learning_rate,
               "without lr_schedule the learning rate is constant; ours falls to 0 over the whole run"),
    translated("optimizer optimizer_config", "train.weight_decay, train.max_grad_norm", _optimizer,
               "always AdamW, with bias correction; mlx-lm clips no gradient, so max_grad_norm is null"),
    translated("grad_checkpoint", "memory.checkpointing", _checkpointing, "`full`; `auto`: as little as fits"),
    translated("steps_per_report steps_per_eval save_every", "run.log_every, run.eval_every, run.save_every",
               _intervals, "in optimizer steps; mlx-lm counts micro-batches"),
    translated("adapter_path", "run.dir", lambda given: {"run.dir": given.text("adapter_path")},
               "the adapter is in the folder adapter of the run directory"),
    translated("seed", "run.seed", lambda given: {"run.seed": given.count("seed", 0)}, "the random numbers differ"),
    needless("val_batches", "every document of the evaluation data is evaluated"),
    needless("test_batches", "every document is evaluated"),
    needless("clear_cache_threshold", "the allocator's cache needs no setting"),
    needless("config", "it names a config file"),
    translated("report_to", "run.track", trackers_of_mlx_lm, "`wandb`; its project is WANDB_PROJECT"),
    absent("project_name", "the environment variable WANDB_PROJECT says it"),
    absent("trust_remote_code", "code from a model's repository is never run; use a model that needs none"),
)  # fmt: skip

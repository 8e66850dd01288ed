"""Translate axolotl configs: its keys and defaults, and their meaning here.

Based on axolotl/utils/schemas/ and core/builders/base.py of July 2026; preferences on core/builders/rl.py of 0.19.
"""

from __future__ import annotations

from typing import Any, cast

from dualtune.config.importing import preferences, samples
from dualtune.config.importing.arguments import (
    DETECTED,
    EIGHT_BITS,
    LAUNCHED,
    NAMED_OUTSIDE,
    NEAREST,
    NO_REWARDS,
    OF_SOURCES,
    OTHER_TRACKERS,
    PATTERN,
    Arguments,
    dora,
    held_out,
    listed,
    lora,
    lora_plus,
    module_numbers,
    peft_init,
    special_tokens,
    token_rows,
    variables_in,
    with_experts,
)
from dualtune.config.importing.table import (
    ForeignFile,
    Note,
    Settings,
    absent,
    is_off,
    needless,
    renamed,
    shown,
    table_in,
    translated,
)

# ----------------------------------------------------------------------------------------------------------------------
# Translate axolotl's `datasets`, `test_datasets`, `val_set_size` and `chat_template`.

_FORMATS = {
    "alpaca": "alpaca", "completion": "text", "pretrain": "text", "sharegpt": "sharegpt",
    "chat_template": "messages", "chat_template.default": "messages",
}  # fmt: skip
_OWN_TYPE = {"field_instruction": "instruction", "field_input": "input", "field_output": "output",
             "field_system": "system"}  # fmt: skip
_READ = {"path", "name", "split", "type", "data_files", "ds_type", "field", "field_messages", "field_tools",
         "message_field_role", "message_field_content", "message_property_mappings",
         "chat_template_kwargs", "roles"}  # fmt: skip
_ROLES = ("system", "user", "assistant", "tool")
_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz")
_OF_PAIRS = {"field_messages": "messages", "field_chosen": "chosen", "field_rejected": "rejected"}
_OWN_PAIRS = {"field_system": "system", "field_prompt": "prompt", "field_chosen": "chosen",
              "field_rejected": "rejected", "field_completion": "completion", "field_label": "label"}  # fmt: skip
# Of GRPO it is a function of axolotl's user that says where the prompt is.
_FORMATS_OF = {"kto": "unpaired_preference", "grpo": None}
# The beginning of the type of preference data that names a template.
_TEMPLATES_OF_PAIRS = {"chatml": "chatml", "llama3": "llama-3"}
# Values that match our behaviour, so nothing is lost.
_SAME_HERE: dict[str, tuple[Any, ...]] = {
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]), "train_on_eos": ("turn",),
    "chat_template": ("tokenizer_default",), "train_on_eot": ("turn",),
}  # fmt: skip
# Only templates that write the same text as dtype, character by character, in every conversation of
# scripts/record_templates.py (axolotl's files of 2026-07-24).
_TEMPLATES = {"chatml": "chatml", "llama3": "llama-3", "qwen_25": "qwen-2.5", "gemma": "gemma-2",
              "gemma3": "gemma-3", "gemma3n": "gemma-3"}  # fmt: skip
_WHY = {
    "chat_template": "data.template is that of all sources, and takes a name such as chatml, or a Jinja file",
    "chat_template_jinja": "name a Jinja file in data.template",
    "roles_to_train": "data.loss_on is assistant, all or last",
    "train_on_eos": "the end of each turn that is a target is a target too",
    "shards": "select a part of the rows with split, such as train[:10%]",
    "conversation": "the tokenizer's own template is used",
    "revision": "download that revision of the dataset, and name its files in data.train",
    "drop_system_message": "remove the system messages from the rows",
}


def _data(file: ForeignFile) -> Settings:
    """Translate the sources and the evaluation data, and set the template if all sources use Alpaca's prompts."""
    train = _sources(file, "datasets")
    if not train:
        raise file.wrong("datasets", "must be a list with a path in each entry")
    settings: Settings = {"data.train": Note(train[0] if len(train) == 1 else train, "datasets")}
    settings |= _template_of_pairs(file)
    if {source.get("format") for source in train} == {"alpaca"}:
        settings["data.template"] = Note("none", "type: alpaca, which has Alpaca's own prompt and no chat template")
    if "test_datasets" in file:
        settings["data.eval"] = Note(_sources(file, "test_datasets"), "test_datasets")
        return settings
    return settings | held_out(file, "val_set_size")


def _template_of_pairs(file: ForeignFile) -> Settings:
    """Translate the template that the types of preference data name, if all name the same."""
    if _compared(file) is None:
        return {}
    kinds = [table_in(entry).get("type") for entry in cast(list[Any], file.get("datasets"))]
    names = {_TEMPLATES_OF_PAIRS.get(str(kind).partition(".")[0]) for kind in kinds}
    if len(names) > 1:
        file.lose("datasets (type)", "data.template is that of all sources", kinds)
    template = next(iter(names)) if len(names) == 1 else None
    return {"data.template": Note(template, f"datasets: type: {shown(kinds[0])}")} if template else {}


def _template(file: ForeignFile) -> Settings:
    """Translate the chat template. The datasets cannot have others (`_WHY`)."""
    name, jinja = file.text("chat_template"), file.text("chat_template_jinja")
    if jinja is not None:
        if "\n" not in jinja and "{" not in jinja:
            return {"data.template": jinja}
        file.lose("chat_template_jinja", "write it to a file, and name that file in data.template")
    elif name in _TEMPLATES:
        return {"data.template": Note(_TEMPLATES[name], f"chat_template: {name}")}
    elif name is not None and not name.startswith("tokenizer_default"):
        reason = "the tokenizer's own template is used; data.template takes a name such as chatml, or a Jinja file"
        file.lose("chat_template", reason)
    return {}


def _template_variables(file: ForeignFile) -> Settings:
    """Translate `chat_template_kwargs`, of the file and of its datasets: here all sources have the same."""
    key = "chat_template_kwargs"
    variables = variables_in(file, key, file.get(key)) if key in file else {}
    origins = [key] if variables else []
    for name in ("datasets", "test_datasets"):
        entries: Any = file.get(name)  # what is not a list of mappings is refused with the sources
        for index, entry in enumerate(cast("list[Any]", entries) if isinstance(entries, list) else []):
            if (value := table_in(entry).get(key)) is None:
                continue
            where = f"{name}[{index}].{key}"
            own = variables_in(file, where, value)
            if any(variables.get(variable, value) != value for variable, value in own.items()):
                file.lose(where, "data.template_variables are those of all sources", own)
            else:
                variables |= own
                origins.append(where)
    return {"data.template_variables": Note(variables, ", ".join(origins))} if variables else {}


def _sources(file: ForeignFile, key: str) -> list[dict[str, Any]]:
    entries = file.get(key)
    if not isinstance(entries, list):
        raise file.wrong(key, "must be a list")
    sources: list[dict[str, Any]] = []
    for index, entry in enumerate(cast(list[Any], entries)):
        if not isinstance(entry, dict):
            raise file.wrong(key, "must be a list of mappings")
        for source in _source(file, f"{key}[{index}]", cast(dict[str, Any], entry)):
            # Of a data set that is listed twice every row comes twice.
            if (same := next((i for i, other in enumerate(sources) if _is_same(other, source)), None)) is None:
                sources.append(source)
            elif key == "datasets":
                sources[same] = sources[same] | {"weight": sources[same].get("weight", 1) + 1}
    return sources


def _is_same(source: dict[str, Any], other: dict[str, Any]) -> bool:
    return {key: value for key, value in source.items() if key != "weight"} == other


def _source(file: ForeignFile, where: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
    _report_other_keys(file, where, entry)
    format, columns = _layout(file, where, entry)
    options = {"format": format, "columns": columns, "roles": _roles(file, where, entry)}
    files: Any = entry.get("data_files") or entry.get("path")
    if entry.get("data_files") or str(files).lower().endswith(_FILES):
        _report_part(file, where, entry)
    else:
        options |= {"subset": entry.get("name"), "split": entry.get("split")}
    paths: list[Any] = cast(list[Any], files) if isinstance(files, list) else [files]
    return [{"path": path} | {key: value for key, value in options.items() if value} for path in paths]


def _report_part(file: ForeignFile, where: str, entry: dict[str, Any]) -> None:
    """Report the part of a data set that an entry with files names: to its library a file is the split `train`."""
    for key in ("name", "split"):
        if (value := entry.get(key)) and (key, value) != ("split", "train"):
            file.lose(f"{where}.{key}", "files are read whole; name those with the rows", value=value)


def _roles(file: ForeignFile, where: str, entry: dict[str, Any]) -> dict[str, str]:
    """Return the names of roles that are not ours; axolotl lists them for each of its roles."""
    roles: dict[str, str] = {}
    for role, names in table_in(entry.get("roles")).items():
        listed = cast(list[Any], names) if isinstance(names, list) else [names]
        if role not in _ROLES or not all(isinstance(name, str) for name in listed):
            reason = f"roles are {', '.join(_ROLES)}, each with a list of names"
            file.lose(f"{where}.roles.{role}", reason, value=names)
            continue
        roles |= {name: role for name in listed if name != role}
    return roles


def _layout(file: ForeignFile, where: str, entry: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return our format, and the names of its columns in the file."""
    if (objective := _compared(file)) is not None:
        return _layout_of_pairs(file, where, entry, objective)
    kind = entry.get("type")
    if isinstance(kind, dict):
        columns = cast(dict[str, Any], kind)
        for key in columns.keys() - _OWN_TYPE.keys():
            if not is_off(columns[key]):
                reason = "prompts come from data.template, or are Alpaca's"
                file.lose(f"{where}.type.{key}", reason, value=columns[key])
        return "alpaca", {column: columns[key] for key, column in _OWN_TYPE.items() if columns.get(key)}
    name, _, style = str(kind or "").partition(":")
    format = _FORMATS.get(name)
    if style and format:
        reason = "its prompts are not supported; allowed are the formats of data.format"
        file.lose(f"{where}.type", reason, value=kind)
    elif format is None:
        file.lose(f"{where}.type", DETECTED, value=kind)
    if format == "text":
        return format, {"text": entry["field"]} if entry.get("field") else {}
    if format in ("messages", "sharegpt"):
        return _chat_layout(file, where, entry, format)
    return format, {}


def _layout_of_pairs(
    file: ForeignFile, where: str, entry: dict[str, Any], objective: str
) -> tuple[str | None, dict[str, Any]]:
    kind, format = entry.get("type"), _FORMATS_OF.get(objective, "preference")
    columns = {column: entry[key] for key, column in _OF_PAIRS.items() if entry.get(key, column) != column}
    if isinstance(kind, dict):
        for key, value in cast(dict[str, Any], kind).items():
            if key in _OWN_PAIRS:
                columns |= {_OWN_PAIRS[key]: value} if value else {}
            elif not is_off(value):
                file.lose(f"{where}.type.{key}", "prompts come from data.template", value=value)
    elif kind is not None and str(kind).partition(".")[0] not in ("chat_template", *_TEMPLATES_OF_PAIRS):
        file.lose(f"{where}.type", "the columns are found by their names; the prompt comes from data.template", kind)
    if entry.get("message_property_mappings") or entry.get("message_field_role") or entry.get("message_field_content"):
        _chat_layout(file, where, entry, format or "messages")
    return format, {column: name for column, name in columns.items() if column != name}


def _chat_layout(file: ForeignFile, where: str, entry: dict[str, Any], format: str) -> tuple[str, dict[str, Any]]:
    names = table_in(entry.get("message_property_mappings"))
    role = names.get("role") or entry.get("message_field_role") or "role"
    content = names.get("content") or entry.get("message_field_content") or "content"
    if (role, content) == ("from", "value"):
        format = "sharegpt"
    elif (role, content) != ("role", "content"):
        reason = "a message has a role and content, or from and value; rename them in the file"
        file.lose(f"{where}.message_property_mappings", reason, value=names or {"role": role, "content": content})
    for name in names.keys() - {"role", "content"}:
        reason = "a message has only a role, content and tool calls"
        file.lose(f"{where}.message_property_mappings.{name}", reason, value=names[name])
    key = "conversations" if format == "sharegpt" else "messages"
    column = entry.get("field_messages") or "messages"
    columns = {key: column} if column != key else {}
    if entry.get("field_tools") not in (None, "tools"):
        columns["tools"] = entry["field_tools"]
    return format, columns


def _report_other_keys(file: ForeignFile, where: str, entry: dict[str, Any]) -> None:
    for key, value in entry.items():
        if key in _READ or (key in _OF_PAIRS and _compared(file) is not None):
            continue
        if is_off(value) or value in _SAME_HERE.get(key, ()):
            file.skip(f"{where}.{key}", "it is the same here", value=value)
        else:
            file.lose(f"{where}.{key}", _WHY.get(key, OF_SOURCES), value=value)


# ----------------------------------------------------------------------------------------------------------------------
DEFAULTS: dict[str, Any] = {
    "output_dir": "./model-out", "sequence_len": 512, "micro_batch_size": 1, "gradient_accumulation_steps": 1,
    "num_epochs": 1.0, "lr_scheduler": "cosine", "optimizer": "adamw_torch_fused", "weight_decay": 0.0,
    "max_grad_norm": 1.0, "lora_dropout": 0.0, "val_set_size": 0.0, "warmup_ratio": 0.03, "seed": 42,
    "rl_beta": 0.1, "cpo_alpha": 1.0, "kto_desirable_weight": 1.0, "kto_undesirable_weight": 1.0,
    "dpo_loss_type": ["sigmoid"],
}  # fmt: skip

# The names of axolotl for the options of transformers that it calls otherwise.
_ARGS = Arguments({
    "num_train_epochs": "num_epochs", "lr_scheduler_type": "lr_scheduler", "optim": "optimizer",
    "per_device_train_batch_size": "micro_batch_size", "packing": "sample_packing",
})  # fmt: skip
_LORA, _TARGETS = (
    "lora_r lora_alpha lora_dropout peft_use_rslora",
    "lora_target_linear lora_target_modules lora_target_parameters",
)
_TRACKERS = {  # name -> the keys that turn it on: a switch, and the name of a project
    "wandb": ("use_wandb", "wandb_project"),
    "mlflow": ("use_mlflow", "mlflow_experiment_name"),
    "trackio": ("use_trackio", "trackio_project_name"),
    "tensorboard": ("use_tensorboard", ""),
}


def _method(file: ForeignFile) -> Settings:
    for key in ("reward_model", "process_reward_model", "pretraining_dataset"):
        if key in file and not is_off(file.get(key)):
            raise file.wrong(key, "cannot be translated: rewards and streams are not supported yet")
    if _compared(file) not in (None, "grpo", *_PREFERENCES):
        allowed = f"allowed are grpo, ipo, {', '.join(_PREFERENCES)}"
        raise file.wrong(
            "rl", f"cannot be translated, {allowed}; the nearest is grpo, with rewards in trl.reward_funcs"
        )
    if "adapter" not in file:
        file.skip_all(f"{_LORA} peft_use_dora {_TARGETS}", "without an adapter it has no meaning")
        return {"adapter.method": Note("full", "no adapter: all parameters are trained")}
    if file.get("adapter") not in ("lora", "qlora"):
        raise file.wrong("adapter", f"only lora and qlora can be translated, or none: all is trained. {NEAREST}")
    return dora(file, "peft_use_dora")


# By objective: our keys of `preference` and theirs. That of beta has several names.
_PREFERENCES: dict[str, dict[str, str]] = {
    "dpo": {},
    "kto": {"desirable_weight": "kto_desirable_weight", "undesirable_weight": "kto_undesirable_weight"},
    "orpo": {},
    "simpo": {"gamma": "simpo_gamma", "sft_weight": "cpo_alpha"},
}
_TRLS = {key: f"trl.{key}" for key in (*samples.KEYS.split(), *samples.LOST) if key != "beta"}
_BETAS = ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha")


def _compared(file: ForeignFile) -> str | None:
    """Return the objective of preference training, or the name of another one in `rl`; None for that of SFT."""
    name = file.get("rl")
    return None if is_off(name) else "dpo" if name == "ipo" else str(name)


def _preference(file: ForeignFile) -> Settings:
    if (objective := _compared(file)) != "grpo":
        file.skip_all(" ".join(_TRLS.values()), "it belongs to rl: grpo")
    if objective is None:
        return {}
    if objective == "grpo":
        return samples.sampled(file, "rl", names={**_TRLS, "beta": "trl.beta"})
    beta = next((name for name in _BETAS if name in file), "rl_beta")
    settings = preferences.compared(file, objective, "rl", beta=beta, **_PREFERENCES[objective])
    if file.get("rl") == "ipo":
        settings["preference.loss"] = file.note("ipo", "rl")
    elif objective == "dpo":
        settings |= preferences.dpo_losses(file, "dpo_loss_type", "dpo_loss_weights", "dpo_label_smoothing")
        if "rpo_alpha" in file and "preference.sft_weight" not in settings:
            settings["preference.sft_weight"] = file.note(file.number("rpo_alpha"), "rpo_alpha")
    if file.flag("dpo_use_weighting"):
        file.lose("dpo_use_weighting", "every pair has the same weight")
    return settings | _reference(file, objective) | preferences.without_dropout(file, "lora_dropout")


def _reference(file: ForeignFile, objective: str) -> Settings:
    """Translate the switch that loads a reference of its own: the base, with the adapter that the run goes on from."""
    if not file.flag("rl_adapter_ref_model"):
        return {}
    if objective not in ("dpo", "kto"):
        file.skip("rl_adapter_ref_model", f"{objective} has no reference")
        return {}
    is_start = "lora_model_dir" in file
    return {"preference.reference": file.note("start" if is_start else "base", "rl_adapter_ref_model")}


def _batch(file: ForeignFile) -> Settings:
    if _compared(file) == "grpo":
        return samples.batch(file, "micro_batch_size", "gradient_accumulation_steps", "trl.num_generations")
    return _ARGS.batch(file, "sequence_len", total="batch_size")


def _dtype(file: ForeignFile) -> Settings:
    for key, dtype in (("fp16", "float16"), ("float16", "float16"), ("float32", "float32")):
        if key in file and file.flag(key):
            return {"model.dtype": dtype}
    for key in ("bf16", "bfloat16"):
        if key in file:
            value = file.get(key)
            on = "bfloat16" if value == "full" or (value != "auto" and file.flag(key)) else "float32"
            return {"model.dtype": "auto" if value == "auto" else on}
    return {}


def _quantization(file: ForeignFile) -> Settings:
    if file.get("adapter") == "qlora" or file.flag("load_in_4bit"):
        return {"model.quantization": Note("nf4", "adapter: qlora, or load_in_4bit: true")}
    if file.flag("load_in_8bit"):
        file.lose("load_in_8bit", EIGHT_BITS)
    return {}


def _adapter(file: ForeignFile) -> Settings:
    if "adapter" not in file:
        return {}
    settings = lora(file, "lora_r", "lora_alpha", "lora_dropout")
    if file.flag("peft_use_rslora"):
        settings["adapter.scaling"] = file.note("rank_stabilized", "peft_use_rslora")
    return settings


def _init(file: ForeignFile) -> Settings:
    key, value = "peft_init_lora_weights", file.get("peft_init_lora_weights")
    if value is None or "adapter" not in file:
        return {}
    if (init := peft_init(value)) is None:
        file.lose(key, "this start is not supported yet; it is kaiming")
        return {}
    return {"adapter.init": file.note(init, key)}


def _targets(file: ForeignFile) -> Settings:
    return with_experts(file, "lora_target_parameters", _modules(file)) if "adapter" in file else {}


def _modules(file: ForeignFile) -> Settings:
    if "adapter" not in file:
        return {}
    names = file.get("lora_target_modules")
    if file.flag("lora_target_linear") or names == "all-linear":
        if names and names != "all-linear":
            file.skip("lora_target_modules", "lora_target_linear takes all linear layers")
        return {"adapter.targets": "all-linear"}
    if isinstance(names, list) and names:
        return {"adapter.targets": names}
    if isinstance(names, str) and names:
        file.lose("lora_target_modules", PATTERN)
    else:
        reason = "the file names none, so PEFT chooses by architecture; here the default of adapter.targets is used"
        file.lose("lora_target_modules", reason)
    return {}


def _layers(file: ForeignFile) -> Settings:
    key = "peft_layers_to_transform"
    return {"adapter.layers": file.note(file.get(key), key)} if key in file and "adapter" in file else {}


def _max_length(file: ForeignFile) -> Settings:
    length = file.count("sequence_len", 2)
    if (strategy := file.get("excess_length_strategy")) not in (None, "truncate"):
        reason = "documents longer than data.max_length are cut; `dualtune preview` counts them"
        file.lose("excess_length_strategy", reason, value=strategy)
    return {"data.max_length": Note(length, f"sequence_len: {length}; longer documents are cut, axolotl drops them")}


def _special_tokens(file: ForeignFile) -> Settings:
    """Translate further special tokens. A padding token has no effect here; the end of a text, say, would."""
    settings: Settings = {}
    for name, token in table_in(file.get("special_tokens")).items():
        if name == "additional_special_tokens":
            settings = special_tokens(file, f"special_tokens.{name}")
        elif name == "pad_token" or is_off(token):
            file.skip(f"special_tokens.{name}", "padding does not affect the result", value=token)
        else:
            file.lose(f"special_tokens.{name}", "the model's own tokenizer is always used", value=token)
    return settings


def _embedding_rate(file: ForeignFile) -> Settings:
    """Translate the learning rate of embedding and output head, of which the scale wins, where they are trained."""
    names = [name for name in ("embedding_lr_scale", "embedding_lr") if name in file]
    if not names:
        return {}
    trained = [key for key in _TRAIN_TABLES if not is_off(file.get(key))]
    if "adapter" in file and not trained:
        file.skip_all(" ".join(names), "neither embedding nor output head is trained")
        return {}
    if "embedding_lr" in names[1:]:
        file.skip("embedding_lr", "embedding_lr_scale wins over it")
    if names[0] == "embedding_lr":
        return {"train.embedding_learning_rate": file.note(file.number("embedding_lr"), "embedding_lr")}
    rate, scale = file.number("learning_rate"), file.number("embedding_lr_scale")
    origin = f"learning_rate: {rate:g} × embedding_lr_scale: {scale:g}"
    return {"train.embedding_learning_rate": Note(rate * scale, origin)}


def _order(file: ForeignFile) -> Settings:
    if "shuffle_merged_datasets" in file:
        record = file.skip if file.flag("shuffle_merged_datasets") else file.lose
        record("shuffle_merged_datasets", "documents are always shuffled anew in each epoch")
    return {}


_PLUGINS = "plugins are not supported; hooks can watch a run, from Python"


def _plugins(file: ForeignFile) -> Settings:
    plugins = file.get("plugins")
    for name in cast(list[Any], plugins) if isinstance(plugins, list) else []:
        if any(part in str(name).lower() for part in ("liger", "cut_cross_entropy", "integrations.kernels")):
            file.skip("plugins", "model.kernels chooses the fast code automatically", value=name)
        else:
            file.lose("plugins", _PLUGINS, value=name)
    return {}


def _trackers(file: ForeignFile) -> Settings:
    origins: dict[str, str] = {}
    for name, (switch, project) in _TRACKERS.items():
        if project in file and not is_off(file.get(project)):
            origins[name] = project
            file.lose(project, NAMED_OUTSIDE)
        if file.flag(switch):
            origins[name] = switch
    return {"run.track": Note([*origins], ", ".join(origins.values()))} if origins else {}


# What trains embedding and output head beside an adapter.
_TRAIN_TABLES = (
    "lora_modules_to_save", "peft_trainable_token_indices", "tokens", "special_tokens.additional_special_tokens",
)  # fmt: skip
_AUTOMATIC = "the fastest code that keeps the numbers is chosen automatically; see model.kernels"

RULES = (
    renamed("base_model", "model.name", ForeignFile.model),
    translated("adapter peft_use_dora reward_model process_reward_model pretraining_dataset", "adapter.method", _method,
               "lora and qlora; without an adapter, full; rewards and streamed data are refused"),
    translated("bf16 bfloat16 fp16 float16 float32", "model.dtype", _dtype),
    translated("load_in_4bit load_in_8bit", "model.quantization", _quantization,
               "4 bits, or adapter: qlora, become nf4; bitsandbytes' 8 bits are something else than int8"),
    translated(_LORA, "adapter.rank, adapter.alpha, adapter.dropout, adapter.scaling", _adapter),
    translated(_TARGETS, "adapter.targets, adapter.experts", _targets,
               "lora_target_linear is `all-linear`; a list of names is the same; of parameters, the stacks of experts"),
    translated("peft_init_lora_weights", "adapter.init", _init, "true is `kaiming`; `pissa_niter_n` is `pissa`"),
    renamed("lora_model_dir", "adapter.init_from", ForeignFile.text),
    translated("chat_template chat_template_jinja", "data.template", _template,
               "`auto` is the tokenizer's own; llama3, qwen_25, gemma and gemma3 become `llama-3`, `qwen-2.5`, "
               "`gemma-2` and `gemma-3`; for one that has no name here, name a Jinja file"),
    translated("chat_template_kwargs", "data.template_variables", _template_variables, "also those of a dataset"),
    translated("datasets test_datasets val_set_size", "data.train, data.eval", _data,
               "type: alpaca is `alpaca`, chat_template is `messages` (or `sharegpt`), completion is `text`; "
               "val_set_size is a fraction, as here"),
    translated("sequence_len excess_length_strategy", "data.max_length", _max_length,
               "longer documents are cut, as with excess_length_strategy: truncate"),
    translated("micro_batch_size gradient_accumulation_steps batch_size sample_packing",
               "data.packing, train.tokens_per_step or train.documents_per_step",
               _batch,
               "packed: micro_batch_size × gradient_accumulation_steps × sequence_len tokens; else micro_batch_size × "
               "gradient_accumulation_steps documents; times the number of GPUs"),
    translated("num_epochs max_steps", "train.epochs, train.steps", _ARGS.length),
    translated("learning_rate lr_scheduler warmup_steps warmup_ratio",
               "train.learning_rate, train.schedule, train.warmup", _ARGS.schedule,
               "a warm-up below 1 is a fraction of the steps, from 1 on a number of steps"),
    translated("optimizer weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon",
               "train.optimizer, train.weight_decay, train.max_grad_norm", _ARGS.optimizer,
               "AdamW; names with 8bit become adamw_8bit, whose codes are its own, and nothing is paged; "
               "schedule_free_adamw becomes `train.schedule: schedule_free`"),
    translated("gradient_checkpointing", "memory.checkpointing, memory.offload", _ARGS.checkpointing,
               "`full`; `auto`: as little as fits; offload also sets memory.offload"),
    translated("logging_steps eval_steps save_steps eval_strategy evaluation_strategy save_strategy save_total_limit",
               "run.log_every, run.eval_every, run.save_every, run.keep", _ARGS.intervals, "always in optimizer steps"),
    translated("early_stopping_patience load_best_model_at_end", "guards.early_stopping, guards.restore_best",
               _ARGS.guards),
    renamed("output_dir", "run.dir", ForeignFile.text),
    renamed("seed", "run.seed", ForeignFile.count, "the random numbers differ", least=0),
    translated("special_tokens", "data.new_special_tokens", _special_tokens,
               "additional_special_tokens; a padding token is not needed, others cannot be changed"),
    translated("embedding_lr embedding_lr_scale", "train.embedding_learning_rate", _embedding_rate,
               "where embedding and output head are trained"),
    translated("plugins", "", _plugins, "fast code is chosen automatically"),
    translated("train_on_inputs", "data.loss_on", lambda file: {
        "data.loss_on": "all" if file.flag("train_on_inputs") else "assistant"}, "false is `assistant`, true is `all`"),
    translated(f"rl {' '.join(_BETAS)} {' '.join(_TRLS.values())} "
               "dpo_loss_type dpo_loss_weights dpo_label_smoothing dpo_use_weighting rpo_alpha "
               "simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight rl_adapter_ref_model",
               "train.objective, preference.beta, preference.loss, preference.sft_weight, preference.label_smoothing, "
               "preference.gamma, preference.desirable_weight, preference.undesirable_weight, preference.reference, "
               + samples.OURS,
               _preference, "dpo, kto, orpo, simpo and grpo; ipo is a loss of dpo; others are refused"),
    absent("evals_per_epoch saves_per_epoch", "intervals are set in steps", "run.eval_every, run.save_every"),
    absent("neftune_noise_alpha noisy_embedding_alpha", "NEFTune is not supported yet"),
    translated("loraplus_lr_ratio loraplus_lr_embedding", "train.lora_plus_ratio",
               lambda file: lora_plus(file, "loraplus_lr_ratio", "loraplus_lr_embedding")),
    translated("lora_modules_to_save", "adapter.train_modules",
               lambda file: listed(file, "lora_modules_to_save", "adapter.train_modules")),
    translated("peft_trainable_token_indices", "adapter.train_rows",
               lambda file: token_rows(file, "peft_trainable_token_indices"),
               "a list, or equal lists for both modules; with an output head of its own, its rows are trained too"),
    translated("tokens", "data.new_tokens", lambda file: listed(file, "tokens", "data.new_tokens"),
               "their rows are trained without lora_modules_to_save"),
    absent("unfrozen_parameters",
           "modules that are trained whole beside an adapter are named, not matched", "adapter.train_modules"),
    translated("peft_layers_to_transform", "adapter.layers", _layers, "a number, or a list of them"),
    absent("peft_layers_pattern", "the layers are those of the text model", "adapter.layers"),
    translated("lora_rank_pattern", "adapter.rank_pattern", lambda file: module_numbers(file, "lora_rank_pattern"),
               "names of modules; expressions are refused"),
    translated("lora_alpha_pattern", "adapter.alpha_pattern", lambda file: module_numbers(file, "lora_alpha_pattern"),
               "names of modules; expressions are refused"),
    absent("peft peft_* relora* lisa_* spectrum_* mora use_mora mora_* dense_mixer diffusion use_pose pose_* "
           "grokfast_*", "this kind of training or start is not supported yet"),
    absent("qat quantization nvfp4_merge_aware* llmcompressor",
           "training sees the merge as affine4, affine8, nf4, q4_0 or q8_0 round it", "adapter.merge_for"),
    absent("kd_*", "`dualtune distill record` writes a teacher's distributions, and distill learns them: forward "
           "KL, or a mix with the reverse one by beta, with a weight for the loss of sft",
           "train.objective, distill.distributions, distill.divergence, distill.beta, distill.sft_weight"),
    absent("use_eaft eaft_* center_rewards_coefficient num_labels",
           "the loss is the cross-entropy of the targets, or that of train.objective", "train.objective"),
    absent("adam_beta3 adam_epsilon2 dion_* qgalore_*",
           "the optimizers are adamw, adamw_8bit, lion, adafactor, muon and sgd", "train.optimizer"),
    absent("role_boundaries", "the chat template says where a turn ends", "data.template"),
    absent("overrides_of_model_config overrides_of_model_kwargs rope_scaling scaling_softmax* cls_model_config "
           "use_onebitllms", "the base is computed as its config.json says"),
    absent("fp8 fp8_*", "the compute dtypes are float32, bfloat16 and float16", "model.dtype"),
    absent("freeze_mm_modules image_* processor_kwargs", "models are trained on text alone"),
    absent("metric_for_best_model greater_is_better", "the best evaluation is that of the lowest loss"),
    absent("do_bench_eval bench_* do_causal_lm_eval eval_causal_lm_metrics lm_eval_*",
           "`dualtune eval` answers and scores, also with lm-evaluation-harness"),
    absent("cosine_min_lr_ratio cosine_constant_lr_ratio lr_scheduler_kwargs lr_groups lr_div_factor "
           "lr_quadratic_warmup jagged_*",
           "the learning rate has a peak, a warm-up and a schedule that falls to 0", "train.schedule"),
    absent("optim_args optim_target_modules", "AdamW has one learning rate, betas of 0.9 and 0.999 and an eps of 1e-8"),
    absent("loss_watchdog_threshold loss_watchdog_patience", "loss spikes are detected automatically",
           "guards.on_spike, guards.spike_threshold"),
    absent("added_tokens_overrides", "a token keeps its text; new ones take the rows that the model has to spare",
           "data.new_tokens"),
    absent("fix_untrained_tokens", "the rows of tokens stay as they are, or are trained", "adapter.train_rows"),
    absent("mean_resizing_embeddings", "a new row starts as the mean of the rows of the pieces of its text",
           "data.new_tokens"),
    absent("shrink_embeddings", "rows are added, and none is taken away", "data.new_tokens"),
    absent("tokenizer_config eot_tokens", "the tokenizer is the model's own, with new tokens", "data.new_tokens"),
    needless("resize_token_embeddings_to_32x", "the vocabulary grows by the new tokens alone"),
    needless("embeddings_skip_upcast", "what is trained is always kept in float32"),
    absent("default_system_message", "write a system message into the rows"),
    translated("shuffle_merged_datasets", "", _order, "documents are always shuffled"),
    absent("curriculum_sampling group_by_length sample_packing_sequentially",
           "documents are shuffled anew in each epoch"),
    translated("dataset_exact_deduplication", "data.dedup", lambda file: (
        {"data.dedup": "exact"} if file.flag("dataset_exact_deduplication") else {}), "`true` is `exact`"),
    absent("min_sample_len dataset_shard_num dataset_shard_idx",
           "rows are used as they are; `dualtune check-data` finds bad ones"),
    translated(" ".join(key for keys in _TRACKERS.values() for key in keys), "run.track", _trackers,
               "W&B is offline by default"),
    absent("wandb_* mlflow_* trackio_* hf_mlflow_log_artifacts", NAMED_OUTSIDE),
    absent("comet_* use_comet swanlab_* use_swanlab otel_* use_otel_metrics", OTHER_TRACKERS),
    absent("hub_model_id hub_strategy hub_revision push_dataset_to_hub", "`dualtune push hf://…` publishes an adapter"),
    absent("trust_remote_code", "code from a model's repository is never run; use a model that needs none"),
    absent("deepspeed deepcompile fsdp fsdp_* dp_shard_size dp_replicate_size tensor_parallel_size "
           "context_parallel_size sequence_parallel_degree heads_k_stride ring_attn_func expert_parallel_* "
           "accelerator_config ray_* use_ray", LAUNCHED,
           "memory.sharding"),
    absent("max_memory gpu_memory_limit", "`dualtune plan` shows what fits a limit", "memory.limit"),
    absent("activation_offloading", "`activations` moves the inputs of recomputed layers", "memory.offload"),
    absent("layer_offloading", "a number of layers; the others wait in host memory", "memory.resident_layers"),
    absent("selective_checkpointing", "`{layers: k}` recomputes k layers", "memory.checkpointing"),
    needless("vllm trl.use_vllm trl.vllm_* trl.log_completions trl.num_completions_to_print trl.reward_num_workers "
             "trl.use_liger_loss trl.skip_zero_advantage_batches",
             "the fastest way to draw and to judge is chosen automatically; rollouts.jsonl has every answer"),
    absent("trl.use_data_producer trl.async_prefetch trl.prefetch_depth trl.streaming_* trl.replay_* trl.reroll_*",
           "the answers of a step are drawn by the model as it is in that step, to the prompts of that step"),
    absent("trl.sync_ref_model trl.ref_model_*", "the reference stays as it is"),
    absent("trl.rollout_func", "a class may lead the conversation", "rollouts.environment"),
    absent("trl.chat_template_kwargs", "a mapping, for all rows", "data.template_variables"),
    absent("ebft nemo_gym_* hatchery", NO_REWARDS),
    needless("dpo_use_liger_kernel dpo_padding_free precompute_ref_log_probs dpo_use_logits_to_keep",
             "the reference's log-probabilities are computed once, and the layout does not change the result"),
    absent("dpo_generate_during_eval", "prompts to answer at an evaluation", "run.sample_prompts"),
    absent("dpo_norm_loss", "a loss is the mean over the pairs of a step"),
    absent("reinit_weights", "`model.init: random` is only for measuring speed and memory",
           "model.init"),
    absent("revision_of_model", "download the revision, and name its directory in model.name", "model.name"),
    absent("gptq gptq_* model_quantization_config model_quantization_config_kwargs bnb_config_kwargs "
           "quantize_moe_experts nonexpert_quantization dsv4_bf16_all dsv4_fp4_grouped_mode dsv4_fp8_nonexpert_mode "
           "gemma4_fp8_nonexpert gemma4_nf4_nonexpert",
           "the quantizations are nf4, int8, affine4 and affine8", "model.quantization"),
    absent("fp32_norms fp32_norm_classes", "all of the base computes in model.dtype", "model.dtype"),
    absent("trainer_cls", _PLUGINS),
    absent("save_first_step dynamic_checkpoint", "`touch RUN/checkpoint-now` saves at any step"),
    needless("model_type tokenizer_type processor_type tokenizer_use_mistral_common tokenizer_use_fast "
             "tokenizer_legacy base_model_config "
             "is_llama_derived_model is_falcon_derived_model is_mistral_derived_model is_qwen_derived_model",
             "it is read from the model's own files"),
    needless("attn_implementation flash_attention flash_attn_* flash_optimum sdp_attention xformers_attention "
             "eager_attention flex_attention flex_attn_compile_kwargs sdpa_varlen liger_* cut_cross_entropy "
             "chunked_cross_entropy* sage_attention large_head_attention "
             "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
             "use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels experts_implementation "
             "gemma4_hybrid_attn_impl llama4_linearized_experts expert_backend moe_grouped_backend "
             "moe_dequant_chunk_size moe_bnb_fast dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel "
             "fused_attn_kernel use_kernels torch_compile torch_compile_* tf32 tiled_mlp tiled_mlp_*", _AUTOMATIC),
    needless("dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory dataloader_* "
             "remove_unused_columns skip_prepare_dataset num_dataset_shards_to_save streaming "
             "shuffle_before_merging_datasets",
             "tokens are cached, and batches prepared ahead, automatically"),
    needless("eval_sample_packing eval_batch_size pad_to_sequence_len pad_to_multiple_of sample_packing_group_size "
             "sample_packing_bin_size auto_find_batch_size multipack_real_batches batch_flattening low_cpu_mem_usage "
             "gradient_checkpointing_kwargs gc_steps gc_collect_steps torch_empty_cache_steps sample_packing_* "
             "pretrain_multipack_* streaming_multipack_buffer_size eval_sequence_len",
             "the layout in memory does not change the result, and is chosen automatically"),
    needless("resume_from_checkpoint auto_resume_from_checkpoints", "the same command resumes a run"),
    needless("merge_lora merge_method lora_on_cpu qlora_sharded_model_loading",
             "`dualtune export RUN` writes the merge"),
    needless("gradio_* generation_* eval_table_size eval_max_new_tokens",
             "it belongs to generation: `dualtune chat`, `generate`, `serve`"),
    needless("device device_map local_rank world_size ddp ddp_* gpu_count", "it is set by --platform and the launcher"),
    needless("save_safetensors save_only_model strict debug lora_fan_in_fan_out hf_use_auth_token "
             "include_tokens_per_second include_tkps profiler_steps profiler_steps_start data_seed "
             "experimental_skip_move_to_device",
             "there is nothing to set"),
)  # fmt: skip

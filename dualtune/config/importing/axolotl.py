"""Translate axolotl configs: its keys and defaults, and their meaning here.

Based on axolotl/utils/schemas/ and core/builders/base.py of July 2026.
"""

from __future__ import annotations

import math
from typing import Any, cast

from dualtune.config.importing.arguments import EIGHT_BITS, NO_PREFERENCES, Arguments, variables_in
from dualtune.config.importing.table import (
    NAMED_OUTSIDE,
    OTHERS,
    TRACKER_KEYS,
    Given,
    Note,
    Settings,
    absent,
    is_off,
    needless,
    trackers_of_axolotl,
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
         "chat_template_kwargs"}  # fmt: skip
# Values that match our behaviour, so nothing is lost.
_SAME_HERE: dict[str, tuple[Any, ...]] = {
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]), "train_on_eos": ("turn",),
    "chat_template": ("tokenizer_default",), "train_on_eot": ("turn",),
}  # fmt: skip
# Only templates that write the same text as ours, character by character, in every conversation of
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
    "field_thinking": "a message has only a role, content and tool calls",
}


def data(given: Given) -> Settings:
    """Translate the sources and the evaluation data, and set the template if all sources use Alpaca's prompts."""
    train = _sources(given, "datasets")
    if not train:
        raise given.wrong("datasets", "must be a list with a path in each entry")
    settings: Settings = {"data.train": Note(train[0] if len(train) == 1 else train, "datasets")}
    if {source.get("format") for source in train} == {"alpaca"}:
        settings["data.template"] = Note("none", "type: alpaca, which has Alpaca's own prompt and no chat template")
    if "test_datasets" in given:
        settings["data.eval"] = Note(_sources(given, "test_datasets"), "test_datasets")
        return settings
    share = given.number("val_set_size")
    if share >= 1:
        given.lose("val_set_size", "data.eval is a fraction of the rows, below 1, or other data")
        share = 0
    return settings | {"data.eval": given.note(share, "val_set_size")}


def template(given: Given) -> Settings:
    """Translate the chat template. The datasets cannot have others (`_WHY`)."""
    name, jinja = given.text("chat_template"), given.text("chat_template_jinja")
    if jinja is not None:
        if "\n" not in jinja and "{" not in jinja:
            return {"data.template": jinja}
        given.lose("chat_template_jinja", "write it to a file, and name that file in data.template")
    elif name in _TEMPLATES:
        return {"data.template": Note(_TEMPLATES[name], f"chat_template: {name}")}
    elif name is not None and not name.startswith("tokenizer_default"):
        reason = "the tokenizer's own template is used; data.template takes a name such as chatml, or a Jinja file"
        given.lose("chat_template", reason)
    return {}


def template_variables(given: Given) -> Settings:
    """Translate `chat_template_kwargs`, of the file and of its datasets: here all sources have the same."""
    key = "chat_template_kwargs"
    variables = variables_in(given, key, given.get(key)) if key in given else {}
    origins = [key] if variables else []
    for name in ("datasets", "test_datasets"):
        entries: Any = given.get(name)  # what is not a list of mappings is refused with the sources
        for index, entry in enumerate(cast("list[Any]", entries) if isinstance(entries, list) else []):
            table = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
            if table.get(key) is None:
                continue
            where = f"{name}[{index}].{key}"
            own = variables_in(given, where, table[key])
            if any(variables.get(each, value) != value for each, value in own.items()):
                given.lose(where, "data.template_variables are those of all sources", own)
            else:
                variables |= own
                origins.append(where)
    return {"data.template_variables": Note(variables, ", ".join(origins))} if variables else {}


def dedup(given: Given) -> Settings:
    """Translate whether equal rows are left out."""
    return {"data.dedup": "exact"} if given.flag("dataset_exact_deduplication") else {}


def _sources(given: Given, key: str) -> list[dict[str, Any]]:
    entries = given.get(key)
    if not isinstance(entries, list):
        raise given.wrong(key, "must be a list")
    sources: list[dict[str, Any]] = []
    for index, entry in enumerate(cast(list[Any], entries)):
        if not isinstance(entry, dict):
            raise given.wrong(key, "must be a list of mappings")
        sources += _source(given, f"{key}[{index}]", cast(dict[str, Any], entry))
    return sources


def _source(given: Given, where: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
    _report_other_keys(given, where, entry)
    format, columns = _layout(given, where, entry)
    source: dict[str, Any] = {"path": entry.get("path")}
    files = entry.get("data_files")
    paths: list[Any] = [files] if isinstance(files, str) else cast(list[Any], files or [entry.get("path")])
    if format:
        source["format"] = format
    if columns:
        source["columns"] = columns
    if not files:
        part = {"subset": entry.get("name"), "split": entry.get("split")}
        source |= {key: value for key, value in part.items() if value}
    return [source | {"path": path} for path in paths]


def _layout(given: Given, where: str, entry: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return our format, and the names of its columns in the file."""
    kind = entry.get("type")
    if isinstance(kind, dict):
        return _own_layout(given, where, cast(dict[str, Any], kind))
    name, _, style = str(kind or "").partition(":")
    format = _FORMATS.get(name)
    if format is None or style:
        reason = "its prompts are not supported" if format else "the format is detected from the columns"
        given.lose(f"{where}.type", f"{reason}; allowed are the formats of data.format", value=kind)
    if format == "text":
        return format, {"text": entry["field"]} if entry.get("field") else {}
    if format in ("messages", "sharegpt"):
        return _chat_layout(given, where, entry, format)
    return format, {}


def _own_layout(given: Given, where: str, kind: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    for key in kind.keys() - _OWN_TYPE.keys():
        if not is_off(kind[key]):
            given.lose(f"{where}.type.{key}", "prompts come from data.template, or are Alpaca's", value=kind[key])
    return "alpaca", {ours: kind[theirs] for theirs, ours in _OWN_TYPE.items() if kind.get(theirs)}


def _chat_layout(given: Given, where: str, entry: dict[str, Any], format: str) -> tuple[str, dict[str, Any]]:
    mapping: Any = entry.get("message_property_mappings") or {}
    names: dict[str, Any] = cast(dict[str, Any], mapping) if isinstance(mapping, dict) else {}
    role = names.get("role") or entry.get("message_field_role") or "role"
    content = names.get("content") or entry.get("message_field_content") or "content"
    if (role, content) == ("from", "value"):
        format = "sharegpt"
    elif (role, content) != ("role", "content"):
        reason = "a message has a role and content, or from and value; rename them in the file"
        given.lose(f"{where}.message_property_mappings", reason, value=names or {"role": role, "content": content})
    for name in names.keys() - {"role", "content"}:
        given.lose(f"{where}.message_property_mappings.{name}", _WHY["field_thinking"], value=names[name])
    key = "conversations" if format == "sharegpt" else "messages"
    column = entry.get("field_messages") or "messages"
    columns = {key: column} if column != key else {}
    if entry.get("field_tools") not in (None, "tools"):
        columns["tools"] = entry["field_tools"]
    return format, columns


def _report_other_keys(given: Given, where: str, entry: dict[str, Any]) -> None:
    for key, value in entry.items():
        if key in _READ:
            continue
        if is_off(value) or value in _SAME_HERE.get(key, ()):
            given.skip(f"{where}.{key}", "it is the same here", value=value)
        else:
            reason = _WHY.get(key, "a source has only path, subset, split, format, columns and weight")
            given.lose(f"{where}.{key}", reason, value=value)


# ----------------------------------------------------------------------------------------------------------------------
DEFAULTS: dict[str, Any] = {
    "output_dir": "./model-out", "sequence_len": 512, "micro_batch_size": 1, "gradient_accumulation_steps": 1,
    "num_epochs": 1.0, "lr_scheduler": "cosine", "optimizer": "adamw_torch_fused", "weight_decay": 0.0,
    "max_grad_norm": 1.0, "lora_dropout": 0.0, "val_set_size": 0.0, "warmup_ratio": 0.03, "seed": 42,
}  # fmt: skip

# The names of axolotl for the options of transformers that it calls otherwise.
_ARGS = Arguments({"num_train_epochs": "num_epochs", "lr_scheduler_type": "lr_scheduler", "optim": "optimizer"})


def _method(given: Given) -> Settings:
    for key in ("rl", "reward_model", "process_reward_model", "pretraining_dataset"):
        if key in given and not is_off(given.get(key)):
            raise given.wrong(key, "cannot be translated: preferences, rewards and streams are not supported yet")
    if "adapter" not in given:
        for name in (each for rule in RULES if rule.convert in (_adapter, _targets) for each in rule.names):
            if name in given:
                given.skip(name, "without an adapter it has no meaning")
        return {"adapter.method": Note("full", "no adapter: all parameters are trained")}
    if given.get("adapter") not in ("lora", "qlora"):
        raise given.wrong("adapter", "only lora and qlora can be translated, or none: all parameters are trained")
    return {}


def _model(given: Given) -> Settings:
    if (name := given.text("base_model")) is None:
        raise given.wrong("base_model", "must be a hub id or a directory")
    return {"model.name": name}


def _dtype(given: Given) -> Settings:
    for key, ours in (("fp16", "float16"), ("float16", "float16"), ("float32", "float32")):
        if key in given and given.flag(key):
            return {"model.dtype": ours}
    for key in ("bf16", "bfloat16"):
        if key in given:
            value = given.get(key)
            on = "bfloat16" if value == "full" or (value != "auto" and given.flag(key)) else "float32"
            return {"model.dtype": "auto" if value == "auto" else on}
    return {}


def _quantization(given: Given) -> Settings:
    if given.get("adapter") == "qlora" or given.flag("load_in_4bit"):
        return {"model.quantization": Note("nf4", "adapter: qlora, or load_in_4bit: true")}
    if given.flag("load_in_8bit"):
        given.lose("load_in_8bit", EIGHT_BITS)
    return {}


def _adapter(given: Given) -> Settings:
    if "adapter" not in given:
        return {}
    rank, alpha = given.count("lora_r"), given.number("lora_alpha")
    settings: Settings = {"adapter.rank": given.note(rank, "lora_r"), "adapter.alpha": given.note(alpha, "lora_alpha")}
    if given.flag("peft_use_rslora"):
        comment = f"peft_use_rslora: lora_alpha × sqrt(lora_r) = {alpha:g} × sqrt({rank})"
        settings["adapter.alpha"] = Note(alpha * math.sqrt(rank), comment)
    return settings | {"adapter.dropout": given.note(given.number("lora_dropout"), "lora_dropout")}


def _targets(given: Given) -> Settings:
    if "adapter" not in given:
        return {}
    names = given.get("lora_target_modules")
    if given.flag("lora_target_linear") or names == "all-linear":
        if names and names != "all-linear":
            given.skip("lora_target_modules", "lora_target_linear takes all linear layers")
        return {"adapter.targets": "all-linear"}
    if isinstance(names, list) and names:
        return {"adapter.targets": names}
    if isinstance(names, str) and names:
        given.lose("lora_target_modules", "it is a pattern; list the names of the layers in adapter.targets instead")
    else:
        reason = "the file names none, so PEFT chooses by architecture; here the default of adapter.targets is used"
        given.lose("lora_target_modules", reason)
    return {}


def _init_from(given: Given) -> Settings:
    path = given.text("lora_model_dir")
    return {} if path is None else {"adapter.init_from": path}


def _max_length(given: Given) -> Settings:
    length = given.count("sequence_len", 2)
    if (strategy := given.get("excess_length_strategy")) not in (None, "truncate"):
        reason = "documents longer than data.max_length are cut; `dualtune preview` counts them"
        given.lose("excess_length_strategy", reason, value=strategy)
    return {"data.max_length": Note(length, f"sequence_len: {length}; longer documents are cut, axolotl drops them")}


def _steps(given: Given) -> Settings:
    """Translate the batch size: to tokens per step with packing, else to documents per step."""
    micro, accumulated = given.count("micro_batch_size"), given.count("gradient_accumulation_steps")
    rows = given.count("batch_size") if "batch_size" in given else micro * accumulated
    factors = f"batch_size: {rows}" if "batch_size" in given else (
        f"micro_batch_size: {micro} × gradient_accumulation_steps: {accumulated}")  # fmt: skip
    gpus = "; multiply it by the number of GPUs that you used"
    if not given.flag("sample_packing"):
        return {
            "data.packing": given.note(False, "sample_packing"),
            "train.documents_per_step": Note(rows, factors + gpus),
        }
    length = given.count("sequence_len", 2)
    tokens = Note(rows * length, f"{factors} × sequence_len: {length}{gpus}")
    return {"data.packing": given.note(True, "sample_packing"), "train.tokens_per_step": tokens}


def _special_tokens(given: Given) -> Settings:
    """Report special tokens: a padding token has no effect here, other tokens would."""
    tokens = given.get("special_tokens")
    if isinstance(tokens, dict):
        for name, token in cast(dict[str, Any], tokens).items():
            if name == "pad_token" or is_off(token):
                given.skip(f"special_tokens.{name}", "padding does not affect the result", value=token)
            else:
                given.lose(f"special_tokens.{name}", "the model's own tokenizer is always used", value=token)
    return {}


def _loss_on(given: Given) -> Settings:
    return {"data.loss_on": "all" if given.flag("train_on_inputs") else "assistant"}


def _order(given: Given) -> Settings:
    if "shuffle_merged_datasets" in given:
        record = given.skip if given.flag("shuffle_merged_datasets") else given.lose
        record("shuffle_merged_datasets", "documents are always shuffled anew in each epoch")
    return {}


def _plugins(given: Given) -> Settings:
    plugins = given.get("plugins")
    for name in cast(list[Any], plugins) if isinstance(plugins, list) else []:
        if "liger" in str(name).lower() or "cut_cross_entropy" in str(name):
            given.skip("plugins", "model.kernels chooses the fast code automatically", value=name)
        else:
            given.lose("plugins", "plugins are not supported; hooks can watch a run, from Python", value=name)
    return {}


_AUTOMATIC = "the fastest code that keeps the numbers is chosen automatically; see model.kernels"
_PROCESSES = "`dualtune launch` starts several processes, and memory.sharding splits the base among them"

RULES = (
    translated("base_model", "model.name", _model),
    translated("adapter rl reward_model process_reward_model pretraining_dataset", "adapter.method", _method,
               "lora and qlora; without an adapter, full; preferences, rewards and streamed data are refused"),
    translated("bf16 bfloat16 fp16 float16 float32", "model.dtype", _dtype),
    translated("load_in_4bit load_in_8bit", "model.quantization", _quantization,
               "4 bits, or adapter: qlora, become nf4; bitsandbytes' 8 bits are something else than int8"),
    translated("lora_r lora_alpha lora_dropout peft_use_rslora", "adapter.rank, adapter.alpha, adapter.dropout",
               _adapter, "rsLoRA becomes an alpha of lora_alpha × sqrt(lora_r)"),
    translated("lora_target_linear lora_target_modules", "adapter.targets", _targets,
               "lora_target_linear is `all-linear`; a list of names is the same"),
    translated("lora_model_dir", "adapter.init_from", _init_from),
    translated("chat_template chat_template_jinja", "data.template", template,
               "`auto` is the tokenizer's own; llama3, qwen_25, gemma and gemma3 become `llama-3`, `qwen-2.5`, "
               "`gemma-2` and `gemma-3`; for one that has no name here, name a Jinja file"),
    translated("chat_template_kwargs", "data.template_variables", template_variables, "also those of a dataset"),
    translated("datasets test_datasets val_set_size", "data.train, data.eval", data,
               "type: alpaca is `alpaca`, chat_template is `messages` (or `sharegpt`), completion is `text`; "
               "val_set_size is a fraction, as here"),
    translated("sequence_len excess_length_strategy", "data.max_length", _max_length,
               "longer documents are cut, as with excess_length_strategy: truncate"),
    translated("micro_batch_size gradient_accumulation_steps batch_size sample_packing",
               "data.packing, train.tokens_per_step or train.documents_per_step", _steps,
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
    translated("output_dir", "run.dir", lambda given: {"run.dir": given.text("output_dir")}),
    translated("seed", "run.seed", lambda given: {"run.seed": given.count("seed", 0)}, "the random numbers differ"),
    translated("special_tokens", "", _special_tokens, "a padding token is not needed; others cannot be changed"),
    translated("plugins", "", _plugins, "fast code is chosen automatically"),
    translated("train_on_inputs", "data.loss_on", _loss_on, "false is `assistant`, true is `all`"),
    absent("evals_per_epoch saves_per_epoch", "intervals are set in steps", "run.eval_every, run.save_every"),
    absent("neftune_noise_alpha noisy_embedding_alpha", "NEFTune is not supported yet"),
    absent("loraplus_lr_ratio loraplus_lr_embedding", "each LoRA matrix has the same learning rate"),
    absent("peft_use_dora", "DoRA is not supported yet; this is LoRA of the same rank"),
    absent("lora_modules_to_save lora_target_parameters unfrozen_parameters peft_trainable_token_indices",
           "only LoRA matrices of linear layers are trained", "adapter.targets"),
    absent("peft_layers_to_transform peft_layers_pattern", "name the layers: layers.3.self_attn.q_proj",
           "adapter.targets"),
    absent("lora_rank_pattern lora_alpha_pattern", "every layer has the same rank and alpha"),
    absent("peft peft_* relora* lisa_* qat quantization", "this kind of training or start is not supported yet"),
    absent("cosine_min_lr_ratio cosine_constant_lr_ratio lr_scheduler_kwargs lr_groups lr_div_factor "
           "lr_quadratic_warmup embedding_lr embedding_lr_scale jagged_*",
           "the learning rate has a peak, a warm-up and a schedule that falls to 0", "train.schedule"),
    absent("optim_args optim_target_modules", "AdamW has one learning rate, betas of 0.9 and 0.999 and an eps of 1e-8"),
    absent("loss_watchdog_threshold loss_watchdog_patience", "loss spikes are detected automatically",
           "guards.on_spike, guards.spike_threshold"),
    absent("tokens added_tokens_overrides tokenizer_config resize_token_embeddings_to_32x eot_tokens",
           "the model's own tokenizer and embeddings are always used"),
    absent("default_system_message", "write a system message into the rows"),
    translated("shuffle_merged_datasets", "", _order, "documents are always shuffled"),
    absent("curriculum_sampling group_by_length sample_packing_sequentially",
           "documents are shuffled anew in each epoch"),
    translated("dataset_exact_deduplication", "data.dedup", dedup, "`true` is `exact`"),
    absent("min_sample_len dataset_shard_num dataset_shard_idx",
           "rows are used as they are; `dualtune check-data` finds bad ones"),
    translated(TRACKER_KEYS, "run.track", trackers_of_axolotl, "W&B is offline by default"),
    absent("wandb_* mlflow_* trackio_* hf_mlflow_log_artifacts", NAMED_OUTSIDE),
    absent("comet_* use_comet swanlab_* use_swanlab otel_* use_otel_metrics", OTHERS),
    absent("hub_model_id hub_strategy hub_revision push_dataset_to_hub", "`dualtune push hf://…` publishes an adapter"),
    absent("trust_remote_code", "code from a model's repository is never run; use a model that needs none"),
    absent("deepspeed deepcompile fsdp fsdp_* dp_shard_size dp_replicate_size tensor_parallel_size "
           "context_parallel_size sequence_parallel_degree expert_parallel_size ray_* use_ray", _PROCESSES,
           "memory.sharding"),
    absent("max_memory gpu_memory_limit", "`dualtune plan` shows what fits a limit", "memory.limit"),
    absent("activation_offloading", "`activations` moves the inputs of recomputed layers", "memory.offload"),
    absent("layer_offloading", "a number of layers; the others wait in host memory", "memory.resident_layers"),
    absent("selective_checkpointing", "`{layers: k}` recomputes k layers", "memory.checkpointing"),
    absent("trl vllm ebft dpo_* simpo_* kto_* cpo_* orpo_* rl_beta", NO_PREFERENCES),
    absent("reinit_weights", "`model.init: random` is only for measuring speed and memory",
           "model.init"),
    absent("revision_of_model", "download the revision, and name its directory in model.name", "model.name"),
    absent("gptq gptq_* model_quantization_config model_quantization_config_kwargs bnb_config_kwargs "
           "quantize_moe_experts", "the quantizations are nf4, int8, affine4 and affine8", "model.quantization"),
    absent("save_first_step", "`touch RUN/checkpoint-now` saves at any step"),
    needless("model_type tokenizer_type processor_type tokenizer_use_mistral_common tokenizer_use_fast "
             "tokenizer_legacy base_model_config "
             "is_llama_derived_model is_falcon_derived_model is_mistral_derived_model is_qwen_derived_model",
             "it is read from the model's own files"),
    needless("attn_implementation flash_attention flash_attn_* flash_optimum sdp_attention xformers_attention "
             "eager_attention flex_attention flex_attn_compile_kwargs sdpa_varlen liger_* cut_cross_entropy "
             "chunked_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
             "use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels experts_implementation "
             "gemma4_hybrid_attn_impl llama4_linearized_experts "
             "fused_attn_kernel use_kernels torch_compile torch_compile_* tf32 tiled_mlp tiled_mlp_*", _AUTOMATIC),
    needless("dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory dataloader_* "
             "remove_unused_columns skip_prepare_dataset num_dataset_shards_to_save streaming "
             "shuffle_before_merging_datasets",
             "tokens are cached, and batches prepared ahead, automatically"),
    needless("eval_sample_packing eval_batch_size pad_to_sequence_len pad_to_multiple_of sample_packing_group_size "
             "sample_packing_bin_size auto_find_batch_size multipack_real_batches batch_flattening low_cpu_mem_usage "
             "gradient_checkpointing_kwargs gc_steps torch_empty_cache_steps",
             "the layout in memory does not change the result, and is chosen automatically"),
    needless("resume_from_checkpoint auto_resume_from_checkpoints", "the same command resumes a run"),
    needless("device device_map local_rank world_size ddp ddp_* gpu_count", "it is set by --platform and the launcher"),
    needless("save_safetensors save_only_model strict debug lora_fan_in_fan_out hf_use_auth_token "
             "include_tokens_per_second include_tkps profiler_steps experimental_skip_move_to_device",
             "there is nothing to set"),
)  # fmt: skip

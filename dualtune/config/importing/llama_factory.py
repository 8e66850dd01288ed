"""Translate LLaMA-Factory configs (`llamafactory-cli train FILE`): its keys and defaults, and their meaning here.

Based on src/llamafactory/hparams/, data/parser.py and train/ of LLaMA-Factory 0.9.6.dev0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from dualtune.base.errors import DualtuneError
from dualtune.base.untrusted import read_json
from dualtune.config.importing import arguments, preferences
from dualtune.config.importing.arguments import (
    EIGHT_BITS,
    LAUNCHED,
    NEAREST,
    NO_REWARDS,
    OF_SOURCES,
    Arguments,
    dora,
    held_out,
    listed,
    lora,
    lora_plus,
    module_names,
    nf4_only,
    router_balance,
    special_tokens,
)
from dualtune.config.importing.table import (
    ForeignFile,
    Note,
    Settings,
    absent,
    is_off,
    needless,
    renamed,
    table_in,
    translated,
)

DEFAULTS: dict[str, Any] = arguments.DEFAULTS | {
    "stage": "sft", "finetuning_type": "lora", "lora_rank": 8, "lora_dropout": 0.0, "lora_target": "all",
    "cutoff_len": 2048, "val_size": 0.0, "dataset_dir": "data", "quantization_type": "nf4", "double_quantization": True,
    "mix_strategy": "concat", "do_train": True, "pref_loss": "sigmoid", "pref_beta": 0.1, "pref_ftx": 0.0,
    "simpo_gamma": 0.5, "dpo_label_smoothing": 0.0, "kto_chosen_weight": 1.0, "kto_rejected_weight": 1.0,
}  # fmt: skip
_ARGS = Arguments()
_INFO = "dataset_info.json"
_MAX_INFO_BYTES = 4 << 20
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}  # its columns -> ours
_OF_ALPACA = "alpaca"
_PREFERENCES = {  # by pref_loss, but kto by its stage: our objective, and our keys of `preference` and theirs
    **dict.fromkeys(("sigmoid", "hinge", "ipo"), ("dpo", {"beta": "pref_beta"})),
    "orpo": ("orpo", {"beta": "pref_beta"}),
    "simpo": ("simpo", {"beta": "pref_beta", "gamma": "simpo_gamma"}),
    "kto": ("kto", {"beta": "pref_beta", "desirable_weight": "kto_chosen_weight",
                    "undesirable_weight": "kto_rejected_weight"}),
}  # fmt: skip


def _new_tokens(file: ForeignFile) -> Settings:
    settings = listed(file, "add_tokens", "data.new_tokens")
    if "new_special_tokens_config" in file:  # which wins over the list
        reason = "name its tokens in data.new_special_tokens; a new row starts as the mean of the pieces of its text"
        file.lose("new_special_tokens_config", reason)
    else:
        settings |= special_tokens(file, "add_special_tokens")
    if "init_special_tokens" in file:
        file.lose("init_special_tokens", "a new row starts as the mean of the rows of the pieces of its text")
    if file.flag("resize_vocab"):
        file.skip("resize_vocab", "the vocabulary grows by itself where new tokens need it")
    return settings


def _muon(file: ForeignFile) -> Settings:
    """Translate the switch that wins over `optim`, and means the same formula."""
    return {"train.optimizer": file.note("muon", "use_muon")} if file.flag("use_muon") else {}


def _method(file: ForeignFile) -> Settings:
    if not file.flag("do_train"):
        raise file.wrong("do_train", "without training there is nothing to translate; see `dualtune eval` and `chat`")
    if (stage := file.get("stage")) not in ("sft", "pt", "dpo", "kto"):
        raise file.wrong("stage", f"{stage} cannot be translated; allowed are sft, dpo, kto, and pt for plain text")
    if (kind := file.get("finetuning_type")) not in ("lora", "full"):
        raise file.wrong("finetuning_type", f"only lora and full can be translated. {NEAREST}")
    return {"adapter.method": file.note(kind, "finetuning_type")} if kind == "full" else dora(file, "use_dora")


def _preference(file: ForeignFile) -> Settings:
    if (stage := file.get("stage")) not in ("dpo", "kto"):
        return {}
    loss = "kto" if stage == "kto" else str(file.get("pref_loss"))
    if loss not in _PREFERENCES:
        raise file.wrong("pref_loss", "allowed are sigmoid, hinge, ipo, orpo and simpo")
    objective, keys = _PREFERENCES[loss]
    settings = preferences.compared(file, objective, "stage", "pref_loss", **keys)
    if objective == "dpo":
        settings["preference.loss"] = file.note(loss, "pref_loss")
        if file.number("dpo_label_smoothing"):
            smoothing = file.number("dpo_label_smoothing")
            settings["preference.label_smoothing"] = file.note(smoothing, "dpo_label_smoothing")
    if "pref_bco_weight" in file and file.number("pref_bco_weight"):
        file.lose("pref_bco_weight", "the loss of BCO is not supported yet")
    settings |= _sft_weight(file, objective) | _reference(file, objective)
    return settings | preferences.without_dropout(file, "lora_dropout")


def _sft_weight(file: ForeignFile, objective: str) -> Settings:
    """Translate pref_ftx, which comes on top of the loss of SFT that ORPO has anyway."""
    weight = file.number("pref_ftx")
    if objective == "kto":
        if weight:
            file.lose("pref_ftx", "kto has no loss of sft beside it")
        return {}
    origin = f"pref_ftx: {weight:g}" + (", and ORPO's own 1" if objective == "orpo" else "")
    means = "LLaMA-Factory takes the mean of each answer, here it is over all targets of a step"
    total = weight + (objective == "orpo")
    return {"preference.sft_weight": Note(total, f"{origin}; {means}" if total else origin)}


def _reference(file: ForeignFile, objective: str) -> Settings:
    """Translate the reference: the base, also of a run that goes on from an adapter, unless the file names a model."""
    if objective not in ("dpo", "kto"):
        file.skip_all("ref_model ref_model_adapters", f"{objective} has no reference")
        return {}
    model, adapter = file.text("ref_model"), file.text("ref_model_adapters")
    if model not in (None, file.get("model_name_or_path")):
        file.lose(
            "ref_model", "the reference is the base or the adapter that the run starts from: preference.reference"
        )
    elif model is not None and adapter is not None:
        if adapter == file.text("adapter_name_or_path"):
            return {"preference.reference": file.note("start", "ref_model", "ref_model_adapters")}
        file.lose("ref_model_adapters", "the reference's adapter is that of adapter_name_or_path, or none")
    return {"preference.reference": file.note("base", "ref_model")}


def _dtype(file: ForeignFile) -> Settings:
    for key, dtype in (("fp16", "float16"), ("bf16", "bfloat16"), ("pure_bf16", "bfloat16")):
        if file.flag(key):
            if key == "pure_bf16":
                file.lose(key, "what is trained is always kept in float32")
            return {"model.dtype": file.note(dtype, key)}
    return {}


def _quantization(file: ForeignFile) -> Settings:
    if "quantization_bit" not in file:
        return {}
    bits, method = file.count("quantization_bit"), str(file.get("quantization_method") or "bnb").lower()
    if method not in ("bnb", "bitsandbytes"):
        file.lose("quantization_method", "the quantizations are nf4, int8, affine4 and affine8; nf4 is bitsandbytes'")
    if bits == 4:
        nf4_only(file, "quantization_type", "double_quantization")
        return {"model.quantization": file.note("nf4", "quantization_bit", "quantization_type", "double_quantization")}
    reason = EIGHT_BITS if bits == 8 else "of bitsandbytes' formats there is nf4, of 4 bits"
    file.lose("quantization_bit", reason)
    return {}


def _adapter(file: ForeignFile) -> Settings:
    if file.get("finetuning_type") == "full":
        return {}
    alpha = "lora_alpha" if "lora_alpha" in file else "lora_rank"
    settings = lora(file, "lora_rank", alpha, "lora_dropout") | _ARGS.scaling(file)
    if "lora_alpha" not in file:
        rank = file.count("lora_rank")
        settings["adapter.alpha"] = Note(2 * rank, f"twice lora_rank: {rank}, the default of LLaMA-Factory")
    return settings


def _init(file: ForeignFile) -> Settings:
    if file.get("finetuning_type") == "full" or not file.flag("pissa_init"):
        return {}
    return {"adapter.init": file.note("pissa", "pissa_init")}


def _targets(file: ForeignFile) -> Settings:
    return {} if file.get("finetuning_type") == "full" else module_names(file, "lora_target")


def _init_from(file: ForeignFile) -> Settings:
    path = file.text("adapter_name_or_path")
    if path is None:
        return {}
    if "," in path:
        file.lose("adapter_name_or_path", "one adapter can be continued; merge the others into the base first")
        return {}
    return {"adapter.init_from": path}


def _data(file: ForeignFile) -> Settings:
    if "dataset" not in file:
        raise file.wrong("dataset", f"must name data sets of {_INFO}")
    table = _table_of_datasets(file)
    settings: Settings = {"data.train": file.note(_sources(file, "dataset", table), "dataset")}
    if "eval_dataset" in file:
        return settings | {"data.eval": file.note(_sources(file, "eval_dataset", table), "eval_dataset")}
    return settings | held_out(file, "val_size")


def _table_of_datasets(file: ForeignFile) -> dict[str, Any] | None:
    """Read the list of data sets, or report that it is not here."""
    path = Path(str(file.get("dataset_dir"))) / _INFO
    try:
        return read_json(path, max_bytes=_MAX_INFO_BYTES)
    except (DualtuneError, OSError):
        reason = (
            f"there is no {path} that can be read, so names of data sets stay; write the paths of the files instead"
        )
        file.lose("dataset_dir", reason)
        return None


def _sources(file: ForeignFile, key: str, table: dict[str, Any] | None) -> Any:
    value = file.get(key)
    names = cast(list[Any], value) if isinstance(value, list) else str(value).split(",")
    sources = [_source(file, key, str(name).strip(), table) for name in names]
    return sources[0] if len(sources) == 1 else sources


def _source(file: ForeignFile, key: str, name: str, table: dict[str, Any] | None) -> dict[str, Any]:
    if table is None:
        return {"path": name}
    if not isinstance(table.get(name), dict):
        raise file.wrong(key, f"{name} is not one of the {len(table)} data sets of {_INFO}")
    row, source = table_in(table[name]), dict[str, Any]()
    directory = Path(str(file.get("dataset_dir")))
    if isinstance(row.get("file_name"), str):
        source["path"] = str(directory / row["file_name"])
    elif isinstance(row.get("hf_hub_url"), str):
        source["path"] = row["hf_hub_url"]
        source |= {option: row[option] for option in ("subset", "split") if row.get(option)}
    else:
        raise file.wrong(key, f"{name} has neither file_name nor hf_hub_url in {_INFO}")
    if bool(row.get("ranking")) != (file.get("stage") == "dpo"):
        rule = "ranks answers (ranking: true)" if row.get("ranking") else "does not rank answers (no ranking: true)"
        raise file.wrong(key, f"{name} {rule}, but the stage is {file.get('stage')}")
    where = f"{key} ({name})"
    for option in row.keys() - _READ:
        if not is_off(row[option]):
            file.lose(f"{where}.{option}", OF_SOURCES, row[option])
    return source | _layout(file, where, row)


# Columns of a preference -> ours: the question in rows like Alpaca's, and the answer.
_PROMPT = {"prompt": "prompt", "query": "input", "system": "system"}
_ANSWERS = {"preference": {"chosen": "chosen", "rejected": "rejected"}, "unpaired_preference": {"kto_tag": "label"}}
_READ = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "subset", "split", "ranking", "formatting", "columns",
         "tags", "file_sha1"}  # fmt: skip


def _layout(file: ForeignFile, where: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the format of the rows and the names of their columns."""
    columns, tags = table_in(row.get("columns")), table_in(row.get("tags"))
    if file.get("stage") == "pt":
        return _named("text", {"text": columns.get("prompt", "text")})
    judged = {"dpo": "preference", "kto": "unpaired_preference"}.get(str(file.get("stage")))
    answers = _ANSWERS.get(judged or "", {})
    if row.get("formatting", _OF_ALPACA) == _OF_ALPACA:
        names = (_PROMPT if judged == "preference" else _ALPACA) | answers
        for key in columns.keys() - names.keys():
            rule = f"{judged or _OF_ALPACA} has the columns {', '.join(names.values())}"
            file.lose(f"{where}.columns.{key}", rule, columns[key])
        return _named(judged or _OF_ALPACA, {column: columns[key] for key, column in names.items() if key in columns})
    roles = (tags.get("role_tag", "from"), tags.get("content_tag", "value"))
    if row.get("formatting") == "openai":
        roles = (tags.get("role_tag", "role"), tags.get("content_tag", "content"))
    if roles not in (("role", "content"), ("from", "value")):
        file.lose(f"{where}.tags", "a message has role and content, or from and value; rename them in the file", tags)
    others = {"tools": "tools", "system": "system"} | answers
    for key in columns.keys() - {"messages", *others}:
        file.lose(
            f"{where}.columns.{key}", f"a conversation has the columns messages, {', '.join(others)}", columns[key]
        )
    format, key = ("messages", "messages") if roles == ("role", "content") else ("sharegpt", "conversations")
    if judged == "preference":
        key = "messages"  # the prompt
    more = {ours: columns[theirs] for theirs, ours in others.items() if theirs in columns}
    return _named(judged or format, {key: columns.get("messages", "conversations")} | more)


def _named(format: str, columns: dict[str, Any]) -> dict[str, Any]:
    other = {column: name for column, name in columns.items() if column != name}
    return {"format": format} | ({"columns": other} if other else {})


def _template(file: ForeignFile) -> Settings:
    if "template" in file:
        reason = "the tokenizer's own template is used; compare the text with `dualtune preview`, or name a Jinja file"
        file.lose("template", reason)
    return {}


def _thinking(file: ForeignFile) -> Settings:
    """Translate the switches of data_args.py: enable_thinking, whose null mixes both modes, and preserve_thinking."""
    names = [name for name in ("enable_thinking", "preserve_thinking") if name in file]
    variables = {name: file.flag(name) for name in names}
    if variables.get("enable_thinking") is False:
        reason = "LLaMA-Factory also takes reasoning out of the rows: remove it, or data.columns: {reasoning: null}"
        file.lose("enable_thinking (rows)", reason, value=False)
    return {"data.template_variables": file.note(variables, *names)} if variables else {}


def _steps(file: ForeignFile) -> Settings:
    is_neat, is_pretraining = file.flag("neat_packing"), "packing" not in file and file.get("stage") == "pt"
    if not (is_neat or is_pretraining or file.flag("packing")):
        return _ARGS.batch(file, "cutoff_len", is_packed=False)
    if not is_neat:
        file.lose("packing", "documents of a row do not see each other, as with neat_packing", value="true")
    packing = file.note(True, "neat_packing", "packing")
    return _ARGS.batch(file, "cutoff_len", is_packed=True) | {"data.packing": packing}


def _loss_on(file: ForeignFile) -> Settings:
    if file.get("stage") in ("dpo", "kto"):
        return {}  # the answers
    if file.get("stage") == "pt":
        return {"data.loss_on": Note("all", "stage: pt"), "data.template": Note("none", "stage: pt")}
    if file.flag("mask_history"):
        return {"data.loss_on": file.note("last", "mask_history")}
    return {"data.loss_on": file.note("all" if file.flag("train_on_prompt") else "assistant", "train_on_prompt")}


def _mixture(file: ForeignFile) -> Settings:
    if file.get("mix_strategy") != "concat":
        reason = "documents of all sources are shuffled together; give a source a weight"
        file.lose("mix_strategy", reason)
        if "interleave_probs" in file:
            file.lose("interleave_probs", reason)
    return {}


RULES = (
    renamed("model_name_or_path", "model.name", ForeignFile.model),
    translated("stage finetuning_type do_train use_dora", "adapter.method", _method,
               "`lora` and `full`; the stages sft, pt, dpo and kto; rm and ppo are refused"),
    translated("bf16 fp16 pure_bf16", "model.dtype", _dtype),
    translated("quantization_bit quantization_method quantization_type double_quantization", "model.quantization",
               _quantization, "4 bits become nf4; bitsandbytes' 8 bits are something else than int8"),
    translated("lora_rank lora_alpha lora_dropout use_rslora",
               "adapter.rank, adapter.alpha, adapter.dropout, adapter.scaling", _adapter,
               "lora_alpha is twice the rank by default"),
    translated("lora_target", "adapter.targets", _targets, "`all` is `all-linear`"),
    translated("adapter_name_or_path", "adapter.init_from", _init_from),
    translated("dataset eval_dataset dataset_dir val_size", "data.train, data.eval", _data,
               "the names are looked up in dataset_info.json, if it is here; else write paths"),
    translated("template", "data.template", _template, "the tokenizer's own, a name such as `qwen-3`, or a Jinja file"),
    translated("enable_thinking preserve_thinking", "data.template_variables", _thinking,
               "variables of the template; remove them if yours does not read them"),
    renamed("cutoff_len", "data.max_length", ForeignFile.count, "longer documents are cut", least=2),
    translated("per_device_train_batch_size gradient_accumulation_steps packing neat_packing",
               "data.packing, train.tokens_per_step or train.documents_per_step", _steps,
               "packed: the product with cutoff_len, in tokens; documents do not see each other, as with neat_packing"),
    translated("train_on_prompt mask_history", "data.loss_on", _loss_on, "`all`, `last`"),
    translated("pref_loss pref_beta pref_ftx pref_bco_weight dpo_label_smoothing simpo_gamma kto_chosen_weight "
               "kto_rejected_weight ref_model ref_model_adapters",
               "train.objective, preference.loss, preference.beta, preference.sft_weight, preference.label_smoothing, "
               "preference.gamma, preference.desirable_weight, preference.undesirable_weight, preference.reference",
               _preference, "with stage: dpo or kto; orpo and simpo are an objective of their own"),
    translated("mix_strategy interleave_probs", "", _mixture, "all sources are shuffled together"),
    translated("disable_gradient_checkpointing", "memory.checkpointing", lambda file: (
        {"memory.checkpointing": "none"} if file.flag("disable_gradient_checkpointing") else {}),
               "true is `none`; by default as little as fits is recomputed"),
    translated("early_stopping_steps load_best_model_at_end", "guards.early_stopping, guards.restore_best",
               lambda file: _ARGS.guards(file, "early_stopping_steps")),
    absent("ppo_* reward_model reward_model_*", NO_REWARDS),
    absent("ref_model_quantization_bit", "the reference is quantized as the base", "model.quantization"),
    absent("ld_alpha", "every token of an answer counts alike"),
    absent("max_samples", "all rows are used; take a part of a hub data set with split: train[:1000], or cut the file"),
    translated("additional_target", "adapter.train_modules",
               lambda file: listed(file, "additional_target", "adapter.train_modules")),
    translated("add_tokens add_special_tokens new_special_tokens_config init_special_tokens resize_vocab",
               "data.new_tokens, data.new_special_tokens", _new_tokens,
               "lists; the vocabulary grows by itself, and the rows of the tokens are trained"),
    translated("loraplus_lr_ratio loraplus_lr_embedding", "train.lora_plus_ratio",
               lambda file: lora_plus(file, "loraplus_lr_ratio", "loraplus_lr_embedding")),
    translated("pissa_init", "adapter.init", _init, "the base stays as it is, so there is nothing to convert"),
    needless("pissa_iter pissa_convert", "the search is fixed, and the written adapter is plain LoRA"),
    absent("create_new_adapter", "a run has one adapter, which adapter.init_from may start"),
    absent("oft_* module_dropout freeze_trainable_* freeze_extra_modules use_llama_pro",
           "this kind of training is not supported yet"),
    absent("use_galore galore_* use_apollo apollo_* use_badam badam_* use_adam_mini",
           "the optimizers are adamw, adamw_8bit, lion, lion_8bit, adafactor, muon and sgd", "train.optimizer"),
    absent("use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha",
           "the loss is the cross-entropy of the targets"),
    router_balance("moe_aux_loss_coef"),
    absent("use_mca use_megatron_bridge megatron_bridge_args use_hyper_parallel hyper_parallel_* use_kt kt_*",
           "another engine than torch and MLX is not supported"),
    absent("tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size context_parallel_size "
           "sequence_parallel use_distributed_optimizer overlap_param_gather overlap_grad_reduce",
           LAUNCHED, "memory.sharding"),
    absent("freeze_vision_tower freeze_multi_modal_projector freeze_language_model image_* video_* audio_* media_dir "
           "crop_to_patches use_audio_in_video", "models are trained on text alone"),
    absent("split_special_tokens", "the meaning of special tokens in a row's text is one setting for all of them",
           "data.special_tokens_in_text"),
    absent("rope_scaling shift_attn mixture_of_depths upcast_layernorm upcast_lmhead_output train_from_scratch "
           "block_diag_attn model_max_length", "the base is computed as its config.json says"),
    absent("model_revision", "download the revision, and name its directory in model.name", "model.name"),
    absent("adapter_folder ignore_pad_token_for_loss eval_on_each_dataset eval_num_beams", "there is nothing like it"),
    absent("streaming", "rows are always read as a stream, and shuffled as a whole"),
    absent("tool_format default_system",
           "the tokenizer's own template writes tools and system messages; write a system message into the rows"),
    absent("disable_shuffling", "documents are shuffled anew in each epoch"),
    absent("use_swanlab swanlab_*", "run.track knows trackio, wandb, mlflow and tensorboard"),
    absent("export_*", "`dualtune export RUN --to hf`; also `gguf`, `ollama`, `lmstudio` and `mlx`"),
    absent("fp8 fp8_*", "the compute dtypes are float32, bfloat16 and float16", "model.dtype"),
    needless("infer_backend infer_dtype offload_folder use_kv_cache vllm_* sglang_* do_sample temperature top_p top_k "
             "num_beams max_length max_new_tokens repetition_penalty length_penalty skip_special_tokens",
             "it belongs to generation: `dualtune chat`, `generate`, `serve`"),
    needless("use_reentrant_gc quantization_device_map",
             "the layout in memory is chosen automatically"),
    needless("hf_hub_token ms_hub_token om_hub_token", "log in with `hf auth login`"),
    *arguments.RULES,
    translated("use_muon", "train.optimizer", _muon, "it wins over optim; the learning rate is that of AdamW"),
)  # fmt: skip

"""Translate configs of TRL's command line (`trl sft --config FILE`): its keys and defaults, and their meaning here.

Based on trl/trainer/sft_config.py, trl/trainer/model_config.py and trl/scripts/utils.py of July 2026.
"""

from __future__ import annotations

from typing import Any, cast

from dualtune.config.importing import arguments
from dualtune.config.importing.arguments import (
    EIGHT_BITS,
    NO_PREFERENCES,
    Arguments,
    module_names,
    nf4_only,
    template_variables,
)
from dualtune.config.importing.table import Given, Note, Settings, absent, is_off, needless, translated

DEFAULTS: dict[str, Any] = arguments.DEFAULTS | {
    "learning_rate": 2e-5, "max_length": 1024, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
    "bnb_4bit_quant_type": "nf4", "dataset_test_split": "test", "packing_strategy": "bfd", "loss_type": "nll",
    "eval_strategy": "no", "truncation_mode": "keep_start",
}  # fmt: skip
_ARGS = Arguments()
# Keys that only the other trainers of TRL have.
_OTHER_TRAINERS = {
    "dpo, kto or another preference trainer": "beta desirable_weight undesirable_weight max_prompt_length "
    "precompute_ref_log_probs ref_model_mixup_alpha label_smoothing simpo_gamma cpo_alpha",
    "grpo, rloo or another online trainer": "reward_funcs reward_model_name_or_path num_generations "
    "max_completion_length use_vllm kl_coef num_ppo_epochs",
    "reward": "center_rewards_coefficient",
    "gkd or another distillation trainer": "teacher_model_name_or_path lmbda",
}


def _objective(given: Given) -> Settings:
    for trainer, names in _OTHER_TRAINERS.items():
        for name in names.split():
            if name in given:
                raise given.wrong(name, f"it belongs to {trainer}: {NO_PREFERENCES}; `trl sft` can be translated")
    if (loss := given.get("loss_type")) not in ("nll", "chunked_nll", "dft"):
        raise given.wrong("loss_type", f"it is the loss of another trainer than sft: {NO_PREFERENCES}")
    if loss == "dft":
        given.lose("loss_type", "the loss is the cross-entropy of the targets")
    if given.flag("use_peft"):
        return {}
    for name in (each for rule in RULES if rule.convert in (_adapter, _targets) for each in rule.names):
        if name in given:
            given.skip(name, "without use_peft it has no meaning")
    return {"adapter.method": Note("full", "no use_peft: all parameters are trained")}


def _model(given: Given) -> Settings:
    if (name := given.text("model_name_or_path")) is None:
        raise given.wrong("model_name_or_path", "must be a hub id or a directory")
    return {"model.name": name}


def _dtype(given: Given) -> Settings:
    if given.flag("fp16"):
        return {"model.dtype": given.note("float16", "fp16")}
    if "bf16" in given:
        return {"model.dtype": given.note("bfloat16" if given.flag("bf16") else "float32", "bf16")}
    return {"model.dtype": Note("auto", "bf16 where the device has it, the default of TRL")}


def _quantization(given: Given) -> Settings:
    if given.flag("load_in_4bit"):
        nf4_only(given, "bnb_4bit_quant_type", "use_bnb_nested_quant")
        return {"model.quantization": given.note("nf4", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")}
    if given.flag("load_in_8bit"):
        given.lose("load_in_8bit", EIGHT_BITS)
    return {}


def _adapter(given: Given) -> Settings:
    if not given.flag("use_peft"):
        return {}
    return {
        "adapter.rank": given.note(given.count("lora_r"), "lora_r"),
        "adapter.alpha": given.note(given.number("lora_alpha"), "lora_alpha"),
        "adapter.dropout": given.note(given.number("lora_dropout"), "lora_dropout"),
    } | _ARGS.scaling(given)


def _targets(given: Given) -> Settings:
    return module_names(given, "lora_target_modules") if given.flag("use_peft") else {}


def _data(given: Given) -> Settings:
    if "datasets" in given:
        return _mixture(given)
    if (name := given.text("dataset_name")) is None:
        raise given.wrong("dataset_name", "must be a data set, or give a list of datasets")
    subset = {"subset": given.text("dataset_config")} if "dataset_config" in given else {}
    split = {"split": given.text("dataset_train_split")} if "dataset_train_split" in given else {}
    names = ("dataset_name", "dataset_config", "dataset_train_split")
    evaluation = Note(0, "no eval_strategy: nothing is evaluated")
    if given.get("eval_strategy") not in ("no", False):
        test = {"path": name, **subset, "split": given.text("dataset_test_split")}
        evaluation = given.note(test, "eval_strategy", "dataset_test_split")
    return {"data.train": given.note({"path": name, **subset, **split}, *names), "data.eval": evaluation}


def _mixture(given: Given) -> Settings:
    entries = given.get("datasets")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(cast(dict[str, Any], entry).get("path"), str)
        for entry in cast(list[Any], entries)
    ):
        raise given.wrong("datasets", "must be a list of mappings with a path")
    sources: list[dict[str, Any]] = []
    for index, entry in enumerate(cast(list[dict[str, Any]], entries)):
        part = {ours: entry[theirs] for theirs, ours in (("name", "subset"), ("split", "split")) if entry.get(theirs)}
        files = entry.get("data_files")
        if isinstance(files, str | list) and files:
            paths = [files] if isinstance(files, str) else cast(list[Any], files)
            sources += [{"path": path} for path in paths]
        else:
            sources.append({"path": entry["path"], **part})
        for key in entry.keys() - {"path", "name", "split", "columns"} - ({"data_files"} if files else set()):
            if not is_off(entry[key]):
                reason = "a source has only path, subset, split, format, columns and weight"
                given.lose(f"datasets[{index}].{key}", reason, entry[key])
    for name in ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"):
        if name in given:
            given.skip(name, "datasets wins over it")
    share = given.number("test_split_size") if "test_split_size" in given else 0
    train = sources[0] if len(sources) == 1 else sources
    return {"data.train": given.note(train, "datasets"), "data.eval": given.note(share, "test_split_size")}


def _columns(given: Given) -> Settings:
    name = given.text("dataset_text_field")
    if name in (None, "text"):
        return {}
    return {"data.columns": given.note({"text": name}, "dataset_text_field")}


def _loss_on(given: Given) -> Settings:
    if given.flag("assistant_only_loss"):
        return {"data.loss_on": given.note("assistant", "assistant_only_loss")}
    if "completion_only_loss" in given:
        ours = "assistant" if given.flag("completion_only_loss") else "all"
        return {"data.loss_on": given.note(ours, "completion_only_loss")}
    reason = (
        "TRL takes the loss on everything, but on the completion alone where rows have prompt and completion: for "
        "these set data.loss_on to assistant"
    )
    given.lose("completion_only_loss", reason, value="not set")
    return {"data.loss_on": Note("all", "neither assistant_only_loss nor completion_only_loss")}


def _template(given: Given) -> Settings:
    path = given.text("chat_template_path")
    if path is None or path.endswith(".jinja"):
        return {} if path is None else {"data.template": path}
    given.lose("chat_template_path", "it is a model's directory; name its Jinja file in data.template")
    return {}


def _max_length(given: Given) -> Settings:
    if given.is_null("max_length"):
        reason = (
            "a document is never longer than data.max_length, here the default; `dualtune preview` counts those cut"
        )
        given.lose("max_length", reason, value="null")
        return {}
    if given.get("truncation_mode") != "keep_start":
        given.lose("truncation_mode", "a document that is too long loses its end")
    return {"data.max_length": given.note(given.count("max_length", 2), "max_length")}


def _steps(given: Given) -> Settings:
    if given.flag("packing") and (strategy := given.get("packing_strategy")) not in ("bfd", "bfd_split"):
        given.lose("packing_strategy", "documents of a row do not see each other, and none is split", value=strategy)
    return _ARGS.batch(given, "max_length")


RULES = (
    translated("model_name_or_path", "model.name", _model),
    translated("use_peft loss_type " + " ".join(_OTHER_TRAINERS.values()), "adapter.method", _objective,
               "without use_peft, full; the options of DPO, GRPO and other trainers are refused"),
    translated("bf16 fp16", "model.dtype", _dtype),
    translated("load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant", "model.quantization",
               _quantization, "`nf4`, with double quantization; bitsandbytes' 8 bits are something else than int8"),
    translated("lora_r lora_alpha lora_dropout use_rslora",
               "adapter.rank, adapter.alpha, adapter.dropout, adapter.scaling", _adapter),
    translated("lora_target_modules", "adapter.targets", _targets, "`all-linear`, or a list of names"),
    translated("dataset_name dataset_config dataset_train_split dataset_test_split datasets test_split_size",
               "data.train, data.eval", _data, "a name, a file or a directory; the test split only if it is evaluated"),
    translated("dataset_text_field", "data.columns", _columns, "`{text: …}`"),
    translated("assistant_only_loss completion_only_loss", "data.loss_on", _loss_on,
               "`assistant`; templates need no `generation` tag"),
    translated("chat_template_path", "data.template", _template, "a Jinja file"),
    translated("chat_template_kwargs", "data.template_variables",
               lambda given: template_variables(given, "chat_template_kwargs"), "for all rows"),
    translated("max_length truncation_mode", "data.max_length", _max_length, "longer documents are cut at the end"),
    translated("per_device_train_batch_size gradient_accumulation_steps packing packing_strategy",
               "data.packing, train.tokens_per_step or train.documents_per_step", _steps,
               "packed: the product with max_length, in tokens; times the number of GPUs"),
    translated("load_best_model_at_end", "guards.restore_best", _ARGS.guards),
    absent("use_dora", "DoRA is not supported yet; this is LoRA of the same rank"),
    absent("lora_modules_to_save lora_target_parameters", "only LoRA matrices of linear layers are trained",
           "adapter.targets"),
    absent("model_revision", "download the revision, and name its directory in model.name", "model.name"),
    absent("model_init_kwargs dataset_kwargs", "options of other libraries are not passed on"),
    absent("router_aux_loss_coef", "the loss is the cross-entropy of the targets"),
    absent("eos_token", "the model's own tokenizer is always used"),
    absent("activation_offloading", "`activations` moves the inputs of recomputed layers", "memory.offload"),
    absent("env", "set environment variables in the shell"),
    absent("dataset_streaming streaming", "rows are always read as a stream, and shuffled as a whole"),
    needless("dtype torch_dtype bnb_4bit_quant_storage", "weights that are not trained keep their stored format"),
    needless("lora_task_type pad_token ignore_bias_buffers config", "there is nothing to set"),
    needless("shuffle_dataset padding_free eval_packing",
             "documents are always shuffled; the layout in memory does not change the result"),
    *arguments.RULES,
)  # fmt: skip

"""Translate configs of TRL's command line (`trl sft --config FILE`, `dpo`, `kto`): keys, defaults, and their meaning.

Based on trl/trainer/sft_config.py, trl/trainer/model_config.py and trl/scripts/utils.py of July 2026; those of the
preference trainers on trl/trainer/ and trl/experimental/ of TRL 1.16.
"""

from __future__ import annotations

from typing import Any, cast

from dualtune.config.importing import arguments, preferences, samples, teachers
from dualtune.config.importing.arguments import (
    EIGHT_BITS,
    LAUNCHED,
    OF_SOURCES,
    Arguments,
    dora,
    held_out,
    listed,
    lora,
    module_names,
    nf4_only,
    router_balance,
    template_variables,
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
    table_in,
    translated,
)

DEFAULTS: dict[str, Any] = arguments.DEFAULTS | {
    "learning_rate": 2e-5, "max_length": 1024, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
    "bnb_4bit_quant_type": "nf4", "dataset_test_split": "test", "packing_strategy": "bfd", "loss_type": "nll",
    "eval_strategy": "no", "truncation_mode": "keep_start", "beta": 0.1, "desirable_weight": 1.0,
    "undesirable_weight": 1.0, "cpo_alpha": 1.0, "simpo_gamma": 0.5, "label_smoothing": 0.0,
}  # fmt: skip
_ARGS = Arguments()
_LORA = "lora_r lora_alpha lora_dropout use_rslora"
_DISTILLATION = "an older distillation trainer (here train.objective: on_policy_distill, with distill.teacher)"
# Keys that only trainers of TRL have which are not here.
_OTHER_TRAINERS = {
    "ppo, an older rloo or another online trainer": "kl_coef num_ppo_epochs rloo_k",
    "reward": "center_rewards_coefficient",
    _DISTILLATION: "use_teacher_server teacher_model_kind distillation_mode",
}
# The preference trainers: our keys of `preference`, and theirs.
_PREFERENCES = {
    "dpo": {"beta": "beta"},
    "kto": {"beta": "beta", "desirable_weight": "desirable_weight", "undesirable_weight": "undesirable_weight"},
    "orpo": {"beta": "beta"},
    "cpo": {"beta": "beta", "sft_weight": "cpo_alpha", "label_smoothing": "label_smoothing"},
    "simpo": {"beta": "beta", "sft_weight": "cpo_alpha", "gamma": "simpo_gamma"},
}
_SFT_LOSSES = ("nll", "chunked_nll", "dft")
_LENGTHS = "data.max_length is that of prompt and answer together"
_NOT_HERE = {  # their other keys: the value that changes nothing, and what holds here
    "ld_alpha": (1.0, "every token of an answer counts alike"),
    "use_weighting": (False, "every pair has the same weight"),
    "f_divergence_type": ("reverse_kl", "dpo has the reverse KL"),
    "alpha": (0.0, "AlphaPO is not supported yet"),
    "sync_ref_model": (False, "the reference stays as it is"),
    "max_prompt_length": (None, _LENGTHS),
    "max_completion_length": (None, _LENGTHS),
}
_REFERENCE = "precompute_ref_log_probs precompute_ref_batch_size ref_model_mixup_alpha ref_model_sync_steps"
_OF_PREFERENCES = (
    "beta label_smoothing loss_weights cpo_alpha simpo_gamma desirable_weight undesirable_weight "
    f"{' '.join(_NOT_HERE)} {_REFERENCE}"
)


def _is_sampled(file: ForeignFile) -> bool:
    """Return whether the file is one of `trl grpo` or `trl rloo`."""
    return "reward_funcs" in file


def _is_rloo(file: ForeignFile) -> bool:
    """Return whether a file with rewards is one of `trl rloo`."""
    return file.get("loss_type") == "rloo" or any(name in file for name in samples.RLOO)


def _is_plain_dpo(file: ForeignFile) -> bool:
    """Return whether a file without rewards leaves the loss to its preference trainer, whose default is sigmoid."""
    return "loss_type" not in file and any(name in file for name in _OF_PREFERENCES.split())


def _compared(file: ForeignFile) -> str | None:
    """Return the objective of preference training, by keys that only its trainer has; None for that of `trl sft`."""
    losses = preferences.losses_of(file, "loss_type")
    if losses in (["kto"], ["orpo"], ["simpo"]):
        return losses[0]
    if "desirable_weight" in file or "undesirable_weight" in file:
        return "kto"
    if "cpo_alpha" in file or "simpo_gamma" in file:
        return "cpo"
    return "dpo" if losses[0] in preferences.LOSSES else None


def _objective(file: ForeignFile) -> Settings:
    for trainer, names in _OTHER_TRAINERS.items():
        for name in names.split():
            if name in file:
                rule = "which cannot be translated; sft, dpo, kto, grpo, rloo and distillation can be"
                raise file.wrong(name, f"it belongs to {trainer}, {rule}")
    if teachers.is_distilled(file):
        if _is_sampled(file):
            raise file.wrong("reward_funcs", "it belongs to grpo or rloo, but the file names a teacher too")
        teachers.assume_defaults(file)
    elif not _is_sampled(file):
        for name in (*samples.KEYS.split(), *samples.LOST, *samples.RLOO):
            if name in file and (name not in ("beta", "loss_type") or file.get(name) == "rloo"):
                raise file.wrong(name, "it belongs to grpo or rloo, but the file names no reward: add reward_funcs")
        if _is_plain_dpo(file):
            file.assume(loss_type="sigmoid")
    if not teachers.is_distilled(file):
        if _compared(file) is None and not _is_sampled(file):
            _check_sft(file)
        else:
            file.assume(learning_rate=1e-6)
    if file.flag("use_peft"):
        return dora(file, "use_dora")
    file.skip_all(f"{_LORA} use_dora lora_target_modules", "without use_peft it has no meaning")
    return {"adapter.method": Note("full", "no use_peft: all parameters are trained")}


def _check_sft(file: ForeignFile) -> None:
    for name in _OF_PREFERENCES.split():
        if name in file:
            reason = "it belongs to dpo, kto or another preference trainer, but loss_type is one of sft: write "
            reason += "loss_type: sigmoid (for dpo), kto, orpo or simpo, or cpo_alpha: 1.0 (for cpo)"
            raise file.wrong(name, reason)
    if (loss := file.get("loss_type")) not in _SFT_LOSSES:
        allowed = ", ".join((*_SFT_LOSSES, *preferences.LOSSES, "kto", "orpo", "simpo"))
        raise file.wrong("loss_type", f"it cannot be translated, allowed are {allowed}")
    if loss == "dft":
        file.lose("loss_type", "the loss is the cross-entropy of the targets")


def _preference(file: ForeignFile) -> Settings:
    if teachers.is_distilled(file):
        return {}
    if _is_sampled(file):
        prompts = Note("prompt", "other columns of a row reach the functions that name them")
        file.skip_all("disable_dropout", "samples are drawn without dropout")
        if not _is_rloo(file):
            return {**samples.sampled(file, "reward_funcs"), "data.format": prompts}
        for name in samples.GRPO.split():
            if name in file:
                raise file.wrong(name, "it belongs to grpo, but loss_type or another key says rloo; remove one of them")
        if file.get("loss_type") not in ("rloo", "nll"):
            raise file.wrong("loss_type", f"of rloo, whose key is {' or '.join(samples.RLOO)}, only rloo is known")
        for name, reason in samples.RLOO.items():
            if name in file and file.get(name) is not False:
                file.lose(name, reason)
        settings = samples.sampled(file, *samples.RLOO, defaults=samples.OF_RLOO, is_rloo=True)
        return {**settings, "data.format": prompts}
    if (objective := _compared(file)) is None:
        return {}
    own = {"kto": "kto", "cpo": "sigmoid"}.get(objective)
    if own and "loss_type" in file and preferences.losses_of(file, "loss_type") != [own]:
        raise file.wrong("loss_type", f"of {objective}, only {own} can be translated")
    settings = preferences.compared(file, objective, "loss_type", **_PREFERENCES[objective])
    if objective == "dpo":
        settings |= preferences.dpo_losses(file, "loss_type", "loss_weights", "label_smoothing")
        if _is_plain_dpo(file):
            settings["train.objective"] = Note("dpo", "no loss_type: that of trl dpo, unless you write kto or orpo")
    elif objective == "simpo" and "label_smoothing" in file and file.number("label_smoothing"):
        file.lose("label_smoothing", "simpo has none")
    for name, (neutral, reason) in _NOT_HERE.items():
        if name in file and file.get(name) != neutral:
            file.lose(name, reason)
    if not file.flag("sync_ref_model"):
        file.skip_all(_REFERENCE, "the reference's log-probabilities of the answers are computed once, before training")
    if file.get("disable_dropout") is not False:
        settings |= preferences.without_dropout(file, "lora_dropout")
    return settings


def _dtype(file: ForeignFile) -> Settings:
    if file.flag("fp16"):
        return {"model.dtype": file.note("float16", "fp16")}
    if "bf16" in file:
        return {"model.dtype": file.note("bfloat16" if file.flag("bf16") else "float32", "bf16")}
    return {"model.dtype": Note("auto", "bf16 where the device has it, the default of TRL")}


def _quantization(file: ForeignFile) -> Settings:
    if file.flag("load_in_4bit"):
        nf4_only(file, "bnb_4bit_quant_type", "use_bnb_nested_quant")
        return {"model.quantization": file.note("nf4", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")}
    if file.flag("load_in_8bit"):
        file.lose("load_in_8bit", EIGHT_BITS)
    return {}


def _adapter(file: ForeignFile) -> Settings:
    if not file.flag("use_peft"):
        return {}
    return lora(file, "lora_r", "lora_alpha", "lora_dropout") | _ARGS.scaling(file)


def _targets(file: ForeignFile) -> Settings:
    if not file.flag("use_peft"):
        return {}
    return with_experts(file, "lora_target_parameters", module_names(file, "lora_target_modules"))


def _data(file: ForeignFile) -> Settings:
    if "datasets" in file:
        return _mixture(file)
    if "dataset_mixture" in file:
        return _handbook_mixture(file)
    if (name := file.text("dataset_name")) is None:
        raise file.wrong(
            "dataset_name",
            "must be a data set, or give a list in datasets, or in dataset_mixture as the alignment handbook does",
        )
    subset = {"subset": file.text("dataset_config")} if "dataset_config" in file else {}
    split = {"split": file.text("dataset_train_split")} if "dataset_train_split" in file else {}
    names = ("dataset_name", "dataset_config", "dataset_train_split")
    evaluation = Note(0, "no eval_strategy: nothing is evaluated")
    if file.get("eval_strategy") not in ("no", False):
        test = {"path": name, **subset, "split": file.text("dataset_test_split")}
        evaluation = file.note(test, "eval_strategy", "dataset_test_split")
    return {"data.train": file.note({"path": name, **subset, **split}, *names), "data.eval": evaluation}


def _mixture(file: ForeignFile) -> Settings:
    sources: list[dict[str, Any]] = []
    for index, entry in enumerate(file.tables("datasets")):
        files = entry.get("data_files")
        if isinstance(files, str | list) and files:
            sources += [{"path": path} for path in ([files] if isinstance(files, str) else cast(list[Any], files))]
        else:
            part = {"subset": entry.get("name"), "split": entry.get("split")}
            sources.append({"path": entry["path"]} | {key: value for key, value in part.items() if value})
        for key in entry.keys() - {"path", "name", "split", "columns"} - ({"data_files"} if files else set()):
            if not is_off(entry[key]):
                file.lose(f"datasets[{index}].{key}", OF_SOURCES, entry[key])
    file.skip_all("dataset_name dataset_config dataset_train_split dataset_test_split", "datasets wins over it")
    share = file.number("test_split_size") if "test_split_size" in file else 0
    train = sources[0] if len(sources) == 1 else sources
    return {"data.train": file.note(train, "datasets"), "data.eval": file.note(share, "test_split_size")}


def _handbook_mixture(file: ForeignFile) -> Settings:
    """Translate `dataset_mixture` of the alignment handbook, whose scripts read TRL's files."""
    key, sources = "dataset_mixture", list[dict[str, Any]]()
    entries = table_in(file.get(key)).get("datasets")
    tables = [table_in(entry) for entry in cast(list[Any], entries)] if isinstance(entries, list) else []
    if not tables or not all(isinstance(entry.get("id"), str) for entry in tables):
        raise file.wrong(key, "must have a list `datasets`, each with an id")
    for index, entry in enumerate(tables):
        part = {"subset": entry.get("config"), "split": entry.get("split"), "weight": entry.get("weight")}
        if part["weight"] == 1:
            del part["weight"]
        elif part["weight"] is not None:
            reason = "each epoch takes this share of the rows, which is not the same in all of them, as it is there"
            file.lose(f"{key}.datasets[{index}].weight", reason, part["weight"])
        sources.append({"path": entry["id"]} | {name: value for name, value in part.items() if value is not None})
        for name in entry.keys() - {"id", "config", "split", "columns", "weight"}:
            file.lose(f"{key}.datasets[{index}].{name}", OF_SOURCES, entry[name])
    share = file.get(f"{key}.test_split_size")
    evaluation = (
        held_out(file, f"{key}.test_split_size") if share is not None else {"data.eval": Note(0, "no test split")}
    )
    file.skip_all("dataset_name dataset_config dataset_train_split dataset_test_split", f"{key} wins over it")
    if f"{key}.seed" in file:
        file.skip(f"{key}.seed", "run.seed orders the rows")
    return {"data.train": Note(sources[0] if len(sources) == 1 else sources, key), **evaluation}


def _columns(file: ForeignFile) -> Settings:
    name = file.text("dataset_text_field")
    if name in (None, "text"):
        return {}
    return {"data.columns": file.note({"text": name}, "dataset_text_field")}


def _loss_on(file: ForeignFile) -> Settings:
    if _compared(file) is not None or _is_sampled(file) or teachers.is_distilled(file):
        return {}  # the answers
    if file.flag("assistant_only_loss"):
        return {"data.loss_on": file.note("assistant", "assistant_only_loss")}
    if "completion_only_loss" in file:
        targets = "assistant" if file.flag("completion_only_loss") else "all"
        return {"data.loss_on": file.note(targets, "completion_only_loss")}
    reason = (
        "TRL takes the loss on everything, but on the completion alone where rows have prompt and completion: for "
        "these set data.loss_on to assistant"
    )
    file.lose("completion_only_loss", reason, value="not set")
    return {"data.loss_on": Note("all", "neither assistant_only_loss nor completion_only_loss")}


def _template(file: ForeignFile) -> Settings:
    path = file.text("chat_template_path")
    if path is None or path.endswith(".jinja"):
        return {} if path is None else {"data.template": path}
    file.lose("chat_template_path", "it is a model's directory; name its Jinja file in data.template")
    return {}


def _max_length(file: ForeignFile) -> Settings:
    if file.is_null("max_length"):
        reason = (
            "a document is never longer than data.max_length, here the default; `dualtune preview` counts those cut"
        )
        file.lose("max_length", reason, value="null")
        return {}
    if file.get("truncation_mode") != "keep_start":
        file.lose("truncation_mode", "a document that is too long loses its end")
    return {"data.max_length": file.note(file.count("max_length", 2), "max_length")}


def _steps(file: ForeignFile) -> Settings:
    if file.flag("packing") and (strategy := file.get("packing_strategy")) not in ("bfd", "bfd_split"):
        file.lose("packing_strategy", "documents of a row do not see each other, and none is split", value=strategy)
    draws = teachers.is_distilled(file) and teachers.is_on_policy(file)
    if draws or _is_sampled(file):
        names = "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"
        default = samples.OF_RLOO[names[-1]] if _is_rloo(file) else samples.DEFAULTS[names[-1]]
        return samples.batch(file, *names, 1 if draws else default)
    return _ARGS.batch(file, "max_length")


RULES = (
    renamed("model_name_or_path", "model.name", ForeignFile.model),
    translated("use_peft use_dora " + " ".join(_OTHER_TRAINERS.values()), "adapter.method", _objective,
               "without use_peft, full; the options of PPO, reward and distillation trainers are refused"),
    translated("bf16 fp16", "model.dtype", _dtype),
    translated("load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant", "model.quantization",
               _quantization, "`nf4`, with double quantization; bitsandbytes' 8 bits are something else than int8"),
    translated(_LORA,
               "adapter.rank, adapter.alpha, adapter.dropout, adapter.scaling", _adapter),
    translated("lora_target_modules lora_target_parameters", "adapter.targets, adapter.experts", _targets,
               "`all-linear`, or a list of names; of parameters, the stacks of experts"),
    translated("dataset_name dataset_config dataset_train_split dataset_test_split datasets test_split_size "
               "dataset_mixture",
               "data.train, data.eval", _data, "a name, a file or a directory; the test split only if it is evaluated; "
               "`dataset_mixture` is that of the alignment handbook"),
    translated("dataset_text_field", "data.columns", _columns, "`{text: …}`"),
    translated("assistant_only_loss completion_only_loss", "data.loss_on", _loss_on,
               "`assistant`; templates need no `generation` tag"),
    translated(" ".join(dict.fromkeys(f"loss_type disable_dropout {_OF_PREFERENCES} {samples.KEYS} "
                                      f"{' '.join(samples.LOST)} {' '.join(samples.RLOO)}".split())),
               "train.objective, preference.loss, preference.beta, preference.gamma, preference.label_smoothing, "
               "preference.sft_weight, preference.desirable_weight, preference.undesirable_weight, " + samples.OURS,
               _preference,
               "loss_type tells the trainer: sigmoid and others `dpo`, kto `kto`, simpo `simpo`; cpo_alpha is `cpo`; "
               "without it a beta, or another key of preference training alone, is `dpo` with sigmoid; "
               "for ORPOTrainer write loss_type: orpo; [sigmoid, sft] is `sigmoid` with an sft_weight; reward_funcs "
               "tells GRPO, whose options are keys of `rollouts`, and for RLOOTrainer write loss_type: rloo"),
    translated(teachers.KEYS, teachers.OURS, teachers.distilled,
               "DistillationTrainer is `on_policy_distill`, GKDTrainer too with lmbda: 1; with 0 it is `distill`; a "
               "beta of 1 is `reverse_kl`, another one `jsd`"),
    absent(teachers.LOST, "the teacher is loaded as distill.teacher_dtype and distill.teacher_quantization say"),
    needless("use_fused_linear_loss", "the loss is always computed in pieces"),
    translated("chat_template_path", "data.template", _template, "a Jinja file"),
    translated("chat_template_kwargs", "data.template_variables",
               lambda file: template_variables(file, "chat_template_kwargs"), "for all rows"),
    translated("max_length truncation_mode", "data.max_length", _max_length, "longer documents are cut at the end"),
    translated("per_device_train_batch_size gradient_accumulation_steps packing packing_strategy",
               "data.packing, train.tokens_per_step or train.documents_per_step", _steps,
               "packed: the product with max_length, in tokens; times the number of GPUs"),
    translated("load_best_model_at_end", "guards.restore_best", _ARGS.guards),
    translated("lora_modules_to_save", "adapter.train_modules",
               lambda file: listed(file, "lora_modules_to_save", "adapter.train_modules")),
    absent("model_revision", "download the revision, and name its directory in model.name", "model.name"),
    absent("cast_lm_head_to_fp32", "the head computes in model.dtype, the softmax in float32", "model.dtype"),
    absent("model_init_kwargs dataset_kwargs", "options of other libraries are not passed on"),
    router_balance("router_aux_loss_coef"),
    absent("eos_token", "the model's own tokenizer is always used"),
    absent("activation_offloading", "`activations` moves the inputs of recomputed layers", "memory.offload"),
    absent("accelerate_config num_processes num_machines machine_rank main_process_ip main_process_port",
           LAUNCHED, "memory.sharding"),
    absent("env", "set environment variables in the shell"),
    absent("dataset_streaming streaming", "rows are always read as a stream, and shuffled as a whole"),
    absent("generate_during_eval", "prompts to answer at an evaluation", "run.sample_prompts"),
    needless(samples.NEEDLESS, "the fastest way to draw is chosen automatically; rollouts.jsonl has every answer"),
    needless("dtype torch_dtype bnb_4bit_quant_storage", "weights that are not trained keep their stored format"),
    needless("lora_task_type pad_token padding_value is_encoder_decoder ignore_bias_buffers config do_train",
             "there is nothing to set"),
    needless("f_alpha_divergence_coef discopop_tau", "no loss that can be translated reads it"),
    needless("shuffle_dataset padding_free eval_packing",
             "documents are always shuffled; the layout in memory does not change the result"),
    *arguments.RULES,
)  # fmt: skip

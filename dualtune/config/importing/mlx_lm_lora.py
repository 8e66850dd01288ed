"""Translate mlx-lm-lora configs (`mlx_lm_lora.train --config`): what it has beside mlx-lm's keys, and other defaults.

Based on mlx_lm_lora/train.py, trainer/dpo_trainer.py, cpo_trainer.py and orpo_trainer.py of mlx-lm-lora 5.10.
"""

from __future__ import annotations

from typing import Any

from dualtune.config.importing import mlx_lm, preferences, samples
from dualtune.config.importing.arguments import NAMED_OUTSIDE, lora
from dualtune.config.importing.table import ForeignFile, Note, Settings, absent, needless, translated

DEFAULTS: dict[str, Any] = mlx_lm.DEFAULTS | {
    "model": "mlx_model", "train_type": "lora", "train_mode": "sft", "data": "data/", "num_layers": -1, "batch_size": 1,
    "iters": 100, "gradient_accumulation_steps": 1, "lora_parameters.scale": 10.0, "beta": 0.1,
    "dpo_cpo_loss_type": "sigmoid", "sft_loss_type": "nll",
}  # fmt: skip
_COLUMNS = mlx_lm.COLUMNS | {"system_feature": "system", "chosen_feature": "chosen", "rejected_feature": "rejected"}
_LOSSES = {"dpo": ("sigmoid", "hinge", "ipo"), "cpo": ("sigmoid",)}


def _method(file: ForeignFile) -> Settings:
    if (kind := file.get("train_type")) not in ("lora", "dora", "full"):
        raise file.wrong("train_type", "allowed are lora, dora and full")
    if (mode := file.get("train_mode")) not in ("sft", "dpo", "cpo", "orpo", "grpo"):
        raise file.wrong("train_mode", "only sft, dpo, cpo, orpo and grpo can be translated")
    if "train" in file and not file.flag("train"):
        raise file.wrong("train", "without training there is nothing to translate; to evaluate, use `dualtune eval`")
    if mode == "sft" and file.get("sft_loss_type") == "dft":
        file.lose("sft_loss_type", "the loss is the cross-entropy of the targets")
    file.assume(grad_accumulation_steps=file.count("gradient_accumulation_steps"))  # its name in mlx-lm
    return {} if kind == "lora" else {"adapter.method": file.note(kind, "train_type")}


def _adapter(file: ForeignFile) -> Settings:
    if "lora_parameters.keys" in file:
        file.lose("lora_parameters.keys", "mlx-lm-lora takes every linear layer; name the layers in adapter.targets")
    if file.get("train_type") == "full":
        return {}
    rank, scale = file.count("lora_parameters.rank"), file.number("lora_parameters.scale")
    settings = lora(file, "lora_parameters.rank", "lora_parameters.scale", "lora_parameters.dropout")
    return settings | {"adapter.alpha": Note(rank * scale, f"lora_parameters.scale × rank = {scale:g} × {rank}")}


def _targets(file: ForeignFile) -> Settings:
    return {} if file.get("train_type") == "full" else mlx_lm.last_layers(file, None)


def _steps(file: ForeignFile) -> Settings:
    accumulated, size = file.count("gradient_accumulation_steps"), file.count("batch_size")
    origin = f"batch_size: {size} × gradient_accumulation_steps: {accumulated}"
    documents = {"train.documents_per_step": Note(size * accumulated, origin)}
    if "epochs" in file and "iters" not in file:
        return documents | {"train.epochs": file.note(file.number("epochs"), "epochs")}
    iters = file.count("iters")
    if iters < accumulated:
        rule = f"must be at least gradient_accumulation_steps ({accumulated}), or nothing is trained"
        raise file.wrong("iters", rule)
    steps = Note(iters // accumulated, f"iters: {iters} // gradient_accumulation_steps: {accumulated}")
    return documents | {"train.steps": steps}


def _quantization(file: ForeignFile) -> Settings:
    for key in ("load_in_6bits", "load_in_mxfp4"):
        if file.flag(key):
            file.lose(key, "the quantizations are nf4, int8, affine4 and affine8")
    for key, name in (("load_in_4bits", "affine4"), ("load_in_8bits", "affine8")):
        if file.flag(key):
            return {"model.quantization": Note(name, f"{key}: true; in groups of 64 weights, there of 128")}
    return {}


# TRL's options under other names, and the defaults that are not TRL's.
_SAMPLED = {"num_generations": "group_size", "loss_type": "grpo_loss_type", "reward_funcs": "reward_functions"}
_GRPO = {
    "loss_type": "grpo", "num_generations": 4, "max_completion_length": 512, "temperature": 0.8, "beta": 0.1,
    "epsilon": 1e-4, "use_bias_correction_kl": False,
}  # fmt: skip
_OF_GRPO = (
    "group_size epsilon epsilon_high max_completion_length temperature reward_weights reward_functions "
    "reward_functions_file grpo_loss_type importance_sampling_level"
)


def _preference(file: ForeignFile) -> Settings:
    if file.get("train_mode") == "grpo":
        source = file.text("reward_functions_file") or "rewards.py"
        return samples.sampled(file, "train_mode", names=_SAMPLED, defaults=_GRPO, source=source)
    file.skip_all(_OF_GRPO, "it belongs to another train_mode")
    if (mode := str(file.get("train_mode"))) not in ("dpo", "cpo", "orpo"):
        return {}
    loss = str(file.get("dpo_cpo_loss_type"))
    if loss not in _LOSSES.get(mode, (loss,)):
        raise file.wrong("dpo_cpo_loss_type", f"of {mode}, only {', '.join(_LOSSES[mode])} can be translated")
    settings = preferences.compared(file, mode, "train_mode", beta="beta")
    if mode == "orpo":
        mean = Note(1.0, "the loss of sft is a mean of each answer there, here over all targets of a step")
        return settings | {"preference.sft_weight": mean}
    if mode == "cpo":
        return settings | {"preference.sft_weight": Note(0.0, "mlx-lm-lora's CPO has no loss of sft")}
    path = file.text("reference_model_path")
    if path not in (None, file.get("model")):
        file.lose("reference_model_path", "the reference is the base or the adapter that the run starts from")
    base = file.note("base", "reference_model_path")
    return settings | {"preference.loss": file.note(loss, "dpo_cpo_loss_type"), "preference.reference": base}


def _loss_on(file: ForeignFile) -> Settings:
    return mlx_lm.loss_on(file) if file.get("train_mode") == "sft" else {}


def _qat(file: ForeignFile) -> Settings:
    if file.flag("qat_enable"):
        reason = (
            "it rounds each weight of the base by a rule of its own; adapter.merge_for rounds the merge as a format"
        )
        file.lose("qat_enable", f"{reason} does: affine4, affine8, nf4, q4_0, q8_0")
    return {}


def _tracker(file: ForeignFile) -> Settings:
    if "wandb" not in file:
        return {}
    file.lose("wandb", f"the project: {NAMED_OUTSIDE}")
    return {"run.track": file.note(["wandb"], "wandb")}


_OWN = (
    translated("train_type train sft_loss_type", "adapter.method", _method, "`lora`, `dora` and `full`"),
    translated("lora_parameters.rank lora_parameters.scale lora_parameters.dropout",
               "adapter.rank, adapter.alpha, adapter.dropout", _adapter, "alpha is scale × rank; the scale is 10"),
    translated("lora_parameters.keys num_layers", "adapter.targets, adapter.layers", _targets,
               "`last 16`; -1 is `all`"),
    translated("load_in_4bits load_in_6bits load_in_8bits load_in_mxfp4", "model.quantization", _quantization,
               "4 and 8 bits are `affine4` and `affine8`, in smaller groups"),
    translated("data hf_dataset test " + " ".join(_COLUMNS), "data.train, data.eval, data.columns",
               lambda file: mlx_lm.data_of(file, _COLUMNS), "the valid file of a directory is found automatically"),
    translated("mask_prompt", "data.loss_on", _loss_on, "of sft: false is `all`, true is `last`"),
    translated(f"train_mode beta dpo_cpo_loss_type reference_model_path {_OF_GRPO}",
               "train.objective, preference.beta, preference.loss, preference.sft_weight, preference.reference, "
               + samples.OURS, _preference,
               "sft, dpo, cpo (without a loss of sft), orpo and grpo; other modes and dpop are refused"),
    translated("iters epochs batch_size gradient_accumulation_steps",
               "train.steps, train.epochs, train.documents_per_step", _steps,
               "iters counts micro-batches, and wins over epochs"),
    translated("wandb", "run.track", _tracker, "`wandb`; its project is WANDB_PROJECT"),
    translated("qat_enable qat_bits qat_group_size qat_mode qat_start_step qat_interval", "", _qat,
               "the nearest is adapter.merge_for, which rounds the merge as a format does"),
    needless("delta reward_scaling", "no loss that can be translated reads it"),
    needless("dsla_loss latent_* lambda_mse lambda_mse_target tau_mse_target clip_epsilon_logits judge judge_config "
             "alpha klpo_* micro_batch_size list_reward_functions", "it belongs to another train_mode"),
    needless("efficient_long_context recurrence_chunk_size", "the layout in memory is chosen automatically"),
    absent("preference_score_feature", "every pair has the same weight"),
    needless("fuse lm_studio_name", "`dualtune export RUN --to mlx`, or `lmstudio`"),
)  # fmt: skip
_OTHERWISE = {name for rule in _OWN for name in rule.names} | {"fine_tune_type", "grad_accumulation_steps", "report_to"}
RULES = (*_OWN, *(rule for rule in mlx_lm.RULES if not _OTHERWISE.intersection(rule.names)))

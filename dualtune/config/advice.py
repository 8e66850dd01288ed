"""Advice on unknown keys and values: "Did you mean …?"."""

from __future__ import annotations

from dualtune.base.text import closest, did_you_mean, either
from dualtune.config.data_section import SourceConfig
from dualtune.config.schema import sections
from dualtune.config.values import KeyPath, dotted
from dualtune.model.methods import OTHERS

# ----------------------------------------------------------------------------------------------------------------------
# Keys and values of other trainers without a counterpart here, with the advice to show instead of a suggestion.

NO_SUCH_KEY = {
    name: answer
    for answer, names in {
        "Other constants are fixed; set 'train.optimizer', 'train.learning_rate' and 'train.weight_decay'": (
            "adam_beta1 adam_beta2 adam_epsilon adamw beta1 beta2 betas eps momentum optim_args optimizer_config"
        ),
        "Reward models are not trained; preferences are learned without one: see 'train.objective'": (
            "reward_model reward_model_path"
        ),
        "The same command resumes a stopped run; to resume from elsewhere, use `dualtune train --resume PATH`": (
            "auto_resume resume resume_from resume_from_checkpoint"
        ),
        "Trackers are named in 'run.track': trackio, wandb, mlflow, tensorboard; projects by their own variables": (
            "comet mlflow report_to run_name tensorboard tracker trackers use_wandb wandb wandb_entity wandb_project"
        ),
        "It is not part of a config: `dualtune push hf://…` publishes an adapter": (
            "hub_model_id hub_strategy hub_token push_to_hub"
        ),
        "Code from a model's repository is never run, so there is nothing to trust": (
            "trust_remote_code tokenizer_trust_remote_code"
        ),
        "Whole modules beside the adapter are named in 'adapter.train_modules'": (
            "modules_to_save unfreeze trainable_modules"
        ),
        "Rows of single tokens are trained by 'adapter.train_rows', new tokens are named in 'data.new_tokens'": (
            "trainable_token_indices add_tokens resize_token_embeddings add_new_tokens"
        ),
        "New control tokens are named in 'data.new_special_tokens'": "additional_special_tokens add_special_tokens",
        "B has no bias; those of the base are trained by 'adapter.bias'": "lora_bias",
        "NEFTune is not supported yet": "neftune neftune_noise_alpha noise_alpha",
        "The model's own tokenizer is always used": "tokenizer tokenizer_name tokenizer_name_or_path tokenizer_type",
        "Batches are prepared while the previous step runs; there is nothing to set": (
            "dataloader_num_workers dataset_num_proc num_proc num_workers preprocessing_num_workers"
        ),
        "The fastest code that keeps the numbers is chosen automatically; see 'model.kernels'": (
            "attn_implementation flash_attention sdp_attention sdpa_attention use_flash_attention xformers_attention"
        ),
        "The number of processes is chosen by `dualtune launch`, and 'memory.sharding' splits the base among them": (
            "ddp deepspeed deepspeed_config distributed fsdp fsdp_config num_gpus num_processes "
            "tensor_parallel world_size"
        ),
        "The device is chosen by the option --platform": "device device_map devices gpu use_cpu",
        "Intervals are set in steps; see 'run.eval_every' and 'run.save_every'": (
            "eval_strategy evaluation_strategy logging_strategy save_strategy"
        ),
    }.items()
    for name in names.split()
}

NO_SUCH_VALUE: dict[str, str] = {
    **dict.fromkeys(("dpo", "kto", "orpo", "simpo"), "Preference training is chosen by 'train.objective'"),
    **{name: reason[0].upper() + reason[1:] for name, reason in OTHERS.items()},
    **dict.fromkeys(("ppo", "rl", "rlhf"), "Training on the model's own samples is train.objective: grpo"),
}

# ----------------------------------------------------------------------------------------------------------------------
# Names of our keys in other trainers (PEFT, TRL, transformers, mlx-lm, axolotl, LLaMA-Factory, unsloth). They do not
# always mean the same quantity, so they are suggestions and not aliases.
FOREIGN_KEYS = {
    name: key
    for key, names in {
        "model": "base",
        "adapter": "lora lora_config lora_parameters peft",
        "train": "training trainer",
        "model.name": "base_model hf_path model_id model_name model_name_or_path model_path pretrained_model",
        "model.dtype": "bf16 compute_dtype fp16 mixed_precision precision torch_dtype",
        "model.quantization": "bits load_in_4bit load_in_8bit quantize quantization_bit",
        "model.kernels": "fused_kernels liger use_liger_kernel",
        "adapter.rank": "lora_r lora_rank r",
        "adapter.alpha": "lora_alpha scale",
        "adapter.rank_pattern": "lora_rank_pattern ranks",
        "adapter.alpha_pattern": "alphas lora_alpha_pattern",
        "adapter.method": "dora fine_tune_type peft_type use_dora",
        "adapter.scaling": "rslora use_rslora",
        "adapter.dropout": "lora_dropout",
        "adapter.bias": "biases train_bias",
        "adapter.init": "init_lora_weights peft_init_lora_weights",
        "adapter.targets": "lora_target lora_target_modules target_modules keys",
        "adapter.layers": "layers_to_transform lora_layers num_layers peft_layers_to_transform",
        "adapter.experts": "lora_target_parameters target_parameters",
        "adapter.init_from": "adapter_name_or_path resume_adapter_file",
        "data.train": "data_path dataset dataset_name dataset_path datasets train_data train_file train_path",
        "data.eval": "eval_file test_size train_split val_data val_set_size val_size valid validation_split",
        "data.format": "dataset_type type",
        "data.columns": "column_mapping field_mapping",
        "data.template": "chat_template prompt_template",
        "data.template_variables": "chat_template_kwargs chat_template_args chat_template_config enable_thinking",
        "data.max_length": "cutoff_len max_seq_len max_seq_length model_max_length seq_len seq_length sequence_len",
        "data.packing": "pack sample_packing",
        "data.loss_on": "assistant_only_loss completion_only_loss mask_prompt train_on_inputs train_on_prompt",
        "train.epochs": "n_epochs num_epochs num_train_epochs",
        "train.steps": "iters max_iters max_steps num_iters num_steps train_steps",
        "train.documents_per_step": (
            "batch_size effective_batch_size global_batch_size grad_accumulation_steps gradient_accumulation_steps "
            "per_device_train_batch_size train_batch_size"
        ),
        "train.micro_batch_tokens": "micro_batch_size",
        "train.learning_rate": "lr peak_lr",
        "train.schedule": "lr_schedule lr_scheduler lr_scheduler_type scheduler",
        "train.warmup": "warmup_ratio warmup_steps",
        "train.optimizer": "optim optimizers",
        "train.lora_plus_ratio": "lora_plus loraplus_lr_ratio loraplus_ratio",
        "train.label_smoothing": "label_smoothing_factor",
        "train.router_aux_loss_coef": "aux_loss_coef moe_aux_loss_coef",
        "train.weight_decay": "wd",
        "train.max_grad_norm": "clip_grad_norm grad_clip gradient_clipping max_norm",
        "train.objective": "dpo kto orpo pref_loss rl rl_type simpo train_mode",
        "preference": "dpo_config pref",
        "preference.beta": "dpo_beta pref_beta rl_beta",
        "preference.loss": "loss_type",
        "preference.gamma": "simpo_gamma",
        "preference.label_smoothing": "dpo_label_smoothing",
        "preference.sft_weight": "cpo_alpha pref_ftx rpo_alpha",
        "distill.temperature": "kd_temperature",
        "preference.desirable_weight": "kto_chosen_weight kto_desirable_weight",
        "preference.undesirable_weight": "kto_rejected_weight kto_undesirable_weight",
        "preference.reference": "ref_model reference_model reference_model_path",
        "memory.checkpointing": "activation_checkpointing grad_checkpoint gradient_checkpointing",
        "memory.offload": "cpu_offload",
        "memory.limit": "max_memory memory_limit",
        "run.dir": "adapter_path output output_dir run_dir save_dir",
        "run.seed": "random_seed random_state",
        "run.log_every": "log_steps logging_steps steps_per_report",
        "run.eval_every": "eval_steps evals_per_epoch steps_per_eval",
        "run.save_every": "checkpoint_every save_steps saves_per_epoch",
        "run.keep": "save_total_limit",
    }.items()
    for name in names.split()
}

# The same for keys of a data source.
FOREIGN_SOURCE_KEYS = {
    name: key
    for key, names in {
        "path": "data_files dataset dataset_name file file_name hf_path train",
        "weight": "mixture probability proportion ratio repeat sampling_weight",
        "format": "ds_type formatting type",
        "columns": "column_mapping field_mapping",
        "subset": "config config_name dataset_config name",
        "split": "train_split",
    }.items()
    for name in names.split()
}

_VALUE_SYNONYMS = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "4bit": "nf4",
    "int4": "nf4",
    "8bit": "int8",
    "null": "none",
    "false": "none",
    "off": "none",
    "true": "full",
    "completion": "assistant",
    "chatml": "messages",
    "constant_with_warmup": "constant",
}


def unknown_key(path: KeyPath) -> str:
    """Return the message for an unknown key."""
    *section, key = path
    in_source = len(section) > 1  # only data sources have keys this deep
    advice = _advice_in_source(str(key)) if in_source else _advice(dotted(path[:-1]), str(key))
    return f"unknown key. {advice}"


def _advice_in_source(key: str) -> str:
    siblings = list(SourceConfig.model_fields)
    name = key.lower().replace("-", "_")
    if name in sections()["data"].model_fields and name not in FOREIGN_SOURCE_KEYS:
        return f"Set it for all sources: 'data.{name}'"
    meant = FOREIGN_SOURCE_KEYS.get(name) or closest(name, siblings)
    return did_you_mean(meant) if meant else f"Allowed here: {', '.join(siblings)}"


def _advice(section: str, key: str) -> str:
    keys = {name: list(model.model_fields) for name, model in sections().items()}
    siblings = keys.get(section, list(keys))
    everywhere = {f"{name}.{inner}": inner for name, names in keys.items() for inner in names}
    name = key.lower().replace("-", "_")

    if section and name in keys:
        return f"'{name}' is a section; check the indentation"
    if key in everywhere:
        return f"Write '{everywhere[key]}' below the section '{key.partition('.')[0]}'"
    homes = [full for full, inner in everywhere.items() if inner == name and not full.startswith(f"{section}.")]
    if homes and name not in FOREIGN_KEYS:  # who writes train.warmup_steps does not mean hybrid.warmup_steps
        return f"It belongs to {'another' if section else 'a'} section: {either(homes)}"
    if answer := NO_SUCH_KEY.get(name):
        return answer
    if (foreign := FOREIGN_KEYS.get(name)) and not (section and foreign in keys):  # sections do not nest
        return did_you_mean(foreign.removeprefix(f"{section}."))
    if close := closest(name, siblings):
        return did_you_mean(close)
    # In other sections, a suggestion must be more similar.
    if close := closest(name, everywhere.values(), cutoff=0.8):
        return did_you_mean(*(full for full, inner in everywhere.items() if inner == close))
    return f"Allowed here: {', '.join(siblings)}"


def unknown_value(text: str, allowed: list[str]) -> str | None:
    """Return advice on an invalid value if it is similar to an allowed one or known from other trainers."""
    if answer := NO_SUCH_VALUE.get(text.lower()):
        return answer
    synonym = _VALUE_SYNONYMS.get(text.lower())
    meant = synonym if synonym in allowed else closest(text.lower(), allowed)
    return did_you_mean(meant) if meant else None

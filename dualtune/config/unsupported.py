"""Keys and values of other trainers without a counterpart here, with the advice to show instead of a suggestion."""

from __future__ import annotations

NO_SUCH_KEY = {
    name: answer
    for answer, names in {
        "Other constants are fixed; set 'train.optimizer', 'train.learning_rate' and 'train.weight_decay'": (
            "adam_beta1 adam_beta2 adam_epsilon adamw beta1 beta2 betas eps momentum optim_args optimizer_config"
        ),
        "Preference training (DPO and similar) is not supported yet": (
            "beta dpo dpo_beta kto orpo ref_model reward_model rl simpo"
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
        "Each LoRA matrix has the same learning rate; LoRA+ is not supported yet": (
            "lora_plus loraplus_lr_ratio loraplus_ratio"
        ),
        "LoRA matrices are trained, or all parameters ('adapter.method: full'); single modules are not supported yet": (
            "bias lora_bias modules_to_save unfreeze trainable_modules"
        ),
        "To adapt only some layers, list their modules in 'adapter.targets', such as layers.3.self_attn.q_proj": (
            "layers_to_transform lora_layers num_layers"
        ),
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

NO_SUCH_VALUE: dict[str, str] = dict.fromkeys(
    ("dpo", "kto", "orpo", "rl", "rlhf"),
    "Preference training (DPO and similar) is not supported yet: pairs are read and checked, but not trained on",
)

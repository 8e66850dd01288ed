"""Trainers configured in Python or another program's YAML: tables of their names and ours, for reading only."""

from __future__ import annotations

# (their names, our keys, what differs)
TRL = (
    ("model_name_or_path", "model.name", ""),
    ("dtype, bf16, fp16", "model.dtype", ""),
    ("load_in_4bit (BitsAndBytesConfig)", "model.quantization", "`nf4`, with double quantization"),
    ("LoraConfig.r, lora_alpha, lora_dropout", "adapter.rank, adapter.alpha, adapter.dropout", ""),
    ("LoraConfig.target_modules", "adapter.targets", "`all-linear`, or a list of names"),
    ("dataset_name, train_dataset, eval_dataset", "data.train, data.eval", "a name, a file or a directory"),
    ("dataset_text_field", "data.columns", "`{text: …}`"),
    ("assistant_only_loss, completion_only_loss", "data.loss_on", "`assistant`; templates need no `generation` tag"),
    ("max_length", "data.max_length", ""),
    ("packing", "data.packing", "on by default; documents do not see each other"),
    ("per_device_train_batch_size, gradient_accumulation_steps", "train.documents_per_step",
     "their product, times the number of GPUs; or train.tokens_per_step"),
    ("num_train_epochs, max_steps", "train.epochs, train.steps", ""),
    ("learning_rate, lr_scheduler_type", "train.learning_rate, train.schedule", "constant, linear and cosine"),
    ("warmup_ratio, warmup_steps", "train.warmup", "below 1 a fraction, from 1 on a number of steps"),
    ("weight_decay, max_grad_norm", "train.weight_decay, train.max_grad_norm", "TRL clips at 1.0 by default"),
    ("gradient_checkpointing", "memory.checkpointing", "`full`; by default as little as fits"),
    ("output_dir, seed", "run.dir, run.seed", ""),
    ("logging_steps, eval_steps, save_steps, save_total_limit",
     "run.log_every, run.eval_every, run.save_every, run.keep", ""),
    ("resume_from_checkpoint", "", "the same command resumes"),
    ("report_to", "run.track", "trackio, wandb, mlflow, tensorboard; W&B is offline by default"),
    ("DPOTrainer, GRPOTrainer and others", "", "not supported yet"),
)  # fmt: skip

UNSLOTH = (
    ("FastLanguageModel.from_pretrained(model_name)", "model.name", ""),
    ("max_seq_length", "data.max_length", ""),
    ("load_in_4bit", "model.quantization", "`nf4`; it is off by default here"),
    ("get_peft_model(r, lora_alpha, lora_dropout)", "adapter.rank, adapter.alpha, adapter.dropout", ""),
    ("target_modules", "adapter.targets", ""),
    ("use_rslora", "adapter.scaling", "`rank_stabilized`"),
    ("use_gradient_checkpointing", "memory.checkpointing", "`full`; by default as little as fits"),
    ("random_state", "run.seed", ""),
    ("get_chat_template", "data.template", "the tokenizer's own, a name, or a Jinja file"),
    ("train_on_responses_only", "data.loss_on", "`assistant`, by default"),
    ("the arguments of SFTConfig", "", "see TRL"),
    ("save_pretrained_merged", "", "`dualtune adapter merge`"),
)

LLAMA_FACTORY = (
    ("model_name_or_path", "model.name", ""),
    ("stage, finetuning_type", "", "`sft` and `lora`"),
    ("quantization_bit: 4", "model.quantization", "`nf4`"),
    ("lora_rank, lora_alpha, lora_dropout", "adapter.rank, adapter.alpha, adapter.dropout",
     "lora_alpha is twice the rank by default"),
    ("lora_target", "adapter.targets", "`all` is `all-linear`"),
    ("dataset, dataset_dir, eval_dataset, val_size", "data.train, data.eval", "paths, not names in dataset_info.json"),
    ("template", "data.template", "the tokenizer's own, a name, or a Jinja file"),
    ("cutoff_len", "data.max_length", ""),
    ("packing, neat_packing", "data.packing", "documents do not see each other, as with neat_packing"),
    ("train_on_prompt, mask_history", "data.loss_on", "`all`, `last`"),
    ("per_device_train_batch_size, gradient_accumulation_steps", "train.documents_per_step", "their product"),
    ("num_train_epochs, max_steps, learning_rate, lr_scheduler_type, warmup_ratio",
     "train.epochs, train.steps, train.learning_rate, train.schedule, train.warmup", ""),
    ("output_dir, seed", "run.dir, run.seed", ""),
)  # fmt: skip

OTHERS = {"TRL": TRL, "Unsloth": UNSLOTH, "LLaMA-Factory": LLAMA_FACTORY}

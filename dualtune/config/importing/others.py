"""What is written in Python: tables of names of other trainers and ours, for reading only."""

from __future__ import annotations

# (their names, our keys, what differs)
TRL = (
    ("SFTConfig, ModelConfig", "", "the names of the table above"),
    ("LoraConfig.r, lora_alpha, lora_dropout", "adapter.rank, adapter.alpha, adapter.dropout", ""),
    ("LoraConfig.target_modules", "adapter.targets", "`all-linear`, or a list of names"),
    ("train_dataset, eval_dataset", "data.train, data.eval", "a name, a file or a directory"),
    ("merge_and_unload", "", "`dualtune export RUN --to hf`; also `gguf`, `ollama`, `lmstudio` and `mlx`"),
    ("push_to_hub", "", "`dualtune push hf://owner/name RUN --adapter`: the adapter and a model card"),
    ("transformers chat, transformers serve", "", "`dualtune chat`, `dualtune serve`"),
    ("compute_metrics", "", "`dualtune eval`, after the run"),
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
    ("get_chat_template", "data.template", "the tokenizer's own, a name such as `qwen-2.5`, or a Jinja file"),
    ("train_on_responses_only", "data.loss_on", "`assistant`, by default"),
    ("the arguments of SFTConfig", "", "see TRL"),
    ("save_pretrained_merged", "", "`dualtune export RUN --to hf`, or `dualtune adapter merge`"),
    ("save_pretrained_gguf", "", "`dualtune export RUN --to gguf --quantize q4_k_m`; also `ollama` and `lmstudio`"),
    ("push_to_hub, push_to_hub_merged, push_to_hub_gguf", "",
     "`dualtune push hf://owner/name RUN --adapter` publishes the adapter; a merged model or a GGUF: `hf upload`"),
    ("report_to", "run.track", "trackio, wandb, mlflow, tensorboard; W&B is offline by default"),
    ("for_inference, fast_generate", "", "`dualtune chat`, `dualtune generate`, `dualtune serve`"),
)  # fmt: skip

OTHERS = {"TRL-in-Python": TRL, "Unsloth-in-Python": UNSLOTH}

"""`dualtune config import`: configs of other trainers, translated, with the name of whatever cannot be."""

import json

import pytest
import yaml

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.config.importing.translate import import_config, to_text

AXOLOTL = """
base_model: some/model
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
datasets: [{path: data/rows.jsonl, type: alpaca}]
learning_rate: 2e-4
"""
MLX_LM = """
model: some/model
data: data/folder
num_layers: -1
"""


@pytest.fixture
def translate(tmp_path):
    """Translate a text with more lines, or other values for keys; returns the config, the report and the new text."""

    def run(base, more=None, *, layers=None, trainer=None):
        table = yaml.safe_load(base) | (more or {})
        path = tmp_path / "theirs.yaml"
        path.write_text(json.dumps(table), encoding="utf-8")
        imported = import_config(path, trainer, lambda _: layers)
        text = to_text(imported)
        return parse_config(text), imported, text

    return run


def lost(imported):
    return {left.key: left for left in imported.lost}


# --- axolotl ---------------------------------------------------------------------------------------------------------


def test_a_plain_axolotl_config(translate):
    config, imported, _ = translate(AXOLOTL)
    assert imported.trainer == "axolotl" and not imported.lost
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.targets) == (8, 16, "all-linear")
    assert config.train.learning_rate == 2e-4  # which PyYAML reads as a text, and axolotl as a number
    # axolotl's defaults, which are not ours
    assert (config.adapter.dropout, config.train.epochs, config.train.max_grad_norm) == (0, 1, 1)
    assert (config.data.max_length, config.data.eval, config.data.packing) == (512, 0, False)
    assert (config.train.documents_per_step, config.train.weight_decay, config.train.warmup) == (1, 0, 0.03)


@pytest.mark.parametrize(
    ("more", "ours"),
    [
        ({"adapter": "qlora"}, {"model.quantization": "nf4"}),
        ({"load_in_4bit": True}, {"model.quantization": "nf4"}),
        ({"bf16": True}, {"model.dtype": "bfloat16"}),
        ({"bf16": "auto"}, {"model.dtype": "auto"}),
        ({"bf16": False, "fp16": True}, {"model.dtype": "float16"}),
        ({"bf16": False}, {"model.dtype": "float32"}),
        ({"peft_use_rslora": True, "lora_r": 16}, {"adapter.scaling": "rank_stabilized", "adapter.alpha": 16}),
        ({"peft_init_lora_weights": "pissa_niter_4"}, {"adapter.init": "pissa"}),
        ({"peft_init_lora_weights": "gaussian"}, {"adapter.init": "gaussian"}),
        ({"lora_rank_pattern": {"q_proj": 4}, "lora_alpha_pattern": {"q_proj": 8}},
         {"adapter.rank_pattern": {"q_proj": 4}, "adapter.alpha_pattern": {"q_proj": 8}}),
        ({"lora_modules_to_save": ["embed_tokens", "lm_head"], "tokens": ["<tool>"]},
         {"adapter.train_modules": ["embed_tokens", "lm_head"], "data.new_tokens": ["<tool>"]}),
        ({"peft_trainable_token_indices": [5, 7]}, {"adapter.train_rows": [5, 7]}),
        ({"peft_trainable_token_indices": {"embed_tokens": [5], "lm_head": [5]}}, {"adapter.train_rows": [5]}),
        ({"special_tokens": {"additional_special_tokens": ["<|call|>"]}, "learning_rate": 0.001,
          "embedding_lr_scale": 0.5},
         {"data.new_special_tokens": ["<|call|>"], "train.embedding_learning_rate": 0.0005}),
        ({"lora_modules_to_save": ["lm_head"], "embedding_lr": 1e-5}, {"train.embedding_learning_rate": 1e-5}),
        ({"lora_target_linear": False, "lora_target_modules": ["q_proj", "v_proj"]},
         {"adapter.targets": ["q_proj", "v_proj"]}),
        ({"lora_model_dir": "old/adapter"}, {"adapter.init_from": "old/adapter"}),
        ({"lora_model_dir": "old", "lora_modules_to_save": ["lm_head"], "peft_init_lora_weights": "pissa"},
         {"adapter.init_from": "old", "adapter.train_modules": [], "adapter.init": "kaiming"}),
        ({"sample_packing": True, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "sequence_len": 1024},
         {"train.tokens_per_step": 8192, "data.packing": True, "data.max_length": 1024}),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 4}, {"train.documents_per_step": 8}),
        ({"batch_size": 32, "micro_batch_size": 2}, {"train.documents_per_step": 32}),
        ({"num_epochs": 4}, {"train.epochs": 4}),
        ({"max_steps": 50}, {"train.steps": 50}),
        ({"lr_scheduler": "linear"}, {"train.schedule": "linear"}),
        ({"lr_scheduler": "constant", "warmup_steps": 9}, {"train.schedule": "constant", "train.warmup": 0}),
        ({"lr_scheduler": "constant_with_warmup", "warmup_steps": 9}, {"train.warmup": 9}),
        ({"warmup_steps": 10}, {"train.warmup": 10}),
        ({"warmup_steps": 0}, {"train.warmup": 0}),
        ({"warmup_ratio": 0.1}, {"train.warmup": 0.1}),
        ({"weight_decay": 0.1, "max_grad_norm": 0}, {"train.weight_decay": 0.1, "train.max_grad_norm": None}),
        ({"dataset_exact_deduplication": True}, {"data.dedup": "exact"}),
        ({"use_wandb": True, "use_tensorboard": True, "use_mlflow": False}, {"run.track": ["wandb", "tensorboard"]}),
        ({"use_trackio": False, "wandb_project": ""}, {"run.track": []}),
        ({"val_set_size": 0.05}, {"data.eval": 0.05}),
        ({"test_datasets": [{"path": "e.jsonl", "type": "alpaca"}]},
         {"data.eval": [{"path": "e.jsonl", "format": "alpaca"}]}),
        ({"datasets": [{"path": p, "type": "alpaca"} for p in ("a", "b", "a")]},
         {"data.train": [{"path": "a", "format": "alpaca", "weight": 2.0}, {"path": "b", "format": "alpaca"}]}),
        ({"train_on_inputs": True}, {"data.loss_on": "all"}),
        ({"chat_template": "qwen_25", "datasets": [{"path": "a", "type": "chat_template"}]},
         {"data.template": "qwen-2.5"}),
        ({"chat_template": "llama3", "datasets": [{"path": "a", "type": "alpaca"}]}, {"data.template": "none"}),
        ({"chat_template_jinja": "my.jinja", "datasets": [{"path": "a", "type": "chat_template"}]},
         {"data.template": "my.jinja"}),
        ({"gradient_checkpointing": "offload"},
         {"memory.checkpointing": "full", "memory.offload": "activations"}),
        ({"peft_init_lora_weights": True}, {"adapter.init": "kaiming"}),
        ({"peft_layers_to_transform": [0, 3]}, {"adapter.layers": "0,3"}),
        ({"peft_layers_to_transform": 7}, {"adapter.layers": "7"}),
        ({"lora_target_linear": True, "lora_target_parameters": ["mlp.experts.gate_up_proj"]},
         {"adapter.targets": "all-linear", "adapter.experts": True}),
        ({"lora_target_linear": False, "lora_target_modules": ["q_proj"],
          "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
         {"adapter.targets": ["q_proj", "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"]}),
        ({"lora_target_linear": True, "lora_target_parameters": ["mlp.gate.weight", "mlp.experts.down_proj"]},
         {"adapter.targets": ["all-linear", "mlp.gate"], "adapter.experts": True}),
        ({"loraplus_lr_ratio": 16, "loraplus_lr_embedding": 1e-6}, {"train.lora_plus_ratio": 16}),
        ({"output_dir": "out", "seed": 7}, {"run.dir": "out", "run.seed": 7}),
        ({"logging_steps": 5, "eval_steps": 20, "save_steps": 30, "save_total_limit": 2},
         {"run.log_every": 5, "run.eval_every": 20, "run.save_every": 30, "run.keep": 2}),
        ({"save_strategy": "no", "eval_strategy": "no"}, {"run.save_every": None, "run.eval_every": None}),
        ({"early_stopping_patience": 3, "load_best_model_at_end": True, "val_set_size": 0.1},
         {"guards.early_stopping": 3, "guards.restore_best": True}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_axolotl_s_values_become_ours(translate, more, ours):
    config, imported, _ = translate(AXOLOTL, more)
    dumped = json.loads(config.model_dump_json())
    assert {key: dumped[key.split(".")[0]][key.split(".")[1]] for key in ours} == ours
    assert not imported.lost


@pytest.mark.parametrize(
    ("entry", "ours", "template"),
    [
        ({"path": "a", "type": "alpaca"}, {"path": "a", "format": "alpaca"}, "none"),
        ({"path": "a", "type": "completion", "field": "body"},
         {"path": "a", "format": "text", "columns": {"text": "body"}}, "auto"),
        ({"path": "a", "type": "chat_template", "field_messages": "chat"},
         {"path": "a", "format": "messages", "columns": {"messages": "chat"}}, "auto"),
        ({"path": "a", "type": "chat_template", "field_messages": "conversations",
          "message_property_mappings": {"role": "from", "content": "value"}},
         {"path": "a", "format": "sharegpt"}, "auto"),
        ({"path": "a", "type": "chat_template", "roles_to_train": ["assistant"], "train_on_eos": "turn"},
         {"path": "a", "format": "messages"}, "auto"),
        ({"path": "a", "type": "chat_template", "roles": {"user": ["user", "ask"], "assistant": ["bot"]}},
         {"path": "a", "format": "messages", "roles": {"ask": "user", "bot": "assistant"}}, "auto"),
        ({"path": "o/n", "name": "main", "split": "train[:1%]", "type": "chat_template"},
         {"path": "o/n", "subset": "main", "split": "train[:1%]", "format": "messages"}, "auto"),
        ({"path": "json", "ds_type": "json", "data_files": "b.jsonl", "type": "alpaca"},
         {"path": "b.jsonl", "format": "alpaca"}, "none"),
        ({"path": "a", "type": {"field_instruction": "q", "field_output": "r"}},
         {"path": "a", "format": "alpaca", "columns": {"instruction": "q", "output": "r"}}, "none"),
    ],
)  # fmt: skip
def test_a_dataset_of_axolotl_becomes_a_source(translate, entry, ours, template):
    config, imported, _ = translate(AXOLOTL, {"datasets": [entry]})
    assert json.loads(config.data.model_dump_json())["train"] == ours
    assert config.data.template == template and not imported.lost


@pytest.mark.parametrize(
    ("more", "named", "reason"),
    [
        ({"load_in_8bit": True}, "load_in_8bit", "int8 rounds the weights alone"),
        ({"optimizer": "ademamix"}, "optimizer", "AdamW"),
        ({"optimizer": "adamw_torch_4bit"}, "optimizer", "float32"),
        ({"optimizer": "paged_adamw_8bit"}, "optimizer", "paged"),
        ({"optimizer": "paged_adamw_32bit"}, "optimizer", "paged"),
        ({"adam_beta2": 0.95}, "adam_beta2", "0.999"),
        ({"lr_scheduler": "rex"}, "lr_scheduler", "cosine"),
        ({"chat_template": "qwen3"}, "chat_template", "Jinja"),
        ({"wandb_project": "p"}, "wandb_project", "WANDB_PROJECT"),
        ({"wandb_watch": "all"}, "wandb_watch", "environment variables"),
        ({"use_comet": True}, "use_comet", "run.track knows"),
        ({"gradient_checkpointing": "offload_disk"}, "gradient_checkpointing", "memory.offload"),
        ({"excess_length_strategy": "raise"}, "excess_length_strategy", "cut"),
        ({"val_set_size": 200}, "val_set_size", "fraction"),
        ({"evals_per_epoch": 4}, "evals_per_epoch", "run.eval_every"),
        ({"eval_steps": 0.1}, "eval_steps", "run.eval_every"),
        ({"special_tokens": {"eos_token": "<e>"}}, "special_tokens.eos_token", "tokenizer"),
        ({"plugins": ["a.b.Plugin"]}, "plugins", "hooks"),
        ({"shuffle_merged_datasets": False}, "shuffle_merged_datasets", "always shuffled"),
        ({"lora_target_linear": False, "lora_target_modules": ".*_proj"}, "lora_target_modules", "pattern"),
        ({"lora_target_linear": None}, "lora_target_modules", "names none"),
        ({"peft_init_lora_weights": "loftq"}, "peft_init_lora_weights", "not supported"),
        ({"datasets": [{"path": "a", "type": "alpaca", "shards": 4}]}, "datasets[0].shards", "split"),
        ({"datasets": [{"path": "a", "type": "alpaca:chat"}]}, "datasets[0].type", "prompts"),
        ({"datasets": [{"path": "a", "type": "oasst"}]}, "datasets[0].type", "columns"),
        ({"datasets": [{"path": "a", "type": "chat_template", "roles_to_train": ["user"]}]},
         "datasets[0].roles_to_train", "loss_on"),
        ({"kd_trainer": True}, "kd_trainer", "dualtune distill record"),
        ({"qat": {"weight_dtype": "int4"}}, "qat", "adapter.merge_for"),
        ({"peft_trainable_token_indices": {"embed_tokens": [5], "lm_head": [6]}}, "peft_trainable_token_indices",
         "one list for both"),
        ({"fix_untrained_tokens": [5]}, "fix_untrained_tokens", "adapter.train_rows"),
        ({"added_tokens_overrides": {5: "<tool>"}}, "added_tokens_overrides", "data.new_tokens"),
        ({"nobody_knows": 3}, "nobody_knows", "unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_what_axolotl_has_alone_is_named(translate, more, named, reason):
    _, imported, text = translate(AXOLOTL, more)
    assert reason in lost(imported)[named].reason
    assert f"#   {named}: " in text


@pytest.mark.parametrize(
    ("more", "ours"),
    [
        ({"rl": "dpo", "lora_dropout": 0.1},
         {"train.objective": "dpo", "preference.loss": "sigmoid", "preference.beta": 0.1, "adapter.dropout": 0,
          "data.loss_on": "assistant"}),
        ({"rl": "dpo", "rl_beta": 0.2, "rpo_alpha": 0.5, "train_on_inputs": True},
         {"preference.beta": 0.2, "preference.sft_weight": 0.5, "data.loss_on": "assistant"}),
        ({"rl": "dpo", "dpo_loss_type": ["robust", "sft"], "dpo_loss_weights": [1, 0.2], "dpo_label_smoothing": 0.1},
         {"preference.loss": "robust", "preference.sft_weight": 0.2, "preference.label_smoothing": 0.1}),
        ({"rl": "ipo", "trl": {"beta": 0.5}},
         {"train.objective": "dpo", "preference.loss": "ipo", "preference.beta": 0.5}),
        ({"rl": "orpo", "orpo_alpha": 0.3}, {"train.objective": "orpo", "preference.beta": 0.3}),
        ({"rl": "simpo", "simpo_gamma": 1.5, "rl_beta": 2, "cpo_alpha": 0},
         {"train.objective": "simpo", "preference.gamma": 1.5, "preference.beta": 2, "preference.sft_weight": 0}),
        ({"rl": "kto", "kto_undesirable_weight": 0.5},
         {"train.objective": "kto", "preference.desirable_weight": 1, "preference.undesirable_weight": 0.5}),
        ({"rl": "dpo", "lora_model_dir": "old", "rl_adapter_ref_model": True}, {"preference.reference": "start"}),
        ({"rl": "dpo", "rl_adapter_ref_model": True}, {"preference.reference": "base"}),
        ({"rl": "orpo", "rl_adapter_ref_model": True}, {"train.objective": "orpo", "preference.reference": "auto"}),
    ],
    ids=lambda value: "-".join(map(str, value)) if "rl" in value else None,
)  # fmt: skip
def test_axolotl_s_preferences_become_ours(translate, more, ours):
    config, imported, _ = translate(AXOLOTL, {"datasets": [{"path": "a", "type": "chatml.intel"}]} | more)
    dumped = json.loads(config.model_dump_json())
    assert {key: dumped[key.split(".")[0]][key.split(".")[1]] for key in ours} == ours
    assert not imported.lost


@pytest.mark.parametrize(
    ("rl", "entry", "ours", "template"),
    [
        ("dpo", {"type": "chatml.intel"}, {"format": "preference"}, "chatml"),
        ("orpo", {"type": "chat_template.default", "field_messages": "turns", "field_rejected": "rejected"},
         {"format": "preference", "columns": {"messages": "turns"}}, "auto"),
        ("dpo", {"type": {"field_prompt": "q", "field_chosen": "good", "prompt_format": None}},
         {"format": "preference", "columns": {"prompt": "q", "chosen": "good"}}, "auto"),
        ("kto", {"type": "llama3.ultra"}, {"format": "unpaired_preference"}, "llama-3"),
        ("kto", {"type": {"field_label": "ok"}}, {"format": "unpaired_preference", "columns": {"label": "ok"}}, "auto"),
    ],
)  # fmt: skip
def test_preference_data_of_axolotl_become_a_source(translate, rl, entry, ours, template):
    config, imported, _ = translate(AXOLOTL, {"rl": rl, "datasets": [{"path": "a"} | entry]})
    (source,) = [json.loads(config.model_dump_json(exclude_unset=True))["data"]["train"]]
    assert source == {"path": "a"} | ours and config.data.template == template
    assert not imported.lost


def test_what_axolotl_s_preferences_have_alone_is_named(translate):
    kinds = [{"path": "a", "type": "chatml.intel"}, {"path": "b", "type": "zephyr.nectar"},
             {"path": "c", "type": {"prompt_format": "Q: {prompt}"}}]  # fmt: skip
    more = {"rl": "dpo", "datasets": kinds, "dpo_use_weighting": True, "dpo_loss_weights": [2.0]}
    assert {"datasets (type)", "datasets[1].type", "datasets[2].type.prompt_format", "dpo_use_weighting",
            "dpo_loss_weights"} == {*lost(translate(AXOLOTL, more)[1])}  # fmt: skip


NO_THOUGHT, HIGH = {"enable_thinking": False}, {"reasoning_effort": "high"}


def entry(variables):
    return {"path": "rows.jsonl", "type": "chat_template", "chat_template_kwargs": variables}


@pytest.mark.parametrize(("more", "variables", "named"), [
    ({"chat_template_kwargs": NO_THOUGHT | HIGH}, NO_THOUGHT | HIGH, set()),
    ({"chat_template_kwargs": NO_THOUGHT, "datasets": [entry(HIGH)]}, NO_THOUGHT | HIGH, set()),
    ({"datasets": [entry(HIGH), entry(HIGH) | {"path": "b.jsonl"}]}, HIGH, set()),
    ({"datasets": [entry(HIGH), entry({"reasoning_effort": "low"}) | {"path": "b.jsonl"}]}, HIGH,
     {"datasets[1].chat_template_kwargs"}),
    ({"chat_template_kwargs": NO_THOUGHT | {"add_generation_prompt": True}}, NO_THOUGHT,
     {"chat_template_kwargs.add_generation_prompt"}),
    ({"chat_template_kwargs": None, "datasets": [entry(None)]}, {}, set()),
])  # fmt: skip
def test_variables_of_the_chat_template_stay(translate, more, variables, named):
    config, imported, _ = translate(AXOLOTL, more)
    assert (config.data.template_variables, {*lost(imported)}) == (variables, named)


@pytest.mark.parametrize("key", ["chat_template_args", "chat_template_config"])
def test_variables_of_mlx_lm_s_chat_template_stay(translate, key):
    for value in (NO_THOUGHT, json.dumps(NO_THOUGHT)):
        config, imported, _ = translate(MLX_LM, {key: value})
        assert config.data.template_variables == NO_THOUGHT and key not in lost(imported)
    with pytest.raises(ConfigError, match=f"{key}: got 'x', must be a mapping"):
        translate(MLX_LM, {key: "x"})


def test_without_an_adapter_axolotl_trains_the_whole_model(translate):
    config, imported, _ = translate(AXOLOTL, {"adapter": None})
    assert config.adapter.method == "full" and not imported.lost
    assert {"lora_r", "lora_alpha", "lora_target_linear"} <= {each.key for each in imported.needless}


def test_schedule_free_adamw_is_a_schedule_here(translate):
    more = {"lr_scheduler": "constant", "warmup_steps": 10}
    config, imported, _ = translate(AXOLOTL, {"optimizer": "schedule_free_adamw", **more})
    assert (config.train.schedule, config.train.optimizer) == ("schedule_free", "adamw")
    assert not imported.lost
    _, imported, _ = translate(AXOLOTL, {"optimizer": "schedule_free_radamw", "lr_scheduler": "cosine"})
    assert "rectification" in str(lost(imported)["optimizer"])
    assert "keeps the rate" in str(lost(imported)["lr_scheduler"])


def test_axolotl_passes_grpo_s_options_on_to_trl(translate):
    options = {"num_generations": 6, "reward_funcs": ["rewards.near"], "max_completion_length": 64, "use_vllm": True}
    config, imported, _ = translate(
        AXOLOTL,
        {"rl": "grpo", "micro_batch_size": 12, "gradient_accumulation_steps": 2,
         "trl": {**options, "top_k": 5, "async_prefetch": True, "reward_num_workers": 4},
         "datasets": [{"path": "openai/gsm8k", "name": "main", "type": "rewards.prompt_transform"}]},
    )  # fmt: skip
    assert config.data.sources()[0].format == "auto"
    assert not {"micro_batch_size", "gradient_accumulation_steps"} & {row.key for row in imported.needless}
    ours = config.rollouts
    assert config.train.documents_per_step == 4
    assert (config.train.objective, ours.samples, ours.max_tokens) == ("dapo", 6, 64)
    assert ours.rewards == ("rewards.py:near",) and config.adapter.dropout == 0
    assert {"trl.top_k", "trl.async_prefetch", "datasets[0].type"} <= lost(imported).keys()
    assert not {"trl.use_vllm", "trl.reward_num_workers"} & lost(imported).keys()
    assert "in that step" in str(lost(imported)["trl.async_prefetch"])
    config, _, _ = translate(AXOLOTL, {"adapter": None, "rl": "grpo", "trl": options})
    assert config.adapter.method == "full"


def test_a_file_of_axolotl_is_the_split_train_and_a_part_of_it_is_told(translate):
    rows = {"path": "rows.jsonl", "ds_type": "json", "type": "alpaca"}
    for entry in (rows, rows | {"path": "json", "data_files": ["rows.jsonl"]}):
        config, imported, _ = translate(AXOLOTL, {"datasets": [entry | {"split": "train"}]})
        assert (config.data.sources()[0].path, config.data.sources()[0].split) == ("rows.jsonl", None)
        assert not imported.lost
        _, imported, _ = translate(AXOLOTL, {"datasets": [entry | {"split": "train[:10%]"}]})
        assert lost(imported).keys() == {"datasets[0].split"}


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"])
def test_another_trainer_s_8_bit_adamw_becomes_ours(translate, name):
    config, imported, text = translate(AXOLOTL, {"optimizer": name})
    assert config.train.optimizer == "adamw_8bit"
    assert ("optimizer" in lost(imported)) == name.startswith("paged")
    assert f"optimizer: {name}, which has other 8-bit codes" in text
    assert translate(AXOLOTL, {"optimizer": "paged_adamw_32bit"})[0].train.optimizer == "adamw"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rl": "gdpo"}, "rl: got 'gdpo', cannot be translated"),
        ({"rl": "grpo"}, "trl.reward_funcs: got null, must be the name of a Python function"),
        ({"rl": "dpo", "dpo_loss_type": ["exo_pair"]}, "dpo_loss_type: got a list, allowed are sigmoid"),
        ({"rl": "simpo"}, "simpo_gamma: got null, must be a number"),
        ({"adapter": "llama-adapter"}, "adapter: got 'llama-adapter'"),
        ({"pretraining_dataset": [{"path": "a"}]}, "pretraining_dataset: got a list, cannot be translated"),
        ({"lora_r": "many"}, "lora_r: got 'many', must be a number"),
        ({"lora_r": None}, "lora_r: got null, must be a number"),
        ({"micro_batch_size": 1.5}, "micro_batch_size: got 1.5, must be an integer >= 1"),
        ({"datasets": None}, "datasets: got null, must be a list"),
        ({"learning_rate": "1e999"}, "learning_rate: got '1e999', must be a number"),
        ({"lora_dropout": 2}, "adapter.dropout: got 2.0, must be >= 0 and < 1 (from lora_dropout: 2)"),
        ({"warmup_steps": 9, "max_steps": 9}, "train.warmup: got 9 steps, must be below"),
        ({"early_stopping_patience": 2}, "guards.early_stopping: got 2, needs evaluation data"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_gives_no_config_is_refused(translate, more, message):
    with pytest.raises(ConfigError) as caught:
        translate(AXOLOTL, more)
    assert message in str(caught.value)


# --- mlx-lm ----------------------------------------------------------------------------------------------------------


def test_a_plain_mlx_lm_config(translate):
    config, imported, _ = translate(MLX_LM)
    assert imported.trainer == "mlx-lm" and list(lost(imported)) == ["optimizer"]  # Adam without bias correction
    # mlx-lm's defaults: a scale of 20 at rank 8, no clipping, everything learned
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.targets) == (8, 160, "all-linear")
    assert (config.train.steps, config.train.documents_per_step, config.train.max_grad_norm) == (1000, 4, None)
    assert (config.train.schedule, config.train.warmup, config.train.learning_rate) == ("constant", 0, 1e-5)
    assert (config.data.loss_on, config.data.max_length, config.run.seed) == ("all", 2048, 0)


@pytest.mark.parametrize(
    ("more", "layers", "ours"),
    [
        ({"lora_parameters": {"rank": 4, "scale": 2.5, "dropout": 0.1}}, None,
         {"adapter.rank": 4, "adapter.alpha": 10, "adapter.dropout": 0.1}),
        ({"lora_parameters": {"rank": 4, "scale": 2, "dropout": 0, "keys": ["self_attn.q_proj"]}}, None,
         {"adapter.targets": ["self_attn.q_proj"]}),
        ({"lora_parameters": {"rank": 4, "scale": 2, "dropout": 0, "keys": ["self_attn.q_proj"]}, "num_layers": 2}, 5,
         {"adapter.targets": ["self_attn.q_proj"], "adapter.layers": "last 2"}),
        ({"lora_parameters": {"rank": 4, "scale": 2, "dropout": 0, "keys": ["mlp.switch_mlp.up_proj"]}}, None,
         {"adapter.targets": ["mlp.experts.up_proj"]}),
        ({"num_layers": 5}, 5, {"adapter.targets": "all-linear", "adapter.layers": "all"}),
        ({"num_layers": 4}, None, {"adapter.targets": "all-linear", "adapter.layers": "last 4"}),
        ({"num_layers": None}, None, {"adapter.layers": "last 16"}),  # the default
        ({"iters": 100, "grad_accumulation_steps": 4, "batch_size": 2}, None,
         {"train.steps": 25, "train.documents_per_step": 8, "run.save_every": 25, "run.log_every": 2}),
        ({"mask_prompt": True}, None, {"data.loss_on": "last"}),
        ({"max_seq_length": 99}, None, {"data.max_length": 99}),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1e-4, 1000], "warmup": 20}}, None,
         {"train.learning_rate": 1e-4, "train.schedule": "cosine", "train.warmup": 20}),
        ({"lr_schedule": {"name": "linear_schedule", "arguments": [1e-4, 0, 1000]}}, None,
         {"train.schedule": "linear", "train.warmup": 0}),
        ({"optimizer": "adamw"}, None, {"train.weight_decay": 0.01}),
        ({"optimizer": "adamw", "optimizer_config": {"adamw": {"weight_decay": 0.2}}}, None,
         {"train.weight_decay": 0.2}),
        ({"report_to": "WandB"}, None, {"run.track": ["wandb"]}),
        ({"adapter_path": "out", "seed": 3, "resume_adapter_file": "old/adapters.safetensors"}, None,
         {"run.dir": "out", "run.seed": 3, "adapter.init_from": "old"}),
        # The adapter says which layers it has, whatever the default of mlx-lm is.
        ({"num_layers": None, "resume_adapter_file": "old/adapters.safetensors"}, None,
         {"adapter.init_from": "old", "adapter.layers": "all"}),
        ({"hf_dataset": {"path": "o/n", "train_split": "train", "valid_split": "test", "prompt_feature": "q",
                         "completion_feature": "a", "config": {"name": "main"}}}, None,
         {"data.train": [{"path": "o/n", "subset": "main", "split": "train",
                          "columns": {"prompt": "q", "completion": "a"}}],
          "data.eval": [{"path": "o/n", "subset": "main", "split": "test",
                         "columns": {"prompt": "q", "completion": "a"}}]}),
        ({"text_feature": "body"}, None, {"data.columns": {"text": "body"}}),
        ({"grad_checkpoint": True}, None, {"memory.checkpointing": "full"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_mlx_lm_s_values_become_ours(translate, more, layers, ours):
    config, imported, _ = translate(MLX_LM, more, layers=layers)
    dumped = json.loads(config.model_dump_json())
    assert {key: dumped[key.split(".")[0]][key.split(".")[1]] for key in ours} == ours
    assert set(lost(imported)) <= {"optimizer"}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"optimizer": "muon"}, "optimizer"),
        ({"optimizer_config": {"adam": {"betas": [0.9, 0.95]}}}, "optimizer_config.adam.betas"),
        ({"lr_schedule": {"name": "exponential_decay", "arguments": [1e-4, 0.9]}}, "lr_schedule.name"),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1e-4, 500]}}, "lr_schedule.arguments"),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1e-4, 1000, 1e-6]}}, "lr_schedule.arguments"),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1e-4, 1000], "warmup_init": 1e-6}},
         "lr_schedule.warmup_init"),
        ({"test": True}, "test"),
        ({"hf_dataset": {"path": "o/n", "test_split": "test"}}, "hf_dataset.test_split"),
        ({"report_to": "wandb,swanlab"}, "report_to"),
        ({"project_name": "p"}, "project_name"),
        ({"lora_parameters": {"rank": 4, "scale": 2, "dropout": 0, "alpha": 3}}, "lora_parameters.alpha"),
        ({"resume_adapter_file": "w.npz"}, "resume_adapter_file"),
        ({"nobody_knows": 3}, "nobody_knows"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_what_mlx_lm_has_alone_is_named(translate, more, named):
    _, imported, text = translate(MLX_LM, more)
    assert named in lost(imported) and f"#   {named}: " in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type: got 'full', only lora and dora"),
        ({"train": False, "test": True}, "train: got false, without training there is nothing to translate"),
        ({"lora_parameters": {"rank": 8, "alpha": 16}}, "lora_parameters.scale: got 20.0, mlx-lm needs it"),
        ({"iters": 3, "grad_accumulation_steps": 4}, "iters: got 3, must be at least"),
        ({"num_layers": 9}, "num_layers: got 9, the model has 5 layers"),
        ({"lora_parameters": {"rank": 8, "scale": 1, "dropout": 0, "keys": 3}}, "lora_parameters.keys: got 3"),
        ({"lr_schedule": {"name": "cosine_decay"}}, "lr_schedule.arguments: got null, must be a list of numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_mlx_lm_asks_in_vain_is_refused(translate, more, message):
    with pytest.raises(ConfigError) as caught:
        translate(MLX_LM, more, layers=5)
    assert message in str(caught.value)

"""`dualtune config import`: configs of LLaMA-Factory, TRL, Unsloth and axolotl-rs; notebooks and scripts."""

import json

import pytest
import yaml

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.config.importing.translate import TRAINERS, import_config, to_text

BASE = {
    "mlx-lm-lora": {"model": "some/model", "train": True, "train_mode": "dpo", "data": "pairs"},
    "LLaMA-Factory": {"model_name_or_path": "some/model", "stage": "sft", "dataset": "rows", "learning_rate": 1e-4},
    "TRL": {"model_name_or_path": "some/model", "use_peft": True, "dataset_name": "o/n", "assistant_only_loss": True},
    "Unsloth": {"model": "some/model", "data": {"dataset": "o/n"}, "training": {}, "lora": {}},
    "axolotl-rs": {
        "base_model": "some/model", "adapter": "qlora", "lora": {"r": 8}, "quantization": {"bits": 4},
        "dataset": {"path": "rows.jsonl", "type": "alpaca", "max_length": 256, "train_split": 0.9},
    },
}  # fmt: skip


@pytest.fixture
def translate(tmp_path, monkeypatch):
    """Translate a trainer's shortest config with more keys; returns the values as a flat dict, and the report."""
    monkeypatch.chdir(tmp_path)

    def run(trainer, more=None):
        table = {**BASE[trainer]}
        for key, value in (more or {}).items():
            table[key] = {**table[key], **value} if isinstance(value, dict) and key in table else value
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump(table), encoding="utf-8")
        imported = import_config(path)
        assert imported.trainer == trainer  # found by its keys
        dumped = json.loads(parse_config(to_text(imported)).model_dump_json())
        return {f"{section}.{key}": value for section in dumped for key, value in dumped[section].items()}, imported

    return run


def lost(imported):
    return {left.key for left in imported.lost}


@pytest.mark.parametrize(
    ("trainer", "more", "ours"),
    [
        # the defaults of each trainer, which are not ours
        ("LLaMA-Factory", {}, {"adapter.rank": 8, "adapter.alpha": 16, "adapter.dropout": 0, "data.packing": False,
                               "adapter.targets": "all-linear", "train.documents_per_step": 8, "train.warmup": 0,
                               "train.schedule": "linear", "train.max_grad_norm": 1, "data.loss_on": "assistant"}),
        ("TRL", {}, {"adapter.rank": 16, "data.max_length": 1024, "train.learning_rate": 2e-5, "data.eval": 0,
                     "train.documents_per_step": 8, "data.loss_on": "assistant", "model.quantization": "auto"}),
        ("Unsloth", {}, {"model.quantization": "nf4", "adapter.rank": 64, "adapter.alpha": 16, "run.seed": 3407,
                         "train.optimizer": "adamw_8bit", "train.warmup": 5, "train.schedule": "linear",
                         "train.documents_per_step": 8, "data.loss_on": "all"}),
        ("axolotl-rs", {}, {"model.quantization": "nf4", "adapter.rank": 8, "adapter.alpha": 16, "data.eval": 0.1,
                            "data.max_length": 256, "data.format": "alpaca", "data.template": "none",
                            "train.warmup": 0.1, "train.weight_decay": 0.01, "train.max_grad_norm": 0.3}),
        ("mlx-lm-lora", {}, {"train.objective": "dpo", "preference.loss": "sigmoid", "preference.beta": 0.1,
                             "preference.reference": "base", "adapter.rank": 8, "adapter.alpha": 80, "train.steps": 100,
                             "train.documents_per_step": 1, "data.loss_on": "assistant", "train.learning_rate": 1e-5,
                             "adapter.targets": "all-linear", "train.schedule": "constant", "run.seed": 0}),
        ("mlx-lm-lora", {"train_mode": "sft", "mask_prompt": True, "batch_size": 2, "gradient_accumulation_steps": 4},
         {"train.objective": "sft", "data.loss_on": "last", "train.documents_per_step": 8, "train.steps": 25,
          "run.eval_every": 50, "run.save_every": 25}),
        ("mlx-lm-lora", {"train_mode": "cpo", "beta": 0.2, "epochs": 2, "load_in_4bits": True},
         {"train.objective": "cpo", "preference.sft_weight": 0, "preference.beta": 0.2, "train.epochs": 2,
          "model.quantization": "affine4"}),
        ("mlx-lm-lora", {"train_type": "dora"}, {"adapter.method": "dora", "train.objective": "dpo"}),
        ("mlx-lm-lora", {"train_mode": "sft", "train_type": "full"}, {"adapter.method": "full", "data.loss_on": "all"}),
        ("mlx-lm-lora", {"train_mode": "orpo", "wandb": "p"}, {"train.objective": "orpo", "preference.sft_weight": 1,
                                                               "run.track": ["wandb"]}),
        ("mlx-lm-lora", {"dpo_cpo_loss_type": "ipo", "chosen_feature": "good", "hf_dataset": {
            "path": "o/n", "rejected_feature": "bad"}},
         {"preference.loss": "ipo", "data.columns": {"chosen": "good"},
          "data.train": [{"path": "o/n", "split": "train[:80%]", "columns": {"rejected": "bad"}}]}),
        ("LLaMA-Factory", {"neat_packing": True, "cutoff_len": 1024, "per_device_train_batch_size": 2},
         {"train.tokens_per_step": 2048, "data.packing": True, "data.max_length": 1024}),
        ("LLaMA-Factory", {"quantization_bit": 4, "lora_target": "q_proj,v_proj", "lora_alpha": 5, "use_rslora": True},
         {"model.quantization": "nf4", "adapter.targets": ["q_proj", "v_proj"], "adapter.alpha": 5,
          "adapter.scaling": "rank_stabilized"}),
        ("LLaMA-Factory", {"finetuning_type": "full", "mask_history": True, "fp16": True},
         {"adapter.method": "full", "data.loss_on": "last", "model.dtype": "float16"}),
        ("LLaMA-Factory", {"stage": "pt"}, {"data.loss_on": "all", "data.template": "none", "data.packing": True}),
        ("LLaMA-Factory", {"report_to": "none", "warmup_steps": 0, "warmup_ratio": 0.1, "val_size": 0.05},
         {"run.track": [], "train.warmup": 0.1, "data.eval": 0.05}),
        ("LLaMA-Factory", {"enable_thinking": False, "preserve_thinking": "yes"},
         {"data.template_variables": {"enable_thinking": False, "preserve_thinking": True}}),
        ("LLaMA-Factory", {"enable_thinking": True}, {"data.template_variables": {"enable_thinking": True}}),
        ("LLaMA-Factory", {"enable_thinking": None}, {"data.template_variables": {}}),
        ("LLaMA-Factory", {"stage": "dpo", "lora_dropout": 0.1},
         {"train.objective": "dpo", "preference.loss": "sigmoid", "preference.beta": 0.1, "preference.sft_weight": 0,
          "preference.reference": "base", "adapter.dropout": 0, "data.loss_on": "assistant"}),
        ("LLaMA-Factory", {"stage": "dpo", "pref_ftx": 0.5, "dpo_label_smoothing": 0.1, "pref_beta": 0.3},
         {"preference.sft_weight": 0.5, "preference.label_smoothing": 0.1, "preference.beta": 0.3}),
        ("LLaMA-Factory", {"stage": "dpo", "pref_loss": "ipo"}, {"preference.loss": "ipo"}),
        ("LLaMA-Factory", {"stage": "dpo", "pref_loss": "orpo", "pref_ftx": 0.5},
         {"train.objective": "orpo", "preference.sft_weight": 1.5, "preference.beta": 0.1}),
        ("LLaMA-Factory", {"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 1, "pref_beta": 2.5},
         {"train.objective": "simpo", "preference.gamma": 1, "preference.beta": 2.5, "preference.sft_weight": 0}),
        ("LLaMA-Factory", {"stage": "kto", "kto_rejected_weight": 1.2},
         {"train.objective": "kto", "preference.desirable_weight": 1, "preference.undesirable_weight": 1.2}),
        ("LLaMA-Factory", {"stage": "dpo", "adapter_name_or_path": "old", "ref_model": "some/model",
                           "ref_model_adapters": "old"}, {"preference.reference": "start"}),
        ("TRL", {"chat_template_kwargs": {"enable_thinking": False, "level": "high"}},
         {"data.template_variables": {"enable_thinking": False, "level": "high"}}),
        ("TRL", {"chat_template_kwargs": '{"enable_thinking": false}'},
         {"data.template_variables": {"enable_thinking": False}}),
        ("TRL", {"use_peft": False}, {"adapter.method": "full"}),
        ("TRL", {"label_smoothing_factor": 0.1}, {"train.label_smoothing": 0.1}),
        ("TRL", {"router_aux_loss_coef": 0.01}, {"train.router_aux_loss_coef": 0.01}),
        ("LLaMA-Factory", {"moe_aux_loss_coef": 0.01}, {"train.router_aux_loss_coef": 0.01}),
        ("TRL", {"load_in_4bit": True, "use_bnb_nested_quant": True, "lora_target_modules": ["all-linear"]},
         {"model.quantization": "nf4", "adapter.targets": "all-linear"}),
        ("TRL", {"packing": True, "max_length": 512, "gradient_accumulation_steps": 2},
         {"train.tokens_per_step": 8192, "data.packing": True}),
        ("TRL", {"dataset_config": "main", "dataset_train_split": "train[:9%]", "eval_strategy": "steps"},
         {"data.train": {"path": "o/n", "subset": "main", "split": "train[:9%]"},
          "data.eval": {"path": "o/n", "subset": "main", "split": "test"}}),
        ("TRL", {"datasets": [{"path": "a/b"}, {"path": "json", "data_files": "c.jsonl"}], "test_split_size": 0.2},
         {"data.train": [{"path": "a/b"}, {"path": "c.jsonl"}], "data.eval": 0.2}),
        ("TRL", {"dataset_mixture": {"datasets": [{"id": "a/b", "config": "c", "split": "s", "columns": ["chosen"],
                                                   "weight": 0.5}, {"id": "d/e", "weight": 1.0}],
                                     "test_split_size": 0.1, "seed": 0}, "loss_type": "apo_zero"},
         {"data.train": [{"path": "a/b", "subset": "c", "split": "s", "weight": 0.5}, {"path": "d/e"}],
          "data.eval": 0.1, "preference.loss": "apo_zero"}),
        ("TRL", {"report_to": ["wandb", "tensorboard"], "bf16": False},
         {"run.track": ["wandb", "tensorboard"], "model.dtype": "float32"}),
        ("TRL", {"loss_type": "sigmoid"},
         {"train.objective": "dpo", "preference.loss": "sigmoid", "preference.beta": 0.1, "train.learning_rate": 1e-6,
          "adapter.dropout": 0, "data.loss_on": "assistant"}),
        ("TRL", {"beta": 0.2},
         {"train.objective": "dpo", "preference.loss": "sigmoid", "preference.beta": 0.2, "train.learning_rate": 1e-6,
          "data.loss_on": "assistant"}),
        ("TRL", {"max_prompt_length": 9}, {"train.objective": "dpo", "preference.loss": "sigmoid"}),
        ("TRL", {"loss_type": ["ipo"], "beta": 0.3, "lora_dropout": 0.1, "disable_dropout": False},
         {"train.objective": "dpo", "preference.loss": "ipo", "preference.beta": 0.3, "adapter.dropout": 0.1}),
        ("TRL", {"loss_type": ["robust", "sft"], "loss_weights": [2.0, 1.0], "label_smoothing": 0.1},
         {"preference.loss": "robust", "preference.sft_weight": 0.5, "preference.label_smoothing": 0.1}),
        ("TRL", {"loss_type": "sigmoid", "label_smoothing": 0.1}, {"preference.label_smoothing": 0}),  # TRL reads none
        ("TRL", {"desirable_weight": 1.5, "learning_rate": 1e-5},
         {"train.objective": "kto", "preference.desirable_weight": 1.5, "preference.undesirable_weight": 1,
          "train.learning_rate": 1e-5}),
        ("TRL", {"cpo_alpha": 0.5, "label_smoothing": 0.1},
         {"train.objective": "cpo", "preference.sft_weight": 0.5, "preference.label_smoothing": 0.1}),
        ("TRL", {"loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.0},
         {"train.objective": "simpo", "preference.gamma": 0.7, "preference.beta": 0.1, "preference.sft_weight": 0}),
        ("TRL", {"loss_type": "orpo", "beta": 0.2}, {"train.objective": "orpo", "preference.beta": 0.2}),
        ("Unsloth", {"training": {"max_steps": 30, "num_epochs": 0, "packing": True, "train_on_completions": True}},
         {"train.steps": 30, "train.tokens_per_step": 16384, "data.loss_on": "assistant"}),
        ("Unsloth", {"training": {"training_type": "full", "warmup_ratio": 0.1, "save_steps": 0}},
         {"adapter.method": "full", "model.quantization": "auto", "train.warmup": 0.1, "run.save_every": None}),
        ("Unsloth", {"data": {"local_dataset": ["a.jsonl", "b.jsonl"], "format_type": "chatml"},
                     "logging": {"enable_tensorboard": True}},
         {"data.train": ["a.jsonl", "b.jsonl"], "data.format": "messages", "run.track": ["tensorboard"]}),
        ("axolotl-rs", {"training": {"epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "max_steps": 7}},
         {"train.steps": 7, "train.documents_per_step": 4, "train.learning_rate": 1e-3}),
        ("axolotl-rs", {"adapter": "lora", "quantization": None}, {"model.quantization": "auto"}),
        ("axolotl-rs", {"lora": {"use_dora": True, "bias": "lora_only"}},
         {"adapter.method": "dora", "adapter.bias": "lora_only"}),
        ("LLaMA-Factory", {"use_dora": True}, {"adapter.method": "dora"}),
        ("LLaMA-Factory", {"optim": "lion_8bit"}, {"train.optimizer": "lion_8bit"}),
        ("LLaMA-Factory", {"use_muon": True, "optim": "adamw_8bit"}, {"train.optimizer": "muon"}),
        ("LLaMA-Factory", {"pissa_init": True, "pissa_convert": True}, {"adapter.init": "pissa"}),
        ("LLaMA-Factory", {"add_tokens": "<tool>", "add_special_tokens": "<a>, <b>", "resize_vocab": True},
         {"data.new_tokens": ["<tool>"], "data.new_special_tokens": ["<a>", "<b>"]}),
        ("TRL", {"use_dora": True}, {"adapter.method": "dora"}),
        ("TRL", {"use_dora": True, "use_peft": False}, {"adapter.method": "full"}),
        ("Unsloth", {"lora": {"use_dora": True}}, {"adapter.method": "dora"}),
    ],
)  # fmt: skip
def test_values_become_ours(translate, trainer, more, ours):
    values, _ = translate(trainer, more)
    assert {key: values[key] for key in ours} == ours


@pytest.mark.parametrize(
    ("trainer", "more", "named"),
    [
        ("mlx-lm-lora", {"lora_parameters": {"keys": ["q"], "rank": 4}, "reference_model_path": "other", "wandb": "p",
                         "qat_enable": True, "qat_bits": 4, "load_in_6bits": True},
         {"lora_parameters.keys", "reference_model_path", "wandb", "qat_enable", "load_in_6bits", "optimizer"}),
        ("LLaMA-Factory", {"template": "qwen3_nothink", "max_samples": 9}, {"template", "max_samples", "dataset_dir"}),
        ("LLaMA-Factory", {"packing": True, "oft_rank": 4}, {"packing", "oft_rank", "dataset_dir"}),
        ("LLaMA-Factory", {"quantization_bit": 8, "optim": "paged_lion_8bit"},
         {"quantization_bit", "optim", "dataset_dir"}),
        ("LLaMA-Factory", {"stage": "kto", "pref_ftx": 0.1, "ref_model": "other/model", "ref_model_adapters": "a"},
         {"pref_ftx", "ref_model", "dataset_dir"}),
        ("LLaMA-Factory", {"stage": "dpo", "pref_bco_weight": 0.1, "ld_alpha": 0.5, "ref_model": "some/model",
                           "ref_model_adapters": "a"},
         {"pref_bco_weight", "ld_alpha", "ref_model_adapters", "dataset_dir"}),
        ("TRL", {"load_in_4bit": True}, {"use_bnb_nested_quant", "lora_target_modules"}),
        ("TRL", {"max_length": None, "packing_strategy": "wrapped", "packing": False},
         {"max_length", "lora_target_modules"}),
        ("TRL", {"dataset_mixture": {"datasets": [{"id": "a/b", "weight": 0.5, "shards": 2}], "test_split_size": 2000}},
         {"dataset_mixture.datasets[0].weight", "dataset_mixture.datasets[0].shards", "dataset_mixture.test_split_size",
          "lora_target_modules"}),
        ("TRL", {"assistant_only_loss": False}, {"completion_only_loss", "lora_target_modules"}),
        # names that are the beginning of others: none is taken for said
        ("TRL", {"r": 3, "lora": 1, "data": 2}, {"r", "lora", "data", "lora_target_modules"}),
        ("TRL", {"loss_type": "hinge", "ld_alpha": 0.5, "max_prompt_length": 9, "f_divergence_type": "reverse_kl"},
         {"ld_alpha", "max_prompt_length", "lora_target_modules"}),
        ("TRL", {"loss_type": "simpo", "label_smoothing": 0.1, "sync_ref_model": True},
         {"label_smoothing", "sync_ref_model", "lora_target_modules"}),
        ("Unsloth", {"lora": {"use_loftq": True, "nobody": 1}}, {"lora.use_loftq", "lora.nobody"}),
        ("axolotl-rs", {"dataset": {"path": None}, "hybrid": {"enabled": True}}, {"dataset.path", "hybrid"}),
        ("axolotl-rs", {"quantization": {"block_size": 128, "double_quant": False}},
         {"quantization.block_size", "quantization.double_quant"}),
        ("axolotl-rs", {"dataset": {"type": ["alpaca"]}}, {"dataset.type"}),
        ("Unsloth", {"data": {"format_type": {"a": 1}, "local_dataset": []}}, {"data.format_type"}),
    ],
)  # fmt: skip
def test_what_is_not_here_is_named(translate, trainer, more, named):
    assert lost(translate(trainer, more)[1]) == named


@pytest.mark.parametrize(
    ("trainer", "more", "key"),
    [
        ("mlx-lm-lora", {"train_mode": "ppo"}, "train_mode: got 'ppo'"),
        ("mlx-lm-lora", {"train_mode": "grpo"}, "reward_functions: got null"),
        (
            "mlx-lm-lora",
            {"dpo_cpo_loss_type": "dpop"},
            "dpo_cpo_loss_type: got 'dpop', of dpo, only sigmoid, hinge, ipo",
        ),
        ("mlx-lm-lora", {"train_mode": "cpo", "dpo_cpo_loss_type": "hinge"}, "of cpo, only sigmoid"),
        ("mlx-lm-lora", {"train_type": "ia3"}, "train_type: got 'ia3'"),
        ("LLaMA-Factory", {"stage": "ppo"}, "stage: got 'ppo'"),
        ("LLaMA-Factory", {"stage": "dpo", "pref_loss": "kto_pair"}, "pref_loss: got 'kto_pair', allowed are sigmoid"),
        ("LLaMA-Factory", {"finetuning_type": "oft"}, "finetuning_type: got 'oft'"),
        ("LLaMA-Factory", {"do_train": False}, "do_train: got false"),
        ("TRL", {"beta": 0.1, "loss_type": "nll"}, "beta: got 0.1, it belongs to dpo"),
        ("TRL", {"dataset_mixture": {"datasets": [{"path": "a"}]}}, "dataset_mixture: got a mapping, must have a list"),
        ("TRL", {"loss_type": "exo_pair"}, "loss_type: got 'exo_pair', it cannot be translated, allowed are nll"),
        ("TRL", {"loss_type": []}, "loss_type: got an empty list, must be the name of a loss"),
        ("TRL", {"loss_type": ["sigmoid", "bco_pair"]}, "loss_type: got a list, allowed are sigmoid"),
        ("TRL", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0, 1]}, "loss_weights: got a list"),
        ("TRL", {"loss_type": "hinge", "cpo_alpha": 1.0}, "loss_type: got 'hinge', of cpo, only sigmoid"),
        ("TRL", {"loss_type": "sigmoid", "beta": 0}, "preference.beta: got 0"),
        ("TRL", {"rloo_k": 4}, "rloo_k: got 4, it belongs to ppo, an older rloo"),
        ("TRL", {"lmbda": 1.0}, "teacher_model_name_or_path: got null, must be a hub id or a directory"),
        ("TRL", {"lmbda": 0.5, "teacher_model_name_or_path": "t"}, "lmbda: got 0.5, with an lmbda of 0.5 GKD"),
        ("TRL", {"seq_kd": True, "teacher_model_name_or_path": "t"}, "seq_kd: got true, the answers of a teacher are"),
        ("TRL", {"reward_funcs": "f", "teacher_model_name_or_path": "t"}, "reward_funcs: got 'f', it belongs to grpo"),
        (
            "TRL",
            {"loss_type": "rloo"},
            "loss_type: got 'rloo', it belongs to grpo or rloo, but the file names no reward",
        ),
        ("TRL", {"reward_funcs": "f", "loss_type": "rloo", "scale_rewards": True}, "it belongs to grpo, but loss_type"),
        (
            "TRL",
            {"reward_funcs": "f", "loss_type": "dapo", "normalize_advantages": True},
            "loss_type: got 'dapo', of rloo",
        ),
        ("TRL", {"reward_funcs": [3]}, "reward_funcs: got a list, must be the name of a Python function"),
        ("TRL", {"reward_funcs": ["a"], "loss_type": "sapo"}, "loss_type: got 'sapo', it cannot be translated"),
        ("Unsloth", {"training": {"training_type": "grpo"}}, "training.training_type: got 'grpo'"),
        ("Unsloth", {"model": None}, "model: got null"),
        ("axolotl-rs", {"adapter": "prefix"}, "adapter: got 'prefix'"),
    ],
)
def test_other_objectives_are_refused_by_name(translate, trainer, more, key):
    with pytest.raises(ConfigError, match=r"theirs\.yaml") as caught:
        translate(trainer, more)
    assert key in str(caught.value)


@pytest.mark.parametrize("trainer", BASE)
def test_every_key_has_a_line(translate, trainer):
    """Each key that a rule knows, set to a value, is a setting's comment or in one of the two lists."""
    names = [name for rule in TRAINERS[trainer].RULES if rule.convert is None for name in rule.names]
    more = {name.replace("*", "x"): 1 for name in names if "." not in name}
    _, imported = translate(trainer, more)
    told = {left.key for left in imported.lost + imported.needless}
    assert set(more) <= told


def test_llama_factory_s_names_are_looked_up(translate, tmp_path):
    (tmp_path / "data").mkdir()
    info = {
        "rows": {"file_name": "rows.json", "columns": {"prompt": "q", "response": "a", "history": "h"}},
        "chat": {"hf_hub_url": "o/n", "split": "train", "formatting": "sharegpt",
                 "columns": {"messages": "messages", "tools": "functions"},
                 "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user"}},
        "pairs": {"file_name": "p.json", "ranking": True, "columns": {"prompt": "q", "query": "i", "chosen": "good"}},
        "talks": {"file_name": "t.json", "ranking": True, "formatting": "sharegpt",
                  "columns": {"messages": "turns", "chosen": "chosen", "rejected": "bad"}},
        "judged": {"file_name": "j.json", "columns": {"prompt": "q", "response": "a", "kto_tag": "is_good"}},
    }  # fmt: skip
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    values, imported = translate("LLaMA-Factory", {"dataset": "rows, chat"})
    assert values["data.train"] == [
        {"path": "data/rows.json", "format": "alpaca", "columns": {"instruction": "q", "output": "a"}},
        {"path": "o/n", "split": "train", "format": "messages", "columns": {"tools": "functions"}},
    ]
    assert lost(imported) == {"dataset (rows).columns.history"}
    for name, reason in (("pairs", "ranks answers"), ("none", "not one of the 5 data sets")):
        with pytest.raises(ConfigError, match=reason):
            translate("LLaMA-Factory", {"dataset": name})
    with pytest.raises(ConfigError, match="does not rank answers"):
        translate("LLaMA-Factory", {"dataset": "rows", "stage": "dpo"})
    assert translate("LLaMA-Factory", {"dataset": "pairs, talks", "stage": "dpo"})[0]["data.train"] == [
        {"path": "data/p.json", "format": "preference", "columns": {"prompt": "q", "input": "i", "chosen": "good"}},
        {"path": "data/t.json", "format": "preference", "columns": {"messages": "turns", "rejected": "bad"}},
    ]
    assert translate("LLaMA-Factory", {"dataset": "judged", "stage": "kto"})[0]["data.train"] == {
        "path": "data/j.json", "format": "unpaired_preference",
        "columns": {"instruction": "q", "output": "a", "label": "is_good"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "page"),
    [
        ("a.ipynb", '{"cells": [{"source": ["from unsloth import FastLanguageModel"]}]}', "coming_from/unsloth.md"),
        ("b.py", "from trl import SFTTrainer", "coming_from/trl.md"),
        ("c.sh", "llamafactory-cli train", "coming_from/llama_factory.md"),
        ("d.py", "print()", "docs/coming_from.md"),
    ],
)
def test_code_is_named_as_such(tmp_path, name, text, page):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        import_config(path)
    assert name in str(caught.value) and page in str(caught.value)


def test_the_command_offers_every_trainer():
    from dualtune.cli.config import import_

    choice = next(parameter.type for parameter in import_.params if parameter.name == "trainer")
    assert list(choice.choices) == list(TRAINERS)


@pytest.mark.parametrize(
    ("more", "ours", "left"),
    [
        ({"max_completion_length": 64, "per_device_train_batch_size": 4, "min_p": 0.1},
         {"train.objective": "on_policy_distill", "distill.divergence": "reverse_kl", "distill.temperature": 1.0,
          "rollouts.max_tokens": 64, "rollouts.samples": 1, "train.documents_per_step": 4, "data.format": "prompt",
          "adapter.dropout": 0.0, "train.learning_rate": 1e-6}, {"min_p"}),
        ({"beta": 0.0, "temperature": 2.0, "teacher_model_revision": "r"},
         {"distill.divergence": "jsd", "distill.beta": 0.0, "distill.temperature": 2.0, "rollouts.temperature": 2.0,
          "rollouts.max_tokens": 512}, {"teacher_model_revision"}),
        ({"lmbda": 1.0},
         {"train.objective": "on_policy_distill", "distill.divergence": "jsd", "distill.beta": 0.5,
          "distill.temperature": 1.0, "rollouts.temperature": 0.9, "rollouts.max_tokens": 128,
          "train.learning_rate": 2e-5}, set()),
        ({"lmbda": 0, "beta": 1.0, "lora_dropout": 0.1},
         {"train.objective": "distill", "distill.divergence": "reverse_kl", "data.loss_on": "last",
          "adapter.dropout": 0.0, "train.documents_per_step": 8}, set()),
    ],
    ids=str,
)  # fmt: skip
def test_distillation_of_trl(translate, more, ours, left):
    """Its stable trainer draws every answer; in GKD's, temperature is that of drawing alone."""
    values, imported = translate("TRL", {"teacher_model_name_or_path": "a/teacher", **more})
    assert ours.items() <= values.items() and values["distill.teacher"] == "a/teacher"
    assert {*lost(imported)} - {"lora_target_modules"} == left


def test_training_on_samples_of_trl_and_of_those_who_follow_it(translate):
    options = {"reward_funcs": ["accuracy_reward", "my.rewards.tidy"], "reward_weights": [1.0, 0.5],
               "num_generations": 4, "epsilon_high": 0.28, "scale_rewards": "batch"}  # fmt: skip
    more = {**options, "per_device_train_batch_size": 16, "beta": 0.04, "num_iterations": 2, "top_k": 50,
            "mask_truncated_completions": True, "use_vllm": True}  # fmt: skip
    values, imported = translate("TRL", more)
    assert {"top_k", "mask_truncated_completions", "use_bias_correction_kl"} <= lost(imported)
    # What asks for what is so here is not lost, nor the correction of a divergence that is none.
    as_here = {"mask_truncated_completions": False, "top_k": 0, "top_entropy_quantile": 1.0, "entropy_coef": 0.0,
               "repetition_penalty": 1.0, "multi_objective_aggregation": "sum_then_normalize"}  # fmt: skip
    for kl in ({"beta": 0.04, "use_bias_correction_kl": False}, {"beta": 0.0, "use_bias_correction_kl": True}, {}):
        assert not {*as_here, "use_bias_correction_kl"} & {*lost(translate("TRL", options | as_here | kl)[1])}
    form = {"vllm_structured_outputs_regex": "[0-9]+", "mask_truncated_completions": True}
    assert {*form} <= {*lost(translate("TRL", options | form)[1])}
    assert {
        "train.objective": "dapo", "train.documents_per_step": 4, "data.format": "prompt", "adapter.dropout": 0.0,
        "rollouts.rewards": ["number", "my/rewards.py:tidy"], "rollouts.weights": [1.0, 0.5], "rollouts.samples": 4,
        "rollouts.max_tokens": 256, "rollouts.clip_low": 0.2, "rollouts.clip_high": 0.28, "rollouts.kl": 0.04,
        "rollouts.updates": 2, "rollouts.advantage_scale": "step", "train.learning_rate": 1e-6,
    }.items() <= values.items()  # fmt: skip
    values, _ = translate("TRL", {"reward_funcs": "f", "loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1})
    assert (values["train.objective"], values["rollouts.clip_high"]) == ("cispo", 4.0)
    assert values["rollouts.clip_low"] == "auto"
    values, imported = translate("TRL", {"reward_funcs": "f", "use_peft": False, "num_processes": 4})
    assert (values["adapter.method"], values["train.objective"]) == ("full", "dapo")
    assert "dualtune launch" in next(row.reason for row in imported.lost if row.key == "num_processes")
    rloo = {"train.objective": "rloo", "rollouts.samples": 2, "rollouts.max_tokens": 512, "rollouts.kl": 0.05,
            "rollouts.clip_low": 0.2, "rollouts.clip_high": 0.2, "train.documents_per_step": 8}  # fmt: skip
    for own in ({"loss_type": "rloo"}, {"reward_clip_range": [0, 1]}, {"normalize_advantages": True}):
        more = {"reward_funcs": "f", "per_device_train_batch_size": 16, "activation_checkpointing": True, **own}
        values, imported = translate("TRL", more)
        assert rloo.items() <= values.items() and values["rollouts.advantage_scale"] == "auto"
        assert values["memory.checkpointing"] == "full"
        assert lost(imported) & own.keys() == own.keys() - {"loss_type"}
    grpo = {"train_mode": "grpo", "reward_functions": "a, b", "reward_functions_file": "mine.py",
            "importance_sampling_level": "sequence"}  # fmt: skip
    values, _ = translate("mlx-lm-lora", grpo)
    assert {
        "train.objective": "gspo", "rollouts.rewards": ["mine.py:a", "mine.py:b"], "rollouts.samples": 4,
        "rollouts.max_tokens": 512, "rollouts.temperature": 0.8, "rollouts.kl": 0.1, "rollouts.clip_high": 1e-4,
    }.items() <= values.items()  # fmt: skip

"""The schema: the defaults that other programs rely on, and what holds for a Config made in Python."""

import pytest
from pydantic import ValidationError

from dualtune.config import AdapterConfig, Config, MemoryConfig, RunConfig, SourceConfig, TrainConfig
from dualtune.config.schema import sections

DEFAULTS = {
    "model": {"name": "m", "dtype": "auto", "quantization": "auto", "init": "pretrained", "kernels": "auto"},
    "adapter": {
        "method": "lora",
        "rank": 16,
        "alpha": 32,
        "dropout": 0.05,
        "scaling": "standard",
        "targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "layers": "all",
        "experts": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "merge_for": "none",
        "master_weights": "float32",
        "train_modules": (),
        "train_rows": (),
        "bias": "none",
        "init": "kaiming",
        "init_from": None,
        "init_optimizer": False,
    },
    "data": {
        "train": "t",
        "eval": "auto",
        "format": "auto",
        "columns": {},
        "roles": {},
        "consecutive": "join",
        "system": "fold",
        "template": "auto",
        "new_tokens": (),
        "new_special_tokens": (),
        "max_length": 2048,
        "packing": True,
        "template_variables": {},
        "special_tokens_in_text": "text",
        "loss_on": "assistant",
        "dedup": "off",
        "on_bad_row": "error",
        "max_bad_rows": 0.01,
        "on_lost_text": "error",
    },
    "train": {
        "epochs": 3,
        "steps": None,
        "tokens_per_step": "auto",
        "documents_per_step": None,
        "micro_batch_tokens": "auto",
        "learning_rate": 2.0e-4,
        "schedule": "cosine",
        "warmup": 0.03,
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "embedding_learning_rate": None,
        "lora_plus_ratio": None,
        "label_smoothing": 0.0,
        "router_aux_loss_coef": None,
        "average": "none",
        "average_over": 0.4,
        "activation_cache": "none",
        "max_grad_norm": 0.3,
        "policy": "auto",
        "objective": "sft",
    },
    "memory": {
        "checkpointing": "auto",
        "offload": "auto",
        "resident_layers": "all",
        "sharding": "auto",
        "limit": "auto",
    },
    "preference": {
        "loss": "auto",
        "beta": "auto",
        "gamma": "auto",
        "label_smoothing": 0,
        "sft_weight": "auto",
        "desirable_weight": 1,
        "undesirable_weight": 1,
        "reference": "auto",
    },
    "distill": {
        "distributions": None,
        "teacher": None,
        "teacher_adapter": None,
        "teacher_dtype": "auto",
        "teacher_quantization": "auto",
        "served_as": None,
        "teacher_system": None,
        "hint": None,
        "top_k": 32,
        "divergence": "auto",
        "beta": "auto",
        "temperature": 1,
        "sft_weight": 0,
    },
    "rollouts": {
        "rewards": (),
        "environment": None,
        "environment_args": {},
        "turns": 8,
        "weights": (),
        "samples": 8,
        "updates": 1,
        "max_tokens": 256,
        "temperature": 1,
        "top_p": 1,
        "stop": (),
        "advantage_scale": "auto",
        "clip_low": "auto",
        "clip_high": "auto",
        "kl": 0,
        "reward_timeout_s": 10,
    },
    "hybrid": {
        "enabled": False,
        "engine": "predict",
        "preset": "balanced",
        "warmup_steps": "auto",
        "full_steps": "auto",
        "max_predict_steps": "auto",
        "confidence_threshold": "auto",
        "correction_interval": "auto",
        "correct_steps": "auto",
        "divergence_threshold": "auto",
        "max_consecutive_predicts": "auto",
        "probes": "auto",
        "trust_region": "auto",
        "gate": "auto",
        "offload": "none",
    },
    "guards": {
        "nonfinite_limit": 5,
        "on_spike": "warn",
        "spike_threshold": 8,
        "early_stopping": None,
        "restore_best": False,
    },
    "run": {
        "dir": "runs/first",
        "seed": 42,
        "deterministic": False,
        "log_every": 10,
        "eval_every": 100,
        "save_every": 100,
        "keep": 3,
        "report": True,
        "track": (),
        "sample_prompts": (),
    },
}


def minimal() -> Config:
    return Config.model_validate({"model": {"name": "m"}, "data": {"train": "t"}})


def test_names_and_defaults_are_the_public_interface() -> None:
    assert minimal().model_dump() == DEFAULTS


def test_every_key_is_described_by_one_sentence() -> None:
    for section, model in {**sections(), "source": SourceConfig}.items():
        assert model.__doc__, section
        for key, field in model.model_fields.items():
            description = field.description or ""
            assert description.endswith("."), f"{section}.{key}"
            assert ". " not in description, f"{section}.{key}"


def test_a_config_is_frozen() -> None:
    config = minimal()
    with pytest.raises(ValidationError):
        config.run.seed = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError):
        config.run = RunConfig()  # pyright: ignore[reportAttributeAccessIssue]


def test_two_configs_share_no_mapping() -> None:
    minimal().data.columns["a"] = "b"
    assert minimal().data.columns == {}


def test_the_rules_hold_without_yaml() -> None:
    with pytest.raises(ValidationError, match=r"must be below train\.steps"):
        Config.model_validate({**minimal().model_dump(), "train": {"steps": 5, "warmup": 5}})
    with pytest.raises(ValidationError):
        AdapterConfig.model_validate({"rank": "16"})
    with pytest.raises(ValidationError):
        TrainConfig(learning_rate=float("nan"))


def test_a_validation_error_does_not_show_a_secret() -> None:
    token = "hf_" + "a" * 30
    with pytest.raises(ValidationError) as caught:
        RunConfig(dir=token)
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "limit_bytes"),
    [("auto", None), ("12GB", 12 * 10**9), ("12GiB", 12 * 2**30), ("1.5 TB", 1500 * 10**9), ("512 MiB", 2**29)],
)
def test_a_memory_limit_has_bytes(limit: str, limit_bytes: int | None) -> None:
    assert MemoryConfig(limit=limit).limit_bytes == limit_bytes

"""The example configs: their values, what is written beside them, and that they run."""

import json
import re
from pathlib import Path

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import Config, get_value, load_config, parse_config, render
from dualtune.config.render import example_names, example_path
from dualtune.config.schema import sections
from dualtune.data.order import MOST_TOKENS
from dualtune.engine.capabilities import check_capabilities
from dualtune.engine.machine import budget
from dualtune.engine.machines import named
from dualtune.engine.memory.plan import MemoryPlan, plan_of
from dualtune.engine.memory.shapes import KNOWN, decoder_of
from dualtune.show.run import run
from dualtune.train.state.resume import with_tokens

ROOT = Path(__file__).parents[2]
NAMES = example_names()
TRACKERS = ("trackio", "wandb", "mlflow", "tensorboard")
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BACKEND = {"training_config_m4": "mlx", "training_config_m4_16gb": "mlx"}  # of the others: torch
TIERS = {  # model, tokens of a document, steps, targets, steps between checkpoints
    "gpu_smollm2_quick": ("HuggingFaceTB/SmolLM2-135M", 128, 10, ("q_proj", "v_proj"), None),
    "gpu_smollm2_convergence": ("HuggingFaceTB/SmolLM2-135M", 128, 100, ("q_proj", "v_proj"), None),
    "gpu_tinyllama_memory": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 256, 50, ("q_proj", "v_proj"), None),
    "gpu_tinyllama_extended": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 256, 500, ("q_proj", "v_proj"), None),
    "gpu_llama7b_full": ("meta-llama/Llama-2-7b-hf", 512, 1000, ("q_proj", "k_proj", "v_proj", "o_proj"), 100),
}  # fmt: skip


def load(name: str, *overrides: str) -> Config:
    return load_config(example_path(name), overrides)


def values(config: Config) -> dict[str, object]:
    """section.key -> value, of every key there is."""
    return {
        f"{s}.{key}": get_value(config, f"{s}.{key}") for s, model in sections().items() for key in model.model_fields
    }


# --- the files -------------------------------------------------------------------------------------------------------


def test_there_is_a_config_for_each_kind_of_machine_and_each_tier():
    assert set(NAMES) == {
        "training_config_h100", "training_config_m4", "training_config_m4_16gb", "rtx_16gb", "rtx_24gb", "cpu_smoke",
        "lora_chat", "dpo_chat", "grpo_math", "grpo_calculator", "grpo_verifiers", "distill_prompt", *TIERS,
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_key_has_a_comment_of_its_own(name):
    """Behind the value, or in the line above it."""
    lines = example_path(name).read_text(encoding="utf-8").splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r"  \w+:", line)]
    assert len(keys) >= 10
    bare = [lines[n] for n in keys if "  # " not in lines[n][2:] and not lines[n - 1].startswith("  # ")]
    assert not bare
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_no_comment_promises_how_long_it_takes(name):
    """That depends on the machine and the data, so it is measured: dualtune bench."""
    text = example_path(name).read_text(encoding="utf-8")
    assert not re.search(r"\d+(\.\d+)?\s*(hours?|h|minutes?|min|days?)\b", text)


@pytest.mark.parametrize("name", NAMES)
def test_the_backend_it_is_for_honours_every_key(open_backend, name):
    check_capabilities(open_backend(BACKEND.get(name, "torch")), load(name))


def test_only_the_mac_s_config_moves_to_the_other_backend(open_backend):
    check_capabilities(open_backend("torch"), load("training_config_m4"))  # affine4 is the same bytes there
    with pytest.raises(ConfigError, match=r"model\.quantization: got nf4"):
        check_capabilities(open_backend("mlx"), load("training_config_h100"))


# --- the values ------------------------------------------------------------------------------------------------------


def test_h100_and_m4_differ_only_where_they_must():
    h100, m4 = (values(load(f"training_config_{name}")) for name in ("h100", "m4"))
    assert {key: (h100[key], m4[key]) for key in h100 if h100[key] != m4[key]} == {
        "model.quantization": ("nf4", "affine4"),
        "data.max_length": (4096, 2048),
        "train.micro_batch_tokens": (3 * 4096, 1 * 2048),
        "run.dir": ("runs/h100", "runs/m4"),
    }


@pytest.mark.parametrize("name", ["training_config_h100", "training_config_m4"])
def test_a_large_config_runs_without_a_tracker_and_takes_each(name):
    assert load(name).run.track == ()
    for tracker in TRACKERS:
        assert load(name, f"run.track=[{tracker}]").run.track == (tracker,)
        assert tracker in example_path(name).read_text(encoding="utf-8")


def test_the_h100_config_has_the_values_that_were_asked_for():
    found = values(load("training_config_h100"))
    assert {key: found[key] for key in found if key.startswith(("model.", "adapter.", "train."))} == {
        "model.name": "mistralai/Mistral-7B-Instruct-v0.3", "model.dtype": "bfloat16", "model.quantization": "nf4",
        "model.init": "pretrained", "model.kernels": "auto",
        "adapter.method": "lora", "adapter.rank": 16, "adapter.alpha": 32, "adapter.scaling": "standard",
        "adapter.dropout": 0.05, "adapter.targets": SEVEN, "adapter.layers": "all", "adapter.rank_pattern": {},
        "adapter.merge_for": "none", "adapter.master_weights": "float32",
        "adapter.alpha_pattern": {}, "adapter.train_modules": (), "adapter.train_rows": (), "adapter.experts": False,
        "adapter.bias": "none",
        "adapter.init": "kaiming", "adapter.init_from": None, "adapter.init_optimizer": False,
        "train.epochs": 3, "train.steps": None, "train.tokens_per_step": "auto", "train.documents_per_step": 16,
        "train.micro_batch_tokens": 12288, "train.learning_rate": 2e-4, "train.schedule": "cosine",
        "train.warmup": 0.03, "train.optimizer": "adamw", "train.weight_decay": 0.01, "train.max_grad_norm": 0.3,
        "train.lora_plus_ratio": None, "train.embedding_learning_rate": None, "train.label_smoothing": 0.0,
        "train.router_aux_loss_coef": None,
        "train.average": "none", "train.average_over": 0.4,
        "train.activation_cache": "none", "train.policy": "auto", "train.objective": "sft",
    }  # fmt: skip
    assert (found["run.log_every"], found["run.eval_every"], found["run.save_every"]) == (10, 100, 500)
    assert (found["run.keep"], found["run.seed"], found["guards.restore_best"]) == (3, 42, True)
    assert (found["data.eval"], found["data.packing"]) == ("auto", True)


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_has_the_values_that_were_asked_for(name):
    model, length, steps, targets, save_every = TIERS[name]
    config = load(name)
    assert (config.model.name, config.model.quantization) == (model, "nf4")
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.targets) == (8, 16, targets)
    assert (config.data.train, config.data.max_length) == ("data/explain_concepts.jsonl", length)
    assert (config.train.steps, config.train.documents_per_step) == (steps, 1)
    assert (config.train.learning_rate, config.train.warmup, config.train.weight_decay) == (2e-4, 0.1, 0.01)
    assert (config.run.dir, config.run.save_every) == (f"runs/{name}", save_every)


@pytest.mark.parametrize(
    ("name", "machines"),
    [
        ("training_config_h100", ["h100-80", "a100-80", "h200"]),
        ("training_config_m4", ["m4-32", "m3-pro-36", "m1-max-64", "m4-max-128"]),
        ("training_config_m4_16gb", ["m4-16", "m3-pro-18"]),
        ("rtx_24gb", ["rtx-4090-24", "rtx-3090-24", "l4", "a10g", "rtx-4000-ada-20"]),
        ("rtx_16gb", ["rtx-5080-16", "rtx-4080-16", "t4", "v100-16"]),
        ("gpu_smollm2_quick", ["rtx-4060-8"]),
        ("gpu_smollm2_convergence", ["rtx-4060-8"]),
        ("gpu_tinyllama_memory", ["rtx-4060-8"]),
        ("gpu_tinyllama_extended", ["rtx-4060-8"]),
        ("gpu_llama7b_full", ["rtx-3060-12"]),
    ],
)
def test_an_example_fits_the_machines_that_it_is_for(name, machines):
    for machine in machines:
        assert plan_for(name, machine).fits, machine


def plan_for(name: str, machine: str, *overrides: str) -> MemoryPlan:
    config, kind = load(name, *overrides), named(machine).kind
    decoder, has = decoder_of(KNOWN[config.model.name]), budget(named(machine))
    return plan_of(config, decoder, BACKEND.get(name, "torch"), kind, has)


@pytest.mark.parametrize(
    ("name", "machine"), [("training_config_m4", "m4-32"), ("training_config_m4_16gb", "m4-16")]
)  # fmt: skip
def test_a_mac_s_config_leaves_a_tenth_of_what_metal_gives(name, machine):
    plan = plan_for(name, machine)
    assert plan.estimate.total_bytes <= 0.9 * plan.budget.bytes
    assert 1 < plan.time < 1.3


def test_the_m4_config_fits_with_the_lengths_that_it_names():
    for name, length in (("training_config_m4", 4096), ("training_config_m4_16gb", 2048)):
        longer = (f"data.max_length={length}", f"train.micro_batch_tokens={length}")
        assert plan_for(name, {4096: "m4-32", 2048: "m4-16"}[length], *longer).fits


def test_the_h100_config_takes_at_most_60_gb_with_room():
    plan = plan_for("training_config_h100", "h100-80")
    assert plan.estimate.total_bytes <= 0.95 * 60e9 and plan.time == 1


def test_the_h100_config_says_what_three_and_four_documents_take():
    text = example_path("training_config_h100").read_text(encoding="utf-8")
    for documents in (3, 4):
        overrides = (f"train.micro_batch_tokens={documents * 4096}", "memory.checkpointing=none")
        plan = plan_for("training_config_h100", "h100-80", *overrides)
        assert f"{plan.estimate.total_bytes / 1e9:.1f} GB" in text


# --- found and printed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rtx_16gb", "rtx_16gb.yaml"])
def test_an_example_is_found_with_or_without_its_suffix(name):
    assert example_path(name) == ROOT / "configs" / "rtx_16gb.yaml"


@pytest.mark.parametrize("name", ["rtx_15gb", "../README", ""])
def test_an_unknown_example_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError) as caught:
        example_path(name)
    assert str(caught.value) == f"example config: got '{name}', allowed: {', '.join(NAMES)}"


def test_an_installed_wheel_finds_them_beside_its_code(tmp_path, monkeypatch):
    """The wheel has configs/ as dualtune/configs; what lies beside the package there belongs to others."""
    for folder, name in (("dualtune/configs", "mine"), ("configs", "somebody_elses")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.yaml").write_text("# One.\n")
    monkeypatch.setattr(render, "__file__", str(tmp_path / "dualtune" / "config" / "examples.py"))
    assert example_names() == ["mine"]


@pytest.mark.parametrize("name", NAMES)
def test_dualtune_config_prints_the_file_as_it_is(dualtune_main, name):
    result = dualtune_main("config", name)
    assert (result.returncode, result.stdout) == (0, example_path(name).read_text(encoding="utf-8"))


def test_dualtune_config_lists_each_with_what_it_is_for(dualtune_main):
    lines = dualtune_main("config", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert lines[NAMES.index("gpu_smollm2_convergence")].endswith("  Validation tier 2 of 5: does it learn?")


def test_dualtune_config_takes_one_wish_at_a_time(dualtune_main):
    assert dualtune_main("config", "rtx_16gb", "--schema").returncode == 2
    unknown = dualtune_main("config", "rtx_15gb")
    assert (unknown.returncode, unknown.stdout) == (2, "") and "allowed: cpu_smoke, " in unknown.stderr


# --- they run --------------------------------------------------------------------------------------------------------


def test_the_smoke_config_trains_from_a_clean_clone(dualtune_main, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    result = dualtune_main("train", "configs/cpu_smoke.yaml", "--platform", "cpu", "--set", f"run.dir={tmp_path}/run")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = (row["eval_loss"] for row in rows if "eval_loss" in row)
    assert after < 0.7 * before
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(("name", "backend"), [("training_config_h100", "torch"), ("training_config_m4", "mlx")])
def test_a_large_config_trains_a_step_of_a_small_model(open_backend, tmp_path, name, backend):
    """The way from the file over overrides to the trainer; all else as written, 4-bit base and bfloat16 included."""
    demo = ROOT / "dualtune" / "demo"
    config = load(
        name, f"model.name={demo / 'model'}", f"data.train={demo / 'data' / 'heldout.jsonl'}", "data.max_length=256",
        "train.micro_batch_tokens=1024", "train.steps=1", "train.warmup=0", f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    result = run(config, open_backend(backend))
    assert result.num_steps == 1
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["engine"]["quantization"] == config.model.quantization
    assert environment["engine"]["dtype"] == "bfloat16"
    (row,) = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if '"loss"' in line
    ]
    assert row["loss"] > 0 and row["grad_norm"] > 0
    assert parse_config((tmp_path / "run" / "config.yaml").read_text()) == with_tokens(config, MOST_TOKENS)

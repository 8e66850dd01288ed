"""Runs with adapter.method: full: resumed to the bit, written as a model, and refused where only an adapter will do."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from dualtune.base.errors import ConfigError
from dualtune.engine.capabilities import check_capabilities
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_gpt2
from dualtune.show.run import run
from dualtune.train.evaluation import result_of
from dualtune.train.generation.inference import load_model
from dualtune.train.hooks import Hook
from dualtune.train.objective import optimizer_spec
from dualtune.train.state import checkpoint

FULL = {"adapter.method": "full", "data.eval": 0.25, "train.steps": 6, "run.save_every": 2, "train.warmup": 1}


class Crash(BaseException):
    """Ends a run as if it were killed."""


class Stop(Hook):
    def on_step(self, record):
        if record.step == 3:
            raise Crash


@pytest.fixture
def gpt2(tiny_llama, tmp_path):
    """A GPT-2 with the tokenizer of the tiny Llama."""
    vocab = json.loads((tiny_llama / "config.json").read_text())["vocab_size"]
    path = write_tiny_gpt2(tmp_path / "gpt2", vocab_size=vocab)
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


@pytest.fixture
def config_of(make_config, write_rows, qa_rows, gpt2, tmp_path):
    """A config of the whole model. The keys that only adapters have keep their defaults."""
    data = write_rows(qa_rows)

    def make(name="run", **overrides):
        defaults = {"adapter.rank": 16, "adapter.alpha": 32, "adapter.dropout": 0.05}
        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        settings = defaults | {"adapter.targets": modules, "run.dir": tmp_path / name} | FULL
        return make_config(data, settings | {key.replace("__", "."): v for key, v in overrides.items()}, gpt2)

    return make


def model_of(run_dir):
    return (run_dir / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("dtype", "optimizer"), [("float32", "adamw"), ("bfloat16", "adamw"), ("bfloat16", "adamw_8bit")]
)
def test_a_stopped_run_resumes_to_the_same_bits(open_backend, config_of, tmp_path, dtype, optimizer):
    backend = open_backend("torch")
    changes = {"model__dtype": dtype, "train__optimizer": optimizer, "memory__checkpointing": "full"}
    straight = run(config_of("straight", **changes), backend)
    with pytest.raises(Crash):
        run(config_of("stopped", **changes), backend, [Stop()])
    assert not (tmp_path / "stopped" / "model").exists()
    run(config_of("stopped", **changes), backend)
    assert model_of(tmp_path / "stopped") == model_of(tmp_path / "straight")
    assert straight.eval_loss < straight.eval_loss_before
    assert run(config_of("stopped", **changes), backend).was_finished


def test_random_weights_are_those_of_the_seed(open_backend, config_of, tmp_path):
    backend = open_backend("torch")
    changes = {"model__init": "random", "train__steps": 2}
    run(config_of("one", **changes), backend)
    run(config_of("same", **changes), backend)
    run(config_of("other", run__seed=7, **changes), backend)
    assert model_of(tmp_path / "one") == model_of(tmp_path / "same") != model_of(tmp_path / "other")


def test_the_result_is_a_model_that_computes_what_the_run_did(open_backend, config_of, gpt2, tmp_path):
    """With tokenizer and record; every tensor has moved."""
    backend = open_backend("torch")
    result = run(config_of(), backend)
    assert result.adapter_dir == tmp_path / "run" / "model" and not (tmp_path / "run" / "adapter").exists()
    before, after = load_file(gpt2 / "model.safetensors"), load_file(result.adapter_dir / "model.safetensors")
    assert before.keys() == after.keys()
    assert not [name for name in before if np.array_equal(before[name], after[name])]
    record = json.loads((result.adapter_dir / "dualtune.json").read_text())
    assert record["training"]["steps"] == 6 and record["base"]["name"] == str(gpt2)
    engine = load_model(backend, str(result.adapter_dir)).engine
    entry = record["fingerprints"]["model"][0]
    logprobs_V = engine.logprobs(random_batch_of(entry["tokens"]))[0, -1]
    assert logprobs_V[entry["top"][0][0]] == pytest.approx(entry["top"][0][1], abs=1e-5)


def random_batch_of(tokens):
    batch = random_batch([len(tokens)], 96)
    batch.tokens_BT[:] = tokens
    return batch


def test_a_backend_without_it_refuses_it_by_name(open_backend, config_of):
    with pytest.raises(ConfigError, match=r"adapter.method: got full, the backend 'numpy' honours: dora, lora"):
        check_capabilities(open_backend("numpy"), config_of())


def test_a_run_on_mlx_is_stopped_and_ends_on_torch(open_backend, config_of, tiny_llama, tmp_path):
    """Resumed on MLX to the bit; on torch within what two frameworks differ by."""
    mlx, changes = open_backend("mlx"), {"model__name": str(tiny_llama), "train__optimizer": "muon"}
    run(config_of("straight", **changes), mlx)
    for name, backend in (("stopped", mlx), ("moved", open_backend("torch"))):
        with pytest.raises(Crash):
            run(config_of(name, **changes), mlx, [Stop()])
        run(config_of(name, **changes), backend)
    assert model_of(tmp_path / "stopped") == model_of(tmp_path / "straight")
    straight, moved = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "moved"))
    assert straight.keys() == moved.keys()
    for name, w in straight.items():
        assert np.abs(moved[name] - w).max() <= 2e-5 * max(1.0, np.abs(w).max()), name


def test_commands_on_adapters_name_the_model_instead(dualtune_main, open_backend, config_of, gpt2, tmp_path):
    run_dir = run(config_of(train__steps=2), open_backend("torch")).run_dir
    for words in (
        ["adapter", "inspect", run_dir], ["adapter", "convert", run_dir, tmp_path / "out", "--to", "peft"],
        ["adapter", "diff", run_dir, run_dir], ["adapter", "merge", run_dir, tmp_path / "out", "--base", gpt2],
        ["verify", run_dir, "--base", gpt2, "--platform", "cpu"],
        ["generate", gpt2, "--adapter", run_dir, "--prompt", "1", "--platform", "cpu"],
    ):  # fmt: skip
        found = dualtune_main(*words)
        assert found.returncode == 6 and f"{run_dir}/model: is a model, not an adapter" in found.stdout + found.stderr
    found = dualtune_main("bundle", "pack", run_dir, tmp_path / "a.bundle", "--adapter")
    assert found.returncode == 2 and f"{run_dir}/model is a model directory" in found.stderr
    assert dualtune_main("bundle", "pack", run_dir, tmp_path / "a.bundle").returncode == 0
    assert dualtune_main("generate", run_dir / "model", "--prompt", "1", "--platform", "cpu").returncode == 0


@pytest.mark.parametrize(
    "way", [{"train.schedule": "schedule_free"}, {"train.average": "tail", "train.average_over": 4}]
)
def test_a_model_that_is_written_is_the_average(config_of, open_backend, way):
    """The training goes on with its own weights, which are those of the checkpoint."""
    config = config_of(**way | {"model.dtype": "float32"})
    result = run(config, open_backend("torch"))
    saved, _ = checkpoint.newest(result.run_dir / "checkpoints")
    expected = result_of(optimizer_spec(config, 6), saved.adapter, saved.optimizer)
    found = load_file(result.adapter_dir / "model.safetensors")
    assert found.keys() == {name.removeprefix("transformer.") for name in expected}
    for name, w in expected.items():
        assert np.array_equal(found[name.removeprefix("transformer.")], w)
    assert any((w != saved.adapter[name]).any() for name, w in expected.items())

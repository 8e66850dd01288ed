"""A run directory is as good as the adapter in it; random weights are those of the training; a prompt from a pipe."""

import io
import json
import shutil
import sys

import pytest

from dualtune.model.formats.directory import adapter_directory

CPU = ("--platform", "cpu")


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def run(lasting, config_file, tiny_llama, dualtune_main, open_backend):
    """The config and the directory of a run of the tiny Llama; trained once."""
    open_backend("torch")
    config = config_file({"model.name": str(tiny_llama), "run.dir": str(lasting / "run"), "train.steps": 2})
    if not (lasting / "run").exists():
        result = dualtune_main("train", config, *CPU)
        assert result.returncode == 0, result.stderr
    return config, lasting / "run"


@pytest.mark.parametrize(
    "command",
    [
        "adapter inspect {run}", "adapter diff {run} {run}/adapter", "adapter convert {run} {out} --to peft",
        "adapter import {run} {out}", "adapter merge {run} {out} --base {model} --platform cpu",
        "generate {model} --adapter {run} --prompt x --max-tokens 1 --platform cpu",
        "eval {config} --adapter {run} --platform cpu", "verify {run} --base {model} --platform cpu",
        "bundle pack {run} {out} --adapter", "push {out} {run} --adapter",
    ],
)  # fmt: skip
def test_every_reader_of_an_adapter_takes_its_run_directory(dualtune_main, run, tiny_llama, tmp_path, command):
    config, directory = run
    (tmp_path / "target").mkdir()
    places = {"run": directory, "out": tmp_path / "target" / "new", "model": tiny_llama, "config": config}
    result = dualtune_main(*(word.format(**places) for word in command.split()))
    assert result.returncode == 0, result.stderr


def test_training_starts_from_a_run_directory(dualtune_main, run, config_file, tiny_llama, tmp_path):
    _, directory = run
    changes = {"model.name": str(tiny_llama), "adapter.init_from": str(directory), "run.dir": str(tmp_path / "next")}
    assert dualtune_main("train", config_file(changes, "next.yaml"), *CPU).returncode == 0


def test_an_adapter_directory_stays_what_it_is(run, tmp_path):
    _, directory = run
    assert adapter_directory(directory) == directory / "adapter"
    assert adapter_directory(directory / "adapter") == directory / "adapter"
    assert adapter_directory(tmp_path / "nowhere") == tmp_path / "nowhere"
    shutil.copytree(directory / "adapter", tmp_path / "both")
    shutil.copytree(directory / "adapter", tmp_path / "both" / "adapter")
    assert adapter_directory(tmp_path / "both") == tmp_path / "both"


def test_a_run_without_an_adapter_is_called_that(dualtune_main, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    result = dualtune_main("adapter", "inspect", tmp_path / "run")
    assert (result.returncode, result.stderr.count("\n")) == (6, 1)
    assert "is a run directory without an adapter: the adapter is written at the end of the run" in result.stderr
    assert f"`dualtune train {tmp_path / 'run' / 'config.yaml'}`" in result.stderr


def test_a_checkpoint_is_called_that(dualtune_main, run):
    _, directory = run
    checkpoint = max((directory / "checkpoints").iterdir())
    result = dualtune_main("adapter", "inspect", checkpoint)
    assert (result.returncode, result.stderr.count("\n")) == (6, 1)
    assert f"is a checkpoint, not an adapter: `dualtune train {directory / 'config.yaml'}`" in result.stderr


# --- random weights --------------------------------------------------------------------------------------------------


def test_eval_measures_on_the_random_weights_of_the_training(
    dualtune_main, config_file, tiny_llama, tmp_path, open_backend
):
    """No weights are there at all: they are a function of the seed."""
    open_backend("torch")
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = config_file({"model.name": str(model), "model.init": "random", "run.seed": 7, "train.steps": 2})
    assert dualtune_main("train", config, *CPU).returncode == 0
    manifest = json.loads((tmp_path / "runs" / "a" / "adapter" / "dualtune.json").read_text())
    result = dualtune_main("eval", config, "--json", *CPU)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["loss"] == pytest.approx(manifest["training"]["eval_loss"], rel=1e-6)
    base = json.loads(dualtune_main("eval", config, "--json", "--base", *CPU).stdout)["loss"]
    assert base == pytest.approx(manifest["training"]["eval_loss_before"], rel=1e-6)


# --- a prompt from standard input ------------------------------------------------------------------------------------


def test_a_prompt_is_read_from_standard_input(dualtune_main, tiny_llama, monkeypatch, open_backend):
    open_backend("torch")
    command = ("generate", tiny_llama, "--max-tokens", "5", *CPU, "--prompt")
    said = dualtune_main(*command, "two\nlines é").stdout
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines é\n"))
    assert dualtune_main(*command, "-").stdout == said


@pytest.mark.parametrize(
    ("text", "reason"), [("", "is empty"), (" \n", "is empty"), ("x" * (2**22 + 1), "has more than")]
)
def test_a_prompt_that_is_none_is_refused_before_anything_is_loaded(dualtune_main, monkeypatch, text, reason):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    result = dualtune_main("generate", "nowhere", "--prompt", "-")
    assert result.returncode == 2
    assert f"--prompt -: standard input {reason}" in result.stderr

"""`dualtune train` without a config file: short options, every key as an option, and the run that they make."""

import filecmp
import json
import shlex

import pytest
import yaml

from dualtune.cli.settings import SHORT, config_from_options, with_short_options
from dualtune.cli.suggest import with_keys_as_set
from dualtune.config import Config, get_value, load_config, parse_config
from dualtune.config.render import entry, to_yaml

KEYS = [f"{section}.{key}" for section, field in Config.model_fields.items() for key in field.annotation.model_fields]


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": f"{i} plus {i}?", "completion": f"{2 * i}"}) + "\n" for i in range(8)]
    (tmp_path / "my rows: 1.jsonl").write_text("".join(lines))
    return "my rows: 1.jsonl"


def test_a_run_without_a_file_is_the_run_of_its_config(dualtune_main, tiny_softmax, rows, tmp_path):
    words = ("train", "--platform", "numpy", "--model", tiny_softmax, "--data", rows, "--steps", 3, "--rank", 4)
    words = (*words, "--train.documents_per_step", 2, "--data.eval=0", "--adapter.targets=all-linear")
    done = dualtune_main(*words)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "softmax-my-rows-1"
    lines = [line.partition("Z  ")[2] for line in done.stdout.splitlines()]  # without their time
    said, saved = (line for line in lines if line.startswith("config"))
    assert saved == "config      saved as runs/softmax-my-rows-1/config.yaml"
    assert f"model.name: {tiny_softmax}, data.train: 'my rows: 1.jsonl', train.steps: 3, adapter.rank: 4, " in said
    assert said.endswith("run.dir: runs/softmax-my-rows-1; the other keys have their defaults")
    config = load_config(run / "config.yaml")
    changes = (
        "train.steps=3",
        "adapter.rank=4",
        "train.documents_per_step=2",
        "data.eval=0",
        "adapter.targets=all-linear",
    )
    expected = {"model": {"name": str(tiny_softmax)}, "data": {"train": rows}, "run": {"dir": str(config.run.dir)}}
    resolved = (  # what depends on the data and the length of the run is resolved where a run records it
        f"train.tokens_per_step={config.train.tokens_per_step}",
        f"run.log_every={config.run.log_every}",
        f"run.eval_every={config.run.eval_every}",
    )
    assert config == load_config(expected, (*changes, *resolved))

    assert "nothing to do" in dualtune_main(*words).stdout  # the same command is the same run
    assert dualtune_main("train", run / "config.yaml", "--platform", "numpy", "--run-dir", "by-file").returncode == 0
    tensors = "adapter/adapter_model.safetensors"
    assert filecmp.cmp(run / tensors, tmp_path / "by-file" / tensors, shallow=False)


def test_another_setting_is_not_taken_for_the_same_run(dualtune_main, tiny_softmax, rows, wording):
    words = ("train", "--platform", "numpy", "--model", tiny_softmax, "--data", rows, "--steps", 2, "--data.eval", 0)
    words = (*words, "--adapter.targets", "all-linear")
    assert dualtune_main(*words).returncode == 0
    again = dualtune_main(*words, "--rank", 2)
    assert again.returncode == 2 and "adapter.rank" in again.stderr
    wording(again.stderr)


@pytest.mark.parametrize(("model", "data"), [(".", "d.jsonl"), ("../a model", "../a model/d.jsonl"), ("link", "../.")])
def test_the_run_directory_has_the_names_of_its_model_and_data(tmp_path, monkeypatch, model, data):
    (tmp_path / "a model").mkdir()
    (tmp_path / "a model" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "a model")
    config = config_from_options(with_short_options({"model": model, "data": (data,)}))
    names = {"link": f"link-{tmp_path.name}"}
    assert str(config.run.dir) == f"runs/{names.get(model, 'a-model-d')}"


def test_of_two_values_set_by_name_the_last_counts():
    given = ("model.name=m", "data.train=d", "train.steps=5", "train.steps=6")
    assert config_from_options(with_short_options({"rank": "4"}, given)).train.steps == 6


def test_every_key_is_an_option(tiny_softmax):
    """With the value that it has by default, or as an example."""
    config = parse_config("model: {name: m}\ndata: {train: d.jsonl}\nrun: {dir: r}\ntrain: {steps: 7}\n")
    words = []
    for key in KEYS:
        words += [f"--{key}", entry("", get_value(config, key)).strip().removeprefix(":").strip()]
    found = with_keys_as_set(words)
    assert found[::2] == ["--set"] * len(KEYS)
    assert config_from_options(found[1::2]) == config


def test_short_options_name_keys_and_texts_are_taken_as_they_are():
    assert {key for key, _ in SHORT.values()} <= set(KEYS)
    odd = "null"
    given = with_short_options(
        {"model": odd, "data": ("a: [b.jsonl", "c.jsonl"), "run_dir": "1e-4", "steps": "5", "rank": None}
    )
    config = config_from_options(given)
    assert (config.model.name, config.data.train, str(config.run.dir)) == (odd, ("a: [b.jsonl", "c.jsonl"), "1e-4")
    assert config.train.steps == 5 and config.adapter.rank == 16


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("c.yaml --train.steps 5", "c.yaml --set train.steps=5"),
        ("c.yaml --train.steps=5 --dry-run", "c.yaml --set train.steps=5 --dry-run"),
        ("--data.columns.prompt question", "--set data.columns.prompt=question"),
        ("--model.name a=b", "--set model.name=a=b"),
        ("--set train.steps=5 --steps 3 -- --train.steps", "--set train.steps=5 --steps 3 -- --train.steps"),
        ("--run.dir=--x --train.learning_rate -1", "--set run.dir=--x --set train.learning_rate=-1"),
        ("train.steps --run-dir ./a.b ../--x.y", "train.steps --run-dir ./a.b ../--x.y"),
    ],
)
def test_keys_are_written_as_set(before, after):
    assert with_keys_as_set(before.split()) == after.split()


def test_keys_override_a_file_in_other_commands_too(dualtune_main, tiny_softmax, rows, tmp_path):
    config = load_config({"model": {"name": str(tiny_softmax)}, "data": {"train": rows}, "run": {"dir": "r"}})
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    done = dualtune_main("check-config", "c.yaml", "--platform", "numpy", "--train.epochs", "x", "--json")
    assert done.returncode == 2 and "train.epochs: got 'x'" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --model m", "Give a config file, or --model and --data, or --demo"),
        ("train c.yaml --demo", "(one of them)"),
        ("train --model m --data d --train.stps 4", "train.stps: unknown key. Did you mean 'steps'?"),
        ("train --model m --data d --train.steps", "--train.steps needs a value"),
        (
            "train --model m --data d --run.dir --dry-run",
            "--run.dir needs a value. One that begins with -- is given as",
        ),
        ("train --model m --data d --learning-rate '' --rank 4", "--learning-rate: got an empty text. Give a value"),
        ("train --model m --data d --data ''", "--data: got an empty text"),
        ("train --model m --data d --run-dir=", "--run-dir: got an empty text"),
        (
            "train --model m --data d --steps 5 --train.steps 6",
            "--steps sets train.steps, which is also set by its name",
        ),
        (
            "sweep --model m --data d --steps 5 --train.steps 6",
            "--steps sets train.steps, which is also set by its name",
        ),
        ("train --model m --data d --steps abc", "train.steps: got 'abc', must be an integer >= 1"),
        ("train --model m --data d --nothing.here 1", "nothing: unknown key. Allowed here: model, adapter"),
        ("train --model m --data d --max-restarts 1", "--max-restarts is for a run with a config file"),
        ("generate m --prompt p --train.steps 4", "No such option '--train.steps'"),
    ],
)
def test_what_is_wrong_is_said_in_one_error(dualtune_main, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    done = dualtune_main(*shlex.split(words))
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not [*tmp_path.iterdir()]


def test_the_config_that_is_shown_is_yaml(dualtune_main, tiny_softmax, rows):
    words = (
        "--model",
        tiny_softmax,
        "--data",
        rows,
        "--steps",
        1,
        "--adapter.targets",
        "[q_proj, v_proj]",
        "--dry-run",
    )
    done = dualtune_main("train", "--platform", "numpy", *words)
    said = next(line for line in done.stdout.splitlines() if line.startswith("config"))
    shown = yaml.safe_load("{" + said.removeprefix("config").partition(";")[0] + "}")
    assert shown["adapter.targets"] == ["q_proj", "v_proj"] and shown["data.train"] == rows

"""What check-config says of a config: one test for each kind of thing that can be wrong, and what fixes it."""

import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from dualtune.base.checks import exit_code
from dualtune.doctor.check_config import ConfigReport, check_config

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "dualtune" / "demo"


def row(report: ConfigReport, name: str):
    """The one row of this name."""
    (found,) = [check for check in report.checks if check.name == name]
    return found


def faults(report: ConfigReport) -> dict[str, int]:
    """name -> exit code of what fails."""
    return {check.name: check.exit_code for check in report.checks if check.level == "fail"}


# --- all in order ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "machine", "backend"),
    [
        ("training_config_h100", "h100-80", "torch"),
        ("training_config_h100", "h200", "torch"),
        ("training_config_m4", "m4-32", "mlx"),
        ("rtx_24gb", "rtx-4090-24", "torch"),
        ("rtx_16gb", "rtx-5080-16", "torch"),
        ("gpu_llama7b_full", "rtx-3060-12", "torch"),
        ("lora_chat", "cpu-64", "torch"),
    ],
)
def test_an_example_passes_on_the_machine_that_it_is_for(check, open_backend, name, machine, backend):
    open_backend(backend)
    report = check(name=name, machine=machine)
    assert (exit_code(report.checks), faults(report)) == (0, {})
    assert row(report, "backend").found == f"{backend} honours every key"
    assert row(report, "memory").level == "ok"
    assert report.memory is not None
    assert {"weights", "adapter", "optimizer", "activations"} <= {part.name for part in report.memory.estimate.parts}


def test_nothing_is_downloaded_and_nobody_is_asked(check, monkeypatch):
    import huggingface_hub

    def refuse(*_):
        raise AssertionError("a connection")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    report = check("model.name=some/model", "data.train=some/dataset", "data.eval=some/other")
    assert faults(report) == {}
    assert [check.level for check in report.checks if "data" in check.name] == ["skipped", "skipped"]


def test_nothing_is_written(check, tmp_path):
    check()
    assert list(tmp_path.iterdir()) == []


# --- the config ------------------------------------------------------------------------------------------------------


def test_a_config_with_several_problems_shows_all_with_their_lines_and_nothing_else(tmp_path, wording):
    path = tmp_path / "bad.yaml"
    path.write_text("model:\n  name: a/b\nadapter:\n  rank: 0\ndata:\n  train: x.jsonl\n  max_lenght: 5\n")
    report = check_config(path, ["train.epochs=no"])
    assert [(check.name, check.level) for check in report.checks] == [("schema", "fail")] * 3
    rank, length, epochs = (check.found for check in report.checks)
    assert rank.startswith(f"{path}:4:") and "adapter.rank" in rank
    wording(length)
    assert epochs.startswith("--set train.epochs: ")
    assert (exit_code(report.checks), report.memory) == (2, None)


def test_an_unusual_adapter_is_advice_and_no_fault(check):
    report = check("adapter.rank=128", "adapter.alpha=64", "adapter.dropout=0.3", "adapter.targets=[q_proj]")
    assert [(c.level, c.found) for c in report.checks if c.name == "adapter"] == [
        ("advice", "rank 128 is unusual"),
        ("advice", "alpha 64 scales the adapter by 0.5"),
        ("advice", "dropout 0.3 is high"),
        ("advice", "only q_proj is adapted"),
    ]
    assert exit_code(report.checks) == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ["adapter.rank=8", "adapter.alpha=16"],
        ["adapter.rank=64", "adapter.alpha=128"],
        ["adapter.dropout=0.2"],
        ["adapter.targets=[q_proj,k_proj,v_proj,o_proj]"],
        ["adapter.targets=all-linear"],
        ["adapter.targets=[all-linear,gate]"],
    ],
)
def test_at_the_border_of_the_usual_there_is_no_advice(check, overrides):
    assert row(check(*overrides), "adapter").level == "ok"


def test_an_adapter_to_start_from_that_cannot_be_read_fails(check, tmp_path):
    assert faults(check(f"adapter.init_from={tmp_path / 'none'}"))["start"] == 6


# --- platform and backend --------------------------------------------------------------------------------------------


def test_what_the_backend_refuses_is_a_row_for_each_key(check, open_backend):
    open_backend("mlx")
    report = check("model.quantization=nf4", "memory.offload=activations", machine="m4-32")
    refused = [c for c in report.checks if c.name == "backend"]
    assert [(c.level, c.exit_code) for c in refused] == [("fail", 2), ("fail", 2)]
    assert [c.found.partition(",")[0] for c in refused] == [
        "model.quantization: got nf4",
        "memory.offload: got activations",
    ]


def test_the_platform_follows_the_machine(check, open_backend, wording):
    open_backend("mlx")
    report = check(machine="m4-32")
    wording(row(report, "platform").found)
    assert faults(report) == {"backend": 2}  # NF4, which MLX has not


def test_cuda_without_a_gpu_fails_and_names_the_way_to_check_for_another_machine(check):
    report = check(machine="cpu-64", platform="cuda")
    assert faults(report) == {"platform": 4}
    assert "--machine" in row(report, "platform").fix
    assert row(report, "memory").level == "skipped"


def test_a_backend_that_is_not_installed_is_skipped_for_another_machine_and_fails_for_this_one(check, monkeypatch):
    from dualtune.base.errors import EnvironmentFault
    from dualtune.doctor import check_config as config_check

    def missing(name, device):
        raise EnvironmentFault(f"Backend '{name}' could not be imported: No module named '{name}'.")

    monkeypatch.setattr(config_check, "get_backend", missing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert row(elsewhere := check(), "backend").level == "skipped" and exit_code(elsewhere.checks) == 0
    assert faults(check("model.name=" + str(DEMO / "model"), machine=None, platform="cpu"))["backend"] == 4


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the demo's model, to be damaged."""
    return shutil.copytree(DEMO / "model", tmp_path / "model")


def rewrite(model: Path, **keys) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_a_model_in_a_directory_is_looked_at_with_its_tokenizer_and_template(check, model, wording):
    report = check(f"model.name={model}", "data.max_length=256")
    wording(row(report, "model").found)
    assert row(report, "tokenizer").level == "ok"
    wording(row(report, "tokenizer").found)
    wording(row(report, "length").found)


def test_a_directory_without_weights_fails_but_for_random_ones(check, model):
    (model / "model.safetensors").unlink()
    report = check(f"model.name={model}")
    assert faults(report) == {"model": 4} and "has no weights" in row(report, "model").found
    assert faults(check(f"model.name={model}", "model.init=random")) == {}


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere"])
def test_a_directory_that_is_not_there_fails(check, name):
    report = check(f"model.name={name}")
    assert faults(report) == {"model": 4}
    assert row(report, "model").found.startswith("there is no model directory ")


def test_a_model_of_unknown_shape_is_advice_until_it_is_downloaded(check, wording):
    report = check("model.name=some/model")
    assert (row(report, "model").level, exit_code(report.checks)) == ("advice", 0)
    wording(row(report, "model").fix)
    assert (row(report, "memory").level, report.memory) == ("skipped", None)


def test_a_model_in_the_hubs_cache_is_found_and_its_missing_weights_are_told(
    check, model, monkeypatch, tmp_path, wording
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model, repo / "snapshots" / ("0" * 40))
    report = check("model.name=some/model")
    assert row(report, "model").level == "ok"
    wording(row(report, "model").found)
    assert row(report, "tokenizer").level == "ok" and report.memory is not None
    (repo / "snapshots" / ("0" * 40) / "model.safetensors").unlink()
    report = check("model.name=some/model")
    assert row(report, "model").level == "advice"
    wording(row(report, "model").found)
    assert exit_code(report.checks) == 0


@pytest.mark.parametrize(
    ("architecture", "level"), [("BertForMaskedLM", "fail"), ("Gemma3ForConditionalGeneration", "advice")]
)
def test_a_model_that_does_not_continue_texts_is_told(check, model, architecture, level):
    rewrite(model, architectures=[architecture])
    report = check(f"model.name={model}")
    assert (row(report, "architecture").level, exit_code(report.checks)) == (level, 4 if level == "fail" else 0)


def test_what_is_ignored_in_a_config_json_is_told(check, tiny_llama, tmp_path, wording):
    """Code for libraries that do not know the model, and the tie of a head that has weights of its own."""
    model = shutil.copytree(tiny_llama, tmp_path / "untied")
    assert not {"code", "head"} & {each.name for each in check(f"model.name={model}").checks}
    rewrite(model, auto_map={"AutoModelForCausalLM": "modeling.Model"}, tie_word_embeddings=True)
    report = check(f"model.name={model}")
    assert exit_code(report.checks) == 0
    assert "auto_map" in row(report, "code").found
    wording(row(report, "head").found)


def test_a_model_without_a_formula_is_checked_but_for_its_memory(check, model, wording):
    rewrite(model, model_type="unheard_of")
    report = check(f"model.name={model}")
    assert (row(report, "memory").level, report.memory) == ("skipped", None)
    wording(row(report, "memory").found)


def test_a_template_that_is_not_there_fails(check, model):
    assert faults(check(f"model.name={model}", "data.template=none.jinja")) == {"tokenizer": 2}


def test_a_directory_without_a_tokenizer_fails(check, model):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    assert faults(check(f"model.name={model}")) == {"tokenizer": 4}


@pytest.mark.parametrize(
    ("key", "level", "code"), [("max_position_embeddings", "advice", 0), ("n_positions", "fail", 2)]
)
def test_a_length_beyond_the_models_positions_is_advice_and_fails_where_they_are_a_table(
    check, model, key, level, code
):
    described = json.loads((model / "config.json").read_text())
    del described["max_position_embeddings"]
    (model / "config.json").write_text(json.dumps(described | {key: 1024}))
    report = check(f"model.name={model}", "data.max_length=1025", "train.micro_batch_tokens=2048")
    assert (row(report, "length").level, exit_code(report.checks)) == (level, code)
    assert row(report, "length").fix == "--set data.max_length=1024"
    assert row(check(f"model.name={model}", "data.max_length=1024"), "length").level == "ok"


def test_targets_that_the_model_lacks_are_told(check):
    report = check("adapter.targets=[q_proj,k_proj,v_proj,wo]")
    assert faults(report) == {"memory": 2} and "'wo'" in row(report, "memory").found


# --- the data --------------------------------------------------------------------------------------------------------


def test_data_that_are_not_there_fail(check, wording):
    report = check("data.train=data/train.jsonl", "data.eval=data/valid.jsonl")
    assert faults(report) == {"data": 3, "eval data": 3}
    wording(row(report, "eval data").fix)
    assert row(report, "steps").level == "skipped"


def test_a_bad_row_among_the_first_fails_unless_bad_rows_are_left_out(check, write_rows, qa_rows, wording):
    path = write_rows([*qa_rows[:2], {"prompt": "x", "completion": ""}, *qa_rows[2:], {"prompt": 1}])
    report = check(f"data.train={path}")
    assert faults(report) == {"data": 3}
    assert row(report, "data").found.startswith(f"{path}:3: ")
    wording(row(report, "data").found)
    left_out = row(check(f"data.train={path}", "data.on_bad_row=skip"), "data")
    assert left_out.level == "advice"
    wording(left_out.found)


def test_unknown_keys_and_preference_pairs_fail(check, write_rows):
    assert faults(check(f"data.train={write_rows([{'x': 1}])}")) == {"data": 3}
    pairs = write_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}], "pairs.jsonl")
    assert faults(check(f"data.train={pairs}")) == {"data": 2}


def test_only_the_first_rows_are_converted_and_all_are_counted(check, write_rows, qa_rows, wording):
    path = write_rows(qa_rows[:1] * 150 + [{"prompt": 1}])
    report = check(f"data.train={path}")
    wording(row(report, "data").found)


def test_of_one_row_nothing_can_be_held_out_and_that_is_told(check, write_rows, qa_rows, wording):
    alone = row(check(f"data.train={write_rows(qa_rows[:1])}"), "eval data")
    assert alone.level == "advice"
    wording(alone.found)
    for number, share in ((1, 0), (2, 0.1)):
        report = check(f"data.train={write_rows(qa_rows[:number])}", f"data.eval={share}")
        assert "eval data" not in [found.name for found in report.checks]


def test_a_large_file_is_not_read_through(check, write_rows, qa_rows, monkeypatch, wording):
    from dualtune.doctor import check_config_data

    path = write_rows(qa_rows)
    monkeypatch.setattr(check_config_data, "CHEAP_BYTES", path.stat().st_size - 1)
    report = check(f"data.train={path}")
    wording(row(report, "data").found)
    assert row(report, "steps").level == "skipped"


def test_rows_that_are_cut_or_have_nothing_to_learn_are_told_where_the_tokenizer_is_here(
    check, tiny_llama, write_rows, wording
):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b" * 100}]
    model = f"model.name={tiny_llama}"
    report = check(model, f"data.train={write_rows(rows)}", "data.max_length=80")
    assert row(report, "data").level == "advice"
    wording(row(report, "data").found)
    report = check(model, f"data.train={write_rows(rows[1:])}", "data.max_length=16")
    assert faults(report) == {"data": 3}


# --- exit codes ------------------------------------------------------------------------------------------------------


def test_the_lowest_code_of_what_fails_is_the_exit_code(check):
    report = check("data.train=nowhere.jsonl", machine="rtx-4060-8")
    assert (faults(report), exit_code(report.checks)) == ({"data": 3, "memory": 4}, 3)


# --- run directory and disk ------------------------------------------------------------------------------------------


def test_a_run_directory_that_cannot_be_used_fails(check, tmp_path):
    (tmp_path / "file").write_text("")
    assert faults(check(f"run.dir={tmp_path / 'file'}")) == {"run.dir": 2}
    assert faults(check(f"run.dir={tmp_path / 'file' / 'run'}")) == {"run.dir": 5}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    assert faults(check(f"run.dir={tmp_path / 'other'}")) == {"run.dir": 2}


def test_a_run_that_would_go_on_is_told(check, tmp_path, wording):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    wording(row(check(), "run.dir").found)


def test_a_disk_without_room_for_the_checkpoints_fails(check, monkeypatch, wording):
    """41,943,040 weights of 12 bytes in five checkpoints, and of 8 in the adapter: 2.9 GB, 2.7 GiB."""
    usage = namedtuple("usage", "total used free")
    needed = 41_943_040 * (5 * 12 + 8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed - 1))
    report = check("train.steps=1000")
    assert faults(report) == {"disk": 5}
    wording(row(report, "disk").found)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed))
    wording(row(check("train.steps=1000"), "disk").found)


@pytest.mark.parametrize(
    ("settings", "checkpoints"),
    [
        (("train.steps=4",), 1),
        (("train.steps=4", "run.save_every=2"), 2),
        (("train.steps=4", "run.save_every=2", "run.eval_every=1"), 4),  # each evaluation may be the best
        (("train.steps=4", "run.save_every=2", "run.eval_every=1", "data.eval=0", "guards.restore_best=false"), 2),
        (("train.steps=4", "run.eval_every=3", "guards.on_spike=rollback"), 3),
        (("train.steps=400", "run.save_every=2", "run.keep=3"), 5),
    ],
)
def test_a_run_needs_room_for_no_more_checkpoints_than_it_saves(check, monkeypatch, settings, checkpoints):
    usage = namedtuple("usage", "total used free")
    needed = 41_943_040 * (checkpoints * 12 + 8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed - 1))
    assert faults(check(*settings)) == {"disk": 5}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed))
    assert faults(check(*settings)) == {}

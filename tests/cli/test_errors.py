"""Bad input: one clear message on stderr, the right exit code, no traceback, nothing half-written.

Most rows run in this process, where an exception that nobody expected fails the test; a row for each exit code runs in
a process of its own.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from dualtune.engine.testing.tiny_models import write_tiny_llama

NUMPY = ("--platform", "numpy")


@pytest.fixture
def refused(dualtune_main, tmp_path):
    """Run a command that must fail: the message, after checking everything that all failures share."""

    def run(code: int, *args) -> str:
        before = snapshot(tmp_path)
        result = dualtune_main(*args)
        assert result.returncode == code, result.stderr
        assert result.stderr.count("Error: ") == 1
        assert "Traceback" not in result.stdout + result.stderr
        assert snapshot(tmp_path) == before
        return result.stderr.partition("Error: ")[2].rstrip("\n")

    return run


def snapshot(directory) -> dict:
    return {path: path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["export", "run", "tuned.gguf", "--to", "gguf"], ["adapter", "merge", "run", "tuned.gguf", "--base", "model"],
        ["adapter", "convert", "run", "tuned.safetensors", "--to", "peft"], ["adapter", "import", "run", "tuned.ZIP"],
        ["data", "clean", "rows.jsonl", "--out", "tuned.jsonl"],
    ],
)  # fmt: skip
def test_the_name_of_a_file_is_none_for_a_new_directory(refused, command):
    words = command[: 1 if command[0] == "export" else 2]
    given = next(word for word in command if word.startswith("tuned."))
    assert refused(2, *command) == (
        f"{'--out' if '--out' in command else 'OUT'}: got {given}, the name of a file, but dualtune {' '.join(words)} "
        f"writes several files into a new directory. Give it a name without {given[5:]}, such as tuned"
    )


@pytest.mark.parametrize(
    "command",
    [
        ["adapter", "merge", "none", "{}", "--base", "none"], ["distill", "record", "no.yaml", "--teacher", "none",
                                                                 "--out", "{}"],
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_told_before_anything_is_read(refused, tmp_path, monkeypatch, command):
    access, out = os.access, tmp_path / "new" / "out"
    monkeypatch.setattr(os, "access", lambda path, mode, **more: path != tmp_path and access(path, mode, **more))
    assert refused(5, *(word.format(out) for word in command)) == (
        f"{out}: cannot be written, because {tmp_path} is read-only here. Choose another path"
    )


@pytest.mark.parametrize(
    ("made", "command", "code", "told"),
    [
        ("train.yaml", ["train", "{}/trian.yml"], 2, "{0}/trian.yml: no such file. Did you mean '{0}/train.yaml'?"),
        ("rows.jsonl", ["push", "{}/share", "{}/Rows.json"], 2, "SOURCE: {0}/Rows.json: no such file or directory. Did "
         "you mean '{0}/rows.jsonl'?"),
        ("runs/first/x", ["report", "{}/run/first"], 2, "{0}/run/first: is not a run directory. Did you mean "
         "'{0}/runs/first'?"),
        ("runs/first/x", ["adapter", "inspect", "{}/runs/frist"], 6, "{0}/runs/frist: No such file or directory. Did "
         "you mean '{0}/runs/first'?"),
        ("data/rows.jsonl", ["adapter", "inspect", "{}/deta/other"], 6, "{0}/deta/other: No such file or directory. An "
         "adapter is a directory with adapter_config.json and its weights."),
        ("other.jsonl", ["report", "{}/rows.jsonl"], 2, "{0}/rows.jsonl: is not a run directory. To find run "
         "directories: dualtune runs DIRECTORY"),
    ],
)  # fmt: skip
def test_a_name_that_is_nearly_right_is_told(refused, tmp_path, made, command, code, told):
    """In its last part or an earlier one, in the stem or the suffix, in any case; only if the whole path is there."""
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).touch()
    assert refused(code, *(word.format(tmp_path) for word in command)) == told.format(tmp_path)


# --- the config ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.batch_size": 4}, "{file}:4: train.batch_size: unknown key. "),
        ({"train.leraning_rate": 1}, "{file}:4: train.leraning_rate: unknown key. Did you mean 'learning_rate'?"),
        ({"train.steps": "many"}, "{file}:4: train.steps: got 'many', must be an integer >= 1 or null"),
        ({"adapter.rank": 0}, "{file}:2: adapter.rank: got 0, must be >= 1"),
        ({"data.format": "mesages"}, "{file}:3: data.format: got 'mesages', allowed: "),
        ({"train.micro_batch_tokens": 8}, "{file}:4: train.micro_batch_tokens: got 8, must be >= data.max_length (64)"),
    ],
)
def test_a_wrong_config_is_named_with_its_line(config_file, refused, changes, message):
    file = config_file(changes)
    for command in (["train"], ["train", "--dry-run"], ["eval"]):
        assert refused(2, *command, file, *NUMPY).startswith(message.format(file=file))


def test_all_problems_of_a_config_are_in_one_message(config_file, refused):
    file = config_file({"adapter.rank": 0, "train.leraning_rate": 1, "run.seed": -1})
    assert [line.split(": ")[1] for line in refused(2, "train", file).splitlines()] == [
        "adapter.rank", "train.leraning_rate", "run.seed",
    ]  # fmt: skip


def test_a_config_file_that_is_no_config(refused, tmp_path, wording):
    missing = tmp_path / "no.yaml"
    wording(refused(2, "train", missing))
    wording(refused(2, "train", tmp_path))
    (tmp_path / "list.yaml").write_text("- a\n")
    wording(refused(2, "train", tmp_path / "list.yaml"))


def test_wrong_overrides(config_file, refused, wording):
    file = config_file()
    wording(refused(2, "train", file, "--set", "adapter.rnk=4"))
    wording(refused(2, "train", file, "--set", "rank"))


def test_values_that_the_backend_does_not_honour(config_file, refused, wording):
    changes = {"model.quantization": "nf4", "memory.limit": "8GB", "memory.sharding": "full"}
    assert [line.partition(":")[0] for line in refused(2, "train", config_file(changes), *NUMPY).splitlines()] == [
        "model.quantization", "memory.sharding", "memory.limit",
    ]  # fmt: skip
    message = refused(2, "generate", "m", "--prompt", "x", "--quantization", "nf4", *NUMPY)
    wording(message)


def test_an_unknown_target_module_is_answered_with_those_of_the_model(config_file, refused, tiny_llama, wording):
    file = config_file({"model.name": tiny_llama, "adapter.targets": ["q_proj", "qkv_proj"]})
    pytest.importorskip("torch")
    for more in ((), ("--dry-run",)):
        wording(refused(2, "train", file, "--platform", "cpu", *more))


def test_an_unknown_platform(config_file, refused, wording):
    wording(refused(2, "train", config_file(), "--platform", "tpu"))


def test_a_run_directory_that_is_taken(config_file, refused, tmp_path, wording):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "thesis.txt").write_text("precious")
    wording(refused(2, "train", config_file(), *NUMPY))
    file = config_file({"run.dir": tmp_path / "runs" / "a" / "thesis.txt"})
    wording(refused(2, "train", file, *NUMPY))


def test_eval_without_an_adapter_or_with_too_many(config_file, refused, wording):
    wording(refused(2, "eval", config_file(), *NUMPY))
    both = refused(2, "eval", config_file(), "--base", "--adapter", "x", *NUMPY)
    assert both == "Give --adapter or --base, not both."


# --- the data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("no.jsonl", None, "{file}: no such file or directory"),
        ("a.csv", "a,b\n", "{file}: has no rows"),
        ("a.doc", "a", "{file}: got a '.doc' file, allowed: .jsonl"),
        ("a.jsonl", "", "{file}: has no rows"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "{file}:2: not JSON: Expecting value at column "),
        ("a.jsonl", '{"text": "a"}\n["text"]\n', "{file}:2: got a JSON list, a JSON object is needed\n1 of 2 rows "),
        ("a.jsonl", '{"q": "a"}\n', "{file}:1: no known format has the keys q. Known: "),
        ("a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "{file}:2: has no 'text'; its keys are: txt\n1 of 2 rows "),
        ("a.jsonl", json.dumps({"prompt": "x" * 99, "completion": "y"}) + "\n",
         "{file}: no targets: 1 of 1 rows have no trainable token within max_length. "),
    ],
)  # fmt: skip
def test_unusable_data_is_named_with_its_line(config_file, refused, tmp_path, name, text, message):
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    config = config_file({"data.train": file, "data.eval": 0})
    assert refused(3, "train", config, *NUMPY).startswith(message.format(file=file))
    assert refused(3, "train", config, "--dry-run", *NUMPY).startswith(message.format(file=file))


def test_unusable_evaluation_data(config_file, refused, tmp_path, wording):
    file = tmp_path / "eval.jsonl"
    config = config_file({"data.eval": file})
    wording(refused(3, "train", config, *NUMPY))
    wording(refused(3, "eval", config, "--base", *NUMPY))
    wording(refused(3, "eval", config_file(), "--base", "--data", file, *NUMPY))
    wording(refused(3, "eval", config_file({"data.eval": 0}), "--base", *NUMPY))


def test_evaluation_data_without_a_trainable_token_is_not_passed_over(config_file, refused, write_rows, wording):
    file = write_rows([{"prompt": "x" * 99, "completion": "y"}], "eval.jsonl")
    message = refused(3, "train", config_file({"data.eval": file}), *NUMPY)
    wording(message)


def test_conversations_without_a_template(config_file, refused, write_rows):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = write_rows([{"messages": turns}] * 3, "chat.jsonl")
    message = refused(3, "train", config_file({"data.train": data, "data.template": "none"}), *NUMPY)
    assert message.splitlines()[0].endswith("Set data.template to a Jinja file")


# --- the model and the machine ---------------------------------------------------------------------------------------


def test_a_model_directory_that_holds_no_model(config_file, refused, tmp_path, tiny_softmax):
    def message(directory):
        return refused(4, "train", config_file({"model.name": directory}), *NUMPY)

    missing = tmp_path / "models" / "nowhere"
    assert message(missing) == f"model.name: there is no model directory {missing}"
    assert refused(4, "generate", missing, "--prompt", "x", *NUMPY) == message(missing)
    bare = tmp_path / "bare"
    bare.mkdir()
    assert message(bare) == f"model.name: {bare} has no config.json; a model directory in Hugging Face layout is needed"
    shutil.copyfile(tiny_softmax / "config.json", bare / "config.json")
    assert message(bare) == (
        f"model.name: {bare} has no weights (model.safetensors, or model.safetensors.index.json and the files it "
        "names); it holds: config.json."
    )
    (bare / "pytorch_model.bin").touch()
    assert message(bare).endswith(" It has pytorch_model.bin: convert to safetensors, other formats are not loaded.")
    (bare / "pytorch_model.bin").unlink()
    shutil.copyfile(tiny_softmax / "model.safetensors", bare / "model.safetensors")
    assert message(bare).startswith(f"{bare}: its tokenizer cannot be loaded: ")


def test_a_model_that_the_backend_cannot_load(config_file, refused, tiny_softmax, wording):
    pytest.importorskip("torch")
    message = refused(4, "train", config_file(), "--platform", "cpu")
    wording(message)


def test_cuda_without_a_gpu(config_file, refused):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has an NVIDIA GPU")
    message = refused(4, "train", config_file(), "--platform", "cuda")
    assert "sees no NVIDIA GPU. Run: dualtune check-gpu, or train with --platform cpu" in message


# --- adapters and the disk -------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(config_file, dualtune_main, tmp_path):
    result = dualtune_main("train", config_file({"train.steps": 1}), *NUMPY)
    assert result.returncode == 0, result.stderr
    return tmp_path / "runs" / "a" / "adapter"


def test_a_damaged_adapter_is_refused_by_every_command(config_file, refused, dualtune_main, adapter, tmp_path):
    weights = adapter / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    out = tmp_path / "out"
    again = config_file({"adapter.init_from": adapter, "run.dir": tmp_path / "runs" / "b"}, "again.yaml")
    for args in (
        ["adapter", "convert", adapter, out, "--to", "mlx"],
        ["generate", "model", "--adapter", adapter, "--prompt", "x", *NUMPY],
        ["eval", config_file(), *NUMPY],
        ["train", again, *NUMPY],
    ):
        message = refused(6, *args)
        assert "adapter_model.safetensors was changed" in message and "Copy it again" in message
    report = dualtune_main("adapter", "inspect", adapter)
    assert (report.returncode, report.stderr) == (6, "")
    assert "PROBLEM: adapter_model.safetensors was changed" in report.stdout


def test_what_is_no_adapter(refused, adapter, tmp_path):
    for directory in (tmp_path / "nothing", tmp_path):
        for args in (["inspect", directory], ["convert", directory, tmp_path / "out", "--to", "peft"]):
            assert refused(6, "adapter", *args).startswith(f"{directory}: ")
    assert "already exists" in refused(2, "adapter", "convert", adapter, adapter.parent, "--to", "peft")


def test_an_adapter_of_another_model(refused, adapter, tmp_path, tiny_llama, wording):
    pytest.importorskip("torch")
    other = tmp_path / "other"
    write_tiny_llama(other, num_hidden_layers=1, vocab_size=262)
    for file in tiny_llama.glob("*token*"):
        shutil.copyfile(file, other / file.name)
    message = refused(2, "generate", other, "--adapter", adapter, "--prompt", "x", "--platform", "cpu")
    wording(message)


def test_places_that_cannot_be_written(config_file, refused, adapter, tmp_path, wording):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "run"
    message = refused(5, "train", config_file({"run.dir": below}), *NUMPY)
    wording(message)
    message = refused(5, "adapter", "convert", adapter, below, "--to", "mlx")
    wording(message)


def test_paths_that_cannot_be_looked_at(refused, monkeypatch, wording):
    name = "x" * 300
    wording(refused(5, "report", name))
    exists = Path.exists

    def forbid(path):
        if path.name == "lock":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", forbid)  # root may look at everything
    assert refused(5, "watch", "closed") == "closed/lock: Permission denied"


# --- real processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "changes", "message"),
    [
        (2, {"adapter.rank": 0}, "adapter.rank: got 0, must be >= 1"),
        (3, {"data.train": "no.jsonl"}, "no.jsonl: no such file or directory"),
        (4, {"model.name": "./nowhere"}, "model.name: there is no model directory nowhere"),
        (5, {"run.dir": "config.yaml/run"}, "run.dir: config.yaml/run cannot be written: Not a directory"),
        (6, {"adapter.init_from": "."}, ".: "),
        (
            7,
            {"train.learning_rate": 1e30, "train.steps": 9},
            "6 steps in a row had a loss or gradient that is not finite",
        ),
    ],
)
def test_exit_codes_of_processes(forked, config_file, tmp_path, code, changes, message):
    config_file(changes)
    result = forked("dualtune", "train", "config.yaml", *NUMPY, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert result.stderr.count("Error: ") == 1
    assert message in result.stderr.partition("Error: ")[2]
    assert "Traceback" not in result.stderr
    assert (tmp_path / "runs").exists() == (code == 7)
    assert not (tmp_path / "runs" / "a" / "adapter").exists()


@pytest.mark.parametrize(("platform", "module", "extra"), [("mlx", "mlx", "mlx"), ("cpu", "torch", "torch")])
def test_a_backend_that_is_not_installed_gives_the_line_that_installs_it(
    dualtune, config_file, tmp_path, platform, module, extra, wording
):
    (tmp_path / "stub" / module).mkdir(parents=True)
    error = f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')\n"
    (tmp_path / "stub" / module / "__init__.py").write_text(error)
    env = {"PYTHONPATH": str(tmp_path / "stub")}
    result = dualtune("train", config_file(), "--platform", platform, env=env)
    assert result.returncode == 4
    wording(result.stderr)


@pytest.mark.parametrize(
    ("name", "owner"), [("nobody/nothing", ""), ("nothing", " A hub id has an owner: OWNER/nothing.")]
)
def test_a_hub_model_while_offline_names_every_place_that_was_looked_at(dualtune, config_file, tmp_path, name, owner):
    file = config_file({"model.name": name})
    result = dualtune("train", file, *NUMPY, cwd=tmp_path, env={"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 4
    assert result.stderr.startswith(
        f"Error: model.name: '{name}' was not found. Looked for a directory {tmp_path}/{name}, "
        f"in the hub cache {tmp_path}/hf/hub, and on https://huggingface.co (LocalEntryNotFoundError: "
    )
    assert result.stderr.endswith(f").{owner} Give a directory, or download the model while online.\n")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()

"""What check-env says of packages, GPUs, Macs, disks, directories, models and keys. The machines are made up."""

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from packaging.requirements import Requirement

from dualtune.base.checks import Check, exit_code
from dualtune.doctor import check_env as environment
from dualtune.doctor import storage
from dualtune.doctor.check_env import TARGETS, check_environment, cuda_checks, metal_checks, suited_target
from dualtune.engine.card import card_of
from dualtune.engine.machine import GIB, Gpu, Surroundings
from dualtune.engine.machines import named
from dualtune.engine.problems import at_least, least_python, package_checks, requirements

H100, M4 = named("h100-80"), named("m4-32")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A hub cache and a working directory of the test's own, and no keys."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def free_gb(monkeypatch):
    """Pretend that every disk has so much room."""
    return lambda gb: monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: SimpleNamespace(free=gb * 10**9))


def levels(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.level for check in checks}


def only(checks: list[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


def with_gpu(*, capability="9.0", gb=86.0, cuda="13.0", torch="2.13.0+cu130", built="13.0"):
    gpu = Gpu("A GPU", int(gb * 1e9), int(gb * 1e9), capability)
    return replace(H100, gpus=[gpu], cuda=cuda, packages={"torch": torch} if torch else {}, torch_cuda=built)


# --- versions and packages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "least", "enough"),
    [("0.10", "0.7", True), ("13.0", "12.1", True), ("12.1", "12.1", True), ("12.0", "12.1", False),
     ("9.0", "10.0", False), ("2.13.0+cu130", "2.12", True), ("2.9.1", "2.10", False)],
)  # fmt: skip
def test_versions_are_compared_as_numbers(found, least, enough):
    assert at_least(found, least) is enough


@pytest.mark.parametrize(
    ("found", "level"),
    [("0.10", "ok"), ("0.7", "ok"), ("0.6.9", "fail"), ("1.0.dev20261101", "ok"), ("0.8+cu130", "ok"),
     ("unknown", "fail"), (None, "fail")],
)  # fmt: skip
def test_a_package_must_be_there_and_new_enough(found, level):
    (check,) = package_checks([Requirement("peft>=0.7")], "pip install x", {"peft": found} if found else {})
    assert check.level == level
    assert (check.fix is None) == (level == "ok")


def test_a_package_that_is_missing_or_old_comes_with_the_line_that_installs_it(wording):
    missing, old = package_checks(
        [Requirement("peft>=0.7"), Requirement("mlx>=1")], "pip install 'dualtune[mlx]'", {"mlx": "0.30"}
    )
    assert missing.fix == "pip install 'dualtune[mlx]'"
    wording(missing.found)
    wording(old.found)
    wording(old.fix)


@pytest.mark.parametrize(
    ("extra", "system", "brings", "not_"),
    [("torch", "Linux", {"torch", "accelerate", "bitsandbytes"}, {"mlx", "mlx-lm", "pytest", "datasets"}),
     ("torch", "Darwin", {"torch", "accelerate"}, {"bitsandbytes", "mlx"}),
     ("mlx", "Darwin", {"mlx", "mlx-lm"}, {"torch", "bitsandbytes", "pytest"}),
     ("mlx", "Linux", {"mlx", "mlx-lm"}, {"torch"})],
)  # fmt: skip
def test_what_is_needed_depends_on_extra_and_system(extra, system, brings, not_):
    names = [one.name for one in requirements(card_of(extra).package, system)]
    assert len(names) == len(set(names))
    assert {"transformers", "numpy", *brings} <= set(names)
    assert not not_ & set(names)


def test_least_versions_are_those_of_the_installed_metadata():
    stated = {str(Requirement(line).specifier) for line in metadata.requires("dualtune") if line.startswith("torch")}
    (torch,) = [one for one in requirements(card_of("torch").package, "Linux") if one.name == "torch"]
    assert {str(torch.specifier)} == stated
    assert str(least_python()) == metadata.metadata("dualtune")["Requires-Python"]


@pytest.mark.parametrize(("python", "level"), [("3.10.14", "fail"), ("3.11.0", "ok"), ("3.14.0rc1", "ok")])
def test_python_must_be_one_that_dualtune_runs_on(python, level):
    assert environment.python_check(python).level == level


# --- NVIDIA -----------------------------------------------------------------------------------------------------------


def test_a_machine_with_everything_passes_for_its_target():
    assert set(levels(cuda_checks(H100, TARGETS["h100"], card_of("torch"))).values()) == {"ok"}


@pytest.mark.parametrize(
    ("changes", "row", "level", "word"),
    [
        ({"cuda": "12.0", "built": "12.6"}, "CUDA of the driver", "fail", "12.1 is needed"),
        ({"cuda": "12.1", "built": "12.6"}, "CUDA of the driver", "ok", "12.1"),
        ({"cuda": "13.0"}, "CUDA of the driver", "ok", "13.0"),
        ({"cuda": "12.4", "built": "12.6"}, "CUDA of torch", "ok", "12.6"),  # within a major version
        ({"cuda": "12.9", "built": "13.0"}, "CUDA of torch", "fail", "built for CUDA 13.0"),
        ({"built": "none", "torch": "2.13.0+cpu"}, "CUDA of torch", "fail", "without CUDA"),
        ({"torch": None, "built": None}, "CUDA of torch", "skipped", "not installed"),
        ({"built": None}, "CUDA of torch", "skipped", "does not report it"),
        ({"capability": "7.0", "built": "13.0"}, "CUDA of torch", "fail", "compute capability 7.0"),
        ({"capability": "7.0", "built": "12.6"}, "CUDA of torch", "ok", "12.6"),
        ({"capability": "7.5", "built": "13.0"}, "CUDA of torch", "ok", "13.0"),
        ({"capability": "12.0", "built": "12.6"}, "CUDA of torch", "fail", "compute capability 12.0"),
        ({"capability": "12.0", "built": "12.8"}, "CUDA of torch", "ok", "12.8"),
        ({"capability": "6.1"}, "compute capability", "fail", "7.0 is needed"),
        ({"capability": "7.5"}, "compute capability", "advice", "float16"),
        ({"capability": "8.0"}, "compute capability", "ok", "8.0"),
        ({"capability": "10.0"}, "compute capability", "ok", "10.0"),
        ({"gb": 60}, "GPU memory", "ok", "60 GB"),
        ({"gb": 47}, "GPU memory", "fail", "at least 60"),
        ({"capability": "7.5"}, "flash attention", "advice", "compute capability 8.0"),
        ({"torch": "2.11.0"}, "flash attention", "advice", "torch 2.12"),
        ({}, "flash attention", "ok", "not used"),
    ],
)  # fmt: skip
def test_each_row_for_a_gpu(changes, row, level, word):
    check = only(cuda_checks(with_gpu(**changes), TARGETS["h100"], card_of("torch")), row)
    assert (check.level, word in check.found) == (level, True), check
    assert check.fix or level != "fail"


@pytest.mark.parametrize(
    ("changes", "older"),
    [({"cuda": "12.9"}, True), ({"capability": "7.0"}, True), ({"capability": "8.9"}, False)],
)
def test_a_torch_without_cuda_is_fixed_by_the_wheels_that_this_driver_and_gpu_can_run(changes, older):
    check = only(
        cuda_checks(with_gpu(torch="2.13.0+cpu", built="none", **changes), TARGETS["rtx"], card_of("torch")),
        "CUDA of torch",
    )
    assert check.level == "fail"
    assert ("whl/cu126" in check.fix) is older


@pytest.mark.parametrize(("gb", "level"), [(8.6, "fail"), (11.9, "fail"), (12.9, "advice"), (16.1, "ok"), (25.8, "ok")])
def test_an_rtx_card_is_wanted_with_16_gb_and_taken_with_12(gb, level):
    assert only(cuda_checks(with_gpu(gb=gb), TARGETS["rtx"], card_of("torch")), "GPU memory").level == level


def test_without_a_gpu_the_driver_s_words_are_the_only_row(wording):
    machine = replace(named("cpu-64"), gpu_problem="NVML Shared Library Not Found")
    (check,) = cuda_checks(machine, TARGETS["h100"], card_of("torch"))
    assert check.level == "fail"
    wording(check.found)
    assert "dualtune check-gpu" in check.fix


# --- Apple silicon ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "row", "level"),
    [
        ({}, "unified memory", "ok"),
        ({"memory_bytes": 16 * GIB}, "unified memory", "advice"),
        ({"memory_bytes": 8 * GIB}, "unified memory", "fail"),
        ({"macos": "14.0"}, "macOS", "ok"),
        ({"macos": "26.1"}, "macOS", "ok"),
        ({"macos": "13.7.8"}, "macOS", "fail"),
        ({"macos": None}, "macOS", "skipped"),
        ({"arch": "x86_64"}, "Apple silicon", "fail"),
        ({"system": "Linux"}, "Apple silicon", "fail"),
    ],
)
def test_each_row_for_a_mac(changes, row, level):
    assert only(metal_checks(replace(M4, **changes), TARGETS["m4"], card_of("mlx")), row).level == level


def test_a_python_under_rosetta_is_called_that():
    machine = replace(M4, arch="x86_64", surroundings=Surroundings(rosetta=True))
    (check,) = metal_checks(machine, TARGETS["m4"], card_of("mlx"))
    assert check.level == "fail" and "Rosetta" in check.found and "setup_m4.sh" in check.fix
    assert suited_target(machine) == "m4"


# --- the target -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target"),
    [("h100-80", "h100"), ("h200", "h100"), ("a100-80", "h100"), ("a100-40", "rtx"), ("rtx-5080-16", "rtx"),
     ("h100-mig-3g.40gb", "rtx"), ("m1-8", "m4"), ("m4-max-128", "m4"), ("cpu-16", "cpu")],
)  # fmt: skip
def test_auto_takes_the_target_that_suits_the_machine(name, target):
    assert suited_target(named(name)) == target


@pytest.mark.parametrize("target", TARGETS)
def test_a_foreign_machine_fails_and_cpu_takes_all(home, target):
    wrong = {"h100": "m4-32", "rtx": "cpu-64", "m4": "h100-80"}
    if target == "cpu":
        rows = check_environment(target, named("cpu-64"), None)
        assert only(rows, "memory").level == "ok"
    else:
        rows = check_environment(target, named(wrong[target]), None)
        assert exit_code(rows) == 4
        assert levels(rows)["Apple silicon" if target == "m4" else "GPU"] == "fail"


# --- disk and directories ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "gb", "level"),
    [("h100", 30, "ok"), ("h100", 29, "fail"), ("m4", 20, "ok"), ("m4", 19, "fail"), ("cpu", 4, "fail")],
)
def test_there_must_be_room_for_the_model(home, free_gb, target, gb, level):
    free_gb(gb)
    check = only(storage.disk_checks(home, TARGETS[target].download_gb), "disk")
    assert check.level == level and str(home / "hub") in check.found


def test_a_model_that_is_here_needs_no_room(home, free_gb, make_config, tiny_llama):
    free_gb(6)
    config = make_config("x.jsonl", {"run.dir": str(home / "run")})
    with_it = environment.place_checks(TARGETS["h100"], config)
    without = environment.place_checks(TARGETS["h100"], None)
    assert (only(with_it, "disk").level, only(without, "disk").level) == ("ok", "fail")


def test_two_disks_are_two_rows(home, free_gb, monkeypatch):
    free_gb(10)
    monkeypatch.setattr(storage, "_disk", str)
    assert levels(storage.disk_checks(home / "runs", 30)) == {"disk for models": "fail", "disk for runs": "ok"}


def test_a_directory_is_tried_by_writing_to_it_and_nothing_is_left(home):
    before = sorted(home.iterdir())
    rows = storage.directory_checks(home / "runs" / "first")
    assert set(levels(rows).values()) == {"ok"} and len(rows) == 4
    assert f"will be created in {home}" in only(rows, "run directory").found
    assert only(storage.directory_checks(Path()), "run directory").found == "."
    assert sorted(home.iterdir()) == before


def test_a_directory_that_cannot_be_written_is_found(home):
    (home / "runs").write_text("a file where a directory should be")
    check = only(storage.directory_checks(home / "runs" / "first"), "run directory")
    assert check.level == "fail" and "set run.dir" in check.fix and str(home / "runs") in check.found


# --- data, model, keys ------------------------------------------------------------------------------------------------


def test_data_are_found_missing_or_left_to_the_hub(home, make_config, write_rows, qa_rows):
    here = write_rows(qa_rows)
    config = make_config([str(here), "no/such.jsonl", "openai/gsm8k"], {"data.eval": "also/missing"})
    found = [(check.level, check.found.split(":")[0].split(";")[0]) for check in storage.data_checks(config)]
    assert found == [
        ("ok", str(here)),
        ("fail", str(home / "no" / "such.jsonl")),
        ("skipped", "openai/gsm8k"),
        ("skipped", "also/missing"),
    ]


def cached(home, name: str, *files: str, refers_to=()) -> None:
    """Put a model into the hub's cache, as a download leaves it: files, and an index that names shards."""
    root = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    for file in files:
        (snapshot / file).write_text("{}")
    if refers_to:
        index = {"weight_map": {f"layer.{i}": shard for i, shard in enumerate(refers_to)}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("files", "refers_to", "expected", "word"),
    [
        (["config.json", "tokenizer.json", "model.safetensors"], [], {"model": "ok", "tokenizer": "ok"}, ""),
        (["config.json", "tokenizer.json", "a.safetensors", "b.safetensors"], ["a.safetensors", "b.safetensors"],
         {"model": "ok", "tokenizer": "ok"}, ""),
        (["config.json", "tokenizer.json", "a.safetensors"], ["a.safetensors", "b.safetensors"],
         {"model": "fail", "tokenizer": "ok"}, "lacks b.safetensors"),
        (["config.json", "tokenizer.json"], [], {"model": "fail", "tokenizer": "ok"}, "lacks model.safetensors"),
        (["tokenizer.json", "model.safetensors"], [], {"model": "fail", "tokenizer": "ok"}, "lacks config.json"),
        (["config.json", "model.safetensors"], [], {"model": "ok", "tokenizer": "fail"}, "has none of tokenizer.json"),
        (["config.json", "tokenizer.json", "model.safetensors.index.json"], [], {"model": "fail", "tokenizer": "ok"},
         "lacks a readable model.safetensors.index.json"),
    ],
)  # fmt: skip
def test_a_model_in_the_cache_is_whole_or_what_it_lacks_is_named(home, make_config, files, refers_to, expected, word):
    cached(home, "acme/tiny", *files, refers_to=refers_to)
    rows = storage.model_checks(make_config("x.jsonl", model="acme/tiny"))
    assert levels(rows) == expected
    failed = [check for check in rows if check.level == "fail"]
    assert all(word in check.found and check.fix == "hf download acme/tiny" for check in failed)


def test_a_model_with_random_weights_needs_none(home, make_config):
    cached(home, "acme/tiny", "config.json", "tokenizer.json")
    config = make_config("x.jsonl", {"model.init": "random"}, model="acme/tiny")
    assert set(levels(storage.model_checks(config)).values()) == {"ok"}


def test_a_model_that_is_not_here_is_advice_online_and_a_failure_offline(home, make_config, monkeypatch):
    config = make_config("x.jsonl", model="acme/absent")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (online,) = storage.model_checks(config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (offline,) = storage.model_checks(config)
    assert (online.level, offline.level) == ("advice", "fail")
    assert online.fix == "hf download acme/absent" and offline.fix == f"HF_HUB_OFFLINE=0 {online.fix}"


def test_a_model_directory_that_is_not_there_is_a_failure(home, make_config):
    (check,) = storage.model_checks(make_config("x.jsonl", model=str(home / "nowhere")))
    assert check.level == "fail" and str(home / "nowhere") in check.found


def test_the_hub_token_is_named_and_never_shown(home, monkeypatch):
    secret = "hf_" + "a1B2" * 9
    monkeypatch.setattr("huggingface_hub.get_token", lambda: secret)
    check = storage.hub_token(download=True)
    assert (check.level, check.found) == ("ok", "set")
    assert secret not in str(check)


@pytest.mark.parametrize(("download", "level"), [(True, "advice"), (False, "ok")])
def test_a_missing_token_is_advice_only_where_a_model_is_to_be_downloaded(home, download, level):
    assert storage.hub_token(download=download).level == level


# --- dualtune check-env -----------------------------------------------------------------------------------------------


def test_the_command_prints_the_rows_and_ends_with_their_code(home, dualtune_main, monkeypatch):
    monkeypatch.setattr("dualtune.engine.detect.detect", lambda: named("cpu-64"))
    good, bad = dualtune_main("check-env"), dualtune_main("check-env", "--for", "h100", "--json")
    assert (good.returncode, bad.returncode) == (0, 4)
    assert good.stdout.splitlines()[-1] == "for cpu: everything needed is here"
    report = json.loads(bad.stdout)
    assert (report["ok"], report["for"]) == (False, "h100")
    rows = {check["name"]: check for check in report["checks"]}
    assert rows["GPU"]["level"] == "fail" and rows["GPU"]["fix"] and rows["data and model"]["level"] == "skipped"


def test_the_command_looks_for_what_a_config_names(home, dualtune_main, tiny_llama, write_rows, qa_rows):
    data = write_rows(qa_rows)
    config = home / "config.yaml"
    text = f"model: {{name: {tiny_llama}}}\ndata: {{train: {data}}}\nrun: {{dir: {home}/run}}\n"
    config.write_text(text)
    good = json.loads(dualtune_main("check-env", "--for", "cpu", "--config", config, "--json").stdout)
    assert {"data", "model", "tokenizer"} <= {check["name"] for check in good["checks"]} and good["ok"]
    config.write_text(text.replace(str(data), "gone.jsonl"))
    bad = dualtune_main("check-env", "--for", "cpu", "--config", config)
    assert bad.returncode == 4 and "gone.jsonl: no such file" in bad.stdout


def test_a_broken_config_ends_with_2(home, dualtune_main):
    (home / "config.yaml").write_text("model: {nam: x}\n")
    assert dualtune_main("check-env", "--config", home / "config.yaml").returncode == 2


def test_the_choices_of_the_command_are_the_targets():
    from dualtune.cli.check_env import KINDS

    assert set(KINDS) == {"auto", *TARGETS}


def test_it_imports_no_framework(python, home):
    code = (
        "import sys; sys.argv = ['dualtune', 'check-env', '--json']\n"
        "import atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from dualtune.cli.main import main; main()"
    )
    imported = set(python("-c", code).stderr.split())
    assert "dualtune.doctor.check_env" in imported
    assert not {"torch", "mlx", "transformers"} & imported

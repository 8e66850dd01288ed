"""`dualtune check-gpu` and DUALTUNE_DEVICE on the command line."""

import json
from pathlib import Path

import pytest

from dualtune.engine.machines import MACHINES

CONFIGS = Path(__file__).parents[2] / "configs"
FRAMEWORKS = {"torch", "mlx", "transformers", "numpy"}


def test_the_exit_code_is_the_verdict_in_words_and_in_json(dualtune_main):
    for name, code in (("h100-80", 0), ("t4", 0), ("m4-32", 0), ("m1-8", 4), ("cpu-64", 4)):
        plain = dualtune_main("check-gpu", "--machine", name)
        report = dualtune_main("check-gpu", "--machine", name, "--json")
        assert (plain.returncode, report.returncode, plain.stderr) == (code, code, "")
        found = json.loads(report.stdout)
        assert found["ok"] == (code == 0)
        assert plain.stdout.splitlines()[-1] == f"verdict: {'ok' if code == 0 else 'not ok'}: {found['verdict']}"
        assert found["machine"]["cpu"] == MACHINES[name].cpu


def test_the_verdict_gives_its_reason_what_fits_and_where_to_begin(dualtune_main):
    found = json.loads(dualtune_main("check-gpu", "--machine", "rtx-5080-16", "--json").stdout)
    assert found["verdict"].startswith(
        "NVIDIA GeForce RTX 5080 with 17.1 GB is low on memory for models of 7B: they fit with documents up to 2,816 "
        "tokens; QLoRA of Qwen/Qwen3-8B fits, with documents up to "
    )
    assert found["verdict"].endswith(" tokens. Start with configs/rtx_16gb.yaml")


def test_the_memory_of_the_largest_model_is_given_by_part(dualtune_main):
    largest = json.loads(dualtune_main("check-gpu", "--machine", "l4", "--json").stdout)["largest_model"]
    parts = {part["name"]: part["bytes"] for part in largest["estimate"]["parts"]}
    assert {"weights", "adapter", "optimizer", "activations"} < parts.keys()
    assert sum(parts.values()) == largest["total_bytes"]


@pytest.mark.parametrize(
    ("machine", "size", "code", "words"),
    [
        ("t4", "12GB", 0, "has 14.5 GiB (15.0 GiB on Tesla T4, less 0.5 GiB for driver and screen): it fits"),
        ("t4", "15GB", 0, "a run of 15GB needs 14.0 GiB, has 14.5 GiB"),
        ("t4", "16GB", 4, "needs 14.9 GiB, has 14.5 GiB"),
        ("h100-80", "79 GiB", 0, "needs 79.0 GiB, has 79.1 GiB"),
        ("h100-80", "80 GiB", 4, "needs 80.0 GiB, has 79.1 GiB"),
        ("m1-8", "5GB", 0, "it fits"),
        ("m1-8", "6GB", 4, "it does not fit"),
        ("p100", "2GB", 4, "has 0 B (there is no GPU that it could use)"),
        ("cpu-256", "2GB", 4, "has 0 B (there is no GPU that it could use)"),
    ],
)  # fmt: skip
def test_asked_for_memory_that_alone_decides(dualtune_main, machine, size, code, words):
    result = dualtune_main("check-gpu", "--machine", machine, "--require-memory", size)
    assert (result.returncode, words in result.stdout) == (code, True)


@pytest.mark.parametrize(
    ("machine", "config", "code"),
    [
        ("h100-80", "training_config_h100", 0), ("a100-40", "training_config_h100", 0), ("t4", "rtx_16gb", 0),
        ("rtx-4060-8", "training_config_h100", 4), ("l4", "rtx_24gb", 0), ("m1-max-64", "training_config_m4", 0),
        ("m1-8", "lora_chat", 0), ("l4", "training_config_m4", 0),
    ],
)  # fmt: skip
def test_asked_for_a_config_that_alone_decides(dualtune_main, machine, config, code):
    result = dualtune_main("check-gpu", "--machine", machine, "--for", CONFIGS / f"{config}.yaml", "--json")
    question = json.loads(result.stdout)["question"]
    assert (result.returncode, question["fits"]) == (code, code == 0)
    assert (question["need_bytes"] <= question["budget"]["bytes"]) == question["fits"]
    assert question["fits"] or "--set" in question["fix"]


def test_a_model_on_this_machine_is_asked_for_too(dualtune_main, config_for):
    result = dualtune_main("check-gpu", "--machine", "t4", "--for", config_for())
    assert result.returncode == 0 and "it fits" in result.stdout


@pytest.fixture
def config_for(tmp_path, tiny_llama):
    def write(**model):
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps({"model": {"name": str(tiny_llama)} | model, "data": {"train": "a.jsonl"}}))
        return path

    return write


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--require-memory", "12"], 2, "--require-memory: got '12', must be a size such as 12GB"),
        (["--require-memory", "auto"], 2, "must be a size"),
        (["--require-memory", "12GB", "--for", "a.yaml"], 2, "Give --require-memory or --for, not both"),
        (["--machine", "h100-8"], 2, "Did you mean 'h100-80'?"),
        (["--machine", "t4", "--probe"], 2, "--probe works only on this machine"),
        (["--machine", "t4", "--for", "absent.yaml"], 2, "absent.yaml"),
        (["--machine", "m4-32", "--for", CONFIGS / "training_config_h100.yaml"], 2, "model.quantization: got 'nf4'"),
    ],
)
def test_wrong_usage_is_exit_code_2(dualtune_main, args, code, words):
    result = dualtune_main("check-gpu", *args)
    assert (result.returncode, words in result.stderr) == (code, True)


def test_a_model_of_unknown_shape_cannot_be_judged(dualtune_main, config_for, wording):
    result = dualtune_main("check-gpu", "--machine", "t4", "--for", config_for(name="nobody/knows-this"))
    assert result.returncode == 4
    wording(result.stderr)


# --- this machine ----------------------------------------------------------------------------------------------------


def test_no_framework_is_imported(python):
    code = (
        "import sys; from dualtune.cli.main import main; sys.argv = ['dualtune', 'check-gpu', '--json']\n"
        "try: main()\nexcept SystemExit: print('\\n', *sys.modules)"
    )
    loaded = set(python("-c", code).stdout.splitlines()[-1].split())
    assert "dualtune.doctor.check_gpu" in loaded
    assert not FRAMEWORKS & loaded


def test_a_probe_multiplies_matrices_on_this_machine(dualtune_main, open_backend):
    open_backend("torch")
    result = dualtune_main("check-gpu", "--probe", "--json")
    row = json.loads(result.stdout)["checks"][-1]
    assert (row["name"], row["level"]) == ("probe", "ok")
    assert "multiplied two 1024 x 1024 matrices on " in row["found"]


def test_a_probe_that_fails_decides_even_where_the_memory_fits(dualtune_main, monkeypatch, wording):
    class Broken:
        def devices(self):
            raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr("dualtune.doctor.check_gpu.open_backend", lambda choice: Broken())
    monkeypatch.setattr("dualtune.engine.detect.detect", lambda: MACHINES["h100-80"])
    result = dualtune_main("check-gpu", "--probe", "--require-memory", "1GB", "--json")
    row = json.loads(result.stdout)["checks"][-1]
    assert result.returncode == 4
    assert row["level"] == "fail"
    wording(row["found"])


@pytest.mark.parametrize(
    ("device", "words"),
    [("tpu", "got 'tpu', allowed: auto, mlx"), ("cuda:7", "cuda:7: as requested"), ("numpy", "numpy: as requested")],
)
def test_the_platform_s_default_is_dualtune_device(dualtune_main, monkeypatch, config_for, device, words):
    monkeypatch.setenv("DUALTUNE_DEVICE", device)
    result = dualtune_main("train", config_for(), "--dry-run")
    assert words in result.stdout + result.stderr


def test_the_platform_that_is_named_wins_over_dualtune_device(dualtune_main, monkeypatch, config_for, wording):
    monkeypatch.setenv("DUALTUNE_DEVICE", "tpu")
    result = dualtune_main("train", config_for(), "--dry-run", "--platform", "numpy")
    wording(result.stdout)

"""What the checking commands do not import: torch and transformers take seconds, and nothing here needs them."""

import json

import pytest

HEAVY = ("torch", "transformers", "accelerate", "bitsandbytes", "mlx")
PROGRAM = """
import sys
sys.argv[0] = "dualtune"
from dualtune.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
found = sorted({{name.partition(".")[0] for name in sys.modules}} & {{*{heavy!r}}})
assert found == [], found
"""


@pytest.fixture
def config_file(tmp_path, tiny_llama, write_rows):
    data = write_rows([{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes."}]}
                       for i in range(20)])  # fmt: skip
    settings = {"model": {"name": str(tiny_llama)}, "data": {"train": str(data), "max_length": 64, "eval": 0},
                "adapter": {"targets": "all-linear"}, "run": {"dir": str(tmp_path / "run")}}  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    "arguments",
    [("check-config", "--platform", "cpu"), ("check-config", "--machine", "h100-80"), ("preview",), ("check-data",)],
)  # fmt: skip
def test_checking_imports_no_framework(python, config_file, arguments):
    command, *options = arguments
    if "cpu" in options:
        pytest.importorskip("torch")
    result = python("-c", PROGRAM.format(heavy=HEAVY), command, config_file, *options)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), ("check-gpu",), ("check-gpu", "--help")])
def test_help_and_the_look_at_a_machine_import_no_framework(python, arguments):
    """They read every backend's card."""
    program = PROGRAM.replace("assert not end.code, end.code", "assert end.code in (None, 0, 4), end.code")
    result = python("-c", program.format(heavy=HEAVY), *arguments)
    assert result.returncode == 0, result.stdout + result.stderr


BROKEN = {
    "config": ({"adapter": {"rank": 0}}, 2),
    "value of the backend": ({"model": {"kernels": "graph"}}, 2),
    "data": ({"data": {"train": "nowhere.jsonl"}}, 3),
    "row": ({"data": {"train": "bad.jsonl"}}, 3),
    "model": ({"model": {"name": "./nowhere"}}, 4),
    "steps": ({"train": {"steps": 4, "warmup": 9}}, 2),
    "memory": ({"memory": {"limit": "1MB"}}, 2),
    "run directory": ({"run": {"dir": "bad.jsonl"}}, 2),
    "disk": ({"adapter": {"rank": 10**11, "alpha": 1}}, 5),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_error_of_a_run_comes_before_the_framework_is_imported(python, config_file, tmp_path, what):
    pytest.importorskip("torch")
    (tmp_path / "bad.jsonl").write_text('{"messages": 1}\n')
    changes, code = BROKEN[what]
    settings = json.loads(config_file.read_text())
    for section, values in changes.items():
        settings[section] = settings.get(section, {}) | values
    config_file.write_text(json.dumps(settings))
    program = PROGRAM.replace("assert not end.code, end.code", f"assert end.code == {code}, end.code")
    result = python("-c", program.format(heavy=HEAVY), "train", config_file, "--platform", "cpu", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_finished_run_imports_no_framework(python, config_file, dualtune_main, tmp_path):
    pytest.importorskip("torch")
    settings = json.loads(config_file.read_text()) | {"train": {"steps": 1}}
    config_file.write_text(json.dumps(settings))
    assert dualtune_main("train", config_file, "--platform", "cpu").returncode == 0
    result = python("-c", PROGRAM.format(heavy=HEAVY), "train", config_file, "--platform", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "finished    this run has already ended, after 1 steps" in result.stdout


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_a_model_that_is_not_there_is_told_before_the_framework_is_imported(python, tmp_path, command):
    pytest.importorskip("torch")
    program = PROGRAM.replace("assert not end.code, end.code", "assert end.code == 4, end.code")
    options = ["--prompt", "Hello"] if command == "generate" else []
    place = tmp_path / "nowhere"
    result = python("-c", program.format(heavy=HEAVY), command, place, *options, "--platform", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr

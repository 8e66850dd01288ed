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

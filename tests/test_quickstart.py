"""docs/TRAINING_QUICKSTART.md, followed: its commands in their order, with the demo's model in place of a download."""

import json
import re
import runpy
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

import dualtune
from dualtune.config import load_config
from dualtune.config.render import to_yaml

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "TRAINING_QUICKSTART.md").read_text(encoding="utf-8")
MODEL = "mistralai/Mistral-7B-Instruct-v0.3"
STAND_IN = Path(dualtune.__file__).parent / "demo" / "model"
SMALLER = (
    "train.steps=3", "train.documents_per_step=4", "train.micro_batch_tokens=512", "data.max_length=256",
    "data.eval=0.01", "model.dtype=float32", "model.quantization=none", "run.dir=runs/first",
)  # fmt: skip
# Lines that install, change the shell, or begin and end processes in the background.
NOT_RUN = ("git", "./setup_m4.sh", "scripts/setup_cuda.sh", "source", "make", "tail", "nohup", "kill")
MAY_LACK = ("check-gpu", "check-env")  # end with 4 on a machine without an accelerator


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def lines() -> list[list[str]]:
    """The words of every shell line, in the order of the page."""
    return [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture
def follow(dualtune_main, tmp_path, monkeypatch):
    """Run a `dualtune` line in a directory of its own. A config that it writes is made small before it is used."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(words: list[str]) -> None:
        words = [str(STAND_IN) if word == MODEL else word for word in words[1:]]
        words, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, None)
        result = dualtune_main(*words)
        assert result.returncode in ((0, 4) if words[0] in MAY_LACK else (0,)), result.stdout + result.stderr
        if target:
            Path(target).write_text(result.stdout, encoding="utf-8")
            small = load_config(target, [*SMALLER, f"model.name={STAND_IN}"])
            Path(target).write_text(to_yaml(small), encoding="utf-8")

    return run


def test_each_shell_line_is_run_or_known_not_to_be():
    assert {words[0] for words in lines()} == {"dualtune", "touch", *NOT_RUN}


@pytest.mark.slow
def test_the_page_can_be_followed_from_top_to_bottom(follow, tmp_path):
    if not any(map(find_spec, ("torch", "mlx"))):
        pytest.skip("neither torch nor MLX is installed")
    for words in lines():
        if words[0] == "dualtune":
            follow(words)
        elif words[0] == "touch":
            Path(words[1]).touch()
    run_dir = tmp_path / "runs" / "first"
    named = re.findall(r"^\| (`.+?) \| ", PAGE[PAGE.index("| in `runs/first`") :], re.M)
    for name in re.findall(r"`([^`]+)`", " ".join(named)):
        assert (run_dir / name).exists(), name
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    for block in blocks("python"):
        _run_python(block)


def test_the_row_of_the_page_is_one_that_can_be_trained_on(dualtune_main, tmp_path):
    (row,) = blocks("json")
    (tmp_path / "train.jsonl").write_text(row, encoding="utf-8")
    assert dualtune_main("check-data", tmp_path / "train.jsonl").returncode == 0


def _run_python(block: str) -> None:
    """A piece of the page's Python, where what it imports is installed. It ends with a model that has the adapter."""
    if all(map(find_spec, re.findall(r"\w+", re.search(r"^import (.+)$", block, re.M)[1]))):
        Path("block.py").write_text(block.replace(MODEL, str(STAND_IN)), encoding="utf-8")
        assert "lora" in str(runpy.run_path("block.py")["model"]).lower()

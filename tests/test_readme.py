"""README.md, followed: its commands in their order and its Python, with the demo's model in place of a download."""

import io
import re
import runpy
import shlex
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import dualtune
from dualtune.config import load_config
from dualtune.config.render import to_yaml
from dualtune.engine.machine import budget
from dualtune.engine.machines import named
from dualtune.engine.memory.plan import plan_of
from dualtune.engine.memory.shapes import KNOWN, decoder_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "Qwen/Qwen3-0.6B"
STAND_IN = Path(dualtune.__file__).parent / "demo" / "model"
DATA = Path(dualtune.__file__).parent / "demo" / "data" / "heldout.jsonl"
SMALLER = (
    f"model.name={STAND_IN}", f"data.train={DATA}", "data.eval=0.1", "data.max_length=256", "model.dtype=float32",
    "train.steps=2", "train.documents_per_step=4", "train.warmup=0", "run.dir=runs/first",
)  # fmt: skip
# By a word of the command: the bfloat16 of so small a model is too coarse for two steps of training.
CHANGED = {"export": ("--dtype", "float32")}
MAY_LACK = ("check-gpu",)  # ends with 4 on a machine without an accelerator


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def commands() -> list[list[str]]:
    """The words of every shell line, in the order of the page."""
    return [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DUALTUNE_DEVICE", "cpu")
    monkeypatch.setattr("sys.stdin", io.StringIO("Why?\n"))  # what is typed to `dualtune chat`
    return tmp_path


def test_the_page_shows_commands_of_dualtune_and_the_demo():
    """`dualtune` is found once the environment that make has made is active."""
    assert [words[0] for words in commands()][:4] == ["make", "make", "source", "dualtune"]
    assert {words[0] for words in commands()} == {"make", "source", "dualtune"}
    assert [words for words in commands() if words[0] == "make"] == [["make", "demo"], ["make", "demo-real"]]


def test_the_versions_of_the_stack_are_those_that_are_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    required = " ".join([*project["dependencies"], *extras["torch"], *extras["mlx"]])
    named = re.findall(r"\b(mlx|mlx-lm|torch|peft|transformers) (\d[\d.]*\d)", PAGE)
    assert len(named) == 5 and all(f"{name}>={version}" in required for name, version in named)


def test_what_qlora_takes_is_what_the_planner_says():
    (block,) = blocks("yaml")
    config = load_config(yaml.safe_load(block))
    has = budget(named("rtx-5080-16"))
    plan = plan_of(config, decoder_of(KNOWN[config.model.name]), "torch", "cuda", has)
    assert f"[{round(plan.estimate.total_bytes / 2**30)} GiB]" in PAGE and plan.fits and plan.time == 1


@pytest.mark.parametrize(("target", "options"), [("demo", ["--demo"]), ("demo-real", ["--demo", "smollm2"])])
def test_make_demo_is_a_command_of_its_own(target, options):
    """`tests/cli/test_demo.py` runs them; what make does before is to install."""
    made = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert made.splitlines()[-1].split() == [".venv/bin/dualtune", "train", *options]


@pytest.mark.slow
def test_the_commands_work_in_their_order(dualtune_main, elsewhere):
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    for _, *words in [words for words in commands() if words[0] == "dualtune"]:
        words = [str(STAND_IN) if word == MODEL else word for word in words]
        words, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, None)
        result = dualtune_main(*words, *(each for word in words for each in CHANGED.get(word, ())))
        assert result.returncode in ((0, 4) if words[0] in MAY_LACK else (0,)), (words, result.stdout + result.stderr)
        if target:
            Path(target).write_text(result.stdout, encoding="utf-8")
            Path(target).write_text(to_yaml(load_config(target, SMALLER)), encoding="utf-8")
    assert (elsewhere / "runs/first/adapter/adapter_model.safetensors").is_file()
    for line in blocks("python")[1].splitlines():
        _load_adapter(line)


def test_the_library_is_used_as_the_page_shows(elsewhere, open_backend):
    open_backend("torch")
    config = load_config({"model": {"name": str(STAND_IN)}, "data": {"train": str(DATA)}}, SMALLER)
    Path("config.yaml").write_text(to_yaml(config), encoding="utf-8")
    (program,) = (block for block in blocks("python") if "load_config" in block)
    Path("program.py").write_text(program.replace("train.steps=50", "train.steps=1"), encoding="utf-8")
    names = runpy.run_path("program.py")
    assert names["result"].adapter_dir.is_dir() and names["result"].num_steps == 1


def _load_adapter(line: str) -> None:
    """One line for each stack. It gives a model that has the adapter."""
    library = line.partition(".")[0]
    if find_spec(library) is not None:
        base = f"import transformers\nmodel = transformers.AutoModelForCausalLM.from_pretrained({str(STAND_IN)!r})\n"
        program = f"import {library}\n{base if library == 'peft' else ''}made = {line}\n".replace(MODEL, str(STAND_IN))
        Path("load.py").write_text(program, encoding="utf-8")
        made = runpy.run_path("load.py")["made"]
        assert "lora" in str(made[0] if library == "mlx_lm" else made).lower()

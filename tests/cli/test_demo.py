"""The demo, as a newcomer runs it: a real process, the shipped model and data, each backend."""

import hashlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

import dualtune
from dualtune.base import faults
from dualtune.base.errors import Preempted
from dualtune.cli.demo import SMOLLM2, demo_config
from dualtune.cli.main import cli
from dualtune.config import parse_config
from dualtune.data.documents import Data
from dualtune.show.run import run
from dualtune.train.evaluation import exact_match
from dualtune.train.generation.inference import load_model
from dualtune.train.prepare import prepare
from dualtune.train.rl.sql import SqlJudge

ASSETS = Path(dualtune.__file__).parent / "demo"
REAL = ASSETS / "smollm2"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What the demo says on a platform, and where it ran, once."""

    @cache
    def run_it(platform: str) -> tuple[str, Path]:
        package = {"cpu": "torch"}.get(platform, platform)
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        home = tmp_path_factory.mktemp("demo")
        command = [sys.executable, "-m", "dualtune.cli.main", "train", "--demo", "--platform", platform]
        return subprocess.run(command, cwd=home, capture_output=True, text=True, check=True).stdout, home

    return run_it


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", pytest.param("mlx", marks=pytest.mark.long)])
def test_the_demo_teaches_what_it_says(demo, platform):
    out, home = demo(platform)
    before, after = re.search(r"exact match on \d+ held-out rows: ([\d.]+)% before, ([\d.]+)% after", out).groups()
    assert float(before) <= 10
    assert float(after) >= 90
    assert (home / "runs/demo/adapter/adapter_model.safetensors").is_file()
    _, *following, empty, report = out[out.index("Next:") :].splitlines()
    assert (empty, report) == ("", "report      runs/demo/report.html")
    assert (home / "runs/demo/report.html").is_file()
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(home)}  # no virtual environment is active
    assert len(following) == 5
    for line in following[:3]:  # the last one waits for a model and data to be named
        result = subprocess.run(["bash", "-c", line], cwd=home, env=bare, capture_output=True, text=True, check=False)
        assert result.returncode == 0, (line, result.stderr)


def test_the_report_of_the_demo_opens_in_a_browser(demo):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium (Debian: chromium)")
    _, home = demo("cpu")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom",
               "--enable-logging=stderr", f"--user-data-dir={home / 'profile'}",
               (home / "runs/demo/report.html").as_uri()]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 'aria-label="Loss. loss: 80 points' in shown.stdout and "The run has learned" in shown.stdout
    assert ":CONSOLE" not in shown.stderr


def labels(lines: list[str]) -> list[str]:
    """The words that begin the lines, without counts: a terminal shows these in other columns.

    Without `tokenized`, which a run says only if no other one has tokenized the same rows before.
    """
    lines = [re.sub(r"^\S+Z  ", "", line) for line in lines]  # in a pipe, lines of a run begin with the time
    found = [re.sub(r"\d+", "N", line.split("  ")[0]) for line in lines if re.match(r"[a-zA-Z]", line)]
    return [label.removesuffix(" N/N") for label in found if label != "tokenized"]


def test_the_recording_says_what_the_demo_says_today(demo):
    """A recording of an older dualtune is not shown as today's. `tests/test_pictures.py` makes one (`-m long`)."""
    pytest.importorskip("termios", reason="a pseudo-terminal")
    recorder = runpy.run_path(str(ASSETS.parents[1] / "scripts" / "record_demo.py"))
    screen = recorder["Screen"]()
    screen.write("".join(text for _, text in recorder["events_of"](recorder["CAST"].read_text(encoding="utf-8"))))
    assert labels(demo("cpu")[0].splitlines()) == labels(screen.lines)


@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.long)])
def test_the_short_config_of_the_readme_learns_a_small_data_set(backend, open_backend, tmp_path):
    """320 short rows were two updates; every default is what a newcomer gets."""
    readme = (ASSETS.parents[1] / "README.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"A config can be three lines.*?```yaml\n(.*?)```", readme, re.S)
    places = {
        "model.name": ASSETS / "model",
        "model.quantization": "auto",
        "data.train": ASSETS / "data" / "train.jsonl",
        "run.dir": tmp_path / "a",
    }
    config = parse_config(text, overrides=[f"{key}={place}" for key, place in places.items()])
    backend = open_backend(backend)
    result = run(config, backend)
    assert result.num_steps >= 100 and result.eval_loss < result.eval_loss_before / 5
    held_out = Data(config).held_out_examples(prepare(config, backend).data.eval)
    tuned = load_model(backend, config.model.name, result.adapter_dir)
    assert exact_match(tuned, held_out, config.data.max_length) >= 0.5 and len(held_out) == 32


def test_the_demo_fits_into_a_megabyte():
    sizes = {path: path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()}
    real = sum(size for path, size in sizes.items() if REAL in path.parents)
    assert sum(sizes.values()) - real < 2**20 and real < 2**18


def test_no_held_out_row_is_trained_on():
    train, heldout = (
        [json.loads(line)["messages"] for line in (ASSETS / "data" / name).read_text().splitlines()]
        for name in ("train.jsonl", "heldout.jsonl")
    )
    assert len(heldout) >= 50
    seen = {message["content"] for row in train for message in row}
    assert not seen & {message["content"] for row in heldout for message in row}


def test_the_files_are_those_of_the_model_card():
    card = (ASSETS / "MODEL_CARD.md").read_text(encoding="utf-8")
    stated = dict(reversed(line.split("  ")) for line in re.findall(r"^[0-9a-f]{64}  \S+$", card, re.M))
    found = {name: hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() for name in stated}
    assert len(stated) == 6
    assert found == stated


# --- the real model ---------------------------------------------------------------------------------------------------


def test_the_questions_are_those_of_the_script_and_all_have_answers(tmp_path, monkeypatch):
    script = runpy.run_path(str(ASSETS.parents[1] / "scripts" / "make_demo_sql.py"))
    shutil.copy(REAL / "world.sql", tmp_path)
    monkeypatch.setitem(script["main"].__globals__, "FOLDER", tmp_path)
    script["main"]()
    questions = {}
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (REAL / name).read_bytes()
        rows = [json.loads(line)["messages"] for line in (REAL / name).read_text().splitlines()]
        questions[name] = {row[1]["content"] for row in rows}
        assert all(SqlJudge(REAL / "world.sql").answer(row[2]["content"]) for row in rows)
    assert not questions["train.jsonl"] & questions["heldout.jsonl"]


def test_the_demo_of_the_real_model_resumes_after_it_was_stopped(tmp_path, monkeypatch):
    """With the tiny model in its place: what is shown, what is counted, and where a demo that was stopped goes on."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    settings = [f"model.name={ASSETS / 'model'}", f"data.eval={tmp_path / 'four.jsonl'}", "train.steps=4"]
    settings += ["train.warmup=1", "train.documents_per_step=2"]
    command = ["train", "--demo", "smollm2", "--platform", "cpu", *(f"--set={setting}" for setting in settings)]
    rows = (REAL / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "four.jsonl").write_text("".join(rows[:4]), encoding="utf-8")

    with monkeypatch.context() as patch:
        patch.setattr(faults, "reach", lambda point: point == "step" and os.kill(os.getpid(), signal.SIGTERM))
        assert isinstance(CliRunner().invoke(cli, command).exception, Preempted)
    again = CliRunner().invoke(cli, command)
    assert again.exit_code == 0, again.output
    assert "after step" in again.output and not Path("runs/demo-smollm2-2").exists()
    for name in ("exact match", "queries that give the right rows"):
        assert re.search(rf"{name} on 4 held-out rows: [\d.]+% before, [\d.]+% after", again.output)
    assert again.output.count("  gives     ") == 4
    assert CliRunner().invoke(cli, [*command, "--dry-run"]).exit_code == 0
    assert demo_config(SMOLLM2, [settings[0]]).run.dir == "runs/demo-smollm2-2"

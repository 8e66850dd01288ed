"""What the tests of pages share: a browser that says what it shows, and two small runs."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dualtune.config import parse_config
from dualtune.show.run import run

SETTINGS = {
    "adapter.rank": 2, "adapter.dropout": 0, "adapter.targets": "all-linear", "data.eval": 0.25, "data.max_length": 64,
    "train.steps": 24, "train.documents_per_step": 4, "train.learning_rate": 1e-2, "run.eval_every": 8, "run.seed": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def train(tiny_softmax, open_backend, tmp_path_factory):
    """Train a run by its name, with changed settings, and return its directory."""
    home = tmp_path_factory.mktemp("runs")
    rows = [{"prompt": f"{i} plus {i}?", "completion": f"{2 * i}{'!' * (i % 5)}"} for i in range(16)]
    rows.append(rows[0])  # a duplicate
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def train_(name, **changes):
        settings = SETTINGS | {"model.name": tiny_softmax, "data.train": home / "train.jsonl", "run.dir": home / name}
        settings |= {key.replace("__", "."): value for key, value in changes.items()}
        lines = [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
        return run(parse_config("model: {}", overrides=lines), open_backend("numpy")).run_dir

    return train_


@pytest.fixture(scope="module")
def plain(train):
    return train("plain")


@pytest.fixture
def copy(plain, tmp_path):
    """A copy of the plain run that a test may damage."""
    return Path(shutil.copytree(plain, tmp_path / "copy"))


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Show pages in frames of given widths, run a script around them, and return (its answer, what the console said).

    `look` is JavaScript: a function `look(frames)`, whose promise is of JSON, and kept before the page has loaded.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium (Debian: chromium)")
    path = tmp_path_factory.mktemp("browser")

    def browse_(frames, look, *, is_dark=False):
        inner = "".join(
            f'<iframe width="{width}" height="900" style="border:0" srcdoc="{html.escape(page)}"></iframe>'
            for page, width in frames
        )
        script = (
            f"{look}\nonload = async () => document.title = "
            "JSON.stringify(await look([...document.querySelectorAll('iframe')]))"
        )
        (path / "around.html").write_text(f"<!doctype html><body>{inner}<script>{script}</script>", encoding="utf-8")
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom",
            f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", "--enable-logging=stderr",
            "--virtual-time-budget=10000",  # milliseconds of its clock, until which timers may run
            f"--user-data-dir={path / 'profile'}", (path / "around.html").as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=1800, check=True)
        said = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.S)[1])), said

    return browse_

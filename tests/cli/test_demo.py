"""The demo, as a newcomer runs it: a real process, the shipped model and data, each backend."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dualtune

ASSETS = Path(dualtune.__file__).parent / "demo"


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "package"), [("cpu", "torch"), ("mlx", "mlx")])
def test_the_demo_teaches_what_it_says(platform, package, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-m", "dualtune.cli.main", "train", "--demo", "--platform", platform]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    before, after = re.search(r"exact match on \d+ held-out rows: ([\d.]+)% before, ([\d.]+)% after", out).groups()
    assert float(before) <= 10
    assert float(after) >= 90
    assert (tmp_path / "runs/demo/adapter/adapter_model.safetensors").is_file()
    assert out[out.index("Next:") :].count("\n  dualtune ") == 3


def test_the_demo_fits_into_a_megabyte():
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) < 2**20


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

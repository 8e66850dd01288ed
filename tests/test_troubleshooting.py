"""docs/troubleshooting.md: what a mistake prints is found there, its exit codes are all, and its keys exist."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from dualtune.base import errors
from dualtune.config import parse_config
from dualtune.config.schema import sections
from dualtune.train.state.lock import Lock

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUICKSTART = ROOT / "docs" / "TRAINING_QUICKSTART.md"


@cache
def entries() -> dict[str, str]:
    """Heading of an entry (### …) -> what stands below it."""
    found = re.findall(r"^### (.+)\n((?:(?!^##).*\n)*)", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(dict(found)) == len(found), "a heading comes twice"
    return dict(found)


def texts_of(body: str) -> list[str]:
    return re.findall(r"^- `([^`]+)`$", body, re.M)


# --- what a user sees leads to its entry ------------------------------------------------------------------------------


def entries_for(output: str) -> set[str]:
    """The headings under which a screen's words are listed."""

    def is_in(text: str) -> bool:
        return re.search(".*?".join(re.escape(piece.strip()) for piece in text.split("…")), output) is not None

    return {heading for heading, body in entries().items() if any(is_in(text) for text in texts_of(body))}


@pytest.fixture
def mistake(dualtune_main, tiny_softmax, tmp_path, monkeypatch):
    """Train by a small config with one mistake in it; return (exit code, what was said)."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"prompt": "1?", "completion": "2"}\n' * 4, encoding="utf-8")
    Path("empty").mkdir()

    def make(changes: dict, *args: str):
        settings = {
            "model.name": tiny_softmax, "data.train": "train.jsonl", "data.eval": 0, "data.max_length": 64,
            "adapter.targets": "all-linear", "train.steps": 2, "train.warmup": 1, "run.dir": "runs/a",
        }  # fmt: skip
        lines = [f"{key}={json.dumps(value, default=str)}" for key, value in (settings | changes).items()]
        Path("config.yaml").write_text("model: {}\n", encoding="utf-8")
        overrides = [part for line in lines for part in ("--set", line)]
        result = dualtune_main("train", "config.yaml", *overrides, *(args or ("--platform", "numpy")))
        return result.returncode, result.stdout + result.stderr

    return make


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # the NaN is the point
@pytest.mark.parametrize(
    ("changes", "heading"),
    [
        ({"model.nmae": "x"}, "A key is not known, or its value is not allowed (exit 2)"),
        ({"train.steps": 0}, "A key is not known, or its value is not allowed (exit 2)"),
        ({"train.micro_batch_tokens": 8}, "Values that do not go together (exit 2)"),
        ({"memory.checkpointing": "full"}, "The backend does not honour a value (exit 2)"),
        ({"adapter.targets": ["q_prj"]}, "The adapter's targets do not exist (exit 2)"),
        ({"data.train": "nowhere.jsonl"}, "The file is not found (exit 3)"),
        ({"data.train": "odd.jsonl"}, "The layout is not known (exit 3)"),
        ({"data.train": "bad.jsonl"}, "Rows cannot be used (exit 3)"),
        ({"data.max_length": 2}, "No token would be trained on (exit 3)"),
        ({"model.name": "./nowhere"}, "The model is not found (exit 4)"),
        ({"model.name": "no-such/model"}, "The model is not found (exit 4)"),
        ({"model.name": "empty"}, "The model's directory is incomplete (exit 4)"),
        ({"run.dir": "config.yaml/runs"}, "The disk is full, or not ours (exit 5)"),
        ({"train.learning_rate": 1e300, "guards.nonfinite_limit": 1, "train.steps": 4}, "The loss is NaN (exit 7)"),
    ],
    ids=str,
)
def test_what_a_mistake_prints_is_found_under_its_heading(mistake, changes, heading):
    Path("odd.jsonl").write_text('{"question": "a"}\n', encoding="utf-8")
    Path("bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\nnot JSON\n', encoding="utf-8")
    code, said = mistake(changes)
    assert heading in entries_for(said), said
    assert heading.endswith(f"(exit {code})")


def test_a_gpu_that_is_not_there_is_found_under_its_heading(mistake, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, said = mistake({}, "--platform", "cuda")
    assert (code, entries_for(said)) == (4, {"CUDA is not available (exit 4)"})


@pytest.mark.parametrize(
    ("command", "heading"),
    [
        ("check-gpu --machine rtx-3060-12", "The machine has too little for models of 7B"),
        ("check-gpu --machine m4-16", "The machine has too little for models of 7B"),
        ("check-gpu --machine nowhere", "The platform or the machine is not known (exit 2)"),
        ("check-config configs/training_config_h100.yaml --machine rtx-3060-12", "The config does not fit (exit 4)"),
        ("check-config configs/rtx_16gb.yaml --set adapter.rnk=4", "A key is not known, or its value is not allowed"),
        ("eval configs/rtx_16gb.yaml --platform cpu", "The adapter is not found"),
        ("adapter inspect nowhere", "The adapter is not found"),
    ],
)
def test_what_a_command_prints_is_found_under_its_heading(dualtune_main, monkeypatch, command, heading):
    monkeypatch.chdir(ROOT)
    result = dualtune_main(*command.split())
    found = entries_for(result.stdout + result.stderr)
    assert any(entry.startswith(heading) for entry in found), result.stdout + result.stderr


def test_a_run_that_cannot_be_continued_is_found_under_its_heading(mistake):
    assert mistake({})[0] == 0
    code, said = mistake({"adapter.rank": 3})
    assert (code, entries_for(said)) == (2, {"The run cannot be resumed (exit 2)"})
    code, said = mistake({})
    assert (code, "There is nothing to do" in entries_for(said)) == (0, True)


def test_a_directory_in_use_and_damaged_checkpoints_are_found_under_their_headings(mistake):
    run_dir = Path("runs/a")
    run_dir.mkdir(parents=True)
    holder = Lock(run_dir)
    code, said = mistake({})
    assert (code, entries_for(said)) == (9, {"The run directory is in use (exit 9)"})
    holder.remove()
    assert mistake({})[0] == 0
    for checkpoint in (run_dir / "checkpoints").iterdir():
        (checkpoint / "state.json").unlink()
    code, said = mistake({})
    assert (code, entries_for(said)) == (6, {"No checkpoint is whole (exit 6)"})


# --- codes and keys ---------------------------------------------------------------------------------------------------


def test_the_table_of_exit_codes_is_complete():
    rows = re.findall(r"^\| (\d+) \| ", PAGE.read_text(encoding="utf-8"), re.M)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert [int(row) for row in rows] == sorted({0, 130, *(kind.exit_code for kind in kinds)})


@pytest.mark.parametrize("page", [PAGE, QUICKSTART], ids=lambda page: page.name)
def test_each_key_exists_and_takes_the_value_that_is_named(page):
    names = "|".join(sections())
    text = re.sub(r"^- `.*", "", page.read_text(encoding="utf-8"), flags=re.M)  # without what is printed
    settings = re.findall(
        rf"(?:`|--set )((?:{names})\.(?!csv\b)[a-z_]+)(?:(?:: |=)(\{{[^`]*\}}|[^`\s]+))?(?=`|\s)", text
    )
    assert len(settings) >= 5
    for key, value in settings:
        section, name = key.split(".")
        assert name in sections()[section].model_fields, key
        if value:
            wanted = [f"{key}={value}", *(["data.eval=0.1"] if key != "data.eval" else [])]
            parse_config("model: {name: a/b}\ndata: {train: train.jsonl}\n", overrides=wanted)

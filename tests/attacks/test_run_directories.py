"""A run directory from elsewhere: what is planted in it redirects no write, hangs nobody, and fills no memory."""

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest

from dualtune.base.errors import FormatError, Paused
from dualtune.base.files import open_own
from dualtune.show.run import run
from dualtune.train.state.listing import list_checkpoints, list_runs
from dualtune.train.state.metrics import MAX_BYTES, each_row, main_rows

FILES = (
    "lock", "metrics.jsonl", "memory.csv", "log.txt", "samples.jsonl", "track-mlflow.log", "track-mlflow.json",
    "predictions.jsonl", "report.html", "environment.json", "config.yaml", "chat_template.jinja",
)  # fmt: skip
SPARSE = 20 << 30


@pytest.fixture(autouse=True)
def _no_waiting():
    """Whatever waits for a FIFO fails, instead of waiting for ever."""

    def fail(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def paused(make_config, write_rows, qa_rows, tiny_softmax, open_backend, tmp_path):
    """A run that has stopped after step 2, and what else is at its side."""
    config = make_config(write_rows(qa_rows), {"run.save_every": 1}, tiny_softmax)
    with pytest.raises(Paused):
        run(config, open_backend("numpy"), pause_after=2)
    shutil.copy(tmp_path / "run" / "config.yaml", tmp_path / "config.yaml")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "key").write_text("my own secret")
    return tmp_path / "run"


@pytest.fixture
def resume(dualtune_main, paused):
    return lambda: dualtune_main("train", paused.parent / "config.yaml", "--platform", "numpy")


def plant(path, kind, mine):
    """Put a link or a FIFO in the place of a file or directory of the run."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": mine / "key", "new": mine / "new", "directory": mine, "device": "/dev/zero"}[kind])


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_run_that_the_tests_spoil_resumes(paused, resume):
    done = resume()
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in each_row(paused / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["link", "new", "fifo", "device"])
@pytest.mark.parametrize("name", FILES)
def test_a_planted_file_is_refused_and_nothing_is_written_through_it(paused, resume, name, kind):
    mine = paused.parent / "mine"
    plant(paused / name, kind, mine)
    before = contents(mine)
    done = resume()
    assert done.returncode == 6 and f"{paused / name}: is " in done.stderr and len(done.stderr.splitlines()) == 1
    assert contents(mine) == before == {"key": b"my own secret"}


@pytest.mark.parametrize("name", ["checkpoints", "adapter", "model"])
def test_a_directory_that_leads_elsewhere_is_refused(paused, resume, name):
    mine = paused.parent / "mine"
    plant(paused / name, "directory", mine)
    done = resume()
    assert done.returncode == 6 and f"{paused / name}: is a link" in done.stderr
    assert contents(mine) == {"key": b"my own secret"}


def test_the_directory_of_a_sweep_s_run_is_no_link(paused, dualtune_main):
    mine, sweep = paused.parent / "mine", paused.parent / "sweep"
    (mine / "key").unlink()
    words = ("sweep", paused.parent / "config.yaml", "--platform", "numpy", "--dir", sweep)
    words = (*words, "--set", "train.learning_rate=1e-3,1e-2")
    assert dualtune_main(*words).returncode == 0
    trial = next(path for path in sweep.iterdir() if path.is_dir())
    plant(trial, "directory", mine)
    done = dualtune_main(*words)
    assert done.returncode == 6 and "is a link" in done.stderr
    assert contents(mine) == {}


@pytest.mark.parametrize("kind", ["link", "fifo", "device"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "memory.csv", "lock", "samples.jsonl", "environment.json"])
def test_readers_neither_wait_nor_follow(paused, dualtune_main, name, kind):
    plant(paused / name, kind, paused.parent / "mine")
    listed = {each.path: each.state for each in list_runs(paused.parent)}
    assert listed[str(paused)] in ("unreadable", "killed", "failed", "preempted")
    for words in (("report",), ("checkpoints",), ("watch", "--once"), ("profile",)):
        done = dualtune_main(words[0], paused, *words[1:])
        assert done.returncode in (0, 6) and len(done.stderr.splitlines()) <= 1 and "secret" not in done.stdout
    if name == "metrics.jsonl":
        for words in ("report", "checkpoints"):
            assert dualtune_main(words, paused).returncode == 6


def test_a_lock_that_is_planted_after_the_check_is_not_opened(tmp_path):
    (tmp_path / "key").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "key")
    os.mkfifo(tmp_path / "fifo")
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND | os.O_CREAT):
        for name in ("link", "fifo"):
            with pytest.raises(FormatError):
                open_own(tmp_path / name, flags)
    os.close(open_own(tmp_path / "new", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "key").read_text() == "mine" and (tmp_path / "new").is_file()


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory():
    """At most a gigabyte more than now."""
    if sys.platform != "linux":
        pytest.skip("only Linux limits the address space")
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", ["metrics.jsonl", "memory.csv", "samples.jsonl", "config.yaml", "environment.json"])
def test_a_file_of_twenty_gigabytes_fills_no_memory(paused, dualtune_main, little_memory, name):
    os.truncate(paused / name, SPARSE) if (paused / name).exists() else (paused / name).touch()
    assert len(list_runs(paused.parent)) == 1
    for words in (("report",), ("checkpoints",), ("watch", "--once"), ("profile",), ("runs",)):
        done = dualtune_main(words[0], paused, *words[1:])
        assert done.returncode in (0, 6) and len(done.stderr.splitlines()) <= 1


def test_a_run_with_twenty_gigabytes_of_rows_is_refused_with_the_bound(paused, resume, dualtune_main, little_memory):
    os.truncate(paused / "metrics.jsonl", SPARSE)
    for done in (resume(), dualtune_main("checkpoints", paused)):
        assert done.returncode == 6 and f"{SPARSE} bytes, at most {MAX_BYTES}" in done.stderr
    assert [each.state for each in list_runs(paused.parent)] == ["unreadable"]


def test_a_template_of_twenty_gigabytes_is_refused(paused, dualtune_main, little_memory):
    template = paused.parent / "big.jinja"
    template.touch()
    os.truncate(template, SPARSE)
    words = ("--platform", "numpy", "--set", f"data.template={template}", "--set", f"run.dir={paused.parent / 'new'}")
    done = dualtune_main("train", paused.parent / "config.yaml", *words)
    assert done.returncode == 2 and f"{SPARSE} bytes, at most {1 << 20}" in done.stderr


def test_long_lines_are_left_out_of_a_file_that_is_too_long_to_parse(tmp_path):
    rows = [{"step": step, "loss": 1.0} for step in range(1, 700)]
    rows[100] = {"step": 100, "eval_loss": 0.5, "eval_targets": 3}
    lines = [json.dumps(row) for row in rows]
    lines.insert(500, json.dumps({"step": 1, "event": "x", "message": "x" * (1 << 21)}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = main_rows(tmp_path / "metrics.jsonl")
    assert found[:2] == [rows[0], rows[100]] and found[2:] == rows[-300:]


def test_a_checkpoint_is_found_beside_a_long_history(paused):
    assert [each.step for each in list_checkpoints(paused)] == [2, 1]

"""`dualtune runs` and `dualtune checkpoints`: what became of a run, and what it could continue from."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dualtune.cli.runs import table
from dualtune.train.state.listing import list_runs

NUMPY = ["--platform", "numpy"]


@pytest.fixture
def states(dualtune_main, tmp_path):
    """What `dualtune runs --json` says, by the name of the run."""

    def read(directory="runs") -> dict[str, dict]:
        result = dualtune_main("runs", tmp_path / directory, "--json")
        assert (result.returncode, result.stderr) == (0, "")
        return {run["path"].rpartition("/")[2]: run for run in json.loads(result.stdout)}

    return read


def test_runs_tells_done_preempted_failed_and_running(dualtune_main, config_file, states, tmp_path, python, wording):
    config = config_file({"run.save_every": 2})

    def train(name, *args, **options):
        return python("-m", "dualtune.cli.main", "train", config, "--set", f"run.dir=runs/{name}", *args, *NUMPY,
                      cwd=tmp_path, **options)  # fmt: skip

    assert train("done").returncode == 0
    assert train("killed", env={"DUALTUNE_FAULT": "step:4"}).returncode == -signal.SIGKILL
    bad = ["--set", "train.learning_rate=1e30", "--set", "train.steps=9", "--set", "run.save_every=null"]
    assert train("failed", *bad).returncode == 7
    stopper = tmp_path / "site"
    stopper.mkdir()
    stop_after = "import dualtune.train.hooks, os, signal\nimport dualtune.train.run as t\n"
    stop_after += "reach = t.faults.reach\nt.faults.reach = lambda p: os.kill(os.getpid(), signal.SIGTERM)\n"
    (stopper / "sitecustomize.py").write_text(stop_after)
    assert train("preempted", env={"PYTHONPATH": str(stopper)}).returncode == 75

    found = states()
    assert {name: run["state"] for name, run in found.items()} == {
        "done": "done", "killed": "killed", "failed": "failed", "preempted": "preempted",
    }  # fmt: skip
    assert (found["done"]["step"], found["done"]["num_steps"], found["done"]["checkpoint"]) == (4, 4, 4)
    assert found["done"]["loss"] > 0 and found["done"]["eval_loss"] > 0
    assert found["done"]["verdict"] == "too few steps" and found["done"]["seconds"] > 0
    assert found["done"]["best_eval_loss"] == found["done"]["eval_loss"]
    assert (found["done"]["model"].endswith("softmax"), found["done"]["learning_rate"]) == (True, 0.01)
    assert found["done"]["date"].startswith("20") and found["done"]["date"].endswith("+00:00")
    assert found["killed"]["checkpoint"] == 2
    assert found["killed"]["reason"].endswith(" was killed; the same command resumes it after step 2")
    wording(found["failed"]["reason"])
    assert (found["preempted"]["step"], found["preempted"]["checkpoint"]) == (1, 1)
    assert "Stopped by SIGTERM" in found["preempted"]["reason"]

    header, *lines = dualtune_main("runs", tmp_path / "runs").stdout.splitlines()
    assert re.split("  +", header) == [
        "run", "state", "verdict", "step", "train loss", "eval loss", "best eval", "lr", "model", "start", "date",
        "time", "saved",
    ]  # fmt: skip
    assert [line.split()[1] for line in lines if not line.startswith(" ")] == ["done", "failed", "killed", "preempted"]


def test_a_command_that_is_refused_does_not_change_what_is_said_of_a_run(dualtune_main, config_file, states):
    config = config_file()
    assert dualtune_main("train", config, *NUMPY).returncode == 0
    for args in (["--set", "adapter.rank=7"], ["--set", "data.train=nowhere.jsonl"], []):
        dualtune_main("train", config, *args, *NUMPY)
        assert states()["a"]["state"] == "done"


def test_a_run_that_is_held_is_running(config_file, states, tmp_path):
    from dualtune.train.state.lock import Lock

    (tmp_path / "runs" / "now").mkdir(parents=True)
    lock = Lock(tmp_path / "runs" / "now")
    assert states()["now"]["state"] == "running"
    assert states()["now"]["reason"].startswith(f"process {os.getpid()} on ")
    lock.release("done")
    assert states()["now"]["state"] == "done"


def test_looking_does_not_keep_a_run_from_starting(config_file, tmp_path):
    """A reader that looks at the lock all the time."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    code = "import sys\nfrom pathlib import Path\nfrom dualtune.train.state.lock import read_note\n"
    code += "print('looking', flush=True)\nwhile True: read_note(Path(sys.argv[1]))\n"
    command = [sys.executable, "-c", code, str(tmp_path / "runs" / "a")]
    from dualtune.train.state.lock import Lock

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout.readline() == "looking\n"
            for _ in range(20):
                Lock(tmp_path / "runs" / "a").release("done")
        finally:
            reader.kill()


# --- runs that are made by hand --------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    """A run directory with these losses, by step, and this note in its lock file."""

    def make(name, losses=(2.0, 1.5), lock=None, config="{model: {name: org/m}, train: {learning_rate: 1e-4}}"):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        rows = [{"step": step, "loss": loss, "step_s": 60.0} for step, loss in enumerate(losses, start=1)]
        rows.append({"step": len(losses), "eval_loss": losses[-1] + 0.1, "eval_targets": 5})
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (path / "config.yaml").write_text(config)
        note = {"pid": 1, "host": "h", "boot": "", "started": "2026-01-02T03:04:05+00:00", "state": "done"}
        (path / "lock").write_text(json.dumps(note | (lock or {})))
        return path

    return make


@pytest.mark.parametrize(
    "lock", [{"state": [1]}, {"pid": "x"}, {"host": None}, {"started": {"a": 1}}, {"reason": 3}, {"pid": -1}]
)
def test_a_lock_file_of_wrong_types_hides_no_run(made, states, lock, wording):
    made("bad", lock=lock)
    made("good")
    found = states()
    assert found["good"]["state"] == "done"
    assert (found["bad"]["state"], found["bad"]["loss"]) == ("failed", 1.5)
    wording(found["bad"]["reason"])


def test_a_run_that_left_no_word_of_its_end_is_dated_by_its_last_row(made, states):
    for name, state in (("killed", "running"), ("done", "done")):
        with (made(name, lock={"state": state}) / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"time": "2026-01-02T04:00:00.500+00:00", "step": 3, "loss": 1.0}) + "\n")
    began = "2026-01-02T03:04:05+00:00"
    assert (states()["killed"]["start"], states()["killed"]["date"]) == (began, "2026-01-02T04:00:00+00:00")
    assert states()["done"]["date"] == began


def test_a_lock_file_of_a_newer_version_is_read(made, states):
    made("run", lock={"surprise": [1]})
    assert states()["run"]["state"] == "done"


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(made, states, monkeypatch, dualtune_main, tmp_path):
    made("bad")
    made("good")
    (tmp_path / "runs" / "closed").mkdir()
    iterdir = Path.iterdir

    def refuse(path):
        if path.name == "closed":
            raise PermissionError(13, "Permission denied")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refuse)  # root may read everything
    (tmp_path / "runs" / "bad" / "metrics.jsonl").unlink()
    (tmp_path / "runs" / "bad" / "metrics.jsonl").symlink_to("metrics.jsonl")
    (tmp_path / "runs" / "bad" / "config.yaml").unlink()
    (tmp_path / "runs" / "bad" / "config.yaml").mkdir()
    found = states()
    assert (found["closed"]["state"], found["closed"]["reason"]) == ("unreadable", "Permission denied")
    assert found["good"]["state"] == "done" and found["bad"]["model"] is None
    assert "Permission denied" in dualtune_main("runs", tmp_path / "runs").stdout


def test_whatever_goes_wrong_with_one_run_the_others_are_listed(made, states, monkeypatch):
    from dualtune.train.state import listing

    made("bad")
    made("good")
    read = listing.read_note
    monkeypatch.setattr(listing, "read_note", lambda path: read(path) if path.name == "good" else 1 / 0)
    assert {name: run["state"] for name, run in states().items()} == {"good": "done", "bad": "unreadable"}


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("name", "a b c"),
        ("loss", "b c a"),
        ("eval", "b c a"),
        ("date", "c a b"),
        ("time", "c a b"),
        ("best", "b c a"),
        ("step", "c a b"),
        ("start", "a b c"),
    ],
)
def test_runs_are_sorted(made, dualtune_main, tmp_path, order, names):
    made("a", (3.0, 2.0), {"started": "2026-02-02T00:00:00+00:00"})
    made("b", (1.0,), {"started": "2026-01-01T00:00:00+00:00"})
    made("c", (3.0, 2.0, 1.5), {"started": "2026-03-03T00:00:00+00:00"})
    lines = dualtune_main("runs", tmp_path / "runs", "--sort", order).stdout.splitlines()[1:]
    assert [line.split()[0][-1] for line in lines] == names.split()


@pytest.mark.parametrize("columns", [30, 50, 80, 120])
def test_the_table_fits_the_terminal(made, tmp_path, columns):
    made("a-run-with-a-long-name")
    made("b", lock={"state": "failed", "reason": "ConfigError: " + "something is wrong here, and it is said " * 4})
    lines = table(sorted(list_runs(tmp_path / "runs"), key=lambda run: run.path), columns)
    needed = max(columns, 12 + len("  unreadable  2  train loss"))
    assert max(map(len, lines)) <= needed, lines
    assert lines[0].split()[:2] == ["run", "state"] and "loss" in lines[0]
    assert any("too narrow for: start" in line for line in lines) == (columns < 120 or "model" not in lines[0])


def test_a_long_metrics_file_is_not_read_whole(made, states, monkeypatch):
    from dualtune.train.state import listing

    made("run")
    monkeypatch.setattr(listing, "MAX_METRICS_BYTES", 10)
    monkeypatch.setattr(listing, "read_rows", lambda path: pytest.fail("read whole"))
    assert (states()["run"]["loss"], states()["run"]["seconds"]) == (1.5, None)


def test_a_long_metrics_file_keeps_its_start_and_all_evaluations(made, states, monkeypatch):
    from dualtune.train.state import listing, metrics

    path = made("run")
    rows = [{"step": step, "loss": 9.0 - step} for step in range(1, 9)]
    rows[0]["time"] = "2026-01-02T03:00:00.000+00:00"
    rows.insert(3, {"step": 3, "eval_loss": 0.5, "eval_targets": 5})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = states()["run"]
    monkeypatch.setattr(listing, "MAX_METRICS_BYTES", 10)
    monkeypatch.setattr(metrics, "NUM_LAST", 2)
    assert metrics.main_rows(path / "metrics.jsonl") == [rows[0], rows[3], *rows[-2:]]
    assert states()["run"] == whole and (whole["best_eval_loss"], whole["start"][:19]) == (0.5, "2026-01-02T03:00:00")


def test_named_pipes_and_directories_in_the_place_of_files_stop_no_listing(made, states, dualtune_main, tmp_path):
    for name in ("lock", "config.yaml", "metrics.jsonl"):
        (made(f"pipe-{name}") / name).unlink()
        os.mkfifo(tmp_path / "runs" / f"pipe-{name}" / name)
        (made(f"directory-{name}") / name).unlink()
        (tmp_path / "runs" / f"directory-{name}" / name).mkdir()
    assert len(states()) == 6
    assert dualtune_main("runs", "clean", tmp_path / "runs").returncode == 0


def test_a_file_that_is_named_lock_hides_no_run_below(made, states, tmp_path):
    made("inner/run")
    (tmp_path / "runs" / "lock").touch()
    (tmp_path / "runs" / "inner" / "checkpoints").mkdir()
    assert states()["run"]["state"] == "done"


def test_numbers_that_are_not_finite_are_null_in_json(made, states):
    made("run", (2.0, float("nan")))
    assert states()["run"]["loss"] is None


def test_a_row_with_a_number_that_nothing_counts_is_foreign(made, states):
    path = made("run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 1{"0" * 400}, "loss": 1.0}}\n{{"step": 3, "loss": 1.0, "step_s": 1{"0" * 400}}}\n')
    assert (states()["run"]["state"], states()["run"]["step"]) == ("done", 2)


def test_the_verdict_of_a_run_that_went_on_is_not_its_verdict(made, states):
    path = made("run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "event": "verdict", "message": "flat: x", "verdict": "flat"}\n')
    assert states()["run"]["verdict"] == "flat"
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n')
    assert states()["run"]["verdict"] is None


def test_a_directory_without_runs_and_none_at_all(dualtune_main, tmp_path, wording):
    (tmp_path / "empty").mkdir()
    wording(dualtune_main("runs", tmp_path / "empty").stdout)
    missing = dualtune_main("runs", tmp_path / "nowhere")
    assert missing.returncode == 2
    wording(missing.stderr)
    foreign = dualtune_main("checkpoints", tmp_path / "empty")
    assert foreign.returncode == 2
    wording(foreign.stderr)


def test_checkpoints_are_verified(dualtune_main, config_file, tmp_path):
    assert dualtune_main("train", config_file({"run.save_every": 1}), *NUMPY).returncode == 0
    run = tmp_path / "runs" / "a"
    good = dualtune_main("checkpoints", run)
    assert (good.returncode, good.stderr) == (0, "")
    assert [line.split()[0] for line in good.stdout.splitlines()[1:]] == ["4", "3", "2"]
    path = run / "checkpoints" / "step-00000003" / "optimizer_m.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    bad = dualtune_main("checkpoints", run)
    assert bad.returncode == 6
    assert "3     " in bad.stdout and "optimizer_m.safetensors is damaged" in bad.stdout
    listed = json.loads(dualtune_main("checkpoints", run, "--json").stdout)
    assert [entry["problem"] is None for entry in listed] == [True, False, True]

"""`dualtune runs` and `dualtune checkpoints`: what became of a run, and what it could continue from."""

import json
import os
import signal
import subprocess
import sys

import pytest

NUMPY = ["--platform", "numpy"]


@pytest.fixture
def states(dualtune_main, tmp_path):
    """What `dualtune runs --json` says, by the name of the run."""

    def read(directory="runs") -> dict[str, dict]:
        result = dualtune_main("runs", tmp_path / directory, "--json")
        assert (result.returncode, result.stderr) == (0, "")
        return {run["path"].rpartition("/")[2]: run for run in json.loads(result.stdout)}

    return read


def test_runs_tells_done_preempted_failed_and_running(dualtune_main, config_file, states, tmp_path, python):
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
    stop_after = "import dualtune.hooks, os, signal\nimport dualtune.train.trainer as t\n"
    stop_after += "reach = t.faults.reach\nt.faults.reach = lambda p: os.kill(os.getpid(), signal.SIGTERM)\n"
    (stopper / "sitecustomize.py").write_text(stop_after)
    assert train("preempted", env={"PYTHONPATH": str(stopper)}).returncode == 75

    found = states()
    assert {name: run["state"] for name, run in found.items()} == {
        "done": "done", "killed": "failed", "failed": "failed", "preempted": "preempted",
    }  # fmt: skip
    assert (found["done"]["step"], found["done"]["num_steps"], found["done"]["checkpoint"]) == (4, 4, 4)
    assert found["done"]["loss"] > 0 and found["done"]["eval_loss"] > 0
    assert (found["killed"]["checkpoint"], "was killed" in found["killed"]["reason"]) == (2, True)
    assert "6 steps in a row" in found["failed"]["reason"]
    assert (found["preempted"]["step"], found["preempted"]["checkpoint"]) == (1, 1)
    assert "Stopped by SIGTERM" in found["preempted"]["reason"]

    table = dualtune_main("runs", tmp_path / "runs").stdout.splitlines()
    assert table[0].split() == ["run", "state", "step", "loss", "eval", "loss", "checkpoint"]
    assert [line.split()[1] for line in table[1:]] == ["done", "failed", "failed", "preempted"]


def test_a_command_that_is_refused_does_not_change_what_is_said_of_a_run(dualtune_main, config_file, states):
    config = config_file()
    assert dualtune_main("train", config, *NUMPY).returncode == 0
    for args in (["--set", "adapter.rank=7"], ["--set", "data.train=nowhere.jsonl"], []):
        dualtune_main("train", config, *args, *NUMPY)
        assert states()["a"]["state"] == "done"


def test_a_run_that_is_held_is_running(config_file, states, tmp_path):
    from dualtune.train.lock import Lock

    (tmp_path / "runs" / "now").mkdir(parents=True)
    lock = Lock(tmp_path / "runs" / "now")
    assert states()["now"]["state"] == "running"
    assert states()["now"]["reason"].startswith(f"process {os.getpid()} on ")
    lock.release("done")
    assert states()["now"]["state"] == "done"


def test_looking_does_not_keep_a_run_from_starting(config_file, tmp_path):
    """A reader that looks at the lock all the time."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    code = "import sys\nfrom pathlib import Path\nfrom dualtune.train.lock import read_note\n"
    code += "print('looking', flush=True)\nwhile True: read_note(Path(sys.argv[1]))\n"
    command = [sys.executable, "-c", code, str(tmp_path / "runs" / "a")]
    from dualtune.train.lock import Lock

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout.readline() == "looking\n"
            for _ in range(20):
                Lock(tmp_path / "runs" / "a").release("done")
        finally:
            reader.kill()


def test_a_directory_without_runs_and_none_at_all(dualtune_main, tmp_path):
    (tmp_path / "empty").mkdir()
    assert dualtune_main("runs", tmp_path / "empty").stdout == f"there is no run in {tmp_path / 'empty'}\n"
    missing = dualtune_main("runs", tmp_path / "nowhere")
    assert (missing.returncode, "there is no such directory" in missing.stderr) == (2, True)
    foreign = dualtune_main("checkpoints", tmp_path / "empty")
    assert (foreign.returncode, "is not a run directory" in foreign.stderr) == (2, True)


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

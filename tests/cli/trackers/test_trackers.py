"""run.track: the numbers of a run reach a tracker, whatever it does, and the run is the same without it.

The tracker is a stand-in for trackio, a module that writes what it is given to a file: real ones are in
test_real_trackers.py. It runs in the process that really sends.
"""

import filecmp
import io
import json
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault, FormatError
from dualtune.cli import track
from dualtune.config.values import Trackers
from dualtune.show.trackers import send
from dualtune.show.trackers import tracker as process
from dualtune.show.trackers.send import Sender, mark_of, tracked
from dualtune.show.trackers.tracker import TRACKERS, check_installed

STAND_IN = """
import json, os, time
from pathlib import Path

PLACE = Path(os.environ["STAND_IN"])

def write(what):
    if (PLACE / "hangs").exists():
        time.sleep(60)
    if (PLACE / "fails").exists():
        raise ConnectionError("no route to \\x1b[31mhost, key hf_" + "a" * 34)
    with (PLACE / "got.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\\n")

class Run:
    def log(self, numbers, step):
        if (PLACE / "fails-later").exists():
            raise ConnectionError("the connection is lost")
        write({"step": step, **numbers})

    def finish(self):
        write({"finish": True})

def init(**options):
    write({"init": options})
    return Run()
"""
RUN = {"train.steps": 4, "run.track": ["trackio"]}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory where the stand-in is, and where it writes."""
    place = tmp_path / "stand-in"
    place.mkdir()
    (place / "trackio.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=":")
    monkeypatch.setenv("STAND_IN", str(place))
    modules = ("trackio", "dualtune.show.trackers.to_trackio")  # the real one may be here too
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield place
    for name in modules:
        sys.modules.pop(name, None)


@pytest.fixture
def train(dualtune_main, config_file, tiny_softmax, tmp_path):
    def run(name, **changes):
        config = config_file({"model.name": tiny_softmax, "run.dir": tmp_path / name, **RUN, **changes})
        done = dualtune_main("train", config, "--platform", "numpy")
        assert done.returncode == 0, done.stderr
        return tmp_path / name, done.stdout

    return run


def got(place):
    return [json.loads(line) for line in (place / "got.jsonl").read_text().splitlines()]


def steps(place):
    return [row["step"] for row in got(place) if "loss" in row]


def test_the_numbers_arrive_and_the_run_is_the_same(train, place, tmp_path):
    run, _ = train("run")
    (opened, *rows, finished) = got(place)
    assert finished == {"finish": True}
    config = opened["init"]["config"]
    assert (config["train.steps"], config["run.track"], config["train.optimizer"]) == (4, ["trackio"], "adamw")
    assert opened["init"]["project"] == "dualtune"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = [row for row in lines if "loss" in row or "eval_loss" in row]
    assert [(row["step"], row.get("loss"), row.get("eval_loss")) for row in rows] == [
        (row["step"], row.get("loss"), row.get("eval_loss")) for row in numbers
    ]
    assert {"lr", "grad_norm", "tokens_per_s"} <= rows[-1].keys() | rows[-2].keys()
    without, _ = train("without", **{"run.track": []})
    tensors = "adapter/adapter_model.safetensors"
    assert filecmp.cmp(run / tensors, without / tensors, shallow=False)
    assert not [*without.glob("track-*")]


def test_nothing_happens_between_the_start_and_the_end_of_a_run():
    """So a tracker costs no step anything."""
    own = {name for name in vars(process.TrackerProcesses) if not name.startswith("_")}
    assert own == {"on_start", "on_end"}


def test_a_resumed_run_is_the_same_run_of_the_tracker(train, place):
    train("run", **{"train.steps": 2})
    train("run", **{"train.steps": 4})
    opened = [row["init"] for row in got(place) if "init" in row]
    assert len(opened) == 2 and opened[0]["name"] == opened[1]["name"]
    assert steps(place) == [1, 2, 3, 4]


def test_a_training_that_begins_again_is_another_run_of_the_tracker(train, place):
    run, _ = train("run", **{"train.steps": 2})
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path)
    train("run", **{"train.steps": 3})
    opened = [row["init"]["name"] for row in got(place) if "init" in row]
    assert len(set(opened)) == 2 and steps(place) == [1, 2, 1, 2, 3]


def test_two_processes_never_send_the_same_rows(train, place, dualtune_main):
    run, _ = train("run", **{"run.track": []})
    with send.only_sender(run, "trackio", waits=False):
        second = dualtune_main("track", run, "--to", "trackio")
        with send.only_sender(run, "wandb", waits=False):
            pass
    assert second.returncode == 2 and "another process is sending its rows to trackio" in second.stderr
    assert not (place / "got.jsonl").exists()
    assert dualtune_main("track", run, "--to", "trackio").returncode == 0 and steps(place) == [1, 2, 3, 4]


def test_the_process_imports_nothing_of_the_current_directory(train, place, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("json", "pydantic"):
        (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit('was imported')")
    train("run")
    assert steps(place) == [1, 2, 3, 4]


def test_a_number_beyond_a_float_is_not_sent(train, place, dualtune_main):
    run, _ = train("run", **{"run.track": []})
    row = f'{{"step": 5, "loss": 1.0, "far": 1{"0" * 400}, "inf": Infinity, "nan": NaN}}'
    small = '{"step": 6, "loss": 2.0, "inf": Infinity, "nan": NaN}'
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{row}\n{small}\n")
    assert dualtune_main("track", run, "--to", "trackio").returncode == 0
    assert steps(place) == [1, 2, 3, 4, 6] and got(place)[-2] == {"step": 6, "loss": 2.0}


def test_a_tracker_that_fails_is_said_and_catches_up_after(train, place, dualtune_main):
    (place / "fails").touch()
    run, said = train("run")
    assert (
        "not all was sent" in (run / "metrics.jsonl").read_text() + said
        and f"dualtune track {run} --to trackio" in said
    )
    log = (run / "track-trackio.log").read_text()
    assert log.count("ConnectionError: no route to ") >= send.LAST_TRIES and "\x1b" not in log and "aaaa" not in log
    failed = dualtune_main("track", run, "--to", "trackio")
    assert failed.returncode == 4 and "rows are not sent; the same command sends the rest" in failed.stderr
    (place / "fails").unlink()
    assert dualtune_main("track", run, "--to", "trackio").returncode == 0
    assert steps(place) == [1, 2, 3, 4]
    again = dualtune_main("track", run, "--to", "trackio")
    assert again.returncode == 0 and ": 0 rows sent" in again.stdout and steps(place) == [1, 2, 3, 4]


def test_a_tracker_that_fails_after_it_was_opened_keeps_its_run(train, place, dualtune_main):
    run, _ = train("run", **{"run.track": []})
    (place / "fails-later").touch()
    assert dualtune_main("track", run, "--to", "trackio").returncode == 4
    (place / "fails-later").unlink()
    assert dualtune_main("track", run, "--to", "trackio").returncode == 0
    names = [row["init"]["name"] for row in got(place) if "init" in row]
    assert len(names) >= 2 and len(set(names)) == 1 and steps(place) == [1, 2, 3, 4]


def test_slow_trackers_are_waited_for_together(monkeypatch, tmp_path):
    waits, now = [], [5.0]
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow:
        stdin = io.BytesIO()

        def wait(self, timeout):
            waits.append(timeout)
            now[0] += timeout
            raise subprocess.TimeoutExpired("track", timeout)

    processes = process.TrackerProcesses(tmp_path, [])
    processes._processes = {name: Slow() for name in ("a", "b", "c")}
    with pytest.raises(EnvironmentFault, match=r"a is still sending.*c is still sending"):
        processes.on_end()
    assert waits == [process.WAIT_S, 0, 0]


def test_a_tracker_that_hangs_is_not_waited_for(train, place, monkeypatch):
    monkeypatch.setattr(process, "WAIT_S", 0.2)
    (place / "hangs").touch()
    run, said = train("run")
    assert "trackio is still sending, in a process of its own" in said and "Training continues" not in said
    assert "raised" not in said
    assert said.index("saved       the adapter in") < said.index("is still sending")  # the wait is not the saving's
    assert (run / "adapter/adapter_model.safetensors").is_file()


def test_after_an_error_the_rest_follows_and_nothing_comes_twice(train, place, monkeypatch):
    monkeypatch.setattr(send, "EVERY_S", 0.01)
    monkeypatch.setattr(send, "AGAIN_S", (0.01,))
    run, _ = train("run", **{"run.track": []})
    monkeypatch.setattr(send, "open_tracker", lambda name, tracked: Failing())
    ended = threading.Event()
    Failing.calls, Failing.got = 0, []
    ended.set()
    said = []
    assert Sender(run, "trackio", said.append).follow(ended)
    assert [step for step, eval_ in Failing.got if not eval_] == [1, 2, 3, 4] and len(said) == 2


def test_rows_go_together_where_the_tracker_takes_them(train, place, monkeypatch):
    run, _ = train("run", **{"run.track": []})
    monkeypatch.setitem(TRACKERS, "trackio", TRACKERS["trackio"]._replace(rows_at_once=4))
    monkeypatch.setattr(send, "open_tracker", lambda name, tracked: Failing())
    Failing.calls, Failing.got = 0, []
    sender = Sender(run, "trackio", lambda text: None)
    with pytest.raises(OSError, match="no network"):
        sender.send()
    assert len(Failing.got) == 4 and sender.num_waiting == 2 and mark_of(run, "trackio").sent == (3, 0)
    assert sender.send() == 2 and Failing.calls == 3
    assert [step for step, eval_ in Failing.got if not eval_] == [1, 2, 3, 4] and len(Failing.got) == 6


class Failing:
    """Fails at its second and fourth call."""

    calls, got = 0, []

    def log(self, rows):
        Failing.calls += 1
        if Failing.calls in (2, 4):
            raise OSError("no network")
        self.got += [(row.step, "eval_loss" in row.numbers) for row in rows]

    def close(self):
        pass


def test_no_secret_is_told(train, place, monkeypatch):
    """Neither one of the environment, nor one that somebody has written into the config of a run afterwards."""
    secret = "hf_" + "b" * 34
    monkeypatch.setenv("HF_TOKEN", secret)
    run, _ = train("run")
    assert secret not in (place / "got.jsonl").read_text()
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("template: auto", f"template: /home/{secret}/t.jinja"))
    with pytest.raises(ConfigError) as caught:
        tracked(run, mark_of(run, "wandb"))
    assert secret not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"id": "../x", "sent": [1, 0]}', '{"id": "a", "sent": [1]}', " " * 20_000]
)
def test_a_damaged_mark_is_refused(tmp_path, text):
    (tmp_path / "track-wandb.json").write_text(text)
    with pytest.raises(FormatError, match="track-wandb"):
        mark_of(tmp_path, "wandb")


def test_a_missing_package_is_said_before_anything_is_trained(
    dualtune_main, config_file, tiny_softmax, monkeypatch, tmp_path
):
    kinds = TRACKERS | {"wandb": TRACKERS["wandb"]._replace(package="no_such_package")}
    monkeypatch.setattr("dualtune.show.trackers.tracker.TRACKERS", kinds)
    config = config_file({"model.name": tiny_softmax, "run.dir": tmp_path / "r", "run.track": ["wandb"]})
    done = dualtune_main("train", config, "--platform", "numpy")
    assert done.returncode == 4 and "wandb is not installed. To install it: pip install wandb" in done.stderr
    assert not (tmp_path / "r" / "metrics.jsonl").exists()
    with pytest.raises(EnvironmentFault):
        check_installed(["wandb"])


def test_schema_and_command_have_the_same_names():
    assert set(TRACKERS) == set(track.NAMES)
    assert set(TRACKERS) == set(Trackers.__origin__.__args__[0].__args__)


def test_what_is_no_run_directory_is_refused(dualtune_main, tmp_path):
    done = dualtune_main("track", tmp_path, "--to", "trackio")
    assert done.returncode == 2 and "is not a run directory" in done.stderr

"""What surrounds a run: clocks, names of directories, closed pipes, broken trackers, secrets."""

import os
import re
import shutil
from pathlib import Path

import pytest

from dualtune.train.hooks import Hook

# --- clocks ----------------------------------------------------------------------------------------------------------

CLOCK = """
import datetime, itertools, time
jumps = itertools.cycle([0, -7200, 86400 * 400, -86400 * 4000])
now = time.time
time.time = lambda: now() + next(jumps)
class Jumping(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(time.time(), tz)
real, datetime.datetime = datetime.datetime, Jumping
Jumping.fromtimestamp = real.fromtimestamp
"""


@pytest.mark.fault(
    row=41,
    fault="wrong dates of files, a wall clock that jumps",
    injection="mtimes in 1971 and 2100, newest step oldest; `time.time` and `datetime.now` jump by hours and years",
    expected="ordered by step; durations are not negative; adapter bitwise equal",
)
def test_neither_dates_nor_clocks_decide_anything(box):
    straight = box.straight()
    box.train(-9, fault="step:7", inject=CLOCK, is_forked=False)
    for path, year in zip(sorted((box.dir / "checkpoints").iterdir()), (2100, 2000, 1971), strict=True):
        seconds = (year - 1970) * 365 * 86400
        for file in (*path.iterdir(), path):
            os.utime(file, (seconds, seconds))
    newest = box.checkpoints[-1]
    said = box.train(0, inject=CLOCK, is_forked=False).stdout
    assert f"from {box.dir / 'checkpoints' / newest}" in said
    assert newest == "step-00000006"
    assert all(row["step_s"] > 0 and row["tokens_per_s"] > 0 for row in box.rows() if "lr" in row)
    assert not re.search(r"-\d+ s left", said)
    assert box.checkpoints[-1] == "step-00000009"
    assert box.adapter == straight


# --- names and places ------------------------------------------------------------------------------------------------

NAMES = {
    "spaces": "a run  with spaces",
    "unicode": "läufe/走る — №1",
    "long": "/".join(["n" * 200] * 4),
    "quotes": 'it\'s "1"',
}


@pytest.mark.fault(
    row=47,
    fault="directories with spaces, unicode, quotes, very long names",
    injection="run directory, data and model in such directories; killed and resumed",
    expected="works; adapter bitwise equal",
)
@pytest.mark.parametrize("kind", NAMES)
def test_names_are_only_names(box, kind):
    place = box.home / NAMES[kind]
    place.mkdir(parents=True)
    for key in ("model.name", "data.train"):
        box.settings[key] = (
            Path(box.settings[key]).rename(place / "data.jsonl") if "data" in key else copied(box, place)
        )
    box.settings["run.dir"] = place / "rün"
    box.train(-9, fault="step:5")
    box.resume()
    assert box.adapter == box.straight()


def copied(box, place):
    return shutil.copytree(box.settings["model.name"], place / "model")


@pytest.mark.fault(
    row=47,
    fault="a name that is too long for the file system",
    injection="`run.dir` with a name of 300 bytes",
    expected="exit 5 with the reason",
)
def test_a_name_that_is_too_long_is_said(box):
    box.settings["run.dir"] = box.home / ("n" * 300)
    assert "File name too long" in box.resume(5).stderr


@pytest.mark.fault(
    row=47,
    fault="relative run.dir, another working directory, a run directory that was moved",
    injection="killed; resumed from elsewhere by the absolute path; killed; renamed and resumed",
    expected="continued; adapter bitwise equal",
)
def test_a_run_may_be_found_from_elsewhere_and_moved(box, monkeypatch):
    straight = box.straight()
    here, there = box.home / "here", box.home / "there"
    here.mkdir(), there.mkdir()
    box.settings["run.dir"] = "runs/a"
    box.train(-9, fault="step:5", cwd=here)
    box.settings["run.dir"] = here / "runs" / "a"
    box.train(-9, fault="step:3", cwd=there)  # the third one of this process
    assert box.checkpoints[-1] == "step-00000006"
    box.settings["run.dir"] = box.dir.rename(there / "b")
    monkeypatch.chdir(there)
    said = box.resume().stdout
    assert f"after step 6, from {there / 'b' / 'checkpoints'}" in said
    assert not box.events("config_changed")
    assert box.adapter == straight


# --- screens, trackers, secrets --------------------------------------------------------------------------------------


@pytest.mark.fault(
    row=46,
    fault="standard output is a closed pipe",
    injection="the reader is gone before the first line; SIGKILL in step 5, resumed likewise",
    expected="trains, saves, exit 0; adapter bitwise equal",
)
def test_a_run_that_nobody_reads_saves_and_ends_well(box):
    for inject, code in (("enter('dualtune.train.step.learning_rate', 6, send('SIGKILL'))", -9), ("", 0)):
        read, write = os.pipe()
        os.close(read)
        with box.start(inject, stdout=write) as process:
            os.close(write)
            complaint = process.communicate(timeout=1800)[1]
        assert process.returncode == code, complaint
        assert b"Traceback" not in complaint and b"BrokenPipe" not in complaint
    assert box.adapter == box.straight()


class Tracker(Hook):
    """Hears everything, but for the steps when its service is down."""

    def __init__(self, down=()):
        self.heard, self.down = [], down

    def on_step(self, record):
        if self.down and record.step in self.down:
            self.down.remove(record.step)
            raise ConnectionError("tracker is down")
        self.heard.append(("step", record.step))

    def on_eval(self, record):
        self.heard.append(("eval", record.step))


@pytest.mark.fault(
    row=49,
    fault="a tracker that is down",
    injection="a hook that raises at step 3 and at the five attempts after it; one that always raises",
    expected="training goes on; said once; what was missed is delivered in order when it recovers",
)
def test_a_broken_tracker_costs_nothing_but_a_line(box, make_config, open_backend):
    from dualtune.show.run import run

    overrides = {key: value for key, value in box.settings.items() if value is not None}
    config = make_config(box.settings["data.train"], overrides)
    straight = box.straight()
    quiet = Tracker()
    run(
        make_config(box.settings["data.train"], overrides | {"run.dir": box.home / "quiet"}),
        open_backend("numpy"),
        [quiet],
    )

    broken, hopeless = Tracker([3] * 6), Tracker([1] * 10**4)
    run(config, open_backend("numpy"), [broken, hopeless])
    assert broken.heard == quiet.heard
    assert hopeless.heard == [("eval", 0)]  # before the first step; the rest is waiting behind it
    said = [event["message"] for event in box.events("hook_failed")]
    assert len(said) == 2
    assert all("Tracker.on_step raised ConnectionError: tracker is down. Training continues" in line for line in said)
    assert box.adapter == straight


@pytest.mark.fault(
    row=40,
    fault="secrets in the environment of a run that is killed, resumed and broken",
    injection="canaries in HF_TOKEN and WANDB_API_KEY; one of them in the text of an exception",
    expected="in no file of the run directory, and on no screen",
)
def test_no_file_of_a_run_holds_a_secret(box):
    canaries = {"HF_TOKEN": "hf_" + "Canary7" * 5, "WANDB_API_KEY": "c4ca4238" * 5}
    leak = "throw(RuntimeError('denied: ' + os.environ['HF_TOKEN'] + ' ' + os.environ['WANDB_API_KEY']))"
    texts = []
    for code, faults in (
        (-9, {"fault": "step:4"}),
        (1, {"inject": f"enter('dualtune.train.run.evaluate', 2, {leak})"}),
        (0, {}),
    ):
        result = box.train(code, env=canaries, is_forked=False, **faults)
        files = [path.read_bytes() for path in box.dir.rglob("*") if path.is_file()]
        texts += [result.stdout.encode(), result.stderr.encode(), *files]
    assert len(texts) > 30
    assert not [text for secret in canaries.values() for text in texts if secret.encode() in text]
    assert any(b"denied: " in text for text in texts)

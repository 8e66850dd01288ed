"""Files and directories that are deleted or replaced while a run trains: noticed at the next save, and nothing lost."""

import json
import shutil
from pathlib import Path

import pytest

from dualtune.train.state.run_dir import RunDir

DURING = "in step 5, between the saves of steps 4 and 6"


@pytest.fixture
def during(box, monkeypatch):
    """Let something happen in step 5 of a run in this process; what `dualtune train` said, with its exit code."""

    def train(action, code):
        from dualtune.train import step as step_module

        original, calls = step_module.learning_rate, []

        def entered(*args):
            calls.append(args)
            if len(calls) == 5:
                action()
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(step_module, "learning_rate", entered)
            return box.resume(code)

    box.settings |= {"run.keep": 9}
    return train


def steps_of(run_dir) -> list[int]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "lr" in row]


def rescued(box, said) -> Path:
    """The directory that the message names; the run continues there to the end."""
    new = box.dir.with_name("run-rescued")
    assert f"is saved in {new}. To resume: --set run.dir={new}" in said
    assert steps_of(new) == [1, 2, 3, 4, 5, 6]
    assert (new / "environment.json").is_file() and f"dir: {new}" in (new / "config.yaml").read_text()
    straight = box.straight()
    box.settings["run.dir"] = new
    assert "after step 6" in box.resume().stdout
    assert box.adapter == straight and steps_of(new) == [*range(1, 10)]
    return new


ELSEWHERE = "everything is saved in a new directory beside it, exit 5 names it; continued there, adapter bitwise equal"


@pytest.mark.fault(row=51, fault="the run directory is deleted", injection=DURING, expected=ELSEWHERE)
def test_a_run_whose_directory_is_deleted_loses_nothing(box, during):
    result = during(lambda: shutil.rmtree(box.dir), 5)
    assert f"run.dir: {box.dir} was deleted during training" in result.stderr
    assert not box.dir.exists()
    rescued(box, result.stderr)


@pytest.mark.fault(row=51, fault="the run directory is renamed", injection=DURING, expected=ELSEWHERE)
def test_a_run_whose_directory_is_renamed_does_not_write_to_the_old_name(box, during):
    result = during(lambda: box.dir.rename(box.home / "moved"), 5)
    assert not box.dir.exists()
    assert sorted(path.name for path in (box.home / "moved" / "checkpoints").iterdir())[-1] == "step-00000004"
    rescued(box, result.stderr)


@pytest.mark.fault(
    row=51,
    fault="another run begins in a new directory of the same name",
    injection=DURING,
    expected=ELSEWHERE + "; the other run's files are untouched",
)
@pytest.mark.parametrize("how", ["directory", "link"])
def test_a_run_does_not_write_into_the_directory_of_another(box, during, how):
    def replace():
        shutil.rmtree(box.dir)
        other = box.dir if how == "directory" else box.home / "other"
        (other / "checkpoints").mkdir(parents=True)
        for name in ("metrics.jsonl", "config.yaml", "lock", "lock.claim"):
            (other / name).write_text("theirs")
        if how == "link":
            box.dir.symlink_to(other)

    result = during(replace, 5)
    assert f"{box.dir} was replaced during training" in result.stderr
    files = {path.name: path.read_text() for path in box.dir.rglob("*") if path.is_file()}
    assert files == dict.fromkeys(["metrics.jsonl", "config.yaml", "lock", "lock.claim"], "theirs")
    rescued(box, result.stderr)


@pytest.mark.fault(
    row=51, fault="the lock file is deleted, so that another run may begin", injection=DURING, expected=ELSEWHERE
)
def test_a_run_without_its_lock_does_not_share_the_directory(box, during):
    result = during(lambda: (box.dir / "lock").unlink(), 5)
    assert f"{box.dir / 'lock'} was deleted during training" in result.stderr
    rescued(box, result.stderr)


@pytest.mark.fault(
    row=51,
    fault="the run directory is deleted, and nothing can be written beside it",
    injection=DURING + "; its parent too, and a file takes its place",
    expected="exit 5 with both reasons",
)
def test_a_rescue_that_fails_is_said(box, during):
    box.settings["run.dir"] = box.home / "deep" / "run"

    def replace():
        shutil.rmtree(box.home / "deep")
        (box.home / "deep").write_text("a file")

    said = during(replace, 5).stderr
    assert "during training, and nothing could be saved in" in said and "Not a directory" in said


PUT_BACK = "said in metrics.jsonl and on the screen; written again whole, what was there is kept; adapter bitwise equal"


@pytest.mark.fault(
    row=51, fault="metrics.jsonl, config.yaml or environment.json is deleted", injection=DURING, expected=PUT_BACK
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "environment.json"])
def test_a_file_that_was_deleted_is_written_again(box, during, name):
    straight = box.straight()
    result = during(lambda: (box.dir / name).unlink(), 0)
    (event,) = box.events("replaced")
    assert event["step"] == 6 and f"{box.dir / name} was deleted" in event["message"]
    assert f"{box.dir / name} was deleted" in " ".join(result.stdout.split())
    assert (steps_of(box.dir), box.adapter) == ([*range(1, 10)], straight)
    assert box.resume().stdout.count("finished") == 1


@pytest.mark.fault(
    row=51, fault="metrics.jsonl, config.yaml or environment.json is replaced", injection=DURING, expected=PUT_BACK
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "environment.json"])
def test_a_file_that_was_replaced_is_written_again_and_the_other_kept(box, during, name):
    straight = box.straight()

    def replace():
        (box.home / "other").write_text("mine\n")
        (box.home / "other").replace(box.dir / name)

    during(replace, 0)
    (event,) = box.events("replaced")
    assert f"what was there is kept as {name}.replaced" in event["message"]
    assert (box.dir / f"{name}.replaced").read_text() == "mine\n"
    assert (steps_of(box.dir), box.adapter) == ([*range(1, 10)], straight)


@pytest.mark.fault(
    row=51,
    fault="the directory of the checkpoints is deleted or replaced by another, or by a link",
    injection=DURING,
    expected="said; what was there is kept untouched, the next checkpoint is saved anew; adapter bitwise equal",
)
@pytest.mark.parametrize("how", ["deleted", "directory", "link"])
def test_checkpoints_that_were_replaced_are_saved_anew(box, during, how):
    straight, place = box.straight(), box.dir / "checkpoints"

    def replace():
        place.rename(box.home / "taken")
        if how == "directory":
            place.mkdir()
            (place / "mine").write_text("x")
        elif how == "link":
            (box.home / "elsewhere").mkdir()
            place.symlink_to(box.home / "elsewhere")

    during(replace, 0)
    (event,) = box.events("replaced")
    assert f"{place} was {'deleted' if how == 'deleted' else 'replaced'}" in event["message"]
    assert box.checkpoints == ["step-00000006", "step-00000008", "step-00000009"]
    assert not place.is_symlink() and box.adapter == straight
    if how == "directory":
        assert (box.dir / "checkpoints.replaced" / "mine").is_file()
    elif how == "link":
        assert not any((box.home / "elsewhere").iterdir())


@pytest.mark.fault(
    row=51,
    fault="the run directory is deleted after the last step",
    injection="between the last save and the adapter",
    expected=ELSEWHERE,
)
def test_a_directory_deleted_before_the_adapter_is_written(box, monkeypatch):
    straight, original = box.straight(), RunDir.fault
    last = box.dir / "checkpoints" / "step-00000009"

    def deleted(place):
        if last.exists():
            shutil.rmtree(box.dir)
        return original(place)

    monkeypatch.setattr(RunDir, "fault", deleted)
    box.resume(5)
    box.settings["run.dir"] = box.dir.with_name("run-rescued")
    box.resume()
    assert box.adapter == straight and steps_of(box.dir) == [*range(1, 10)]

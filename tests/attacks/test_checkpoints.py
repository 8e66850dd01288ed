"""Checkpoints that were changed, copied or invented: never continued as if they were the run's own."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, FormatError, Preempted
from dualtune.config import parse_config
from dualtune.data import order
from dualtune.data.order import Order
from dualtune.show.run import run
from dualtune.train.state import checkpoint

RUN = {"train.steps": 9, "run.save_every": 2, "run.keep": 9}


@pytest.fixture
def stopped(open_backend, make_config, write_rows, qa_rows, tiny_softmax, tmp_path):
    """A run with checkpoints of the steps 2, 4 and 6, and the way to continue it."""
    backend, data = open_backend("numpy"), write_rows(qa_rows)

    def continue_(**changes):
        return run(make_config(data, RUN | changes, tiny_softmax), backend)

    continue_(**{"train.steps": 6})
    shutil.rmtree(tmp_path / "run" / "adapter")
    return continue_


@pytest.fixture
def checkpoints(stopped, tmp_path):
    return tmp_path / "run" / "checkpoints"


def rewrite(path, state=None, edit=lambda name, tensors: tensors, **manifest):
    """Change a checkpoint and make its hashes right again, as somebody would who knows the format."""
    table = json.loads((path / "state.json").read_text()) | (state or {})
    (path / "state.json").write_text(json.dumps({key: value for key, value in table.items() if value is not ...}))
    for file in path.glob("*.safetensors"):
        save_file(edit(file.stem, load_file(file)), file)
    listed = json.loads((path / "MANIFEST.json").read_text()) | manifest
    for name in listed["files"]:
        data = (path / name).read_bytes()
        listed["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "MANIFEST.json").write_text(json.dumps(listed))


def found(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["message"] for row in rows if row.get("event") == "found"]


def test_a_copy_under_a_later_name_does_not_set_the_real_ones_aside(stopped, checkpoints):
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "step-00000008")
    result = stopped()
    kept = {path.name for path in checkpoints.iterdir()}
    assert kept == {*(f"step-0000000{step}" for step in (2, 4, 6, 8, 9)), "step-00000008.old-1"}
    said = "it holds the state after step 2, but its name says 8"
    assert any(said in message for message in found(result.run_dir))


@pytest.mark.parametrize("step", [8, "2", None, 2.0001])
def test_a_manifest_of_another_step_is_refused(checkpoints, step):
    rewrite(checkpoints / "step-00000002", step=step)
    with pytest.raises(FormatError, match=r"the state after step 2, but MANIFEST.json says"):
        checkpoint.read(checkpoints / "step-00000002")


@pytest.mark.parametrize("key", ["fingerprints", "guards", "place", "schedule"])
def test_a_checkpoint_without_what_it_is_compared_by_is_refused(checkpoints, key):
    rewrite(checkpoints / "step-00000006", {key: ...})
    with pytest.raises(FormatError, match="missing, so the run cannot be compared with it"):
        checkpoint.read(checkpoints / "step-00000006")


@pytest.mark.parametrize("name", sorted(checkpoint.FINGERPRINTS))
def test_a_single_fingerprint_that_was_stripped_is_noticed(checkpoints, name):
    path = checkpoints / "step-00000006"
    kept = json.loads((path / "state.json").read_text())["fingerprints"]
    del kept[name]
    rewrite(path, {"fingerprints": kept})
    with pytest.raises(FormatError, match=f"fingerprints: {name}: missing"):
        checkpoint.read(path)


def test_the_fingerprints_that_are_required_are_those_that_are_written(checkpoints):
    written = checkpoint.read(checkpoints / "step-00000006").state["fingerprints"].keys()
    assert written - checkpoint.FINGERPRINTS == {"base model's tensors"}  # younger than schema version 2
    assert written >= checkpoint.FINGERPRINTS


def test_a_checkpoint_of_a_newer_version_is_not_set_aside(stopped, checkpoints):
    rewrite(checkpoints / "step-00000006", schema_version=99)
    before = sorted(checkpoints.iterdir())
    with pytest.raises(FormatError, match="was written by a newer dualtune: it has schema version 99"):
        stopped()
    assert sorted(checkpoints.iterdir()) == before


@pytest.mark.parametrize("version", [0, -1, 1.5, True, "2", None, [2]])
def test_a_version_that_is_none_is_refused(checkpoints, version, wording):
    rewrite(checkpoints / "step-00000006", schema_version=version)
    wording(checkpoint.problem_of(checkpoints / "step-00000006"))


@pytest.mark.parametrize("how", ["renamed", "transposed", "not finite"])
def test_tensors_of_another_adapter_are_one_line_that_names_the_file(stopped, checkpoints, how):
    def edit(_, tensors):
        if how == "renamed":
            return {name.replace("lora_A", "lora_Z"): x for name, x in tensors.items()}
        if how == "transposed":
            return {name: np.ascontiguousarray(x.T) for name, x in tensors.items()}
        return {name: np.full_like(x, np.nan) for name, x in tensors.items()}

    for path in checkpoints.iterdir():
        rewrite(path, edit=edit)
    with pytest.raises(FormatError) as caught:
        stopped()
    assert str(checkpoints / "step-00000006") in str(caught.value)
    assert {"renamed": "tensors missing", "transposed": "of another shape", "not finite": "NaN"}[how] in str(
        caught.value
    )


# --- links -----------------------------------------------------------------------------------------------------------


def test_a_link_in_place_of_a_checkpoint_is_passed_over_and_what_it_leads_to_is_left_alone(
    stopped, checkpoints, tmp_path
):
    elsewhere = shutil.copytree(checkpoints / "step-00000006", tmp_path / "step-00000007")
    (checkpoints / "step-00000007").symlink_to(elsewhere)
    (checkpoints / "step-00000001").symlink_to(elsewhere)
    result = stopped(**{"run.keep": 2})
    assert any("step-00000007: is a symbolic link" in message for message in found(result.run_dir))
    assert not [path for path in checkpoints.iterdir() if path.name.startswith(".") or path.name == "step-00000001"]
    assert len([*elsewhere.iterdir()]) == 5


@pytest.mark.parametrize("name", ["adapter.safetensors", "state.json", "MANIFEST.json"])
def test_a_pipe_or_a_link_in_a_checkpoint_is_a_problem_and_never_read(checkpoints, tmp_path, name, wording):
    file = checkpoints / "step-00000006" / name
    file.rename(tmp_path / name)
    if name != "MANIFEST.json":
        file.symlink_to(tmp_path / name)
        wording(checkpoint.problem_of(file.parent))
        file.unlink()
    os.mkfifo(file)
    assert "is not a " in checkpoint.problem_of(file.parent)


def test_a_checkpoint_that_leads_to_itself_is_listed(checkpoints):
    (checkpoints / "step-00000007").symlink_to("step-00000007")
    assert "symbolic link" in checkpoint.entries(checkpoints)[0].problem
    assert checkpoint.total_bytes(checkpoints) > 0


# --- steps and epochs beyond reason ----------------------------------------------------------------------------------


def test_a_checkpoint_of_an_absurd_step_is_refused_at_once(stopped, checkpoints, wording):
    far = checkpoints / f"step-{10**9:08d}"
    (checkpoints / "step-00000006").rename(far)
    rewrite(far, {"step": 10**9}, step=10**9)
    with pytest.raises(ConfigError, match="1000000000 steps are done, 9 are configured"):
        stopped()
    rewrite(far, {"step": 10**11}, step=10**11)
    wording(checkpoint.problem_of(far))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.steps=100000000000", "train.steps: got 100000000000, at most 1000000000"),
        ("train.epochs=1e7", r"train.epochs: got 1e\+07, at most 100000 are allowed"),
        ("train.epochs=1e5", "at most 5e"),
    ],
)
def test_steps_and_epochs_beyond_reason_are_one_line(setting, message, monkeypatch):
    monkeypatch.setattr(Order, "_plan", lambda self, epoch: pytest.fail("no epoch may be planned"))
    config = parse_config("{model: {name: m}, data: {train: t}}", overrides=[setting])
    with pytest.raises(ConfigError, match=message):
        Order(config, np.ones(6000, np.int64))


def test_a_weight_that_would_fill_the_memory_is_refused():
    config = parse_config("{model: {name: m}, data: {train: t}}", overrides=["train.steps=1"])
    with pytest.raises(ConfigError, match=r"1e\+12, at most 5e\+08 are allowed"):
        Order(config, np.ones(10, np.int64), weights=(1e11,))


@pytest.mark.parametrize("how", ["epochs", "step"])
def test_planning_many_epochs_can_be_stopped(monkeypatch, how):
    """As a signal does; the flag is looked at between epochs."""
    planned = []
    monkeypatch.setattr(order.interrupt, "poll", lambda: stop(planned))
    monkeypatch.setattr(
        Order, "_plan", lambda self, epoch, plan=Order._plan: planned.append(epoch) or plan(self, epoch)
    )
    setting = "train.epochs=1000" if how == "epochs" else "train.steps=1000"
    config = parse_config("{model: {name: m}, data: {train: t}}", overrides=[setting, "train.documents_per_step=1"])
    with pytest.raises(Preempted):
        Order(config, [5, 5]).step(10**6)
    assert len(planned) < 20


def stop(planned):
    if len(planned) >= 10:
        raise Preempted("Stopped by SIGTERM")


def test_training_through_an_epoch_s_end_never_stops_in_the_order(monkeypatch):
    """Batches are made ahead: a stop there would come before the state is saved."""
    config = parse_config(
        "{model: {name: m}, data: {train: t}}", overrides=["train.steps=30", "train.documents_per_step=1"]
    )
    planned = Order(config, [5, 5])
    monkeypatch.setattr(interrupt, "_received", 15)
    assert [len(planned.step(index).documents) for index in range(30)] == [1] * 30


def test_a_manifest_that_lists_a_file_as_null_is_refused(checkpoints):
    path = checkpoints / "step-00000006" / "MANIFEST.json"
    table = json.loads(path.read_text())
    table["files"]["state.json"] = None
    path.write_text(json.dumps(table))
    assert "state.json has " in checkpoint.problem_of(path.parent)


@pytest.mark.parametrize("value", [-1e-30, -1.0])
def test_a_negative_second_moment_is_refused_and_a_zero_of_any_sign_is_not(checkpoints, value):
    def edit(name, tensors, to):
        if name == "optimizer_v":
            next(iter(tensors.values())).flat[0] = to
        return tensors

    rewrite(checkpoints / "step-00000006", edit=lambda name, tensors: edit(name, tensors, -0.0))
    assert checkpoint.read(checkpoints / "step-00000006").step == 6
    rewrite(checkpoints / "step-00000006", edit=lambda name, tensors: edit(name, tensors, value))
    with pytest.raises(FormatError, match=r"optimizer_v.safetensors: .*negative second moment"):
        checkpoint.read(checkpoints / "step-00000006")
    saved, problems = checkpoint.newest(checkpoints)
    assert saved is not None and saved.step == 4 and len(problems) == 1

"""The trackers themselves, where they are installed (`make test-trackers`): each has every row, once, and no secret."""

import json
import sqlite3
import struct
from datetime import datetime
from pathlib import Path

import pytest

from dualtune.show.trackers.tracker import TRACKERS

SECRET = "hf_" + "c" * 34


@pytest.fixture
def run(dualtune_main, config_file, tiny_softmax, tmp_path, monkeypatch):
    """A run directory, secrets in the environment, and nothing that leads out of this machine."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    config = config_file({"model.name": tiny_softmax, "run.dir": tmp_path / "run", "train.steps": 3})
    assert dualtune_main("train", config, "--platform", "numpy").returncode == 0
    return tmp_path / "run"


def losses_of_trackio(run):
    (path,) = (run.parent / "trackio").glob("*.db")
    rows = sqlite3.connect(path).execute("select step, metrics from metrics order by step").fetchall()
    return {step: json.loads(text)["loss"] for step, text in rows if "loss" in json.loads(text)}


def losses_of_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars("loss")}


def losses_of_mlflow(run):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("dualtune").experiment_id])
    assert found.info.status == "FINISHED"
    return {metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, "loss")}


def losses_of_wandb(run):
    from wandb.proto import wandb_internal_pb2

    found, times = {}, {}
    for path in run.glob("wandb/offline-run-*/run-*.wandb"):
        for data in records_of(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "loss" in items:
                found[record.history.step.num or items["_step"]] = items["loss"]
                times[record.history.step.num or items["_step"]] = items["_timestamp"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    written = {row["step"]: datetime.fromisoformat(row["time"]).timestamp() for row in rows if "event" not in row}
    assert times == pytest.approx({step: written[step] for step in found}, abs=1e-3)  # of a step's last row
    return found


def records_of(data):
    """The records of LevelDB's log format: in blocks of 32 KiB, pieces with a head: checksum, size, kind."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


READ = {
    "trackio": losses_of_trackio, "tensorboard": losses_of_tensorboard, "mlflow": losses_of_mlflow,
    "wandb": losses_of_wandb,
}  # fmt: skip


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_has_each_row_once_and_no_secret(run, dualtune_main, name):
    pytest.importorskip(TRACKERS[name].package)
    for _ in range(2):
        done = dualtune_main("track", run, "--to", name)
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert READ[name](run) == pytest.approx({row["step"]: row["loss"] for row in rows if "loss" in row})
    for path in (each for each in run.parent.rglob("*") if each.is_file() and each.parent != run):
        assert SECRET.encode() not in Path(path).read_bytes(), path

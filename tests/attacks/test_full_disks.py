"""What fills a disk, and what a run does on a full one: logs are bounded, rows wait, and shortage is said early."""

import json
import os
import sys
from collections import namedtuple

import pytest

from dualtune.show.run import run
from dualtune.train import saver
from dualtune.train.state import metrics
from dualtune.train.state.metrics import WaitingRows, read_rows

FLOOD = """
import os, subprocess, sys
from dualtune.show.trackers.send import bounded_output
log = os.dup(2)
with bounded_output(log, 100_000):
    os.write(2, b"the first line\\n")
    for _ in range(400):
        os.write(2, b"x" * 10_000)
    subprocess.run([sys.executable, "-c", "print('y' * 2_000_000)"])
    print("z" * 2_000_000)
os.write(log, b"ours\\n")
os.write(2, b"after the end" * 1_000_000)
"""


def test_what_a_tracker_prints_is_bounded(python, tmp_path):
    log = tmp_path / "track-x.log"
    for _ in range(3):
        with log.open("ab") as file:
            assert python("-c", FLOOD, stderr=file, stdout=file, capture_output=False).returncode == 0
        text = log.read_text()
        assert text.startswith("the first line\n") and text.endswith("\nours\n")
        assert 100_000 <= len(text) < 100_200 and "more than 100000 bytes" in text


def rows_of(first, last):
    return [json.dumps({"step": step, "loss": 1.0}).encode() + b"\n" for step in range(first, last)]


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A file on a disk with room for `disk.room` bytes more."""
    write = os.write
    file = os.open(tmp_path / "rows", os.O_RDWR | os.O_CREAT)
    found = namedtuple("Disk", "path file room")(tmp_path / "rows", file, [0])

    def limited(file, data):
        if file != found.file:
            return write(file, data)
        if not found.room[0]:
            raise OSError(28, "No space left on device")
        done = write(file, bytes(data[: found.room[0]]))
        found.room[0] -= done
        return done

    monkeypatch.setattr(os, "write", limited)
    yield found
    os.close(found.file)


def test_rows_wait_for_room_and_are_written_in_order(disk):
    waiting, rows = WaitingRows(), rows_of(0, 50)
    for row in rows:
        disk.room[0] = 13  # a part of a row at a time
        waiting.add(row)
        waiting.write_to(disk.file)
    assert waiting.num_rows > 0
    disk.room[0] = 1 << 20
    assert waiting.write_to(disk.file) is None and waiting.num_lost == waiting.num_rows == 0
    assert disk.path.read_bytes() == b"".join(rows)


def test_above_the_bound_the_oldest_rows_are_lost_and_counted_and_no_row_is_torn(disk, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_WAITING", 1000)
    waiting, rows = WaitingRows(), rows_of(0, 500)
    disk.room[0] = len(rows[0]) + 5  # the second row is cut
    for row in rows:
        waiting.add(row)
        waiting.write_to(disk.file)
        assert len(waiting._data) <= 1000
    disk.room[0] = 1 << 20
    assert waiting.write_to(disk.file) is None
    steps = [row["step"] for row in read_rows(disk.path)]
    assert disk.path.read_bytes().count(b"\n") == len(steps) == 500 - waiting.num_lost
    assert steps[:2] == [0, 1] and steps[2:] == [*range(500 - len(steps[2:]), 500)] and len(steps) > 15


def test_a_disk_that_fills_is_seen_before_a_save_fails(
    make_config, write_rows, qa_rows, tiny_softmax, open_backend, tmp_path, monkeypatch
):
    usage, calls = namedtuple("Usage", "total used free"), []

    def disk_usage(path):
        calls.append(path)
        return usage(1 << 40, 0, 10 if len(calls) in (4, 5, 8) else 1 << 40)

    monkeypatch.setattr(saver.shutil, "disk_usage", disk_usage)
    config = make_config(write_rows(qa_rows), {"train.steps": 9, "run.save_every": 9}, tiny_softmax)
    run(config, open_backend("numpy"))
    events = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row.get("event") == "disk_low"]
    assert [row["free_bytes"] for row in events] == [10, 10]  # once each time
    assert events[1]["step"] - events[0]["step"] == 4 and events[0]["needed_bytes"] > 100


def test_a_tracker_that_floods_does_not_fill_the_disk(
    make_config, write_rows, qa_rows, tiny_softmax, open_backend, tmp_path, monkeypatch
):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "trackio.py").write_text(
        "import os\ndef init(**_):\n    for _ in range(900):\n        os.write(2, bytes(8000))\n    raise OSError\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
    for name in ("trackio", "dualtune.show.trackers.to_trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("dualtune.show.trackers.send.AGAIN_S", (0.0,))
    config = make_config(write_rows(qa_rows), {"run.track": ["trackio"]}, tiny_softmax)
    run(config, open_backend("numpy"))
    log = tmp_path / "run" / "track-trackio.log"
    assert (4 << 20) <= log.stat().st_size < (4 << 20) + 10_000 and "OSError" in log.read_text()

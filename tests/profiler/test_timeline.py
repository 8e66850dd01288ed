"""The timeline that runs write: its rows, a resume, several processes, and what taking it must not do."""

import errno
import mmap
import os
from dataclasses import replace

import pytest

from dualtune.base.errors import FormatError
from dualtune.show.run import run
from dualtune.train.hooks import Hook, PhaseChange, RunInfo, Watchers
from dualtune.train.profiler.analysis import find_leak, peak_of
from dualtune.train.profiler.profiler import Timeline
from dualtune.train.profiler.snapshot import MB, OLD_HEADER, DeviceSample, read_timeline
from dualtune.train.team import Team

BACKENDS = ["numpy", "torch", pytest.param("mlx", marks=pytest.mark.slow)]


@pytest.fixture
def trained(open_backend, make_config, write_rows, qa_rows, request, tmp_path):
    """Train a tiny model with overrides; return the rows of memory.csv."""
    data = write_rows(qa_rows)

    def train(backend, overrides, hooks=()):
        model = request.getfixturevalue("tiny_softmax" if backend == "numpy" else "tiny_llama")
        config = make_config(data, {"run.dir": tmp_path / "run"} | overrides, model)
        run(config, open_backend(backend), hooks)
        return read_timeline(tmp_path / "run" / "memory.csv")

    return train


def pages(num_bytes):
    """Memory of its own, straight from the system and written to: malloc may have room left from before."""
    found = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, num_bytes, mmap.PAGESIZE):
        found[start] = 1
    return found


STEP = ("data", "micro-batch", "optimizer")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_has_a_row_at_the_end_of_each_phase(trained, backend):
    rows = trained(backend, {"train.steps": 3, "data.eval": 0.25, "run.save_every": 2})
    one, two, three = ([(step, phase) for phase in STEP] for step in (1, 2, 3))
    assert [(row.step, row.phase) for row in rows] == [
        (0, "start"), (0, "evaluation"), *one, *two, (2, "save"), *three, (3, "save"), (3, "evaluation"),
        (3, "fingerprints"), (3, "result"),
    ]  # fmt: skip
    assert all(0 < row.used_bytes <= row.peak_bytes and row.used_bytes < row.total_bytes for row in rows)
    assert all(MB < row.process_bytes < row.total_bytes and row.device_bytes is None for row in rows)
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)
    assert all((row.cached_bytes is None) == (backend != "mlx") for row in rows)


def test_memory_that_a_phase_takes_is_in_its_row(trained):
    """32 MB that a hook takes in every backward pass and frees in the optimizer, as gradients would be."""

    class Ballast(Hook):
        def after_backward(self, micro_batch):
            self.ballast = pages(32 * MB)

        def on_phase_change(self, change):
            if change.phase == "data" and change.step > 1:
                self.ballast.close()

    rows = trained("numpy", {"train.steps": 6}, [Ballast()])
    by_phase = {phase: [row.process_bytes for row in rows if row.phase == phase and row.step > 2] for phase in STEP}
    least = min(b - a for a, b in zip(by_phase["data"], by_phase["micro-batch"], strict=True))
    assert 30 * MB < least < 40 * MB


def test_a_resumed_run_continues_the_file_without_the_rows_that_it_repeats(trained, tmp_path):
    first = trained("numpy", {"train.steps": 4, "run.save_every": 2, "run.keep": 4})
    with (tmp_path / "run" / "memory.csv").open("a") as file:
        file.write("5,data,1,,,,,9,1.000\n5,micro-batch,1,1")  # as if it had been killed in step 5
    rows = trained("numpy", {"train.steps": 6, "run.save_every": 2, "run.keep": 4})
    assert rows[: len(first)] == first
    assert [(row.step, row.phase) for row in rows[len(first) :]] == [
        (4, "start"), *((5, phase) for phase in STEP), *((6, phase) for phase in STEP), (6, "save"),
        (6, "fingerprints"), (6, "result"),
    ]  # fmt: skip


def test_a_foreign_file_of_that_name_is_replaced_and_a_new_run_begins_anew(tmp_path, open_backend):
    path = tmp_path / "memory.csv"
    path.write_text("something else\n")
    for first_step in (0, 7):
        timeline = Timeline(path, open_backend("numpy").memory)
        timeline.on_start(info(tmp_path, first_step))
        timeline.on_end()
        assert [(row.step, row.phase) for row in read_timeline(path)][-1] == (first_step, "start")
    assert len(read_timeline(path)) == 1 + 1  # step 0 is not repeated by a run from step 7


def info(run_dir, first_step=0):
    return RunInfo(run_dir, "numpy", 10, first_step, 1, 0, {"device": "cpu"}, 0)


def test_rows_reach_the_disk_while_the_run_lasts(tmp_path, open_backend):
    timeline = Timeline(tmp_path / "memory.csv", open_backend("numpy").memory)
    timeline.on_start(info(tmp_path))
    for step in range(100):
        timeline.on_phase_change(PhaseChange(step, "data", "optimizer"))
    assert 40 < len(read_timeline(tmp_path / "memory.csv")) <= 100
    timeline.on_end()
    assert len(read_timeline(tmp_path / "memory.csv")) == 101


def test_the_driver_is_asked_once_a_step(tmp_path, open_backend, monkeypatch):
    calls = iter(DeviceSample(100 + i, percent=90 + i, power_w=300.5) for i in range(9))
    monkeypatch.setattr("dualtune.train.profiler.profiler.device_reader", lambda device: calls.__next__)
    timeline = Timeline(tmp_path / "memory.csv", open_backend("numpy").memory)
    timeline.on_start(info(tmp_path))
    for phase in (*STEP, *STEP):
        timeline.on_phase_change(PhaseChange(1, phase, None))
    timeline.on_end()
    rows = read_timeline(tmp_path / "memory.csv")
    assert [row.device_bytes for row in rows] == [100, None, 101, None, None, 102, None]
    assert [row.gpu_percent for row in rows] == [90, None, 91, None, None, 92, None]
    assert [row.power_w for row in rows] == [300.5, None, 300.5, None, None, 300.5, None]


def test_a_full_disk_is_told_in_words(tmp_path, open_backend, monkeypatch):
    timeline = Timeline(tmp_path / "memory.csv", open_backend("numpy").memory)
    timeline.on_start(info(tmp_path))

    def full(file, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.write", full)
    told: list[str] = []
    watchers = Watchers([timeline])
    watchers.report = told.append
    watchers.end()
    file = tmp_path / "memory.csv"
    assert told == [f"{file}: rows of the memory in use are not written: No space left on device"]


def test_a_timeline_of_an_older_version_is_continued_with_its_columns(tmp_path, open_backend):
    path = tmp_path / "memory.csv"
    begun = ",".join(OLD_HEADER) + "\n1,data,6,,,,,9,1.000\n2,data,7,,,,,9,2.000\n"
    path.write_text(begun + "3,data,8,,,,,9,3.000\n")
    timeline = Timeline(path, open_backend("numpy").memory)
    timeline.on_start(replace(info(tmp_path), first_step=2))
    timeline.on_phase_change(PhaseChange(3, "data", None))
    timeline.on_end()
    text = path.read_text()
    assert text.startswith(begun) and all(line.count(",") == len(OLD_HEADER) - 1 for line in text.splitlines())
    assert [row.step for row in read_timeline(path)] == [1, 2, 2, 3]


def test_only_the_first_process_has_a_timeline_a_log_and_installed_hooks(trained, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("dualtune.train.run.Timeline", lambda *args: asked.append("timeline") or Hook())
    monkeypatch.setattr("dualtune.show.run.RunLog", lambda *args: asked.append("log") or Hook())
    monkeypatch.setattr("dualtune.train.run.installed_hooks", lambda: asked.append("installed") or ([], []))
    for is_first in (False, True):
        monkeypatch.setattr(Team, "is_first", property(lambda team, is_first=is_first: is_first))
        assert asked == []
        with pytest.raises(FormatError, match=r"memory\.csv"):  # the run itself succeeds
            trained("numpy", {"train.steps": 2})
    assert asked == ["installed", "timeline", "log"]


@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.slow)])
def test_a_snapshot_does_not_synchronize(open_backend, tmp_path, backend, monkeypatch):
    opened = open_backend(backend)

    def refuse(*args):
        raise AssertionError("synchronized")

    module = {"torch": "torch.cuda", "mlx": "mlx.core"}[backend]
    monkeypatch.setattr(f"{module}.synchronize", refuse)
    monkeypatch.setattr(type(opened), "synchronize", refuse)
    timeline = Timeline(tmp_path / "memory.csv", opened.memory)
    timeline.on_start(info(tmp_path))
    timeline.on_phase_change(PhaseChange(1, "data", None))
    timeline.on_end()
    assert len(read_timeline(tmp_path / "memory.csv")) == 2


# --- leaks in real runs ----------------------------------------------------------------------------------------------


class Leaks(Hook):
    """Keeps 2 MB of every step: in the end more than 1 % of a process that has run many tests."""

    def __init__(self) -> None:
        self.kept = []

    def after_step(self, step):
        self.kept.append(pages(500 * mmap.PAGESIZE))


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_clean_run_has_no_leak_and_a_planted_one_is_found(trained, tmp_path, backend):
    steps = {"train.steps": 500, "train.documents_per_step": 1, "run.save_every": 500}
    clean = trained(backend, steps | {"run.dir": tmp_path / "run"})
    assert len(clean) == 1 + 3 * 500 + 3
    process = find_leak(clean, "process_bytes")
    assert not find_leak(clean).found and not process.found
    (tmp_path / "run" / "memory.csv").unlink()
    (tmp_path / "run").rename(tmp_path / "clean")
    leak = find_leak(trained(backend, steps | {"train.steps": 120}, [Leaks()]))
    assert leak.found and leak.slope == pytest.approx(500 * mmap.PAGESIZE, rel=0.2)
    assert peak_of(clean).bytes > 0

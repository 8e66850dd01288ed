"""The numbers of a run so far, the lines that show them, and the log."""

import errno
import json
import math
import os
import re

import pytest
from rich.cells import cell_len

from dualtune.show.view.lines import RunLog, panel, sparkline
from dualtune.show.view.notebook import curve
from dualtune.show.view.run_view import MAX_EVALS, TIMED_STEPS, RunView, Thinned
from dualtune.train.hooks import EvalRecord, Event, Hook, PhaseChange, RunInfo, SampleRecord, StepRecord


def step_record(step, loss=2.0, step_s=2.0):
    return StepRecord(step, 0.1, loss, 1e-3, 1.0, 5, 6, step_s, 60.0, 600.0, 7, False)


def info(path, num_steps=10, first_step=0):
    engine = {"device": "cpu", "dtype": "float32", "dtype_reason": "exact", "quantization": "none",
              "quantization_reason": "as stored", "trainable_parameters": 1, "num_parameters": 9}  # fmt: skip
    return RunInfo(path, "numpy", num_steps, first_step, 4, 2, engine, 100)


class Clock:
    now = 1_000_000.0

    def __call__(self):
        return self.now


def phase(view, clock, name, seconds, step):
    """A phase that takes so many seconds, and ends."""
    view.on_phase_change(PhaseChange(step, name, None))
    clock.now += seconds
    view.on_phase_change(PhaseChange(step, "data", name))


def test_the_time_left_counts_steps_evaluations_samples_and_saves(tmp_path):
    clock = Clock()
    view = RunView(3, 4, clock=clock)
    view.on_start(info(tmp_path))
    assert view.seconds_left is None
    phase(view, clock, "evaluation", 10, 0)
    view.on_eval(EvalRecord(0, 3.0, 9))
    phase(view, clock, "samples", 5, 0)
    for step in (1, 2):
        view.on_step(step_record(step))
    assert view.seconds_left == 8 * 2 + 4 * (10 + 5)  # evaluations after 3, 6, 9 and 10; no save was measured
    view.on_step(step_record(3))
    assert view.seconds_left == 7 * 2 + 4 * 15  # that after step 3 is still to come
    view.on_eval(EvalRecord(3, 2.5, 9))
    assert view.seconds_left == 7 * 2 + 3 * 15
    view.on_step(step_record(4))
    phase(view, clock, "save", 100, 4)
    assert view.seconds_left == 6 * 2 + 3 * 15 + 2 * 100  # saves after 8 and 10
    assert view.saved == (4, clock.now)
    view.on_phase_change(PhaseChange(8, "save", "data"))
    view.on_event(Event(8, "save_failed", "no room"))
    view.on_end()
    assert view.saved[0] == 4


def test_a_stall_is_forgotten_after_some_steps(tmp_path):
    view = RunView(None, None)
    view.on_start(info(tmp_path, num_steps=1000))
    view.on_step(step_record(1, step_s=3600.0))
    for step in range(2, TIMED_STEPS + 1):
        view.on_step(step_record(step))
    assert view.seconds_left > 1000 * 2
    view.on_step(step_record(TIMED_STEPS + 1))
    assert view.seconds_left == (1000 - TIMED_STEPS - 1) * 2


class Stopped(Hook):
    """Ends a run after a step, as Ctrl-C does."""

    def __init__(self, after):
        self._after = after

    def on_step(self, record):
        if record.step == self._after:
            raise KeyboardInterrupt


def test_a_resumed_run_knows_what_came_before(trained, tmp_path):
    settings = {"train.steps": 8, "run.eval_every": 2, "run.save_every": 4, "train.learning_rate": 10.0}
    with pytest.raises(KeyboardInterrupt):
        trained("numpy", settings, [Stopped(6)])
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row | ({"eval_loss": 0.5} if row["step"] == 2 and "eval_loss" in row else {}) for row in rows]
    rows.append({"step": 4, "event": "save_failed", "message": "no room, before"})
    metrics.write_text("".join(json.dumps(row | {"step_s": 9e9}) + "\n" for row in rows))
    saved = max(path.stat().st_mtime for path in (tmp_path / "run" / "checkpoints").glob("step-*4"))

    class Watching(Hook):
        """The view after the start of the resumed run, before its first step."""

        def on_start(self, info):
            self.view = RunView(2, 4)
            self.view.on_start(info)
            self.at_start = (self.view.step, self.view.saved, self.view.seconds_left, self.view.last.step)

        def on_step(self, record):
            self.view.on_step(record)

        def on_eval(self, record):
            self.view.on_eval(record)

        def on_phase_change(self, change):
            self.view.on_phase_change(change)

    watching = Watching()
    trained("numpy", settings, [watching])
    view = watching.view
    assert watching.at_start == (4, (4, saved), None, 4)
    assert view.saved[0] == 8 and view.seconds_left < 1e6
    assert len(view.losses.points()) == 8 and [step for step, _ in view.evals] == [0, 2, 4, 6, 8]
    assert (view.best.step, view.best.eval_loss) == (2, 0.5) and view.evals[-1][1] > 0.5
    assert len(curve(view)["dots"]) == 5 and curve(view)["line"][0][0] == 86  # the first of eight steps


def test_the_curve_of_a_run_that_was_moved_begins_where_its_rows_do(tmp_path):
    rows = [{"step": step, "loss": 1.0} for step in range(101, 121)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (110, 120):
        (tmp_path / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    view = RunView(None, None)
    view.on_start(info(tmp_path, num_steps=200, first_step=110))
    assert view.saved[0] == 110  # not yet renamed, because the run continues before it
    assert (view.first_step, view.step, len(view.losses.points())) == (100, 110, 10)


def test_the_curve_is_thinned_to_means_of_equally_many():
    curve = Thinned(most=2)
    for value in range(11):
        curve.add(value)
    assert (curve.every, curve.points()) == (4, [1.5, 5.5, 9.0])


def test_a_sparkline_goes_from_the_lowest_to_the_highest():
    assert sparkline([8.0, 4.0, 1.0], 10) == "█▄▁"
    assert sparkline([1.0, 3.0, 5.0, 9.0], 2) == "▁█"
    assert sparkline([1.0, math.nan, 2.0], 10) == "▁×█"
    assert (sparkline([], 5), sparkline([2.0, 2.0], 5), sparkline([1.0, 2.0], 0)) == ("", "▁▁", "")


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_the_state_fits_the_terminal_and_no_text_controls_it(tmp_path, columns):
    view = RunView(None, None, clock=Clock(), used_bytes=3 << 30, limit_bytes=4 << 30)
    view.on_start(info(tmp_path))
    for step in range(1, 8):
        view.on_step(step_record(step, loss=9.0 / step))
    view.on_eval(EvalRecord(4, 1.5, 9))
    view.on_eval(EvalRecord(7, 1.75, 9))
    view.saved = (4, Clock.now - 65)
    view.on_sample(SampleRecord(7, "ask \x1b[2J\n", "größe\n and a bell \x07" * 20))
    lines = panel(view, columns, Clock.now)
    assert [line.split()[0] for line in lines] == ["curve", "evaluated", "state", "sample"]
    assert all(len(line) <= columns and line.isprintable() for line in lines)
    if columns == 200:
        assert "größe␊ and a bell ␇" in lines[3]
        assert lines[1] == "evaluated   1.7500 after step 7  best 1.5000 after step 4"
        assert lines[2] == "state       memory 3.0 GiB of 4.0 GiB  checkpoint 4 saved 1 min 05 s ago"


@pytest.mark.parametrize("columns", [20, 41, 60])
def test_a_sample_in_wide_characters_fits_the_terminal(tmp_path, columns):
    view = RunView(None, None)
    view.on_start(info(tmp_path))
    view.on_sample(SampleRecord(7, "首都はどこですか" * 9, "東京です。" * 90))
    (line,) = panel(view, columns, 0.0)
    assert columns - 1 <= cell_len(line) <= columns
    assert columns == 20 or "… → 東京" in line


def test_the_log_has_the_time_before_every_line_and_waits_for_a_full_disk(tmp_path, monkeypatch):
    log = RunLog(tmp_path / "log.txt", RunView(None, None, clock=Clock()), log_every=2)
    log.on_start(info(tmp_path))
    write = os.write

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.on_step(step_record(1, loss=3.0))
    log.on_step(step_record(2, loss=5.0))
    monkeypatch.setattr(os, "write", write)
    log.on_event(Event(2, "config_changed", "a table\nof two lines \x1b[2J"))
    log.on_end()
    lines = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("1970-01-12T13:46:40Z  ") and line.isprintable() for line in lines)
    said = [line.partition("  ")[2] for line in lines]
    assert [line.split()[0] for line in said] == ["engine", "checkpoints", "step", "config", "of"]
    assert re.match(r"step +2/10  loss 4\.0000  lr 1\.00e-03 .* 16 s left$", said[2])


def test_a_run_keeps_one_log_over_a_resume(trained, tmp_path):
    trained("numpy", {"train.steps": 2, "run.log_every": 1})
    trained("numpy", {"train.steps": 4, "run.log_every": 1})
    said = [line.split()[1:3] for line in (tmp_path / "run" / "log.txt").read_text(encoding="utf-8").splitlines()]
    assert [step for what, step in said if what == "step"] == ["1/2", "2/2", "3/4", "4/4"]
    assert ["resumed", "after"] in said


def test_a_view_keeps_a_bounded_number_of_evaluations_and_samples(tmp_path):
    view = RunView(1, 1)
    for step in range(MAX_EVALS + 3):
        view.on_eval(EvalRecord(step, 1.0 + (step != 1), 1))
    assert (len(view.evals), view.evals[0][0]) == (MAX_EVALS, 3)
    assert view.best.step == 1  # also if it is none of those
    for number in range(20):
        view.on_sample(SampleRecord(1, "ask", str(number)))
    assert [sample.answer for sample in view.samples] == [str(number) for number in range(12, 20)]

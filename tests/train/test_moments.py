"""Moments of a run: the order of the calls, their numbers, what a failing hook misses, and hooks from outside."""

import errno
import json
import pydoc

import numpy as np
import pytest

from dualtune.train.hooks import Hook, Watchers, installed_hooks
from dualtune.train.profiler import profiler as timeline
from dualtune.train.profiler.snapshot import read_timeline

pytestmark = pytest.mark.covering(1)

# Two micro-batches a step, an evaluation before, in the middle and at the end, and a save.
BUSY = {"train__steps": 2, "train__micro_batch_tokens": 64, "data__packing": False, "data__eval": 0.25,
        "run__save_every": 2, "run__eval_every": 1}  # fmt: skip


class Diary(Hook):
    """Every call, in order."""

    def __init__(self, name="", calls=None) -> None:
        self.name, self.calls = name, [] if calls is None else calls

    def _note(self, *what) -> None:
        self.calls.append((self.name, *what) if self.name else what)

    def on_step(self, record):
        self._note("step", record.step)

    def on_phase_change(self, change):
        self._note(change.phase, change.step, change.before)

    def before_forward(self, micro_batch):
        self._note("forward", micro_batch.step, micro_batch.index)

    def after_backward(self, micro_batch):
        self._note("backward", micro_batch.step, micro_batch.index)

    def on_gradients(self, view):
        self._note("gradients", view.step)

    def after_step(self, step):
        self._note("taken", step.step)


def rows_of_events(run_dir, event):
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row.get("event") == event]


def test_the_order_of_the_calls(lab):
    diary = Diary()
    lab.run(hooks=[diary], **BUSY)
    micro_batches = max(call[2] for call in diary.calls if call[0] == "forward") + 1
    assert micro_batches >= 2

    def step(number, before):
        around = [(what, number, index) for index in range(micro_batches) for what in ("forward", "backward")]
        return [
            ("data", number, before), ("micro-batch", number, "data"), *around, ("gradients", number),
            ("optimizer", number, "micro-batch"), ("taken", number), ("step", number),
        ]  # fmt: skip

    assert diary.calls == [
        ("evaluation", 0, None),
        *step(1, "evaluation"),
        ("evaluation", 1, "optimizer"),
        ("save", 1, "evaluation"),  # the best one so far
        *step(2, "save"),
        ("save", 2, "optimizer"),
        ("evaluation", 2, "save"),
        ("fingerprints", 2, "evaluation"),
        ("result", 2, "fingerprints"),
    ]


def test_the_work_is_done_between_the_calls_around_it(lab, monkeypatch):
    diary = Diary()
    engine = {"numpy": "dualtune.engine.testing.numpy_engine.NumpyEngine", "torch": "dualtune_torch.engine.TorchEngine"}
    for method in ("forward_backward", "optim_step"):
        original = getattr(pydoc.locate(engine[lab.backend.name]), method)

        def noted(self, *args, original=original, method=method, **options):
            diary.calls.append((method,))
            return original(self, *args, **options)

        monkeypatch.setattr(f"{engine[lab.backend.name]}.{method}", noted)
    lab.run(hooks=[diary], **BUSY | {"train__steps": 1})
    names = [call[0] for call in diary.calls]
    step = names[names.index("data") : names.index("taken") + 1]
    micro_batches = step.count("forward")
    assert step == [
        "data", "micro-batch", *micro_batches * ("forward", "forward_backward", "backward"),
        "gradients", "optimizer", "optim_step", "taken",
    ]  # fmt: skip


def test_the_numbers_are_those_of_the_step(lab, rows_of):
    counted = {}

    class Count(Diary):
        def before_forward(self, micro_batch):
            tokens, targets = counted.get(micro_batch.step, (0, 0))
            counted[micro_batch.step] = tokens + micro_batch.num_tokens, targets + micro_batch.num_targets

        def after_backward(self, micro_batch): ...

        def after_step(self, step):
            assert counted[step.step] == (step.num_tokens, step.num_targets)
            counted[step.step] = step.num_tokens, step.num_targets, step.lr

    result = lab.run(hooks=[Count()], **BUSY)
    steps, _ = rows_of(result.run_dir)
    assert counted == {row["step"]: (row["num_tokens"], row["num_targets"], row["lr"]) for row in steps}


def test_hooks_change_nothing(lab, weights_of):
    watched = lab.run("watched", hooks=[Diary()], **BUSY)
    assert weights_of(watched.run_dir) == weights_of(lab.run("alone", **BUSY).run_dir)


def test_a_hook_sees_the_gradient_of_the_whole_step_and_cannot_write_to_it(lab, rows_of):
    seen = []

    class Reader(Hook):
        def on_gradients(self, view):
            norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in view.gradients.values()))
            seen.append((view.step, norm, view.weights, view.engine.adapter_shapes))
            next(iter(view.gradients.values()))[:] = 0

    result = lab.run(hooks=[Reader()], **BUSY)
    steps, _ = rows_of(result.run_dir)
    assert [(step, pytest.approx(norm, rel=1e-5)) for step, norm, *_ in seen] == [
        (row["step"], row["grad_norm"]) for row in steps
    ]
    shapes = seen[0][3]
    assert all({name: w.shape for name, w in weights.items()} == shapes for _, _, weights, _ in seen)
    assert all(not weights[name].any() for name in shapes if "lora_B" in name for *_, weights, _ in seen[:1])
    (row,) = rows_of_events(result.run_dir, "hook_failed")
    assert "read-only" in row["message"]


def test_the_gradient_is_copied_only_when_it_is_asked_for():
    class Engine:
        calls = 0

        def gradient(self):
            self.calls += 1
            return {"a": np.ones(2)}

    class Twice(Hook):
        def on_gradients(self, view):
            assert view.step != 2 or view.gradients is view.gradients

    engine, watchers = Engine(), Watchers([Hook(), Twice()])
    watchers.show_gradients(1, engine)
    assert engine.calls == 0
    watchers.show_gradients(2, engine)
    assert engine.calls == 1


def test_hooks_are_called_in_the_given_order(lab):
    calls = []
    lab.run(hooks=[Diary("first", calls), Diary("second", calls)], **BUSY)
    assert [call[1:] for call in calls[::2]] == [call[1:] for call in calls[1::2]]
    assert {call[0] for call in calls[::2]} == {"first"} and {call[0] for call in calls[1::2]} == {"second"}


def test_nobody_is_called_if_nobody_listens():
    """No generator around the micro-batches."""
    batches = []
    assert Watchers([Hook()]).watched(1, batches) is batches
    phases_only = type("PhasesOnly", (Hook,), {"on_phase_change": lambda self, change: None})
    assert Watchers([phases_only()]).watched(1, batches) is batches


class Broken(Diary):
    """Fails in one of its methods."""

    def __init__(self, event, fails=lambda time: True) -> None:
        super().__init__()
        self.event, self.fails, self.times = event, fails, 0

    def _note(self, *what) -> None:
        if what[0] == self.event:
            self.times += 1
            if self.fails(self.times):
                raise OSError("no more room")
        super()._note(*what)


@pytest.mark.parametrize("event", ["forward", "backward", "gradients", "taken", "optimizer"])
def test_a_moment_that_fails_is_reported_once_and_never_repeated(lab, event, wording):
    broken, sound = Broken(event), Diary()
    result = lab.run(hooks=[broken, sound], **BUSY)
    (row,) = rows_of_events(result.run_dir, "hook_failed")
    wording(row["message"])
    assert "not repeated" in row["message"]
    assert broken.calls == [call for call in sound.calls if call[0] != event]
    assert broken.times == len(sound.calls) - len(broken.calls)


def test_a_hook_gets_no_moments_while_records_wait():
    """The record of step 1 fails twice: it comes before everything that follows it."""
    broken, problems = Broken("step", fails=lambda time: time <= 2), []
    watchers = Watchers([broken])
    watchers.report = problems.append
    record, moment = type("Record", (), {"step": 1})(), type("Taken", (), {"step": 1})()
    watchers.tell("on_step", record)
    watchers.tell_now("after_step", moment)
    assert broken.calls == []
    watchers.tell_now("after_step", moment)
    assert broken.calls == [("step", 1), ("taken", 1)]
    assert len(problems) == 1 and "delivered later" in problems[0]


def test_a_timeline_that_cannot_be_written_does_not_end_the_run(lab, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(timeline, "keep_rows", full)
    result = lab.run(train__steps=2)
    assert result.num_steps == 2
    assert [row["message"].partition(" raised")[0] for row in rows_of_events(result.run_dir, "hook_failed")] == [
        "Timeline.on_start"
    ]


# --- hooks from outside ----------------------------------------------------------------------------------------------

PACKAGE = """
from dualtune.train.hooks import Hook

class Outside(Hook):
    def on_start(self, info):
        self.file = open(info.run_dir / "outside.txt", "w")

    def before_forward(self, micro_batch):
        self.file.write(f"{micro_batch.step}.{micro_batch.index} ")

    def on_end(self):
        self.file.close()

class NoHook:
    pass

def broken():
    raise RuntimeError("needs a license")
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package with these entry points, as pip would leave it."""

    def install(*points):
        site = tmp_path / "site"
        info = site / "outside_hooks-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "outside_hooks.py").write_text(PACKAGE)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-hooks\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[dualtune.train.hooks]\n" + "\n".join(points) + "\n")
        monkeypatch.syspath_prepend(site)

    return install


def test_an_installed_hook_watches_a_run(lab, installed):
    installed("outside = outside_hooks:Outside")
    result = lab.run(train__steps=2)
    assert (result.run_dir / "outside.txt").read_text().split() == ["1.0", "2.0"]


def test_installed_hooks_come_in_the_order_of_their_names(installed):
    installed("b = outside_hooks:Outside", "a = dualtune.train.hooks:Hook")
    hooks, problems = installed_hooks()
    assert [type(hook).__name__ for hook in hooks] == ["Hook", "Outside"] and problems == []


def test_an_installed_hook_that_cannot_be_used_is_reported_and_the_run_continues(lab, installed):
    installed("a = outside_hooks:NoHook", "b = outside_hooks:broken", "c = outside_hooks:Missing", "d = nowhere:X")
    result = lab.run(train__steps=2)
    a, b, c, d = (row["message"] for row in rows_of_events(result.run_dir, "hook_failed"))
    assert "'a' (outside_hooks:NoHook)" in a and "it must be a subclass of dualtune.train.hooks.Hook" in a
    assert "RuntimeError: needs a license" in b and "Missing" in c and "No module named 'nowhere'" in d
    assert len(read_timeline(result.run_dir / "memory.csv")) > 6

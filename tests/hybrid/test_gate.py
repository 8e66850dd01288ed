"""The gate: predictions end before they make a run 3 % slower by the clock. Time passes only in the engine."""

import shutil

import pytest

from dualtune.config import parse_config
from dualtune.engine.testing.numpy_engine import NumpyEngine
from dualtune.train.hybrid.memory import Clock, Counts
from dualtune.train.hybrid.policy import Predictive
from dualtune.train.hybrid.prediction import GATE, Economics
from dualtune.train.hybrid.settings import settings_of
from dualtune.train.step import TrainingStep

CLOCK = {"hybrid__gate": "clock"}


class Time:
    """Seconds: one for a step with a gradient, `probe` for a micro-batch of probes."""

    def __init__(self, monkeypatch, probe):
        self.now, self.probe = 0.0, probe
        backward, logprobs = NumpyEngine.forward_backward, NumpyEngine.target_logprobs

        def timed_backward(engine, batch, *, divisor):
            self.now += 1
            backward(engine, batch, divisor=divisor)

        def timed_probe(engine, batch, **options):
            self.now += self.probe
            return logprobs(engine, batch, **options)

        monkeypatch.setattr(NumpyEngine, "forward_backward", timed_backward)
        monkeypatch.setattr(NumpyEngine, "target_logprobs", timed_probe)

    def policy(self, config, direction=None):
        return Predictive(config, lambda: self.now, direction)

    def backwards(self, config):
        """A policy whose predictions go back where the steps came from: none is accepted."""
        return self.policy(config, lambda window: -window.velocity())


@pytest.fixture
def every_opportunity(monkeypatch):
    """An attempt at each one, however the ones before went."""
    monkeypatch.setattr(Economics, "at_opportunity", lambda economics: (economics, not economics.is_disabled))


ONE = {"hybrid__max_consecutive_predicts": 1} | CLOCK


def test_slow_predictions_end_at_the_next_opportunity(lab, monkeypatch):
    time = Time(monkeypatch, probe=5.0)
    ended = lab.run(policy=time.policy, **ONE)
    (closed,) = ended.events("hybrid_disabled")
    checked = ended.events("prediction_kept", "prediction_undone")
    assert len(checked) == 1 and closed["step"] == checked[0]["step"]  # with it a full phase begins
    assert closed["because"] == "clock" and closed["extra_steps"] > closed["allowed_steps"] == pytest.approx(GATE * 48)
    assert ended.updates()[-10:] == [*range(39, 49)] and len(ended.events("predicted")) == 1
    (report,) = ended.events("hybrid")
    assert report["gate"] == "closed" and report["disabled"] and report["slower_pct"] > 3
    said = f"switched off by the clock at step {closed['step'] - 1}"
    assert said in report["message"] and said in (ended.path / "report.html").read_text(encoding="utf-8")


def test_slow_predictions_end_within_a_row_of_them_which_is_checked_all_the_same(lab, monkeypatch):
    ended = lab.run(policy=Time(monkeypatch, probe=5.0).policy, **CLOCK)
    (predicted,), (closed,) = ended.events("predicted"), ended.events("hybrid_disabled")
    assert closed["step"] == predicted["step"] + 1
    assert ended.events("prediction_kept", "prediction_undone")[0]["step"] == closed["step"] + 2


def test_fast_predictions_go_on(lab, monkeypatch):
    ended = lab.run(policy=Time(monkeypatch, probe=0.0).policy, **CLOCK)
    (report,) = ended.events("hybrid")
    assert len(ended.events("predicted")) > 1 and not ended.events("hybrid_disabled")
    assert report["gate"] == "open" and report["slower_pct"] < -50
    assert "switched off" not in report["message"]


def test_what_attempts_may_cost_is_never_exceeded(lab, monkeypatch, every_opportunity):
    """Each takes 2.4 steps, of which 6 are allowed: the third one would exceed them."""
    time = Time(monkeypatch, probe=0.8)
    ended = lab.run(policy=time.backwards, train__steps=200, run__eval_every=None, **CLOCK)
    assert len(ended.events("not_predicted")) == 2
    (closed,), (report,) = ended.events("hybrid_disabled"), ended.events("hybrid")
    assert closed["extra_steps"] == pytest.approx(4.8) and report["slower_pct"] == pytest.approx(2.4)
    without = lab.run("open", policy=time.backwards, train__steps=200, run__eval_every=None)
    assert len(without.events("not_predicted")) == 5 and without.events("hybrid_disabled")[0]["because"] == "cost"
    assert without.events("hybrid")[0]["gate"] == "none"


def test_the_decision_is_saved_with_its_step_and_a_faster_machine_keeps_it(lab, monkeypatch):
    """From the step at which it is taken, and from a later one; the processes after it never ask a clock."""
    time = Time(monkeypatch, probe=5.0)
    straight = lab.run("straight", policy=time.policy, **ONE)
    (closed,) = straight.events("hybrid_disabled")
    saved = [int(path.name.removeprefix("step-")) for path in (straight.path / "checkpoints").iterdir()]
    assert sorted(saved) == [closed["step"], 48]
    time.probe = 0.0
    shutil.copytree(straight.path, lab.home / "resumed")
    shutil.rmtree(lab.home / "resumed" / "checkpoints" / "step-00000048")
    shutil.rmtree(lab.home / "resumed" / "adapter")
    monkeypatch.setattr(TrainingStep, "from_first", None)
    resumed = lab.run("resumed", policy=time.policy, **ONE)
    assert resumed.events("resumed")[0]["step"] == closed["step"]
    a, b = straight.saved(48), resumed.saved(48)
    assert all(a.adapter[name].tobytes() == b.adapter[name].tobytes() for name in a.adapter)
    assert a.state["policy"]["values"]["economics"] == b.state["policy"]["values"]["economics"]
    assert resumed.events("hybrid")[0]["gate"] == "closed"


def test_what_was_spent_before_a_resume_counts(lab, monkeypatch, every_opportunity):
    """One attempt of 2.4 of 6 steps before, one after: the third would exceed them."""
    time, options = Time(monkeypatch, probe=0.8), {"run__save_every": 26, "hybrid__full_steps": 20} | CLOCK
    straight = lab.run("straight", policy=time.backwards, train__steps=200, **options)
    first, second = (row["step"] for row in straight.events("not_predicted"))
    shutil.copytree(straight.path, lab.home / "resumed")
    for path in (lab.home / "resumed" / "checkpoints").iterdir():
        if not first <= int(path.name.removeprefix("step-")) < second:
            shutil.rmtree(path)
    shutil.rmtree(lab.home / "resumed" / "adapter")
    resumed = lab.run("resumed", policy=time.backwards, train__steps=200, **options)
    assert resumed.events("resumed") and len(resumed.events("not_predicted")) == 2
    assert resumed.events("hybrid_disabled")[0]["step"] == straight.events("hybrid_disabled")[0]["step"]


def test_all_processes_decide_by_the_first_one_s_clock(lab, monkeypatch):
    monkeypatch.setattr(TrainingStep, "from_first", lambda step, number: 99.0)
    ended = lab.run(policy=Time(monkeypatch, probe=0.0).policy, **CLOCK)
    assert ended.events("hybrid_disabled")[0]["step"] == 5 and not ended.events("predicted")  # the first full step


def test_the_clock_counts_progress_not_steps_of_the_schedule():
    """Four steps in the time of ten, of which a prediction that stood for three is undone."""
    clock = Clock().with_step(2.0, 1, 1, is_full=True).with_step(12.0, 3, 3, is_full=False)
    assert clock.extra == pytest.approx(3.0)
    assert clock.with_step(6.0, 1, -2, is_full=False).extra == pytest.approx(10 - 2)
    assert Clock().extra == 0
    counts = Counts(warmup=4, full=6, correct=2, virtual_steps=8, undone_steps=5)
    assert counts.progress == 12 + 3


@pytest.mark.parametrize(
    ("settings", "gate"),
    [([], "clock"), (["run.deterministic=true"], "none"), (["hybrid.gate=none"], "none"),
     (["run.deterministic=true", "hybrid.gate=clock"], "clock")],
)  # fmt: skip
def test_auto_reads_no_clock_where_a_run_has_to_give_the_same_bits(settings, gate):
    assert settings_of(parse_config("{model: {name: m}, data: {train: t}}", overrides=settings)).gate == gate

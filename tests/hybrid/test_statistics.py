"""What a run reports: counts that add up, costs by tokens, and a speed-up from end to end."""

import pytest

from dualtune.engine.testing.numpy_engine import NumpyEngine
from dualtune.train.hybrid.memory import Clock, Counts, Statistics, StepResult
from dualtune.train.hybrid.monitor import TrainingPhase
from dualtune.train.hybrid.policy import Predictive


def test_the_speed_up_is_end_to_end():
    """Ten steps of 2 s and a prediction of ten in 5 s: 40 s of full steps took 25, whatever the prediction's share."""
    clock = Clock()
    for _ in range(10):
        clock = clock.with_step(2.0, 1, 1, is_full=True)
    assert clock.speedup == 1
    assert clock.with_step(5.0, 10, 10, is_full=False).speedup == pytest.approx(2.0 * 20 / 25)
    assert Clock().speedup is None


def test_a_run_reports_its_own_speed_up(lab, monkeypatch):
    """Time passes only in the engine: 1 s for a backward pass, a tenth for a probe. The first step is left out."""
    now, probes, forward, logprobs = [0.0], [0], NumpyEngine.forward_backward, NumpyEngine.target_logprobs

    def backward(engine, batch, *, divisor):
        now[0] += 1
        forward(engine, batch, divisor=divisor)

    def probe(engine, batch, **options):
        now[0] += 0.1
        probes[0] += 1
        return logprobs(engine, batch, **options)

    monkeypatch.setattr(NumpyEngine, "forward_backward", backward)
    monkeypatch.setattr(NumpyEngine, "target_logprobs", probe)
    ended = lab.run(policy=lambda config: Predictive(config, lambda: now[0]), run__eval_every=None)
    steps = len(ended.updates())
    assert steps < 40 and probes[0] > 4
    assert ended.policy.statistics().wall_clock_speedup == pytest.approx(47 / (steps - 1 + 0.1 * probes[0]))


def test_the_counts_add_up_to_the_schedule(lab):
    ended = lab.run()
    counts, statistics = ended.policy.statistics().counts, ended.policy.statistics()
    assert counts.steps == 48 and counts.computed == len(ended.updates())
    assert counts.predict == sum(row["steps"] for row in ended.events("predicted")) == counts.virtual_steps
    assert statistics.backward_reduction_pct == pytest.approx(100 * counts.predict / 48)
    assert sum(statistics.shares().values()) == pytest.approx(1)
    assert counts.step_tokens == sum(row["num_tokens"] for row in ended.rows if "lr" in row)
    (report,) = ended.events("hybrid")
    assert report["step"] == 48 and report["phases"]["predict"] == counts.predict
    assert report["backward_skipped"] == counts.predict and report["cost"] < report["cost_without"]
    assert report["message"].splitlines()[0].split() == ["phase", "steps", "share"]


def test_probes_are_counted_by_their_tokens(lab):
    ended = lab.run()
    prepared = lab.prepared("other")
    probes = prepared.data.probes
    tokens = [int(prepared.data.train.lengths[part].sum()) for part in (probes[0::2], probes[1::2])]
    counts = ended.policy.statistics().counts
    kept = len(ended.events("prediction_kept"))
    searched = counts.probe_tokens - 2 * kept * tokens[1]
    assert searched > 0 and searched % tokens[0] == 0 and searched // tokens[0] >= 3 * counts.attempts


def test_the_cost_is_that_of_the_steps_and_the_probes():
    counts = Counts(warmup=10, full=20, predict=50, correct=10, probe_tokens=500, step_tokens=4000)
    statistics = Statistics(counts, 2.11, None, False)
    assert statistics.cost == pytest.approx(40 * 2.11 + 5) and statistics.cost_without == pytest.approx(90 * 2.11)
    assert statistics.backward_reduction_pct == pytest.approx(100 * 50 / 90)
    assert Statistics(Counts(), 2.11, None, False).table().endswith("no cost")


def test_a_step_has_a_result(lab):
    policy = lab.run().policy
    result = policy.last_result()
    assert isinstance(result, StepResult) and result.phase in TrainingPhase and not result.was_predicted
    assert result.loss > 0 and result.gradient_norm > 0 and result.step_time_ms > 0
    assert 0 <= result.prediction_error < 1 and 0.6 <= result.confidence <= 1
    assert policy.current_step() == 48 and policy.current_confidence() == result.confidence
    assert policy.current_phase() is result.phase


def test_a_forced_full_phase_delays_the_prediction(lab):
    def forcing(config):
        policy = Predictive(config)
        policy.force_full_phase(20)
        return policy

    forced = lab.run("forced", policy=forcing).events("predicted")[0]
    first = lab.run("free").events("predicted")[0]
    assert forced["step"] - forced["steps"] == 4 + 20 and first["step"] - first["steps"] == 4 + 6

"""The guards: what counts as a spike, when a run ends early, and which adapter is written then."""

import json
import math
from dataclasses import asdict

import pytest
from safetensors.numpy import load_file

from dualtune.base.errors import ConfigError, FormatError, NonFiniteError
from dualtune.train.guards import WINDOW, Guards, robust_z
from dualtune.train.hooks import EvalRecord, Hook, StepRecord
from dualtune.train.state import checkpoint
from dualtune.train.state.listing import list_checkpoints

pytestmark = pytest.mark.covering(1)

NOISY = [2.0 + 0.1 * math.sin(7 * i) for i in range(40)]


def step_record(step, loss, grad_norm=1.0):
    skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
    return StepRecord(step, 0.1, loss, 1e-3, grad_norm, 10, 20, 0.1, 200.0, 600.0, 0, skipped)


@pytest.fixture
def guards_of(make_config):
    def make(state=None, **settings):
        chosen = {f"guards.{key}": value for key, value in settings.items()}
        config = make_config("data.jsonl", chosen | {"data.eval": 0.5})
        return Guards(config, lambda step: [f"data.jsonl:{step}"], state)

    return make


def events_of(guards, losses):
    found = [guards.on_step(step_record(step, loss)) for step, loss in enumerate(losses, start=1)]
    return [(event.step, event.event) for event in found if event]


# --- spikes ----------------------------------------------------------------------------------------------------------


def test_the_score_of_normal_noise_is_in_standard_deviations():
    """For a normal sample the robust standard deviation is the standard deviation."""
    from statistics import NormalDist

    sample = [NormalDist(5, 0.25).inv_cdf((i + 0.5) / 1001) for i in range(1001)]
    assert robust_z(5 + 3 * 0.25, sample) == pytest.approx(3, rel=2e-2)
    assert robust_z(5 - 3 * 0.25, sample) == pytest.approx(-3, rel=2e-2)


def test_an_outlier_in_the_history_does_not_hide_the_next():
    assert robust_z(9.0, [*NOISY, 50.0, 60.0]) > 30


def test_a_short_or_flat_history_makes_nothing_of_little():
    assert robust_z(100.0, NOISY[:15]) == 0.0
    assert 0 < robust_z(2.02, [2.0] * 40) < 2


def test_a_spike_is_told_once_and_names_its_rows(guards_of):
    guards = guards_of()
    assert events_of(guards, [*NOISY, 9.0, 9.5, 2.0, 9.0]) == [(41, "spike"), (44, "spike")]
    assert guards.spike_step is None
    event = guards_of(state=guards_with(NOISY)).on_step(step_record(41, 9.0))
    assert event.details["rows"] == ["data.jsonl:41"]
    assert "step 41: loss 9.0000 is " in event.message


def guards_with(losses):
    return {"losses": losses}


@pytest.mark.parametrize(("on_spike", "asks"), [("ignore", None), ("warn", None), ("rollback", 41)])
def test_on_spike_decides(guards_of, on_spike, asks):
    guards = guards_of(on_spike=on_spike)
    assert events_of(guards, [*NOISY, 9.0]) == ([] if on_spike == "ignore" else [(41, "spike")])
    assert guards.spike_step == asks


def test_falling_losses_are_no_spikes(guards_of):
    assert events_of(guards_of(), [8.0 * 0.97**i + 0.05 * math.sin(5 * i) for i in range(200)]) == []


def test_the_threshold_counts(guards_of):
    losses = [*NOISY, 2.6]
    score = robust_z(2.6, NOISY)
    assert events_of(guards_of(spike_threshold=score - 0.1), losses) == [(41, "spike")]
    assert events_of(guards_of(spike_threshold=score + 0.1), losses) == []


def test_a_restored_guard_decides_as_the_one_that_was_saved(guards_of):
    losses = [*(NOISY * 3), 9.0, 9.0, math.nan, 2.0, 30.0]
    straight = events_of(guards_of(), losses)
    for cut in (5, 60, 121, 122, 123):
        first, second = guards_of(), None
        before = events_of(first, losses[:cut])
        second = guards_of(state=json.loads(json.dumps(asdict(first.state))))
        after = [second.on_step(step_record(step, loss)) for step, loss in enumerate(losses[cut:], start=cut + 1)]
        assert before + [(event.step, event.event) for event in after if event] == straight
    assert len(first.state.losses) == WINDOW


def test_a_checkpoint_is_returned_to_once_and_then_an_older_one(guards_of):
    guards = guards_of(on_spike="rollback")
    assert guards.may_return_to(40)
    guards.rolled_back(40, 43, guards_with(NOISY))
    assert guards.state.losses == NOISY
    assert [guards.may_return_to(step) for step in (36, 40, 43, 44)] == [True, False, False, True]
    guards.rolled_back(36, 44, guards_with(NOISY))
    assert [guards.may_return_to(step) for step in (32, 36, 40, 44, 48)] == [True, False, False, False, True]


@pytest.fixture
def jolt(lab, monkeypatch):
    """A learning rate that is far too large at one step, counted from 1: the loss of the next one jumps."""
    from dualtune.train.objective import learning_rate

    factor = 1e5 if lab.backend.name == "numpy" else 1e4

    def at(step):
        rate = lambda config, index, num: learning_rate(config, index, num) * (factor if index + 1 == step else 1)  # noqa: E731
        monkeypatch.setattr("dualtune.train.step.learning_rate", rate)

    return at


SPIKY = {"train__steps": 26, "run__save_every": 4, "guards__on_spike": "rollback", "train__max_grad_norm": None,
         "data__eval": 0.25, "run__eval_every": 5, "train__learning_rate": 1e-4, "train__schedule": "constant",
         "train__documents_per_step": 12}  # fmt: skip


def on_both(name, steps, on_torch):
    """The steps on NumPy, and on torch those that differ in kind."""
    cases = [(backend, step) for backend in ("numpy", "torch") for step in steps]
    marks = {case: [pytest.mark.long] * (case[0] == "torch" and case[1] not in on_torch) for case in cases}
    return pytest.mark.parametrize(
        ("lab", name), [pytest.param(*case, marks=marks[case]) for case in cases], indirect=["lab"]
    )


@on_both("step", [17, 18, 19, 20, 22, 23, 25], on_torch=[20])
def test_a_rollback_returns_to_the_schedule_and_leaves_the_window_out(lab, jolt, rows_of, weights_of, step):
    """Wherever the spike falls: before, on or after a step that saves or evaluates, or on the last one."""
    jolt(step)
    result = lab.run(**SPIKY)
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows_of(result.run_dir)[0]] == list(range(1, 27))
    spikes = [(row["step"], row.get("to_step")) for row in rows if row.get("event") in ("spike", "rollback")]
    target = step // 4 * 4
    expected = [(step + 1, None), (step + 1, target)]
    if step == target:  # the checkpoint has the damage in it, as the next step shows
        expected += [(step + 2, None), (step + 2, target - 4)]
    assert spikes == expected
    last = spikes[-1][0]
    if last < 26:  # the weights came back: the losses go on where they were before the jolt
        after = next(row["loss"] for row in rows if row["step"] == last + 1 and "lr" in row)
        assert after < 1.1 * max(row["loss"] for row in rows if row["step"] <= step and "lr" in row)
    assert weights_of(lab.run("again", **SPIKY).run_dir) == weights_of(result.run_dir)


@on_both("stop", [17, 18, 19, 20, 21], on_torch=[18])
def test_a_rollback_is_the_same_whenever_the_run_was_stopped(lab, jolt, weights_of, rows_of, stop):
    """A stop saves a checkpoint that the uninterrupted run has not; it must not be returned to."""
    import os
    import signal

    from dualtune.base.errors import Preempted

    class Terminate(Hook):
        def on_step(self, record):
            if record.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)

    jolt(18)
    straight = lab.run("straight", **SPIKY)
    assert '"event": "rollback"' in (straight.run_dir / "metrics.jsonl").read_text()
    with pytest.raises(Preempted):
        lab.run("stopped", [Terminate()], **SPIKY)
    resumed = lab.run("stopped", **SPIKY)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    losses = [[(row["step"], row["loss"]) for row in rows_of(r.run_dir)[0]] for r in (resumed, straight)]
    assert losses[0] == losses[1]


# --- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (2.0, math.inf), (-math.inf, math.nan)])
def test_a_skipped_step_is_named_counted_and_not_measured_against(guards_of, loss, norm):
    guards = guards_of(state=guards_with(NOISY))
    event = guards.on_step(step_record(7, loss, norm))
    assert (event.event, event.details) == ("skipped_step", {"rows": ["data.jsonl:7"]})
    assert f"loss {loss}, gradient norm {norm}: skipped" in event.message and "data.jsonl:7" in event.message
    assert (guards.state.num_skipped, guards.state.losses) == (1, NOISY)


def test_only_steps_in_a_row_count_towards_the_limit(guards_of):
    guards = guards_of(nonfinite_limit=2)
    for step, loss in enumerate([math.nan, math.nan, 2.0, math.nan, math.nan]):
        guards.on_step(step_record(step, loss))
        guards.check(num_steps=5)
    guards.on_step(step_record(6, math.nan))
    with pytest.raises(NonFiniteError, match=r"3 steps in a row .* guards\.nonfinite_limit is 2"):
        guards.check(num_steps=9)


def test_a_run_of_which_no_step_changed_the_weights_has_failed(guards_of):
    guards = guards_of(nonfinite_limit=5)
    guards.on_step(step_record(1, math.nan))
    guards.check(num_steps=2)
    guards.on_step(step_record(2, math.nan))
    with pytest.raises(NonFiniteError, match=r"^all 2 steps of the run had a loss .* None of them changed"):
        guards.check(num_steps=2)


# --- early stopping and the best evaluation --------------------------------------------------------------------------


def test_early_stopping_counts_evaluations_without_a_new_best(guards_of):
    guards = guards_of(early_stopping=2)
    seen = []
    for step, loss in enumerate([9.0, 3.0, 2.0, 2.5, 1.9, 1.9, math.nan]):  # step 0 is the base model
        seen.append((guards.on_eval(EvalRecord(step, loss, 5)), guards.stops_early))
    assert [best for best, _ in seen] == [False, True, True, False, True, False, False]
    assert [stop for _, stop in seen] == [False] * 6 + [True]
    assert (guards.state.best_step, guards.state.best_loss) == (4, 1.9)


def test_an_evaluation_counts_once_also_when_a_resumed_run_sees_it_again(guards_of):
    guards = guards_of(early_stopping=2)
    for step in (1, 2, 2, 2):
        guards.on_eval(EvalRecord(step, 1.0, 5))
    assert guards.state.evals_since_best == 1 and not guards.stops_early


class Scripted(Hook):
    """Crashes after a step, as if the process were killed."""

    def __init__(self, step):
        self.step = step

    def on_step(self, record):
        if record.step == self.step:
            raise KeyboardInterrupt


@pytest.fixture
def eval_losses(monkeypatch):
    """Evaluations that give these losses at these steps, so that the best one is known."""

    def script(losses):
        def evaluate(engine, documents, max_tokens, step, show, team):
            return EvalRecord(step, losses[step], 5)

        monkeypatch.setattr("dualtune.train.run.evaluate", evaluate)

    return script


LOSSES = {0: 9.0, 2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5, 10: 0.1, 12: 0.1}
EARLY = {"train__steps": 12, "data__eval": 0.25, "run__eval_every": 2, "run__save_every": None,
         "guards__early_stopping": 2, "guards__restore_best": True}  # fmt: skip


def test_a_run_ends_early_with_the_best_adapter(lab, eval_losses, weights_of, rows_of):
    eval_losses(LOSSES)
    result = lab.run(**EARLY)
    assert result.num_steps == 8
    assert [row["step"] for row in rows_of(result.run_dir)[1]] == [0, 2, 4, 6, 8]
    best = checkpoint.read(result.run_dir / "checkpoints" / "step-00000004")
    written = load_file(result.adapter_dir / "adapter_model.safetensors")
    assert all((written[name] == tensor).all() for name, tensor in best.adapter.items())
    training = json.loads((result.adapter_dir / "dualtune.json").read_text())["training"]
    assert (training["steps"], training["best_step"], training["best_eval_loss"]) == (8, 4, 1.0)
    last = lab.run("last", **EARLY | {"guards__restore_best": False})
    assert weights_of(last.run_dir) != weights_of(result.run_dir)
    assert lab.run(**EARLY).was_finished


@on_both("step", [3, 5, 7], on_torch=[5])
def test_a_stopped_run_ends_early_where_the_straight_one_does(lab, eval_losses, weights_of, step):
    eval_losses(LOSSES)
    straight = lab.run("straight", **EARLY)
    with pytest.raises(KeyboardInterrupt):
        lab.run("stopped", [Scripted(step)], **EARLY)
    resumed = lab.run("stopped", **EARLY)
    assert resumed.num_steps == 8
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)


def test_the_best_checkpoint_is_kept_besides_the_newest(lab, eval_losses):
    eval_losses(LOSSES | {9: 5.0})
    settings = EARLY | {"guards__early_stopping": None, "run__save_every": 1, "run__keep": 2, "train__steps": 9}
    result = lab.run(**settings)
    found = list_checkpoints(result.run_dir)
    assert [(entry.step, entry.is_best) for entry in found] == [(9, False), (8, False), (4, True)]
    assert all(entry.problem is None and entry.num_bytes > 1000 for entry in found)


def test_a_damaged_best_checkpoint_is_said_and_the_last_adapter_written(lab, eval_losses, rows_of):
    eval_losses(LOSSES)

    class Vandal(Hook):
        def on_eval(self, record):
            if record.step == 8:
                (lab.tmp_path / "run" / "checkpoints" / "step-00000004" / "state.json").write_text("{}")

    result = lab.run(hooks=[Vandal()], **EARLY)
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("event") == "no_best"] == [8]
    assert result.adapter_dir.is_dir()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guards.early_stopping": 2}, "guards.early_stopping: got 2, needs evaluation data"),
        ({"guards.restore_best": True}, "guards.restore_best: got true, needs evaluation data"),
        ({"guards.on_spike": "rollback", "run.save_every": None}, "guards.on_spike: got rollback, needs checkpoints"),
    ],
)
def test_guards_that_cannot_work_are_refused(make_config, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_config("data.jsonl", settings)


def test_a_run_none_of_whose_checkpoints_verifies_is_refused_and_left_alone(lab):
    result = lab.run(train__steps=4, run__save_every=2)
    for path in (result.run_dir / "checkpoints").iterdir():
        (path / "state.json").write_text("{}")
    before = sorted(result.run_dir.rglob("*"))
    with pytest.raises(FormatError, match=r"no checkpoint in .* can be used:\n.*step-00000004: state.json has 2 bytes"):
        lab.run(train__steps=4, run__save_every=2)
    assert sorted(result.run_dir.rglob("*")) == before

"""What a prediction does to a run: real, exact, counted, checked, and undone to the bit if it hurts."""

import contextlib

import numpy as np
import pytest

from dualtune.base.errors import Preempted
from dualtune.engine.testing.numpy_card import CARD as NUMPY_CARD
from dualtune.engine.testing.numpy_engine import NumpyEngine
from dualtune.train.hybrid import step as step_module
from dualtune.train.hybrid.monitor import Monitor, TrainingPhase
from dualtune.train.hybrid.policy import Predictive
from dualtune.train.hybrid.prediction import Economics, Window, flatten, split
from dualtune.train.hybrid.step import SearchResult
from dualtune.train.objective import learning_rate
from dualtune.train.step import TrainingStep

pytestmark = pytest.mark.covering(1)


def same(a, b):
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def place_of(engine):
    """Everything that a rollback has to bring back, as bytes."""
    state = engine.optimizer_state()
    parts = {"": engine.adapter_state(), **state.slots}
    return state.step, {f"{part} {n}": w.tobytes() for part, tensors in parts.items() for n, w in tensors.items()}


@pytest.fixture
def watch(monkeypatch):
    """(index, phase before, adapter before, place before, outcome, adapter after, place after) of every step."""
    seen, take = [], Predictive.take

    def watched(policy, step):
        before = (step.index, policy.current_phase(), step.engine.adapter_state(), place_of(step.engine))
        outcome = take(policy, step)
        seen.append((*before, outcome, step.engine.adapter_state(), place_of(step.engine)))
        return outcome

    monkeypatch.setattr(Predictive, "take", watched)
    return seen


@pytest.fixture
def velocities(monkeypatch):
    """Every velocity that was computed."""
    seen, velocity = [], Window.velocity

    def noted(window):
        seen.append(velocity(window))
        return seen[-1]

    monkeypatch.setattr(Window, "velocity", noted)
    return seen


def bad_jumps(monkeypatch, number=1, tau=3):
    """The next searches take a long way in a random direction for the best."""
    search, left = step_module.line_search, [number]

    def lying(losses_at, now_D, *rest):
        if not left[0]:
            return search(losses_at, now_D, *rest)
        left[0] -= 1
        return SearchResult(tau, 1.0, now_D, num_probed=1)

    def astray(window):
        real = velocity(window)
        return np.random.default_rng(0).normal(size=real.shape).astype(np.float32) if left[0] else real

    velocity = Window.velocity
    monkeypatch.setattr(step_module, "line_search", lying)
    monkeypatch.setattr(Window, "velocity", astray)


# --- a prediction is real -------------------------------------------------------------------------------------------


def test_the_weights_change_by_exactly_what_was_predicted(any_lab, watch, velocities):
    any_lab.run(train__steps=30)
    jumps = [row for row in watch if row[4].update is None]
    assert len(jumps) >= 2
    for _, phase, before, place, outcome, after, place_after in jumps[:1]:
        change = np.float32(outcome.num_steps) * velocities[0]  # the rate is constant
        assert np.abs(change).max() > 1e-4
        assert same(after, split(flatten(before) + change, before))
        assert place_after[0] == place[0] and phase is TrainingPhase.FULL
        slots = [{n: v for n, v in found[1].items() if not n.startswith(" ")} for found in (place, place_after)]
        assert slots[0] == slots[1] and slots[0]  # the moments stay


def test_a_prediction_goes_on_along_the_last_steps(lab, watch):
    """Least squares in another way, from what the steps before have left."""
    lab.run()
    at = next(at for at, row in enumerate(watch) if row[4].update is None)
    path = np.array([flatten(row[5]) for row in watch[at - 3 : at]])  # half a window of full_steps = 6
    slope = np.polyfit(np.arange(3), path, 1)[0]
    found = flatten(watch[at][5]) - flatten(watch[at][2])
    assert found == pytest.approx(watch[at][4].num_steps * slope, abs=1e-5)


def test_a_prediction_skips_its_steps_of_data_and_of_the_schedule(lab):
    ended = lab.run(train__schedule="cosine", run__save_every=20)
    jumps = ended.events("predicted")
    skipped = {s for row in jumps for s in range(row["step"] - row["steps"] + 1, row["step"] + 1)}
    assert skipped and ended.updates() == sorted({*range(1, 49)} - skipped)
    config = lab.prepared("other", train__schedule="cosine").config
    assert [row["lr"] for row in ended.rows if "lr" in row] == [
        learning_rate(config, s - 1, 48) for s in ended.updates()
    ]
    assert {20, 40} <= {int(path.name[5:]) for path in (ended.path / "checkpoints").iterdir()}


def test_a_prediction_under_a_falling_rate_is_shorter(lab, watch, velocities):
    lab.run(train__schedule="linear", train__warmup=0)
    index, _, before, _, outcome, after, _ = next(row for row in watch if row[4].update is None)
    rates = [48 - i for i in range(48)]
    worth = sum(rates[index : index + outcome.num_steps]) / np.mean(rates[index - 3 : index])
    assert worth < outcome.num_steps
    assert flatten(after) - flatten(before) == pytest.approx(worth * velocities[0], abs=1e-6)


def test_no_probe_document_is_trained_on(lab):
    data = lab.prepared().data
    assert len(data.probes) == 8
    taken = {i for step in range(40) for i in data.order.step(step).documents.tolist()}
    assert taken == {*range(len(data.train))} - {*data.probes}


def test_a_model_that_is_trained_whole_is_predicted_too(lab_for):
    more = {"adapter__rank": 16, "adapter__alpha": 32.0, "adapter__dropout": 0.05}  # the defaults: it has no adapter
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    options = more | {"adapter__targets": targets, "train__learning_rate": 1e-4}
    ended = lab_for("torch").run(adapter__method="full", train__steps=20, **options)
    counts = ended.policy.statistics().counts
    assert counts.accepted >= 1 and counts.undone == 0 and ended.policy.statistics().step_cost == pytest.approx(3.11)


# --- and checked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["predict", "fast_forward"])
def test_a_prediction_that_hurts_is_undone_to_the_bit(any_lab, watch, monkeypatch, engine):
    bad_jumps(monkeypatch)
    places, add = {}, TrainingStep.add_gradients

    def noted(step):
        places[step.index] = place_of(step.engine)  # after a rollback in the same step
        add(step)

    monkeypatch.setattr(TrainingStep, "add_gradients", noted)
    ended = any_lab.run(train__steps=24, hybrid__engine=engine, hybrid__trust_region=1e9)
    (undone,) = ended.events("prediction_undone")
    jump = ended.events("predicted")[0]
    first = jump["step"] - (3 if engine == "predict" else 1)
    before = next(row for row in watch if row[0] == first)[3]
    assert places[undone["step"] - 1] == before != next(row for row in watch if row[0] == first)[6]
    counts = ended.policy.statistics().counts
    assert (counts.undone, counts.divergences) == (1, len(critical(ended)) or 1)
    assert counts.undone_steps == undone["steps"] > 0  # no progress: the weights have none of them
    assert undone["step"] in ended.updates()  # the step after a rollback is an ordinary one


def test_the_check_alone_undoes_a_prediction_that_no_signal_betrays(lab, monkeypatch):
    bad_jumps(monkeypatch)
    monkeypatch.setattr(Monitor, "compare", lambda monitor, predicted, actual: (monitor, None))
    monkeypatch.setattr(Monitor, "observe", lambda monitor, *numbers: (monitor, None))
    ended = lab.run(hybrid__trust_region=1e9)
    (undone,) = ended.events("prediction_undone")
    assert undone["message"].endswith("worse by more than one standard error") and not ended.events("hybrid_signal")
    assert ended.policy.statistics().counts.divergences == 1


def critical(ended):
    return [row for row in ended.events("hybrid_signal") if row["level"] == "critical"]


def test_an_injected_nan_is_counted_once_and_undone_to_the_bit(lab, watch, monkeypatch):
    forward, places, add = NumpyEngine.forward_backward, {}, TrainingStep.add_gradients
    seen = []

    def poisoned(engine, batch, *, divisor):
        forward(engine, batch, divisor=divisor)
        if not seen and any(row[4].update is None for row in watch):
            seen.append(1)
            engine._loss = float("nan")

    def noted(step):
        places[step.index] = place_of(step.engine)
        add(step)

    monkeypatch.setattr(NumpyEngine, "forward_backward", poisoned)
    monkeypatch.setattr(TrainingStep, "add_gradients", noted)
    ended = lab.run()
    (signal,) = ended.events("hybrid_signal")
    assert signal["signal"] == "not finite" and signal["level"] == "critical"
    (undone,) = ended.events("prediction_undone")
    entry = next(row for row in watch if row[4].update is None)
    assert places[undone["step"] - 1] == entry[3] and undone["step"] == signal["step"]
    counts = ended.policy.statistics().counts
    assert (counts.divergences, counts.undone) == (1, 1)


def test_a_calm_run_has_no_divergence(lab):
    ended = lab.run()
    assert ended.policy.statistics().counts.divergences == 0 and ended.events("prediction_kept")
    assert not ended.events("hybrid_signal", "prediction_undone")


def test_a_stop_in_the_middle_of_a_rollback_leaves_everything_as_it_was(lab, watch, monkeypatch):
    bad_jumps(monkeypatch)
    straight = lab.run("straight", hybrid__trust_region=1e9)
    at = straight.events("prediction_undone")[0]["step"] - 1
    before, optimizer_step = next((row[2], row[3][0]) for row in watch if row[0] == at)
    bad_jumps(monkeypatch)
    add = TrainingStep.add_gradients

    def stopped(step):
        if step.index == at:
            raise Preempted("stopped")
        add(step)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "add_gradients", stopped)
        with pytest.raises(Preempted):
            lab.run("stopped", hybrid__trust_region=1e9)
    ended = lab.run("stopped", hybrid__trust_region=1e9)
    assert same(ended.saved(at).adapter, before) and ended.saved(at).optimizer.step == optimizer_step
    assert ended.events("resumed")[0]["step"] == at and ended.events("prediction_undone")[0]["step"] == at + 1
    assert same(ended.saved(48).adapter, straight.saved(48).adapter)
    assert same(ended.saved(48).policy, straight.saved(48).policy)
    assert ended.saved(48).state["policy"] == straight.saved(48).state["policy"]


def test_a_random_direction_of_equal_length_is_rejected_on_a_real_model(lab, monkeypatch):
    rng, velocity = np.random.default_rng(0), Window.velocity

    def chance(window):
        real = velocity(window)
        direction = rng.normal(size=real.shape).astype(np.float32)
        return direction * np.float32(np.linalg.norm(real) / np.linalg.norm(direction))

    monkeypatch.setattr(Window, "velocity", chance)
    monkeypatch.setattr(Economics, "at_opportunity", lambda economics: (economics, True))
    monkeypatch.setattr(Economics, "after_attempt", lambda economics, gain, cost: economics)
    monkeypatch.setattr(Economics, "after_failure", lambda economics: economics)
    counts = lab.run(train__steps=320).policy.statistics().counts
    assert counts.attempts >= 40 and counts.accepted <= 0.05 * counts.attempts


@pytest.mark.parametrize(("sure", "is_accepted"), [(0.59, False), (0.6, True)])
def test_a_confidence_below_the_threshold_is_rejected(lab, monkeypatch, sure, is_accepted):
    monkeypatch.setattr(
        step_module, "line_search", lambda losses_at, now_D, *rest: SearchResult(2, sure, now_D, num_probed=2)
    )
    assert bool(lab.run(train__steps=20).events("predicted")) == is_accepted


def test_predictions_in_a_row_stay_in_the_trust_region(lab, watch):
    lab.run(hybrid__trust_region=1.2)
    start = flatten(watch[0][2])
    entry = None
    for _, _, before, _, outcome, after, _ in watch:
        entry = (flatten(before) if entry is None else entry) if outcome.update is None else None
        if entry is not None:
            assert np.linalg.norm(flatten(after) - entry) <= 1.2001 * np.linalg.norm(entry - start)
    rows = [row[4].update is None for row in watch]
    assert sum(rows) >= 2 and lab.run("tight", hybrid__trust_region=1e-3).policy.statistics().counts.attempts == 0


@pytest.mark.parametrize("steps", [14, 15, 16, 17])
def test_a_prediction_goes_not_beyond_the_end_that_its_check_needs(lab, steps):
    ended = lab.run(train__steps=steps)
    assert ended.policy.state().values["attempt"] is None
    assert bool(ended.events("predicted")) == bool(ended.events("prediction_kept"))


# --- never a wasted step --------------------------------------------------------------------------------------------


def test_an_attempt_that_finds_nothing_takes_an_ordinary_step(lab, monkeypatch):
    monkeypatch.setattr(step_module, "line_search", lambda *args: SearchResult(num_probed=1))
    ended = lab.run()
    assert ended.updates() == [*range(1, 49)] and ended.events("not_predicted")
    counts = ended.policy.statistics().counts
    assert (counts.predict, counts.accepted, counts.correct) == (0, 0, 0) and counts.attempts >= 1


def test_probing_changes_nothing(lab, monkeypatch):
    """The same run where every attempt is rejected, and where none is made."""
    monkeypatch.setattr(step_module, "line_search", lambda *args: SearchResult(num_probed=1))
    probed = lab.run("probed")
    monkeypatch.setattr(Economics, "at_opportunity", lambda economics: (economics, False))
    assert same(probed.saved(48).adapter, lab.run("never").saved(48).adapter)


def test_predictions_that_do_not_pay_end_for_the_run(lab, monkeypatch):
    monkeypatch.setattr(step_module, "line_search", lambda *args: SearchResult(num_probed=1))
    monkeypatch.setattr(Economics, "at_opportunity", lambda economics: (economics, not economics.is_disabled))
    ended = lab.run(train__steps=80)
    (event,) = ended.events("hybrid_disabled")
    statistics = ended.policy.statistics()
    assert statistics.is_disabled and statistics.counts.attempts == 5 and event["step"] < 60
    assert statistics.cost > statistics.cost_without  # and honestly so


def test_a_step_that_neither_predicts_nor_may_predict_reads_no_weights(lab, monkeypatch):
    """In warm-up, and where predictions do not pay."""
    reads, read = [], NumpyEngine.adapter_state
    monkeypatch.setattr(Economics, "at_opportunity", lambda economics: (economics, False))
    monkeypatch.setattr(NumpyEngine, "adapter_state", lambda engine: reads.append(1) or read(engine))
    lab.run()
    with_hybrid = len(reads)
    reads.clear()
    lab.run("off", hybrid__enabled=False)
    assert with_hybrid == len(reads) + 1  # where the run began


# --- fast forward ---------------------------------------------------------------------------------------------------


def test_fast_forward_skips_nothing(any_lab, watch, velocities):
    ended = any_lab.run(train__steps=30, hybrid__engine="fast_forward")
    assert ended.updates() == [*range(1, 31)]
    counts = ended.policy.statistics().counts
    assert counts.accepted >= 1 and counts.virtual_steps > 0 and counts.predict == 0 and counts.undone == 0
    first = next(row for row in watch if flatten(row[5]).size and row[4].events)
    jump = first[4].events[0]
    assert jump.event == "predicted" and jump.details["change"] == pytest.approx(
        np.linalg.norm(jump.details["steps"] * velocities[0]), rel=1e-3
    )


class _Away:
    """What an engine of a device with memory of its own does: it notes when the optimizer's state is away."""

    def __init__(self, engine):
        self.engine, self.is_away, self.seen = engine, False, []

    def __getattr__(self, name):
        found = getattr(self.engine, name)
        if name in ("target_logprobs", "optim_step", "optimizer_state", "load_optimizer_state"):
            self.seen.append((name, self.is_away))
        return found

    @contextlib.contextmanager
    def offloaded_optimizer(self):
        self.is_away = True
        try:
            yield
        finally:
            self.is_away = False


def test_the_optimizer_s_state_is_away_exactly_while_a_prediction_is_searched(lab, monkeypatch):
    plain = lab.run("plain", hybrid__offload="none")
    monkeypatch.setattr(lab.backend, "capabilities", lambda: {
        **NUMPY_CARD.capabilities(), "hybrid.offload": {"none", "optimizer"},
    })  # fmt: skip
    made, load = [], type(lab.backend).load
    monkeypatch.setattr(type(lab.backend), "load", lambda *args: made.append(_Away(load(*args))) or made[-1])
    ended = lab.run("away", hybrid__offload="optimizer")
    assert same(ended.saved(48).adapter, plain.saved(48).adapter)
    assert {away for name, away in made[0].seen if name != "target_logprobs"} == {False}
    probes = [away for name, away in made[0].seen if name == "target_logprobs"]
    assert any(probes) and not all(probes)  # those of the check need nothing moved

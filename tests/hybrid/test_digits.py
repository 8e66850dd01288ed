"""The experiment on images of digits: a right gradient, the real controller, real measurements, nothing made up."""

import ast
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.cli.hybrid import digits_text
from dualtune.doctor.bench import digits as module
from dualtune.doctor.bench.digits import (
    DigitsData,
    DigitsEngine,
    DigitsStep,
    Images,
    accuracy,
    config_of,
    gradients,
    losses,
    read_digits,
    run_trial,
    starting_weights,
    train,
)
from dualtune.train.hybrid.policy import Predictive
from dualtune.train.hybrid.prediction import Window, flatten, reach
from dualtune.train.objective import learning_rate, optimizer_spec

pytest.importorskip("sklearn", reason="the images come with scikit-learn")

SHORT = {"enabled": True, "warmup_steps": 20, "full_steps": 8, "max_predict_steps": 10, "trust_region": 1.0}
SLOW = 1e-3  # so low that predictions help
CHANCE = re.compile(r"random|\brng\b|mock|uniform|normal\(|permutation|shuffle", re.IGNORECASE)


@pytest.fixture(scope="module")
def data() -> DigitsData:
    return read_digits()


class Run:
    """A run of the controller that can be looked at between its steps."""

    def __init__(self, data, changes, steps=80, seed=2, rate=SLOW):
        self.config = config_of(seed, steps, rate, changes)
        self.policy = Predictive(self.config)
        self.engine = DigitsEngine(starting_weights(seed), optimizer_spec(self.config, steps))
        self.step = DigitsStep(self.config, data.train, self.engine, self.policy.num_probes)
        self.num_steps = steps

    def steps(self):
        """Take the steps; yield (index, place before, outcome, place after)."""
        while (done := self.step.index) < self.num_steps:
            before = place_of(self.engine)
            outcome = self.policy.take(self.step)
            yield done, before, outcome, place_of(self.engine)
            self.step.index += outcome.num_steps


def place_of(engine):
    """Weights, optimizer step and slots, as copies."""
    state = engine.optimizer_state()
    return flatten(engine.adapter_state()), state.step, {slot: flatten(w) for slot, w in state.slots.items()}


def same(a, b):
    return (
        a[0].tobytes() == b[0].tobytes()
        and a[1] == b[1]
        and all(a[2][slot].tobytes() == b[2][slot].tobytes() for slot in a[2] | b[2])
    )


# --- the network ------------------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_finite_differences(data):
    weights = {name: w.astype(np.float64) for name, w in starting_weights(3).items()}
    images, rng = data.train.chosen(slice(32)), np.random.default_rng(0)
    loss, found = gradients(weights, images)
    assert loss == pytest.approx(losses(weights, images).mean()) and found.keys() == weights.keys()
    for name, w in weights.items():
        for at in rng.choice(w.size, 6, replace=False):
            sides = []
            for h in (1e-5, -1e-5):
                moved = w.copy()
                moved.flat[at] += h
                sides.append(losses({**weights, name: moved}, images).mean())
            assert found[name].flat[at] == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=1e-8), name


def test_a_step_costs_what_its_products_of_matrices_cost():
    forward, backward = 64 * 64 + 64 * 10, (64 * 64) + (64 * 10) + (64 * 10)
    assert pytest.approx(1 + backward / forward) == module.STEP_COST
    assert {name: w.shape for name, w in starting_weights(1).items()} == {
        "hidden.weight": (64, 64), "hidden.bias": (64,), "classes.weight": (10, 64), "classes.bias": (10,),
    }  # fmt: skip


def test_an_update_that_is_not_finite_changes_nothing(data):
    run = Run(data, {})
    before = place_of(run.engine)
    run.engine.forward_backward(data.train.chosen([0]))
    run.engine._grads["classes.bias"][0] = np.inf
    output = run.engine.optim_step(lr=1.0, max_grad_norm=None)
    assert same(before, place_of(run.engine)) and not np.isfinite(output.grad_norm)


# --- the controller ---------------------------------------------------------------------------------------------------


def test_a_prediction_changes_the_weights_by_exactly_the_predicted_vector(data, monkeypatch):
    windows, add = [], Window.with_snapshot
    monkeypatch.setattr(Window, "with_snapshot", lambda *args: windows.append(add(*args)) or windows[-1])
    run = Run(data, SHORT)
    for index, before, outcome, after in run.steps():  # noqa: B007
        if outcome.update is None:
            break
    else:
        pytest.fail("nothing was predicted")
    rates = [learning_rate(run.config, step, run.num_steps) for step in range(run.num_steps)]
    velocity_P = windows[-1].velocity()
    worth = [*reach(rates[index : index + outcome.num_steps], np.mean(rates[index - 4 : index]))][-1]  # half of 8
    assert after[0].tobytes() == (before[0] + np.float32(worth) * velocity_P).tobytes()
    assert np.abs(velocity_P).max() > 1e-4
    assert same((after[0], *before[1:]), after)  # the optimizer stays as it was


def test_a_prediction_after_which_a_loss_is_nan_is_undone_to_the_bit(data):
    """The step before has changed weights and slots, so all of them have to come back."""
    run = Run(data, SHORT)
    forward, entry, places = run.engine.forward_backward, [], []

    def noted(images):
        if entry:
            places.append(place_of(run.engine))  # in the step of the rollback: after it
        forward(images)
        if len(places) == 2:
            run.engine._loss = float("nan")

    run.engine.forward_backward = noted
    for _, before, outcome, _ in run.steps():
        if outcome.update is None:
            entry.append(before)
        if any(event.event == "prediction_undone" for event in outcome.events):
            break
    counts = run.policy.statistics().counts
    assert (counts.divergences, counts.undone, len(places)) == (1, 1, 3)
    assert same(places[-1], entry[0])
    assert not any(np.array_equal(places[1][2][slot], entry[0][2][slot]) for slot in ("m", "v"))


def test_a_divergence_is_an_undone_prediction_or_the_loss_of_an_ordinary_step(data):
    """The preset at the tuned rate, with three of its five seeds: what hybrid_claims.md says of the divergences."""
    runs = [Run(data, module.ARMS["conservative"], module.STEPS, seed, module.CASES["tuned"]) for seed in (2, 3, 5)]
    ordinary = []
    for run in runs:
        for *_, outcome, _ in run.steps():
            critical = [event for event in outcome.events if event.details.get("level") == "critical"]
            if run.policy.last_result().phase == "full" and "prediction_undone" not in str(outcome.events):
                ordinary += [event.details["signal"] for event in critical]
    counts = [run.policy.statistics().counts for run in runs]
    assert sum(each.divergences for each in counts) == len(ordinary) + sum(each.undone for each in counts)
    assert set(ordinary) == {"loss above its band"} and any(each.undone for each in counts)


def test_steps_follow_the_order_and_the_schedule_of_every_run(data):
    run = Run(data, SHORT)
    step = run.step
    step.index = 7
    assert (step.steps_left, step.max_steps) == (73, 73)
    assert step.rate(5) == learning_rate(run.config, 12, 80) and step.rate(-20) == learning_rate(run.config, 0, 80)
    assert step.tokens_of([1, 5, 6]) == 3 and step.documents.tolist() == step._order.step(7).documents.tolist()
    step.add_gradients()
    update = step.update()
    assert (update.lr, update.num_tokens) == (step.rate(), 64)
    assert run.engine.optimizer_state().step == 1
    before = place_of(run.engine)
    assert step.document_losses([4, 2]) == pytest.approx(losses(run.engine.weights, data.train)[[4, 2]])
    with step.trying({name: w * 0 for name, w in run.engine.adapter_state().items()}):
        assert step.document_losses([4, 2]) == pytest.approx(np.log(10))
    assert same(before, place_of(run.engine))


def test_held_out_images_probes_and_training_share_nothing(data):
    rows = [{image.tobytes() for image in images.pixels_DI} for images in (data.train, data.held_out)]
    assert not rows[0] & rows[1] and len(rows[0]) + len(rows[1]) == 1797 and len(data.held_out) == 359
    run = Run(data, SHORT)
    trained = set()
    for run.step.index in range(40):
        trained |= {*run.step.documents.tolist()}
    assert len(run.step.probe_documents) == 16
    assert trained == {*range(len(data.train))} - {*run.step.probe_documents}


# --- what is measured -------------------------------------------------------------------------------------------------


def test_a_network_learns_digits_and_from_wrong_labels_nothing(data):
    engine, cost, report = train(data, config_of(1, 200, 1e-2, {}))
    assert accuracy(engine.weights, data.held_out) > 0.93 and cost == pytest.approx(200 * module.STEP_COST)
    assert report == {}
    wrong = np.random.default_rng(0).permutation(data.train.labels_D)
    lost, _, _ = train(DigitsData(Images(data.train.pixels_DI, wrong), data.held_out), config_of(1, 200, 1e-2, {}))
    assert accuracy(lost.weights, data.held_out) < 0.25


def test_accuracy_and_loss_are_those_of_an_independent_count(data):
    engine, _, _ = train(data, config_of(1, 60, 1e-2, {}))
    w = engine.weights
    right, nats = 0, 0.0
    for image, label in zip(data.held_out.pixels_DI, data.held_out.labels_D, strict=True):
        hidden = [max(0.0, float(row @ image + b)) for row, b in zip(w["hidden.weight"], w["hidden.bias"], strict=True)]
        logits = [float(row @ hidden + b) for row, b in zip(w["classes.weight"], w["classes.bias"], strict=True)]
        right += int(np.argmax(logits)) == label
        nats += np.log(np.sum(np.exp(logits))) - logits[label]
    number = len(data.held_out)
    assert accuracy(w, data.held_out) == pytest.approx(right / number)
    assert losses(w, data.held_out).mean() == pytest.approx(nats / number, rel=1e-5)


def test_a_trial_is_repeated_to_the_bit_and_counts_its_arrays(data):
    config = config_of(2, 60, SLOW, SHORT)
    mine, again = run_trial(data, config), run_trial(data, config)
    assert (mine.accuracy, mine.eval_loss, mine.cost, mine.hybrid) == (
        again.accuracy, again.eval_loss, again.cost, again.hybrid,
    )  # fmt: skip
    states = sum(3 * w.nbytes for w in starting_weights(2).values())  # weights and two slots
    assert mine.peak_bytes > states and mine.wall_s > 0
    assert mine.hybrid["accepted"] >= 1 and mine.cost < 60 * module.STEP_COST


def test_one_seed_from_end_to_end(monkeypatch):
    monkeypatch.setattr(module, "STEPS", 200)
    monkeypatch.setattr(module, "CASES", {"low": SLOW})
    told = []
    found = module.digits(1, told.append)
    rows = {row.arm: row for row in found.rows}
    assert [*rows] == ["baseline", "conservative", "control of conservative", "aggressive", "control of aggressive"]
    assert len(told) == 5
    for arm in ("conservative", "aggressive"):
        (mine,), (control,) = rows[arm].trials, rows[f"control of {arm}"].trials
        assert mine.hybrid["attempts"] >= 1 and rows[arm].control == (control,)
        assert control.steps == round(mine.cost / module.STEP_COST) and mine.steps == 200
        assert abs(mine.cost - control.cost) <= module.STEP_COST / 2
    table = found.as_json()
    assert [row["arm"] for row in table["rows"]] == [*rows] and table["held_out_images"] == 359
    assert table["rows"][1]["accuracy_minus_control"]["margin_95"] is None  # one seed has no interval
    assert any("control of aggressive" in line for line in digits_text(found).splitlines())


def test_no_figure_comes_from_a_random_number(data, monkeypatch):
    """By its text, apart from the starting weights, and by forbidding random numbers while figures are computed."""
    tree = ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8"))
    code = [node for node in tree.body if getattr(node, "name", "") != "starting_weights"]
    texts = [ast.unparse(node) for node in code if not isinstance(node, ast.Expr)]
    assert not CHANCE.search("\n".join(texts))
    assert CHANCE.search(inspect.getsource(starting_weights))  # the search finds some where there are some
    engine, cost, hybrid = train(data, config_of(2, 60, SLOW, SHORT))

    def forbidden(*args):
        raise AssertionError("a figure from a random number")

    monkeypatch.setattr(np.random, "default_rng", forbidden)
    monkeypatch.setattr(np.random, "random", forbidden)
    monkeypatch.setattr(module, "train", lambda *args: (engine, cost, hybrid))
    one = run_trial(data, config_of(2, 60, SLOW, SHORT))
    row = module.DigitsRow("low", SLOW, "conservative", (one, one), (one, one), (one, one))
    found = module.DigitsResult((row,), len(data.held_out))
    assert found.as_json()["rows"][0]["accuracy"]["mean"] == one.accuracy and digits_text(found)


def test_without_scikit_learn_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'dualtune\[bench\]'"):
        module.digits(1)
    with pytest.raises(ConfigError, match="seeds: got 0, allowed: 1 or more"):
        module.digits(0)

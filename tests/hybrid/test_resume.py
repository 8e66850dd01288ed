"""A resumed run is the uninterrupted one, from a checkpoint in any phase; and a state that is none is refused."""

import json
import shutil

import pytest

from dualtune.engine.testing import tolerances
from dualtune.train.hybrid.memory import Memory, from_state
from dualtune.train.hybrid.monitor import Stage
from dualtune.train.hybrid.prediction import Economics
from dualtune.train.policy import PolicyState
from dualtune.train.saver import Saver

pytestmark = pytest.mark.covering(1)

STEPS = 24


def same(a, b):
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def assert_same_end(found, straight):
    a, b = found.saved(STEPS), straight.saved(STEPS)
    assert same(a.adapter, b.adapter) and a.state["policy"] == b.state["policy"] and same(a.policy, b.policy)
    assert all(same(a.optimizer.slots[slot], b.optimizer.slots[slot]) for slot in a.optimizer.slots)


def saved_everywhere(lab, monkeypatch, name="saved", **changes):
    """A run with a checkpoint after every step that it takes, as by the file checkpoint-now: none ends a jump early."""
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "was_requested", lambda saver: True)
        return lab.run(name, train__steps=STEPS, **changes)


def resumed_at(lab, ended, step, name, **changes):
    """The run, continued from one of its checkpoints."""
    shutil.copytree(ended.path, lab.home / name)
    for path in (lab.home / name / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    shutil.rmtree(lab.home / name / "adapter")
    return lab.run(name, train__steps=STEPS, **changes)


def by_phase(ended):
    """{phase and what waits: step} of the checkpoints."""
    found = {}
    for path in sorted((ended.path / "checkpoints").iterdir())[:-1]:
        values = json.loads((path / "state.json").read_text())["policy"]["values"]
        what = (values["stage"]["phase"], values["window_half"] is not None, values["attempt"] is not None)
        found[what] = int(path.name.removeprefix("step-"))
    return found


@pytest.mark.parametrize("engine", ["predict", "fast_forward"])
def test_a_resumed_run_is_the_uninterrupted_one_in_every_phase(lab, monkeypatch, engine):
    options = {"hybrid__engine": engine, "hybrid__full_steps": 8, "hybrid__max_predict_steps": 2}
    straight = lab.run("straight", train__steps=STEPS, **options)
    ended = saved_everywhere(lab, monkeypatch, **options)
    assert_same_end(ended, straight)
    places = by_phase(ended)
    assert {phase for phase, *_ in places} == {"warmup", "full", "correct"} | (
        {"predict"} if engine == "predict" else set()
    )
    assert len(places) >= 4
    for what, step in places.items():
        again = resumed_at(lab, ended, step, f"from-{step}", **options)
        assert again.events("resumed")[0]["step"] == step, what
        assert_same_end(again, straight)


@pytest.mark.parametrize(("here", "there"), [("torch", "mlx"), ("mlx", "torch")])
def test_a_prediction_is_checked_on_the_other_backend(lab_for, monkeypatch, here, there):
    first, second = lab_for(here), lab_for(there)
    ended = saved_everywhere(first, monkeypatch)
    step = by_phase(ended)["correct", False, True]
    moved = resumed_at(second, ended, step, "moved")
    assert moved.updates() == ended.updates() and moved.events("prediction_kept")
    losses = [{row["step"]: row["loss"] for row in run.rows if "lr" in row} for run in (moved, ended)]
    assert losses[0] == pytest.approx(losses[1], abs=tolerances.RESUMED_LOSS)


def test_the_state_of_a_new_policy_is_empty(lab):
    prepared = lab.prepared()
    policy = prepared.make_policy(prepared.config)
    assert policy.state().is_empty and policy.name == "hybrid"
    policy.load_state(PolicyState())
    assert policy.current_phase() == "warmup"


@pytest.mark.parametrize(
    "broken",
    [{"stage": {"phase": "lunch", "left": 1, "forced": 0}}, {"counts": None}, {"more": 1}, {"window_half": 4},
     {"optimizer_step": 3}],
)  # fmt: skip
def test_a_state_of_the_wrong_form_is_refused(lab, broken):
    ended = lab.run(train__steps=3)
    state = ended.policy.state()
    from_state(state)
    with pytest.raises(ValueError, match=r"\w"):
        from_state(PolicyState({**state.values, **broken}, state.tensors))
    with pytest.raises(ValueError, match="the weights that the run began with are missing"):
        from_state(PolicyState(state.values, {}))


def test_nothing_is_stored_before_the_first_step():
    assert Memory(Economics(5, 5, 10.0), Stage()).as_state().is_empty

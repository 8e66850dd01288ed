"""A step is what its policy does: toy policies that need nothing of the loop but what `TrainingStep` offers.

On the NumPy engine. Each toy does one thing that predictive training needs.
"""

import hashlib
import importlib.util
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, DataError, FormatError, Preempted
from dualtune.doctor.bench.measure import bench
from dualtune.engine.testing.numpy_engine import NumpyEngine
from dualtune.show.run import execute
from dualtune.train.evaluation import evaluate
from dualtune.train.hooks import Hook
from dualtune.train.objective import learning_rate
from dualtune.train.policies import Ordinary
from dualtune.train.policy import Outcome
from dualtune.train.prepare import prepare
from dualtune.train.run import load_engine
from dualtune.train.state import checkpoint
from dualtune.train.state.checkpoint import restore
from dualtune.train.state.run_dir import open_run
from dualtune.train.step import TrainingStep
from dualtune.use.transfer.bundles.bundle import unpack
from dualtune.use.transfer.bundles.pack import pack

_spec = importlib.util.spec_from_file_location("toy_policies", Path(__file__).with_name("toy_policies.py"))
toys = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toys)


@pytest.fixture
def prepared_for(open_backend, make_config, write_rows, qa_rows, tiny_softmax, tmp_path):
    """A config prepared for a policy."""
    data, backend = write_rows(qa_rows), open_backend("numpy")

    def make(policy, name="run", saved=None, **changes):
        settings = {"run.dir": tmp_path / name, "run.save_every": 1, "run.keep": 99, "data.eval": 0.25}
        settings |= {"train.steps": 9} | {key.replace("__", "."): value for key, value in changes.items()}
        config = make_config(data, settings, tiny_softmax)
        return prepare(config, backend, saved, policy=policy)

    return make


@pytest.fixture
def train(prepared_for):
    """Train with a policy, from the newest checkpoint of the run directory if there is one."""

    def train(policy, name="run", hooks=(), **changes):
        config = prepared_for(policy, name, **changes).config
        with open_run(config, "auto") as place:
            return execute(prepared_for(policy, name, place.saved, **changes), place, hooks).run_dir

    return train


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def updates_of(run_dir):
    return [row["step"] for row in rows_of(run_dir) if "lr" in row]


def saved_after(run_dir, step):
    return checkpoint.read(checkpoint.path_of(run_dir / "checkpoints", step))


def same(a, b):
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


class Terminate(Hook):
    """Sends a real signal when the numbers of a step are read."""

    def __init__(self, step):
        self._step = step

    def on_step(self, record):
        if record.step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


# --- no update in this step ------------------------------------------------------------------------------------------


def test_a_step_without_an_update_changes_no_weight_and_has_no_row(train):
    run_dir = train(toys.EveryThirdOnlyLooks)
    assert updates_of(run_dir) == [1, 2, 4, 5, 7, 8]
    looks = {row["step"]: row["mean_loss"] for row in rows_of(run_dir) if row.get("event") == "no_update"}
    assert [*looks] == [3, 6, 9] and looks[3] > looks[9] > 0
    for step in (3, 6, 9):
        before, after = saved_after(run_dir, step - 1), saved_after(run_dir, step)
        assert same(before.adapter, after.adapter) and after.step == step
        assert before.state["optimizer_step"] == after.state["optimizer_step"] == step * 2 // 3
    assert not same(saved_after(run_dir, 1).adapter, saved_after(run_dir, 2).adapter)


def test_what_a_step_without_an_update_leaves_unread_is_read_in_time(train):
    """Saving after every step reads every number at once; else it waits for the next step, which may have none."""
    often, rarely = (
        train(toys.EveryThirdOnlyLooks, "often"),
        train(toys.EveryThirdOnlyLooks, "rarely", run__save_every=4),
    )
    numbers = [[(r["step"], r["loss"], r["grad_norm"]) for r in rows_of(d) if "lr" in r] for d in (often, rarely)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 6
    assert same(saved_after(often, 9).adapter, saved_after(rarely, 9).adapter)


# --- probes ----------------------------------------------------------------------------------------------------------


def test_probes_are_training_documents_that_no_step_takes(prepared_for, train):
    prepared = prepared_for(toys.Prober, "other")
    taken = {i for step in range(40) for i in prepared.data.order.step(step).documents.tolist()}
    assert len(prepared.data.probes) == 3
    assert taken == {*range(len(prepared.data.train))} - {*prepared.data.probes}
    assert (
        prepared.data.probes
        == prepared_for(toys.Prober, "again").data.probes
        != prepared_for(toys.Prober, "else", run__seed=2).data.probes
    )
    ordinary = prepared_for(Ordinary, "ordinary")
    assert ordinary.data.probes == []
    assert {i for s in range(9) for i in ordinary.data.order.step(s).documents.tolist()} == {
        *range(len(ordinary.data.train))
    }


def test_a_probe_measures_the_probe_documents_and_changes_nothing(prepared_for, train):
    run_dir, prepared = train(toys.Prober), prepared_for(toys.Prober, "other")
    found = [row["mean_loss"] for row in rows_of(run_dir) if row.get("event") == "probe"]
    assert len(found) == len(updates_of(run_dir)) == 9
    engine = load_engine_after(prepared, run_dir, 9)
    documents = [prepared.data.train[i] for i in prepared.data.probes]
    losses = [
        evaluate(engine, Listed([document], np.array([len(document.tokens)])), prepared.data.layout).eval_loss
        for document in documents
    ]
    assert found[-1] == pytest.approx(np.mean(losses), rel=1e-6)

    class Blind(toys.Prober):
        name = "blind"

        def take(self, step):
            return Ordinary.take(self, step)

    assert same(saved_after(train(Blind, "blind"), 9).adapter, saved_after(run_dir, 9).adapter)


class Listed(list):
    """Documents in a list."""

    hidden = beginnings = None
    shares = False

    def __init__(self, documents, lengths):
        super().__init__(documents)
        self.lengths = lengths


def load_engine_after(prepared, run_dir, step):
    engine = load_engine(prepared)
    restore(engine, saved_after(run_dir, step))
    return engine


def test_documents_that_are_too_few_for_the_probes_are_refused(prepared_for):
    class Greedy(toys.Prober):
        name, num_probes = "greedy", 12

    with pytest.raises(DataError, match="12 training documents are needed as probes, but there are only 12"):
        prepared_for(Greedy)


# --- state -----------------------------------------------------------------------------------------------------------

HOT = {"train__learning_rate": 0.3, "train__schedule": "constant"}  # the loss rises now and then


def test_the_toy_does_something_else_because_of_what_it_remembers(train):
    """Else the tests below would show nothing."""
    losses = [
        [row["loss"] for row in rows_of(train(p, p.name, **HOT)) if "lr" in row] for p in (toys.Remembering, Ordinary)
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("stop", [1, 4, 5, 6])
def test_a_resumed_run_has_the_policy_s_state_bit_for_bit(train, stop):
    straight = train(toys.Remembering, "straight", **HOT, run__save_every=None)
    with pytest.raises(Preempted):
        train(toys.Remembering, "stopped", [Terminate(stop)], **HOT, run__save_every=None)
    stopped = train(toys.Remembering, "stopped", **HOT, run__save_every=None)
    assert any(row.get("event") == "resumed" for row in rows_of(stopped))
    a, b = saved_after(straight, 9), saved_after(stopped, 9)
    assert same(a.adapter, b.adapter) and same(a.policy, b.policy) and len(a.policy) == len(a.adapter)
    assert a.state["policy"] == b.state["policy"] and a.state["policy"]["values"]["takes"] == 9


def test_a_stop_in_the_middle_of_a_step_saves_the_state_before_it(train, monkeypatch):
    options = HOT | {"run__save_every": None}
    straight = train(toys.Remembering, "straight", **options)
    add = TrainingStep.add_gradients

    def signalled(step):
        if step.index == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        add(step)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "add_gradients", signalled)
        with pytest.raises(Preempted, match=r"saved in .*step-00000005"):
            train(toys.Remembering, "stopped", **options)
    assert same(saved_after(train(toys.Remembering, "stopped", **options), 9).policy, saved_after(straight, 9).policy)


def test_a_rollback_takes_the_policy_s_state_back_too(train, monkeypatch):
    def jolted(config, index, num_steps):  # step 22 has a rate far too large: the loss of step 23 jumps
        return learning_rate(config, index, num_steps) * (1e5 if index == 21 else 1)

    monkeypatch.setattr("dualtune.train.step.learning_rate", jolted)
    options = {"train__steps": 26, "run__save_every": 4, "guards__on_spike": "rollback", "train__max_grad_norm": None,
               "train__learning_rate": 1e-4, "train__schedule": "constant",
               "train__documents_per_step": 12}  # fmt: skip
    run_dir = train(toys.Remembering, **options)
    (event,) = [row for row in rows_of(run_dir) if row.get("event") == "rollback"]
    assert (event["step"], event["to_step"]) == (23, 20)
    assert saved_after(run_dir, 26).state["policy"]["values"]["takes"] == 26 - (23 - 20)


def test_a_policy_returns_to_its_own_snapshot_also_in_a_resumed_run(train):
    run_dir = train(toys.Undoing)
    third, fourth, fifth = (saved_after(run_dir, step) for step in (3, 4, 5))
    assert not same(third.adapter, fourth.adapter) and same(third.adapter, fifth.adapter)
    assert same({n: w for n, w in fourth.policy.items() if n != "loss"}, third.adapter)
    assert fifth.policy == third.policy == {} and "policy" not in fifth.state
    assert updates_of(run_dir) == [1, 2, 3, 6, 7, 8, 9]
    for path in (run_dir / "checkpoints").iterdir():  # as if the run had been killed after step 4
        if int(path.name.removeprefix("step-")) > 4:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    before = saved_after(run_dir, 4)
    again = train(toys.Undoing)
    assert same(saved_after(again, 5).adapter, third.adapter) and same(saved_after(again, 4).adapter, before.adapter)


# --- a step that stands for several ----------------------------------------------------------------------------------


def test_a_jump_passes_over_data_and_schedule_but_over_nothing_that_is_due(train, prepared_for):
    run_dir = train(toys.Jumping, train__steps=14, run__save_every=6, run__eval_every=4)
    assert updates_of(run_dir) == [1, 2, 4, 6, 8, 11, 12, 14]
    assert [row["step"] for row in rows_of(run_dir) if "eval_loss" in row] == [0, 4, 8, 12, 14]
    assert {6, 12, 14} <= {*checkpoint.steps(run_dir / "checkpoints")}
    config = prepared_for(toys.Jumping, train__steps=14).config
    rates = [row["lr"] for row in rows_of(run_dir) if "lr" in row]
    assert rates == [learning_rate(config, done, 14) for done in (0, 1, 2, 4, 6, 8, 11, 12)]


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_step_that_stands_for_too_many_is_an_error_of_the_policy(train, num_steps):
    class Wrong(Ordinary):
        name = "wrong"

        def take(self, step):
            return Outcome(None, num_steps=num_steps)

    with pytest.raises(ValueError, match=f"step policy wrong: took {num_steps} steps, allowed: 1 to 1"):
        train(Wrong)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_an_empty_state_leaves_a_checkpoint_as_it_was(train):
    saved = saved_after(train(Ordinary), 9)
    assert "policy" not in saved.state and saved.policy == {}
    assert {file.name for file in saved.path.iterdir()} == {*checkpoint.files_of(saved)}


def test_the_state_travels_in_a_bundle(train, tmp_path):
    run_dir = train(toys.Remembering)
    pack(run_dir, tmp_path / "run.tar")
    unpack(tmp_path / "run.tar", tmp_path / "there")
    here, there = saved_after(run_dir, 9), saved_after(tmp_path / "there", 9)
    assert same(here.policy, there.policy) and here.policy and here.state["policy"] == there.state["policy"]


def test_the_state_of_another_policy_is_refused(train):
    train(toys.Remembering, train__steps=4)
    with pytest.raises(ConfigError, match="saved by the step policy 'remembering', but this run has 'ordinary'"):
        train(Ordinary, train__steps=9)


def test_a_state_that_lost_its_tensors_is_damage(train):
    path = saved_after(train(toys.Remembering), 9).path
    (path / checkpoint.POLICY).unlink()
    with pytest.raises(FormatError, match=r"policy\.safetensors cannot be read"):
        checkpoint.read(path)


@pytest.mark.parametrize("policy", [3, {"values": {}}, {"name": "x", "values": 7}])
def test_a_state_of_the_wrong_form_is_refused(train, policy):
    path = saved_after(train(Ordinary), 9).path
    state = json.loads((path / "state.json").read_text()) | {"policy": policy}
    data = json.dumps(state).encode()
    (path / "state.json").write_bytes(data)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match="policy"):
        checkpoint.read(path)


# --- the benchmark ---------------------------------------------------------------------------------------------------


def test_the_benchmark_asks_the_engine_for_what_the_training_loop_asks_for(prepared_for, train, tmp_path, monkeypatch):
    calls = []

    def noted(verb):
        original = getattr(NumpyEngine, verb)

        def call(engine, *args, **options):
            given = [hashlib.sha256(b.tokens_BT.tobytes() + b.dropout_seeds_BT.tobytes()).hexdigest() for b in args]
            calls.append((verb, given, options))
            return original(engine, *args, **options)

        monkeypatch.setattr(NumpyEngine, verb, call)

    noted("forward_backward")
    noted("optim_step")
    train(Ordinary, train__micro_batch_tokens=64)
    trained, calls[:] = calls.copy(), []
    bench(prepared_for(Ordinary, train__micro_batch_tokens=64), tmp_path / "bench", steps=7, warmup=2)
    assert calls == trained and len([verb for verb, _, _ in calls if verb == "optim_step"]) == 9


def test_the_benchmark_takes_the_steps_of_the_policy(prepared_for, tmp_path):
    bench(prepared_for(toys.EveryThirdOnlyLooks), tmp_path / "bench", steps=6, warmup=0)
    spans = json.loads((tmp_path / "bench" / "trace.json").read_text())["traceEvents"]
    assert [span["args"]["step"] for span in spans if span["name"] == "optimizer"] == [0, 1, 3, 4]
    assert [span["args"]["step"] for span in spans if span["name"] == "data"] == [*range(6)]


# --- the example of decision 0016 ------------------------------------------------------------------------------------

CALM = {"train__learning_rate": 1e-3, "train__schedule": "constant", "train__steps": 24, "run__save_every": 12}


def test_the_controller_predicts_and_corrects(train):
    run_dir = train(toys.Controller, **CALM)
    jumps = [row for row in rows_of(run_dir) if row.get("event") == "predicted"]
    assert jumps and all(row["loss_after"] < row["loss_before"] for row in jumps)
    passed_over = {s for row in jumps for s in range(row["step"] - row["steps"] + 1, row["step"] + 1)}
    assert updates_of(run_dir) == sorted({*range(1, 25)} - passed_over) and len(passed_over) > len(jumps)


@pytest.mark.parametrize("stop", [1, 3, 4, 5])
def test_the_controller_resumes_in_every_phase(train, stop):
    straight = train(toys.Controller, "straight", **CALM)
    with pytest.raises(Preempted):
        train(toys.Controller, "stopped", [Terminate(updates_of(straight)[stop])], **CALM)
    stopped = train(toys.Controller, "stopped", **CALM)
    a, b = saved_after(straight, 24), saved_after(stopped, 24)
    assert same(a.adapter, b.adapter) and same(a.policy, b.policy) and a.state["policy"] == b.state["policy"]


def test_weights_that_were_only_tried_do_not_stay(prepared_for):
    prepared = prepared_for(toys.Prober)
    engine = load_engine(prepared)
    step = TrainingStep(prepared, engine, 0, prepared.batches)
    before, loss = engine.adapter_state(), toys.probe_loss(step)
    with pytest.raises(Preempted), step.trying({name: w + 1 for name, w in before.items()}):
        assert toys.probe_loss(step) != loss
        raise Preempted("stopped while it was tried")
    assert same(engine.adapter_state(), before) and toys.probe_loss(step) == loss

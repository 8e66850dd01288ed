"""Weights that are evaluated and written although others are trained: schedule-free AdamW, and averages."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.engine.backend import OptimizerState
from dualtune.engine.capabilities import check_capabilities
from dualtune.engine.card import Card, Device
from dualtune.engine.testing.tolerances import RESUMED_LOSS
from dualtune.model.adapter import AdapterSpec, tensor_name
from dualtune.model.optimizer import Averaging, OptimizerSpec
from dualtune.show.run import run
from dualtune.train.evaluation import result_of
from dualtune.train.generation.inference import load_model
from dualtune.train.hooks import Hook
from dualtune.train.objective import optimizer_spec
from dualtune.train.state import checkpoint

RUN = {"train__steps": 9, "data__eval": 0.25, "run__save_every": 2, "run__eval_every": 3, "adapter__dropout": 0.3,
       "train__schedule": "constant", "model__dtype": "auto"}  # fmt: skip
FREE = {"train__schedule": "schedule_free", "train__warmup": 2}
TAIL = {"train__average": "tail", "train__average_over": 6}
EMA = {"train__average": "ema", "train__average_over": 3}
WAYS = {
    "schedule_free": FREE, "tail": TAIL, "ema, adamw_8bit": {**EMA, "train__optimizer": "adamw_8bit"},
    "tail, sgd": {**TAIL, "train__optimizer": "sgd", "train__learning_rate": 0.5},
}  # fmt: skip


def on(*pairs, long=()):
    """Repeat a test with each pair of a backend and a way."""
    rare = [pytest.param(*pair, marks=pytest.mark.long) for pair in long]
    return pytest.mark.parametrize(("lab", "way"), [*pairs, *rare], indirect=["lab"])


on_numpy = pytest.mark.parametrize("lab", ["numpy"], indirect=True)


class Crash(BaseException):
    """Ends a run as if it were killed."""


class Stop(Hook):
    def on_step(self, record):
        if record.step == 5:
            raise Crash


def written(result):
    return load_file(result.adapter_dir / "adapter_model.safetensors")


def newest(result):
    found, _ = checkpoint.newest(result.run_dir / "checkpoints")
    return found


def losses_of(rows):
    return [row["loss"] for row in rows]


def assert_tensors(found, expected):
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@on(
    ("numpy", "schedule_free"), ("numpy", "tail, sgd"), ("torch", "tail"), ("torch", "ema, adamw_8bit"),
    ("mlx", "schedule_free"), long=(("torch", "schedule_free"), ("mlx", "ema, adamw_8bit")),
)  # fmt: skip
def test_resume_is_bitwise_and_the_result_is_written(lab, rows_of, weights_of, way):
    settings = RUN | WAYS[way]
    straight = lab.run("straight", **settings)
    with pytest.raises(Crash):
        lab.run("stopped", [Stop()], **settings)
    resumed = lab.run("stopped", **settings)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    here, there = rows_of(resumed.run_dir), rows_of(straight.run_dir)
    for rows, others, key in zip(here, there, ("loss", "eval_loss"), strict=True):
        assert [(row["step"], row[key]) for row in rows] == [(row["step"], row[key]) for row in others]
    saved, spec = newest(straight), optimizer_spec(lab.config(**settings), 9)
    assert {*saved.optimizer.slots} == {*spec.slots}
    assert_tensors(written(straight), result_of(spec, saved.adapter, saved.optimizer))
    assert any((written(straight)[name] != w).any() for name, w in saved.adapter.items()), "it is what was trained"


@on(("numpy", "tail"), ("torch", "schedule_free"), ("mlx", "tail"), long=(("torch", "tail"), ("mlx", "schedule_free")))
def test_an_evaluation_does_not_disturb_the_training(lab, rows_of, weights_of, way):
    settings = RUN | WAYS[way] | {"model__dtype": "auto" if lab.backend.name == "numpy" else "bfloat16"}
    often = lab.run("often", **settings | {"run__eval_every": 1})
    never = lab.run("never", **settings | {"run__eval_every": None, "run__save_every": None})
    assert losses_of(rows_of(often.run_dir)[0]) == losses_of(rows_of(never.run_dir)[0])
    assert weights_of(often.run_dir) == weights_of(never.run_dir)
    assert_tensors(newest(often).adapter, newest(never).adapter)


@pytest.mark.parametrize(
    ("lab", "optimizer"),
    [("numpy", "adamw"), ("torch", "adamw"), ("torch", "adamw_8bit"), ("torch", "sgd"), ("mlx", "adamw"),
     ("mlx", "adamw_8bit")],
    indirect=["lab"],
)  # fmt: skip
def test_training_is_bitwise_that_without_an_average(lab, rows_of, optimizer):
    settings = RUN | {"train__optimizer": optimizer}
    plain, averaged = lab.run("plain", **settings), lab.run("averaged", **settings | EMA)
    assert losses_of(rows_of(averaged.run_dir)[0]) == losses_of(rows_of(plain.run_dir)[0])
    assert_tensors(newest(averaged).adapter, newest(plain).adapter)
    assert rows_of(averaged.run_dir)[1][-1]["eval_loss"] != rows_of(plain.run_dir)[1][-1]["eval_loss"]


@pytest.mark.parametrize(("way", "over"), [("tail", 4), ("ema", 3)])
def test_the_average_is_that_of_the_weights_of_each_step(lab, way, over):
    """The oracle: the weights in the checkpoints after each step, averaged by the definitions in float64."""
    result = lab.run(**RUN | {"train__average": way, "train__average_over": over, "run__save_every": 1, "run__keep": 9})
    steps = [checkpoint.read(checkpoint.path_of(result.run_dir / "checkpoints", n)).adapter for n in range(1, 10)]
    for name, found in written(result).items():
        of_name = np.array([weights[name] for weights in steps], np.float64)
        if way == "tail":
            expected = of_name[-over:].mean(0)
        else:  # the mean until the window is full, then (1 − 1/over) of it
            expected = of_name[:over].mean(0)
            for w in of_name[over:]:
                expected = (1 - 1 / over) * expected + w / over
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("lab", ["torch"], indirect=True)
@pytest.mark.parametrize(("first", "second"), [("torch", "mlx"), ("mlx", "torch")])
@pytest.mark.parametrize("way", [FREE, TAIL], ids=["schedule_free", "tail"])
def test_a_run_goes_on_on_another_backend(lab, open_backend, rows_of, first, second, way):
    settings = RUN | way | {"model__dtype": "float32", "train__learning_rate": 1e-3}
    straight = run(lab.config("straight", **settings), open_backend(first))
    with pytest.raises(Crash):
        run(lab.config(**settings), open_backend(first), [Stop()])
    moved = run(lab.config(**settings), open_backend(second))
    for here, there, key in zip(rows_of(moved.run_dir), rows_of(straight.run_dir), ("loss", "eval_loss"), strict=True):
        assert [row[key] for row in here] == pytest.approx([row[key] for row in there], abs=RESUMED_LOSS)
    found, expected = written(moved), written(straight)
    assert max(np.abs(found[name] - expected[name]).max() for name in expected) <= RESUMED_LOSS


@on(*(("numpy", way) for way in WAYS), ("torch", "schedule_free"))
def test_the_best_result_is_restored_from_its_own_checkpoint(lab, monkeypatch, way):
    """The evaluation of step 6 is made the best: its result is written, not its weights, and not with later slots."""
    from dualtune.train import run as training

    original = training.evaluate

    def evaluate(engine, documents, recovery, step, *rest):
        found = original(engine, documents, recovery, step, *rest)
        return type(found)(step=step, eval_loss=0.1 if step == 6 else 1.0, eval_targets=found.eval_targets)

    monkeypatch.setattr("dualtune.train.run.evaluate", evaluate)
    settings = RUN | WAYS[way] | {"guards__restore_best": True, "run__save_every": None}
    result = lab.run(**settings)
    best = checkpoint.read(checkpoint.path_of(result.run_dir / "checkpoints", 6))
    spec = optimizer_spec(lab.config(**settings), 9)
    assert_tensors(written(result), result_of(spec, best.adapter, best.optimizer))
    assert any((written(result)[name] != w).any() for name, w in best.adapter.items())


@on_numpy
def test_a_run_that_ends_before_its_tail_says_so(lab, monkeypatch):
    monkeypatch.setattr(
        "dualtune.train.guards.Guards.stops_early", property(lambda guards: guards.state.eval_step == 3)
    )
    result = lab.run(**RUN | TAIL | {"guards__early_stopping": 5})
    assert '"event": "no_average"' in (result.run_dir / "metrics.jsonl").read_text()
    assert_tensors(written(result), newest(result).adapter)
    whole = lab.run("whole", **RUN | TAIL | {"train__average_over": 7, "guards__early_stopping": 5})
    assert '"event": "no_average"' not in (whole.run_dir / "metrics.jsonl").read_text()


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_an_interrupted_evaluation_leaves_the_trained_weights(lab, weights_of):
    class InEvaluation(Hook):
        def on_eval_batch(self, done, total):
            if self.seen == 6:
                raise KeyboardInterrupt

        def on_step(self, record):
            self.seen = record.step

    hook = InEvaluation()
    hook.seen = 0
    straight = lab.run("straight", **RUN | FREE)
    with pytest.raises(KeyboardInterrupt):
        lab.run("stopped", [hook], **RUN | FREE)
    assert weights_of(lab.run("stopped", **RUN | FREE).run_dir) == weights_of(straight.run_dir)


def test_the_fingerprints_and_the_losses_are_the_result_s(lab):
    """The written adapter, loaded in a new engine, computes what the run has recorded."""
    from dualtune.train.fingerprints import fingerprints

    result = lab.run(**RUN | FREE)
    record = json.loads((result.adapter_dir / "dualtune.json").read_text())
    model = load_model(lab.backend, lab.config().model.name, result.adapter_dir)
    assert fingerprints(model.engine, model.tokenizer) == record["fingerprints"]["adapter"]
    assert record["training"]["eval_loss"] == result.eval_loss


@on_numpy
def test_a_rollback_takes_the_average_back_too(lab, monkeypatch, rows_of, weights_of):
    """A jolt at step 18: what follows continues from a checkpoint, whose slots count the updates before it."""
    from dualtune.train.objective import learning_rate

    factor = 1e5 if lab.backend.name == "numpy" else 1e4
    monkeypatch.setattr(
        "dualtune.train.step.learning_rate",
        lambda config, index, num: learning_rate(config, index, num) * (factor if index == 17 else 1),
    )
    settings = {"train__steps": 22, "run__save_every": 4, "guards__on_spike": "rollback", "train__max_grad_norm": None,
                "data__eval": 0.25, "train__learning_rate": 1e-4, "train__schedule": "constant",
                "train__documents_per_step": 12, "train__average": "ema", "train__average_over": 4}  # fmt: skip
    result = lab.run(**settings)
    assert '"event": "rollback"' in (result.run_dir / "metrics.jsonl").read_text()
    assert weights_of(lab.run("again", **settings).run_dir) == weights_of(result.run_dir)
    saved = newest(result)
    assert saved.optimizer.step == 22 - 3  # the jolt, the spike and the step back to 16
    moved = max(np.abs(w).max() for w in saved.optimizer.slots["offset"].values())
    assert 0 < moved < 0.01, "the average still has the weights of the jolt"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.schedule=schedule_free", "train.optimizer=sgd"], "train.optimizer: got sgd, but schedule_free"),
        (["train.schedule=schedule_free", "train.average=ema"], "train.average: got ema, but the result"),
        (["train.average_over=10"], "train.average_over: got 10, has no effect while train.average is none"),
        (["train.average=tail", "train.average_over=10", "train.steps=9"], "train.average_over: got 10 steps, must be"),
        (["train.average=ema", "train.average_over=0"], "train.average_over"),
    ],
)
def test_what_has_no_meaning_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse_config("{model: {name: m}, data: {train: t}}", overrides=settings)


@on_numpy
def test_an_average_over_more_steps_than_the_run_has_is_refused(lab):
    with pytest.raises(ConfigError, match=r"train.average_over: got 99 steps, but the run has 8"):
        lab.run(train__steps=None, train__epochs=2, train__average="ema", train__average_over=99)


def test_a_backend_that_does_not_name_them_is_refused(make_config):
    """A backend from before these keys has every schedule that is only a learning rate."""
    card = Card(name="mine", devices=(Device("cpu", "float32"),))
    for schedule in ("constant", "linear", "cosine"):
        check_capabilities(card, make_config("no.jsonl", {"train.schedule": schedule}))
    for key, value, honoured in (("schedule", "schedule_free", "constant, cosine, linear"), ("average", "ema", "none")):
        with pytest.raises(ConfigError) as caught:
            check_capabilities(card, make_config("no.jsonl", {f"train.{key}": value}))
        assert str(caught.value) == f"train.{key}: got {value}, the backend 'mine' honours: {honoured}"


@on_numpy
@pytest.mark.parametrize(
    ("before", "now", "key"),
    [({}, FREE, "train.schedule"), (FREE, {}, "train.schedule"), ({}, EMA, "train.average"),
     (TAIL, {}, "train.average"), (TAIL, EMA, "train.average")],
)  # fmt: skip
def test_a_resume_with_other_slots_is_refused(lab, before, now, key):
    with pytest.raises(Crash):
        lab.run("run", [Stop()], **RUN | before)
    with pytest.raises(ConfigError, match="cannot resume") as caught:
        lab.run("run", **RUN | now)
    row = next(line for line in str(caught.value).splitlines() if line.split()[:1] == [key])
    assert row.endswith("forbidden")


@on_numpy
def test_a_checkpoint_from_before_these_keys_is_continued(lab, weights_of):
    straight = lab.run("straight", **RUN)
    with pytest.raises(Crash):
        lab.run("run", [Stop()], **RUN)
    path = lab.tmp_path / "run" / "checkpoints" / "step-00000004"
    assert json.loads((path / "MANIFEST.json").read_text())["schema_version"] == 2
    rewrite_config(path, lambda train: [train.pop(key) for key in ("average", "average_over")])
    assert weights_of(lab.run("run", **RUN).run_dir) == weights_of(straight.run_dir)
    rewrite_config(checkpoint.path_of(path.parent, 9), lambda train: [train.pop(key) for key in ("average",)])
    with pytest.raises(ConfigError, match=r"train\.average +none +ema +forbidden"):
        lab.run("run", **RUN | EMA | {"train__steps": 12})


def rewrite_config(path, change):
    import hashlib

    state, manifest = (json.loads((path / name).read_text()) for name in ("state.json", "MANIFEST.json"))
    change(state["config"]["train"])
    raw = json.dumps(state).encode()
    manifest["files"]["state.json"] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (path / "state.json").write_bytes(raw)
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


@on_numpy
@pytest.mark.parametrize(("way", "version"), [({}, 2), ({"train__optimizer": "sgd"}, 3), (FREE, 4), (TAIL, 4)])
def test_an_older_dualtune_is_told_that_it_is_too_old(lab, way, version):
    path = newest(lab.run(**RUN | way)).path
    assert json.loads((path / "MANIFEST.json").read_text())["schema_version"] == version


def test_the_result_leaves_a_kept_start_as_it_is():
    """Slots are those of what is trained, half of the rank; of a factored slot no values are taken for the result."""
    spec = AdapterSpec(2, 4.0, 0.0, ("q_proj",), init="pissa")
    rng = np.random.default_rng(0)
    names = {part: tensor_name("layers.0.q_proj", part) for part in "AB"}
    state = {names["A"]: rng.normal(size=(4, 7)), names["B"]: rng.normal(size=(5, 4))}
    trained, start = spec.split(state)
    optimizer = OptimizerSpec("adafactor", average=Averaging())
    shapes = optimizer.slot_shapes({name: w.shape for name, w in trained.items()})
    slots = {slot: {name: rng.normal(size=shape) for name, shape in own.items()} for slot, own in shapes.items()}
    moved, same = spec.split(result_of(optimizer, state, OptimizerState(3, slots)))
    assert all(np.array_equal(same[name], kept) for name, kept in start.items())
    assert all(np.array_equal(moved[name], trained[name] + slots["offset"][name]) for name in trained)

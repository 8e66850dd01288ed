"""Runs that compare answers: their gradient, what does not change it, resumption, the reference and the metrics."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.base.files import cache_dir
from dualtune.engine.testing.numpy_engine import NumpyEngine
from dualtune.engine.testing.tolerances import RESUMED_LOSS
from dualtune.show.run import run
from dualtune.train.evaluation import using
from dualtune.train.hooks import Hook
from dualtune.train.objectives import comparison
from dualtune.train.objectives.comparison import evaluate_answers
from dualtune.train.objectives.preference import Loss
from dualtune.train.prepare import prepare
from dualtune.train.recovery import Recovery
from dualtune.train.run import load_engine
from dualtune.train.start import load_comparison
from dualtune.train.step import TrainingStep

pytestmark = pytest.mark.covering(1)

_spec = importlib.util.spec_from_file_location("test_team", Path(__file__).parents[1] / "distributed" / "test_team.py")
threads = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(threads)

PAIRS = [
    {"prompt": f"{n} + {n} =", "chosen": f" {2 * n}" * (1 + n % 3), "rejected": f" {2 * n + 1} or so" * (1 + n % 2)}
    for n in range(24)
]
LABELLED = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n + n % 3}", "label": n % 3 == 0} for n in range(24)]
RUN = {"train__steps": 8, "data__eval": 0.25, "run__save_every": 2, "run__eval_every": 4, "train__learning_rate": 1e-3,
       "train__micro_batch_tokens": 64}  # fmt: skip
OBJECTIVES = ("dpo", "orpo", "simpo", "cpo", "kto")


@pytest.fixture
def compare(lab, write_rows):
    """The lab with rows for an objective."""

    def with_rows(objective):
        rows = LABELLED if objective == "kto" else PAIRS
        return replace(lab, data=write_rows(rows, f"{objective}.jsonl"))

    return with_rows


class Stop(Hook):
    def on_step(self, record):
        if record.step == 5:
            raise KeyboardInterrupt


on_numpy = pytest.mark.parametrize("lab", ["numpy"], indirect=True)


@on_numpy
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_gradient_of_a_step_is_that_of_the_objective(compare, objective):
    """Against finite differences of the objective over the documents of the step, in whatever micro-batches."""
    lab = compare(objective)
    config = lab.config(train__objective=objective, train__micro_batch_tokens=64, train__documents_per_step=6)
    prepared = prepare(config, lab.backend)
    engine = load_engine(prepared)
    rng = np.random.default_rng(0)
    start = {name: rng.normal(0, 0.3, x.shape).astype(np.float32) for name, x in engine.adapter_state().items()}
    compared = load_comparison(prepared, engine)  # of the base: the adapter is set afterwards
    engine.load_adapter_state(start)
    step = TrainingStep(prepared, engine, 0, prepared.batches, comparison=compared)
    step.add_gradients()
    gradient, loss = engine.gradient(), step._loss
    assert len(step.batches) > 1

    ids = prepared.data.order.step(0).documents
    few = _Few(prepared.data.train, ids)
    reference = None if compared.train is None else compared.train[ids]

    def value(state, of=compared.objective):
        with using(engine, state):
            recovery = Recovery(None, engine, prepared.data.layout)
            changed = replace(compared, objective=of, eval=reference)
            return evaluate_answers(engine, few, recovery, comparison=changed).eval_loss

    assert loss.value == pytest.approx(value(start), rel=1e-5)
    for name, at in start.items():
        direction = rng.normal(size=at.shape).astype(np.float32)
        direction *= 0.02 / np.linalg.norm(direction)
        # KTO's estimate of KL depends on the weights too, but is a constant of the loss.
        of = _Linear(loss.slopes_NA) if objective == "kto" else compared.objective
        ends = [value(start | {name: at + sign * direction}, of) for sign in (1, -1)]
        assert (gradient[name] * direction).sum() == pytest.approx((ends[0] - ends[1]) / 2, rel=0.02, abs=1e-6)
    assert max(abs(x).max() for x in gradient.values()) > 1e-4


class _Linear:
    """The tangent of an objective."""

    answers = 2

    def __init__(self, slopes_NA):
        self._slopes_NA = slopes_NA

    def __call__(self, scores):
        return Loss(float((self._slopes_NA * scores.logps_NA).sum()), self._slopes_NA, {})


class _Few:
    """Some documents as if they were all."""

    def __init__(self, documents, ids):
        self._documents, self._ids = documents, ids
        self.lengths, self.targets, self.labels = (getattr(documents, n)[ids] for n in ("lengths", "targets", "labels"))
        self.num_targets, self.hidden = int(self.targets.sum()), None
        self.beginnings, self.shares = None, False

    def __len__(self):
        return len(self._ids)

    def __getitem__(self, i):
        return self._documents[int(self._ids[i])]


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_rows_and_micro_batches_do_not_change_the_run(compare, rows_of, objective):
    lab = compare(objective)
    runs = [
        lab.run("small", train__objective=objective, **RUN),
        lab.run("large", train__objective=objective, **RUN | {"train__micro_batch_tokens": 4096}),
    ]
    if "data.packing" in lab.backend.capabilities():
        runs.append(lab.run("apart", train__objective=objective, data__packing=False, **RUN))
    first, *others = (rows_of(result.run_dir) for result in runs)
    for other in others:
        for rows, expected, key in zip(other, first, ("loss", "eval_loss"), strict=True):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], abs=RESUMED_LOSS)
            assert [row.get("num_tokens") for row in rows] == [row.get("num_tokens") for row in expected]


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_run_that_was_killed_ends_with_the_same_bits(compare, weights_of, rows_of, objective):
    lab, settings = compare(objective), RUN | {"train__objective": objective, "adapter__dropout": 0.3}
    straight = lab.run("straight", **settings)
    with pytest.raises(KeyboardInterrupt):
        lab.run("killed", [Stop()], **settings)
    killed = lab.run("killed", **settings)
    assert weights_of(killed.run_dir) == weights_of(straight.run_dir)
    for rows, expected in zip(rows_of(killed.run_dir), rows_of(straight.run_dir), strict=True):
        assert list(map(_without_clock, rows)) == list(map(_without_clock, expected))


def _without_clock(row):
    return {key: value for key, value in row.items() if not key.endswith(("time", "_s", "_min", "_bytes"))}


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_a_run_goes_on_on_another_backend(compare, open_backend, rows_of):
    lab, settings = compare("dpo"), RUN | {"train__objective": "dpo", "model__dtype": "float32"}
    mlx, torch = open_backend("mlx"), open_backend("torch")
    straight = run(lab.config("straight", **settings), torch)
    with pytest.raises(KeyboardInterrupt):
        run(lab.config("moved", **settings), mlx, [Stop()])
    moved = run(lab.config("moved", **settings), torch)
    for rows, expected, key in zip(
        rows_of(moved.run_dir), rows_of(straight.run_dir), ("loss", "eval_loss"), strict=True
    ):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], abs=RESUMED_LOSS)
    assert [row["step"] for row in rows_of(moved.run_dir)[0]] == list(range(1, 9))


@on_numpy
def test_what_a_row_says(compare, rows_of):
    lab = compare("dpo")
    steps, evals = rows_of(lab.run(train__objective="dpo", **RUN).run_dir)
    assert steps[0]["loss"] == pytest.approx(np.log(2)) and evals[0]["eval_loss"] == pytest.approx(np.log(2))
    names = {"reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp"}
    assert names <= steps[0].keys() and {f"eval_{name}" for name in names} <= evals[0].keys()
    assert steps[-1]["reward_margin"] > 0 == steps[0]["reward_margin"]
    assert [row["epoch"] for row in steps[:4]] == pytest.approx([4 / 18, 8 / 18, 12 / 18, 16 / 18])  # of pairs
    per_document = [row["documents_per_min"] * row["step_s"] / 60 for row in steps]
    assert per_document[:3] == pytest.approx([4, 4, 4])


@on_numpy
@pytest.mark.parametrize("passes", ["target_logprobs", "forward_backward"])
def test_memory_that_runs_out_in_either_pass_cuts_the_step_and_changes_nothing(compare, monkeypatch, rows_of, passes):
    lab, settings = compare("kto"), RUN | {"train__objective": "kto", "train__micro_batch_tokens": 96}
    straight, calls, original = lab.run("straight", **settings), [], getattr(NumpyEngine, passes)

    def short(self, *args, **options):
        calls.append(self)
        if len(calls) == 7:
            np.empty(1 << 60, np.uint8)
        return original(self, *args, **options)

    monkeypatch.setattr(NumpyEngine, passes, short)
    cut = lab.run("cut", **settings)
    lines = map(json.loads, (cut.run_dir / "metrics.jsonl").read_text().splitlines())
    assert [row["tokens_before"] for row in lines if row.get("event") == "out_of_memory"] == [96]
    for rows, others, key in zip(rows_of(cut.run_dir), rows_of(straight.run_dir), ("loss", "eval_loss"), strict=True):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in others], abs=RESUMED_LOSS)


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_with_hidden_states_from_the_cache_the_run_is_the_same(compare, rows_of):
    lab = compare("dpo")
    settings = RUN | {"train__objective": "dpo", "adapter__targets": ["layers.1.self_attn.q_proj"]}
    runs = [lab.run(cache, train__activation_cache=cache, **settings) for cache in ("none", "disk")]
    for rows, others, key in zip(*(rows_of(result.run_dir) for result in runs), ("loss", "eval_loss"), strict=True):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in others], abs=1e-5)


# --- the reference ----------------------------------------------------------------------------------------------------


@on_numpy
def test_the_reference_is_computed_once_for_the_same_base_and_data(compare, monkeypatch, weights_of):
    lab, passes = compare("dpo"), []
    monkeypatch.setenv("DUALTUNE_CACHE", str(lab.tmp_path / "cache"))
    computed = comparison._computed
    monkeypatch.setattr(comparison, "_computed", lambda *args: passes.append(args) or computed(*args))
    first = lab.run("first", train__objective="dpo", **RUN)
    assert len(passes) == 2  # training and evaluation data
    again = lab.run("again", train__objective="dpo", **RUN)
    assert len(passes) == 2 and weights_of(again.run_dir) == weights_of(first.run_dir)
    lab.run("other", train__objective="dpo", **RUN | {"data__max_length": 32, "run__seed": 2})
    assert len(passes) == 4
    for path in (cache_dir() / "reference").iterdir():  # damaged files are made again
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert weights_of(lab.run("healed", train__objective="dpo", **RUN).run_dir) == weights_of(first.run_dir)
    assert len(passes) == 6


@pytest.mark.parametrize("lab", ["torch", "mlx"], indirect=True)
def test_the_bits_of_a_run_do_not_depend_on_what_other_runs_left_in_the_cache(compare, monkeypatch, weights_of):
    """A fresh DoRA, or a start that is made of the weight, is the base but for the last digits."""
    lab = compare("dpo")
    settings = RUN | {"train__objective": "dpo", "model__dtype": "float32", "train__steps": 2, "data__eval": 0}

    def after(*others):
        monkeypatch.setenv("DUALTUNE_CACHE", str(lab.tmp_path / f"cache-{len(others)}"))
        for number, keys in enumerate(others):
            lab.run(f"other-{len(others)}-{number}", **settings, **keys)
        return weights_of(lab.run(f"last-{len(others)}", **settings).run_dir)

    assert (
        after({"adapter__init": "pissa"}) == after({"adapter__method": "dora"}, {"adapter__init": "olora"}) == after()
    )


@on_numpy
def test_the_reference_is_the_adapter_that_the_run_starts_from_or_the_base(compare, rows_of):
    lab = compare("dpo")
    start = lab.run("start", train__objective="orpo", **RUN).adapter_dir
    from_start = {**RUN, "train__objective": "dpo", "adapter__init_from": start}
    own = rows_of(lab.run("own", **from_start).run_dir)[0][0]
    base = rows_of(lab.run("base", **from_start, preference__reference="base").run_dir)[0][0]
    assert own["loss"] == pytest.approx(np.log(2))
    assert base["loss"] != pytest.approx(np.log(2), abs=1e-4)
    assert base["chosen_logp"] == own["chosen_logp"]


@on_numpy
def test_a_run_does_not_resume_with_another_objective(compare):
    lab = compare("dpo")
    lab.run(train__objective="dpo", **RUN)
    for change in ({"train__objective": "orpo"}, {"preference__beta": 0.2}):
        with pytest.raises(ConfigError, match=next(iter(change)).replace("__", ".")):
            lab.run(**{"train__objective": "dpo", **RUN, "train__steps": 10, **change})


@on_numpy
def test_the_record_of_a_run_names_its_objective(compare):
    result = compare("dpo").run(train__objective="dpo", **RUN)
    assert json.loads((result.adapter_dir / "dualtune.json").read_text())["training"]["objective"] == "dpo"


# --- what is made of a run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_eval_measures_the_objective_and_the_loss_of_the_wanted_answers(compare, dualtune_main, rows_of, objective):
    lab = compare(objective)
    result = lab.run(train__objective=objective, **RUN)
    done = dualtune_main("eval", result.run_dir / "config.yaml", "--json", "--no-leaks", "--platform", "cpu")
    assert done.returncode == 0, done.stderr
    report, last = json.loads(done.stdout), rows_of(result.run_dir)[1][-1]
    assert report["preference"]["objective_loss"] == pytest.approx(last["eval_loss"], abs=1e-5)
    for name in ("chosen_logp", "rejected_logp", "chosen_reward"):
        assert report["preference"][name] == pytest.approx(last[f"eval_{name}"], abs=1e-3)
    wanted = report["targets"] * -report["loss"] / report["rows"]  # the mean of Σ log p of an answer
    assert wanted == pytest.approx(last["eval_chosen_logp"], abs=1e-3)


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_what_a_person_sees_of_a_run(compare, dualtune_main):
    run_dir = compare("dpo").run(train__objective="dpo", **RUN).run_dir
    assert "of pairs in the right order, margin" in (run_dir / "log.txt").read_text()
    assert "held-out pairs in the right order" in (run_dir / "report.html").read_text()
    header, first, *_ = dualtune_main("runs", "export", run_dir).stdout.splitlines()
    row = dict(zip(header.split(","), first.split(","), strict=True))
    assert {"eval_reward_accuracy", "reward_margin"} <= row.keys() and row["perplexity"] == row["eval_perplexity"] == ""


# --- backends and processes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
@pytest.mark.parametrize(
    ("objective", "steps"),
    [("dpo", 10), ("kto", 10), *(pytest.param(o, 100, marks=pytest.mark.long) for o in OBJECTIVES)],
)
def test_torch_and_mlx_take_the_same_steps(compare, open_backend, rows_of, objective, steps):
    """With dropout: the loss of each step and of each evaluation."""
    lab = compare(objective)
    settings = RUN | {"train__objective": objective, "model__dtype": "float32", "adapter__dropout": 0.2,
                      "train__steps": steps}  # fmt: skip
    runs = [run(lab.config(name, **settings), open_backend(name)) for name in ("torch", "mlx")]
    for rows, others, key in zip(*(rows_of(result.run_dir) for result in runs), ("loss", "eval_loss"), strict=True):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in others], abs=2e-5)
        assert {*rows[0]} == {*others[0]}


@on_numpy
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_processes_that_share_a_step_compare_the_same_answers(compare, objective):
    lab = compare(objective)
    config = lab.config(train__objective=objective, train__micro_batch_tokens=64, train__documents_per_step=7)
    prepared = prepare(config, lab.backend)

    def work(team):
        mine = replace(prepared, team=team)
        engine = load_engine(mine)
        compared = load_comparison(mine, engine)
        engine.load_adapter_state({name: x + np.float32(0.1) for name, x in engine.adapter_state().items()})
        step = TrainingStep(mine, engine, 0, mine.batches, comparison=compared)
        step.add_gradients()
        recovery = Recovery(None, engine, mine.data.layout, team=team)
        evaluation = evaluate_answers(engine, mine.data.train, recovery, team=team,
                                      comparison=replace(compared, eval=compared.train))  # fmt: skip
        return step._loss.value, evaluation.eval_loss, engine.gradient()

    (alone,) = threads.in_world(1, work)
    for size in (2, 3):
        shared = threads.in_world(size, work)
        assert len({(value, evaluated) for value, evaluated, _ in shared}) == 1
        assert shared[0][:2] == pytest.approx(alone[:2], rel=1e-6)
        for name, gradient in alone[2].items():
            total = sum(each[name] for _, _, each in shared)
            np.testing.assert_allclose(total, gradient, rtol=1e-4, atol=1e-6)

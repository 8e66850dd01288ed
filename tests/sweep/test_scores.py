"""How runs are compared: their scores, their order, and the steps of successive halving."""

import math
from pathlib import Path

import pytest

from dualtune.train.state.listing import RunSummary
from dualtune.train.sweep.sweep import Result, Rung, Score, SweepTrial, at_the_edge, ranked, rungs, score_of


def evaluation(step, loss):
    return {"step": step, "eval_loss": loss, "eval_targets": 5}


ROWS = [
    evaluation(0, 9.0), {"step": 1, "loss": 4.0}, evaluation(2, 3.0), {"step": 3, "loss": 2.0}, evaluation(4, 1.0),
    {"step": 5, "loss": 1.5}, {"step": 5, "event": "verdict", "message": ""}, evaluation(6, 2.0),
]  # fmt: skip


def test_the_score_is_the_last_evaluation_or_the_one_at_a_step():
    assert score_of(ROWS) == Score(2.0, 6, is_held_out=True)
    assert score_of(ROWS, best=True) == Score(1.0, 4, is_held_out=True)
    assert score_of(ROWS, 2) == Score(3.0, 2, is_held_out=True)
    assert score_of(ROWS, 3) == Score(3.0, 2, is_held_out=True)
    assert score_of([*ROWS, evaluation(8, math.nan)]) == Score(None, 8, is_held_out=True)
    assert score_of([*ROWS, evaluation(8, math.nan)], best=True) == Score(1.0, 4, is_held_out=True)


def test_without_evaluations_the_last_tenth_of_the_steps_counts():
    rows = [{"step": step, "loss": float(step)} for step in range(1, 41)]
    assert score_of(rows) == Score((37 + 38 + 39 + 40) / 4, 40)
    assert score_of(rows, 20) == Score(19.5, 20)
    assert score_of([]) == Score(None, 0) == score_of([evaluation(0, 2.0)])
    assert score_of([{"step": 1, "loss": math.inf}]) == Score(None, 1)
    skipped = [*rows[:38], {"step": 39, "loss": math.nan}, rows[39]]  # a skipped step changes no weight
    assert score_of(skipped) == Score((37 + 38 + 40) / 3, 40)
    assert score_of([*rows[:39], {"step": 40, "loss": math.nan}]) == Score(None, 40)


def result(name, state, step, loss):
    summary = RunSummary(name, state, "") if state else None
    return Result(SweepTrial(name, {}, None), summary, Score(loss, step))


def test_those_that_were_trained_to_their_end_come_first_then_those_that_came_furthest():
    results = [
        result("e", None, 0, None), result("d", "preempted", 4, 1.0), result("c", "preempted", 8, 3.0),
        result("b", "done", 5, 2.5), result("a", "done", 16, 2.0), result("x", "done", 16, None),
    ]  # fmt: skip
    assert [each.trial.name for each in ranked(results)] == ["a", "b", "x", "c", "d", "e"]


def test_a_best_value_at_the_edge_of_three_is_named():
    def trials(*values):
        return [
            SweepTrial(str(value), {"train.learning_rate": value, "adapter.method": "lora"}, None) for value in values
        ]

    three = trials(1e-4, 1e-3, 1e-2)
    assert at_the_edge(three[2], three) == [
        "the best train.learning_rate, 0.01, is the highest that was tried: try higher ones"
    ]
    assert at_the_edge(three[0], three)[0].endswith("is the lowest that was tried: try lower ones")
    assert at_the_edge(three[1], three) == []
    assert at_the_edge(three[0], three[:2]) == []
    assert at_the_edge(*(lambda found: (found[0], found))(trials(False, True, None))) == []


@pytest.mark.parametrize(
    ("num_runs", "num_steps", "every", "expected"),
    [
        (8, 800, 100, [(100, 4), (200, 2), (400, 1)]),
        (8, 800, None, [(100, 4), (200, 2), (400, 1)]),
        (5, 80, 10, [(10, 3), (20, 2), (40, 1)]),
        (3, 100, 1, [(25, 2), (50, 1)]),
        (8, 200, 100, [(100, 1)]),  # three rungs at one step: only the last counts
        (4, 50, 100, []),  # nothing is evaluated before the end
        (2, 7, 2, [(4, 1)]),
        (1, 100, 10, []),
    ],
)
def test_rungs_double_the_steps_and_halve_the_runs_where_there_is_an_evaluation(num_runs, num_steps, every, expected):
    assert rungs(num_runs, num_steps, every) == [Rung(*each) for each in expected]


def test_a_trial_lies_where_its_config_says(make_config, tmp_path):
    assert SweepTrial("x", {}, make_config("d", {"run.dir": tmp_path / "a"})).path == Path(tmp_path / "a")

"""Learning rates against closed formulas and against transformers' schedules."""

import math
from itertools import pairwise

import pytest

from dualtune.config import parse_config
from dualtune.config.schema import RunConfig
from dualtune.train.objective import is_due, learning_rate, steps_of, steps_until_due, with_intervals

PEAK = 2e-4


def rates(schedule, warmup, num_steps) -> list[float]:
    overrides = [f"train.schedule={schedule}", f"train.warmup={warmup}", f"train.learning_rate={PEAK}"]
    config = parse_config("{model: {name: m}, data: {train: t}}", overrides=overrides)
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


FORMULAS = {  # of the share of the steps after the warm-up that are done
    "constant": lambda done: 1.0,
    "schedule_free": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: math.cos(math.pi * done / 2) ** 2,
}


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (7, 7), (0.1, 5), (0.03, 2)])
@pytest.mark.parametrize("schedule", FORMULAS)
def test_schedules_are_their_formulas(schedule, warmup, steps):
    n = 50
    rising = [PEAK * (t + 1) / (steps + 1) for t in range(steps)]
    falling = [PEAK * FORMULAS[schedule](t / (n - steps)) for t in range(n - steps)]
    assert rates(schedule, warmup, n) == pytest.approx(rising + falling, rel=1e-12)


@pytest.mark.parametrize("warmup", [0, 5, 0.2])
@pytest.mark.parametrize("schedule", FORMULAS)
def test_rates_rise_to_the_peak_and_then_fall_and_are_never_zero(schedule, warmup):
    found = rates(schedule, warmup, 40)
    peak = found.index(max(found))
    assert max(found) == PEAK
    assert all(a < b for a, b in pairwise(found[: peak + 1]))
    assert all(a >= b for a, b in pairwise(found[peak:]))
    assert min(found) > 0


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_after_the_warmup_rates_are_transformers_s(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = getattr(transformers, f"get_{name}_schedule_with_warmup")(optimizer, 10, 100)
    theirs = []
    for _ in range(100):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates(name, 10, 100)[10:] == pytest.approx(theirs[10:], rel=1e-9)


@pytest.mark.parametrize(
    ("warmup", "num_steps", "expected"),
    [(0.0, 100, 0), (0.03, 100, 3), (0.03, 101, 4), (0.07, 100, 7), (0.55, 100, 55), (0.001, 10, 1), (20, 100, 20)],
)
def test_a_warmup_below_one_is_a_share_rounded_up(warmup, num_steps, expected):
    """0.07 · 100 and 0.55 · 100 are a little more than 7 and 55 in floating point."""
    assert steps_of(warmup, num_steps) == expected


@pytest.mark.parametrize("schedule", FORMULAS)
def test_a_single_step_has_the_full_rate(schedule):
    assert rates(schedule, 0, 1) == [PEAK]


@pytest.mark.parametrize(
    ("every", "step", "expected"),
    [((None, None), 0, 20), ((None, None), 19, 1), ((6, None), 0, 6), ((6, None), 6, 6), ((6, 4), 6, 2)],
)
def test_what_is_due_next(every, step, expected):
    config = RunConfig(eval_every=every[0], save_every=every[1])
    assert steps_until_due(config, step, 20) == expected
    ahead = [s for s in range(step + 1, 21) if s == 20 or any(is_due(s, e) for e in every)]
    assert ahead[0] - step == expected


@pytest.mark.parametrize(
    ("num_steps", "log_every", "eval_every"),
    [(4, 1, 10), (30, 3, 10), (60, 6, 15), (100, 10, 25), (390, 10, 98), (400, 10, 100), (9000, 10, 100)],
)
def test_a_short_run_has_shorter_intervals(make_config, num_steps, log_every, eval_every):
    found = with_intervals(make_config("unused"), num_steps).run
    assert (found.log_every, found.eval_every) == (log_every, eval_every)


def test_intervals_that_are_set_are_kept_and_so_are_those_of_a_resumed_run(make_config):
    short = with_intervals(make_config("unused", {"run.log_every": 10, "run.eval_every": None}), 30).run
    assert (short.log_every, short.eval_every) == (10, None)
    resumed = with_intervals(make_config("unused"), 30, {"log_every": 7, "eval_every": 50}).run
    assert (resumed.log_every, resumed.eval_every) == (7, 50)
    hybrid = make_config("unused", {"hybrid.enabled": True})
    assert with_intervals(hybrid, 30) == hybrid


def test_a_run_records_its_intervals_and_a_longer_one_keeps_them(lab, rows_of):
    from dualtune.config.load import load_config

    settings = {"train__documents_per_step": 1, "data__eval": 0.25, "run__save_every": 10}
    first = lab.run(train__steps=24, **settings)
    assert sorted(row["step"] for row in rows_of(first.run_dir)[1]) == [0, 10, 20, 24]
    assert load_config(first.run_dir / "config.yaml").run.eval_every == 10
    lab.run(train__steps=44, **settings)  # alone it would have an evaluation every 11 steps
    assert sorted(row["step"] for row in rows_of(first.run_dir)[1]) == [0, 10, 20, 24, 30, 40, 44]

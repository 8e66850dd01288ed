"""`dualtune hybrid bench`: arms, controls of equal cost, intervals, and what the command says and writes."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.cli.hybrid import LEGEND, in_percent, table
from dualtune.doctor.bench import digits as digits_module
from dualtune.doctor.bench import hybrid as compare_module
from dualtune.doctor.bench import intervals
from dualtune.doctor.bench.hybrid import (
    ARMS,
    BASELINE,
    Arm,
    ArmResult,
    Comparison,
    Freezing,
    Place,
    Trial,
    compare,
    plot,
    predict_at_random,
    tune_rate,
)
from dualtune.doctor.bench.intervals import interval, paired
from dualtune.train.hybrid.prediction import Window, norm
from dualtune.train.policies import Ordinary

PHASES = {"hybrid": {"warmup_steps": 4, "full_steps": 6, "correct_steps": 2, "max_predict_steps": 8, "probes": 4}}


@pytest.fixture(scope="module")
def settings(tiny_softmax, tmp_path_factory):
    """A config whose rate is so low that predictions help, with data for evaluation."""
    home = tmp_path_factory.mktemp("bench")
    rows = [{"prompt": f"{i} plus {i}?", "completion": f"{2 * i}{'!' * (i % 5)}"} for i in range(48)]
    for name, part in (("train", rows), ("eval", rows[:6])):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return {
        "model": {"name": str(tiny_softmax)},
        "adapter": {"rank": 2, "alpha": 4, "dropout": 0, "targets": "all-linear"},
        "data": {"train": str(home / "train.jsonl"), "eval": str(home / "eval.jsonl"), "max_length": 64},
        "train": {"steps": 48, "learning_rate": 1e-3, "documents_per_step": 12},
        "hybrid": {**PHASES["hybrid"], "trust_region": 9.0},
        "run": {"dir": str(home / "never"), "seed": 5},
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(settings, open_backend):
    return compare(settings, (), open_backend("numpy"), arms=("predict", "random", "freeze", "average"), seeds=2)


def trial(arm="predict", loss=1.0, cost=10.0, seed=1, steps=10, **more):
    return Trial(arm, seed, steps, cost, loss, more.pop("wall_s", 2.0), more.pop("losses", ()), **more)


def test_an_interval_is_student_s():
    def inside(t, degrees):
        x = np.linspace(-t, t, 200_001)
        c = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
        return np.trapezoid(c * (1 + x * x / degrees) ** (-(degrees + 1) / 2), x)

    for degrees, t in enumerate(intervals._T_95, 1):
        assert inside(t, degrees) == pytest.approx(0.95, abs=5e-5)
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.margin) == pytest.approx((2.0, 4.303 / math.sqrt(3)))
    assert interval([2.0]).margin is None and not interval([2.0]).excludes_zero
    assert paired([1.0, 2.0, 3.0], [0.9, 1.9, 2.9]).excludes_zero and not paired([1.0, 2.0], [2.0, 1.0]).excludes_zero
    with pytest.raises(ValueError):
        paired([1.0], [1.0, 2.0])


def test_every_arm_has_a_control_of_its_cost(found):
    baseline, *others = found.results
    assert baseline.arm.name == BASELINE and baseline.controls == baseline.trials and baseline.cost == 1
    assert [result.arm.name for result in others] == ["predict", "random", "freeze", "average"]
    for result in found.results:
        assert [each.seed for each in result.trials] == [5, 6] == [each.seed for each in result.controls]
        for mine, control in zip(result.trials, result.controls, strict=True):
            assert mine.steps == 48 and abs(control.cost - mine.cost) <= 0.5 and control.steps == control.cost
    by_name = {result.arm.name: result for result in found.results}
    assert baseline.losses[0] != baseline.losses[1]
    assert by_name["average"].controls == baseline.trials
    assert by_name["predict"].counts["accepted"] > 0 and by_name["predict"].cost < 1
    assert by_name["predict"].losses != baseline.losses != by_name["average"].losses


def test_a_random_direction_is_as_long_as_the_velocity_and_is_rejected(found, settings):
    counts = next(result.counts for result in found.results if result.arm.name == "random")
    assert counts["attempts"] > 0 and counts["accepted"] <= 0.05 * counts["attempts"]
    policy = predict_at_random(3)(Place(settings, (), None).load())
    window = Window(2, np.zeros(50, np.float32), np.zeros(50, np.float32), np.ones(50, np.float32))
    first, second = policy._direction(window), policy._direction(window)
    assert norm(first) == pytest.approx(norm(window.velocity())) and not np.array_equal(first, second)


def test_a_frozen_step_takes_its_data_and_changes_nothing(settings, open_backend, monkeypatch):
    seen = []
    take = Freezing.take

    def watched(policy, step):
        before = step.engine.adapter_state()
        outcome = take(policy, step)
        after = step.engine.adapter_state()
        seen.append((outcome.update is None, all(np.array_equal(before[name], after[name]) for name in before)))
        return outcome

    monkeypatch.setattr(Freezing, "take", watched)
    place = Place(settings, (), open_backend("numpy"))
    made = place.run(ARMS["freeze"], 5, ARMS["freeze"].changes(place.load()))
    assert [frozen for frozen, _ in seen] == [False] * 4 + ([False] * 6 + [True] * 3) * 4 + [False] * 6 + [True] + [
        False
    ]
    assert all(frozen == same for frozen, same in seen)
    assert made.cost == pytest.approx(35 + 13 / 2.11)


def test_the_last_step_is_never_frozen(settings, open_backend):
    place = Place(settings, ("train.steps=13",), open_backend("numpy"))
    assert place.run(ARMS["freeze"], 5, {}).cost == pytest.approx(11 + 2 / 2.11)


def test_the_cost_is_that_of_the_event(found):
    for each in next(result for result in found.results if result.arm.name == "predict").trials:
        assert each.cost == pytest.approx(each.hybrid["cost"] / (each.hybrid["cost_without"] / 48))


def test_tuning_follows_the_rate_uphill_or_downhill(settings, monkeypatch):
    place = Place(settings, (), None)

    def with_best_at(best):
        tried = []

        def run(place, arm, seed, changes):
            tried.append(changes["train.learning_rate"])
            return trial(loss=abs(math.log2(tried[-1] / best)))

        monkeypatch.setattr(Place, "run", run)
        losses = tune_rate(place, place.load(), lambda text: None)
        assert list(losses) == tried
        return min(losses, key=losses.get), [round(rate / 1e-3, 4) for rate in tried]

    assert with_best_at(1e-3) == (1e-3, [1, 2, 0.5])
    assert with_best_at(4e-3) == (4e-3, [1, 2, 4, 8])
    assert with_best_at(2.5e-4) == (2.5e-4, [1, 2, 0.5, 0.25, 0.125])


def test_all_arms_train_at_the_tuned_rate(settings, open_backend, monkeypatch):
    monkeypatch.setattr(compare_module, "tune_rate", lambda *rest: {1e-3: 2.0, 2e-3: 1.0, 4e-3: 3.0})
    used, run = [], Place.run

    def watched(place, arm, seed, changes):
        used.append((arm.name, place.load(changes).train.learning_rate))
        return run(place, arm, seed, changes)

    monkeypatch.setattr(Place, "run", watched)
    got = compare(settings, (), open_backend("numpy"), arms=("schedule_free",), seeds=1, tune=True)
    assert got.learning_rate == 2e-3 and used == [("baseline", 2e-3), ("schedule_free", 1.375 * 2e-3)]


def test_an_arm_that_the_config_does_not_allow_is_not_offered(settings, open_backend):
    got = compare(settings, ("train.optimizer=sgd", "train.steps=2", "train.warmup=0"), open_backend("numpy"),
                  arms=("schedule_free",), seeds=1)  # fmt: skip
    assert [result.arm.name for result in got.results] == [BASELINE]
    assert "train.optimizer" in got.not_offered["schedule_free"]


def test_a_control_has_a_shorter_warm_up_of_the_rate_too(settings, open_backend, monkeypatch):
    used, run = [], Place.run

    def watched(place, arm, seed, changes):
        used.append((changes.get("train.steps"), changes.get("train.warmup")))
        return run(place, arm, seed, changes)

    monkeypatch.setattr(Place, "run", watched)
    compare(settings, ("train.warmup=12",), open_backend("numpy"), arms=("freeze",), seeds=1)
    assert used == [(None, None), (None, None), (41, 10)]


@pytest.mark.parametrize(
    ("arms", "override", "message"),
    [
        (("clever",), "train.steps=4", "--arms: got 'clever', allowed: baseline, predict"),
        (("predict",), "data.eval=0", "data.eval: got none"),
    ],
)
def test_what_cannot_be_compared_is_refused(settings, open_backend, arms, override, message):
    with pytest.raises(ConfigError, match=message):
        compare(settings, (override,), open_backend("numpy"), arms=arms, seeds=1)


def result_of(losses, controls, **more):
    mine = tuple(trial(loss=loss, seed=seed, **more) for seed, loss in enumerate(losses))
    other = tuple(trial(BASELINE, loss, 10.0, seed) for seed, loss in enumerate(controls))
    return ArmResult(ARMS["predict"], mine, other, other)


def test_the_verdict_needs_an_interval_without_zero():
    assert result_of([1.0, 1.01, 1.02], [1.1, 1.11, 1.12]).verdict == "better than its control"
    assert result_of([1.1, 1.11, 1.12], [1.0, 1.01, 1.02]).verdict == "worse than its control"
    assert result_of([1.0, 1.2], [1.1, 1.11]).verdict == "no evidence of a difference"
    assert result_of([1.0], [1.1]).verdict == "no evidence of a difference"
    baseline = result_of([1.0, 1.0], [1.1, 1.1])
    assert ArmResult(Arm(BASELINE, ""), baseline.trials, baseline.controls, baseline.baseline).verdict == ""


def test_a_difference_of_losses_is_shown_as_one_of_perplexities():
    assert in_percent(interval([math.log(1.02)])) == "+2.00 %"
    assert in_percent(interval([-0.01, -0.03])) == f"-1.98 % ({100 * math.expm1(-0.02 - 0.12706):+.2f} to "\
        f"{100 * math.expm1(-0.02 + 0.12706):+.2f})"  # fmt: skip


def test_the_table_has_the_interval_of_the_time_and_counts_divergences():
    """By the clock 1.2 and 0.8 of the baseline's: 1 ± 12.706 · 0.2828 / sqrt 2."""
    base = tuple(trial(BASELINE, seed=seed) for seed in (1, 2))
    counted = dict.fromkeys(("attempts", "accepted", "undone"), 1) | {"divergences": 2}
    mine = tuple(trial(seed=seed, wall_s=wall_s, hybrid=counted) for seed, wall_s in ((1, 2.4), (2, 1.6)))
    head, row = table(Comparison((ArmResult(ARMS["predict"], mine, base, base),), 1e-3))
    shown = dict(zip(head, row, strict=True))
    assert (shown["time"], shown["predictions"], shown["divergences"]) == ("1.00 ± 2.54", "2 of 2, 2 undone", "4")


def test_when_the_baseline_s_training_loss_was_reached():
    base = trial(BASELINE, losses=((1, 1.0, 3.0), (2, 2.0, 2.0)))
    fast, never = trial(losses=((1, 0.5, 2.0), (2, 1.0, 1.0))), trial(losses=((1, 1.0, 3.0),))
    got = ArmResult(ARMS["predict"], (fast, never), (base, base), (base, base))
    assert got.reached == [(1, 0.5), None]


def test_the_command_writes_table_json_and_plot(settings, dualtune_main, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("".join(f"{section}: {json.dumps(fields)}\n" for section, fields in settings.items()))
    done = dualtune_main(
        "hybrid", "bench", config, "--platform", "numpy", "--seeds", 2, "--arms", "predict, freeze",
        "--json", tmp_path / "r.json", "--plot", tmp_path / "r.svg", "--set", "train.steps=20",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = [line.split()[0] for line in done.stdout.splitlines() if line]
    assert (
        shown[shown.index("learning") :][:5] == ["learning", "arm", "baseline", "predict", "freeze"]
        and LEGEND[0][1] in done.stdout
    )
    recorded = json.loads((tmp_path / "r.json").read_text())
    assert [arm["arm"] for arm in recorded["arms"]] == ["baseline", "predict", "freeze"]
    assert len(recorded["arms"][1]["trials"]) == 2 and recorded["arms"][1]["trials"][0]["hybrid"]["attempts"] >= 1
    texts = {each.text for each in ElementTree.parse(tmp_path / "r.svg").iter() if each.tag.endswith("text")}
    assert {"baseline", "predict", "freeze"} <= texts
    assert not Path(settings["run"]["dir"]).exists()


@pytest.mark.parametrize("given", [(), ("c.yaml", "--task", "demo")])
def test_the_command_needs_a_config_or_a_task(dualtune_main, given):
    done = dualtune_main("hybrid", "bench", *given)
    assert done.returncode == 2 and "Give either CONFIG or --task" in done.stderr


def test_the_plot_and_table_of_a_single_arm_that_is_exactly_the_baseline():
    same = result_of([1.0], [1.0])
    ElementTree.fromstring(plot(Comparison((same,), 1e-3)))
    assert len(list(table(Comparison((same,), 1e-3)))) == 2


def test_a_policy_may_be_given_as_a_function(settings, open_backend):
    from dualtune.train.prepare import prepare

    config = Place(settings, (), None).load()
    assert prepare(config, open_backend("numpy"), policy=Ordinary).make_policy is Ordinary


def test_the_command_compares_on_digits(dualtune_main, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(digits_module, "STEPS", 140)
    done = dualtune_main("hybrid", "bench", "--task", "digits", "--seeds", 1, "--json", tmp_path / "d.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "d.json").read_text())["rows"]
    assert {"baseline", "conservative", "aggressive", "control of aggressive"} < {row["arm"] for row in rows}
    assert f"{100 * rows[0]['accuracy']['mean']:.2f} %" in done.stdout


@pytest.mark.parametrize("option", [["--arms", "predict"], ["--set", "train.steps=3"], ["--tune"], ["--plot", "p.svg"]])
def test_options_without_effect_on_digits_are_refused(dualtune_main, option):
    done = dualtune_main("hybrid", "bench", "--task", "digits", *option)
    assert done.returncode == 2 and f"{option[0]} has no effect with --task digits" in done.stderr

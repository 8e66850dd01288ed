"""The word at the end of a run: right on real curves, and on made-up ones whatever the noise."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dualtune
from dualtune.train.health import MIN_STEPS, judge
from dualtune.train.rl.rollouts import same_answer
from dualtune.train.verdict import of_rewards

# --- real runs -------------------------------------------------------------------------------------------------------

DEMO = Path(dualtune.__file__).parent / "demo"
RUNS = {
    "learning": {"train__steps": 60, "train__learning_rate": 0.005},
    "still falling": {"train__steps": 30, "train__learning_rate": 0.0005, "train__schedule": "constant"},
    "flat": {"train__steps": 24, "train__learning_rate": 1e-9},
    "diverged": {"train__steps": 24, "train__learning_rate": 50.0, "train__max_grad_norm": None},
    # Four evaluations: of more the noise is estimated, which at this rate may hide the rise, as roundings fall.
    "overfitting": {
        "train__steps": 100, "train__learning_rate": 0.01, "adapter__rank": 8, "adapter__alpha": 16,
        "run__eval_every": 25,
    },
    "too few steps": {"train__steps": 3},
}  # fmt: skip


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
@pytest.mark.parametrize("word", RUNS)
def test_the_verdict_on_a_real_run(lab, word, write_rows):
    """Of the demo's model, which has been trained: a fresh one has nothing to lose."""
    if word == "overfitting":  # nothing can be learned from the answers but themselves
        rng = np.random.default_rng(0)
        rows = [{"prompt": f"Word {i}?", "completion": "".join(rng.choice([*"abcdefgh"], 8))} for i in range(24)]
    else:
        rows = [json.loads(line) for line in (DEMO / "data" / "train.jsonl").read_text().splitlines()[:120]]
    lab.model, lab.data = DEMO / "model", write_rows(rows[:-12])
    held_out = write_rows(rows[-12:], "heldout.jsonl")
    result = lab.run(**{"data__eval": str(held_out), "data__max_length": 512, "run__eval_every": 10} | RUNS[word])
    assert result.verdict.word == word, str(result.verdict)
    event = json.loads((result.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["verdict"], event["message"]) == ("verdict", word, str(result.verdict))
    record = json.loads((result.adapter_dir / "dualtune.json").read_text())["training"]["verdict"]
    assert record == {"word": word, "because": result.verdict.because}


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_a_finished_run_says_its_verdict_again(lab):
    assert lab.run().verdict == lab.run().verdict
    assert lab.run().was_finished


# --- made-up curves --------------------------------------------------------------------------------------------------

SEEDS = 50
t = np.linspace(0, 1, 400)
CURVES = {
    "flat": 2 + 0 * t,
    "learning": 1 + 2 * np.exp(-8 * t),
    "still falling": 3 - 2 * t,
    "diverged": np.where(t < 0.5, 3 - 2 * t, 2 + 8 * (t - 0.5)),
}


def evaluated(curve, times, rng, rise=0.0):
    """Evaluations along a curve, with a little jitter, and at the end so much above it."""
    steps = np.linspace(0, len(curve), times + 1).astype(int)
    last = len(curve) - 1
    return {int(s): float((curve[min(s, last)] + rise * (s / last) ** 2) * rng.normal(1, 0.002)) for s in steps}


@pytest.mark.parametrize("word", CURVES)
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("evals", [0, 1, 8])
def test_noise_does_not_change_the_word(word, noise, evals):
    """One loss in a hundred curves may mislead; a straight line needs evaluations to be told from one that settles."""
    rng, said = np.random.default_rng(7), Counter()
    for _ in range(SEEDS):
        losses = CURVES[word] * rng.lognormal(0, noise, len(t))
        said[judge(losses.tolist(), evaluated(CURVES[word], evals, rng) if evals else {}).word] += 1
    is_hard = word == "still falling" and noise == 0.3 and evals < 8
    right = said[word] + (said["learning"] if is_hard else 0)
    assert right >= 0.99 * SEEDS, said


@pytest.mark.parametrize("num_steps", [MIN_STEPS, 50, 200, 1000])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.5])
def test_a_run_that_learns_nothing_is_never_praised_and_seldom_blamed(num_steps, noise):
    rng, said = np.random.default_rng(3), Counter()
    for _ in range(SEEDS * 3):
        said[judge(rng.lognormal(0.7, noise, num_steps).tolist(), {}).word] += 1
    assert said["flat"] >= 0.99 * said.total(), said


@pytest.mark.parametrize("evals", [3, 8])
def test_overfitting_is_told_from_learning_by_the_evaluations(evals):
    rng, said = np.random.default_rng(5), Counter()
    for rise in (0.0, 1.5):
        for _ in range(SEEDS):
            losses = CURVES["still falling"] * rng.lognormal(0, 0.1, len(t))
            settled = CURVES["learning"]
            said[rise, judge(losses.tolist(), evaluated(settled, evals, rng, rise)).word] += 1
    assert said[1.5, "overfitting"] == SEEDS, said
    assert said[0.0, "overfitting"] == 0, said


@pytest.mark.parametrize(
    ("losses", "evals", "word"),
    [
        ([], {}, "too few steps"),
        ([2.0], {}, "too few steps"),
        ([5.3, 12.7, 12.0], {}, "diverged"),
        ([5.3, 5.2, 5.1], {0: 5.3, 3: 12.7}, "diverged"),
        ([2.0] * 30, {}, "flat"),
        ([2.0] * 30 + [float("nan")] * 6, {}, "diverged"),
        ([2.0 - i / 99 for i in range(30)], {0: 2.0, 30: float("nan")}, "diverged"),
        ([2.0 - i / 99 for i in range(30)], {0: 2.0}, "still falling"),
        ([3.0 - i / 15 for i in range(30)], {0: 3.0, 30: 2.99}, "overfitting"),
        ([0.0] * 30, {0: 0.0, 30: 0.0}, "flat"),
        # Bent: it falls fast, and ends 7 % above its best.
        (
            [3.0 - i / 15 for i in range(30)],
            {4 * i: 1 + 4 * np.exp(-8 * i / 7) + 0.14 * (i / 7) ** 3 for i in range(8)},
            "overfitting",
        ),
    ],
)
def test_the_verdict_on_short_and_odd_curves(losses, evals, word):
    verdict = judge(losses, evals)
    assert verdict.word == word, str(verdict)
    assert str(verdict).startswith(f"{word}: ") and "nan" not in str(verdict).replace("loss is nan", "")


def test_a_single_spike_is_no_divergence():
    losses = (1 + 2 * np.exp(-8 * t)).tolist()
    losses[200:203] = [50.0, 40.0, 30.0]
    assert judge(losses, {}).word == "learning"


def test_the_training_loss_of_a_verdict_says_of_which_steps_it_is():
    """`dualtune runs` shows that of the last step: 0.5 here."""
    falling = [3.0, 2.0, 2.5, 1.5, 1.0, 0.5]
    assert judge(falling, {}).because.endswith("training loss 2.5000 -> 0.7500 (medians of 2 steps)")
    assert judge([3.0, 2.0], {}).because.endswith("training loss 3.0000 -> 2.0000 (of the first and the last step)")


# --- runs that compare answers ----------------------------------------------------------------------------------------

FALLING = list(np.linspace(0.69, 0.2, 60))
BEFORE = {"eval_chosen_logp": -50.0, "eval_rejected_logp": -52.0}
AFTER = {"eval_chosen_logp": -49.0, "eval_rejected_logp": -80.0}


@pytest.mark.parametrize(
    ("last", "word"),
    [
        (AFTER, "still falling"),
        ({"eval_chosen_logp": -60.0, "eval_rejected_logp": -90.0}, "both fall"),
        ({"eval_chosen_logp": -54.0, "eval_rejected_logp": -90.0}, "still falling"),
        (AFTER | {"eval_length_correlation": -0.95}, "length"),
        (AFTER | {"eval_kl": 51.0}, "far away"),
    ],
)
def test_what_the_loss_of_a_comparison_does_not_show(last, word):
    assert judge(FALLING, {0: 0.69, 30: 0.45, 60: 0.2}, [BEFORE, last]).word == word


def test_a_small_loss_of_a_comparison_may_rise_a_little():
    """From 0.002 to 0.004 is nothing beside the 0.69 it began with, and overfitting in nats per token."""
    losses, evals = [*FALLING, *np.linspace(0.2, 0.001, 60)], {0: 0.69, 60: 0.002, 120: 0.004}
    assert judge(losses, evals, [BEFORE, AFTER]).word != "overfitting" == judge(losses, evals).word


# --- runs that learn from their own samples ---------------------------------------------------------------------------

RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "grpo.json").read_text())["runs"]
SAMPLED = {"reward": [0.1 + i / 100 for i in range(30)], "equal_groups": [0.3] * 30, "entropy": [2.0] * 30}


@pytest.mark.parametrize(("key", "word"), [
    ("grpo/0.0001/24/8 samples/brief 0.5/1", "gamed"), ("grpo/0.0001/20/8 samples/brief 0.1/2", "gamed"),
    ("grpo/0.0001/20/8 samples/brief 0.1/1", "none"),
])  # fmt: skip
@pytest.mark.parametrize("held_out", [True, False])
def test_brevity_that_won_over_the_right_number_is_seen(key, word, held_out):
    """In runs of a real model, by what was held out, or by the training alone."""
    evals = [{f"eval_{name}": value for name, value in row.items()} for row in RECORDED[key]["evals"].values()]
    verdict = of_rewards(RECORDED[key]["steps"], evals if held_out else [])
    assert (verdict.word if verdict else "none") == word
    assert word == "none" or verdict.because.startswith("reward_number has fallen")


@pytest.mark.parametrize(("changes", "word"), [
    ({}, "none"), ({"failed_rewards": [float("nan")] * 15 + [0.5] * 15}, "rewards failed"),
    ({"failed_rewards": [float("nan")] * 29 + [0.5]}, "none"),
    ({"equal_groups": [1.0] * 30}, "constant reward"), ({"equal_groups": [0.9] + [1.0] * 29}, "none"),
    ({"entropy": [2.0] * 10 + [0.1] * 20}, "none"),  # and better
    ({"entropy": [2.0] * 10 + [0.1] * 20, "reward": [0.3] * 30}, "collapsed"),
    ({"same_answer": np.linspace(0.1, 0.95, 30)}, "gamed"), ({"same_answer": np.linspace(0.1, 0.7, 30)}, "none"),
    ({"same_answer": [0.9] * 30}, "none"), ({"same_answer": np.linspace(0.1, 1, 30), "reward": [0.3] * 30}, "none"),
])  # fmt: skip
def test_rewards_from_which_nothing_good_is_learned(changes, word):
    verdict = of_rewards(SAMPLED | changes, [])
    assert (verdict.word if verdict else "none") == word
    assert judge([-x for x in SAMPLED["reward"]], {}, of_rewards=verdict).word in (word, "still falling")
    assert of_rewards({name: values[:2] for name, values in (SAMPLED | changes).items()}, []) is None


def test_a_reward_that_stays_as_it_was_is_flat():
    """The loss is −reward: a tenth of it above it is less negative."""
    losses = np.random.default_rng(0).normal(-0.16, 0.02, 60).tolist()
    assert judge(losses, {0: -0.16, 30: -0.15, 60: -0.16}, [{"eval_reward": 0.16}] * 3).word == "flat"
    assert judge([0.0] * 30, {0: 0.0, 15: -0.5, 30: -0.495}, [{"eval_reward": 0.0}] * 3).word == "learning"


def test_one_answer_to_prompts_that_expect_others_is_counted():
    def share(texts, expected, prompts=4):
        return same_answer([SimpleNamespace(prompt=n % prompts, text=text) for n, text in enumerate(texts)], expected)

    assert share(["a", " a", "b", "c"], ["1", "2", "3", "3"]) == 0.5
    assert share(["a"] * 6 + ["b", "c"], ()) == 0.75
    assert share(["a"] * 4, ["1", "1", "1", "2"]) is None and share(["a"] * 4, (), prompts=3) is None


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_a_reward_that_asks_for_nothing_of_the_prompt_is_paid_by_one_answer(lab, write_rows, rows_of, tmp_path):
    lab.data = write_rows([{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(32)])
    (tmp_path / "mine.py").write_text("def low(completion):\n    return (completion < 'C') + (completion < '5')\n")
    result = lab.run(
        train__objective="grpo", train__steps=8, train__documents_per_step=6, train__learning_rate=0.3, data__eval=0,
        train__schedule="constant", adapter__dropout=0.0, rollouts__samples=8, rollouts__max_tokens=1,
        rollouts__rewards=[f"{tmp_path / 'mine.py'}:low"], run__report=False,
    )  # fmt: skip
    shares = [row["same_answer"] for row in rows_of(result.run_dir)[0] if "same_answer" in row]
    assert shares[-1] == 1.0 > shares[0]


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_a_run_whose_rewards_are_all_the_same_says_so(lab, write_rows):
    lab.data = write_rows([{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(8)])
    result = lab.run(
        train__objective="grpo", train__steps=4, train__documents_per_step=2, adapter__dropout=0.0, data__eval=0,
        rollouts__rewards=["regex:no such text"], rollouts__samples=2, rollouts__max_tokens=2,
    )  # fmt: skip
    assert result.verdict.word == "constant reward"

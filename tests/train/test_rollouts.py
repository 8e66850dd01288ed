"""Runs that learn from their own samples: what they learn, what they repeat bit for bit, and what goes wrong."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, NonFiniteError, Paused, Preempted
from dualtune.config import parse_config
from dualtune.data.documents import in_memory
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.numpy_engine import NumpyEngine
from dualtune.engine.testing.tolerances import RESUMED_LOSS
from dualtune.train import step as step_module
from dualtune.train.prepare import prepare
from dualtune.train.rl.drawing import question_of
from dualtune.train.rl.rollouts import Rollouts, _equal_groups
from dualtune.train.run import load_engine, run
from dualtune.train.step import TrainingStep

ROWS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(16)]
SOURCE = """
def low(completion):
    return sum(c < "m" for c in completion) / max(1, len(completion))
def partly(completion):
    if len(completion) % 3 == 0:
        raise ValueError("no good")
    return len(completion)
"""
RL = {"train__objective": "grpo", "train__steps": 4, "train__documents_per_step": 3, "adapter__dropout": 0.0,
      "rollouts__samples": 4, "rollouts__max_tokens": 6, "data__eval": 0.25, "run__save_every": 1,
      "run__eval_every": 2, "train__learning_rate": 1e-2, "run__report": False}  # fmt: skip


@pytest.fixture
def sampling_lab(lab, write_rows, tmp_path):
    """The lab with prompts, and a reward of its own."""
    (tmp_path / "mine.py").write_text(SOURCE)
    return replace(lab, data=write_rows(ROWS, "asked.jsonl"))


def settings(lab, **changes):
    return {**RL, "rollouts__rewards": [f"{lab.tmp_path / 'mine.py'}:low"], **changes}


def rollouts_of(run_dir):
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_reward_rises_and_every_sample_is_kept(sampling_lab, rows_of, temperature):
    """What the training pass says of the samples is what they were drawn with, at any temperature."""
    options = {
        "rollouts__temperature": temperature,
        "train__steps": 10,
        "train__learning_rate": 0.3,
        "rollouts__samples": 16,
        "train__schedule": "constant",
    }
    result = sampling_lab.run(**settings(sampling_lab, **options))
    steps, evals = rows_of(result.run_dir)
    assert np.mean([row["reward"] for row in steps[-3:]]) > steps[0]["reward"] + 0.1
    assert all(row["loss"] == pytest.approx(-row["reward"]) for row in steps)
    assert [row["eval_loss"] for row in evals] == [-row["eval_reward"] for row in evals]
    assert all(row["logprob_gap"] < 1e-4 for row in steps)
    kept = rollouts_of(result.run_dir)
    assert len(kept) == 10 * 3 * 16
    for number, row in enumerate(steps, start=1):
        rewards = [next(iter(each["rewards"].values())) for each in kept if each["step"] == number]
        assert np.mean(rewards) == pytest.approx(row["reward"])
    assert all(any(row["prompt"] in each["prompt"] for row in ROWS) for each in kept)


# What is drawn depends on no objective.
OTHERS = (pytest.param(name, marks=pytest.mark.long) for name in ("dr_grpo", "gspo", "cispo", "rloo"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("objective", ["grpo", "dapo", *OTHERS])
def test_a_resumed_run_draws_what_the_straight_run_draws(sampling_lab, weights_of, objective):
    options = settings(sampling_lab, train__objective=objective, rollouts__kl=0.1)
    straight = sampling_lab.run("straight", **options)
    config = sampling_lab.config("stopped", **options)
    with pytest.raises(Paused):
        run(config, sampling_lab.backend, pause_after=2)
    resumed = run(config, sampling_lab.backend)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    texts = [[row["completion"] for row in rollouts_of(each.run_dir)] for each in (straight, resumed)]
    assert texts[0] == texts[1] and len({*texts[0]}) > 8


def test_a_run_is_one_on_both_backends_and_moves_between_them(
    open_backend, tiny_llama, make_config, write_rows, tmp_path, rows_of
):
    (tmp_path / "mine.py").write_text(SOURCE)
    data = write_rows(ROWS, "asked.jsonl")
    options = {key.replace("__", "."): value for key, value in RL.items()}
    options |= {"rollouts.rewards": [f"{tmp_path / 'mine.py'}:low"], "model.dtype": "float32"}
    options |= {"rollouts.temperature": 0.7, "rollouts.kl": 0.1}

    def config(name):
        return make_config(data, {**options, "run.dir": tmp_path / name}, tiny_llama)

    torch, mlx = open_backend("torch"), open_backend("mlx")
    runs = [run(config("torch"), torch), run(config("mlx"), mlx)]
    with pytest.raises(Paused):
        run(config("moved"), mlx, pause_after=2)
    runs.append(run(config("moved"), torch))
    first, *others = runs
    step = rows_of(first.run_dir)[0][0]  # of the base: what it draws with is what it and the reference say
    assert (step["logprob_gap"], step["kl"]) == pytest.approx((0, 0), abs=1e-4)
    for other in others:
        losses, expected = ([row["loss"] for row in rows_of(each.run_dir)[0]] for each in (other, first))
        assert losses == pytest.approx(expected, abs=RESUMED_LOSS)
        assert [row["completion"] for row in rollouts_of(other.run_dir)] == [
            row["completion"] for row in rollouts_of(first.run_dir)
        ]


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
@pytest.mark.parametrize("objective", ["grpo", "dapo", "gspo", "rloo"])
def test_the_gradient_is_that_of_the_loss(sampling_lab, objective):
    """Against finite differences of the loss of the drawn samples, in one direction of every tensor together."""
    config = sampling_lab.config(
        **settings(
            sampling_lab,
            train__objective=objective,
            rollouts__kl=0.2,
            rollouts__clip_low=0.5,
            rollouts__clip_high=0.5,
            rollouts__temperature=0.7,
        )
    )
    prepared = prepare(config, sampling_lab.backend)
    engine = load_engine(prepared)
    engine.load_adapter_state(random_adapter(engine.adapter_state(), 2))
    start = engine.adapter_state()
    step = TrainingStep(prepared, engine, 0, prepared.batches)
    step.add_gradients()
    gradient, samples = engine.gradient(), step.samples

    def value(state):
        engine.load_adapter_state(state)
        logps = {}
        for batch in step.batches:
            logps |= step_module.at_targets(engine.target_logprobs(batch).astype(np.float64), batch)
        loss, _ = samples.loss(logps, prepared.rollouts.objective, prepared.rollouts.max_tokens)
        return loss.metrics["surrogate"]

    rng = np.random.default_rng(0)
    direction = {name: rng.normal(size=x.shape).astype(np.float32) * 2e-3 for name, x in start.items()}
    up, down = (value({name: start[name] + sign * direction[name] for name in start}) for sign in (1, -1))
    expected = sum(float((gradient[name] * direction[name]).sum()) for name in start)
    assert expected == pytest.approx((up - down) / 2, rel=0.03, abs=1e-6) and abs(expected) > 1e-5
    prepared.rollouts.close()


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_the_samples_of_a_prompt_share_it_in_training(sampling_lab):
    """Packed, the prompt is in a row once for all of its samples that add to the gradient; the loss is the same."""
    steps = {}
    for packing in (True, False):
        prepared = prepare(sampling_lab.config(**settings(sampling_lab, data__packing=packing)), sampling_lab.backend)
        engine = load_engine(prepared)
        step = steps[packing] = TrainingStep(prepared, engine, 0, prepared.batches)
        step.add_gradients()
        prepared.rollouts.close()
    shared, apart = (sum(int((batch.segments_BT > 0).sum()) for batch in steps[key].batches) for key in (True, False))
    samples = steps[True].samples
    lengths, drawn = samples.documents.lengths[samples.trained], [len(samples.old[n]) for n in samples.trained]
    # A prompt's last token is computed for each sample: it predicts another one in each.
    again = (lengths - drawn - 1).sum() - sum(
        int(samples.documents.lengths[n] - len(samples.old[n])) - 1
        for n in {4 * (n // 4): n for n in samples.trained}.values()
    )
    assert apart == lengths.sum() and apart - shared == again > 0
    assert steps[True]._loss.metrics["surrogate"] == pytest.approx(steps[False]._loss.metrics["surrogate"], abs=1e-6)
    grads = [steps[key].engine.gradient() for key in (True, False)]
    for name, gradient in grads[0].items():
        np.testing.assert_allclose(gradient, grads[1][name], atol=1e-6)


def test_samples_are_drawn_once_where_memory_runs_out_after_them(sampling_lab, monkeypatch, weights_of):
    """The step is computed again, in smaller micro-batches, of the same samples."""
    straight = sampling_lab.run("straight", **settings(sampling_lab))
    draws, failed = [], []
    draw, slopes = Rollouts.draw, step_module.with_slopes
    monkeypatch.setattr(Rollouts, "draw", lambda self, *a: draws.append(a[3]) or draw(self, *a))

    def short(batch, *values):
        if not failed:
            failed.append(1)
            raise MemoryError("no room")
        return slopes(batch, *values)

    monkeypatch.setattr(step_module, "with_slopes", short)
    monkeypatch.setattr(sampling_lab.backend, "is_out_of_memory", lambda error: isinstance(error, MemoryError))
    result = sampling_lab.run("short", **settings(sampling_lab, train__micro_batch_tokens=256))
    assert draws == [0, 1, 2, 3] and failed
    assert [row["completion"] for row in rollouts_of(result.run_dir)][:12] == [
        row["completion"] for row in rollouts_of(straight.run_dir)
    ][:12]


def test_a_reward_that_fails_costs_its_sample_and_is_said(sampling_lab, rows_of):
    file = sampling_lab.tmp_path / "mine.py"
    result = sampling_lab.run(**settings(sampling_lab, rollouts__rewards=[f"{file}:partly"], rollouts__samples=12))
    kept = rollouts_of(result.run_dir)
    failed = [row for row in kept if len(row["completion"]) % 3 == 0]
    assert failed and all(row["rewards"] == {f"{file}:partly": None} and row["advantage"] == 0 for row in failed)
    assert any(row["advantage"] for row in kept)
    events = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    messages = [row["message"] for row in events if row.get("event") == "reward_failed"]
    reason = f"{file}:partly: ValueError: no good ("
    assert messages and all(message.startswith(reason) for message in messages)
    counts = [int(message.removeprefix(reason).split()[0]) for message in messages]
    in_steps = sum(count for count, message in zip(counts, messages, strict=True) if "of 36" in message)
    assert in_steps == len(failed)
    share = [row["failed_rewards"] for row in rows_of(result.run_dir)[0] if "failed_rewards" in row]
    assert sum(share) * 36 == pytest.approx(len(failed))


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_prompts_alone_are_rewarded_by_the_columns_of_their_rows(sampling_lab, write_rows):
    """As TRL's data: a prompt, other columns, and a function that names them."""
    asked = [{"prompt": f"{n} + {n} =", "answer": 2 * n} for n in range(12)]  # `answer` is no notice: it is used
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in asked]
    (sampling_lab.tmp_path / "trl.py").write_text(
        "def near(prompts, completions, answer, **columns):\n"
        "    (said,), (asked,) = completions, prompts\n"
        "    if isinstance(said, list):\n"
        "        (said,), (asked,) = said, asked\n"
        "        assert {*said} == {*asked} == {'role', 'content'} and said['role'] == 'assistant'\n"
        "        assert asked['content'] == f'{answer[0] // 2} + {answer[0] // 2} ='\n"
        "    return [float(answer[0])]\n"
    )
    texts = []
    for rows in (asked, chats):
        lab = replace(sampling_lab, data=write_rows(rows, "prompts.jsonl"))
        options = settings(lab, data__format="prompt", rollouts__rewards=[f"{lab.tmp_path / 'trl.py'}:near"])
        result = lab.run(f"run {len(texts)}", **options)
        kept = rollouts_of(result.run_dir)
        assert len(kept) == 4 * 3 * 4 and all(str(row["prompt"]).count(" + ") == 1 for row in kept)
        number = [int(row["row"].rpartition(":")[2]) for row in kept]
        assert [row["reward"] for row in kept] == [2.0 * (n - 1) for n in number]
        texts.append([row["completion"] for row in kept])
    assert texts[0] == texts[1] and len({*texts[0]}) > 8
    with pytest.raises(ConfigError, match=r"exact compares with an answer, but .*prompts\.jsonl has prompts alone"):
        lab.run("refused", **{**options, "rollouts__rewards": ["exact"]})
    text = replace(lab, data=write_rows([{"text": f"{n} is a number"} for n in range(12)], "texts.jsonl"))
    with pytest.raises(ConfigError, match=r"grpo needs prompts .*, but .*texts\.jsonl:1 is plain text"):
        text.run("text", **settings(text))
    with pytest.raises(ConfigError, match="sft needs prompts with answers"):
        lab.run("sft", data__format="prompt", adapter__dropout=0.0)


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_a_reward_that_always_fails_ends_the_run_and_says_why(sampling_lab, wording):
    """Not as one whose numbers diverge: a smaller learning rate would not help."""
    file = sampling_lab.tmp_path / "mine.py"
    file.write_text("def broken(completion):\n    raise KeyError('no')\n")
    options = settings(sampling_lab, rollouts__rewards=[f"{file}:broken"], guards__nonfinite_limit=2)
    with pytest.raises(NonFiniteError) as error:
        sampling_lab.run("ended", **options)
    rows = [json.loads(line) for line in (sampling_lab.tmp_path / "ended" / "metrics.jsonl").read_text().splitlines()]
    failed = [row for row in rows if row.get("event") == "reward_failed"]
    assert [row["step"] for row in failed] == [0, 1, 2, 2, 3]  # evaluations too
    assert {row["message"] for row in failed} == {
        f"{file}:broken: KeyError: 'no' (4 of 4 answers)", f"{file}:broken: KeyError: 'no' (12 of 12 answers)",
    }  # fmt: skip
    with pytest.raises(NonFiniteError) as short:
        sampling_lab.run("short", **{**options, "train__steps": 2})
    assert not (sampling_lab.tmp_path / "short" / "adapter").exists()
    file.write_text("def broken(completion):\n    return 1 / (len(completion) % 2)\n")
    result = sampling_lab.run("half", **options)
    assert result.verdict.word == "rewards failed"
    wording([str(error.value), str(short.value), str(result.verdict)])


def test_equal_groups_are_counted_without_what_has_no_reward():
    """They teach nothing, whichever of their answers failed."""
    nan = float("nan")
    assert _equal_groups(np.array([[1, 1, nan], [1, 2, nan], [nan, nan, nan], [nan, 3, nan]])) == 0.75


def test_several_updates_of_the_same_samples_are_clipped_and_resumed(sampling_lab, weights_of, rows_of):
    options = settings(sampling_lab, rollouts__updates=3, train__learning_rate=0.1, rollouts__clip_low=0.05)
    straight = sampling_lab.run("straight", **options)
    steps, _ = rows_of(straight.run_dir)
    assert all(row["logprob_gap"] < 1e-4 for row in steps)
    assert sum(row["clip_low"] + row["clip_high"] for row in steps) > 0
    config = sampling_lab.config("stopped", **options)
    with pytest.raises(Paused):
        run(config, sampling_lab.backend, pause_after=2)
    assert weights_of(run(config, sampling_lab.backend).run_dir) == weights_of(straight.run_dir)
    once = sampling_lab.run("once", **settings(sampling_lab, train__learning_rate=0.1, rollouts__clip_low=0.05))
    first, *_ = rows_of(once.run_dir)[0]
    assert (first["reward"], first["clip_low"], first["clip_high"]) == (steps[0]["reward"], 0, 0)
    assert weights_of(once.run_dir) != weights_of(straight.run_dir)


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_a_stop_between_two_updates_of_a_step_undoes_the_first(sampling_lab, weights_of, monkeypatch):
    options = settings(sampling_lab, rollouts__updates=2, run__save_every=None)
    straight = sampling_lab.run("straight", **options)
    config, updates = sampling_lab.config("stopped", **options), []
    slopes = step_module.with_slopes

    def stopped(self, **options):
        updates.append(1)
        return update(self, **options)

    def stopping(batch, *values):
        if len(updates) == 3:  # the first update of the second step is done
            raise Preempted("a signal")
        return slopes(batch, *values)

    update = NumpyEngine.optim_step
    with monkeypatch.context() as patch:
        patch.setattr(NumpyEngine, "optim_step", stopped)
        patch.setattr(step_module, "with_slopes", stopping)
        with pytest.raises(Preempted):
            run(config, sampling_lab.backend)
    assert weights_of(run(config, sampling_lab.backend).run_dir) == weights_of(straight.run_dir)
    assert len(rollouts_of(Path(config.run.dir))) == 4 * 3 * 4


def test_a_question_is_all_before_the_last_answer():
    tokens, mask = np.arange(10, 20, dtype=np.int32), np.array([0, 0, 1, 1, 0, 0, 1, 1, 1, 0], bool)
    prompt, answer = question_of(in_memory([(tokens, mask)])[0])
    assert (prompt.tolist(), answer.tolist()) == ([10, 11, 12, 13, 14, 15], [16, 17, 18])


@pytest.mark.parametrize("changes", [
    {"rollouts.updates": 2, "train.policy": "mine"},
    {"rollouts.rewards": []}, {"rollouts.weights": [1.0, 2.0]}, {"adapter.dropout": 0.1},
    {"train.objective": "rloo", "rollouts.advantage_scale": "group"}, {"train.objective": "sft"},
    {"train.objective": "cispo", "rollouts.clip_low": 0.2}, {"train.objective": "GRPO"},
    {"train.objective": "reinforce"},
    {"hybrid.enabled": True}, {"adapter.method": "full", "rollouts.kl": 0.1}, {"data.loss_on": "all"},
    {"rollouts.samples": 1},
    {"train.activation_cache": "disk", "adapter.layers": "last 1"},
])  # fmt: skip
def test_what_does_not_go_with_samples_is_refused(changes, wording):
    config = {"model": {"name": "m"}, "adapter": {"dropout": 0.0}, "data": {"train": "x.jsonl"},
              "train": {"objective": "grpo"}, "rollouts": {"rewards": ["exact"]}}  # fmt: skip
    for key, value in changes.items():
        section, name = key.split(".")
        config.setdefault(section, {})[name] = value
    if changes.get("adapter.method"):
        config["adapter"].pop("dropout")
    with pytest.raises(ConfigError) as error:
        parse_config(json.dumps(config))
    wording(str(error.value))

"""Teachers that answer while a run trains, of the data's answers and of the model's own samples."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, DataError, Paused
from dualtune.config import parse_config
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import Example
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.tolerances import RESUMED_LOSS
from dualtune.train.objectives.distillation import generalized_jsd, sampled_reverse_kl
from dualtune.train.objectives.recording import record
from dualtune.train.objectives.served_teacher import ServedTeacher, TeacherLost
from dualtune.train.objectives.teachers import in_context, top_logprobs_of
from dualtune.train.prepare import prepare
from dualtune.train.run import load_engine, run
from dualtune.train.step import TrainingStep

ROWS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(16)]
RUN = {"train__objective": "on_policy_distill", "train__steps": 4, "train__documents_per_step": 3,
       "adapter__dropout": 0.0, "rollouts__samples": 2, "rollouts__max_tokens": 6, "data__eval": 0.25,
       "run__save_every": 1, "run__eval_every": 2, "train__learning_rate": 1e-2, "run__report": False,
       "distill__teacher": "base", "distill__top_k": 8}  # fmt: skip
on_numpy = pytest.mark.parametrize("lab", ["numpy"], indirect=True)
on_torch = pytest.mark.parametrize("lab", ["torch"], indirect=True)


@pytest.fixture
def taught(lab, write_rows):
    """The lab with prompts, and the adapter of a teacher over the same base."""
    lab = replace(lab, data=write_rows(ROWS, "asked.jsonl"))
    trained = lab.run("teacher", train__steps=6, train__learning_rate=0.3, adapter__dropout=0.0, run__report=False)
    return lab, {**RUN, "distill__teacher_adapter": str(trained.run_dir)}


def rollouts_of(run_dir):
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


# --- the estimate ----------------------------------------------------------------------------------------------------


def test_the_sampled_token_estimates_the_reverse_kl_and_its_gradient():
    """In the mean over all tokens that may be drawn, against finite differences in float64."""
    rng = np.random.default_rng(0)
    z_V, logq_V = rng.normal(size=6), np.log(rng.dirichlet(np.ones(6)))

    def logp(z_V):
        return z_V - np.logaddexp.reduce(z_V)

    def kl(z_V):
        return float((np.exp(logp(z_V)) * (logp(z_V) - logq_V)).sum())

    logp_V = logp(z_V)
    drawn = sampled_reverse_kl(logp_V[:, None], logq_V[:, None])  # each token once
    assert np.exp(logp_V) @ drawn.values_N == pytest.approx(kl(z_V), rel=1e-12)
    # ∂ ln p_a / ∂ z_v = [a = v] − p_v; the weight is −∂loss/∂ ln p_a.
    slopes_VV = np.eye(6) - np.exp(logp_V)
    gradient_V = -(np.exp(logp_V) * drawn.weights_NK[:, 0]) @ slopes_VV
    expected_V = [(kl(z_V + d) - kl(z_V - d)) / 2e-6 for d in np.eye(6) * 1e-6]
    np.testing.assert_allclose(gradient_V, expected_V, atol=1e-8)
    # Of all tokens the exact one has the same gradient.
    exact = generalized_jsd(logp_V[None, :5], logq_V[None, :5], 1.0)
    assert exact.values_N[0] == pytest.approx(kl(z_V), rel=1e-12)
    np.testing.assert_allclose(-exact.weights_NK[0] @ slopes_VV[:5], expected_V, atol=1e-8)


@on_torch
@pytest.mark.parametrize("changes", [{}, {"distill__divergence": "forward_kl"}, {"distill__temperature": 2.0}])
def test_the_gradient_is_that_of_the_divergence_at_the_samples(taught, changes):
    """Against finite differences of the divergence of the drawn samples, in one direction of every tensor together."""
    lab, options = taught
    prepared = prepare(lab.config(**options, **changes), lab.backend)
    engine = load_engine(prepared)
    start = random_adapter(engine.adapter_state(), 2)
    engine.load_adapter_state(start)
    step = TrainingStep(prepared, engine, 0, prepared.batches)
    step.add_gradients()
    gradient, distillation = engine.gradient(), prepared.distillation

    def value(state):
        engine.load_adapter_state(state)
        record = distillation.evaluate(engine, step.samples.documents, step._recovery, soft_targets=step._soft_targets)
        return record.metrics["eval_divergence"]

    rng = np.random.default_rng(0)
    direction = {name: rng.normal(size=x.shape).astype(np.float32) * 1e-3 for name, x in start.items()}
    up, down = (value({name: start[name] + sign * direction[name] for name in start}) for sign in (1, -1))
    along = sum(float((gradient[name] * direction[name]).sum(dtype=np.float64)) for name in start)
    assert along == pytest.approx((up - down) / 2, rel=0.02)


# --- runs ------------------------------------------------------------------------------------------------------------


@on_numpy
@pytest.mark.parametrize("changes", [{}, {"distill__top_k": 0}, {"distill__divergence": "forward_kl"}], ids=str)
def test_the_student_comes_nearer_to_the_teacher_on_its_own_samples(taught, rows_of, changes):
    lab, options = taught
    options |= {"train__steps": 12, "train__learning_rate": 0.1, "rollouts__samples": 8, **changes,
                "run__eval_every": 6}  # fmt: skip
    result = lab.run(**options)
    steps, evals = rows_of(result.run_dir)
    assert evals[-1]["eval_loss"] < 0.9 * evals[0]["eval_loss"]
    assert all(row["logprob_gap"] < 1e-4 for row in steps)
    assert steps[0].keys() >= {"completion_tokens", "cut"}
    assert evals[0].keys() >= {"eval_completion_tokens", "eval_cut"}
    kept = rollouts_of(result.run_dir)
    assert len(kept) == 12 * 3 * 8
    for number, row in enumerate(steps, start=1):
        own = [each for each in kept if each["step"] == number]
        tokens = np.array([each["tokens"] for each in own])
        assert -(tokens @ [each["reward"] for each in own]) / tokens.sum() == pytest.approx(row["loss"], abs=1e-5)
    assert all(any(row["prompt"] in each["prompt"] for row in ROWS) for each in kept)


@on_numpy
@pytest.mark.parametrize("changes", [
    {}, {"distill__top_k": 0}, {"train__objective": "distill", "rollouts__samples": 8, "rollouts__max_tokens": 256},
    {"distill__teacher": "self", "distill__teacher_adapter": None, "distill__hint": "{expected}"},
], ids=str)  # fmt: skip
def test_a_resumed_run_is_the_straight_run(taught, weights_of, changes):
    lab, options = taught
    options = {**options, **changes}
    straight = lab.run("straight", **options)
    config = lab.config("stopped", **options)
    with pytest.raises(Paused):
        run(config, lab.backend, pause_after=2)
    resumed = run(config, lab.backend)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    if options["train__objective"] != "distill":
        assert rollouts_of(resumed.run_dir) == rollouts_of(straight.run_dir)


def test_a_run_is_one_on_both_backends_and_moves_between_them(
    open_backend, tiny_llama, make_config, write_rows, tmp_path, rows_of
):
    """With another model as the teacher, which reads a system message and the answers."""
    data = write_rows(ROWS, "asked.jsonl")
    options = {key.replace("__", "."): value for key, value in RUN.items()}
    options |= {"model.dtype": "float32", "distill.teacher": str(tiny_llama), "distill.teacher_dtype": "float32",
                "distill.teacher_system": "You add numbers.", "distill.hint": "It is {expected}.",
                "train.steps": 3}  # fmt: skip

    def config(name):
        return make_config(data, {**options, "run.dir": tmp_path / name}, tiny_llama)

    torch, mlx = open_backend("torch"), open_backend("mlx")
    with pytest.raises(Paused):
        run(config("moved"), mlx, pause_after=1)
    straight, moved = run(config("torch"), torch), run(config("moved"), torch)
    losses, expected = ([row["loss"] for row in rows_of(each.run_dir)[0]] for each in (moved, straight))
    assert losses == pytest.approx(expected, abs=RESUMED_LOSS) and expected[0] > 1e-3
    assert [row["completion"] for row in rollouts_of(moved.run_dir)] == [
        row["completion"] for row in rollouts_of(straight.run_dir)
    ]


@on_numpy
def test_a_teacher_that_answers_teaches_what_its_recording_teaches(taught, rows_of, tmp_path):
    """Of the data's answers."""
    lab, options = taught
    options = {key: value for key, value in options.items() if "rollouts" not in key} | {"train__objective": "distill"}
    prepared = prepare(lab.config(**options), lab.backend)
    engine = load_engine(prepared)
    path = tmp_path / "teacher.safetensors"
    with prepared.teaching.teacher.answering(engine):  # the engine has the teacher's weights
        record(path, engine, "a teacher", (prepared.data.train, prepared.data.eval), 8)
    live = lab.run("live", **options)
    of_teacher = {"distill__teacher": None, "distill__teacher_adapter": None, "distill__top_k": 32}
    recorded = lab.run("recorded", **options | of_teacher, distill__distributions=str(path))
    for ours, theirs in zip(*(rows_of(each.run_dir)[0] for each in (live, recorded)), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
    ours, theirs = (rows_of(each.run_dir)[1][-1] for each in (live, recorded))
    assert ours["eval_divergence"] == pytest.approx(theirs["eval_divergence"], abs=1e-6)


@on_numpy
def test_a_run_whose_server_is_lost_saves_what_it_has(taught, weights_of, monkeypatch):
    """And resumes when the server is there again."""
    lab, options = taught
    options |= {"run__save_every": None, "distill__teacher": "http://x/v1", "distill__teacher_adapter": None}
    asked, engines = [], []

    def answer(self, batch, k):
        asked.append(1)
        if len(asked) == 6:  # in the fourth step: two evaluations have asked, too, and the second has saved
            raise TeacherLost("gone")
        return top_logprobs_of(engines[0])(batch, k)

    monkeypatch.setattr(ServedTeacher, "start", lambda self, engine, spec: engines or engines.append(engine))
    monkeypatch.setattr(ServedTeacher, "__call__", answer)
    with pytest.raises(TeacherLost):
        lab.run("lost", **options)
    resumed = lab.run("lost", **options)
    asked[:] = [1] * 9
    straight = lab.run("straight", **options)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    events = [json.loads(line) for line in (resumed.run_dir / "metrics.jsonl").read_text().splitlines()]
    (resumed_at,) = (row["message"] for row in events if row.get("event") == "resumed")
    assert resumed_at.startswith("after step 3")


@on_numpy
def test_a_run_does_not_resume_with_another_teacher(taught):
    lab, options = taught
    with pytest.raises(Paused):
        run(lab.config(**options), lab.backend, pause_after=2)
    other = lab.run("other", train__steps=3, train__learning_rate=0.3, adapter__dropout=0.0, run__report=False)
    with pytest.raises(ConfigError, match="teacher"):
        lab.run(**options | {"distill__teacher_adapter": str(other.run_dir)})


# --- what a teacher reads --------------------------------------------------------------------------------------------

CHAT = Example("a.jsonl", 1, messages=(
    Message("system", "Be brief."), Message("user", "2 + 3?"), Message("assistant", "5"), Message("user", "And 4?"),
    Message("assistant", " 9 "),
))  # fmt: skip


def test_a_system_message_takes_the_place_of_the_rows_own_and_a_hint_follows_the_last_question():
    found = in_context(CHAT, "Add.", "The answer is {expected}.")
    assert [(each.role, each.content) for each in found.messages] == [
        ("system", "Add."), ("user", "2 + 3?"), ("assistant", "5"), ("user", "And 4?\n\nThe answer is 9."),
        ("assistant", " 9 "),
    ]  # fmt: skip
    plain = in_context(Example("a.jsonl", 1, prompt="2 + 3 =", completion=" 5"), "Add.", "It is {expected}.")
    assert (plain.prompt, plain.completion) == ("Add.\n\n2 + 3 =\n\nIt is 5.", " 5")
    assert in_context(replace(CHAT, messages=CHAT.messages[1:]), "Add.", None).messages[0] == Message("system", "Add.")
    with pytest.raises(DataError, match="no question before"):
        in_context(Example("a.jsonl", 1, messages=(Message("assistant", "5"),)), None, "A hint")


@on_torch
def test_the_teacher_reads_more_and_judges_the_same_tokens(lab, write_rows):
    """Also where the student's row is cut, which the teacher's is not."""
    rows = [{"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n} " * 30}]}
            for n in range(4)]  # fmt: skip
    lab = replace(lab, data=write_rows(rows, "chats.jsonl"))
    options = {**RUN, "train__objective": "distill", "distill__teacher_system": "Count slowly.",
               "data__max_length": 40, "rollouts__samples": 8, "rollouts__max_tokens": 256}  # fmt: skip
    prepared = prepare(lab.config(**options), lab.backend)
    decode = prepared.model.tokenizer.decode_all
    for i in range(len(prepared.data.train)):
        own, read = prepared.data.train[i], prepared.teaching.train[i]
        assert "Count slowly." in decode(read.tokens.tolist()) and "Count slowly." not in decode(own.tokens.tolist())
        np.testing.assert_array_equal(read.tokens[read.loss_mask], own.tokens[own.loss_mask])
        assert len(own.tokens) == 40 < len(read.tokens)


@on_torch
def test_the_weights_of_a_loaded_teacher_are_planned(lab):
    prepared = prepare(lab.config(**RUN | {"distill__teacher": str(lab.model), "model__dtype": "float32"}), lab.backend)
    teacher = prepared.teaching.teacher
    teacher.start(None, prepared.spec)
    weights = 4 * load_engine(prepared).description.num_parameters
    assert prepared.memory.plan.estimate["teacher"] == weights


@on_torch
def test_a_teacher_without_positions_for_what_it_reads_is_refused(lab, tmp_path):
    small = tmp_path / "small"
    shutil.copytree(lab.model, small)
    described = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(described | {"model_type": "gpt2", "n_positions": 64}))
    options = RUN | {"distill__teacher": str(small), "rollouts__max_tokens": 64, "data__max_length": 64}
    with pytest.raises(ConfigError, match="positions up to 64"):
        prepare(lab.config(**options), lab.backend)


@on_numpy
def test_a_teacher_with_another_tokenizer_is_refused(lab, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(lab.model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    first, second = list(vocab := tokenizer["model"]["vocab"])[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="another tokenizer"):
        prepare(lab.config(**RUN | {"distill__teacher": str(other)}), lab.backend)


@on_numpy
def test_an_adapter_that_does_not_fit_is_refused(taught):
    lab, options = taught
    with pytest.raises(ConfigError, match="of rank 1"):
        load_engine(prepare(lab.config(**options, adapter__rank=1), lab.backend))


TEACHER = {"distill.teacher": "m"}
SAMPLED = {"train.objective": "on_policy_distill", "adapter.dropout": 0.0}


@pytest.mark.parametrize("changes", [
    {}, {**TEACHER, "distill.distributions": "x"}, {"distill.distributions": "x", "distill.top_k": 3},
    {"distill.distributions": "x", "distill.hint": "a"}, {**TEACHER, "distill.top_k": 0}, SAMPLED,
    {**TEACHER, "distill.beta": 0.5, "distill.divergence": "reverse_kl"}, {**TEACHER, "distill.served_as": "a"},
    {"distill.teacher": "self"}, {"distill.teacher": "base"},
    {"distill.teacher": "base", "distill.hint": "a", "distill.teacher_dtype": "float32"},
    {"distill.teacher": "http://x/v1", "distill.teacher_adapter": "a"},
    {**TEACHER, **SAMPLED, "distill.sft_weight": 1.0},
    {**TEACHER, **SAMPLED, "rollouts.rewards": ["exact"]}, {**TEACHER, **SAMPLED, "adapter.dropout": 0.1},
    {"distill.teacher": "base", "distill.hint": "a", "adapter.method": "full"},
    {**TEACHER, **SAMPLED, "data.loss_on": "all"}, {"train.objective": "sft", **TEACHER},
    {**TEACHER, **SAMPLED, "distill.top_k": 0, "rollouts.temperature": 0.7},
])  # fmt: skip
def test_what_does_not_go_with_a_teacher_is_refused(changes, wording):
    config = {"model": {"name": "m"}, "data": {"train": "x.jsonl"}, "train": {"objective": "distill"}}
    for key, value in changes.items():
        section, name = key.split(".")
        config.setdefault(section, {})[name] = value
    with pytest.raises(ConfigError) as error:
        parse_config(json.dumps(config))
    wording(str(error.value))

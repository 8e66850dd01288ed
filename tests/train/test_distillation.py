"""Distillation: the divergences, the file of a teacher's distributions, and runs that learn from it."""

import json
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, DataError, FormatError
from dualtune.config import parse_config
from dualtune.engine.backend import IGNORE_INDEX
from dualtune.engine.testing.tolerances import RESUMED_LOSS
from dualtune.show.run import run
from dualtune.train.evaluation import using
from dualtune.train.hooks import Hook
from dualtune.train.objectives.distillation import forward_kl, generalized_jsd, read_distributions, softened_forward_kl
from dualtune.train.objectives.recording import record
from dualtune.train.prepare import prepare
from dualtune.train.recovery import Recovery
from dualtune.train.run import load_engine
from dualtune.train.step import TrainingStep

pytestmark = pytest.mark.covering(1)

TRL = Path(__file__).parent / "data" / "trl_divergences.json"
ROWS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}" * (1 + n % 3)} for n in range(24)]
RUN = {
    "train__objective": "distill", "train__steps": 8, "data__eval": 0.25, "run__save_every": 2, "run__eval_every": 4,
    "train__learning_rate": 1e-3, "train__micro_batch_tokens": 64,
}  # fmt: skip
JSD = {"distill__divergence": "jsd"}
SOFT = {"distill__temperature": 2.0}
on_numpy = pytest.mark.parametrize("lab", ["numpy"], indirect=True)


class Stop(Hook):
    def on_step(self, record):
        if record.step == 5:
            raise KeyboardInterrupt


@pytest.fixture
def distil(lab, write_rows, tmp_path):
    """The lab with rows, and what a teacher says of them: the base with a random adapter."""
    lab = replace(lab, data=write_rows(ROWS, "rows.jsonl"))
    prepared = prepare(lab.config(data__eval=0.25, data__packing=False), lab.backend)
    teacher = load_engine(prepared)
    teacher.load_adapter_state(another(teacher, 1))
    path = tmp_path / "teacher.safetensors"
    record(path, teacher, "a teacher", (prepared.data.train, prepared.data.eval), 9)
    return lab, {**RUN, "distill__distributions": str(path)}


def another(engine, seed):
    """A random adapter for an engine."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.3, x.shape).astype(np.float32) for name, x in engine.adapter_state().items()}


# --- the divergences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", json.loads(TRL.read_text()), ids=lambda case: f"beta={case['beta']}")
def test_value_and_gradient_are_those_of_trl(case):
    """Recorded from TRL 1.16's own code. With all tokens but one recorded, nothing is left out."""
    logp_NV, logq_NV = (
        x - np.logaddexp.reduce(x, -1, keepdims=True) for x in map(np.array, (case["student"], case["teacher"]))
    )
    top_Nk = np.argsort(-logq_NV, -1)[:, :4]
    divergence = generalized_jsd(*(np.take_along_axis(x, top_Nk, -1) for x in (logp_NV, logq_NV)), case["beta"])
    assert divergence.values_N.sum() == pytest.approx(case["value"], rel=1e-9)
    # ∂ ln p_k / ∂ logit_v = [k = v] − p_v
    onehot_NkV = np.eye(5)[top_Nk]
    gradient_NV = -(divergence.weights_NK[..., None] * (onehot_NkV - np.exp(logp_NV)[:, None])).sum(1)
    assert gradient_NV == pytest.approx(np.array(case["gradient"]), abs=1e-9)


def test_forward_kl_is_that_of_the_recorded_tokens_alone():
    logq_NK = np.log([[0.5, 0.3], [0.01, 0.02]])
    logq_NK = np.insert(logq_NK, 1, -np.inf, axis=-1)  # a label that was not recorded
    divergence = forward_kl(logq_NK)
    assert divergence.weights_NK == pytest.approx(np.array([[0.625, 0, 0.375], [1 / 3, 0, 2 / 3]]))
    assert divergence.values_N == pytest.approx(
        [0.625 * np.log(0.625) + 0.375 * np.log(0.375), np.log(1 / 3) / 3 + 2 * np.log(2 / 3) / 3]
    )


@pytest.mark.parametrize(
    "divergence",
    [
        *(partial(generalized_jsd, beta=beta, temperature=T) for beta in (0.0, 0.3, 1.0) for T in (1.0, 0.7, 2.5)),
        partial(softened_forward_kl, temperature=2.5), partial(softened_forward_kl, temperature=1.0),
    ],
    ids=lambda function: f"{function.func.__name__} {function.keywords}",
)  # fmt: skip
def test_the_weights_of_a_divergence_are_its_slopes(divergence):
    """Against finite differences; the label that was not recorded has none."""
    rng = np.random.default_rng(0)
    logp_NK, logq_NK = np.log(rng.dirichlet(np.ones(6), (2, 5)))[..., :4]
    logq_NK[:, 0] = -np.inf
    weights_NK = divergence(logp_NK, logq_NK).weights_NK
    for k in range(4):
        ends = [divergence(logp_NK + sign * 1e-6 * np.eye(4)[k], logq_NK).values_N for sign in (1, -1)]
        assert -weights_NK[:, k] == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-7)
    assert not weights_NK[:, 0].any() and np.abs(weights_NK[:, 1:]).min() > 1e-4


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_a_temperature_divides_the_logits(temperature):
    """With all tokens but one recorded, nothing is left out: then both are softmax(logits / T) of the vocabulary."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (2, 3, 5))
    logp_NV, logq_NV = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    top_Nk = np.argsort(-logq_NV, -1)[:, :4]
    recorded = [np.take_along_axis(x, top_Nk, -1) for x in (logp_NV, logq_NV)]
    soft = logits / temperature
    softp_NV, softq_NV = np.exp(soft - np.logaddexp.reduce(soft, -1, keepdims=True))
    m_NV = 0.7 * softp_NV + 0.3 * softq_NV
    jsd_N = (0.3 * softq_NV * np.log(softq_NV / m_NV) + 0.7 * softp_NV * np.log(softp_NV / m_NV)).sum(-1)
    assert generalized_jsd(*recorded, 0.3, temperature).values_N == pytest.approx(jsd_N, rel=1e-9)
    q_Nk, p_Nk = (np.take_along_axis(x, top_Nk, -1) for x in (softq_NV, softp_NV))
    q_Nk /= q_Nk.sum(-1, keepdims=True)
    kl_N = (q_Nk * np.log(q_Nk / p_Nk)).sum(-1)
    assert softened_forward_kl(*recorded, temperature).values_N == pytest.approx(kl_N, rel=1e-9)


# --- the file ---------------------------------------------------------------------------------------------------------


@on_numpy
def test_the_file_has_what_the_teacher_says(distil):
    lab, settings = distil
    prepared = prepare(lab.config(**settings | {"train__micro_batch_tokens": 4096}), lab.backend)
    engine, distillation = load_engine(prepared), prepared.distillation
    batch = prepared.batches(0)[0]
    labelled, logq_NK = distillation.labelled(batch, distillation.train)
    labels_NK = labelled.labels_BT[batch.is_target_BT]
    assert labels_NK.shape == logq_NK.shape == (batch.num_targets, 10)
    assert (labelled.labels_BT[~batch.is_target_BT] == IGNORE_INDEX).all()
    assert (labels_NK[:, 0] == batch.labels_BT[batch.is_target_BT]).all()
    assert all(len(set(labels)) == 10 for labels in labels_NK.tolist())
    with using(engine, another(engine, 1)):
        teacher_NV = engine.logprobs(batch)[batch.is_target_BT]
    least_N1 = np.sort(teacher_NV, -1)[:, -9:-8]
    is_top_NK = np.take_along_axis(teacher_NV, labels_NK, -1) >= least_N1
    assert (np.isfinite(logq_NK) == is_top_NK).all() and (np.isfinite(logq_NK).sum(-1) == 9).all()
    assert is_top_NK[:, 0].any() and not is_top_NK[:, 0].all()  # both kinds of targets are here
    expected_NK = np.where(is_top_NK, np.take_along_axis(teacher_NV, labels_NK, -1), -np.inf)
    assert logq_NK == pytest.approx(expected_NK, abs=1e-6)


@on_numpy
def test_what_is_wrong_with_a_file(distil, tmp_path, write_rows):
    lab, settings = distil
    path = Path(settings["distill__distributions"])
    other = replace(lab, data=write_rows([*ROWS, {"prompt": "new", "completion": " row"}], "more.jsonl"))
    with pytest.raises(DataError, match=r"nothing on 1 of .*more.jsonl:25"):
        prepare(other.config(**settings | {"data__eval": 0.0}), lab.backend)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(damaged)
    (tmp_path / "short.safetensors").write_bytes(path.read_bytes()[:-4])
    for name, fault in (("damaged", "not those that were recorded"), ("short", "truncated")):
        with pytest.raises(FormatError, match=fault):
            read_distributions(tmp_path / f"{name}.safetensors")
    with pytest.raises(FormatError, match="is not a file of distributions"):
        read_distributions(lab.model / "model.safetensors")
    assert read_distributions(path).teacher == "a teacher"


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("train: {objective: distill}", "distill.distributions"),
        ("distill: {distributions: t.safetensors}", "distill.distributions"),
        ("train: {objective: distill}\ndistill: {distributions: t, beta: 0.5}", "distill.beta"),
        ("train: {objective: distill}\ndistill: {distributions: t}\nhybrid: {enabled: true}", "hybrid.enabled"),
    ],
)
def test_keys_that_contradict_each_other(lines, key):
    with pytest.raises(ConfigError, match=key):
        parse_config(f"model: {{name: m}}\ndata: {{train: d.jsonl}}\n{lines}\n")


# --- runs -------------------------------------------------------------------------------------------------------------


@on_numpy
@pytest.mark.parametrize(
    "settings",
    [{}, JSD, SOFT, *(JSD | {"distill__beta": beta} for beta in (0, 1)),
     JSD | {"distill__beta": 0.9, "distill__sft_weight": 0.5}],
    ids=str,
)  # fmt: skip
def test_the_gradient_of_a_step_is_that_of_the_divergence(distil, settings):
    """Against finite differences of the evaluation's divergence and loss, over the step's own documents."""
    lab, common = distil
    prepared = prepare(lab.config(**common | {"train__documents_per_step": 6} | settings), lab.backend)
    engine, distillation = load_engine(prepared), prepared.distillation
    engine.load_adapter_state(start := another(engine, 2))
    step = TrainingStep(prepared, engine, 0, prepared.batches)
    step.add_gradients()
    gradient = engine.gradient()
    assert len(step.batches) > 1
    ids = prepared.data.order.step(0).documents

    def value(state):
        with using(engine, state):
            few = _Few(prepared.data.train, ids)
            recorded = replace(distillation.train, places=distillation.train.places[ids])
            result = distillation.evaluate(
                engine, few, Recovery(None, engine, prepared.data.layout), soft_targets=recorded
            )
            return result.metrics["eval_divergence"] + distillation.sft_weight * result.eval_loss

    assert float(step.update().output.loss) == pytest.approx(value(start), rel=1e-5)
    rng = np.random.default_rng(0)
    for name, at in start.items():
        direction = rng.normal(size=at.shape).astype(np.float32)
        direction *= 0.02 / np.linalg.norm(direction)
        ends = [value(start | {name: at + sign * direction}) for sign in (1, -1)]
        assert (gradient[name] * direction).sum() == pytest.approx((ends[0] - ends[1]) / 2, rel=0.02, abs=1e-6)
    assert max(abs(x).max() for x in gradient.values()) > 1e-4


class _Few:
    """Some documents as if they were all."""

    def __init__(self, documents, ids):
        self._documents, self._ids = documents, ids
        self.lengths, self.hidden = documents.lengths[ids], None
        self.beginnings, self.shares = None, False

    def __len__(self):
        return len(self._ids)

    def __getitem__(self, i):
        return self._documents[int(self._ids[i])]


@on_numpy
@pytest.mark.parametrize("settings", [{}, JSD], ids=str)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(distil, settings):
    lab, common = distil
    prepared = prepare(lab.config(**common | settings), lab.backend)
    engine = load_engine(prepared)
    norms = []
    for state in (another(engine, 1), engine.adapter_state()):
        engine.load_adapter_state(state)
        step = TrainingStep(prepared, engine, 0, prepared.batches)
        step.add_gradients()
        output = step.update().output
        norms.append(float(output.grad_norm))
        if settings == JSD and not len(norms) > 1:
            assert abs(float(output.loss)) < 1e-6
    # forward_kl pulls the recorded tokens' probabilities up to 1, so its gradient vanishes only where nothing is left.
    assert norms[0] < (1e-5 if settings == JSD else 1) * norms[1]


@pytest.mark.parametrize("settings", [{}, JSD], ids=str)
def test_rows_and_micro_batches_do_not_change_the_run(distil, rows_of, settings):
    lab, common = distil
    runs = [
        lab.run("small", **common | settings),
        lab.run("large", **common | settings | {"train__micro_batch_tokens": 4096}),
        lab.run("apart", **common | settings | {"data__packing": False}),
    ]
    first, *others = (rows_of(result.run_dir) for result in runs)
    assert first[1][-1]["eval_divergence"] < first[1][0]["eval_divergence"]
    for other in others:
        for rows, expected, key in zip(other, first, ("loss", "eval_loss"), strict=True):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], abs=RESUMED_LOSS)


@on_numpy
def test_what_a_person_sees_of_a_run(distil, rows_of):
    lab, settings = distil
    run_dir = lab.run(**settings).run_dir
    last = rows_of(run_dir)[1][-1]["eval_divergence"]
    assert f"divergence {last:.4f}" in (run_dir / "log.txt").read_text()
    assert "divergence from the teacher, the last evaluation" in (run_dir / "report.html").read_text()


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_eval_measures_the_divergence_where_the_recording_is(distil, dualtune_main, rows_of):
    lab, settings = distil
    result = lab.run(**settings)
    args = ("eval", result.run_dir / "config.yaml", "--json", "--no-leaks", "--platform", "cpu")
    report, last = json.loads(dualtune_main(*args).stdout), rows_of(result.run_dir)[1][-1]
    assert report["divergence"] == pytest.approx(last["eval_divergence"], abs=1e-5)
    assert report["loss"] == pytest.approx(last["eval_loss"], abs=1e-5)
    Path(settings["distill__distributions"]).unlink()
    without = dualtune_main(*args)
    assert without.returncode == 0 and "divergence" not in json.loads(without.stdout)
    assert "divergence  not measured: there is no " in without.stderr


@pytest.mark.parametrize("settings", [{}, JSD], ids=str)
def test_a_run_that_was_killed_ends_with_the_same_bits(distil, weights_of, settings):
    lab, common = distil
    settings = common | settings | {"adapter__dropout": 0.3}
    straight = lab.run("straight", **settings)
    with pytest.raises(KeyboardInterrupt):
        lab.run("killed", [Stop()], **settings)
    assert weights_of(lab.run("killed", **settings).run_dir) == weights_of(straight.run_dir)


@on_numpy
def test_a_run_does_not_resume_with_what_another_teacher_says(distil, tmp_path):
    lab, settings = distil
    with pytest.raises(KeyboardInterrupt):
        lab.run("killed", [Stop()], **settings)
    prepared = prepare(lab.config(data__eval=0.25), lab.backend)
    engine, path = load_engine(prepared), tmp_path / "other.safetensors"
    record(path, engine, "another", (prepared.data.train, prepared.data.eval), 4)
    with pytest.raises(ConfigError, match="teacher's distributions"):
        lab.run("killed", **settings | {"distill__distributions": str(path)})


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, 10), (JSD, 10), *(pytest.param(s, 100, marks=pytest.mark.long) for s in ({}, JSD))],
)
def test_torch_and_mlx_take_the_same_steps(distil, open_backend, rows_of, settings, steps):
    """With dropout; and a run that begins on MLX goes on on torch."""
    lab, common = distil
    settings = common | settings | {"model__dtype": "float32", "adapter__dropout": 0.2, "train__steps": steps}
    torch, mlx = (open_backend(name) for name in ("torch", "mlx"))
    runs = [run(lab.config(backend.name, **settings), backend) for backend in (torch, mlx)]
    with pytest.raises(KeyboardInterrupt):
        run(lab.config("moved", **settings), mlx, [Stop()])
    runs.append(run(lab.config("moved", **settings), torch))
    first, *others = (rows_of(result.run_dir) for result in runs)
    for other in others:
        for rows, expected, key in zip(other, first, ("loss", "eval_loss"), strict=True):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], abs=2e-5)


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_the_command_records_what_a_run_needs(lab, write_rows, dualtune_main, tmp_path):
    rows = write_rows(ROWS, "rows.jsonl")
    config, out, student = tmp_path / "c.yaml", tmp_path / "teacher.safetensors", str(lab.model)
    config.write_text(f"model: {{name: {student}}}\ndata: {{train: {rows}, eval: 0}}\n")
    args = ["distill", "record", str(config), "--platform", "cpu", "--json", "--out", str(out), "--teacher"]
    result = json.loads(dualtune_main(*args, student, "--top-k", "3").stdout)
    assert result.keys() == {"file", "documents", "targets", "top_k", "continued"} and result["documents"] == 24
    distributions = read_distributions(out)
    assert distributions.tokens_Nk.shape == (result["targets"], 3) and distributions.teacher == student
    prepared = prepare(lab.config(**RUN | {"data__train": str(rows), "distill__distributions": str(out)}), lab.backend)
    assert sum(len(part.places) for part in (prepared.distillation.train, prepared.distillation.eval)) == 24
    # The next command trains on what was recorded: with the overrides, and with paths that a shell reads.
    config.write_text(config.read_text().replace("eval: 0", "eval: 0.9"))
    spaced = ["distill", "record", config, "--platform", "cpu", "--teacher", student, "--set", "data.eval=0"]
    said = dualtune_main(*spaced, "--out", tmp_path / "my teacher.safetensors")
    words = shlex.split(said.stdout.splitlines()[-1])
    assert words[words.index("--set") + 1] == "data.eval=0" and "my teacher.safetensors" in words[-1]
    too_many = dualtune_main(*args, student, "--top-k", "100000")
    assert too_many.returncode == 2 and "--top-k" in too_many.stderr
    other = tmp_path / "other"
    shutil.copytree(lab.model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    another_tokenizer = dualtune_main(*args, str(other))
    assert another_tokenizer.returncode == 2 and "has another tokenizer" in another_tokenizer.stderr

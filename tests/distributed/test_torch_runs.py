"""Whole runs of several torch processes: the same as one process's, and one end for all where one of them fails."""

import json
import signal

import numpy as np
import pytest

pytest.importorskip("torch")
from safetensors.numpy import load_file

from dualtune.base.errors import EnvironmentFault, OutOfMemory, Preempted
from dualtune.engine.testing import tolerances

FORWARD = "dualtune_torch.engine.TorchEngine.forward_backward"
EVALUATE = "dualtune_torch.engine.TorchEngine.evaluate"
INSIDE = "dualtune_torch.engine.TorchEngine._loss_sum"
OUT_OF_MEMORY = "import torch\nerror = torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 7 GiB')\n"
# A process other than the first writes no adapter, so each leaves here what it has in the end.
LEAVE_ADAPTER = """
import os
import numpy as np
import dualtune.train.run as run
fingerprints = run.result_fingerprints
def leave(prepared, engine):
    np.savez(os.path.join({place!r}, os.environ["RANK"] + ".npz"), **engine.adapter_state())
    return fingerprints(prepared, engine)
run.result_fingerprints = leave
"""
NO_REPORT = """
import os
import dualtune.train.run as run
run._write_report = lambda *given: os._exit(1)
"""
FUNCTIONS = {FORWARD: "_take_step", EVALUATE: "_evaluate_if_due"}
# Nothing fails, and the cut becomes smaller before this step is taken, or before the evaluation after it.
CUT = """
import dualtune.train.run as trainer
original = trainer.{function}
def cut(job, step):
    if step == {step} and job.recovery.layout.max_tokens > {tokens}:
        job.recovery.layout = job.recovery.layout.cut_to({tokens})
        job.recovery.on_change()
    return original(job, step)
trainer.{function} = cut
"""
NAN_LOSS = """
from dualtune_torch.engine import TorchEngine
loss_sum, calls = TorchEngine._loss_sum, []
def nan_at_third(self, inputs, *smoothing):
    if len(inputs.where_M) and self._dropout_seeds.seeds_BT is not None:
        calls.append(inputs)
    return loss_sum(self, inputs, *smoothing) * (float("nan") if len(calls) == 3 else 1.0)
TorchEngine._loss_sum = nan_at_third
"""

ONLY_THE_TRIAL = """
from dualtune_torch.engine import TorchEngine
compute, calls = TorchEngine.hidden_states, []
def once(self, batch):
    calls.append(batch)
    assert len(calls) == 1, "the first process has computed them"
    return compute(self, batch)
TorchEngine.hidden_states = once
"""


@pytest.fixture
def job(make_config, write_rows, qa_rows, tmp_path, start):
    """A run of nine steps with evaluation, checkpoints, dropout and several micro-batches in a step."""
    settings = {
        "adapter.dropout": 0.3, "data.eval": 0.25, "train.steps": 9, "train.documents_per_step": 6,
        "train.micro_batch_tokens": 64, "run.log_every": 1, "run.save_every": 2, "run.eval_every": 3,
        "memory.sharding": "none",
    }  # fmt: skip
    return Job(make_config, write_rows(qa_rows), settings, tmp_path, start)


class Job:
    def __init__(self, make_config, data, settings, home, start):
        self._make_config, self._data, self._settings, self.home, self._start = make_config, data, settings, home, start

    def command(self, name, **changes):
        """The arguments behind `dualtune` for the run directory of this name."""
        from dualtune.config import to_yaml

        settings = (
            self._settings | {"run.dir": self.home / name} | {k.replace("_", ".", 1): v for k, v in changes.items()}
        )
        path = self.home / f"{name}.yaml"
        path.write_text(to_yaml(self._make_config(self._data, settings)), encoding="utf-8")
        return ["train", path, "--platform", "cpu"]

    def start(self, size, name, inject=None, env=None, **changes):
        return self._start(size, *self.command(name, **changes), inject=inject, env=env)

    def run(self, size, name, **options):
        ended = self.start(size, name, **options).wait()
        assert [process.code for process in ended] == [0] * size, "\n".join(process.output for process in ended)
        return ended

    def rows(self, name, key="lr"):
        lines = (self.home / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [row for row in map(json.loads, lines) if key in row]

    def losses(self, name):
        return [row["loss"] for row in self.rows(name)]

    def adapter(self, name):
        return load_file(self.home / name / "adapter" / "adapter_model.safetensors")


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, atol=tolerances.RESUMED_LOSS, err_msg=name)


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rollouts_of(run_dir):
    return lines_of(run_dir / "rollouts.jsonl")


@pytest.mark.long
def test_the_first_process_fills_the_activation_cache_for_all(job):
    """And the run is that of one process without a cache."""
    cached = {
        "train_activation_cache": "disk",
        "adapter_targets": ["layers.1.mlp.up_proj", "layers.1.self_attn.q_proj"],
    }
    env = {"DUALTUNE_CACHE": str(job.home / "cache")}
    job.run(2, "two", inject={1: ONLY_THE_TRIAL}, env=env, **cached)
    job.run(1, "one", **cached | {"train_activation_cache": "none"})
    assert job.losses("two") == pytest.approx(job.losses("one"), abs=tolerances.STEP_LOSS)
    assert len(list((job.home / "cache" / "activations").iterdir())) == 2


def test_runs_of_one_and_three_processes_are_one_run(job):
    """Also of an adapter that starts from the base's weights and computes with their norms; and in what they answer."""
    leave = LEAVE_ADAPTER.format(place=str(job.home))
    inject = {0: leave, 1: leave + NO_REPORT, 2: leave + NO_REPORT}
    how = {"adapter_method": "dora", "adapter_init": "pissa", "run_sample_prompts": ["a", "Name another."]}
    job.run(1, "one", **how)
    job.run(3, "three", memory_sharding="full", inject=inject, **how)
    assert "Gradient norm" in (job.home / "three" / "report.html").read_text(encoding="utf-8")
    assert job.losses("three") == pytest.approx(job.losses("one"), abs=tolerances.STEP_LOSS)
    evals = [[row["eval_loss"] for row in job.rows(run, "eval_loss")] for run in ("three", "one")]
    assert evals[0] == pytest.approx(evals[1], abs=tolerances.STEP_LOSS)
    assert_near(job.adapter("three"), job.adapter("one"))
    answers, expected = (lines_of(job.home / run / "samples.jsonl") for run in ("three", "one"))
    assert [(row["step"], row["answer"]) for row in answers] == [(row["step"], row["answer"]) for row in expected]
    assert len(expected) == 2 * len(evals[0]) and len(expected[0]["answer"]) > 4
    assert len(set(job.losses("one"))) == 9
    first, *others = (dict(np.load(job.home / f"{rank}.npz")) for rank in range(3))
    assert len(others) == 2 and all(np.array_equal(first[name], other[name]) for name in first for other in others)
    written = list(job.adapter("three").values())
    assert sorted(tensor.tobytes() for tensor in written) == sorted(tensor.tobytes() for tensor in first.values())


def test_an_average_is_one_in_all_processes(job):
    """Each computes it from its own slots: the same bits, and those of one process up to rounding."""
    leave = {rank: LEAVE_ADAPTER.format(place=str(job.home)) for rank in range(2)}
    job.run(1, "one", train_average="tail")
    job.run(2, "two", train_average="tail", inject=leave)
    evals = [[row["eval_loss"] for row in job.rows(run, "eval_loss")] for run in ("one", "two")]
    assert evals[1] == pytest.approx(evals[0], abs=tolerances.STEP_LOSS)
    assert_near(job.adapter("two"), job.adapter("one"))
    first, second = (dict(np.load(job.home / f"{rank}.npz")) for rank in (0, 1))
    written = list(job.adapter("two").values())
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert sorted(tensor.tobytes() for tensor in written) == sorted(tensor.tobytes() for tensor in first.values())


def test_a_run_goes_on_with_two_processes_and_then_with_one(job):
    job.run(1, "straight")
    killed = job.start(1, "moved", env={"DUALTUNE_FAULT": "step:3"}).wait()
    assert [process.code for process in killed] == [-signal.SIGKILL]
    kill = "import os\nos.environ['DUALTUNE_FAULT'] = 'step:3'\n"  # of its own steps: the sixth of the run, or so
    ended = job.start(2, "moved", memory_sharding="full", inject={1: kill}).wait()
    assert [process.code for process in ended] == [EnvironmentFault.exit_code, -signal.SIGKILL]
    assert "another process of the run is gone" in ended[0].output
    job.run(1, "moved")
    resumed = [row["step"] for row in job.rows("moved", "event") if row["event"] == "resumed"]
    assert resumed == [2, 4]
    assert job.losses("moved") == pytest.approx(job.losses("straight"), abs=tolerances.RESUMED_LOSS)
    assert_near(job.adapter("moved"), job.adapter("straight"))


ASKED = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(12)]
OWN = {"adapter_dropout": 0.0, "train_documents_per_step": 3, "train_steps": 4,
       "train_learning_rate": 0.01, "run_save_every": 1, "run_eval_every": 2, "rollouts_samples": 4,
       "rollouts_max_tokens": 6}  # fmt: skip
REWARDED = {**OWN, "train_objective": "grpo", "rollouts_rewards": ["brief:4"]}
TAUGHT = {**OWN, "train_objective": "on_policy_distill", "distill_teacher": "self", "distill_hint": "{expected}",
          "distill_top_k": 4}  # fmt: skip


ADVANCE = "dualtune_torch.host.generation.TorchDecoding.advance"


@pytest.mark.parametrize("changes", [REWARDED, pytest.param(TAUGHT, marks=pytest.mark.long)], ids=["grpo", "taught"])
def test_answers_are_drawn_by_all_and_however_many_they_are(job, write_rows, changes):
    """Stopped by a signal while one process draws, killed later, and resumed: the rollouts of one process."""
    asked = {**changes, "data_train": str(write_rows(ASKED, "asked.jsonl"))}
    job.run(1, "one", **asked)
    stop = f"enter({ADVANCE!r}, 13, send('SIGTERM'))\n"  # evaluation, first and second step: five or six calls each
    ended = job.start(2, "moved", memory_sharding="full", inject={1: stop}, **asked).wait()
    assert [process.code for process in ended] == [Preempted.exit_code] * 2, ended[0].output + ended[1].output
    assert 0 < len(job.rows("moved")) < 3
    ended = job.start(2, "moved", inject={1: "import os\nos.environ['DUALTUNE_FAULT'] = 'step:2'\n"}, **asked).wait()
    assert [process.code for process in ended] == [EnvironmentFault.exit_code, -signal.SIGKILL]
    job.run(2, "moved", memory_sharding="full", **asked)
    ours, theirs = (rollouts_of(job.home / name) for name in ("moved", "one"))
    assert len(theirs) == 4 * 3 * 4 and [each["completion"] for each in ours] == [each["completion"] for each in theirs]
    assert [each["reward"] for each in ours] == pytest.approx([each["reward"] for each in theirs], abs=1e-5)
    assert job.losses("moved") == pytest.approx(job.losses("one"), abs=tolerances.RESUMED_LOSS)
    evals = [[row["eval_loss"] for row in job.rows(run, "eval_loss")] for run in ("moved", "one")]
    assert evals[0] == pytest.approx(evals[1], abs=tolerances.RESUMED_LOSS) and len(evals[0]) == 3
    assert_near(job.adapter("moved"), job.adapter("one"))


ENVIRONMENT = """
class Again:
    def reset(self, row):
        self.left = len(str(row["prompt"])) % 3 + 1
    def step(self, text):
        self.left -= 1
        return "Again:", float(len(text)), not self.left
"""
SEVERAL_TURNS = {**REWARDED, "rollouts_environment": "again.py:Again", "rollouts_turns": 3, "train_steps": 2}


@pytest.mark.long
@pytest.mark.parametrize("changes", [
    {**REWARDED, "train_objective": "dapo", "rollouts_kl": 0.1, "rollouts_stop": ["e", "1", " "]},
    {**TAUGHT, "rollouts_stop": ["e", "1", " "]},
    {**TAUGHT, "train_objective": "distill", "rollouts_samples": 8, "rollouts_max_tokens": 256},
    SEVERAL_TURNS,
], ids=["dapo", "taught", "distill", "turns"])  # fmt: skip
def test_processes_of_a_sharded_base_draw_answers_of_different_lengths(job, write_rows, changes):
    """One computes more tokens than the other, which makes forward passes with it."""
    (job.home / "again.py").write_text(ENVIRONMENT)
    asked = {**changes, "data_train": str(write_rows(ASKED, "asked.jsonl"))}
    if "rollouts_environment" in asked:
        asked["rollouts_environment"] = str(job.home / "again.py") + ":Again"
    job.run(1, "one", **asked)
    job.run(3, "all", memory_sharding="full", **asked)
    assert job.losses("all") == pytest.approx(job.losses("one"), abs=tolerances.STEP_LOSS)
    assert_near(job.adapter("all"), job.adapter("one"))
    if asked["train_objective"] != "distill":
        ours, theirs = (rollouts_of(job.home / name) for name in ("all", "one"))
        assert [each["completion"] for each in ours] == [each["completion"] for each in theirs]
        assert len({each["tokens"] for each in theirs}) > 1


def test_a_teacher_that_one_process_has_lost_ends_both_and_the_run_is_saved(job, write_rows):
    lose = "from dualtune.train.objectives.served_teacher import TeacherLost\n"
    # An evaluation asks first.
    lose += "enter('dualtune.train.objectives.teachers.top_logprobs_of', 4, throw(TeacherLost('no answer')))\n"
    changes = {**TAUGHT, "data_train": str(write_rows(ASKED, "asked.jsonl")), "run_save_every": None}
    ended = job.start(2, "run", inject={1: lose}, **changes).wait()
    assert [process.code for process in ended] == [EnvironmentFault.exit_code] * 2, ended[0].output
    assert "process 1 of 2 has failed: TeacherLost: no answer" in ended[0].output
    (saved,) = (job.home / "run" / "checkpoints").iterdir()
    assert saved.name.endswith(str(len(job.rows("run")))) and len(job.rows("run")) == 2


def test_a_loss_that_is_not_finite_in_one_process_skips_the_step_in_all(job):
    leave = LEAVE_ADAPTER.format(place=str(job.home))
    job.run(2, "run", memory_sharding="full", inject={0: leave, 1: leave + NAN_LOSS})
    skipped = [row["step"] for row in job.rows("run", "event") if row["event"] == "skipped_step"]
    assert len(skipped) == 1
    assert len(job.losses("run")) == 9
    first, second = (dict(np.load(job.home / f"{rank}.npz")) for rank in (0, 1))
    assert all(np.array_equal(first[name], second[name]) and np.isfinite(first[name]).all() for name in first)


@pytest.mark.parametrize(
    ("sharding", "where", "call", "changes"),
    [
        ("none", FORWARD, 4, {}),
        ("full", INSIDE, 4, {}),
        pytest.param("full", "dualtune_torch.host.generation._last_logits", 20, REWARDED, marks=pytest.mark.long),
    ],
    ids=["none", "full", "drawing"],
)
def test_an_error_in_one_process_ends_both_with_its_reason(job, sharding, where, call, changes):
    raise_ = f"enter({where!r}, {call}, throw(RuntimeError('an illegal memory access')))\n"
    ended = job.start(2, "run", memory_sharding=sharding, inject={1: raise_}, **changes).wait()
    assert [process.code for process in ended] == [1, 1], ended[0].output + "=====" + ended[1].output
    assert "process 1 of 2 has failed: RuntimeError: an illegal memory access" in ended[0].output


@pytest.mark.long
def test_an_answer_that_fails_with_a_sharded_base_ends_both(job):
    """And the steps so far are saved. With a whole base it ends the answers alone."""
    raise_ = (
        "enter('dualtune_torch.host.generation._last_logits', 20, throw(RuntimeError('an illegal memory access')))\n"
    )
    ended = job.start(2, "run", memory_sharding="full", run_sample_prompts=["a"], inject={0: raise_}).wait()
    assert [process.code for process in ended] == [1, 1], ended[0].output + "=====" + ended[1].output
    assert "process 0 of 2 has failed: RuntimeError: an illegal memory access" in ended[1].output
    job.run(2, "run", run_sample_prompts=["a"], inject={0: raise_})
    (event,) = [row for row in job.rows("run", "event") if row["event"] == "samples_failed"]
    assert "an illegal memory access" in event["message"] and len(job.losses("run")) == 9


@pytest.mark.parametrize(
    ("where", "call"),
    [(FORWARD, 6), pytest.param(EVALUATE, 11, marks=pytest.mark.long)],
    ids=["training", "evaluation"],
)
def test_memory_that_runs_out_in_one_process_makes_the_cut_smaller_in_both(job, where, call):
    leave = LEAVE_ADAPTER.format(place=str(job.home))
    raise_ = OUT_OF_MEMORY + f"enter({where!r}, {call}, throw(error))\n"
    job.run(2, "run", train_micro_batch_tokens=256, inject={0: leave, 1: leave + raise_})
    first, second = (dict(np.load(job.home / f"{rank}.npz")) for rank in (0, 1))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    (event,) = [row for row in job.rows("run", "event") if row["event"] == "out_of_memory"]
    cut = CUT.format(step=event["step"], tokens=event["tokens_after"], function=FUNCTIONS[where])
    job.run(2, "oracle", train_micro_batch_tokens=256, inject={0: cut, 1: cut})
    assert job.losses("run") == job.losses("oracle")
    evals = [[row["eval_loss"] for row in job.rows(name, "eval_loss")] for name in ("run", "oracle")]
    assert evals[0] == evals[1] and len(evals[0]) == 4
    assert all(np.array_equal(tensor, job.adapter("oracle")[name]) for name, tensor in job.adapter("run").items())


def test_memory_that_never_suffices_in_one_process_ends_both_with_8(job):
    raise_ = OUT_OF_MEMORY + f"enter({FORWARD!r}, 0, throw(error))\n"
    ended = job.start(2, "run", inject={1: raise_}).wait()
    assert [process.code for process in ended] == [OutOfMemory.exit_code] * 2
    for process, reason in zip(ended, ("in another process", "CUDA out of memory"), strict=True):
        assert f"out of memory: {reason}" in process.output and process.output.count("--set") == 3


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_memory_that_runs_out_with_a_split_base_ends_both_with_8_and_loses_no_step(job, rank):
    raise_ = OUT_OF_MEMORY + f"enter({INSIDE!r}, 20, throw(error))\n"
    changes = {"memory_sharding": "full", "train_micro_batch_tokens": 256, "run_save_every": None}
    ended = job.start(2, "run", inject={rank: raise_}, **changes).wait()
    assert [process.code for process in ended] == [OutOfMemory.exit_code] * 2, ended[0].output + ended[1].output
    done = len(job.rows("run"))
    assert "CUDA out of memory" in ended[0].output and done > 0
    job.run(2, "run", **changes)
    assert [row["step"] for row in job.rows("run", "event") if row["event"] == "resumed"] == [done]
    manifest = json.loads((job.home / "run" / "adapter" / "dualtune.json").read_text(encoding="utf-8"))
    assert manifest["training"]["memory"]["micro_batch_tokens"] < 256
    assert len(job.losses("run")) == 9


def test_memory_that_runs_out_in_the_optimizer_of_one_process_ends_both(job):
    raise_ = OUT_OF_MEMORY + "enter('dualtune_torch.engine.TorchEngine.optim_step', 3, throw(error))\n"
    ended = job.start(2, "run", inject={1: raise_}).wait()
    assert ended[1].code == OutOfMemory.exit_code, ended[1].output
    assert ended[0].code == EnvironmentFault.exit_code
    assert "another process of the run is gone" in ended[0].output


def test_a_signal_to_one_process_stops_both_and_the_run_is_saved(job):
    ended = job.start(2, "run", memory_sharding="full", inject={1: f"enter({FORWARD!r}, 5, send('SIGTERM'))\n"}).wait()
    assert [process.code for process in ended] == [Preempted.exit_code] * 2
    assert "another process of the run was asked to stop; saved in" in ended[0].output
    saved = len(job.rows("run"))
    assert 0 < saved < 9
    job.run(2, "run")
    assert [row["step"] for row in job.rows("run", "event") if row["event"] == "resumed"] == [saved]
    assert len(job.losses("run")) == 9


@pytest.mark.parametrize("sharding", ["none", pytest.param("full", marks=pytest.mark.cluster)])
def test_a_process_that_hangs_is_not_waited_for_for_ever(job, sharding):
    stop = f"enter({FORWARD!r}, 4, send('SIGSTOP'))\n"
    running = job.start(2, "run", memory_sharding=sharding, inject={1: stop}, env={"DUALTUNE_WAIT_S": "5"})
    running.processes[0].join(1800)
    said = running.outputs[0].read_text(encoding="utf-8")
    assert running.processes[0].exitcode == EnvironmentFault.exit_code, said
    assert "waited 5 s for the other processes (this is process 0 of 2)" in said
    assert running.processes[1].is_alive()
    running.kill()

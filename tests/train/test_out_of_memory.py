"""Memory that runs out at seeded places of a run: a step or an evaluation is repeated, smaller, with the same result.

The errors are real: the injected allocations are larger than any memory.
"""

import json
import random

import numpy as np
import pytest
from safetensors.numpy import load_file

from dualtune.base.errors import ConfigError, OutOfMemory, Preempted
from dualtune.data.batches import SequenceLayout
from dualtune.engine.testing.numpy_engine import NumpyBackend, NumpyEngine
from dualtune.show.run import summary
from dualtune.train import run as training
from dualtune.train.evaluation import evaluate
from dualtune.train.hooks import Hook
from dualtune.train.policies import Ordinary
from dualtune.train.policy import Outcome
from dualtune.train.prepare import prepare
from dualtune.train.recovery import Recovery
from dualtune.train.run import load_engine
from dualtune.train.state import checkpoint
from dualtune.train.step import TrainingStep
from dualtune.train.team import Team

pytestmark = pytest.mark.covering(2)

TOO_LARGE = 1 << 60  # bytes
RUN = {
    "adapter__dropout": 0.3, "data__eval": 0.25, "train__steps": 6, "train__documents_per_step": 12,
    "train__micro_batch_tokens": 256, "run__eval_every": 2, "run__save_every": 2, "run__keep": 99,
}  # fmt: skip


def places(name):
    """{where: (owner, function)} of a backend, and an allocation that fails with the backend's own error."""
    if name == "numpy":
        found = {"forward": "_forward", "backward": "_linear_backward", "evaluation": "evaluate"}
        return {where: (NumpyEngine, f) for where, f in found.items()}, lambda: np.empty(TOO_LARGE, np.uint8)
    import torch

    from dualtune_torch.engine import TorchEngine
    from dualtune_torch.kernels.lora import LoRAGroup, _GroupedLoRA

    found = {
        "forward": (LoRAGroup, "__call__"), "backward": (_GroupedLoRA, "backward"),
        "evaluation": (TorchEngine, "evaluate"),
    }  # fmt: skip
    return found, lambda: torch.empty(TOO_LARGE, dtype=torch.uint8)


class Shortage(Hook):
    """While a run trains, runs out of memory at the given calls of one function."""

    def __init__(self, monkeypatch, owner, name, allocate, calls=()):
        self.calls, self._counts = 0, False
        original = getattr(owner, name)

        def call(*args, **options):
            self.calls += self._counts
            if self._counts and self.calls in calls:
                allocate()
            return original(*args, **options)

        monkeypatch.setattr(owner, name, staticmethod(call) if name == "backward" else call)

    def on_start(self, info):
        self._counts = True

    def on_event(self, event):
        self._counts = self._counts and event.event != "verdict"  # after it, the adapter is written


def run_with(lab, monkeypatch, where, calls, name, **changes):
    """(the run, its shortage) with memory running out at these calls of a place."""
    found, allocate = places(lab.backend.name)
    with monkeypatch.context() as patch:
        shortage = Shortage(patch, *found[where], allocate, calls)
        return lab.run(name, [shortage], **RUN | changes), shortage


def cuts_of(run_dir):
    """[(steps done, whether during an evaluation, tokens)] of the cuts of a run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found, evaluated = [], set()
    for row in rows:
        if "eval_loss" in row:
            evaluated.add(row["step"])
        if row.get("event") == "out_of_memory":
            in_evaluation = row["step"] % 2 == 0 and row["step"] not in evaluated  # run.eval_every
            found.append((row["step"], in_evaluation, row["tokens_after"]))
    return found


def run_cut_so(lab, monkeypatch, cuts, name, **changes):
    """A run in which nothing fails, and which has these cuts from the same steps and evaluations on."""
    with monkeypatch.context() as patch:
        for function, in_evaluation in (("_take_step", False), ("_evaluate_if_due", True)):
            original = getattr(training, function)

            def cut(job, step, original=original, in_evaluation=in_evaluation):
                due = [t for s, during, t in cuts if (s, not during) <= (step, not in_evaluation)]
                if due and min(due) < job.recovery.layout.max_tokens:
                    job.recovery.layout = job.recovery.layout.cut_to(min(due))
                    job.recovery.on_change()
                return original(job, step)

            patch.setattr(training, function, cut)
        return lab.run(name, **RUN | changes)


def numbers(rows):
    return [(row["step"], row.get("loss"), row.get("grad_norm"), row.get("eval_loss")) for row in rows]


@pytest.mark.parametrize("where", ["forward", "backward", "evaluation"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_that_runs_out_of_memory_is_that_with_the_smaller_cut(
    lab, monkeypatch, rows_of, weights_of, where, packing, seed
):
    if lab.backend.name == "torch" and (where, packing, seed) != ("backward", True, 1):
        pytest.skip("quicker on NumPy")
    straight, clean = run_with(lab, monkeypatch, where, (), "straight", data__packing=packing)
    calls = random.Random(f"{where} {packing} {seed}").sample(range(1, clean.calls + 1), 2)
    found, _ = run_with(lab, monkeypatch, where, calls, "found", data__packing=packing)
    cuts = cuts_of(found.run_dir)
    assert len(cuts) == 2 and cuts[1][2] < cuts[0][2] <= 128
    oracle = run_cut_so(lab, monkeypatch, cuts, "oracle", data__packing=packing)
    assert weights_of(found.run_dir) == weights_of(oracle.run_dir)
    for mine, its in zip(rows_of(found.run_dir), rows_of(oracle.run_dir), strict=True):
        assert numbers(mine) == numbers(its)
    (steps, evals), (steps_before, evals_before) = rows_of(found.run_dir), rows_of(straight.run_dir)
    assert [row["step"] for row in steps] == [*range(1, 7)] and [row["step"] for row in evals] == [0, 2, 4, 6]
    assert [row["loss"] for row in steps] == pytest.approx([row["loss"] for row in steps_before], rel=1e-6)
    assert [row["eval_loss"] for row in evals] == pytest.approx([row["eval_loss"] for row in evals_before], rel=1e-6)
    for name, tensor in load_file(straight.adapter_dir / "adapter_model.safetensors").items():
        mine = load_file(found.adapter_dir / "adapter_model.safetensors")[name]
        np.testing.assert_allclose(mine, tensor, atol=1e-5, err_msg=name)


def test_the_second_half_of_an_accumulation_runs_out_and_no_gradient_is_counted_twice(lab, monkeypatch, weights_of):
    run_with(lab, monkeypatch, "forward", (), "straight", train__steps=1)
    per_step = {"numpy": 1, "torch": 10}[lab.backend.name]  # calls of a micro-batch, at most
    _, clean = run_with(lab, monkeypatch, "backward", (), "counted", train__steps=1)
    found, _ = run_with(lab, monkeypatch, "backward", (clean.calls - per_step // 2,), "found", train__steps=1)
    ((step, in_evaluation, _),) = cuts = cuts_of(found.run_dir)
    assert (step, in_evaluation) == (0, False)
    oracle = run_cut_so(lab, monkeypatch, cuts, "oracle", train__steps=1)
    assert weights_of(found.run_dir) == weights_of(oracle.run_dir)


def test_a_resumed_run_keeps_the_cut_and_a_changed_key_ends_it(lab, monkeypatch, weights_of, rows_of):
    class Stop(Hook):
        def on_step(self, record):
            if record.step == 4:
                raise KeyboardInterrupt

    found, allocate = places(lab.backend.name)
    straight, _ = run_with(lab, monkeypatch, "backward", (3,), "straight")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        lab.run("stopped", [Shortage(patch, *found["backward"], allocate, (3,)), Stop()], **RUN)
    ((_, _, tokens),) = cuts_of(straight.run_dir)
    saved = checkpoint.newest(lab.tmp_path / "stopped" / "checkpoints")[0]
    assert saved.state["memory"] == {"micro_batch_tokens": tokens}
    config = lab.config("stopped", **RUN)
    prepared = prepare(config, lab.backend, saved)
    assert prepared.data.layout.max_tokens == tokens
    assert f"up to {tokens} tokens (since memory ran out)" in summary(prepared)[-1]
    changed = lab.config("stopped", **RUN | {"train__micro_batch_tokens": 200})
    assert prepare(changed, lab.backend, saved).data.layout.max_tokens == 200
    resumed = lab.run("stopped", **RUN)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    manifest = json.loads((resumed.adapter_dir / "dualtune.json").read_text())
    assert manifest["training"]["memory"] == {"micro_batch_tokens": tokens}
    assert len(rows_of(resumed.run_dir)[0]) == 6


def test_a_run_with_enough_memory_remembers_nothing(lab):
    done = lab.run(**RUN | {"train__steps": 2})
    saved = checkpoint.newest(done.run_dir / "checkpoints")[0]
    assert "memory" not in saved.state
    assert "memory" not in json.loads((done.adapter_dir / "dualtune.json").read_text())["training"]


# --- where nothing smaller is left -----------------------------------------------------------------------------------


def test_at_the_smallest_cut_the_state_is_saved_and_the_message_says_what_to_set(lab, monkeypatch, rows_of):
    found, allocate = places(lab.backend.name)
    with monkeypatch.context() as patch:
        shortage = Shortage(patch, *found["backward"], allocate)
        settings = RUN | {"data__eval": 0, "run__save_every": None}  # nothing else saves
        straight = lab.run("counted", [shortage], **settings | {"train__steps": 3})
        third = shortage.calls // 3
        shortage = Shortage(patch, *found["backward"], allocate, range(2 * third + 1, 10**9))
        with pytest.raises(OutOfMemory) as caught:
            lab.run("run", [shortage], **settings)
    assert caught.value.exit_code == 8
    message = str(caught.value)
    assert message.startswith("out of memory: ") and "are the smallest" in message
    assert ("By estimate it needs" if lab.backend.name == "torch" else "The peak so far is") in message
    assert sum(line.startswith("  --set ") for line in message.splitlines()) == 3
    saved = checkpoint.newest(lab.tmp_path / "run" / "checkpoints")[0]
    assert 1 <= saved.step <= 2
    steps = rows_of(lab.tmp_path / "run")[0]
    assert [row["step"] for row in steps] == [*range(1, saved.step + 1)]
    assert straight.num_steps == 3


def test_every_setting_of_the_message_is_a_valid_one(lab, monkeypatch):
    found, allocate = places(lab.backend.name)
    with monkeypatch.context() as patch, pytest.raises(OutOfMemory) as caught:
        lab.run("run", [Shortage(patch, *found["forward"], allocate, range(1, 10**9))], **RUN)
    ways = [line.split()[1] for line in str(caught.value).splitlines() if line.startswith("  --set ")]
    for way in ways:
        key, _, value = way.partition("=")
        lab.config("other", **{key.replace(".", "__"): json.loads(value) if value.isdigit() else value})


def test_memory_that_runs_out_while_loading_is_exit_8(lab, monkeypatch):
    _, allocate = places(lab.backend.name)
    monkeypatch.setattr(type(lab.backend), "load", lambda backend, request: allocate())
    with pytest.raises(OutOfMemory, match="while the model was loaded") as caught:
        lab.run(**RUN)
    assert str(caught.value).count("--set") == 3


def test_memory_that_runs_out_in_the_optimizer_ends_the_run(lab, monkeypatch):
    _, allocate = places(lab.backend.name)
    kind = {"numpy": "dualtune.engine.testing.numpy_engine.NumpyEngine", "torch": "dualtune_torch.engine.TorchEngine"}
    monkeypatch.setattr(f"{kind[lab.backend.name]}.optim_step", lambda engine, **options: allocate())
    with pytest.raises(OutOfMemory, match="in training"):
        lab.run(**RUN)


class Recomputing:
    """An engine that fits in memory only while it recomputes its activations."""

    def __init__(self, engine, works=True):
        self._engine, self._works, self.checkpointing = engine, works, None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def set_checkpointing(self, checkpointing):
        if not self._works:
            raise ConfigError("memory.checkpointing: this model has no layers")
        self.checkpointing = checkpointing

    def forward_backward(self, batch, *, divisor):
        if self.checkpointing is None:
            np.empty(TOO_LARGE, np.uint8)
        self._engine.forward_backward(batch, divisor=divisor)


class Backend(NumpyBackend):
    """Honours memory.checkpointing, or not."""

    honoured, works = ("auto", "none", "full"), True

    def capabilities(self):
        return {**super().capabilities(), "memory.checkpointing": frozenset(self.honoured)}

    def load(self, request):
        return Recomputing(super().load(request), self.works)


@pytest.fixture
def numpy_lab(lab):
    if lab.backend.name != "numpy":
        pytest.skip("a fake engine, once")
    lab.backend = Backend()
    return lab


def test_at_the_smallest_cut_activations_are_recomputed_and_the_run_remembers_it(numpy_lab):
    done = numpy_lab.run(**RUN)
    saved = checkpoint.newest(done.run_dir / "checkpoints")[0]
    assert saved.state["memory"]["checkpointing"] == "full"
    rows = [json.loads(line) for line in (done.run_dir / "metrics.jsonl").read_text().splitlines()]
    events = [row for row in rows if row.get("event") == "out_of_memory"]
    assert events[-1]["checkpointing"] == "full" and all("tokens_after" in event for event in events[:-1])
    more = numpy_lab.run(**RUN | {"train__steps": 7})  # it would fail in its first step, and say so
    assert len([r for r in (more.run_dir / "metrics.jsonl").read_text().splitlines() if "out_of_memory" in r]) == len(
        events
    )


@pytest.mark.parametrize(("honoured", "works"), [(("auto", "none"), True), (("auto", "none", "full"), False)])
def test_a_backend_that_cannot_recompute_ends_with_8(numpy_lab, monkeypatch, honoured, works):
    monkeypatch.setattr(Backend, "honoured", honoured)
    monkeypatch.setattr(Backend, "works", works)
    with pytest.raises(OutOfMemory):
        numpy_lab.run(**RUN)


# --- policies, and the pieces ----------------------------------------------------------------------------------------


def test_a_gradient_that_an_evaluation_of_the_policy_discards_is_computed_again(lab, monkeypatch):
    class LooksBetween(Ordinary):
        name, num_probes = "looks between", 3

        def take(self, step):
            step.add_gradients()
            self.loss = step.batch_loss()
            return Outcome(step.update())

    config = lab.config(**RUN | {"train__documents_per_step": 6})
    prepared, policy = prepare(config, lab.backend, policy=LooksBetween), LooksBetween(config)
    found, allocate = places(lab.backend.name)

    def take(calls):
        engine = load_engine(prepared)
        with monkeypatch.context() as patch:
            shortage = Shortage(patch, *found["evaluation"], allocate, calls)
            shortage.on_start(None)
            recovery = Recovery(lab.backend, engine, prepared.data.layout, prepared.data.train.longest)
            step = TrainingStep(
                prepared, engine, 0, lambda index: prepared.batches(index, recovery.layout), recovery=recovery
            )
            output = policy.take(step).update.output
        return float(output.loss), float(output.grad_norm), policy.loss, recovery.layout

    *expected, layout = take(())
    *mine, smaller = take((1,))
    assert mine == pytest.approx(expected, rel=1e-6) and smaller.max_tokens < layout.max_tokens and mine[1] > 0


def test_a_layout_is_halved_down_to_the_longest_document():
    layout = SequenceLayout(1024, 512)
    assert layout.halved(1024, 100) == SequenceLayout(512, 512)
    assert layout.halved(300, 100) == SequenceLayout(150, 150)  # the micro-batch that failed was smaller
    assert layout.halved(4096, 700) == SequenceLayout(700, 512)
    assert SequenceLayout(150, 150).halved(150, 100) == SequenceLayout(100, 100)
    assert SequenceLayout(100, 100).halved(112, 100) is None
    assert SequenceLayout(64).halved(64, 20) == SequenceLayout(32, None)


def test_an_error_that_is_not_about_memory_is_raised_at_once(lab):
    prepared = prepare(lab.config(**RUN), lab.backend)
    recovery = Recovery(lab.backend, load_engine(prepared), SequenceLayout(64), 10)
    with pytest.raises(RuntimeError, match="broken"):
        recovery.attempt(0, prepared.batches(0), lambda batch: (_ for _ in ()).throw(RuntimeError("broken")))
    assert recovery.layout == SequenceLayout(64)


def test_a_request_to_stop_comes_before_the_cut(lab, monkeypatch):
    prepared = prepare(lab.config(**RUN), lab.backend)
    engine, batches = load_engine(prepared), prepared.batches(0)
    recovery = Recovery(lab.backend, engine, prepared.data.layout, 10)
    monkeypatch.setattr("dualtune.base.interrupt.requested", lambda: True)
    with pytest.raises(Preempted):
        recovery.attempt(0, batches, lambda batch: places(lab.backend.name)[1]())
    assert recovery.layout == prepared.data.layout


def test_an_evaluation_on_its_own_is_repeated_too(lab, monkeypatch):
    prepared = prepare(lab.config(**RUN), lab.backend)
    engine, documents, layout = load_engine(prepared), prepared.data.train, prepared.data.layout
    expected = evaluate(engine, documents, layout)
    found, allocate = places(lab.backend.name)
    with monkeypatch.context() as patch:
        shortage = Shortage(patch, *found["evaluation"], allocate, (2, 5))
        shortage.on_start(None)
        told = []
        recovery = Recovery(lab.backend, engine, layout, documents.longest, tell=told.append)
        record = evaluate(engine, documents, recovery, team=Team())
    assert record.eval_loss == pytest.approx(expected.eval_loss, rel=1e-6)
    assert record.eval_targets == expected.eval_targets and len(told) == 2
    with monkeypatch.context() as patch:
        shortage = Shortage(patch, *found["evaluation"], allocate, (1,))
        shortage.on_start(None)
        with pytest.raises((MemoryError, RuntimeError)):
            evaluate(engine, documents, layout)


def test_a_shortage_while_packing_is_tried_is_not_taken_for_a_model_that_cannot_pack(lab, monkeypatch):
    found, allocate = places(lab.backend.name)
    with monkeypatch.context() as patch:
        shortage = Shortage(patch, *found["evaluation"], allocate, (7,))  # the first that is packed
        shortage.on_start(None)
        with pytest.raises(OutOfMemory, match="while the model was loaded"):
            lab.run(**RUN)

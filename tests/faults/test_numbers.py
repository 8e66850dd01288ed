"""Numbers that go wrong: NaN in a batch, and spikes of the loss. The weights are what they would be without them."""

import itertools
import json
import math
import os
import re
import shutil
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.covering(1)

BOTH = pytest.mark.parametrize("box", ["numpy", "cpu"], indirect=True)
POISON = "~"  # a character of no other row; its embedding is not finite
EMBEDDING = {"numpy": "embedding.weight", "cpu": "model.embed_tokens.weight"}


@pytest.fixture
def poisoned(box, write_rows, qa_rows):
    """Give the run a model whose embedding of one token is not finite, and put the token into these rows."""
    from tokenizers import Tokenizer

    def poison(rows, value=math.nan):
        model = shutil.copytree(box.settings["model.name"], box.home / "poisoned")
        tensors = load_file(model / "model.safetensors")
        token = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(POISON)
        tensors[EMBEDDING[box.platform]][token] = value
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        changed = [row | {"completion": f"{POISON}{POISON}7"} if i in rows else row for i, row in enumerate(qa_rows)]
        box.settings |= {"model.name": model, "data.train": write_rows(changed), "data.eval": 0}

    return poison


def files(box, step):
    place = box.dir / "checkpoints" / f"step-{step:08d}"
    return [(place / f"{name}.safetensors").read_bytes() for name in ("adapter", "optimizer_m", "optimizer_v")]


@pytest.mark.fault(
    row=18,
    fault="NaN or Inf in one batch",
    injection="one document with a token whose embedding is NaN, or Inf",
    expected="the step is skipped: weights and moments bitwise as before; its rows named as path:line; exit 0",
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@BOTH
def test_a_batch_that_is_not_finite_never_reaches_the_weights(box, poisoned, value):
    poisoned({5}, value)
    box.settings |= {"run.save_every": 1, "run.keep": 99}  # 16 rows, four a step: the row comes in steps 1–4, and 5–8
    said = box.resume().stdout
    skipped = [row for row in box.rows() if row.get("skipped")]
    events = box.events("skipped_step")
    assert [row["step"] for row in skipped] == [event["step"] for event in events]
    assert 2 <= len(skipped) <= 3
    for event in events:
        assert f"{box.settings['data.train']}:6" in event["rows"] and len(event["rows"]) == 4
        assert f"{box.settings['data.train']}:6" in event["message"] and event["message"] in said
    for step in range(2, 10):
        assert (files(box, step - 1) == files(box, step)) == (step in {event["step"] for event in events})
    assert all(
        np.isfinite(tensor).all() for tensor in load_file(box.dir / "adapter/adapter_model.safetensors").values()
    )
    assert json.loads((box.dir / "adapter" / "dualtune.json").read_text())["training"]["skipped_steps"] == len(events)


@pytest.mark.fault(
    row=18,
    fault="NaN in one batch, and a kill behind it",
    injection="as above; SIGKILL in step 6",
    expected="skipped steps are counted on across the resume; adapter bitwise equal",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_skipped_steps_survive_a_kill(box, poisoned):
    poisoned({5})
    straight = box.straight()
    counted = json.loads((box.home / "ref" / "adapter" / "dualtune.json").read_text())["training"]["skipped_steps"]
    box.train(-9, fault="step:6")
    box.resume()
    assert box.adapter == straight
    assert json.loads((box.dir / "adapter" / "dualtune.json").read_text())["training"]["skipped_steps"] == counted > 0


@pytest.mark.fault(
    row=18,
    fault="NaN in many batches in a row",
    injection="every document with such a token; `guards.nonfinite_limit` 5 and 2",
    expected="exit 7 after one step more than the limit, no adapter",
)
@pytest.mark.parametrize("limit", [5, 2])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@BOTH
def test_too_many_in_a_row_end_the_run(box, poisoned, limit, wording):
    poisoned(range(16))
    box.settings["guards.nonfinite_limit"] = limit
    complaint = box.resume(7).stderr
    wording(complaint)
    assert [event["step"] for event in box.events("skipped_step")] == list(range(1, limit + 2))
    assert not (box.dir / "adapter").exists()


@pytest.mark.fault(
    row=20,
    fault="a NaN loss that is hidden",
    injection="as for row 18",
    expected="NaN in metrics.jsonl, `nan` in the terminal's line, also in a mean over several steps",
)
@pytest.mark.parametrize("log_every", [1, 4])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_loss_is_shown_as_nan(box, poisoned, log_every):
    poisoned({5})
    box.settings["run.log_every"] = log_every
    said = box.resume().stdout
    losses = dict(box.losses())
    hit = {step for step, loss in losses.items() if math.isnan(loss)}
    assert hit == {event["step"] for event in box.events("skipped_step")} and hit
    assert '"loss": NaN' in (box.dir / "metrics.jsonl").read_text()
    shown = {int(step): loss for step, loss in re.findall(r"^\S+Z  step +(\d+)/9  loss (\S+)", said, re.M)}
    assert {s for s, loss in shown.items() if loss == "nan"} == {min(-(-s // log_every) * log_every, 9) for s in hit}


# --- spikes ----------------------------------------------------------------------------------------------------------


SPIKE = 24  # the step with the rate x1000; what it does to the loss shows in the next one


@pytest.fixture
def spiking(request, box, monkeypatch):
    """A run of forty steps, one of them with a thousand times the learning rate. Losses vary little before."""
    from dualtune.train import step as step_module

    rate, spike = step_module.learning_rate, getattr(request, "param", SPIKE)
    monkeypatch.setattr(
        step_module, "learning_rate", lambda c, step, n: rate(c, step, n) * (1000 if step == spike - 1 else 1)
    )
    box.settings |= {
        "data.eval": 0, "adapter.dropout": 0, "train.steps": 40, "train.documents_per_step": 16, "run.save_every": 10,
        "train.schedule": "constant", "guards.on_spike": "rollback",
    }  # fmt: skip
    return box


@pytest.mark.fault(
    row=19,
    fault="loss spike, `guards.on_spike: warn`",
    injection="the learning rate x1000 for one step",
    expected="said once with its score and rows; the run goes on as with `ignore`",
)
def test_a_spike_is_said(spiking):
    spiking.settings["guards.on_spike"] = "warn"
    said = spiking.resume().stdout
    (event,) = spiking.events("spike")
    assert event["step"] == SPIKE + 1 and event["score"] > 8 and len(event["rows"]) == 16
    assert said.count("robust standard deviations above") == 1
    assert not spiking.events("rollback")
    warned = spiking.adapter
    spiking.settings["guards.on_spike"] = "ignore"
    assert spiking.straight() == warned


@pytest.mark.fault(
    row=19,
    fault="loss spike, `guards.on_spike: rollback`",
    injection="as above",
    expected="back to the checkpoint before, the window left out, twice the same bytes",
)
def test_a_rollback_leaves_the_window_out_and_is_deterministic(spiking, wording):
    straight = spiking.straight()
    spiking.settings["run.keep"] = 99
    spiking.resume()
    (event,) = spiking.events("rollback")
    assert (event["step"], event["to_step"]) == (SPIKE + 1, 20)
    wording(event["message"])
    state = json.loads((spiking.dir / "checkpoints" / "step-00000030" / "state.json").read_text())
    assert (state["step"], state["optimizer_step"]) == (30, 25)  # 26 to 30 on top of the 20
    losses = dict(spiking.losses())
    assert max(losses[step] for step in range(26, 41)) < losses[SPIKE + 1]
    assert [step for step, _ in spiking.losses()] == list(range(1, 41))
    assert spiking.adapter == straight


@pytest.mark.fault(
    row=19,
    fault="a spike whose cause is in the newest checkpoint already",
    injection="the learning rate x1000 in the step that is saved",
    expected="back to that checkpoint, and from the next spike to the one before",
)
@pytest.mark.parametrize("spiking", [20], indirect=True)
def test_a_rollback_goes_further_back_when_the_first_did_not_help(spiking):
    straight = spiking.straight()
    spiking.resume()
    assert [(event["step"], event["to_step"]) for event in spiking.events("rollback")] == [(21, 20), (22, 10)]
    losses = dict(spiking.losses())
    assert max(losses[step] for step in range(23, 41)) < min(losses[21], losses[22])
    assert spiking.adapter == straight


@pytest.mark.fault(
    row=19,
    fault="a rollback, and a preemption anywhere around it",
    injection="SIGTERM in steps before, at and after the spike; SIGKILL likewise",
    expected="adapter bitwise equal to the run that was not stopped",
)
@pytest.mark.parametrize(
    ("how", "spiking", "stop"),
    [
        *(("SIGTERM", 24, stop) for stop in (21, 24, 26)), *(("SIGTERM", 20, stop) for stop in (21, 23)),
        *(("kill", 24, stop) for stop in (24, 25, 31)), ("kill", 20, 22),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (
            *(("SIGTERM", 24, stop) for stop in (25, 27, 31)), ("SIGTERM", 20, 22),
            *(("kill", 24, stop) for stop in (21, 26, 27)), ("kill", 20, 21), ("kill", 20, 23),
        )),
    ],
    indirect=["spiking"],
)  # fmt: skip
def test_a_preemption_does_not_change_a_rollback(spiking, monkeypatch, stop, how):
    from dualtune.engine.testing.numpy_engine import NumpyEngine

    straight = spiking.straight()
    if how == "kill":
        spiking.stop(stop)
    else:
        optim_step, steps = NumpyEngine.optim_step, itertools.count(1)

        def signalled(engine, **options):
            if next(steps) == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return optim_step(engine, **options)

        with monkeypatch.context() as patch:
            patch.setattr(NumpyEngine, "optim_step", signalled)
            spiking.resume(75)
    spiking.resume()
    assert spiking.adapter == straight
    assert [step for step, _ in spiking.losses()] == list(range(1, 41))

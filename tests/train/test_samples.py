"""Sample answers at the evaluations of a run: what they are, and that they change nothing."""

import json
import os
import signal

import pytest

from dualtune.base.errors import ConfigError, Preempted
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.train.generation.batched import Continuation
from dualtune.train.generation.inference import load_model, stream_text
from dualtune.train.generation.sampling import Sampling
from dualtune.train.hooks import Hook
from dualtune.train.samples import check_samples
from dualtune.train.state.checkpoint import newest

PROMPTS = ["What is 2 + 5?", "Say <b>hello</b>"]
RUN = {"train__steps": 4, "data__eval": 0.25, "run__eval_every": 2, "run__save_every": 2, "adapter__dropout": 0.3,
       "train__learning_rate": 0.1, "data__packing": False}  # fmt: skip


class Heard(Hook):
    """The samples, and a signal to this process after the first one of a step."""

    def __init__(self, stops_at=None):
        self.records, self._stops_at = [], stops_at

    def on_sample(self, record):
        self.records.append(record)
        if record.step == self._stops_at:
            os.kill(os.getpid(), signal.SIGTERM)


def samples_of(run_dir):
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def state_of(result):
    """The bytes of the adapter and of the optimizer in the last checkpoint, and every loss."""
    saved, _ = newest(result.run_dir / "checkpoints")
    rows = map(json.loads, (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    losses = [row.get("loss", row.get("eval_loss")) for row in rows if "event" not in row]
    slots = {f"{name} {slot}": w for name, table in saved.optimizer.slots.items() for slot, w in table.items()}
    return losses, {name: w.tobytes() for name, w in (saved.adapter | slots).items()}


@pytest.mark.parametrize(
    ("lab", "changes"),
    [
        ("numpy", {}),
        ("numpy", {"train__average": "ema"}),
        ("torch", {}),
        ("torch", {"memory__resident_layers": 1}),
        ("mlx", {}),
        ("mlx", {"memory__resident_layers": 1}),
    ],
    indirect=["lab"],
)
def test_samples_change_no_bit_of_a_run(lab, weights_of, changes):
    """Also with an average, whose weights replace those of the training for each evaluation and its samples; and with
    layers that wait on the host or in their files."""
    plain = lab.run("plain", **RUN | changes)
    heard = Heard()
    sampled = lab.run("sampled", hooks=[heard], run__sample_prompts=PROMPTS, **RUN | changes)
    assert state_of(sampled) == state_of(plain)
    assert weights_of(sampled.run_dir) == weights_of(plain.run_dir)
    assert [(record.step, record.prompt) for record in heard.records] == [(s, p) for s in (0, 2, 4) for p in PROMPTS]
    rows = samples_of(sampled.run_dir)
    assert [(row["step"], row["prompt"], row["answer"]) for row in rows] == [
        (record.step, record.prompt, record.answer) for record in heard.records
    ]


def test_the_last_sample_is_the_greedy_answer_of_the_result(lab):
    result = lab.run(train__average="ema", run__sample_prompts=PROMPTS, **RUN)
    model = load_model(lab.backend, str(lab.model), result.adapter_dir)
    said = ["".join(stream_text(model, model.tokenizer.encode_prompt(p), Sampling(64))) for p in PROMPTS]
    rows = samples_of(result.run_dir)
    assert [row["answer"] for row in rows if row["step"] == 4] == said
    assert [row["answer"] for row in rows if row["step"] == 0] != said


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_a_stop_between_two_samples_costs_nothing(lab, weights_of):
    straight = lab.run("straight", run__sample_prompts=PROMPTS, **RUN)
    with pytest.raises(Preempted):
        lab.run(hooks=[Heard(stops_at=2)], run__sample_prompts=PROMPTS, **RUN)
    assert [row["step"] for row in samples_of(lab.tmp_path / "run")] == [0, 0, 2]
    with (lab.tmp_path / "run" / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "prompt": "of a step that is repeated"}\n{"step": 2, "prom')
    resumed = lab.run(run__sample_prompts=PROMPTS, **RUN)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    assert [row["step"] for row in samples_of(resumed.run_dir)] == [0, 0, 2, 4, 4]


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_a_failing_sample_ends_the_samples_and_not_the_run(lab, weights_of, monkeypatch):
    plain = lab.run("plain", **RUN)

    def fail(*_, **__):
        yield Continuation(0, "an answer", 2, is_whole=True)
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr("dualtune.train.samples.continue_all", fail)
    result = lab.run(run__sample_prompts=PROMPTS, **RUN)
    assert weights_of(result.run_dir) == weights_of(plain.run_dir)
    rows = map(json.loads, (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert [row["message"] for row in rows if row.get("event") == "samples_failed"] == [
        "no samples from here on: RuntimeError: no kernel for this"
    ]


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data__eval": 0}, r"run\.sample_prompts: answers are given at evaluations, and data\.eval holds out no"),
        ({"run__sample_prompts": ["x"] * 9}, "at most 8"),
    ],
)
def test_samples_that_cannot_be_given_are_refused_before_the_run(lab, settings, message):
    with pytest.raises(ConfigError, match=message):
        lab.run(**RUN | {"run__sample_prompts": PROMPTS} | settings)
    assert not (lab.tmp_path / "run").exists()


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
@pytest.mark.parametrize("system", ["Add.", None])
def test_prompts_are_asked_with_the_system_message_of_the_rows(lab, write_rows, monkeypatch, system):
    before = [{"role": "system", "content": system}] if system else []
    turns = [{"role": "user", "content": "1 plus 1?"}, {"role": "assistant", "content": "2"}]
    lab.data = write_rows([{"messages": [*before, *turns]}] * 8)
    asked = []

    def answer(model, prompts, sampling):
        asked.extend(model.tokenizer.decode_all(ids.tolist()) for ids in prompts)
        yield from (Continuation(i, "2", 1, is_whole=True) for i in range(len(prompts)))

    monkeypatch.setattr("dualtune.train.samples.continue_all", answer)
    lab.run(run__sample_prompts=PROMPTS[:1], **RUN | {"data__template": "chatml"})
    tokenizer = Tokenizer(lab.model, "chatml")
    assert asked and {*asked} == {tokenizer.decode_all(tokenizer.encode_prompt(PROMPTS[0], system).tolist())}
    assert all(("Add." in text) == bool(system) for text in asked)


def test_a_prompt_must_leave_room_for_an_answer(tiny_llama):
    tokenizer = Tokenizer(tiny_llama)
    length = len(tokenizer.encode_prompt(PROMPTS[1]))
    check_samples(PROMPTS, tokenizer, length + 1, num_eval_documents=1)
    with pytest.raises(ConfigError, match=rf"run\.sample_prompts\[1\]: got {length} tokens, but .* {length} positions"):
        check_samples(PROMPTS, tokenizer, length, num_eval_documents=1)

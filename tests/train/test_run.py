"""Whole runs on tiny models: what they write, count and promise."""

import json
import math
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from dualtune.base.errors import ConfigError, NonFiniteError
from dualtune.config import load_config
from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.documents import Data
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.testing.oracles import llama_oracle, loss_of, softmax_oracle
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.formats.directory import read_adapter
from dualtune.show.run import summary
from dualtune.train.hooks import Hook
from dualtune.train.prepare import prepare
from dualtune.train.state import checkpoint
from dualtune.train.state.run_dir import METRICS

STEP_KEYS = {"time", "step", "epoch", "loss", "lr", "grad_norm", "num_targets", "num_tokens", "step_s", "tokens_per_s",
             "documents_per_min", "peak_bytes", "skipped"}  # fmt: skip
EVAL_KEYS = {"time", "step", "eval_loss", "eval_targets"}


class Recorder(Hook):
    """Every event, in order, with the step or what else identifies it."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def on_start(self, info):
        self.events.append(("start", info.first_step, info.num_steps))

    def on_step(self, record):
        self.events.append(("step", record.step))

    def on_eval_batch(self, done, total):
        self.events.append(("eval batch", done, total))

    def on_eval(self, record):
        self.events.append(("eval", record.step))

    def on_end(self):
        self.events.append(("end",))


# --- what is written -------------------------------------------------------------------------------------------------


def test_metrics_have_exactly_the_documented_keys_and_every_step_once(lab, rows_of):
    result = lab.run(train__steps=5, data__eval=0.25, run__eval_every=2)
    steps, evals = rows_of(result.run_dir)
    assert all(row.keys() == STEP_KEYS for row in steps)
    assert all(row.keys() == EVAL_KEYS for row in evals)
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in evals] == [0, 2, 4, 5]
    cosine = [1e-2 * math.cos(math.pi * t / 8) ** 2 for t in range(4)]
    assert [row["lr"] for row in steps] == pytest.approx([5e-3, *cosine])
    assert all(row["step_s"] > 0 and row["peak_bytes"] > 2**20 for row in steps)
    assert all(row["tokens_per_s"] == pytest.approx(row["num_tokens"] / row["step_s"]) for row in steps)
    order = prepare(lab.config(train__steps=5, data__eval=0.25), lab.backend).data.order
    documents = [len(order.step(index).documents) for index in range(5)]
    assert [row["documents_per_min"] * row["step_s"] / 60 for row in steps] == pytest.approx(documents)
    assert (result.num_steps, result.final_loss) == (5, steps[-1]["loss"])
    assert (result.eval_loss_before, result.eval_loss) == (evals[0]["eval_loss"], evals[-1]["eval_loss"])


def test_tokens_and_targets_of_an_epoch_are_those_of_the_data(lab, qa_rows, rows_of):
    """One token a byte: <s>, then a turn is <|im_start|> role newline text <|im_end|> newline."""
    result = lab.run(train__steps=None, train__epochs=2)
    steps = rows_of(result.run_dir)[0]
    turn = sum(len(f"{role}\n\n") + 2 for role in ("user", "assistant"))
    tokens = sum(1 + turn + len(row["prompt"]) + len(row["completion"]) for row in qa_rows)
    targets = sum(len(row["completion"]) + 1 for row in qa_rows)
    assert [sum(row["num_tokens"] for row in half) for half in (steps[:4], steps[4:])] == [tokens, tokens]
    assert [sum(row["num_targets"] for row in half) for half in (steps[:4], steps[4:])] == [targets, targets]
    assert [row["epoch"] for row in steps] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]


def test_the_losses_are_those_of_an_independent_forward_pass(lab, rows_of):
    """Loss and evaluation before the first update, against NumPy in float64."""
    result = lab.run(train__steps=1, train__documents_per_step=12, data__eval=0.25, adapter__dropout=0)
    oracle = (softmax_oracle if lab.backend.name == "numpy" else llama_oracle)(lab.model)
    expected = []
    for documents in Data(lab.config(data__eval=0.25)).train_and_eval(Tokenizer(lab.model)):
        batches = [micro_batches(documents, [i], SequenceLayout(64), seed=0, step=0)[0] for i in range(len(documents))]
        total = sum(loss_of(oracle(batch, {}, 1.0), batch) for batch in batches)
        expected.append(total / sum(batch.num_targets for batch in batches))
    steps, evals = rows_of(result.run_dir)
    assert evals[0]["eval_targets"] == sum(batch.num_targets for batch in batches)
    assert steps[0]["num_targets"] > 3 * evals[0]["eval_targets"]
    assert [steps[0]["loss"], evals[0]["eval_loss"]] == pytest.approx(expected, abs=1e-5)


def test_with_message_weights_the_loss_is_the_weighted_mean(lab, write_rows, rows_of):
    """Loss and evaluation before the first update, against NumPy in float64."""
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}.", "weight": w}]}
        for i, w in enumerate([0.25, 1, 3, 0.5, 1, 2, 0.125, 1])
    ]
    lab.data = write_rows(rows, "weighted.jsonl")
    settings = {"train__documents_per_step": 6, "data__eval": 0.25, "adapter__dropout": 0, "data__packing": True}
    result = lab.run(train__steps=1, **settings)
    oracle = (softmax_oracle if lab.backend.name == "numpy" else llama_oracle)(lab.model)
    expected = []
    for documents in Data(lab.config(data__eval=0.25)).train_and_eval(Tokenizer(lab.model)):
        assert documents.has_message_weights
        batches = [micro_batches(documents, [i], SequenceLayout(64), seed=0, step=0)[0] for i in range(len(documents))]
        total = sum(loss_of(oracle(batch, {}, 1.0), batch) for batch in batches)
        expected.append(total / sum(batch.total_weight for batch in batches))
    steps, evals = rows_of(result.run_dir)
    assert [steps[0]["loss"], evals[0]["eval_loss"]] == pytest.approx(expected, abs=1e-5)


def test_the_run_directory_holds_what_is_documented_and_nothing_else(lab, rows_of):
    result = lab.run(train__steps=3, run__save_every=1, run__keep=2, data__eval=0.25)
    files = {path.relative_to(result.run_dir).as_posix() for path in result.run_dir.rglob("*") if path.is_file()}
    checkpoints = {
        f"checkpoints/step-0000000{step}/{name}" for step in (2, 3) for name in
        ("adapter.safetensors", "optimizer_m.safetensors", "optimizer_v.safetensors", "state.json", "MANIFEST.json")
    }  # fmt: skip
    adapter = {
        f"adapter/{name}" for name in
        ("adapter_config.json", "adapter_model.safetensors", "adapters.safetensors", "chat_template.jinja",
         "dualtune.json")
    }  # fmt: skip
    beside = {"config.yaml", "environment.json", "chat_template.jinja", "metrics.jsonl", "memory.csv", "lock",
              "report.html", "log.txt"}  # fmt: skip
    assert files == beside | checkpoints | adapter
    short = {"run__log_every": 1, "run__eval_every": 10}  # decided for so short a run, as the tokens of a step are
    assert load_config(result.run_dir / "config.yaml") == lab.config(
        train__steps=3, run__save_every=1, run__keep=2, data__eval=0.25, train__tokens_per_step=16384, **short
    )
    record = json.loads((result.adapter_dir / "dualtune.json").read_text())
    steps, evals = rows_of(result.run_dir)
    assert record["training"]["final_loss"] == steps[-1]["loss"]
    assert record["training"]["eval_loss"] == evals[-1]["eval_loss"]
    environment = json.loads((result.run_dir / "environment.json").read_text())
    assert environment["backend"] == lab.backend.name


def test_the_fingerprints_of_the_adapter_are_recomputed(lab):
    """What dualtune.json says about the base model is what the oracle computes without adapter."""
    result = lab.run(train__steps=3)
    found = json.loads((result.adapter_dir / "dualtune.json").read_text())["fingerprints"]
    oracle = (softmax_oracle if lab.backend.name == "numpy" else llama_oracle)(lab.model)
    adapter = read_adapter(result.adapter_dir)
    for which, tensors in (("base", {}), ("adapter", adapter.tensors)):
        for entry in found[which]:
            batch = random_batch([len(entry["tokens"])], 262)
            batch.tokens_BT[0] = entry["tokens"]
            expected = oracle(batch, tensors, adapter.spec.scale)[0, -1]
            assert [i for i, _ in entry["top"]] == np.argsort(-expected)[:5].tolist()
            assert [p for _, p in entry["top"]] == pytest.approx(expected[[i for i, _ in entry["top"]]], abs=2e-5)


# --- what is promised ------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_bitwise_the_same_adapter(lab, weights_of):
    first, second, other = (
        weights_of(lab.run(f"run{i}", run__seed=seed, adapter__dropout=0.2).run_dir) for i, seed in enumerate((1, 1, 2))
    )
    assert first == second != other


def test_the_micro_batch_does_not_change_the_losses(lab, rows_of):
    """With dropout too: its masks belong to tokens, not to micro-batches."""
    small, large = (
        rows_of(lab.run(f"run{tokens}", train__steps=6, train__micro_batch_tokens=tokens, adapter__dropout=0.3,
                        data__eval=0.25).run_dir)
        for tokens in (64, 4096)
    )  # fmt: skip
    for rows, others, key in zip(small, large, ("loss", "eval_loss"), strict=True):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in others], abs=1e-5)


def test_dropout_is_another_at_every_step(lab):
    """Two epochs of one step each: the same documents with other seeds, and the same seeds when asked again."""
    prepared = prepare(lab.config(train__documents_per_step=16, train__micro_batch_tokens=4096), lab.backend)
    first, second, again = (prepared.batches(step)[0] for step in (0, 1, 0))
    assert sorted(first.tokens_BT.tolist()) == sorted(second.tokens_BT.tolist())
    assert not set(first.dropout_seeds_BT[first.segments_BT > 0]) & set(second.dropout_seeds_BT[second.segments_BT > 0])
    assert first.dropout_seeds_BT.tolist() == again.dropout_seeds_BT.tolist()


def test_training_lowers_the_loss(lab):
    result = lab.run(train__steps=20, data__eval=0.25)
    assert result.eval_loss < result.eval_loss_before - 0.3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's overflows
@pytest.mark.parametrize(
    ("steps", "held_out", "rate", "message"),
    [
        (9, 0, 1e30, r"^6 steps in a row had a loss or gradient that is not finite; guards.nonfinite_limit is 5"),
        (3, 0, 1e39, r"^step 3: .* holds NaN or Inf\. Nothing was saved"),
        (1, 0.25, 1e39, r"^step 1: .* holds NaN or Inf\. Nothing was saved"),
        (1, 0, 1e30, r"^the log-probabilities after 'The capital of France is' are not finite"),
    ],
)
def test_numbers_that_are_not_finite_end_the_run_without_an_adapter(lab, steps, held_out, rate, message):
    settings = {"train__learning_rate": rate, "train__steps": steps, "data__eval": held_out}
    with pytest.raises(NonFiniteError, match=message) as caught:
        lab.run(train__max_grad_norm=None, **settings)
    assert caught.value.exit_code == 7
    assert not (lab.tmp_path / "run" / "adapter").exists()


def test_hooks_are_called_in_order(lab):
    recorder = Recorder()
    lab.run(hooks=[recorder], train__steps=3, data__eval=0.25, run__eval_every=2)
    batches = ("eval batch", 0, 1), ("eval batch", 1, 1)
    assert recorder.events == [
        ("start", 0, 3), *batches, ("eval", 0), ("step", 1), ("step", 2), *batches, ("eval", 2), ("step", 3), *batches,
        ("eval", 3), ("end",),
    ]  # fmt: skip


def test_a_directory_of_something_else_is_refused_and_left_alone(lab):
    directory = lab.tmp_path / "run"
    directory.mkdir()
    (directory / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"is not empty and holds no run\. Choose another with --set run\.dir"):
        lab.run()
    assert [path.name for path in directory.iterdir()] == ["thesis.txt"]


# --- continuing from an adapter --------------------------------------------------------------------------------------


def test_init_from_continues_where_the_adapter_stands(lab, rows_of):
    first = lab.run("first", train__steps=6, data__eval=0.25)
    second = lab.run("second", train__steps=3, data__eval=0.25, adapter__init_from=first.adapter_dir)
    evals = rows_of(second.run_dir)[1]
    assert evals[0]["eval_loss"] == pytest.approx(first.eval_loss, abs=1e-6)
    assert second.eval_loss < first.eval_loss
    weights = [load_file(result.adapter_dir / "adapter_model.safetensors") for result in (first, second)]
    assert weights[0].keys() == weights[1].keys()


def test_a_start_that_was_trained_on_other_weights_says_so(lab):
    first = lab.run("first", train__steps=1)

    def start():
        prepared = prepare(lab.config("second", adapter__init_from=first.adapter_dir), lab.backend)
        return next(line for line in summary(prepared) if line.startswith("start "))

    assert start() == f"start       {first.adapter_dir}, with a new optimizer"
    record = json.loads((file := first.adapter_dir / "dualtune.json").read_text())
    record["base"] |= {"name": "another", "weights_sha256": "0" * 64}
    file.write_text(json.dumps(record))
    assert start().endswith("; it was trained on other weights, those of another")


def test_init_optimizer_goes_on_as_if_the_run_had_not_ended(lab):
    """Another run, with another seed; a new one would begin with moments of zero."""
    first = lab.run("first", train__steps=3)
    second = lab.run("second", train__steps=1, train__learning_rate=1e-9, adapter__init_from=first.run_dir,
                     adapter__init_optimizer=True, train__weight_decay=0.5, train__max_grad_norm=None)  # fmt: skip
    before, after = (checkpoint.newest(result.run_dir / "checkpoints")[0].optimizer for result in (first, second))
    assert (before.step, after.step) == (3, 4)
    assert all((after.slots["v"][name] >= 0.99 * v).all() for name, v in before.slots["v"].items())
    rows = [json.loads(line) for line in (second.run_dir / METRICS).read_text().splitlines()]
    (note,) = [row["message"] for row in rows if row.get("event") == "found" and "optimizer" in row["message"]]
    assert note == f"continues with the optimizer of {first.run_dir}/checkpoints/step-00000003, after 3 updates" + (
        "; these of its constants have changed: weight_decay 0.5 instead of 0.01, max_grad_norm null instead of 0.3"
    )


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_init_optimizer_refuses_another_optimizer_and_weights_that_no_checkpoint_has(lab, wording):
    plain = lab.run("plain", train__steps=3).run_dir
    others = [{"train__average": "tail"}, {"train__schedule": "schedule_free"}]
    averaged = [(lab.run(name, train__steps=3, **keys).run_dir, keys) for name, keys in zip("ab", others, strict=True)]
    alone = shutil.copytree(plain / "adapter", lab.tmp_path / "alone" / "adapter")
    for start, keys in (*((plain, keys) for keys in ({"train__optimizer": "lion"}, *others)), *averaged, (alone, {})):
        with pytest.raises(ConfigError) as error:
            lab.run("second", adapter__init_from=start, adapter__init_optimizer=True, **keys)
        wording(str(error.value))
        assert not (lab.tmp_path / "second").exists()


def test_init_from_with_the_same_settings_in_any_order_is_accepted(lab):
    targets = ["mixer", "head"] if lab.backend.name == "numpy" else ["v_proj", "q_proj"]
    settings = {"adapter__rank": 3, "adapter__alpha": 5}
    first = lab.run("first", train__steps=1, adapter__targets=targets, **settings)
    options = {"adapter__init_from": first.adapter_dir, "adapter__targets": targets[::-1]}
    second = lab.run("second", train__steps=1, **options, **settings)
    adapters = [read_adapter(result.adapter_dir) for result in (first, second)]
    assert adapters[0].tensors.keys() == adapters[1].tensors.keys()
    assert adapters[0].spec == adapters[1].spec


def test_all_linear_does_not_extend_an_adapter_of_fewer_modules(lab):
    targets = ["mixer"] if lab.backend.name == "numpy" else ["q_proj"]
    first = lab.run("first", train__steps=1, adapter__targets=targets)
    with pytest.raises(ConfigError, match=r"the adapter does not fit the model .*: adapter: tensors missing"):
        lab.run("second", adapter__init_from=first.adapter_dir)
    assert not (lab.tmp_path / "second").exists()


def test_init_from_refuses_what_contradicts_the_adapter(lab):
    first = lab.run("first", train__steps=1)
    with pytest.raises(ConfigError) as caught:
        lab.run("second", adapter__init_from=first.adapter_dir, adapter__rank=8, adapter__alpha=9)
    rank, alpha, *_, advice = str(caught.value).splitlines()
    assert rank == "adapter.rank: got 8, but the adapter in adapter.init_from has 2"
    assert alpha.startswith("adapter.alpha: got 9.0, but the adapter in adapter.init_from has 4")
    assert advice == "Remove these keys, or set them to the adapter's values."
    assert not (lab.tmp_path / "second").exists()


def test_a_warmup_that_no_step_would_leave_is_refused(lab):
    """Also where the number of steps follows from the epochs."""
    with pytest.raises(ConfigError, match=r"train.warmup: got 8 steps, but the run has 8"):
        lab.run(train__steps=None, train__epochs=2, train__warmup=8)
    assert lab.run(train__steps=None, train__epochs=2, train__warmup=7).num_steps == 8


def test_hooks_end_in_their_order_also_after_a_failure(lab):
    ended = []

    class Named(Hook):
        def __init__(self, name, fails=False):
            self.name, self.fails = name, fails

        def on_step(self, record):
            if self.fails:
                raise KeyboardInterrupt

        def on_end(self):
            ended.append(self.name)

    with pytest.raises(KeyboardInterrupt):
        lab.run(hooks=[Named("first"), Named("second", fails=True)])
    assert ended == ["first", "second"]


def test_an_interrupt_names_what_is_kept_in_training_and_while_a_resumed_run_loads(lab, monkeypatch):
    class Impatient(Hook):
        def on_step(self, record):
            if record.step == 3:
                raise KeyboardInterrupt

    settings = {"train__steps": 4, "run__save_every": 2}
    kept = lab.tmp_path / "run" / "checkpoints" / "step-00000002"
    message = f"The newest checkpoint is {kept}. Run the same command again to continue."
    with pytest.raises(KeyboardInterrupt) as training:
        lab.run(hooks=[Impatient()], **settings)
    monkeypatch.setattr("dualtune.train.run.load_engine", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as loading:
        lab.run(**settings)
    assert training.value.args == loading.value.args == (message,)
    with pytest.raises(KeyboardInterrupt) as new:
        lab.run("new", **settings)
    assert new.value.args == ("There is no checkpoint yet: the same command starts again.",)
    assert not (lab.tmp_path / "new").exists()

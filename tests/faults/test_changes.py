"""What changed while a run was stopped: config, data, model, machine, version. Nothing is continued that would lie."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_v1"
REFUSED = "refused with both values, exit 2; nothing in the run directory changed"


def begun(box):
    """A run that ended in step 5, after the checkpoint of step 4."""
    box.settings["data.eval"] = 0
    box.stop(5)


def refused(box) -> list[str]:
    """The lines about a resume that is refused; it leaves everything but the note in the lock as it was."""

    def content():
        return {path: path.read_bytes() for path in box.dir.rglob("*") if path.is_file() and path.name != "lock"}

    before = content()
    title, *lines = box.resume(2).stderr.splitlines()[-20:]
    while "cannot resume: the values marked as forbidden have changed." not in title:
        title, *lines = lines
    assert content() == before
    return [" ".join(line.split()) for line in lines]


@pytest.mark.fault(
    row=32,
    fault="resume with a free key changed",
    injection="`run.log_every`, `run.save_every`, `run.keep`, `run.eval_every`",
    expected="silent; adapter bitwise equal",
)
def test_free_keys_change_in_silence(box):
    straight = (begun(box), box.straight())[1]
    box.settings |= {"run.log_every": 3, "run.save_every": 4, "run.keep": 2, "run.eval_every": 5}
    said = box.resume().stdout
    assert "changed" not in said and not box.events("config_changed")
    assert box.adapter == straight


@pytest.mark.fault(
    row=32,
    fault="resume with a recorded key changed",
    injection="learning rate, schedule, steps, weight decay, dropout, guards",
    expected="a table on the screen, config_changed in metrics.jsonl, the run goes on",
)
@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("train.learning_rate", 0.005, ("0.01", "0.005")),
        ("train.schedule", "linear", ("cosine", "linear")),
        ("train.steps", 12, ("9", "12")),
        ("train.weight_decay", 0.5, ("0.01", "0.5")),
        ("adapter.dropout", 0.1, ("0.3", "0.1")),
        ("guards.on_spike", "ignore", ("warn", "ignore")),
    ],
)
def test_recorded_keys_are_said_and_written_down(box, key, value, shown):
    begun(box)
    box.settings[key] = value
    said = box.resume().stdout
    (event,) = box.events("config_changed")
    assert event["changes"] == [{"key": key, "before": shown[0], "now": shown[1]}]
    assert [key, *shown, "recorded"] in [line.split()[-4:] for line in said.splitlines()]
    assert box.losses()[-1][0] == box.settings["train.steps"]


@pytest.mark.fault(
    row=32,
    fault="resume with a forbidden key changed",
    injection="rank, alpha, targets, max_length, loss_on, documents_per_step, optimizer, seed",
    expected="a table of checkpoint and now, exit 2; nothing in the run directory changed",
)
def test_forbidden_keys_are_refused_in_a_table(box):
    begun(box)
    changed = {
        "adapter.rank": 4, "adapter.alpha": 8, "adapter.targets": ["head"], "data.max_length": 60,
        "data.loss_on": "all", "train.documents_per_step": 8, "train.optimizer": "sgd",
        "run.seed": 2,
    }  # fmt: skip
    box.settings |= changed
    lines = refused(box)
    assert lines[1 : len(changed) + 1] == [
        "adapter.rank 2 4 forbidden",
        "adapter.alpha 4.0 8.0 forbidden",
        'adapter.targets all-linear ["head"] forbidden',
        "data.max_length 64 60 forbidden",
        "data.loss_on assistant all forbidden",
        "train.documents_per_step 4 8 forbidden",
        "train.optimizer adamw sgd forbidden",
        "run.seed 1 2 forbidden",
    ]
    assert (
        lines[-1] == "Restore these values, or start a new run in another directory: --run-dir DIR or --set run.dir=DIR"
    )


@pytest.mark.fault(
    row=33,
    fault="resume with changed data",
    injection="a line appended, one changed, one removed, two swapped; the evaluation file changed",
    expected=REFUSED,
)
@pytest.mark.parametrize("how", ["appended", "changed", "removed", "swapped", "eval"])
def test_other_data_are_refused(box, how, qa_rows, write_rows):
    box.settings["data.eval"] = write_rows(qa_rows[:4], "eval.jsonl")
    box.stop(5)
    row = {"prompt": "a", "completion": "b"}
    rows = {
        "appended": [*qa_rows, row],
        "changed": [row, *qa_rows[1:]],
        "removed": qa_rows[:-1],
        "swapped": [qa_rows[1], qa_rows[0], *qa_rows[2:]],
        "eval": [row, *qa_rows[1:4]],
    }[how]
    write_rows(rows, "eval.jsonl" if how == "eval" else "train.jsonl")
    (header, line, advice, other_data) = refused(box)
    name, counts = ("eval documents", (4, 4)) if how == "eval" else ("train documents", (16, len(rows)))
    assert header == "checkpoint now"
    before, now = (f"{count} documents, sha256 " for count in counts)
    assert line.startswith(f"{name} {before}") and now in line[len(name) + len(before) :]
    assert line.endswith("forbidden")
    assert (
        advice
        == "Restore the previous files, or start a new run in another directory: --run-dir DIR or --set run.dir=DIR"
    )
    assert other_data.endswith(f": --set adapter.init_from={box.dir / 'adapter'} --set run.dir=DIR")


@pytest.mark.fault(
    row=16,
    fault="resume on another base model of the same shape, or with another tokenizer",
    injection="one weight changed; two tokens of the tokenizer swapped; a key added to config.json",
    expected=REFUSED,
)
@pytest.mark.parametrize("what", ["base model's weights", "tokenizer", "base model's config"])
def test_another_model_under_the_same_name_is_refused(box, what):
    model = box.settings["model.name"] = shutil.copytree(box.settings["model.name"], box.home / "model")
    begun(box)
    if what == "tokenizer":
        table = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = table["model"]["vocab"]
        vocab["Q"], vocab["Z"] = vocab["Z"], vocab["Q"]  # in no row: the documents stay the same
        (model / "tokenizer.json").write_text(json.dumps(table), encoding="utf-8")
    elif what == "base model's config":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    else:
        tensors = load_file(model / "model.safetensors")
        tensors["head.weight"][0, 0] = np.nextafter(tensors["head.weight"][0, 0], np.float32(9))
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
    _, *lines, _ = refused(box)
    names = [what, "base model's tensors"] if what == "base model's weights" else [what]
    for name, line in zip(names, lines, strict=True):
        assert line.startswith(f"{name} sha256 ")
        assert line.count("sha256 ") == 2


@pytest.mark.fault(
    row=34,
    fault="resume with another micro-batch size",
    injection="64 tokens before, 4096 after, and the other way round",
    expected="allowed, in silence: the losses are those of the run that stayed, to rounding",
)
@pytest.mark.parametrize("sizes", [(64, 4096), (4096, 64)])
@pytest.mark.parametrize("box", ["numpy", "cpu"], indirect=True)
def test_another_micro_batch_changes_no_loss(box, sizes):
    box.settings["train.micro_batch_tokens"] = sizes[0]
    begun(box)
    box.straight()
    box.settings["train.micro_batch_tokens"] = sizes[1]
    box.resume()
    lines = (box.home / "ref" / "metrics.jsonl").read_text().splitlines()
    expected = [row["loss"] for row in map(json.loads, lines) if "lr" in row]
    assert [loss for _, loss in box.losses()] == pytest.approx(expected, abs=1e-5)
    assert not box.events("config_changed")


# --- other versions --------------------------------------------------------------------------------------------------


@pytest.fixture
def old(box):
    """The run from which tests/golden/checkpoint_v1 was saved, with that checkpoint in place."""
    box.settings |= {"adapter.dropout": 0, "data.eval": 0, "train.steps": 6, "run.save_every": 3, "run.eval_every": 100}
    del box.settings["train.micro_batch_tokens"]
    shutil.copytree(GOLDEN, box.dir / "checkpoints" / "step-00000003")
    return box


@pytest.mark.fault(
    row=48,
    fault="checkpoint of an older schema",
    injection="tests/golden/checkpoint_v1, written by version 1",
    expected="read and continued; adapter bitwise equal to a run of today's code",
)
def test_a_checkpoint_of_schema_1_is_continued(old):
    said = old.resume().stdout
    assert "after step 3, from" in said
    (event,) = old.events("config_changed")  # the paths of model and data
    assert [change["key"] for change in event["changes"]] == ["model.name", "data.train"]
    assert old.adapter == old.straight()


def test_an_older_checkpoint_is_one_of_adamw(old):
    """Its config has no train.optimizer, and its files are AdamW's."""
    old.settings["train.optimizer"] = "sgd"
    assert "train.optimizer adamw sgd forbidden" in refused(old)


@pytest.mark.fault(
    row=48,
    fault="checkpoint of a newer schema",
    injection="`schema_version: 99` in the manifest",
    expected="refused, exit 6: which version it has, which are read, what to do",
)
def test_a_checkpoint_of_a_newer_schema_is_refused(old):
    path = old.dir / "checkpoints" / "step-00000003"
    manifest = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps(manifest | {"schema_version": 99}))
    complaint = old.resume(6).stderr
    assert (
        f"{path}: was written by a newer dualtune: it has schema version 99, this one reads up to 4. Upgrade dualtune"
        in complaint
    )
    assert json.loads((path / "MANIFEST.json").read_text())["schema_version"] == 99

"""The journey: train on one backend, pack, unpack where nothing else is the same, continue on the other backend."""

import json
import shutil

import pytest

from dualtune.engine.testing.tolerances import RESUMED_LOSS
from dualtune.show.run import run
from dualtune.train.hooks import Hook
from dualtune.use.transfer.bundles.bundle import unpack
from dualtune.use.transfer.bundles.pack import pack

RUN = {"train.steps": 12, "data.eval": 0.25, "run.save_every": 2, "run.eval_every": 3, "adapter.dropout": 0.3,
       "train.learning_rate": 1e-3, "train.micro_batch_tokens": 64, "model.dtype": "float32"}  # fmt: skip


class Stop(Hook):
    def on_step(self, record):
        if record.step == 6:
            raise KeyboardInterrupt


def losses(*run_dirs):
    """step -> loss, and step -> evaluation loss; of several directories, the later ones count."""
    rows = [json.loads(line) for path in run_dirs for line in (path / "metrics.jsonl").read_text().splitlines()]
    return tuple({row["step"]: row[key] for row in rows if key in row} for key in ("loss", "eval_loss"))


@pytest.mark.parametrize(("first", "second"), [("mlx", "torch"), ("torch", "mlx")])
def test_an_unpacked_run_goes_on_on_the_other_backend(
    first, second, open_backend, make_config, write_rows, qa_rows, tiny_llama, dualtune_main, tmp_path
):
    """Killed after step 5 on one, continued by the command that unpack prints on the other: every loss is that of the
    run that was never stopped. Model and data have other places there, and the old ones are gone."""
    open_backend(second)
    data, here, there = write_rows(qa_rows), tmp_path / "here", tmp_path / "another machine"
    model = shutil.copytree(tiny_llama, here / "model")
    straight = run(make_config(data, RUN | {"run.dir": tmp_path / "straight"}, tiny_llama), open_backend(first))
    with pytest.raises(KeyboardInterrupt):
        run(make_config(data, RUN | {"run.dir": here / "run"}, model), open_backend(first), [Stop()])
    pack(here / "run", tmp_path / "carried.tar")
    begun = (here / "run" / "metrics.jsonl").read_bytes()

    there.mkdir()
    data.rename(there / "rows.jsonl")
    shutil.move(here / "model", there / "llama")
    shutil.rmtree(here)
    report = unpack(tmp_path / "carried.tar", there / "run")
    assert (report.bundle.step, report.bundle.relocate) == (4, ("data.train", "model.name"))
    done = dualtune_main(
        "train", there / "run" / "config.yaml", "--set", f"run.dir={there / 'run'}", "--platform",
        "cpu" if second == "torch" else second, "--set", f"data.train={there / 'rows.jsonl'}",
        "--set", f"model.name={there / 'llama'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (there / "begun").mkdir()
    (there / "begun" / "metrics.jsonl").write_bytes(begun)
    found, expected = losses(there / "begun", there / "run"), losses(straight.run_dir)
    assert losses(there / "run")[0].keys() == {*range(5, 13)}  # nothing was trained twice
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() and len(theirs) >= 4
        assert ours == pytest.approx(theirs, abs=RESUMED_LOSS)
    saved = there / "run" / "checkpoints" / "step-00000012" / "state.json"
    assert json.loads(saved.read_text())["optimizer_step"] == 12

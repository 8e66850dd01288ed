"""A run that moves: to another backend, another machine's paths, another micro-batch. And what may not come along."""

import json
import shutil
from pathlib import Path

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config.schema import Config, HybridConfig, PreferenceConfig
from dualtune.engine.testing.tolerances import RESUMED_LOSS
from dualtune.show.run import run
from dualtune.train.hooks import Hook
from dualtune.train.state.resume import RULES

RUN = {"train__steps": 12, "data__eval": 0.25, "run__save_every": 2, "run__eval_every": 3, "adapter__dropout": 0.3,
       "train__learning_rate": 1e-3, "train__micro_batch_tokens": 64}  # fmt: skip


class Stop(Hook):
    def on_step(self, record):
        if record.step == 5:
            raise KeyboardInterrupt


# What the loop does, whatever the engine: the NumPy engine here, torch in `make test-long`.
by_the_loop = pytest.mark.parametrize("lab", ["numpy", pytest.param("torch", marks=pytest.mark.long)], indirect=True)


@pytest.fixture
def begun(lab):
    """A run that was killed in its sixth step; its newest checkpoint is of step 4."""

    def begin(name="run", backend=None, **settings):
        with pytest.raises(KeyboardInterrupt):
            run(lab.config(name, **RUN | settings), backend or lab.backend, [Stop()])

    return begin


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
@pytest.mark.parametrize(("first", "second"), [("torch", "mlx"), ("mlx", "torch")])
def test_a_run_goes_on_on_another_backend(lab, begun, open_backend, rows_of, first, second):
    """With dropout, accumulation and the optimizer's state: the losses are those of the run that stayed, in float32."""
    settings = {"model__dtype": "float32"}
    straight = run(lab.config("straight", **RUN | settings), open_backend(first))
    begun(backend=open_backend(first), **settings)
    moved = run(lab.config(**RUN | settings), open_backend(second))
    here, there = rows_of(moved.run_dir), rows_of(straight.run_dir)
    assert [row["step"] for row in here[0]] == list(range(1, 13))
    for rows, others, key in zip(here, there, ("loss", "eval_loss"), strict=True):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in others], abs=RESUMED_LOSS)
    # Without AdamW's moments the same continuation is further away: the tolerance can tell.
    state = moved.run_dir / "checkpoints" / "step-00000012" / "state.json"
    assert json.loads(state.read_text())["optimizer_step"] == 12


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_the_tolerance_can_tell_whether_the_optimizer_came_along(lab, begun, rows_of, monkeypatch):
    straight = lab.run("straight", **RUN)
    begun()
    monkeypatch.setattr("dualtune_torch.engine.TorchEngine.load_optimizer_state", lambda self, state: None)
    forgetful = lab.run(**RUN)
    here, there = (rows_of(result.run_dir)[0] for result in (forgetful, straight))
    gaps = [abs(a["loss"] - b["loss"]) for a, b in zip(here, there, strict=True)]
    assert max(gaps) > 10 * RESUMED_LOSS


def test_another_micro_batch_takes_the_same_samples(lab, begun, rows_of):
    straight = lab.run("straight", **RUN)
    begun()
    moved = lab.run(**RUN | {"train__micro_batch_tokens": 4096})
    for rows, others in zip(rows_of(moved.run_dir), rows_of(straight.run_dir), strict=True):
        for row, other in zip(rows, others, strict=True):
            key = "loss" if "loss" in row else "eval_loss"
            assert row[key] == pytest.approx(other[key], abs=RESUMED_LOSS)
            assert row.get("num_tokens") == other.get("num_tokens")


@by_the_loop
def test_a_run_goes_on_in_another_place(lab, begun, weights_of, tmp_path):
    """The run directory, the data and the model are copied to where another machine has them."""
    straight = lab.run("straight", **RUN)
    begun()
    there = tmp_path / "another machine"
    shutil.copytree(lab.tmp_path / "run", there / "run")
    shutil.copytree(lab.model, there / "model")
    shutil.copy(lab.data, there / "rows.jsonl")
    shutil.rmtree(lab.tmp_path / "run")
    moved = {"model__name": there / "model", "data__train": there / "rows.jsonl", "run__dir": there / "run"}
    result = lab.run(**RUN | moved)
    assert weights_of(result.run_dir) == weights_of(straight.run_dir)
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    changed = next(row["changes"] for row in rows if row.get("event") == "config_changed")
    assert [(change["key"], change["now"]) for change in changed] == [
        ("model.name", str(there / "model")), ("data.train", str(there / "rows.jsonl")),
    ]  # fmt: skip


@by_the_loop
def test_a_checkpoint_is_continued_in_another_run_directory(lab, begun, weights_of, rows_of):
    straight = lab.run("straight", **RUN)
    begun()
    source = lab.tmp_path / "run"
    before = sorted(source.rglob("*"))
    for name, given in (("from run", source), ("from checkpoint", source / "checkpoints" / "step-00000002")):
        result = lab.run(name, resume=str(given), **RUN)
        assert weights_of(result.run_dir) == weights_of(straight.run_dir)
        first = {"from run": 5, "from checkpoint": 3}[name]
        assert [row["step"] for row in rows_of(result.run_dir)[0]] == list(range(first, 13))
    assert sorted(source.rglob("*")) == before


@by_the_loop
def test_going_back_sets_the_later_checkpoints_aside(lab, weights_of):
    result = lab.run(**RUN | {"run__keep": 9})
    weights = weights_of(result.run_dir)
    shutil.rmtree(result.adapter_dir)
    again = lab.run(resume=str(result.run_dir / "checkpoints" / "step-00000006"), **RUN | {"run__keep": 9})
    assert weights_of(again.run_dir) == weights
    aside = sorted(path.name for path in (again.run_dir / "checkpoints").glob("*.old-1"))
    assert aside == [f"step-{step:08d}.old-1" for step in (8, 9, 10, 12)]


@pytest.mark.parametrize("given", ["nowhere", "model"])
def test_a_path_without_a_checkpoint_is_refused(lab, given):
    with pytest.raises(ConfigError, match="which holds no checkpoint; allowed: auto, never, or the path of"):
        lab.run(resume=str(lab.model if given == "model" else lab.tmp_path / "nowhere"), **RUN)


@by_the_loop
def test_never_wants_a_new_directory(lab):
    lab.run("new", resume="never", train__steps=2)
    with pytest.raises(ConfigError, match="already holds a run, and --resume never does not resume it"):
        lab.run("new", resume="never", train__steps=2)


# --- what may not change ---------------------------------------------------------------------------------------------


def test_a_key_without_a_rule_is_forbidden():
    keys = {
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in field.annotation.model_fields
    }  # fmt: skip
    assert RULES.keys() < keys
    assert keys - RULES.keys() == {
        "model.quantization", "model.init", "adapter.method", "adapter.rank", "adapter.alpha", "adapter.scaling",
        "adapter.init", "adapter.layers", "adapter.rank_pattern", "adapter.alpha_pattern", "adapter.train_modules",
        "adapter.train_rows", "adapter.experts", "adapter.bias", "data.new_tokens", "data.new_special_tokens",
        "adapter.targets", "data.max_length", "data.loss_on", "train.tokens_per_step", "train.documents_per_step",
        "train.optimizer", "train.average", "train.policy", "train.objective", "run.seed",
        *(f"preference.{key}" for key in PreferenceConfig.model_fields),
        "adapter.merge_for", "adapter.master_weights",
        "distill.divergence", "distill.beta", "distill.temperature", "distill.sft_weight",
        "distill.teacher_quantization", "distill.teacher_system", "distill.hint", "distill.top_k",
        *(f"hybrid.{key}" for key in HybridConfig.model_fields if key not in ("gate", "offload")),
    }  # fmt: skip


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_dedup_may_change_where_there_are_no_duplicates(lab, begun):
    begun()
    train = Path(lab.config(**RUN).data.train)
    resumed = lab.run(**RUN | {"data__dedup": "exact"})
    assert any("data.dedup" in line for line in (resumed.run_dir / "metrics.jsonl").read_text().splitlines())
    begun("other")
    rows = train.read_text().splitlines(keepends=True)
    train.write_text("".join([*rows, rows[0]]))
    with pytest.raises(ConfigError, match="train documents"):
        lab.run("other", **RUN)
    assert lab.run("other", **RUN | {"data__dedup": "exact"}).num_steps == 12


@by_the_loop
def test_documents_in_another_order_are_refused(lab, begun, monkeypatch):
    """As they would be if another NumPy drew another permutation from the same seed."""
    begun()
    from dualtune.data.order import Order

    step = Order.step
    monkeypatch.setattr(Order, "step", lambda self, index: step(self, index + 1))
    with pytest.raises(ConfigError, match="the next step would use other documents"):
        lab.run(**RUN)

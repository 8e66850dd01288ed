"""A run without steps left: another config is applied, refused by name, or said to make no difference."""

import re

import pytest
import yaml

from dualtune.base.errors import ConfigError
from dualtune.show.run import run

RUN = {"train__steps": 4, "train__schedule": "constant", "data__eval": 0.25, "run__eval_every": 2, "run__save_every": 2}
EARLY = RUN | {"train__steps": 9, "guards__early_stopping": 1, "train__learning_rate": 5.0}

numpy = pytest.mark.parametrize("lab", ["numpy"], indirect=True)


def content(directory):
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file() and p.name != "lock"}


@pytest.fixture
def refusal(lab):
    """The lines with which a finished run answers a change; it leaves the run as it was."""

    def refuse(base=RUN, resume="auto", **changes) -> list[str]:
        if not (lab.tmp_path / "run").exists():
            lab.run(**base)
        before = content(lab.tmp_path / "run")
        with pytest.raises(ConfigError) as caught:
            lab.run(resume=resume, **base | changes)
        assert content(lab.tmp_path / "run") == before
        return str(caught.value).splitlines()

    return refuse


CHANGES = {
    "train__learning_rate": 0.02, "train__schedule": "linear", "train__warmup": 2, "train__weight_decay": 0.5,
    "train__max_grad_norm": None, "train__micro_batch_tokens": 128, "train__steps": 3, "adapter__dropout": 0.1,
    "data__packing": False, "guards__on_spike": "ignore", "guards__restore_best": True,
}  # fmt: skip
ON_TORCH = {"model__dtype": "float32", "model__kernels": "reference"}


@numpy
def test_a_finished_run_refuses_another_value_in_a_table(refusal):
    for key, value in CHANGES.items():
        is_refused_by_name(refusal(**{key: value}), key)


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_a_finished_run_on_torch_refuses_another_dtype_and_other_kernels(refusal):
    for key, value in ON_TORCH.items():
        is_refused_by_name(refusal(**{key: value}), key)


def is_refused_by_name(lines, key):
    assert "the run is finished, so these values would have no effect: 4 steps are done" in lines[0]
    assert lines[1].split() == ["finished", "now"]
    assert lines[2].split()[0] == key.replace("__", ".") and "no effect" not in lines[2]
    assert lines[3].startswith("Nothing was changed. Options:")


@numpy
def test_the_table_also_lists_what_makes_no_difference(refusal):
    lines = refusal(train__learning_rate=0.5, run__log_every=3)
    assert [line.split() for line in lines[2:4]] == [
        ["train.learning_rate", "0.01", "0.5"],
        ["run.log_every", "1", "3", "no", "effect"],
    ]


@numpy
def test_keys_that_only_watch_are_said_to_have_no_effect(lab):
    lab.run(**RUN)
    again = lab.run(**RUN | {"run__log_every": 3, "run__eval_every": 3, "run__keep": 9})
    assert again.was_finished
    assert [change.what for change in again.without_effect] == ["run.log_every", "run.eval_every", "run.keep"]


@numpy
def test_the_same_data_under_another_name_make_no_difference(lab):
    lab.run(**RUN)
    lab.data = lab.data.rename(lab.tmp_path / "moved.jsonl")
    again = lab.run(**RUN)
    assert again.was_finished and [change.what for change in again.without_effect] == ["data.train"]


@numpy
def test_another_weight_of_the_same_data_is_refused(refusal, lab):
    (line,) = refusal(data__train=[{"path": str(lab.data), "weight": 2.5}])
    assert "the weight of a source has changed" in line


@numpy
def test_the_same_number_of_steps_in_epochs_makes_no_difference(lab):
    lab.run(**RUN | {"train__steps": 3})  # 12 documents, 4 a step
    again = lab.run(**RUN | {"train__steps": None, "train__epochs": 1})
    assert again.was_finished and {change.what for change in again.without_effect} == {"train.steps", "train.epochs"}


@numpy
def test_more_steps_continue(lab):
    lab.run(**RUN)
    again = lab.run(**RUN | {"train__steps": 6, "train__learning_rate": 0.5})
    assert not again.was_finished and again.num_steps == 6


@numpy
def test_fewer_steps_than_a_stopped_run_has_made_are_refused(lab, refusal, wording):
    class Crash(BaseException):
        pass

    from dualtune.train.hooks import Hook

    class Stop(Hook):
        def on_step(self, record):
            if record.step == 7:
                raise Crash

    with pytest.raises(Crash):
        lab.run(hooks=[Stop()], **RUN | {"train__steps": 9})
    lines = refusal(train__steps=5)
    assert lines[2].split() == ["train.steps", "9", "5"]
    wording(lines[0])
    assert lab.run(**RUN | {"train__steps": 6}).num_steps == 6


@numpy
def test_a_last_checkpoint_without_an_adapter_does_not_take_other_values(lab, refusal):
    """Killed between the last save and the adapter: there is no step left either."""
    lab.run(**RUN)
    (lab.tmp_path / "run" / "adapter").rename(lab.tmp_path / "gone")
    refusal(train__learning_rate=0.5)
    assert not lab.run(**RUN).was_finished


@numpy
@pytest.mark.parametrize("save_every", [2, None])
def test_a_run_that_stopped_early_refuses_another_learning_rate(lab, refusal, save_every):
    base = EARLY | {"run__save_every": save_every}
    stopped = lab.run(**base)
    assert stopped.num_steps < 9
    lines = refusal(base, train__weight_decay=0.5)
    assert lines[2].split()[0] == "train.weight_decay"


@numpy
@pytest.mark.parametrize("base", [RUN, EARLY], ids=["finished", "stopped early"])
@pytest.mark.parametrize(
    "way", ["start a new run with these values", "continue with these values", "keep the run as it is"]
)
def test_each_way_that_is_shown_works(lab, refusal, base, way):
    changed = {"train__weight_decay": 0.5}
    lines = refusal(base, **changed)
    (shown,) = [line for line in lines if way in line]
    if way == "keep the run as it is":
        assert lab.run(**base).was_finished
        return
    resume = "never" if "--resume never" in shown else "auto"
    overrides = {key.replace(".", "__"): yaml.safe_load(v) for key, v in re.findall(r"--set (\S+)=(\S+)", shown)}
    again = run(lab.config(**base | changed | overrides), lab.backend, resume=resume)
    assert not again.was_finished
    assert (again.run_dir == lab.tmp_path / "run") == (way == "continue with these values")
    assert "weight_decay: 0.5" in (again.run_dir / "config.yaml").read_text()

"""Stopped runs that go on: bitwise the same adapter, every step once, and nothing continued that should not be."""

import hashlib
import json

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.data.order import Order
from dualtune.model.optimizer import OPTIMIZERS
from dualtune.train.hooks import Hook
from dualtune.train.prepare import prepare
from dualtune.train.state import checkpoint
from dualtune.train.state.resume import LENGTH, RULES, WITHOUT_EFFECT

pytestmark = pytest.mark.covering(1)

# What the loop does, whatever the engine: the NumPy engine here, torch in `make test-long`.
by_the_loop = pytest.mark.parametrize("lab", ["numpy", pytest.param("torch", marks=pytest.mark.long)], indirect=True)

RUN = {
    "train__micro_batch_tokens": 64,
    "train__steps": 9,
    "data__eval": 0.25,
    "run__save_every": 2,
    "run__eval_every": 3,
}


class Crash(BaseException):
    """What a hook raises to end a run as if it were killed: an Exception would only be reported."""


class Stop(Hook):
    """Crashes when a step has been logged, or in the middle of an evaluation."""

    def __init__(self, step: int, during: str = "step") -> None:
        self._step, self._during, self._seen = step, during, 0

    def on_step(self, record):
        self._seen = record.step
        if self._during == "step" and record.step == self._step:
            raise Crash

    def on_eval_batch(self, done, total):
        if self._during == "eval" and self._seen == self._step:
            raise Crash


@pytest.fixture
def stopped(lab):
    """Run until a step, and fail there."""

    def stop(name, step, during="step", **settings):
        with pytest.raises(Crash):
            lab.run(name, [Stop(step, during)], **settings)
        assert not (lab.tmp_path / name / "adapter").exists()

    return stop


def untimed(rows):
    measured = ("time", "step_s", "tokens_per_s", "documents_per_min", "peak_bytes")
    return [{key: value for key, value in row.items() if key not in measured} for row in rows]


@pytest.mark.parametrize("lab", ["numpy", "torch", "mlx"], indirect=True)
@pytest.mark.parametrize(
    ("dropout", "optimizer"),
    [
        (0.3, "adamw"), (0.3, "adamw_8bit"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((0, "adamw"), (0.3, "sgd"))),
    ],
)  # fmt: skip
def test_resume_is_bitwise(lab, stopped, weights_of, rows_of, dropout, optimizer):
    settings = RUN | {"adapter__dropout": dropout, "train__optimizer": optimizer}
    settings |= {"sgd": {"train__learning_rate": 0.5}, "adamw_8bit": {"adapter__init": "pissa"}}.get(optimizer, {})
    straight = lab.run("straight", **settings)
    stopped("stopped", 5, **settings)
    saved = checkpoint.read(lab.tmp_path / "stopped" / "checkpoints" / "step-00000004")
    assert (saved.optimizer.step, [*saved.optimizer.slots]) == (4, [*OPTIMIZERS[optimizer].slots])
    resumed = lab.run("stopped", **settings)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    for found, expected in zip(rows_of(resumed.run_dir), rows_of(straight.run_dir), strict=True):
        assert untimed(found) == untimed(expected)
    records = [json.loads((result.adapter_dir / "dualtune.json").read_text()) for result in (resumed, straight)]
    assert records[0]["fingerprints"] == records[1]["fingerprints"]
    assert records[0]["training"]["final_loss"] == records[1]["training"]["final_loss"]


@by_the_loop
def test_resume_takes_up_after_the_newest_checkpoint(lab, stopped):
    class Info(Hook):
        def on_start(self, info):
            self.first_step = info.first_step

    stopped("run", 5, **RUN)
    hook = Info()
    lab.run(hooks=[hook], **RUN)
    assert hook.first_step == 4


@by_the_loop
@pytest.mark.parametrize(
    ("step", "during"),
    [(1, "step"), (3, "eval"), (6, "eval"), (7, "step"), (9, "eval")],
    ids=["before the first checkpoint", "in an evaluation", "between checkpoint and evaluation", "after both",
         "in the last evaluation"],
)  # fmt: skip
def test_wherever_a_run_stops_no_row_is_lost_and_none_is_there_twice(lab, stopped, weights_of, rows_of, step, during):
    straight = lab.run("straight", **RUN)
    stopped("run", step, during, **RUN)
    resumed = lab.run("run", **RUN)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    for found, expected in zip(rows_of(resumed.run_dir), rows_of(straight.run_dir), strict=True):
        assert untimed(found) == untimed(expected)


@by_the_loop
def test_a_row_that_was_cut_when_the_run_was_killed_is_dropped(lab, stopped, rows_of):
    stopped("run", 5, **RUN)
    with (lab.tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "epo')
    steps, evals = rows_of(lab.run(**RUN).run_dir)
    assert [row["step"] for row in steps] == list(range(1, 10))
    assert [row["step"] for row in evals] == [0, 3, 6, 9]


@by_the_loop
def test_resume_with_another_config_is_refused_with_a_table(lab, stopped):
    stopped("run", 3, **RUN)
    before = {path: path.read_bytes() for path in (lab.tmp_path / "run").rglob("*") if path.is_file()}
    changes = {"adapter__rank": 3, "run__seed": 2, "data__max_length": 60, "train__learning_rate": 0.5, "run__keep": 9}
    with pytest.raises(ConfigError) as caught:
        lab.run(**RUN | changes)
    title, *rows, advice = str(caught.value).splitlines()
    assert title.endswith("step-00000002: cannot resume: the values marked as forbidden have changed.")
    assert [row.split() for row in rows] == [
        ["checkpoint", "now"],
        ["adapter.rank", "2", "3", "forbidden"],
        ["data.max_length", "64", "60", "forbidden"],
        ["train.learning_rate", "0.01", "0.5", "recorded"],
        ["run.seed", "1", "2", "forbidden"],
    ]
    assert advice.startswith("Restore these values")
    assert caught.value.exit_code == 2
    after = {path: path.read_bytes() for path in (lab.tmp_path / "run").rglob("*") if path.is_file()}
    assert {p: d for p, d in after.items() if p.name != "lock"} == {p: d for p, d in before.items() if p.name != "lock"}


@by_the_loop
def test_a_checkpoint_without_the_scaling_is_one_of_the_standard_scaling(lab, stopped, weights_of):
    """As every checkpoint that is older than the key: the standard scale continues it, another one is refused."""
    straight = lab.run("straight", **RUN)
    stopped("run", 3, **RUN)
    for file in (lab.tmp_path / "run" / "checkpoints").glob("*/state.json"):
        state = json.loads(file.read_text())
        for key in ("scaling", "method", "init"):
            del state["config"]["adapter"][key]
        file.write_text(json.dumps(state))
        seal(file)
    with pytest.raises(ConfigError, match=r"adapter\.scaling +standard +rank_stabilized +forbidden"):
        lab.run(**RUN | {"adapter__scaling": "rank_stabilized"})
    with pytest.raises(ConfigError, match=r"adapter\.init +kaiming +normal +forbidden"):
        lab.run(**RUN | {"adapter__init": "normal"})
    assert weights_of(lab.run(**RUN).run_dir) == weights_of(straight.run_dir)


@by_the_loop
def test_an_older_run_over_a_directory_goes_on_with_its_valid_file(lab, stopped, weights_of):
    """It recorded 0.1 for the default of data.eval, whoever wrote it, and evaluated on the valid file."""
    lab.data.rename(lab.tmp_path / "train.jsonl")
    lines = (lab.tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    lab.data = lab.tmp_path / "set"
    lab.data.mkdir()
    (lab.data / "train.jsonl").write_text("".join(lines))
    (lab.data / "valid.jsonl").write_text("".join(lines[:3]))
    settings = RUN | {"data__eval": "auto"}
    straight = lab.run("straight", **settings)
    stopped("run", 3, **settings)
    for file in (lab.tmp_path / "run" / "checkpoints").glob("*/state.json"):
        state = json.loads(file.read_text())
        for key in ("roles", "consecutive", "system"):
            del state["config"]["data"][key]
        state["config"]["data"]["eval"] = 0.1
        file.write_text(json.dumps(state))
        seal(file)
    saved, _ = checkpoint.newest(lab.tmp_path / "run" / "checkpoints")
    for share in (0.1, "auto"):
        resumed = prepare(lab.config(**settings | {"data__eval": share}), lab.backend, saved).resumed
        assert [change for change in resumed.changes if change.what.startswith("data.")] == []
    assert weights_of(lab.run(**settings | {"data__eval": 0.1}).run_dir) == weights_of(straight.run_dir)


def seal(file):
    """Write the manifest's size and sha256 of a file that was changed."""
    manifest = file.with_name("MANIFEST.json")
    table = json.loads(manifest.read_text())
    data = file.read_bytes()
    table["files"][file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(table))


def test_every_key_is_either_refused_or_without_effect():
    assert {*WITHOUT_EFFECT, *LENGTH} <= RULES.keys()
    observing = {key for key, rule in RULES.items() if rule == "free"} & WITHOUT_EFFECT
    assert observing == {"run.dir", "run.log_every", "run.eval_every", "run.save_every", "run.keep", "run.report",
                         "run.sample_prompts", "run.track"}  # fmt: skip


def test_what_does_not_change_the_result_may_change(lab, stopped, weights_of):
    straight = lab.run("straight", **RUN)
    stopped("run", 5, **RUN)
    free = {"run__eval_every": 4, "run__log_every": 3, "run__save_every": 4, "run__keep": 5, "run__deterministic": True}
    assert weights_of(lab.run(**RUN | free).run_dir) == weights_of(straight.run_dir)


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_another_number_of_threads_is_reported(lab, stopped):
    """Products are summed in another order, so the rest of the run need not be bitwise that of the straight run."""
    import torch

    def reported(run):
        events = map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
        return [(row["before"], row["now"]) for row in events if row.get("event") == "threads_changed"]

    threads = torch.get_num_threads()
    stopped("same", 5, **RUN)
    stopped("other", 5, **RUN)
    assert reported(lab.run("same", **RUN)) == []
    torch.set_num_threads(threads + 1)
    try:
        run = lab.run("other", **RUN)
    finally:
        torch.set_num_threads(threads)
    assert reported(run) == [(threads, threads + 1)]
    assert json.loads((run.run_dir / "environment.json").read_text())["engine"]["threads"] == threads + 1


def test_a_finished_run_is_left_as_it_is(lab):
    first = lab.run(**RUN)
    before = {path: path.read_bytes() for path in first.run_dir.rglob("*") if path.is_file() and path.name != "lock"}
    again = lab.run(**RUN)
    assert again.was_finished and not first.was_finished
    assert (again.final_loss, again.eval_loss_before, again.eval_loss) == (
        first.final_loss, first.eval_loss_before, first.eval_loss,
    )  # fmt: skip
    after = {path: path.read_bytes() for path in first.run_dir.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before


@by_the_loop
def test_the_adapter_of_a_shorter_run_is_not_taken_for_the_result(lab, weights_of):
    """A finished run is made longer, and killed when its last checkpoint is there and its adapter is not."""
    straight = lab.run("straight", **RUN | {"train__schedule": "constant"})
    lab.run(**RUN | {"train__schedule": "constant", "train__steps": 6})
    with pytest.raises(Crash):
        lab.run(hooks=[Stop(9, "eval")], **RUN | {"train__schedule": "constant"})
    again = lab.run(**RUN | {"train__schedule": "constant"})
    assert not again.was_finished
    assert weights_of(again.run_dir) == weights_of(straight.run_dir)


@by_the_loop
def test_resume_without_a_checkpoint_starts_at_the_beginning(lab, weights_of):
    straight = lab.run("straight", **RUN)
    assert weights_of(lab.run("fresh", **RUN).run_dir) == weights_of(straight.run_dir)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def damage_flip(path):
    data = bytearray((path / "optimizer_v.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "optimizer_v.safetensors").write_bytes(data)


def damage_cut(path):
    (path / "adapter.safetensors").write_bytes((path / "adapter.safetensors").read_bytes()[:-1])


def damage_lose(path):
    (path / "state.json").unlink()


def damage_manifest(path):
    (path / "MANIFEST.json").write_text("[]")


def damage_no_manifest(path):
    (path / "MANIFEST.json").unlink()


def damage_by_a_foreign_file(path):
    """A manifest that comes from elsewhere may name any file; some never end."""
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"]["/dev/zero"] = {"bytes": 0, "sha256": ""}
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


DAMAGES = [
    (damage_flip, "optimizer_v.safetensors is damaged: its sha256"),
    (damage_cut, "adapter.safetensors has "),
    (damage_lose, "state.json cannot be read: No such file"),
    (damage_manifest, "MANIFEST.json is not a manifest"),
    (damage_no_manifest, "MANIFEST.json is missing"),
    (damage_by_a_foreign_file, "MANIFEST.json lists '/dev/zero', which does not belong to a checkpoint"),
]


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
@pytest.mark.parametrize(
    ("damage", "said"),
    DAMAGES,
    ids=["flipped bit", "cut", "lost file", "foreign manifest", "no manifest", "foreign file"],
)
def test_a_damaged_newest_checkpoint_is_skipped_and_said(lab, stopped, weights_of, damage, said):
    straight = lab.run("straight", **RUN)
    stopped("run", 5, **RUN)
    checkpoints = lab.tmp_path / "run" / "checkpoints"
    damage(checkpoints / "step-00000004")
    problem = checkpoint.problem_of(checkpoints / "step-00000004")
    assert said in problem
    resumed = lab.run(**RUN)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    events = [json.loads(line) for line in (resumed.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["message"] for row in events if row.get("event") == "found"] == [
        f"ignored the checkpoint {checkpoints / 'step-00000004'}: {problem}",
        f"renamed to {checkpoints / 'step-00000004.old-1'}: no longer part of this run",
    ]


@by_the_loop
@pytest.mark.parametrize(("keep", "steps"), [(1, [7, 8]), (2, [7, 8]), (3, [6, 7, 8]), (99, list(range(1, 9)))])
def test_the_newest_checkpoints_are_kept_two_at_least(lab, keep, steps):
    lab.run(train__steps=8, run__save_every=1, run__keep=keep)
    found = sorted(path.name for path in (lab.tmp_path / "run" / "checkpoints").iterdir())
    assert found == [f"step-{step:08d}" for step in steps]


def test_checkpoints_are_safetensors_and_json_and_name_no_backend(lab):
    from safetensors.numpy import load_file

    lab.run(train__steps=2, run__save_every=1)
    files = [path for path in (lab.tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    for path in files:
        if path.suffix == ".safetensors":
            assert all(tensor.dtype == "float32" for tensor in load_file(path).values())
        else:
            assert isinstance(json.loads(path.read_text()), dict)
            assert lab.backend.name not in path.read_text().replace(str(lab.model), "").replace(str(lab.tmp_path), "")


SMALL = {"train__steps": None, "train__documents_per_step": None, "train__epochs": 1, "run__save_every": 2}


@by_the_loop
def test_the_tokens_of_a_step_are_recorded_and_kept_for_more_epochs(lab, stopped, rows_of):
    """They follow from the data and the epochs, and the steps of a run must not change when it is made longer."""
    stopped("run", 5, **SMALL)
    more = lab.run("run", **SMALL | {"train__epochs": 2})
    assert more.num_steps == 32  # 16 rows of one document each
    recorded = parse_config((more.run_dir / "config.yaml").read_text()).train.tokens_per_step
    tokens = Order(lab.config(**SMALL), prepare(lab.config(**SMALL), lab.backend).data.train.lengths).tokens_per_step
    assert recorded == tokens < Order(lab.config(**SMALL | {"train__epochs": 2}), [50] * 16).tokens_per_step
    assert [row["step"] for row in rows_of(more.run_dir)[0]] == list(range(1, 33))


@by_the_loop
def test_a_run_from_before_auto_goes_on_with_its_tokens(lab, stopped, weights_of):
    """Its checkpoint says 16384, the config nothing."""
    old = SMALL | {"train__tokens_per_step": 16384, "train__epochs": 6}
    straight = lab.run("straight", **old)
    assert straight.num_steps == 6
    stopped("run", 3, **old)
    resumed = lab.run("run", **old | {"train__tokens_per_step": "auto"})
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    with pytest.raises(ConfigError, match=r"train.tokens_per_step +16384 +100 +forbidden"):
        lab.run("run", **old | {"train__tokens_per_step": 100})

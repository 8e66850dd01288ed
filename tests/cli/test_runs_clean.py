"""`dualtune runs clean`: what is offered, what is asked, and what is never touched."""

import json

import pytest

NUMPY = ("--platform", "numpy")
# Ends with exit code 7 and without a checkpoint.
BAD = {"train.learning_rate": 1e30, "train.steps": 9, "run.save_every": None, "run.eval_every": 100}


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def trained(dualtune_main, config_file, runs):
    """A run with checkpoints after steps 1 to 6, all kept."""

    def train(name="done", **changes):
        config = config_file({"run.dir": runs / name, "train.steps": 6, "run.save_every": 1, "run.keep": 6,
                              "run.eval_every": 1} | changes, name=f"{name}.yaml")  # fmt: skip
        return dualtune_main("train", config, *NUMPY).returncode

    return train


@pytest.fixture
def clean(dualtune_main, runs):
    def run(*args):
        result = dualtune_main("runs", "clean", runs, *args)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout) if "--json" in args else result.stdout

    return run


def steps(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())


def make_best(run, step):
    """Make the evaluation at this step the best one."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if "eval_loss" in row and row["step"] == step:
            row["eval_loss"] = 0.001
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_last_and_the_best_checkpoint_stay(trained, clean, runs):
    assert trained() == 0 and steps(runs / "done") == [1, 2, 3, 4, 5, 6]
    make_best(runs / "done", 3)
    lock = runs / "done" / "lock"
    note = json.loads(lock.read_text()) | {"started": "2026-01-02T03:04:05+00:00"}
    lock.write_text(json.dumps(note, indent=2) + "\n")
    before = {path: path.read_bytes() for path in (runs / "done").rglob("*") if path.is_file()}
    said = clean()
    assert said.endswith("Nothing was deleted: give --yes to delete them\n") and "4 directories" in said
    assert steps(runs / "done") == [1, 2, 3, 4, 5, 6]
    found = clean("--json")
    assert [entry["path"][-1] for entry in found["found"]] == list("5421") and found["deleted"] == []
    size = sum(p.stat().st_size for p in (runs / "done" / "checkpoints" / "step-00000001").iterdir())
    assert found["found"][-1]["num_bytes"] == size
    assert clean("--yes").splitlines()[-1].startswith("deleted     4 directories, ")
    assert steps(runs / "done") == [3, 6]
    after = {path: path.read_bytes() for path in (runs / "done").rglob("*") if path.is_file()}
    assert after == {path: data for path, data in before.items() if path in after}, (
        "the rest, and the lock's note, stay"
    )
    assert clean() == f"there is nothing to delete in {runs}\n"


def test_a_failed_run_without_a_checkpoint_goes_and_one_with_a_foreign_file_stays(trained, clean, runs):
    assert trained("failed", **BAD) == 7 and trained("kept", **BAD) == 7
    (runs / "kept" / "notes.txt").write_text("mine")
    found = clean("--json", "--yes")
    assert [entry["path"] for entry in found["deleted"]] == [str(runs / "failed")] and found["left"] == []
    assert sorted(path.name for path in runs.iterdir()) == ["kept"]


def test_a_question_is_asked(trained, clean, runs, monkeypatch):
    import io
    import sys

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert trained() == 0
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert "nothing was deleted" in clean() and len(steps(runs / "done")) == 6
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert "deleted     " in clean() and len(steps(runs / "done")) <= 2


def test_a_run_that_is_running_or_was_killed_is_left_alone(trained, clean, runs):
    from dualtune.train.state.listing import deletable, delete
    from dualtune.train.state.lock import Lock

    assert trained() == 0
    offered = deletable(runs)
    lock = Lock(runs / "done")
    assert clean("--json", "--yes")["found"] == []
    done, left = delete(offered)
    assert done == [] and "is in use by" in left[0] and len(steps(runs / "done")) == 6
    lock.release("running")  # as a killed process leaves it
    assert clean("--json", "--yes")["found"] == [] and len(steps(runs / "done")) == 6


def test_what_has_changed_since_the_question_is_not_deleted(trained, runs):
    from dualtune.train.state.listing import deletable, delete

    assert trained() == 0
    make_best(runs / "done", 6)
    offered = deletable(runs)
    make_best(runs / "done", 2)
    rows = (
        (runs / "done" / "metrics.jsonl")
        .read_text()
        .replace('"step": 6, "eval_loss": 0.001', '"step": 6, "eval_loss": 9.0')
    )
    (runs / "done" / "metrics.jsonl").write_text(rows)
    done, left = delete(offered)
    assert len(done) == 4 and [reason[-27:] for reason in left] == ["step-00000002: is needed now"[-27:]]
    assert steps(runs / "done") == [2, 6]


def test_a_damaged_checkpoint_keeps_all_others(trained, clean, runs):
    """The newest may be the damaged one: then the run resumes from an older one."""
    assert trained() == 0
    (runs / "done" / "checkpoints" / "step-00000006" / "state.json").write_text("{}")
    assert clean("--json", "--yes")["found"] == [] and len(steps(runs / "done")) == 6


def test_links_are_not_followed(trained, clean, runs, tmp_path):
    """A run, checkpoints and a checkpoint that lie elsewhere, behind links."""
    assert trained() == 0
    outside = tmp_path / "outside"
    (runs / "done").rename(outside)
    (runs / "linked").symlink_to(outside)
    (runs / "inner").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "lock"):
        (runs / "inner" / name).write_bytes((outside / name).read_bytes())
    (runs / "inner" / "checkpoints").symlink_to(outside / "checkpoints")
    assert clean("--json", "--yes")["found"] == []
    (runs / "inner" / "checkpoints").unlink()
    (runs / "inner" / "checkpoints").mkdir()
    for path in (outside / "checkpoints").iterdir():
        (runs / "inner" / "checkpoints" / path.name).symlink_to(path)
    assert clean("--json", "--yes")["found"] == []
    assert steps(outside) == [1, 2, 3, 4, 5, 6]


def test_a_failed_run_with_a_link_stays(trained, clean, runs, tmp_path):
    assert trained("failed", **BAD) == 7
    assert [entry["path"] for entry in clean("--json")["found"]] == [str(runs / "failed")]
    (tmp_path / "x").write_text("x")
    (runs / "failed" / "memory.csv").unlink(missing_ok=True)
    (runs / "failed" / "memory.csv").symlink_to(tmp_path / "x")
    assert clean("--json", "--yes")["found"] == [] and (tmp_path / "x").exists()

"""A process that is killed, anywhere: the newest whole checkpoint counts, and the end is bitwise the usual one."""

import pytest

INTACT = "checkpoint before is intact; next start names and removes what was half-written; adapter bitwise equal"


def sizes(path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def step_of(path) -> int:
    return int(path.name.removeprefix(".")[len("step-") :][:8])


@pytest.mark.fault(row=1, fault="kill -9 inside a write", injection="`DUALTUNE_FAULT=write:<bytes>`", expected=INTACT)
@pytest.mark.parametrize(
    ("number", "share"), [(0, 0.3), (1, 0.0), (1, 0.4), (2, 0.9), (3, 0.999), (6, 0.01), (6, 0.9)],
    ids=["first checkpoint", "before a byte", "in the weights", "in the state", "in the manifest", "adapter's config",
         "adapter"],
)  # fmt: skip
def test_a_kill_inside_a_write_leaves_what_was_there_before(box, number, share):
    box.settings["run.keep"] = 99
    straight, ref = box.straight(), box.home / "ref"
    written = [*sorted((ref / "checkpoints").iterdir()), ref / "adapter"]
    first = sum((ref / name).stat().st_size for name in ("config.yaml", "environment.json", "chat_template.jinja"))
    at = first + sum(map(sizes, written[:number])) + int(share * sizes(written[number]))

    box.train(-9, fault=f"write:{at}")
    assert box.checkpoints == [path.name for path in written[:number] if path.name != "adapter"]
    (leftover,) = box.leftovers
    assert leftover.name.startswith(f".{written[number].name}.tmp-")
    said = box.resume().stdout
    assert f"removed {leftover}: incomplete, left by a run that was killed" in said
    assert ("resumed     " in said) == (number > 0)
    assert number == 0 or f"after step {step_of(written[number - 1])}, from" in said
    assert not box.leftovers
    assert box.adapter == straight


@pytest.mark.fault(
    row=1,
    fault="kill -9 between the last byte and the rename",
    injection="`DUALTUNE_FAULT=synced:<n>`",
    expected=INTACT,
)
@pytest.mark.parametrize("number", [1, 3])
def test_a_checkpoint_without_its_name_does_not_count(box, number):
    straight = box.straight()
    box.train(-9, fault=f"synced:{number}")
    (leftover,) = box.leftovers
    assert box.checkpoints == ["step-00000002", "step-00000003"][: number - 1]
    assert f"removed {leftover}: incomplete, left by a run" in box.resume().stdout
    assert box.adapter == straight


@pytest.mark.fault(
    row=2,
    fault="kill -9 after the rename, before and after the prune",
    injection="`DUALTUNE_FAULT=renamed:<n>`, `prune:<n>`, `doomed:<n>`, `pruned:<n>`",
    expected="a whole checkpoint is always there, the new one counts; adapter bitwise equal",
)
@pytest.mark.parametrize(
    ("fault", "there"),
    [
        ("renamed:1", [2]),
        ("renamed:4", [2, 3, 4, 6]),
        ("prune:1", [2, 3, 4, 6]),
        ("doomed:1", [3, 4, 6]),
        ("pruned:1", [3, 4, 6]),
    ],
)
def test_a_kill_around_the_prune_leaves_whole_checkpoints(box, fault, there):
    straight = box.straight()
    box.train(-9, fault=fault)
    assert box.checkpoints == [f"step-{step:08d}" for step in there]
    assert f"after step {there[-1]}, from" in box.resume().stdout
    assert box.adapter == straight
    assert not box.leftovers


@pytest.mark.fault(
    row=2,
    fault="kill -9 in the middle of removing an old checkpoint",
    injection="SIGKILL when `shutil.rmtree` is entered by the prune",
    expected="what is left of it bears no checkpoint's name and is removed on the next start",
)
def test_half_a_removed_checkpoint_is_never_seen_as_one(box):
    box.settings |= {"run.keep": 2, "data.eval": 0}
    straight = box.straight()
    # Each save ends with a call too; the fourth one is the first prune's.
    box.train(-9, inject="enter('dualtune.base.files.shutil.rmtree', 4, send('SIGKILL'))")
    (leftover,) = box.leftovers
    assert (step_of(leftover), box.checkpoints) == (2, ["step-00000004", "step-00000006"])
    assert f"removed {leftover}" in box.resume().stdout
    assert box.adapter == straight


@pytest.mark.fault(
    row=3,
    fault="kill -9 in the middle of a step",
    injection="SIGKILL between two micro-batches; `DUALTUNE_FAULT=step:<n>` behind an update",
    expected="adapter bitwise equal, every row of metrics.jsonl there once",
)
@pytest.mark.parametrize("box", ["numpy", pytest.param("cpu", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize("how", ["between micro-batches", "behind the update", "before any checkpoint"])
def test_a_run_killed_in_a_step_goes_on_bitwise(box, how):
    straight = box.straight()
    if how == "behind the update":
        box.train(-9, fault="step:6")
    else:  # four micro-batches are a step
        call = 22 if how == "between micro-batches" else 3
        box.train(-9, inject=f"enter({box.forward!r}, {call}, send('SIGKILL'))")
    assert not box.dir.joinpath("adapter").exists()
    box.resume()
    assert box.adapter == straight
    assert [step for step, _ in box.losses()] == list(range(1, 10))

"""Runs that a signal kills, as memory does that runs out without an error: restarted by their parent, with less memory.

`dualtune train --max-restarts N` is the real command; each process of it is a real one.
"""

import json

import pytest

from dualtune.base.errors import OutOfMemory, Preempted

SAME = "restarted from the last checkpoint with smaller micro-batches; losses as without it, to 1e-6; exit 0"


def losses_of_straight(box):
    """The losses of a run like this one that nothing disturbs."""
    before, box.settings["run.dir"] = box.settings["run.dir"], box.home / "ref"
    box.resume()
    found = box.losses()
    box.settings["run.dir"] = before
    return found


def same_losses(mine, its):
    assert [step for step, _ in mine] == [step for step, _ in its] == [*range(1, len(its) + 1)]
    assert [loss for _, loss in mine] == pytest.approx([loss for _, loss in its], rel=1e-6)


@pytest.mark.fault(
    row=21,
    fault="the process is killed where micro-batches are too large (`--max-restarts`)",
    injection="SIGSEGV (NumPy, MLX) and SIGKILL in the third step, while micro-batches have more than 128 tokens",
    expected=SAME,
)
@pytest.mark.parametrize(
    ("box", "name"),
    [("numpy", "SIGSEGV"), ("numpy", "SIGKILL"), pytest.param("mlx", "SIGSEGV", marks=pytest.mark.long)],
    indirect=["box"],
)
def test_a_killed_run_is_restarted_from_its_checkpoint_with_smaller_micro_batches(box, name):
    box.settings |= {"train.documents_per_step": 8, "train.micro_batch_tokens": 256, "train.steps": 4, "data.eval": 0}
    inject = f"enter_large({box.forward!r}, 128, 4, send({name!r}))"
    stderr = box.train(0, "--max-restarts", 3, inject=inject).stderr
    assert [line for line in stderr.splitlines() if line.startswith("restart")] == [
        f"restart     1 of 3: killed by {name}, as when memory runs out"
    ]
    (resumed,), (cut,) = box.events("resumed"), box.events("out_of_memory")
    assert resumed["step"] == cut["step"] >= 2 and cut["tokens_after"] <= 128 < cut["tokens_before"]
    assert cut["message"].startswith(f"the process before was killed by {name}, as when memory runs out; micro-batches")
    state = json.loads((box.dir / "checkpoints" / box.checkpoints[-1] / "state.json").read_text())
    assert state["memory"] == {"micro_batch_tokens": cut["tokens_after"]}
    same_losses(box.losses(), losses_of_straight(box))


@pytest.mark.fault(
    row=21,
    fault="the process is killed at every size of its micro-batches (`--max-restarts`)",
    injection="SIGSEGV in the third step of every process",
    expected="exit 8 after the second death at the smallest size and the same step: three settings that take less",
)
def test_without_progress_at_the_smallest_size_the_run_ends_with_8(box):
    inject = f"enter_large({box.forward!r}, 0, 4, send('SIGSEGV'))"
    box.settings |= {"run.save_every": None, "run.eval_every": None}
    stderr = box.train(OutOfMemory.exit_code, "--max-restarts", 9, inject=inject).stderr
    num_restarts = stderr.count("restart     ")
    assert 2 <= num_restarts < 9
    (message,) = [line for line in stderr.splitlines() if line.startswith("Error: out of memory: ")]
    assert "killed by SIGSEGV, as when memory runs out, twice after step 0; micro-batches of up to" in message
    assert stderr.count("--set") == 3


@pytest.mark.fault(
    row=21,
    fault="the process is killed again and again, and makes progress (`--max-restarts`)",
    injection="SIGKILL at the thirteenth micro-batch of every process",
    expected=SAME,
)
def test_with_progress_the_run_is_restarted_at_the_smallest_size_too(box):
    inject = f"enter({box.forward!r}, 13, send('SIGKILL'))"
    stderr = box.train(0, "--max-restarts", 9, inject=inject).stderr
    assert stderr.count("restart     ") >= 2
    assert [event["message"].rpartition("; ")[2] for event in box.events("restarted")][-1:] == [
        "nothing takes less, so the run resumes as it was"
    ]
    same_losses(box.losses(), losses_of_straight(box))


@pytest.mark.fault(
    row=21,
    fault="a run with `--max-restarts` ends with an error of its own",
    injection="RuntimeError at the fourth micro-batch",
    expected="not restarted; its exit code",
)
def test_an_error_is_not_restarted(box):
    stderr = box.train(
        1, "--max-restarts", 3, inject=f"enter({box.forward!r}, 4, throw(RuntimeError('broken')))"
    ).stderr
    assert "RuntimeError: broken" in stderr and "restart  " not in stderr


@pytest.mark.fault(
    row=4,
    fault="Ctrl-C in a run with `--max-restarts`",
    injection="SIGINT to the parent, between two micro-batches",
    expected="saved if there is anything, exit 75, the same command resumes; adapter bitwise equal",
)
def test_a_ctrl_c_reaches_the_process_that_trains_through_its_parent(box):
    straight = box.straight()
    box.settings |= {"run.save_every": None, "run.eval_every": None}
    stderr = box.train(
        Preempted.exit_code, "--max-restarts", 3, inject=f"enter({box.forward!r}, 19, interrupt_parent(1))"
    ).stderr
    assert "Stopped by SIGINT; saved in" in stderr and stderr.count("\n") == 1
    assert box.checkpoints == ["step-00000004"]
    box.resume()
    assert box.adapter == straight


@pytest.mark.fault(
    row=5,
    fault="a second Ctrl-C in a run with `--max-restarts`",
    injection="SIGINT to the parent, twice, between two micro-batches",
    expected="exit 130 at once, the checkpoints before are intact; adapter bitwise equal",
)
def test_a_second_ctrl_c_ends_the_run_at_once(box):
    straight = box.straight()
    stderr = box.train(130, "--max-restarts", 3, inject=f"enter({box.forward!r}, 19, interrupt_parent(2))").stderr
    newest = box.dir / "checkpoints" / box.checkpoints[-1]
    left = f"The newest checkpoint is {newest}. Run the same command again to continue."
    assert stderr.strip() == f"Interrupted. {left}"
    box.resume()
    assert box.adapter == straight


def test_one_of_several_processes_restarts_nothing(box):
    stderr = box.train(2, "--max-restarts", 3, env={"WORLD_SIZE": "2"}).stderr
    assert stderr.startswith("Error: --max-restarts: got 3 in one of several processes")
    assert "dualtune launch --max-restarts N" in stderr and not box.dir.exists()


@pytest.mark.parametrize("args", [["--demo"], ["--dry-run"]])
def test_only_a_run_with_a_config_is_restarted(box, python, args):
    command = ["train", *args] if args == ["--demo"] else [*box.command(), *args]
    done = python("-m", "dualtune.cli.main", *command, "--max-restarts", 2)
    assert done.returncode == 2 and "--max-restarts is for a run with a config file" in done.stderr


@pytest.mark.parametrize(("used", "is_said"), [(1 << 60, True), (1 << 20, False)])
def test_a_resume_says_whether_memory_is_the_likely_cause_of_a_kill(box, used, is_said):
    """The kill is real; the memory that the process had used is written into its timeline."""
    box.train(-9, fault="step:4")
    timeline = box.dir / "memory.csv"
    header = timeline.read_text().splitlines()[0] if timeline.exists() else ""
    assert header.startswith("step,phase,used_bytes,peak_bytes")
    timeline.write_text(f"{header}\n4,optimizer,{used},{used},,,,{1 << 60},1.0\n")
    box.resume()
    said = [event["message"] for event in box.events("found") if "memory is the likely cause" in event["message"]]
    assert len(said) == is_said and all("--max-restarts 3" in text for text in said)

"""Signals that ask a run to stop, and files that ask it to save: whatever it is doing, nothing is lost."""

import json
import os
import signal
import subprocess

import pytest

pytestmark = pytest.mark.covering(1)

SAVED = "saved if there is anything, exit 75, the same command resumes; adapter bitwise equal"
UNSCHEDULED = {"run.save_every": None, "run.eval_every": None}  # so that the signal alone is why a state is saved


def stops(box, inject, steps, name="SIGTERM"):
    """Send the signal, expect the checkpoints of these steps, and go on to the adapter of an undisturbed run."""
    straight = box.straight()
    if "tokenize" in inject:
        box.forget_tokens()
    result = box.train(75, inject=inject)
    assert f"topped by {name}" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert box.checkpoints == [f"step-{step:08d}" for step in steps]
    assert not box.leftovers
    box.resume()
    assert box.adapter == straight
    assert [step for step, _ in box.losses()] == list(range(1, 10))
    return result


@pytest.mark.fault(
    row=4, fault="SIGTERM in training", injection="the process signals itself between two micro-batches", expected=SAVED
)
@pytest.mark.parametrize("box", ["numpy", pytest.param("cpu", marks=pytest.mark.long)], indirect=True)
def test_sigterm_in_a_step_saves_the_steps_before_it(box):
    box.settings |= UNSCHEDULED
    result = stops(box, f"enter({box.forward!r}, 19, send('SIGTERM'))", [4])
    assert f"saved in {box.dir / 'checkpoints' / 'step-00000004'}. Run the same command again" in result.stderr


@pytest.mark.fault(
    row=4,
    fault="SIGTERM in an evaluation",
    injection="signal when the evaluation is entered, the first, a middle and the last one",
    expected=SAVED,
)
@pytest.mark.parametrize(("call", "steps"), [(1, [0]), (2, [2, 3]), (4, [6, 8, 9])])
def test_sigterm_in_an_evaluation_saves_what_was_trained(box, call, steps):
    box.settings["run.keep"] = 2 if call == 4 else 3
    stops(box, f"enter('dualtune.train.run.evaluate', {call}, send('SIGTERM'))", steps)


@pytest.mark.fault(
    row=4,
    fault="SIGTERM while the data are tokenized or the model is loaded",
    injection="signal in the middle of rendering the rows; when the engine is loaded",
    expected="exit 75 before the first step; the same command starts over; adapter bitwise equal",
)
@pytest.mark.parametrize("where", ["dualtune.data.tokens.tokenize.render_example", "dualtune.train.run.load_engine"])
def test_sigterm_before_training_leaves_little_behind(box, where):
    stops(box, f"enter({where!r}, 1, send('SIGTERM'))", [] if "tokenize" in where else [0])


@pytest.mark.fault(
    row=4,
    fault="SIGTERM while data are tokenized on resume",
    injection="as above, in the second process",
    expected="the checkpoint is untouched, exit 75; adapter bitwise equal",
)
def test_sigterm_while_resuming_keeps_the_checkpoint(box):
    box.train(-9, fault="step:5")
    stops(box, "enter('dualtune.data.tokens.tokenize.render_example', 3, send('SIGTERM'))", [2, 3, 4])


@pytest.mark.fault(
    row=4,
    fault="SIGTERM while a checkpoint or the adapter is written",
    injection="signal when the write is entered",
    expected="the write is completed; exit 75, or 0 if nothing is left to do",
)
def test_sigterm_in_a_write_lets_it_end(box):
    stops(box, "enter('dualtune.train.state.checkpoint.write_directory', 3, send('SIGTERM'))", [2, 3, 4])
    straight = box.adapter
    box.settings["run.dir"] = box.home / "other"
    box.train(0, inject="enter('dualtune.train.result.write_adapter', 1, send('SIGTERM'))")
    assert box.adapter == straight


@pytest.mark.fault(
    row=4,
    fault="SIGTERM while text is generated",
    injection="signal at the third token of `dualtune generate`",
    expected="exit 75 at the next token, what was generated is on the screen",
)
def test_sigterm_stops_a_generation(box, python):
    env = box.environment("enter('dualtune.data.tokens.tokenizer.Tokenizer.decode', 4, send('SIGTERM'))")
    model = box.settings["model.name"]
    args = ["generate", model, "--platform", box.platform, "--prompt", "1", "--raw", "--max-tokens", 10**6]
    result = python("-m", "dualtune.cli.main", *args, env=env)
    assert result.returncode == 75, result.stderr
    assert "topped by SIGTERM" in result.stderr.splitlines()[-1]
    assert 0 < len(result.stdout) < 10


@pytest.mark.fault(
    row=5,
    fault="SIGUSR1 and SIGUSR2 (Slurm), SIGHUP, one SIGINT",
    injection="the process signals itself between two micro-batches",
    expected=SAVED,
)
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT"])
def test_every_signal_that_asks_to_stop_saves(box, name):
    box.settings |= UNSCHEDULED
    fresh = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # these tests may run under nohup themselves
    stops(box, f"{fresh}\nenter({box.forward!r}, 14, send({name!r}))", [3], name)


@pytest.mark.fault(
    row=5,
    fault="SIGHUP under nohup",
    injection="SIGHUP where it was ignored before",
    expected="ignored: the run ends 0",
)
def test_a_hangup_under_nohup_is_ignored(box):
    inject = f"signal.signal(signal.SIGHUP, signal.SIG_IGN); enter({box.forward!r}, 14, send('SIGHUP'))"
    box.train(0, inject=inject)
    assert box.checkpoints[-1] == "step-00000009"


@pytest.mark.fault(
    row=5,
    fault="a second SIGINT",
    injection="while the first one's checkpoint is saved: before, inside and after its files are written",
    expected="exit 130 at once, the checkpoints before are intact; adapter bitwise equal",
)
@pytest.mark.parametrize(
    ("where", "call", "steps"),
    [
        ("train.state.checkpoint.write_directory", 2, [2]), ("base.files._write", 10, [2]),
        ("base.files.fsync", 5, [2, 4]),
    ],
    ids=["before the first file", "after the second", "after the rename"],
)  # fmt: skip
@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_a_second_interrupt_ends_at_once_and_damages_nothing(box, where, call, steps, first):
    """Both come in the second save. (So far: two files of the run directory, five and three fsyncs of a checkpoint.)"""
    box.settings["data.eval"] = 0
    straight = box.straight()
    inject = (
        f"enter('dualtune.train.saver.Saver.save', 2, send({first!r}))\n"
        f"enter('dualtune.{where}', {call}, send('SIGINT'))"
    )
    result = box.train(130, inject=inject)
    newest = box.dir / "checkpoints" / f"step-{steps[-1]:08d}"
    left = f"The newest checkpoint is {newest}. Run the same command again to continue."
    assert result.stderr.splitlines()[-1] == f"Interrupted. {left}"
    assert box.checkpoints == [f"step-{step:08d}" for step in steps]
    assert not box.leftovers
    box.resume()
    assert box.adapter == straight


@pytest.mark.fault(
    row=5,
    fault="signals from outside, as a scheduler sends them",
    injection="`kill -TERM <pid>` when the first step has been printed",
    expected=SAVED,
)
def test_a_signal_from_another_process_stops_the_run(box):
    box.settings |= {"train.steps": 20_000, "run.save_every": None, "run.eval_every": None}
    with box.start(stdout=subprocess.PIPE, text=True) as process:
        first = next(line for line in process.stdout if "Z  step " in line)
        os.kill(process.pid, signal.SIGTERM)
        _, complaint = process.communicate(timeout=1800)
    assert process.returncode == 75, complaint
    assert first.split()[2] == "1/20000"
    (saved,) = box.checkpoints
    assert f"saved in {box.dir / 'checkpoints' / saved}" in complaint


@pytest.mark.fault(
    row=5,
    fault="`touch checkpoint-now`",
    injection="the file is made in the middle of a step, with `save_every: null`",
    expected="saved after that step without stopping, and the file is gone",
)
@pytest.mark.parametrize("kept", [False, True], ids=["unscheduled", "scheduled anyway"])
def test_checkpoint_now_saves_without_stopping(box, kept):
    box.settings |= {"run.save_every": 5 if kept else None, "data.eval": 0}
    straight = box.straight()
    now = box.dir / "checkpoint-now"
    box.train(0, inject=f"enter('dualtune.train.step.learning_rate', 5, touch({str(now)!r}))")
    assert "step-00000005" in box.checkpoints
    assert not now.exists()
    assert box.adapter == straight


@pytest.mark.fault(
    row=5,
    fault="`touch checkpoint-now` in a step that is saved anyway",
    injection="the file is made in the last step",
    expected="the file is gone",
)
def test_checkpoint_now_is_gone_when_the_run_is(box):
    now = box.dir / "checkpoint-now"
    box.train(0, inject=f"enter('dualtune.train.step.learning_rate', 9, touch({str(now)!r}))")
    assert box.checkpoints[-1] == "step-00000009"
    assert not now.exists()


@pytest.mark.fault(
    row=50,
    fault="an evaluation that raises",
    injection="RuntimeError in the second evaluation, with and without `save_every`",
    expected="checkpoint first, then the error with its traceback, exit 1; adapter bitwise equal",
)
@pytest.mark.parametrize(("save_every", "steps"), [(2, [2, 3]), (None, [3])])
def test_an_evaluation_that_raises_costs_no_step(box, save_every, steps):
    box.settings["run.save_every"] = save_every
    straight = box.straight()
    result = box.train(1, inject="enter('dualtune.train.run.evaluate', 2, throw(RuntimeError('broken metric')))")
    assert "RuntimeError: broken metric" in result.stderr
    assert box.checkpoints == [f"step-{step:08d}" for step in steps]
    assert json.loads((box.dir / "lock").read_text())["state"] == "failed"
    box.resume()
    assert box.adapter == straight


@pytest.mark.fault(
    row=5,
    fault="the same signal again, after the run has saved",
    injection="SIGUSR1 twice, as Slurm tells a job and each of its steps; the second one before the process has ended",
    expected="ignored: who has saved does not die of it",
)
def test_a_signal_that_comes_again_after_saving_is_ignored(python):
    program = (
        "import os, signal\nfrom dualtune.base import interrupt\n"
        "with interrupt.handled():\n    os.kill(os.getpid(), signal.SIGUSR1)\n    assert interrupt.requested()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nraise SystemExit(75)\n"
    )
    assert python("-c", program).returncode == 75


EARLY = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup themselves
import dualtune.cli.main, dualtune.config, dualtune.cli.{command} as module
def stop(*_):
    os.kill(os.getpid(), signal.{signal})
    raise SystemExit("not stopped")
dualtune.config.load_config = stop
sys.argv = ["dualtune", "{command}", "config.yaml"]
dualtune.cli.main.main()
"""


@pytest.mark.parametrize(
    ("command", "signal", "code"),
    [
        ("train", "SIGTERM", 75),
        ("train", "SIGUSR1", 75),
        ("train", "SIGHUP", 75),
        ("train", "SIGINT", 130),
        ("sweep", "SIGTERM", 75),
    ],
)
def test_a_signal_in_the_first_seconds_ends_with_the_code_of_a_stop(python, command, signal, code):
    """The framework is being imported: nothing handles signals yet, and there is nothing to save."""
    done = python("-c", EARLY.format(command=command, signal=signal))
    assert done.returncode == code, done.stderr
    assert "Stopped by" in done.stderr or code == 130

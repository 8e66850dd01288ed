"""A real Slurm of two nodes: warned, preempted, cancelled, killed, arrays; what comes of it is the same adapter."""

import importlib.util
import signal
import time
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("slurm_here", Path(__file__).with_name("slurm_here.py"))
slurm_here = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slurm_here)

pytestmark = pytest.mark.cluster

ONE_NODE = ("--on", "slurm", "--procs", "1", "--platform", "cpu")
TWO_NODES = (*ONE_NODE, "--nodes", "2")
ALONE = ("--on", "local", "--procs", "1", "--platform", "cpu")
TOGETHER = ("--on", "local", "--procs", "2", "--platform", "cpu")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    if reason := slurm_here.missing():
        pytest.skip(reason)
    with slurm_here.started(tmp_path_factory.mktemp("slurm")) as it:
        yield it


@pytest.fixture
def submit(run, slurm):
    """Submit the run, with slow steps; the number of the job."""

    def submit_(*args: str) -> str:
        env = run.env(slow=True) | {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
        words = run.launch(0, *args, env=env).split()
        return words[words.index("job") + 1].rstrip(":")

    return submit_


def log_of(run, job: str) -> str:
    return (run.home / f"{run.name}-{job}.log").read_text()


@pytest.mark.parametrize(("how", "same"), [(ONE_NODE, ALONE), (TWO_NODES, TOGETHER)], ids=["one node", "two nodes"])
def test_a_job_that_is_warned_saves_is_requeued_and_ends_with_the_same_adapter(
    run, slurm, submit, undisturbed, how, same
):
    run.settings["run.save_every"] = None  # so that the signal alone is why there is a checkpoint
    expected = undisturbed(run, *same)
    job = submit(*how)
    run.wait_for_step(8)
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    assert slurm.wait_for(job, ("PENDING",), 60)["Restarts"] == "1"
    assert slurm.wait_for(job, ENDED, 120)["JobState"] == "COMPLETED", log_of(run, job)
    assert run.resumptions() == 1 and "saved; requeued" in log_of(run, job)
    assert run.adapter == expected


def test_a_preempted_job_saves_and_goes_on_when_slurm_lets_it(run, slurm, submit, undisturbed):
    run.settings["run.save_every"] = None
    expected = undisturbed(run, *ALONE)
    job = submit(*ONE_NODE, "--sbatch-option", "exclusive", "--partition", "low", "--sbatch-option", "nodelist=zz")
    run.wait_for_step(8)
    slurm.run("sbatch", "--partition=high", "--exclusive", "--nodelist=zz", "--output=/dev/null", "--wrap=sleep 1")
    assert slurm.wait_for(job, ("PENDING",), 60)["Restarts"] == "1"
    assert slurm.wait_for(job, ENDED, 120)["JobState"] == "COMPLETED", log_of(run, job)
    assert run.resumptions() == 1
    assert run.adapter == expected


def test_a_cancelled_job_saves_and_stays_cancelled(run, slurm, submit):
    run.settings["run.save_every"] = None
    job = submit(*ONE_NODE)
    run.wait_for_step(5)
    slurm.run("scancel", job)
    assert slurm.wait_for(job, ENDED, 60)["Restarts"] == "0"
    deadline = time.monotonic() + 30
    while "Slurm ends the job" not in log_of(run, job):
        assert time.monotonic() < deadline, log_of(run, job)
        time.sleep(0.2)
    assert slurm.job(job)["JobState"] == "CANCELLED"
    assert len(list((run.dir / "checkpoints").iterdir())) == 1


def test_a_killed_worker_is_begun_again_within_the_job(run, slurm, submit, undisturbed):
    expected = undisturbed(run, *TOGETHER)
    job = submit(*TWO_NODES)
    run.wait_for_step(12)
    run.worker("RANK", 1).send_signal(signal.SIGKILL)
    ended = slurm.wait_for(job, ENDED, 120)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), log_of(run, job)
    assert "restart 1 of 3" in log_of(run, job)
    assert run.adapter == expected


def test_a_wrong_config_ends_the_job_at_once_with_its_code(run, slurm, submit):
    run.settings["data.train"] = str(run.home / "absent.jsonl")
    job = submit(*ONE_NODE)
    ended = slurm.wait_for(job, ENDED, 90)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "3:0", "0"), log_of(run, job)
    assert "restart" not in log_of(run, job)


def test_tasks_of_an_array_have_runs_of_their_own_and_one_is_requeued_alone(run, slurm, submit, undisturbed):
    """The last task has the number of the whole array: by that number, all would be requeued."""
    run.settings["train.steps"] = 60
    job = submit(*ONE_NODE, "--array", "1-2", "--set", "run.seed=%a")
    twins = {task: type(run)(run.home, run.settings, f"run-{task}") for task in (1, 2)}
    for twin in twins.values():
        twin.wait_for_step(8)
    slurm.run("scancel", "--signal=USR1", "--batch", f"{job}_2")
    for task, restarts in ((1, "0"), (2, "1")):
        ended = slurm.wait_for(f"{job}_{task}", ENDED, 180)
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", restarts)
        assert twins[task].resumptions() == int(restarts)
    assert twins[1].adapter != twins[2].adapter
    run.settings |= {"run.seed": 2}
    run.name = "alone"
    run.launch(0, *ALONE)
    assert run.adapter == twins[2].adapter

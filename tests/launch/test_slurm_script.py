"""The batch script: its text, and what bash does with it where srun, scontrol and squeue are small scripts.

The real ones are in tests/cluster.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from dualtune.base.errors import ConfigError
from dualtune.train.launch.slurm import Slurm, batch_script
from dualtune.train.launch.supervise import Work

GOLDEN = Path(__file__).with_name("golden.sbatch")


def script(cwd: Path, run_dir="runs/first", overrides=(), resume="auto", **asked) -> str:
    asked = {"nodes": 1, "procs_per_node": 1, "gpus_per_node": None} | asked
    work = Work(cwd / "c.yaml", Path(run_dir), "cpu", tuple(overrides), resume)
    return batch_script(Slurm(**asked), work, cwd)


def test_the_script_is_this_one(monkeypatch):
    """Read it when it changes; then: cp what pytest shows to golden.sbatch."""
    monkeypatch.setattr("dualtune.train.launch.slurm.VERSION", "1.0")
    monkeypatch.setattr("sys.executable", "/env/bin/python")
    text = script(
        Path("/home/me"), overrides=["train.steps=5", "run.seed=%a"], nodes=2, procs_per_node=8, gpus_per_node=8,
        time="12:00:00", partition="gpu", account="me", array="0-3", options=("qos=long", "exclusive"),
    )  # fmt: skip
    assert text == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("asked", [{}, {"nodes": 2}, {"array": "0-3"}, {"overrides": ["data.train=it's a b.jsonl"]}])
def test_shellcheck_finds_nothing(tmp_path, asked):
    shellcheck = Path(sys.executable).with_name("shellcheck")
    result = subprocess.run(
        [shellcheck, "-"], input=script(tmp_path, **asked), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_the_script_is_kept_and_handed_over_and_its_log_has_a_directory(dualtune_main, config, cluster, monkeypatch):
    cluster.write("sbatch", f'printf "%s\\n" "$@" >{cluster.home}/sbatch; echo "71;cluster"')
    monkeypatch.setenv("PATH", f"{cluster.home}/bin:{os.environ['PATH']}")
    asked = ("--on", "slurm", "--procs", "1", "--platform", "cpu", "--set", "run.dir=50%/first")
    result = dualtune_main("launch", "c.yaml", *asked, "--script", "elsewhere/job.sh")
    assert result.returncode == 0, result.stderr
    assert (cluster.home / "sbatch").read_text().split() == ["--parsable", "elsewhere/job.sh"]
    assert "#SBATCH --output=50%%/first-%j.log\n" in Path("elsewhere/job.sh").read_text()
    assert Path("50%").is_dir() and "job         71: 1 × 1 processes; log 50%%/first-%j.log" in result.stdout


def test_a_refusal_of_sbatch_is_shown(dualtune_main, config, cluster, monkeypatch):
    cluster.write("sbatch", "echo 'invalid partition specified: x' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{cluster.home}/bin:{os.environ['PATH']}")
    result = dualtune_main("launch", "c.yaml", "--on", "slurm", "--procs", "1", "--partition", "x")
    assert result.returncode == 4 and "sbatch rejected it: invalid partition specified: x" in result.stderr


def test_words_with_spaces_and_quotes_arrive_as_they_are(cluster):
    given = ['data.train=it\'s a $b "c" %a.jsonl', "run.seed=7"]
    cluster.run(0, codes=[0], overrides=given)
    words = cluster.steps()[0]
    assert words[-6:] == ["--set", given[0], "--set", given[1], "--resume", "auto"]


def test_a_task_of_an_array_has_a_run_directory_and_a_number_of_its_own(cluster):
    cluster.run(0, codes=[0], array="0-3", overrides=["run.seed=%a", "run.dir=ignored"], SLURM_ARRAY_TASK_ID="2",
                SLURM_ARRAY_JOB_ID="70")  # fmt: skip
    words = cluster.steps()[0]
    assert words[-8:-2] == ["--set", "run.seed=2", "--set", "run.dir=ignored", "--set", "run.dir=runs/first-2"]
    text = script(cluster.home, run_dir="runs/of-%a-first", array="0-3")
    assert 'run_dir=runs/of-"$SLURM_ARRAY_TASK_ID"-first\n' in text
    with pytest.raises(ConfigError, match="%a only in its last part"):
        script(cluster.home, run_dir="runs/of-%a/first", array="0-3")
    assert script(cluster.home).count("SLURM_ARRAY_TASK_ID") == 1  # to name the job


@dataclass
class Cluster:
    """A directory with programs that act for Slurm's, and a job."""

    home: Path

    def write(self, name: str, text: str) -> None:
        path = self.home / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    def start(self, codes, state="RUNNING", **asked) -> subprocess.Popen:
        variables = {key: asked.pop(key) for key in list(asked) if key.startswith("SLURM")}
        (self.home / "codes").write_text("".join(f"{code}\n" for code in codes))
        self.write("squeue", f'echo "$*" >>{self.home}/squeue; echo {state}')
        job = self.home / "job.sh"
        job.write_text(script(self.home, **asked), encoding="utf-8")
        job.chmod(0o755)
        environment = {"PATH": f"{self.home}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "71", **variables}
        return subprocess.Popen([job], cwd=self.home, env=environment | {"SLURM_JOB_NODELIST": "n1"},
                                stdout=subprocess.PIPE, text=True)  # fmt: skip

    def run(self, code: int, **job) -> str:
        process = self.start(**job)
        said, _ = process.communicate(timeout=1800)
        assert process.returncode == code, said
        return said

    def steps(self) -> list[list[str]]:
        """The arguments of each srun, from the launcher's own on."""
        path = self.home / "steps"
        steps = path.read_text().split("\0\0\n")[:-1] if path.exists() else []
        return [step.split("\0")[5:] for step in steps]

    def requeued(self) -> list[str]:
        path = self.home / "requeued"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    (tmp_path / "bin").mkdir()
    it = Cluster(tmp_path)
    it.write("scontrol", f'if [[ $1 = show ]]; then echo n1; echo n2; else echo "$2" >>{tmp_path}/requeued; fi')
    # Ends with the next code of the list; "wait" is a step that saves and ends with 75 when it is signalled.
    it.write("srun", f"""
trap 'echo signalled >>{tmp_path}/signals; exit 75' USR1
printf '%s\\0' "$@" >>{tmp_path}/steps; printf '\\0\\n' >>{tmp_path}/steps
read -r code <{tmp_path}/codes; sed -i 1d {tmp_path}/codes
if [[ $code = wait ]]; then touch {tmp_path}/waiting; while :; do sleep 0.05; done; fi
if ((code > 128)); then trap - USR1; kill -$((code - 128)) $$; fi
exit "$code"
""")  # fmt: skip
    return it


@pytest.mark.parametrize(
    ("codes", "code", "num_steps", "requeued"),
    [
        ([0], 0, 1, []),
        ([75], 75, 1, ["71"]),  # it has saved: begun again by Slurm
        ([2], 2, 1, []), ([3], 3, 1, []), ([5], 5, 1, []), ([7], 7, 1, []), ([9], 9, 1, []),  # its own reason
        ([1, 0], 0, 2, []), ([137, 4, 0], 0, 3, []), ([1, 75], 75, 2, ["71"]),  # begun again within the job
        ([1, 137, 1, 1, 0], 1, 4, []),  # three times at most
        ([138, 0], 0, 2, []),  # killed by USR1, which nobody sent
    ],
)  # fmt: skip
def test_what_follows_the_end_of_the_step(cluster, codes, code, num_steps, requeued):
    cluster.run(code, codes=codes)
    assert (len(cluster.steps()), cluster.requeued()) == (num_steps, requeued)


@pytest.mark.parametrize("state", ["COMPLETING", "PREEMPTED", "CANCELLED", "PENDING"])
def test_a_job_that_slurm_ends_is_not_requeued_by_the_script(cluster, state):
    """Or a cancelled job would rise again, and a preempted one be requeued twice."""
    said = cluster.run(75, codes=[75], state=state)
    assert cluster.requeued() == [] and f"Slurm ends the job ({state})" in said


def test_a_task_is_requeued_by_both_numbers(cluster):
    cluster.run(75, codes=[75], array="0-3", SLURM_ARRAY_TASK_ID="2", SLURM_ARRAY_JOB_ID="71")
    assert cluster.requeued() == ["71_2"]
    assert "--job=71_2" in (cluster.home / "squeue").read_text()


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_script_has_the_step_save(cluster, sent):
    process = cluster.start(codes=["wait"])
    deadline = time.monotonic() + 1800
    while not (cluster.home / "waiting").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(sent)
    process.communicate(timeout=1800)
    assert (process.returncode, cluster.requeued()) == (75, ["71"])
    assert (cluster.home / "signals").read_text() == "signalled\n"


def test_a_step_that_comes_to_its_end_after_the_signal_is_done(cluster):
    """A signal ends bash's wait, not the step."""
    cluster.write("srun", "trap : USR1; sleep 0.5; kill -USR1 $PPID; sleep 0.7; exit 0")
    cluster.run(0, codes=[])
    assert cluster.requeued() == []


def test_a_step_that_the_signal_has_killed_had_nothing_to_save(cluster):
    cluster.write("srun", "sleep 0.5; kill -USR1 $PPID; sleep 0.3; exit 138")
    cluster.run(75, codes=[])
    assert cluster.requeued() == ["71"]


def test_it_goes_on_from_elsewhere_until_it_has_a_checkpoint_of_its_own(cluster):
    cluster.run(0, codes=[1, 0], resume="old/run")
    assert [step[-1] for step in cluster.steps()] == ["old/run", "old/run"]
    (cluster.home / "runs/first/checkpoints/step-00000003").mkdir(parents=True)
    (cluster.home / "steps").unlink()
    cluster.run(0, codes=[0], resume="old/run")
    assert [step[-1] for step in cluster.steps()] == ["auto"]


def test_an_environment_that_the_node_does_not_see_is_said(cluster, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert "/nowhere/python is not on" in cluster.run(4, codes=[0])
    assert cluster.steps() == []

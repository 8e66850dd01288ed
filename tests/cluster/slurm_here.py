"""A Slurm on this machine: munged, slurmctld, and a slurmd for each of two nodes, started by hand.

On Debian: apt-get install slurmctld slurmd slurm-client munge. Needs root, as slurmd does.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = (socket.gethostname(), "zz")  # the processes meet on the first by name, and that name has to resolve
INSTALL = "apt-get install slurmctld slurmd slurm-client munge"


def missing() -> str | None:
    """Why there can be no Slurm here."""
    absent = [name for name in PROGRAMS if program(name) is None]
    if absent:
        return f"needs {', '.join(absent)}: {INSTALL}"
    if os.geteuid() != 0:
        return "needs root, as slurmd does"
    try:
        socket.gethostbyname(NODES[0])
    except OSError:
        return f"needs the name of this machine, {NODES[0]}, to resolve"
    return None


def program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass
class Slurm:
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.home / "slurm.conf")}

    def run(self, name: str, *args: str) -> str:
        """The output of one of Slurm's programs."""
        result = subprocess.run([name, *args], env=self.environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        words = self.run("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.partition("=")[::2] for word in words)

    def wait_for(self, number: str, states: tuple[str, ...], limit_s: float) -> dict[str, str]:
        """What Slurm says of the job, once it is in one of the states."""
        deadline = time.monotonic() + limit_s
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < deadline, f"{number}: {job['JobState']} after {limit_s} s, not {states}"
            time.sleep(0.2)
        return job


@contextlib.contextmanager
def started(home: Path) -> Iterator[Slurm]:
    """A Slurm whose files lie in `home`, until the end of the block."""
    home.chmod(0o755)
    (home / "slurm.conf").write_text(_configuration(home), encoding="utf-8")
    slurm = Slurm(home)
    for name in ("state", *NODES):
        (home / name).mkdir()
    with contextlib.ExitStack() as daemons:
        daemons.enter_context(_munged(home))
        daemons.enter_context(_daemon(slurm, "slurmctld", "-D"))
        for node in NODES:
            daemons.enter_context(_daemon(slurm, "slurmd", "-D", "-N", node))
        _await(slurm)
        yield slurm
        for number in slurm.run("squeue", "--noheader", "--format=%i").split():
            slurm.run("scancel", "--full", number)
        deadline = time.monotonic() + 20
        while slurm.run("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.2)


def _configuration(home: Path) -> str:
    host, nodes = socket.gethostname(), ",".join(NODES)
    return "\n".join(
        [
            f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root",
            f"SlurmctldPort={_free_port()}",
            f"AuthType=auth/munge\nAuthInfo=socket={home}/munge.socket,cred_expire=5\nCredType=cred/munge",
            f"StateSaveLocation={home}/state\nSlurmdSpoolDir={home}/%n",
            f"SlurmctldPidFile={home}/slurmctld.pid\nSlurmdPidFile={home}/%n.pid",
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU\nReturnToService=2\nJobRequeue=1\nPreemptMode=REQUEUE",
            "PreemptType=preempt/partition_prio\nKillWait=20\nSchedulerTimeSlice=5\nMpiDefault=none\nSwitchType=switch/none",
            "SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1\nMinJobAge=3600\nInactiveLimit=0",
            *(f"NodeName={node} NodeAddr=127.0.0.1 Port={_free_port()} CPUs=1 State=UNKNOWN" for node in NODES),
            f"PartitionName=low Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1",
            f"PartitionName=high Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF",
            "",
        ]
    )


@contextlib.contextmanager
def _munged(home: Path) -> Iterator[None]:
    """As its own user, who has to own what it uses, and whose way there must be nobody else's to change."""
    user = pwd.getpwnam("munge")
    place = Path(f"/run/dualtune-munge-{secrets.token_hex(4)}")
    place.mkdir(mode=0o755)
    try:
        key = place / "key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        for path in (key, place):
            os.chown(path, user.pw_uid, user.pw_gid)
        socket_path = place / "socket"
        command = [str(program("munged")), "--foreground", f"--key-file={key}", f"--socket={socket_path}",
                   f"--pid-file={place}/pid", f"--log-file={place}/log", f"--seed-file={place}/seed"]  # fmt: skip
        with subprocess.Popen(command, user=user.pw_uid, group=user.pw_gid, extra_groups=[]) as process:
            try:
                deadline = time.monotonic() + 10
                while not socket_path.exists():
                    assert process.poll() is None and time.monotonic() < deadline, "munged did not start"
                    time.sleep(0.05)
                (home / "munge.socket").symlink_to(socket_path)
                yield
            finally:
                process.terminate()
    finally:
        shutil.rmtree(place)


@contextlib.contextmanager
def _daemon(slurm: Slurm, name: str, *args: str) -> Iterator[None]:
    log = slurm.home / f"{args[-1] if name == 'slurmd' else name}.log"
    with log.open("wb") as file:
        command = [str(program(name)), *args, "-f", str(slurm.home / "slurm.conf")]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=slurm.environment)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(slurm: Slurm) -> None:
    deadline = time.monotonic() + 30
    while True:
        command = ["sinfo", "--noheader", "--format=%t", "--partition=low"]
        result = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, check=False)
        if result.stdout.split() == ["idle"]:
            return
        if time.monotonic() > deadline:
            logs = "\n".join((slurm.home / f"{name}.log").read_text()[-2000:] for name in ("slurmctld", *NODES))
            raise AssertionError(f"Slurm did not start: {result.stdout}{result.stderr}\n{logs}")
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

"""--print: the command or the script as it would be run, and nothing is started or written."""

import shlex
import sys
from pathlib import Path

import pytest


@pytest.fixture
def printed(dualtune_main, config):
    """The words that --print prints."""

    def print_(*args: str) -> list[str]:
        result = dualtune_main("launch", "c.yaml", *args, "--print")
        assert result.returncode == 0, result.stderr
        assert sorted(path.name for path in config.parent.iterdir()) == ["c.yaml"]
        return shlex.split(result.stdout)

    return print_


def worker(config: Path, platform: str, *more: str, resume: str = "auto") -> list[str]:
    command = [sys.executable, "-P", "-m", "dualtune.cli.main", "train", str(config), "--platform", platform]
    return [*command, *more, "--resume", resume]


AGENT = [sys.executable, "-P", "-m", "dualtune_torch.torchrun"]
OPTIONS = ["--max-restarts=0", "--signals-to-handle=SIGQUIT", "--no-python"]


def test_local_is_torchrun_around_dualtune_train(printed, config, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    words = printed(
        "--on", "local", "--platform", "cpu", "--procs", "2", "--set", "train.steps=5", "--set", "run.seed=3"
    )
    start = ["OMP_NUM_THREADS=3", *AGENT, "--standalone", "--nproc-per-node=2", *OPTIONS]
    assert words == start + worker(config, "cpu", "--set", "train.steps=5", "--set", "run.seed=3")


def test_a_machine_of_several_is_told_where_the_first_one_is(printed, config):
    words = printed("--on", "local", "--platform", "cpu", "--nodes", "3", "--node-rank", "1", "--rendezvous", "n0:2900")
    where = ["--nnodes=3", "--node-rank=1", "--master-addr=n0", "--master-port=2900", "--nproc-per-node=1"]
    assert words[1:] == [*AGENT, *where, *OPTIONS, *worker(config, "cpu")]


def test_the_cores_are_shared_among_the_processes(dualtune_main, config, monkeypatch):
    from dualtune.train.launch.torchrun import Here

    launcher, chosen = Here(8, 0).launcher("cpu", 3, None)
    assert launcher.environment == {"OMP_NUM_THREADS": "2"}
    assert chosen == "3 processes (as requested), 2 threads each (8 cores for 3)"
    assert Here(2, 0).launcher("cpu", 5, None)[0].environment == {"OMP_NUM_THREADS": "1"}


def test_never_is_decided_before_the_first_process_so_that_a_restart_may_go_on(printed, config):
    words = printed("--on", "local", "--platform", "cpu", "--resume", "never")
    assert words[-len(worker(config, "cpu")) :] == worker(config, "cpu", resume="auto")


def test_mlx_is_mlx_launch_with_a_ring_around_dualtune_train(printed, config):
    words = printed("--on", "mlx", "--procs", "2", "--resume", "elsewhere")
    program = [sys.executable, str(Path(sys.executable).with_name("mlx.launch"))]
    assert words[:8] == [*program, "--verbose", "--backend", "ring", "-n", "2", "--starting-port"]
    assert words[9:] == ["--", *worker(config, "mlx", resume="elsewhere")]


def test_hosts_and_hostfiles_go_to_mlx_launch(printed, config, tmp_path_factory):
    words = printed("--on", "mlx", "--hosts", "10.0.0.1, 10.0.0.2", "--procs", "2")
    assert words[5:11] == ["--hosts", "10.0.0.1,10.0.0.2", "-n", "2", "--starting-port", "32323"]
    hostfile = tmp_path_factory.mktemp("hosts") / "h.json"
    hostfile.write_text('[{"ssh": "mac-1", "ips": ["10.0.0.1"]}, {"ssh": "mac-2", "ips": ["10.0.0.2"]}]')
    assert printed("--on", "mlx", "--hostfile", str(hostfile))[5:7] == ["--hostfile", str(hostfile)]

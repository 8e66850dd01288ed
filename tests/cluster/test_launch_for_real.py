"""torchrun and mlx.launch with two processes: killed, stopped, hung; what comes of it is the undisturbed adapter."""

import signal
import subprocess

import psutil
import pytest

pytestmark = pytest.mark.cluster

TORCHRUN = ("--on", "local", "--platform", "cpu", "--procs", "2")
MLX = ("--on", "mlx", "--procs", "2")
LAUNCHERS = {"torchrun": (TORCHRUN, "RANK"), "mlx": (MLX, "MLX_RANK")}


@pytest.mark.parametrize(("name", "rank"), [("torchrun", 0), ("torchrun", 1), ("mlx", 1)])
def test_a_killed_worker_costs_the_steps_since_the_checkpoint_and_nothing_else(run, undisturbed, name, rank):
    how, variable = LAUNCHERS[name]
    with run.started(*how) as process:
        run.wait_for_step(12)
        run.worker(variable, rank).send_signal(signal.SIGKILL)
        assert process.wait(300) == 0, run.said
    assert "restart     1 of 3: killed by signal 9" in run.said
    assert run.resumptions() == 1
    assert run.adapter == undisturbed(run, *how)


@pytest.mark.parametrize(("name", "sent"), [("torchrun", "SIGINT"), ("torchrun", "SIGUSR1"), ("mlx", "SIGTERM")])
def test_a_signal_to_the_launcher_saves_and_the_same_command_goes_on(run, undisturbed, name, sent):
    how, _ = LAUNCHERS[name]
    run.settings["run.save_every"] = None  # so that the signal alone is why there is a checkpoint
    with run.started(*how) as process:
        run.wait_for_step(8)
        process.send_signal(signal.Signals[sent])
        assert process.wait(300) == 75, run.said
        saved = [path.name for path in (run.dir / "checkpoints").iterdir()]
        assert len(saved) == 1 and "step-00000008" <= saved[0] < "step-00000030"
    assert "restart " not in run.said
    run.launch(0, *how)
    assert run.resumptions() == 1
    assert run.adapter == undisturbed(run, *how)


def test_a_worker_that_hangs_is_found_and_all_begin_again(run, undisturbed):
    run.environment = {"DUALTUNE_WAIT_S": "15", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    with run.started(*TORCHRUN) as process:
        run.wait_for_step(12)
        run.worker("RANK", 1).suspend()
        assert process.wait(300) == 0, run.said
    assert "waited 15 s for" in run.said and "restart     1 of 3" in run.said
    assert run.adapter == undisturbed(run, *TORCHRUN)


def test_a_ring_that_hangs_is_found_and_all_begin_again(run, undisturbed):
    run.environment = {"DUALTUNE_WAIT_S": "30"}
    with run.started(*MLX) as process:
        run.wait_for_step(12)
        run.worker("MLX_RANK", 1).suspend()
        assert process.wait(300) == 0, run.said
    assert "waited 30 s for" in run.said and "restart     1 of 3" in run.said
    assert run.adapter == undisturbed(run, *MLX)


def test_when_the_launcher_is_killed_its_workers_save_and_end(run):
    run.settings["run.save_every"] = None
    with run.started(*TORCHRUN) as process:
        run.wait_for_step(5)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
    assert len(list((run.dir / "checkpoints").iterdir())) == 1


def test_a_second_ctrl_c_leaves_nobody_behind(run):
    run.settings["run.save_every"] = None
    with run.started(*TORCHRUN) as process:
        run.wait_for_step(5)
        family = psutil.Process(process.pid).children(recursive=True)
        run.worker("RANK", 1).suspend()  # so that the first one is not enough
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive


def test_two_machines_meet_and_compute_what_one_computes(run, undisturbed):
    """Two launchers on loopback, as on two machines."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    two = ("--on", "local", "--platform", "cpu", "--procs", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}")
    expected = undisturbed(run, *TORCHRUN)
    with run.started(*two, "--node-rank", "1") as other:
        run.launch(0, *two, "--node-rank", "0")
        assert other.wait(60) == 0
    assert run.adapter == expected

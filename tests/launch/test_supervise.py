"""Exit codes, restarts and signals, with real processes: python alone, mlx.launch, and torchrun."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from dualtune.train.launch import mlx
from dualtune.train.launch.supervise import Work, may_restart, supervise, verdict
from dualtune.train.launch.torchrun import Torchrun

RANK = (
    "import os, sys, time; rank = int(os.environ.get('RANK') or os.environ['MLX_RANK']); attempt = int(sys.argv[1]); "
)


def supervised(launcher, work, max_restarts=0) -> tuple[int, list[str]]:
    told: list[str] = []
    return supervise(launcher, work, max_restarts=max_restarts, tell=told.append), told


@pytest.mark.parametrize(
    ("codes", "asked", "code"),
    [
        ({0: 0, 1: 0}, False, 0),
        ({0: 75, 1: 75}, False, 75),
        ({0: 3, 1: 3}, False, 3),
        ({0: 4, 1: 3}, False, 3),  # what the one says explains what the other waits for in vain
        ({0: -9, 1: 3}, False, 3),  # killed, because it did not end when the other had
        ({0: 4, 1: -9}, False, 137),
        ({0: 75, 1: -9}, False, 137),  # the other was told to end, and could still save
        ({0: -15, 1: 1}, False, 1),  # ended by us
        ({0: 75, 1: -10}, True, 75),  # it had not begun to listen
        ({0: -10, 1: -10}, True, 75),
        ({0: -10, 1: -10}, False, 138),
        ({0: 75, 1: 5}, True, 5),  # it could not be saved
        ({0: 75, 1: -9}, True, 137),
        ({0: -15}, False, 143),
        ({0: 4, 1: 10, 2: 4}, False, 10),  # a device that failed, for which the others have waited
    ],
)
def test_the_codes_of_all_are_one_code(codes, asked, code):
    assert verdict(codes, asked=asked) == code


def test_only_what_may_end_otherwise_is_begun_again():
    again = {code for code in range(1, 256) if may_restart(code, 2)}
    assert again == {1, 4, 10, *range(131, 256)}
    assert not may_restart(4, 1)  # alone, it has waited for nobody


def test_a_run_that_fails_is_begun_again_until_it_ends_well(direct, program):
    work = program("import os, sys; sys.exit(0) if sys.argv[1] == '3' else os.kill(os.getpid(), 9)")
    code, told = supervised(direct, work, max_restarts=5)
    assert code == 0 and len(work.resumed) == 3
    assert [line.split(";")[0] for line in told] == [f"restart     {i} of 5: killed by signal 9" for i in (1, 2)]


@pytest.mark.parametrize(("code", "attempts"), [(1, 3), (2, 1), (3, 1), (7, 1), (75, 1), (4, 1)])
def test_restarts_are_for_what_may_end_otherwise(direct, program, code, attempts):
    work = program(f"import sys; sys.exit({code})")
    assert supervised(direct, work, max_restarts=2)[0] == code
    assert len(work.resumed) == attempts


def test_a_restart_goes_on_from_elsewhere_only_without_a_checkpoint_of_its_own(tmp_path):
    work = Work(tmp_path / "c.yaml", tmp_path / "run", "cpu", (), "old")
    assert (work.first_resume(), work.next_resume()) == ("old", "old")
    (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)
    assert (work.first_resume(), work.next_resume()) == ("old", "auto")


def test_what_a_torchrun_worker_ends_with_is_what_launch_ends_with(program, open_backend):
    open_backend("torch")
    code, told = supervised(
        Torchrun("dualtune_torch.torchrun", 2), program(RANK + "time.sleep(rank); sys.exit(75 * rank)"), max_restarts=5
    )
    assert (code, told) == (75, ["stopped     run the same command again to continue"])


def test_what_an_mlx_rank_ends_with_is_what_launch_ends_with(program, open_backend, capfd):
    """The first attempt dies, the second one says why it cannot go on, and that is not tried again."""
    open_backend("mlx")
    work = program(RANK + "rank == 1 and attempt == 1 and os.kill(os.getpid(), 9); time.sleep(1); sys.exit(3 * rank)")
    code, told = supervised(mlx.launcher("auto", 2, None, None)[0], work, max_restarts=5)
    assert (code, len(work.resumed)) == (3, 2)
    again = "restart     1 of 5: killed by signal 9; all processes are restarted"
    assert told == [again, "failed      exit code 3 in attempt 2"]


def test_mlx_ranks_that_end_well_are_counted(program, open_backend, capfd):
    open_backend("mlx")
    launcher = mlx.launcher("auto", 3, None, None)[0]
    assert supervised(launcher, program(RANK + "print(f'rank {rank}')")) == (0, [])
    assert sorted(capfd.readouterr().out.split()) == ["0", "1", "2", "rank", "rank", "rank"]


def test_silence_of_mlx_launch_is_no_success(program, tmp_path, capfd):
    silent = tmp_path / "mlx.launch"
    silent.write_text("print('all is well')\n", encoding="utf-8")
    assert supervised(mlx.MlxLaunch(2, silent, ()), program(""))[0] == 1


def test_a_rank_that_waits_for_a_dead_one_is_killed(program, open_backend, monkeypatch, capfd, tmp_path):
    open_backend("mlx")
    monkeypatch.setattr(mlx, "DIE_S", 0.5)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    waits = f"time.sleep(100); open({str(tmp_path / 'waited')!r}, 'x')"
    work = program(RANK + deaf + "time.sleep(rank); rank == 1 and os.kill(os.getpid(), 9); " + waits)
    assert supervised(mlx.launcher("auto", 2, None, None)[0], work)[0] == 137
    assert not (tmp_path / "waited").exists()


@pytest.mark.parametrize(
    "launcher", ["mlx.launcher('auto', 2, None, None)[0]", "Torchrun('dualtune_torch.torchrun', 2)"]
)
def test_a_ctrl_c_reaches_each_worker_once(tmp_path, launcher, open_backend):
    """A worker that hears of it twice would take a second Ctrl-C for impatience."""
    open_backend("mlx" if "mlx" in launcher else "torch")
    worker = tmp_path / "worker.py"
    worker.write_text(textwrap.dedent(f"""
        import os, pathlib, signal, sys, time
        rank = os.environ.get("RANK") or os.environ["MLX_RANK"]
        heard = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: heard.append(number))
        pathlib.Path(r"{tmp_path}", f"ready{{rank}}").touch()
        while not heard:
            time.sleep(0.05)
        time.sleep(1.5)
        pathlib.Path(r"{tmp_path}", f"heard{{rank}}").write_text(str(len([n for n in heard if n != signal.SIGTERM])))
        sys.exit(75)
    """))  # fmt: skip
    code = textwrap.dedent(f"""
        import sys
        from dualtune.train.launch import mlx
        from dualtune.train.launch.supervise import supervise
        from dualtune.train.launch.torchrun import Torchrun
        class Work:
            first_resume = next_resume = lambda self: "auto"
            command = lambda self, resume: [sys.executable, r"{worker}"]
        sys.exit(supervise({launcher}, Work(), max_restarts=3, tell=print))
    """)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        deadline = time.monotonic() + 1800
        while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        for child in psutil.Process(process.pid).children():
            if "dualtune_torch.torchrun" in child.cmdline():
                child.send_signal(signal.SIGUSR1)  # as Slurm does, to every process of a step
        said, _ = process.communicate(timeout=1800)
    assert process.returncode == 75 and "restart" not in said
    assert [(tmp_path / f"heard{rank}").read_text() for rank in (0, 1)] == ["1", "1"]

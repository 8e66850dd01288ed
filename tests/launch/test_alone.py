"""The parent of a single process: which deaths it restarts, and the signals that it forwards; with real processes."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dualtune.train.launch.supervise import supervise_alone

from ..conftest import PATIENCE_S


def supervised(work, max_restarts=2):
    told = []
    return supervise_alone(work, max_restarts=max_restarts, tell=told.append), told


@pytest.mark.parametrize("code", [0, 1, 2, 4, 8, 75, 130])
def test_an_exit_code_is_the_runs_own_and_is_not_restarted(program, code):
    work = program(f"import sys; sys.exit({code})")
    assert supervised(work) == (code, []) and len(work.resumed) == 1


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT", "SIGKILL"])
def test_a_death_as_when_memory_runs_out_is_restarted_so_many_times(program, name):
    work = program(f"import os, signal; os.kill(os.getpid(), signal.{name})")
    code, told = supervised(work)
    assert code == 128 + signal.Signals[name] and len(work.resumed) == 3
    assert told == [
        *(f"restart     {i} of 2: killed by {name}, as when memory runs out" for i in (1, 2)),
        f"failed      killed by {name}, as when memory runs out, after 2 restarts; the same command resumes the run",
    ]


def test_a_run_whose_device_failed_is_restarted_with_the_memory_it_had(program):
    work = program("import sys; assert '--restart-note' not in sys.argv; sys.exit(10 if sys.argv[1] == '1' else 0)")
    assert supervised(work) == (0, ["restart     1 of 2: the device failed"]) and len(work.resumed) == 2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGFPE", "SIGINT"])
def test_another_death_is_not_restarted(program, name):
    work = program(f"import os, signal; signal.signal({signal.Signals[name]}, 0); os.kill(os.getpid(), signal.{name})")
    assert supervised(work)[0] == 128 + signal.Signals[name] and len(work.resumed) == 1


def test_a_run_that_ends_well_after_a_restart_ends_with_0(program):
    work = program(
        "import os, sys; sys.argv[1] == '1' and os.kill(os.getpid(), 9); assert '--restart-note' in sys.argv"
    )
    code, told = supervised(work)
    assert code == 0 and [line[:19] for line in told] == ["restart     1 of 2:"]


PARENT = """if True:
    import signal, sys
    from dualtune.train.launch.supervise import supervise_alone
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which the tests may have been told to ignore, by nohup
    class Work:
        first_resume = next_resume = lambda self: "auto"
        command = lambda self, resume: [sys.executable, "-S", "-c", sys.argv[1]]
    sys.exit(supervise_alone(Work(), max_restarts=3, tell=print))
"""
HEARS = """if True:
    import os, signal, sys, time
    heard = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, frame: heard.append(number))
    print("ready", flush=True)
    while not heard:
        time.sleep(0.01)
    {then}
"""


@pytest.fixture
def start():
    """Start a parent whose process runs this code; its standard output is a pipe."""
    started = []

    def start(then):
        command = [sys.executable, "-c", PARENT, HEARS.format(then=then)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        for each in [*psutil.Process(process.pid).children(), process] if process.poll() is None else []:
            each.kill()
        process.communicate()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGQUIT"])
def test_a_signal_is_forwarded_as_it_is_and_once(start, name):
    process = start("time.sleep(0.2); print(*heard, flush=True); sys.exit(75)")
    process.send_signal(signal.Signals[name])
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert (out.split(), process.returncode) == ([str(int(signal.Signals[name]))], 75)


def test_a_process_that_was_asked_to_stop_is_not_restarted_if_it_is_killed(start):
    process = start("os.kill(os.getpid(), 9)")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=PATIENCE_S)[0] == "" and process.returncode == 137


def test_a_ctrl_z_stops_both_and_both_continue(start):
    process = start("sys.exit(75)")
    (child,) = psutil.Process(process.pid).children()

    def wait_for(status):
        while {psutil.Process(process.pid).status(), child.status()} != {status}:
            time.sleep(0.01)

    os.kill(process.pid, signal.SIGTSTP)
    wait_for(psutil.STATUS_STOPPED)
    os.kill(process.pid, signal.SIGCONT)
    while psutil.STATUS_STOPPED in (psutil.Process(process.pid).status(), child.status()):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75

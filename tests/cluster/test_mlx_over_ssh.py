"""mlx.launch with a rank behind a real ssh: 127.0.0.2 is another machine to it. Needs sshd (Debian: openssh-server)."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

HERE_AND_THERE = ("--on", "mlx", "--hosts", "127.0.0.1,127.0.0.2")
SSHD = """
Port {port}
ListenAddress 127.0.0.2
HostKey {home}/host
AuthorizedKeysFile {home}/id.pub
StrictModes no
UsePAM no
PidFile none
"""
SSH = """
Host *
  Port {port}
  IdentityFile {home}/id
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """An sshd with throw-away keys, and an ssh on PATH that logs in to it."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or os.geteuid() != 0 or not Path("/proc").exists():
        pytest.skip("needs root, Linux and sshd (Debian: openssh-server)")
    home = tmp_path / "ssh"
    (home / "bin").mkdir(parents=True)
    for name in ("host", "id"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / name], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    (home / "sshd_config").write_text(SSHD.format(port=port, home=home))
    (home / "config").write_text(SSH.format(port=port, home=home))
    wrapper = home / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/bash\nexec {shutil.which("ssh")} -F {home}/config "$@"\n')
    wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with subprocess.Popen([program, "-D", "-e", "-f", home / "sshd_config"], stderr=subprocess.DEVNULL) as process:
        try:
            monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
            deadline = time.monotonic() + 10
            while subprocess.run(["ssh", "127.0.0.2", "true"], capture_output=True, check=False).returncode:
                assert time.monotonic() < deadline, "sshd did not start"
                time.sleep(0.2)
            yield
        finally:
            process.terminate()


def test_a_rank_behind_ssh_saves_with_the_others_and_goes_on(run, undisturbed, ssh):
    run.settings["run.save_every"] = None
    with run.started(*HERE_AND_THERE) as process:
        run.wait_for_step(8)
        there = run.worker("MLX_RANK", 1)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(300) == 75, run.said
        there.wait(30)
    run.launch(0, *HERE_AND_THERE)
    assert run.resumptions() == 1
    assert run.adapter == undisturbed(run, "--on", "mlx", "--procs", "2")


def test_a_rank_behind_ssh_that_is_killed_begins_again_with_the_others(run, undisturbed, ssh):
    with run.started(*HERE_AND_THERE) as process:
        run.wait_for_step(12)
        run.worker("MLX_RANK", 1).send_signal(signal.SIGKILL)
        assert process.wait(300) == 0, run.said
    assert "restart     1 of 3" in run.said
    assert run.adapter == undisturbed(run, "--on", "mlx", "--procs", "2")

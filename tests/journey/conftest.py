"""A real sshd on loopback with throw-away keys, and a relay before it that cuts connections where a test says."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from dualtune.use.transfer.remotes import target
from dualtune.use.transfer.remotes.retries import Patience
from dualtune.use.transfer.remotes.store import LEAST_CHUNK_BYTES

LOGIN = """#!/bin/sh
# What sshd runs in place of the login shell: in a home of its own, with the shell and the PATH that a test asks for.
cd {home} || exit 1
HOME={home}; export HOME
{prelude}
exec {shell} -c "$SSH_ORIGINAL_COMMAND"
"""
SSHD = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
ForceCommand {folder}/login
"""
SSH = """\
Host cut
  HostName 127.0.0.1
  Port {relay}
Host cluster
  HostName 127.0.0.1
  Port {port}
  ControlMaster auto
  ControlPath {control}/%C
  ControlPersist 60
Host *
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
  HostKeyAlias throwaway
"""


class Relay:
    """Passes TCP connections on, counts their bytes, and closes those that carry more than the next limit."""

    def __init__(self, port: int) -> None:
        self._goal = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cuts: list[int] = []  # bytes after which a connection is closed, first come first served
        self.num_cut = self.up_bytes = self.down_bytes = self.num_connections = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def reset(self) -> None:
        self.cuts.clear()
        self.num_cut = self.up_bytes = self.down_bytes = self.num_connections = 0

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            self.num_connections += 1
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._goal)) as server:
            carried = [0]
            up = threading.Thread(target=self._pass, args=(client, server, True, carried), daemon=True)
            up.start()
            self._pass(server, client, False, carried)
            up.join()

    def _pass(self, source: socket.socket, goal: socket.socket, is_up: bool, carried: list[int]) -> None:
        try:
            while data := source.recv(16384):
                with self._lock:
                    carried[0] += len(data)
                    if is_up:
                        self.up_bytes += len(data)
                    else:
                        self.down_bytes += len(data)
                    if self.cuts and carried[0] > self.cuts[0]:
                        self.cuts.pop(0)
                        self.num_cut += 1
                        carried[0] = -(1 << 60)  # the other direction of this connection takes no further cut
                        break
                goal.sendall(data)
        except OSError:
            pass  # the other direction was cut
        finally:
            for end in (source, goal):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


class Machine:
    """The machine at the other end: its home directory, and how to reach it."""

    def __init__(self, folder: Path, port: int, relay: Relay) -> None:
        self.folder, self.port, self.relay = folder, port, relay
        self.home = folder / "home"
        self.ssh = f"ssh -F {folder}/ssh_config"

    def use(self, shell: str = "/bin/sh", prelude: str = "") -> None:
        """Set what answers there."""
        script = self.folder / "login"
        script.write_text(LOGIN.format(home=self.home, shell=shell, prelude=prelude))
        script.chmod(0o755)

    def wrapped(self, tool: str, first: str) -> Path:
        """A directory for the PATH there, with a tool that does something else first."""
        folder = self.home / "bin"
        folder.mkdir()
        (folder / tool).write_text(f'#!/bin/sh\n{first}\nexec {shutil.which(tool)} "$@"\n')
        (folder / tool).chmod(0o755)
        return folder

    def push(self, file: Path, where: str = "cluster:runs/a.tar", *, force=False, patience=None) -> bool:
        return target.parse(where).push(file, force=force, patience=patience or Patience(5, first_pause_s=0.01))

    def pull(self, path: Path, where: str = "cluster:runs/a.tar", *, patience=None) -> Path:
        return target.parse(where).pull(path, patience=patience or Patience(5, first_pause_s=0.01))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _sshd() -> str:
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    for name in (program, shutil.which("ssh"), shutil.which("ssh-keygen")):
        if name is None:
            pytest.skip("needs sshd, ssh and ssh-keygen (Debian: openssh-server, openssh-client)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where a root's sshd drops its privileges
    return program


@pytest.fixture(scope="package")
def _started(tmp_path_factory):
    program = _sshd()
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    port = _free_port()
    relay = Relay(port)
    (folder / "known_hosts").write_text(f"throwaway {(folder / 'host.pub').read_text()}")
    (folder / "sshd_config").write_text(SSHD.format(port=port, folder=folder))
    control = tempfile.mkdtemp(prefix="ssh-")  # a socket's path may have some hundred characters
    (folder / "ssh_config").write_text(SSH.format(relay=relay.port, port=port, folder=folder, control=control))
    machine = Machine(folder, port, relay)
    machine.use()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
    try:
        deadline = time.monotonic() + 1800
        while time.monotonic() < deadline and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            pytest.fail(f"sshd did not start: {(folder / 'log').read_text()}")
        yield machine
    finally:
        for _ in Path(control).iterdir():
            subprocess.run([*machine.ssh.split(), "-O", "exit", "cluster"], capture_output=True, check=False)
        process.terminate()
        process.wait()
        relay.close()
        shutil.rmtree(control)


@pytest.fixture
def cluster(_started, monkeypatch):
    """The other machine with an empty home: `cluster` over one lasting connection, `cut` over the relay."""
    shutil.rmtree(_started.home, ignore_errors=True)
    _started.home.mkdir()
    _started.use()
    _started.relay.reset()
    monkeypatch.setenv("DUALTUNE_SSH", _started.ssh)
    return _started


@pytest.fixture
def file(tmp_path) -> Path:
    """Seven chunks, the last one short."""
    path = tmp_path / "here" / "a.tar"
    path.parent.mkdir()
    path.write_bytes(random.Random(3).randbytes(6 * LEAST_CHUNK_BYTES + 777))
    return path


@pytest.fixture
def patience():
    """One that pauses briefly, and the lines that it says."""
    lines: list[str] = []
    return Patience(5, say=lines.append, first_pause_s=0.01), lines

"""What the attacks on transfers share: adapters to send, keys to sign with, and what answers in place of ssh."""

import shutil
import subprocess

import numpy as np
import pytest

from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.directory import Adapter, write_adapter
from dualtune.use.transfer.bundles.signature import Trust
from dualtune.use.transfer.remotes import ssh as connection
from dualtune.use.transfer.remotes.ssh import SshStore

ALICE = "alice@example.org"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with an adapter, and another that differs from it."""
    monkeypatch.chdir(tmp_path)
    for name, number in (("adapter", 1), ("other", 2)):
        tensors = init_adapter({"model.layers.0.self_attn.q_proj": (8, 8)}, 2, seed=number)
        tensors = {key: x + np.float32(number) for key, x in tensors.items()}
        write_adapter(tmp_path / name, Adapter(AdapterSpec(2, 4, 0.0, ("q_proj",)), tensors, "org/base"))
    return tmp_path


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """What answers in place of ssh: a program of sh. Gives the store, with a clock that goes a minute each time."""

    def start(program: str, seconds: float = 0.0) -> SshStore:
        (tmp_path / "ssh").write_text(program)
        ticks = iter(range(10**9))
        return SshStore("host", program=("sh", str(tmp_path / "ssh")), clock=lambda: next(ticks) * seconds)

    monkeypatch.setattr(connection, "_POLL_S", 0.01)
    monkeypatch.setattr(connection, "_GRACE_S", 0.1)  # other tests may have left SIGTERM ignored, also for children
    return start


@pytest.fixture(scope="session")
def keys(tmp_path_factory):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    place = tmp_path_factory.mktemp("keys")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / "key"], check=True)
    (place / "allowed").write_text(f"{ALICE} {(place / 'key.pub').read_text()}")
    return place


@pytest.fixture
def trust(keys):
    return Trust(keys / "allowed", ALICE)

"""Attacks by the other end of ssh: streams without end, junk, trickles; and names that shells read as commands."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from dualtune.base import interrupt
from dualtune.base.errors import DiskError, EnvironmentFault, FormatError, Preempted
from dualtune.use.transfer import carry
from dualtune.use.transfer.bundles.manifest import ANY
from dualtune.use.transfer.bundles.pack import pack
from dualtune.use.transfer.carry import PushRequest
from dualtune.use.transfer.remotes import ssh as ssh_script
from dualtune.use.transfer.remotes.retries import Cut, Pace, Patience
from dualtune.use.transfer.remotes.ssh import SshStore
from dualtune.use.transfer.remotes.store import Chunks

HERE = 'for last; do :; done; exec sh -c "$last"'  # an ssh that runs its last argument on this machine


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pull(text, dest, *, trust=None, wanted=ANY, keep_packed=False):
    return carry.pull(text, dest, keep_packed=keep_packed, trust=trust, required=wanted, patience=Patience(0))


def push(there, file, path, patience=None) -> bool:
    return there.push(file, path, verified=None, force=False, patience=patience or Patience(0))


# --- ssh peers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("exec yes", "host: printed more than 4194304 bytes, and no answer"),
        ("exec yes >&2", "host: printed more than 1048576 bytes on standard error"),
        ("exec cat /dev/zero", "host: printed more than 4194304 bytes, and no answer"),
        ("exec yes 'dualtune final bytes 7'", "host: printed more than 4194304 bytes, and no answer"),
    ],
)
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_peer_that_prints_without_end_is_left_at_once(peer, tmp_path, program, words, direction):
    file = tmp_path / "a.tar"
    file.write_bytes(b"x")
    there, tries = peer(program), []
    patience = Patience(5, say=tries.append)
    with pytest.raises(EnvironmentFault, match=words):
        if direction == "push":
            push(there, file, "./a.tar", patience)
        else:
            there.pull("./a.tar", tmp_path / "x", patience=patience)
    assert tries == []


@pytest.mark.parametrize("program", ["exec yes", "exec cat /dev/zero", "exec yes >&2"])
def test_junk_before_the_content_of_a_file_ends(peer, program):
    with pytest.raises(EnvironmentFault, match=r"bytes(, and no answer| on standard error)"):
        list(peer(program).read("./a.tar", Chunks(1 << 20, ("0" * 64,) * 4), range(4)))


def test_looking_for_the_mark_is_linear_in_the_junk():
    """Every byte is looked at twice at the most, also where the junk comes byte by byte."""
    pieces = [b"d"] * (1 << 19) + [
        ssh_script.START_OF_DATA[:5],
        ssh_script.START_OF_DATA[5:] + b"content",
        b" and more",
    ]
    start = time.process_time()
    found = b"".join(SshStore("host", program=("x",))._after_greeting(iter(pieces)))
    assert found == b"content and more"
    assert time.process_time() - start < 5  # searching all of it again for each byte takes a minute


@pytest.mark.parametrize("drip", ["printf x", "printf x >&2"])
def test_a_peer_that_sends_a_byte_now_and_then_is_left(peer, drip):
    there = peer(f"while :; do {drip}; sleep 0.01; done", seconds=1.0)
    with pytest.raises(EnvironmentFault, match=r"bytes in 180 s, fewer than 1024"):
        Patience(0).keep_trying(lambda: there.chunks("./a.tar"), "host:a.tar")


def test_a_peer_that_takes_nothing_is_left(peer, tmp_path):
    file = tmp_path / "a.tar"
    file.write_bytes(bytes(1 << 20))
    program = f'case "$*" in *conv=notrunc*) exec sleep 1000;; esac; {HERE}'
    with pytest.raises(EnvironmentFault, match=r"bytes in 180 s, fewer than 1024"):
        push(peer(program, seconds=1.0), file, f"{tmp_path}/b.tar")


def test_what_moves_may_take_as_long_as_it_likes_and_what_stops_is_noticed_once_a_window_is_over():
    now = [0.0]
    pace = Pace(least=1024, window_s=180, clock=lambda: now[0])
    pace.check()
    for _ in range(1000):
        for _ in range(4):
            pace.moved(256)
            now[0] += 44
            pace.check()
    now[0] += 180
    pace.check()
    now[0] += 1
    with pytest.raises(Cut, match="0 bytes in 180 s, fewer than 1024"):
        pace.check()


def test_a_peer_that_ignores_every_signal_but_the_last_is_ended(peer, monkeypatch):
    there = peer("trap '' TERM INT HUP PIPE; echo $$ >&2; while :; do sleep 0.05; done", seconds=60.0)
    with pytest.raises(EnvironmentFault, match="gave up"):
        Patience(0).keep_trying(lambda: there.chunks("./a.tar"), "host:a.tar")


def test_sigterm_ends_a_transfer_with_a_peer_that_says_nothing(peer):
    there = peer("exec sleep 1000")
    ticks = iter(range(10**9))

    def clock():
        if next(ticks) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return 0.0

    there = SshStore("host", program=there.program, clock=clock)
    with interrupt.handled(), pytest.raises(Preempted):
        Patience(0).keep_trying(lambda: there.chunks("./a.tar"), "host:a.tar")
    assert next(ticks) < 10


def test_a_file_that_does_not_fit_on_the_disk_is_not_begun(peer, place, monkeypatch):
    """32 GiB of zeros are announced with the right hashes."""
    num_chunks = 4096
    asked = []
    there = peer("exit 1")
    zeros = Chunks(num_chunks * (8 << 20), ("0" * 64,) * num_chunks)
    monkeypatch.setattr(SshStore, "chunks", lambda self, path: zeros)
    monkeypatch.setattr(SshStore, "read", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(os, "statvfs", lambda fd: SimpleNamespace(f_bavail=1 << 20, f_frsize=4096))
    with pytest.raises(DiskError, match=r"needs 32.0 GiB, the disk has 4.0 GiB free. Free some space"):
        there.pull("./a.tar", place / "x", patience=Patience(0))
    assert asked == []


@pytest.mark.parametrize("kind", ["a directory to push to", "a file system of fsspec to pull from"])
def test_the_free_space_is_looked_at_wherever_a_file_goes(place, monkeypatch, kind):
    pack(place / "adapter", place / "a.tar")
    full = SimpleNamespace(f_bavail=1, f_frsize=1)
    if kind == "a directory to push to":
        monkeypatch.setattr(os, "statvfs", lambda fd: full)
        with pytest.raises(DiskError, match="the disk has 1 B free"):
            carry.push("share/a.tar", PushRequest(place / "a.tar"), force=False, public=False, patience=Patience(0))
        return
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe_file("/b/a.tar", (place / "a.tar").read_bytes())
    monkeypatch.setattr(os, "statvfs", lambda fd: full)
    with pytest.raises(DiskError, match="the disk has 1 B free"):
        pull("memory://b/a.tar", place / "y")
    memory.rm("/b/a.tar")


def test_a_signature_is_small_or_is_not_fetched(place, keys, trust):
    pack(place / "adapter", place / "a.tar", key=keys / "key")
    (place / "a.tar.sig").write_bytes(bytes(1 << 17))
    with pytest.raises(FormatError, match=r"a.tar.sig: has 131072 bytes, at most 65536 are allowed"):
        pull("a.tar", place / "there", trust=trust)


# --- login shells ----------------------------------------------------------------------------------------------------

SHELLS = ["sh", "bash", "dash", "zsh", "fish", "tcsh", "busybox sh", "mksh", "ksh"]
NAMES = [
    r"d\'A';touch HERE;", r"\\'; touch HERE #", "it's $(touch HERE) `touch HERE`;touch HERE", "!!; !touch", "a\\",
    "%s%n %b", "~root/*?[a]{b,c}", "=touch", "-rf", "ü é 日本", "tab\tand\nline", '"$HOME" & | > HERE', "^a^b", "@x {}",
    "#", "\\0101",
]  # fmt: skip


@pytest.mark.parametrize("shell", SHELLS)
def test_no_login_shell_reads_a_name_as_anything_but_a_name(shell, tmp_path):
    words = shell.split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"{shell} is not installed")
    text = ssh_script.command('for n do printf "%s/" "$n"; done', *NAMES)
    done = subprocess.run([*words, "-c", text], capture_output=True, cwd=tmp_path, check=False)
    assert (done.stdout.decode(), done.stderr.decode()) == ("/".join(NAMES) + "/", "")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("script", ["LOOK", "WRITE", "FINISH", "CHUNKS", "READ"])
def test_a_command_has_only_what_all_shells_read_alike(script):
    """The script in single quotes, without what one shell or another reads inside of them; plain words behind it."""
    text = ssh_script.command(getattr(ssh_script, script), *NAMES)
    inside = getattr(ssh_script, script)
    assert not {"'", "\\", "!", "\n"} & {*inside}
    *_, behind = text.partition(f"{inside}' dualtune ")
    assert shlex.join(behind.split()) != "" and not {*behind} - {
        *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-\\' "
    }

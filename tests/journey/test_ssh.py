"""Files over ssh, against a real sshd: whole or not at all, and after a cut only what is missing."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from dualtune.errors import ConfigError, DiskError, EnvironmentFault
from dualtune.transfer.places import target
from dualtune.transfer.places.patience import Patience

MORE = pytest.mark.journey
CHUNK = 256 << 10  # of a file of up to 64 MiB
SIZE = 6 * CHUNK + 777
MIB = 1 << 20
LARGE = 8 * MIB + 777
PUSH = """
import sys
from pathlib import Path
from dualtune import interrupt
from dualtune.transfer.places import target
from dualtune.transfer.places.patience import Patience
with interrupt.handled():
    target.parse("cluster:runs/a.tar").push(Path(sys.argv[1]), patience=Patience())
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "here" / "a.tar"
    path.parent.mkdir()
    path.write_bytes(random.Random(3).randbytes(SIZE))
    return path


@pytest.fixture
def patience():
    lines = []
    found = Patience(5, say=lines.append, first_pause_s=0.01)
    return found, lines


def fast() -> Patience:
    return Patience(5, first_pause_s=0.01)


def push(file, where="cluster:runs/a.tar", force=False, patience=None):
    return target.parse(where).push(file, force=force, patience=patience or fast())


def pull(path, where="cluster:runs/a.tar", patience=None):
    return target.parse(where).pull(path, patience=patience or fast())


def wrapped(tmp_path, tool: str, first: str):
    """A directory for PATH with a tool that does something else first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / tool).write_text(f'#!/bin/sh\n{first}\nexec {shutil.which(tool)} "$@"\n')
    (folder / tool).chmod(0o755)
    return folder


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [pytest.param(1, marks=MORE), pytest.param(CHUNK, marks=MORE), SIZE])
def test_a_file_comes_there_and_back_whole(cluster, file, tmp_path, num_bytes):
    """Whatever the size; the directories there are made."""
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert push(file, "cluster:new/dir/a.tar") is True
    assert (cluster.home / "new" / "dir" / "a.tar").read_bytes() == file.read_bytes()
    assert names_in(cluster.home / "new" / "dir") == ["a.tar"]
    assert pull(tmp_path / "b", "cluster:new/dir/a.tar").read_bytes() == file.read_bytes()


def test_another_file_is_only_replaced_when_asked_and_the_same_is_not_sent_again(cluster, file):
    there = cluster.home / "runs" / "a.tar"
    there.parent.mkdir()
    for name in (".a.tar.part-0123456789abcdef", ".b.tar.part-0123456789abcdef"):
        (there.parent / name).write_text("of another content")
    assert push(file) is True
    assert names_in(there.parent) == [".b.tar.part-0123456789abcdef", "a.tar"]
    assert push(file) is False
    for other in (b"short", bytes(SIZE)):  # another size, and the same size
        there.write_bytes(other)
        with pytest.raises(ConfigError, match=r"^cluster:runs/a.tar: another file is there already. Replace it with"):
            push(file)
        assert there.read_bytes() == other
        assert push(file, force=True) is True
        assert there.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "name", ["it's $(touch x) `touch y`;touch z.tar", "-rf.tar", pytest.param("*?[a]ü.tar", marks=MORE)]
)
def test_names_are_names_to_the_shell_there(cluster, file, tmp_path, name):
    assert push(file, f"cluster:{name}") is True
    assert names_in(cluster.home) == [name]
    assert pull(tmp_path / "b", f"cluster:{name}").read_bytes() == file.read_bytes()


@MORE
def test_a_url_with_a_port_has_an_absolute_path(cluster, file):
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    place = f"ssh://{user}@127.0.0.1:{cluster.port}"
    assert push(file, f"{place}{cluster.home}/url/a.tar") is True
    assert push(file, f"{place}/~/url/a.tar") is False
    assert names_in(cluster.home / "url") == ["a.tar"]


# --- cuts ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(file):
    """Several times what may be in flight between two ssh: a window of 2 MiB."""
    file.write_bytes(random.Random(4).randbytes(LARGE))
    return file


def test_two_cuts_on_the_way_there_and_only_what_was_missing_is_sent(cluster, large, patience):
    patient, lines = patience
    cluster.relay.cuts[:] = [5 * MIB, 3 * MIB]
    assert push(large, "cut:runs/a.tar", patience=patient) is True
    assert cluster.relay.num_cut == 2
    assert [line.split(":")[0] for line in lines] == ["cut         the connection to cut failed"] * 2
    assert (cluster.home / "runs" / "a.tar").read_bytes() == large.read_bytes()
    assert names_in(cluster.home / "runs") == ["a.tar"]
    assert cluster.relay.num_connections == 6  # to ask and to send, three times
    # Without going on it would be 5 + 3 + 8 MiB; what was in flight at a cut is sent again.
    assert LARGE < cluster.relay.up_bytes < LARGE + 5 * MIB


def test_two_cuts_on_the_way_back_and_only_what_was_missing_is_sent(cluster, large, tmp_path, patience):
    patient, lines = patience
    push(large)
    cluster.relay.cuts[:] = [5 * MIB, 2 * MIB]
    assert pull(tmp_path / "b", "cut:runs/a.tar", patience=patient).read_bytes() == large.read_bytes()
    assert (cluster.relay.num_cut, len(lines)) == (2, 2)
    assert LARGE < cluster.relay.down_bytes < LARGE + 5 * MIB


@MORE
def test_nothing_is_under_the_final_name_after_a_cut_and_the_next_push_goes_on(cluster, large):
    cluster.relay.cuts[:] = [6 * MIB]
    with pytest.raises(EnvironmentFault) as caught:
        push(large, "cut:runs/a.tar", patience=Patience(0))
    assert "gave up after 1 attempts in a row" in str(caught.value)
    assert "Run the same command again to go on from there" in str(caught.value)
    digest = hashlib.sha256(large.read_bytes()).hexdigest()
    assert names_in(cluster.home / "runs") == [f".a.tar.part-{digest[:16]}"]
    before = cluster.relay.up_bytes
    assert push(large, "cut:runs/a.tar") is True
    assert cluster.relay.up_bytes - before < 5 * MIB
    assert names_in(cluster.home / "runs") == ["a.tar"]


@pytest.mark.parametrize("damage", ["changed", pytest.param("zeros", marks=MORE), "longer"])
def test_what_is_wrong_in_a_part_is_sent_again_whatever_its_size(cluster, file, damage):
    raw = bytearray(file.read_bytes())
    if damage == "changed":
        raw[2 * CHUNK + 5] ^= 1
        raw[4 * CHUNK + 5] ^= 1
    elif damage == "zeros":
        raw[2 * CHUNK : 3 * CHUNK] = bytes(CHUNK)
    else:
        raw += b"more"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    part = cluster.home / "runs" / f".a.tar.part-{digest[:16]}"
    part.parent.mkdir()
    part.write_bytes(raw)
    assert push(file, "cut:runs/a.tar") is True
    assert (cluster.home / "runs" / "a.tar").read_bytes() == file.read_bytes()
    assert (cluster.relay.up_bytes < 4 * CHUNK) == (damage != "longer")  # the chunk; a longer part is begun anew


def test_what_is_wrong_in_a_part_here_is_fetched_again(cluster, file, tmp_path):
    push(file)
    cluster.relay.cuts[:] = [5 * CHUNK]
    with pytest.raises(EnvironmentFault):
        pull(tmp_path / "b", "cut:runs/a.tar", patience=Patience(0))
    (part,) = tmp_path.glob(".b.part-*")
    raw = bytearray(part.read_bytes())
    assert raw
    raw[5] ^= 1
    part.write_bytes(raw)
    assert pull(tmp_path / "b").read_bytes() == file.read_bytes()


def test_what_arrives_changed_never_gets_the_name(cluster, file, tmp_path, patience):
    """Once on the way there and once on the way back a tool changes bytes."""
    patient, lines = patience
    dd = shutil.which("dd")
    up = f'[ -e $HOME/up.once ] || {{ : >$HOME/up.once; tr a b | {dd} "$@"; exit; }}'
    bad = wrapped(tmp_path, "dd", f'case "$*" in *seek=*) {up};; esac')
    cluster.use(prelude=f"PATH={bad}:$PATH; export PATH")
    assert push(file, patience=patient) is True
    assert lines == ["cut         what arrived there has another sha256 than the file; attempt 1 of 5 in 0 s"]
    assert (cluster.home / "runs" / "a.tar").read_bytes() == file.read_bytes()
    down = f'[ -e $HOME/down.once ] || {{ : >$HOME/down.once; {dd} "$@" | tr a b; exit; }}'
    (bad / "dd").write_text(f'#!/bin/sh\ncase "$*" in *count=7*) {down};; esac\nexec {dd} "$@"\n')
    assert pull(tmp_path / "b", patience=patient).read_bytes() == file.read_bytes()
    assert lines[1:] == ["cut         chunk 1 of 7 arrived with another hash; attempt 1 of 5 in 0 s"]


@MORE
def test_a_killed_session_there_is_a_cut(cluster, file, patience):
    """The shell there is killed, once, when it is to take data."""
    patient, lines = patience
    once = cluster.home / "once"
    cluster.use(
        prelude=f'case "$SSH_ORIGINAL_COMMAND" in *seek=*) [ -e {once} ] || {{ : >{once}; kill -9 $$; }};; esac'
    )
    assert push(file, patience=patient) is True
    assert len(lines) == 1
    assert (cluster.home / "runs" / "a.tar").read_bytes() == file.read_bytes()


def test_cuts_without_progress_end_after_the_limit(cluster, file, patience):
    patient, lines = patience
    patient.retries = 2
    cluster.relay.cuts[:] = [100] * 99  # in the middle of the handshake
    with pytest.raises(EnvironmentFault, match=r"gave up after 3 attempts in a row without progress.*nothing is there"):
        push(file, "cut:runs/a.tar", patience=patient)
    assert len(lines) == 2


@MORE
def test_cuts_with_progress_do_not_count_together(cluster, large, tmp_path):
    push(large)
    cluster.relay.cuts[:] = [2 * MIB] * 2
    patient = Patience(1, first_pause_s=0.01)
    assert pull(tmp_path / "b", "cut:runs/a.tar", patience=patient).read_bytes() == large.read_bytes()
    assert cluster.relay.num_cut == 2


def test_a_signal_leaves_a_part_that_the_next_push_continues(cluster, file, tmp_path):
    """SIGTERM, when three chunks have arrived and the machine there takes no more."""
    few = 3 * CHUNK
    slow = wrapped(
        tmp_path, "dd", f'case "$*" in *seek=*) head -c {few} | {shutil.which("dd")} "$@"; exec sleep 30;; esac'
    )
    cluster.use(prelude=f"PATH={slow}:$PATH; export PATH")
    process = subprocess.Popen([sys.executable, "-c", PUSH, str(file)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and [p.stat().st_size for p in cluster.home.glob("runs/.a.tar.part-*")] != [few]:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert "Preempted: Stopped by SIGTERM" in process.communicate(timeout=20)[1]
    (part,) = cluster.home.glob("runs/.*")
    assert part.read_bytes() == file.read_bytes()[:few]
    cluster.use()
    assert push(file, "cut:runs/a.tar") is True
    assert cluster.relay.up_bytes < SIZE - 2 * CHUNK
    assert names_in(cluster.home / "runs") == ["a.tar"]


# --- other machines --------------------------------------------------------------------------------------------------


@MORE
@pytest.mark.parametrize("shell", ["dash", "bash", "zsh", "tcsh", "fish", "busybox sh"])
def test_the_login_shell_there_may_be_any(cluster, file, tmp_path, shell):
    if shutil.which(shell.split()[0]) is None:
        pytest.skip(f"{shell} is not installed")
    cluster.use(shell=shell)
    assert push(file) is True
    assert push(file) is False
    assert pull(tmp_path / "b").read_bytes() == file.read_bytes()


@MORE
@pytest.mark.parametrize("tool", ["shasum", "openssl", "busybox"])
def test_the_tools_there_may_be_those_of_another_system(cluster, file, tmp_path, tool):
    """A PATH with nothing but what the scripts say they need; macOS has shasum, Alpine has busybox."""
    if (program := shutil.which(tool)) is None:
        pytest.skip(f"{tool} is not installed")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dd", "mkdir", "mv", "rm", "wc", "sync", *(["sha256sum"] if tool == "busybox" else [])):
        (tools / name).symlink_to(program if tool == "busybox" else shutil.which(name))
    if tool != "busybox":
        (tools / tool).symlink_to(program)
    if tool == "shasum":
        (tools / "perl").symlink_to(shutil.which("perl"))
    cluster.use(prelude=f"PATH={tools}; export PATH", shell=f"{tools}/sh")
    cluster.relay.cuts[:] = [3 * CHUNK]
    assert push(file, "cut:runs/a.tar") is True
    assert cluster.relay.num_cut == 1
    assert pull(tmp_path / "b").read_bytes() == file.read_bytes()


def test_a_machine_without_a_hash_is_told(cluster, file, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dd", "mkdir"):
        (tools / name).symlink_to(shutil.which(name))
    cluster.use(prelude=f"PATH={tools}; export PATH")
    with pytest.raises(EnvironmentFault, match="sha256sum, shasum or openssl is needed there, and none is installed"):
        push(file)


def test_what_a_login_shell_prints_harms_nothing(cluster, file, tmp_path):
    cluster.use(prelude="echo welcome; echo dualtune; echo bashrc is loud >&2")
    assert push(file) is True
    assert pull(tmp_path / "b").read_bytes() == file.read_bytes()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_there_is_one_clear_error(cluster, file, tmp_path):
    full = wrapped(tmp_path, "dd", f'case "$*" in *seek=*) exec {shutil.which("dd")} of=/dev/full bs=64k;; esac')
    cluster.use(prelude=f"PATH={full}:$PATH; export PATH")
    with pytest.raises(DiskError, match=r"cluster: cannot be written there: .*No space left on device"):
        push(file)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_directory_that_may_not_be_written_is_one_clear_error(cluster, file):
    (cluster.home / "runs").mkdir(mode=0o500)
    with pytest.raises(DiskError, match="Permission denied"):
        push(file)


@pytest.mark.parametrize(("make", "words"), [("file", "runs"), ("directory", "is a directory")])
def test_what_is_in_the_way_is_one_clear_error(cluster, file, make, words):
    if make == "file":
        (cluster.home / "runs").write_text("a file where a directory should be")
    else:
        (cluster.home / "runs" / "a.tar").mkdir(parents=True)
    with pytest.raises(DiskError, match=rf"^cluster: cannot be written there: .*{words}"):
        push(file)


def test_what_is_not_there_cannot_be_fetched(cluster, tmp_path):
    with pytest.raises(EnvironmentFault, match=r"^cluster:no.tar: there is no such file. `dualtune push` brings one"):
        pull(tmp_path / "b", "cluster:no.tar")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("/user\n", "/host\n"), "Permission denied"),
        (("HostKeyAlias throwaway", "HostKeyAlias stranger"), "Host key verification failed"),
        (("StrictHostKeyChecking yes", "NoSuchOption yes"), "[Bb]ad configuration option"),
    ],
)
def test_what_no_other_attempt_mends_ends_at_once(cluster, file, monkeypatch, patience, change, words):
    patient, lines = patience
    other = cluster.folder / "other_config"
    text = (cluster.folder / "ssh_config").read_text().replace("ControlMaster auto", "ControlPath none")
    other.write_text(text.replace(*change))
    monkeypatch.setenv("DUALTUNE_SSH", f"ssh -F {other}")
    with pytest.raises(EnvironmentFault, match=rf"^cluster: ssh could not connect: .*{words}.*Until `ssh -F "):
        push(file, patience=patient)
    assert lines == []


def test_a_refused_connection_is_tried_again_up_to_the_limit(cluster, file, patience):
    patient, lines = patience
    patient.retries = 2
    with pytest.raises(EnvironmentFault, match=r"gave up after 3 attempts.*[Cc]onnection refused"):
        push(file, "ssh://127.0.0.1:1/x/a.tar", patience=patient)
    assert len(lines) == 2


@pytest.mark.parametrize(
    "text",
    [
        "-oProxyCommand=touch x:a.tar",
        "me@-oProxyCommand=x:a.tar",
        "a b:c.tar",
        "`touch x`:a.tar",
        "$(touch x):a.tar",
        "me;x@host:a.tar",
        "ssh://-oProxyCommand=x/a.tar",
        "ssh://me@-v/a.tar",
        "ssh://%60x%60@host/a.tar",
    ],
)
def test_a_host_is_neither_an_option_nor_a_command(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="TARGET: "):
        target.parse(text)


def test_without_ssh_the_error_says_what_to_install(monkeypatch, file):
    monkeypatch.setenv("DUALTUNE_SSH", "no-such-ssh -v")
    with pytest.raises(EnvironmentFault, match=r"^no-such-ssh: cannot be run: .* Install OpenSSH's client"):
        push(file)
    monkeypatch.setenv("DUALTUNE_SSH", "ssh 'unbalanced")
    with pytest.raises(ConfigError, match=r"^DUALTUNE_SSH: got "):
        push(file)

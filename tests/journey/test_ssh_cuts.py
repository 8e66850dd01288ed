"""Files over ssh, against a real sshd that is cut off: whole or not at all, and only what is missing is sent again."""

import hashlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from dualtune.base.errors import EnvironmentFault
from dualtune.use.transfer.remotes.retries import Patience

MORE = pytest.mark.journey
CHUNK = 256 << 10  # of a file of up to 64 MiB
SIZE = 6 * CHUNK + 777  # of the fixture `file`
MIB = 1 << 20
LARGE = 8 * MIB + 777
PUSH = """
import sys
from pathlib import Path
from dualtune.base import interrupt
from dualtune.use.transfer.remotes import target
from dualtune.use.transfer.remotes.retries import Patience
with interrupt.handled():
    target.parse("cluster:runs/a.tar").push(Path(sys.argv[1]), patience=Patience())
"""


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def large(file):
    """Several times what may be in flight between two ssh: a window of 2 MiB."""
    file.write_bytes(random.Random(4).randbytes(LARGE))
    return file


def test_two_cuts_on_the_way_there_and_only_what_was_missing_is_sent(cluster, large, patience):
    patient, lines = patience
    cluster.relay.cuts[:] = [5 * MIB, 3 * MIB]
    assert cluster.push(large, "cut:runs/a.tar", patience=patient) is True
    assert cluster.relay.num_cut == 2
    assert [line.split(":")[0] for line in lines] == ["retry       the connection to cut failed"] * 2
    assert (cluster.home / "runs" / "a.tar").read_bytes() == large.read_bytes()
    assert names_in(cluster.home / "runs") == ["a.tar"]
    assert cluster.relay.num_connections == 6  # to ask and to send, three times
    # Without going on it would be 5 + 3 + 8 MiB; what was in flight at a cut is sent again.
    assert LARGE < cluster.relay.up_bytes < LARGE + 5 * MIB


def test_two_cuts_on_the_way_back_and_only_what_was_missing_is_sent(cluster, large, tmp_path, patience):
    patient, lines = patience
    cluster.push(large)
    cluster.relay.cuts[:] = [5 * MIB, 2 * MIB]
    assert cluster.pull(tmp_path / "b", "cut:runs/a.tar", patience=patient).read_bytes() == large.read_bytes()
    assert (cluster.relay.num_cut, len(lines)) == (2, 2)
    assert LARGE < cluster.relay.down_bytes < LARGE + 5 * MIB


@MORE
def test_nothing_is_under_the_final_name_after_a_cut_and_the_next_push_goes_on(cluster, large):
    cluster.relay.cuts[:] = [6 * MIB]
    with pytest.raises(EnvironmentFault) as caught:
        cluster.push(large, "cut:runs/a.tar", patience=Patience(0))
    assert "gave up after 1 attempts in a row" in str(caught.value)
    assert "Run the same command again to resume" in str(caught.value)
    digest = hashlib.sha256(large.read_bytes()).hexdigest()
    assert names_in(cluster.home / "runs") == [f".a.tar.part-{digest[:16]}"]
    before = cluster.relay.up_bytes
    assert cluster.push(large, "cut:runs/a.tar") is True
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
    part = cluster.home / "runs" / f".a.tar.part-{digest[:16]}" / "data"
    part.parent.mkdir(parents=True)
    part.write_bytes(raw)
    assert cluster.push(file, "cut:runs/a.tar") is True
    assert (cluster.home / "runs" / "a.tar").read_bytes() == file.read_bytes()
    assert (cluster.relay.up_bytes < 4 * CHUNK) == (damage != "longer")  # the chunk; a longer part is begun anew


def test_what_is_wrong_in_a_part_here_is_fetched_again(cluster, file, tmp_path):
    cluster.push(file)
    part = cluster.pull(tmp_path / "b")  # the caller gives it its name
    raw = bytearray(file.read_bytes())
    raw[3 * CHUNK + 5] ^= 1
    part.write_bytes(raw)
    assert cluster.pull(tmp_path / "b", "cut:runs/a.tar") == part
    assert part.read_bytes() == file.read_bytes()
    assert cluster.relay.down_bytes < 2 * CHUNK


def test_what_arrives_changed_never_gets_the_name(cluster, file, tmp_path, patience):
    """Once on the way there and once on the way back a tool changes bytes."""
    patient, lines = patience
    dd = shutil.which("dd")
    up = f'[ -e $HOME/up.once ] || {{ : >$HOME/up.once; tr a b | {dd} "$@"; exit; }}'
    bad = cluster.wrapped("dd", f'case "$*" in *seek=*) {up};; esac')
    cluster.use(prelude=f"PATH={bad}:$PATH; export PATH")
    assert cluster.push(file, patience=patient) is True
    assert lines == ["retry       the received file has the wrong sha256; attempt 1 of 5 in 0 s"]
    assert (cluster.home / "runs" / "a.tar").read_bytes() == file.read_bytes()
    down = f'[ -e $HOME/down.once ] || {{ : >$HOME/down.once; {dd} "$@" | tr a b; exit; }}'
    (bad / "dd").write_text(f'#!/bin/sh\ncase "$*" in *count=7*) {down};; esac\nexec {dd} "$@"\n')
    assert cluster.pull(tmp_path / "b", patience=patient).read_bytes() == file.read_bytes()
    assert lines[1:] == ["retry       chunk 1 of 7 has the wrong hash; attempt 1 of 5 in 0 s"]


@MORE
def test_a_killed_session_there_is_a_cut(cluster, file, patience):
    """The shell there is killed, once, when it is to take data."""
    patient, lines = patience
    once = cluster.home / "once"
    cluster.use(
        prelude=f'case "$SSH_ORIGINAL_COMMAND" in *seek=*) [ -e {once} ] || {{ : >{once}; kill -9 $$; }};; esac'
    )
    assert cluster.push(file, patience=patient) is True
    assert len(lines) == 1
    assert (cluster.home / "runs" / "a.tar").read_bytes() == file.read_bytes()


def test_cuts_without_progress_end_after_the_limit(cluster, file, patience):
    patient, lines = patience
    patient.retries = 2
    cluster.relay.cuts[:] = [100] * 99  # in the middle of the handshake
    with pytest.raises(
        EnvironmentFault, match=r"gave up after 3 attempts in a row without progress.*Nothing is transferred"
    ):
        cluster.push(file, "cut:runs/a.tar", patience=patient)
    assert len(lines) == 2


@MORE
def test_cuts_with_progress_do_not_count_together(cluster, large, tmp_path):
    cluster.push(large)
    cluster.relay.cuts[:] = [4 * MIB, 3 * MIB]
    patient = Patience(1, first_pause_s=0.01)
    assert cluster.pull(tmp_path / "b", "cut:runs/a.tar", patience=patient).read_bytes() == large.read_bytes()
    assert cluster.relay.num_cut == 2


def test_a_signal_leaves_a_part_that_the_next_push_continues(cluster, file, tmp_path):
    """SIGTERM, when three chunks have arrived and the machine there takes no more."""
    few = 3 * CHUNK
    slow = cluster.wrapped(
        "dd", f'case "$*" in *seek=*) head -c {few} | {shutil.which("dd")} "$@"; exec sleep 600;; esac'
    )
    cluster.use(prelude=f"PATH={slow}:$PATH; export PATH")
    process = subprocess.Popen([sys.executable, "-c", PUSH, str(file)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if [p.stat().st_size for p in cluster.home.glob("runs/.a.tar.part-*/data")] == [few]:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert "Preempted: Stopped by SIGTERM" in process.communicate(timeout=1800)[1]
    (part,) = cluster.home.glob("runs/.*/data")
    assert part.read_bytes() == file.read_bytes()[:few]
    cluster.use()
    assert cluster.push(file, "cut:runs/a.tar") is True
    assert cluster.relay.up_bytes < SIZE - 2 * CHUNK
    assert names_in(cluster.home / "runs") == ["a.tar"]

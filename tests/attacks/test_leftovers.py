"""What a killed process leaves behind is removed by the next one, and what others write is not."""

import os
import signal
import subprocess
import sys

import pytest

from dualtune.base import files
from dualtune.base.files import hidden_sibling, remove_abandoned


@pytest.fixture
def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def make(path):
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"half")
    return path


def test_only_what_a_process_of_this_machine_that_is_gone_has_left_is_removed(tmp_path, gone, monkeypatch):
    ours = make(hidden_sibling(tmp_path / "out"))
    left = make(ours.with_name(ours.name.replace(f"tmp-{os.getpid()}-", f"tmp-{gone}-")))
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "getpid", lambda: gone)
        file = hidden_sibling(tmp_path / "bundle.tar")
        patch.setattr(files, "_home", lambda: "0" * 8)
        elsewhere = make(hidden_sibling(tmp_path / "out"))
    file.write_bytes(b"half")
    older = make(tmp_path / f".out.tmp-{gone}-0123abcd")
    theirs = make(tmp_path / ".vim.tmp-1")
    link = tmp_path / left.name.replace("out", "link")
    link.symlink_to(theirs)
    remove_abandoned(tmp_path)
    assert {*tmp_path.iterdir()} == {ours, elsewhere, older, theirs}
    assert [*theirs.iterdir()]


WRITE = """
import sys
from pathlib import Path
from dualtune.base.files import new_directory
with new_directory(Path(sys.argv[1]), by_library=True) as directory:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"whole")
"""


@pytest.mark.parametrize(("fault", "left"), [("synced:1", 1), ("renamed:1", 0)])
def test_a_directory_whose_writer_was_killed_is_there_whole_or_is_removed_by_the_next_one(
    python, tmp_path, fault, left
):
    """As in `dualtune export`, which writes its directory so."""
    killed = python("-c", WRITE, tmp_path / "out", env={"DUALTUNE_FAULT": fault})
    assert killed.returncode == -signal.SIGKILL
    hidden = [path for path in tmp_path.iterdir() if path.name.startswith(".out.tmp-")]
    assert (len(hidden), (tmp_path / "out").exists()) == (left, not left)
    assert python("-c", WRITE, tmp_path / "other").returncode == 0
    names = {"other"} if left else {"other", "out"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert {file.read_bytes() for file in tmp_path.glob("*/*")} == {b"whole"}

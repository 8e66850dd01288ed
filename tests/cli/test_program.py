"""Commands in messages: they work in the shell that reads them, and can be copied from a narrow terminal."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dualtune.cli import program as module
from dualtune.cli.program import in_lines, program, quoted


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An environment of its own, with the script in it or without; its bin directory."""

    def make(*, script: bool) -> Path:
        folder = tmp_path / "a b" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
        if script:
            (folder / "dualtune").write_text("#!/bin/sh\necho it works\n")
            (folder / "dualtune").chmod(0o755)
        monkeypatch.setattr(module.sys, "executable", str(folder / "python"))
        monkeypatch.chdir(tmp_path)
        return folder

    return make


def test_the_bare_name_is_enough_where_the_shell_finds_this_one(installed, monkeypatch):
    monkeypatch.setenv("PATH", str(installed(script=True)), prepend=os.pathsep)
    assert program() == "dualtune"


@pytest.mark.parametrize("other", [False, True])
def test_the_path_is_told_where_the_shell_finds_none_or_another(installed, monkeypatch, tmp_path, other):
    installed(script=True)
    (tmp_path / "dualtune").write_text("#!/bin/sh\necho another\n")
    (tmp_path / "dualtune").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if other else "/usr/bin:/bin")
    assert program() == "'a b/bin/dualtune'"  # relative, because that is shorter
    assert subprocess.run(["bash", "-c", program()], capture_output=True, text=True, check=True).stdout == "it works\n"


def test_without_a_script_it_is_the_module(installed):
    installed(script=False)
    assert program() == "'a b/bin/python' -m dualtune"


def test_a_path_is_absolute_where_that_is_shorter(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert quoted("/etc") == "/etc"
    assert quoted(tmp_path / "it's") == shlex.quote("it's")


@pytest.mark.parametrize("width", [20, 40, 1000])
def test_a_command_over_several_lines_is_the_same_command(width):
    words = ["echo", "one", "--two 'th ree'", "--prompt 'It'\"'\"'s long enough'"]
    text = in_lines(words, width)
    assert subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout == (
        "one --two th ree --prompt It's long enough\n"
    )
    longest = max(map(len, words)) + 6
    assert all(len(line) <= max(width, longest) for line in text.split("\n"))
    assert ("\n" in text) == (width < 100)

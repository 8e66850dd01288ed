"""The table of what was asked for is whole, and each test, command and page that it names exists."""

import ast
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache

import pytest
from pages import ROOT
from shell_commands import shell_problems

script = runpy.run_path(str(ROOT / "scripts" / "requirements.py"))
LINES = script["requirements"]()
NUMBERS = {
    "A": 11,
    "B": 8,
    "C": 13,
    "D": 14,
    "E": 8,
    "F": 19,
    "G": 14,
    "H": 15,
    "I": 29,
    "J": 11,
    "K": 14,
    "L": 8,
    "X": 30,
}


@cache
def names_in(path):
    """The names of the tests of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_line_is_there_once():
    ids = [f"{section}{number:02}" for section, last in NUMBERS.items() for number in range(1, last + 1)]
    assert re.findall(r"^(\w+):", script["FILE"].read_text(encoding="utf-8"), re.M) == ids  # YAML takes a key twice
    assert sum(NUMBERS.values()) == 164 + NUMBERS["X"] and len({line.asks for line in LINES}) == len(ids)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.id)
def test_what_shows_a_line_exists(line):
    for place, *options in line.tests:
        path, _, name = place.partition("::")
        assert (ROOT / path).exists() and (not name or name in names_in(path)), place
        assert options[:1] in ([], ["-k"], ["-m"]) and len(options) != 1, options
    assert [problem for words in line.commands for problem in shell_problems(shlex.join(words))] == []
    assert [page for page in line.pages if not (ROOT / page).exists()] == []


@pytest.mark.long
def test_every_test_of_the_table_is_collected():
    """Also those that an expression selects: PyTest ends with 5 where it selects none."""
    for words in script["calls"](LINES):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *words]
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0, words


def test_a_section_is_printed_with_what_shows_it(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["requirements.py", "j", "A04"])
    script["main"]()
    shown = capsys.readouterr().out
    assert re.findall(r"^([A-Z]\d\d) ", shown, re.M) == ["A04", *(f"J{number:02}" for number in range(1, 12))]
    assert re.search(r"^all +\d+ +\d+ +\d*", shown, re.M) and "> tests/profiler/test_profiler.py::" in shown


def test_the_tests_of_a_section_are_run(monkeypatch):
    calls = []
    monkeypatch.setattr(subprocess, "call", lambda command, cwd: calls.append(command[3:]) or len(calls) - 1)
    lines = [line for line in LINES if line.id in ("A01", "A02")]
    assert script["run"](lines) == 1
    assert calls == [["-q", *(words[0] for words in lines[0].tests)], ["-q", *lines[1].tests[0]]]


def test_a_name_of_no_line_is_refused():
    with pytest.raises(SystemExit, match=r"got Q, allowed: a section \(ABCDEFGHIJKLX\)"):
        script["chosen"](LINES, ["Q"])

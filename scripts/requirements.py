"""What dualtune was asked for, line by line: whether it is there, and the test or command that shows it.

    python scripts/requirements.py              # every line, and how many there are of each state
    python scripts/requirements.py F X28        # one section, one line
    python scripts/requirements.py --run F      # runs the tests of a section; PyTest's exit code

The lines are in docs/requirements.yaml.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import yaml

from dualtune.base.text import in_columns

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "requirements.yaml"
State = Literal["met", "other", "partly", "hardware"]
WORDS: dict[State, str] = {
    "met": "met", "other": "better by another name", "partly": "partly", "hardware": "needs a GPU or a Mac",
}  # fmt: skip


class Requirement(NamedTuple):
    id: str  # a letter for the section, and a number
    asks: str
    state: State
    shown_by: tuple[str, ...]
    why: str = ""  # it is not met as it was asked for

    @property
    def tests(self) -> list[list[str]]:
        """The arguments of PyTest of each test, or of each folder, that shows it."""
        return [words for text in self.shown_by if (words := shlex.split(text))[0].startswith("tests/")]

    @property
    def commands(self) -> list[list[str]]:
        return [words for text in self.shown_by if (words := shlex.split(text))[0] in ("dualtune", "python", "make")]

    @property
    def pages(self) -> list[str]:
        return [text for text in self.shown_by if Path(text).suffix == ".md"]


def requirements() -> list[Requirement]:
    """Return every line of the file, in its order. ValueError if one lacks what a line must say."""
    lines = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    found = [
        Requirement(name, line["asks"], line["state"], tuple(line["shown_by"]), line.get("why", ""))
        for name, line in lines.items()
    ]
    for line in found:
        if line.state not in get_args(State):
            raise ValueError(f"{line.id}: state: got {line.state!r}, allowed: {', '.join(get_args(State))}")
        if (line.state == "met") == bool(line.why):
            raise ValueError(f"{line.id}: why: a line that is {line.state} {'needs no' if line.why else 'says'} why")
        if not line.shown_by or len(line.tests) + len(line.commands) + len(line.pages) < len(line.shown_by):
            raise ValueError(f"{line.id}: shown_by: got {line.shown_by}, allowed: tests, commands and pages")
    return found


def chosen(lines: list[Requirement], names: list[str]) -> list[Requirement]:
    """Return the lines of these sections and ids, all if none is given. SystemExit if a name is of none."""
    for name in names:
        if not any(line.id.startswith(name.upper()) for line in lines):
            sections = "".join(sorted({line.id[0] for line in lines}))
            raise SystemExit(f"got {name}, allowed: a section ({sections}) or a line, such as {lines[0].id}")
    return [line for line in lines if not names or line.id.startswith(tuple(name.upper() for name in names))]


def as_text(lines: list[Requirement]) -> Iterator[str]:
    for line in lines:
        yield f"{line.id}  {line.asks}"
        yield f"     {WORDS[line.state]}{f': {line.why}' if line.why else ''}"
        yield from (f"     > {text}" for text in line.shown_by)


def totals(lines: list[Requirement]) -> str:
    """Return the table of states by section."""
    counted = Counter((line.id[0], line.state) for line in lines)
    sections = sorted({line.id[0] for line in lines})
    rows = [[section, *(str(counted[section, state] or "") for state in WORDS)] for section in sections]
    every = ["all", *(str(sum(line.state == state for line in lines)) for state in WORDS)]
    return in_columns([["", *WORDS.values()], *rows, every])


def calls(lines: list[Requirement]) -> list[list[str]]:
    """Return what PyTest is called with for these lines: tests without options together, each with options alone."""
    tests = list(dict.fromkeys(tuple(words) for line in lines for words in line.tests))
    together = [words[0] for words in tests if len(words) == 1]
    return [*([together] if together else []), *(list(words) for words in tests if len(words) > 1)]


def run(lines: list[Requirement]) -> int:
    codes = [subprocess.call([sys.executable, "-m", "pytest", "-q", *call], cwd=ROOT) for call in calls(lines)]
    return max(codes, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SECTION|LINE")
    parser.add_argument("--run", action="store_true", help="run the tests of these lines")
    args = parser.parse_args()
    lines = chosen(requirements(), args.names)
    if args.run:
        sys.exit(run(lines))
    print(*as_text(lines), "", totals(lines), sep="\n")


if __name__ == "__main__":
    main()

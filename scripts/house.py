"""How large the house is, by room: files, lines, lines a file and a function, comments, words of the documentation.

    python scripts/house.py [DIRECTORY …]

DIRECTORY: a checkout, here by default; several are printed one after another, to compare commits. A room is a folder of
`dualtune/`, or a backend. An assertion holds a phrase if a text of four or more words stands in it.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from dualtune.base.text import in_columns

PHRASE = 4  # words


def rooms_of(root: Path) -> dict[str, list[Path]]:
    """The Python files of each room."""
    rooms = {folder.name: sorted(folder.rglob("*.py")) for folder in sorted((root / "dualtune").iterdir())}
    rooms |= {folder.name: sorted(folder.rglob("*.py")) for folder in sorted((root / "backends").glob("dualtune_*"))}
    return {"(root)": sorted((root / "dualtune").glob("*.py"))} | {
        name: files for name, files in rooms.items() if files
    }


def row_of(name: str, files: list[Path]) -> tuple[str, ...]:
    """The numbers of one room."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    lines = [text.count("\n") for text in texts]
    functions = [length for text in texts for length in function_lengths(ast.parse(text))]
    comments = sum(line.lstrip().startswith("#") for text in texts for line in text.splitlines())
    return (
        name, f"{len(files):,}", f"{sum(lines):,}", f"{statistics.mean(lines):.0f}", f"{sum(n < 60 for n in lines):,}",
        f"{statistics.mean(functions):.1f}" if functions else "", f"{100 * comments / max(1, sum(lines)):.1f} %",
    )  # fmt: skip


def function_lengths(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            yield node.end_lineno - node.lineno + 1


def phrases(tests: list[Path]) -> tuple[int, int]:
    """How many assertions hold a phrase, and how many there are."""
    found = []
    for file in tests:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assert):
                texts = (part.value for part in ast.walk(node.test) if isinstance(part, ast.Constant))
                found.append(any(isinstance(text, str) and len(text.split()) >= PHRASE for text in texts))
    return sum(found), len(found)


def print_house(root: Path) -> None:
    rooms = rooms_of(root)
    head = ("room", "files", "lines", "a file", "under 60", "a function", "comments")
    every = row_of("all", [file for files in rooms.values() for file in files])
    print(in_columns([head, *(row_of(name, files) for name, files in rooms.items()), every]))
    tests = sorted((root / "tests").rglob("*.py"))
    pages = [page for page in [*root.glob("*.md"), *(root / "docs").rglob("*.md")] if page.name != "CHANGELOG.md"]
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in pages}
    decisions = sum(number for page, number in words.items() if "decisions" in page.parts)
    with_phrase, assertions = phrases(tests)
    print(f"\ndocumentation  {len(pages)} pages, {sum(words.values()):,} words, {decisions:,} of them decisions")
    lines = sum(test.read_text(encoding="utf-8").count("\n") for test in tests)
    print(f"tests          {len(tests)} files, {lines:,} lines")
    print(f"assertions     {with_phrase:,} of {assertions:,} hold a text of {PHRASE} words")


def main(directories: list[str]) -> None:
    for directory in directories or ["."]:
        print(f"\n{directory}\n")
        print_house(Path(directory))


if __name__ == "__main__":
    main(sys.argv[1:])

"""How to call this program again: commands in messages work in the shell of the user."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """Return `dualtune` if the shell finds this program, otherwise its path, or `python -m dualtune` by path."""
    script = Path(sys.executable).with_name("dualtune")
    if not script.is_file():
        return f"{quoted(sys.executable)} -m dualtune"
    path = shutil.which("dualtune")
    return "dualtune" if path and Path(path).samefile(script) else quoted(script)


def quoted(path: str | Path) -> str:
    """Return a path for a shell, relative if that is shorter."""
    return shlex.quote(min(str(path), os.path.relpath(path), key=len))


def in_lines(words: list[str], width: int) -> str:
    """Join quoted words to a command, on several lines if needed, that can be copied unchanged."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)

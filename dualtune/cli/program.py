"""How this program is called again: commands in messages work in the shell that they are read in."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """`dualtune` where the shell finds this very one, otherwise its path, or `python -m dualtune` by path."""
    script = Path(sys.executable).with_name("dualtune")
    if not script.is_file():
        return f"{quoted(sys.executable)} -m dualtune"
    found = shutil.which("dualtune")
    return "dualtune" if found and Path(found).samefile(script) else quoted(script)


def quoted(path: str | Path) -> str:
    """A path for a shell, relative where that is shorter."""
    return shlex.quote(min(str(path), os.path.relpath(path), key=len))


def in_lines(words: list[str], width: int) -> str:
    """A command of quoted words, over several lines where one does not hold it; it can be copied as it is."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)

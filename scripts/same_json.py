"""Run the commands that print JSON with two versions of dualtune, and compare what they print.

    python scripts/same_json.py OLD NEW

OLD and NEW are commits, or directories with a tree of dualtune, as for `same_bits.py`. Both versions read the same
files. Times, speeds, memory in use, versions and paths differ from run to run, so of these only the key is compared.
Prints each command with what differs, and ends with 1 if anything does. NEW may have more keys.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from same_bits import Tree, open_tree, settings_as_words, write_material

RUN = {"train.steps": 4, "train.documents_per_step": 2, "train.warmup": 0, "run.save_every": 2, "data.max_length": 96}
VARIES = re.compile(
    r"seconds|_s$|per_s|time|date|start|reason|free|available|used|bytes|version|path|dir|command|pid|age|speed|rss|hash"
)
COMMANDS = (
    ("check-gpu", "--json"), ("check-config", "CONFIG", "--platform", "numpy", "--json"),
    ("check-data", "CONFIG", "--json"), ("plan", "LLAMA", "--platform", "cpu", "--json"),
    ("preview", "CONFIG", "--json"), ("runs", "RUNS", "--json"), ("runs", "compare", "RUN", "RUN", "--json"),
    ("checkpoints", "RUN", "--json"), ("profile", "RUN", "--json"), ("adapter", "inspect", "RUN/adapter", "--json"),
    ("adapter", "diff", "RUN/adapter", "RUN/adapter", "--json"),
    ("verify", "RUN/adapter", "--platform", "numpy", "--json"),
    ("eval", "CONFIG", "--adapter", "RUN/adapter", "--platform", "numpy", "--json"), ("config", "--schema"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        old, new = open_tree("OLD", arguments.old, home / "old"), open_tree("NEW", arguments.new, home / "new")
        write_material(home / "material", old.path)
        run = home / "runs" / "one"
        words = settings_as_words(RUN | {"run.dir": str(run)})
        old.dualtune("train", str(home / "material" / "softmax.yaml"), "--platform", "numpy", *words)
        differ = 0
        for command in COMMANDS:
            here = [_filled(word, home, run) for word in command]
            before = _printed(old, here)
            problems = list(differences(before, _printed(new, here)))
            if "error" in before:  # then nothing of what it prints was compared
                problems.append(f"OLD ends with an error: {before['error']}")
            differ += bool(problems)
            print(f"{'differs' if problems else 'equal  '}  {' '.join(command)}")
            for problem in problems:
                print(f"         {problem}")
    return int(differ > 0)


def _filled(word: str, home: Path, run: Path) -> str:
    names = {
        "CONFIG": home / "material" / "softmax.yaml",
        "LLAMA": home / "material" / "llama.yaml",
        "RUNS": run.parent,
    }
    return str(names.get(word, word)) if word in names else word.replace("RUN", str(run))


def _printed(tree: Tree, words: list[str]) -> Any:
    """What a command prints, read as JSON. `check-gpu` prints it and ends with 4 where there is no GPU."""
    command = [sys.executable, "-m", "dualtune", *words]
    done = subprocess.run(command, env=tree.environment, cwd=tree.path, capture_output=True, text=True, timeout=600)
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {"error": (done.stdout + done.stderr).strip().splitlines()[-1:]}


def differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """What of the old JSON the new one lacks, or has otherwise."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name, value in old.items():
            where = f"{key}.{name}".lstrip(".")
            if name not in new:
                yield f"{where}: missing"
            else:
                yield from differences(value, new[name], where)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, now) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, now, f"{key}[{index}]")
    elif old != new and not VARIES.search(key.rpartition(".")[2]):
        yield f"{key}: {old!r} before, {new!r} now"


if __name__ == "__main__":
    sys.exit(main())

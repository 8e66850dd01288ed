"""Measure in turns how fast two versions of dualtune train and start: OLD, NEW, NEW, OLD, …

    .venv/bin/python scripts/speed_pair.py OLD NEW [--pairs 7] [--output build/speed.json]

OLD and NEW are commits, or directories with a tree of dualtune; each runs with its own code (see same_bits.py). It
measures

- train_step_s: the fastest step of `dualtune bench`, torch on the CPU, the demo's model with packing and dropout;
- help_s: the CPU time (user and system) of `dualtune --help`;
- start_s: the CPU time of `dualtune train … --dry-run`, which imports the backend and reads config and data.

Every pair gives a ratio NEW / OLD, so a machine that becomes slower between pairs does not change it. On a machine that
others use too, the ratio of the least seconds of all pairs says more: other work only adds time. The JSON has all
seconds, that ratio, and the median, smallest and largest ratio of the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from same_bits import COMMON, EVERYTHING, Tree, open_tree, settings_as_words, write_material


def train_step_s(tree: Tree, material: Path, out: Path) -> float:
    """Return the seconds of the fastest of 20 steps."""
    words = ["bench", str(material / "llama.yaml"), "--platform", "cpu", "--steps", "20", "--warmup", "5", "--json"]
    result = tree.dualtune(*words, "--out", str(out), *settings_as_words(COMMON | EVERYTHING))
    return float(min(json.loads(result)["step_s"]))


def processor_s(action: Callable[[], Any]) -> float:
    """Return the CPU time (user and system) of the processes that an action starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    action()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measures(material: Path, home: Path) -> dict[str, Callable[[Tree], float]]:
    dry = ["train", str(material / "llama.yaml"), "--platform", "cpu", "--dry-run"]
    dry += settings_as_words(COMMON | {"run.dir": str(home / "never-written")})
    return {
        "train_step_s": lambda tree: train_step_s(tree, material, home / f"bench-{tree.name}"),
        "help_s": lambda tree: processor_s(lambda: tree.dualtune("--help")),
        "start_s": lambda tree: processor_s(lambda: tree.dualtune(*dry)),
    }


def in_turns(measure: Callable[[Tree], float], old: Tree, new: Tree, pairs: int) -> dict[str, Any]:
    """Measure the pairs, after one discarded pair that writes the bytecode and warms the caches."""
    seconds: dict[str, list[float]] = {"old": [], "new": []}
    for number in range(-1, pairs):
        for tree in (old, new) if number % 2 else (new, old):  # so that neither is always second
            taken = measure(tree)
            if number >= 0:
                seconds[tree.name].append(taken)
    ratios = [after / before for before, after in zip(seconds["old"], seconds["new"], strict=True)]
    fastest = min(seconds["new"]) / min(seconds["old"])
    summary = {"fastest": fastest, "median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {"ratio_new_to_old": summary, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit, or a directory with a tree")
    parser.add_argument("new", help="the same for the other version")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="speed-pair-") as place:
        home = Path(place)
        old, new = open_tree("old", args.old, home / "old"), open_tree("new", args.new, home / "new")
        write_material(home / "material", old.path)
        found: dict[str, Any] = {}
        for name, measure in measures(home / "material", home).items():
            found[name] = in_turns(measure, old, new, args.pairs)
            ratio = found[name]["ratio_new_to_old"]
            print(
                f"{name:14} new / old {ratio['fastest']:.3f} by the fastest, {ratio['median']:.3f} by the median pair "
                f"(from {ratio['least']:.3f} to {ratio['most']:.3f})",
                flush=True,
            )
    report = {
        "old": args.old, "new": args.new, "pairs": args.pairs, "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.machine(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0], "measures": found,
    }  # fmt: skip
    text = json.dumps(report, indent=2) + "\n"
    args.output.write_text(text, encoding="utf-8") if args.output else sys.stdout.write(text)


if __name__ == "__main__":
    main()

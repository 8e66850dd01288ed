"""Count the launches of whole training steps on a stand-in for a GPU, and add what changed to the budget.

Nothing is measured: the counts say what a GPU would be asked to do. Run it after a change, with the reason for it:
python benchmarks/launches.py --reason "the rotation negates its sines itself"
The other methods, optimizers and objectives are in the part "methods", and in the table of results/performance.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import page_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "launches.json"
PAGE = RESULTS.with_name("performance.md")
WORK = ("micro_batch", "step", "evaluation", "logprobs")
PLAIN = {"experts": "mixture"}  # what a method is compared with: the same without it; of the others, "dropout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reason", required=True, help="why the counts change")
    reason = parser.parse_args().reason
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = _counted()
    for shape, counts in found["shapes"].items():
        line = {work: {key: counts[work][key] for key in ("kernels", "products")} for work in WORK if work in counts}
        lines = results.setdefault("methods" if shape in found["methods"] else "torch", {}).setdefault(shape, [])
        if not lines or any(lines[-1][work] != line[work] for work in line):
            lines.append({"date": date.today().isoformat(), **line, "reason": reason})
            print(f"{shape}: {line}")
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(page_tables.write(PAGE, {"methods": table(results)}))


def table(results: Mapping[str, Any]) -> str:
    """Return the newest counts: kernels and products of a micro-batch and of an update, and what is more than plain."""
    lines = ["| | micro-batch | more than plain | update | log-probabilities first |", "|---|---|---|---|---|"]
    for shape in ("dropout", "mixture"):
        lines.append(f"| plain, `{shape}` | {_text(results['torch'][shape][-1])} |")
    for name, found in results["methods"].items():
        plain = results["torch"][PLAIN.get(name, "dropout")][-1]
        lines.append(f"| {name} | {_text(found[-1], plain)} |")
    return "\n".join(lines)


def _text(line: Mapping[str, Any], plain: Mapping[str, Any] | None = None) -> str:
    def pair(work: str) -> str:
        return f"{line[work]['kernels']}, {line[work]['products']}" if work in line else ""

    more = ""
    if plain is not None:
        more = ", ".join(f"{line['micro_batch'][k] - plain['micro_batch'][k]:+d}" for k in ("kernels", "products"))
    return f"{pair('micro_batch')} | {more} | {pair('step')} | {pair('logprobs')}"


def _counted() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "counts.json"
        subprocess.run([sys.executable, str(ROOT / "tests/nogpu/fake"), "--output", str(output)], check=True)
        return json.loads(output.read_text())


if __name__ == "__main__":
    main()

"""Count the launches of whole training steps on a stand-in for a GPU, and add what changed to the budget.

Nothing is measured: the counts say what a GPU would be asked to do. Run it after a change, with the reason for it:
python benchmarks/launches.py --reason "the rotation negates its sines itself"
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "launches.json"
WORK = ("micro_batch", "step", "evaluation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reason", required=True, help="why the counts change")
    reason = parser.parse_args().reason
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    budget = results.setdefault("torch", {})
    for shape, counts in _counted().items():
        line = {work: {key: counts[work][key] for key in ("kernels", "products")} for work in WORK}
        lines = budget.setdefault(shape, [])
        if not lines or any(lines[-1][work] != line[work] for work in WORK):
            lines.append({"date": date.today().isoformat(), **line, "reason": reason})
            print(f"{shape}: {line}")
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


def _counted() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "counts.json"
        subprocess.run([sys.executable, str(ROOT / "tests/nogpu/fake"), "--output", str(output)], check=True)
        return json.loads(output.read_text())["shapes"]


if __name__ == "__main__":
    main()

"""What a tracker costs: processor seconds of the process that sends the rows of a run, to open it and for each row.

    PYTHONPATH=.trackers python benchmarks/tracker_cost.py [--rows 1000] [--rounds 3]     .trackers: make test-trackers

The training does nothing for a tracker; its process takes processor time beside it. A run on the model that dualtune
ships is sent with one row of metrics.jsonl, and with many copies of that row, each with a step of its own. Offline, in
the run directory. Writes results/tracker_cost.json with the trackers that are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import record
from startup import COMMAND, child_cpu_s

import dualtune
from dualtune.show.trackers.tracker import TRACKERS

DEMO = Path(dualtune.__file__).parent / "demo"
CONFIG = f"""
model: {{name: {DEMO / "model"}, dtype: float32}}
data: {{train: {DEMO / "data/heldout.jsonl"}, eval: 0, max_length: 256}}
train: {{steps: 1, documents_per_step: 4, warmup: 0}}
run: {{dir: run, report: false}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "config.yaml").write_text(CONFIG, encoding="utf-8")
        child_cpu_s([sys.executable, "-c", COMMAND, "train", "config.yaml", "--platform", "cpu"], place)
        for name, kind in TRACKERS.items():
            if importlib.util.find_spec(kind.package) is not None:
                found[name] = cost(place, name, args.rows, args.rounds)
    print(json.dumps(found, indent=2), record.write("tracker_cost", {"rows": args.rows, "trackers": found}), sep="\n")


def cost(place: Path, name: str, rows: int, rounds: int) -> dict[str, float | str]:
    """Return the medians of some rounds."""
    sent_s(place, name, 1)  # fills the caches of the disk
    one = statistics.median(sent_s(place, name, 1) for _ in range(rounds))
    many = statistics.median(sent_s(place, name, 1 + rows) for _ in range(rounds))
    package = "mlflow-skinny" if name == "mlflow" else name
    return {"version": version(package), "open_s": round(one, 2), "us_per_row": round(1e6 * (many - one) / rows)}


def sent_s(place: Path, name: str, rows: int) -> float:
    """Return the processor seconds of the process that sends so many rows of a fresh copy of the run."""
    run = Path(shutil.copytree(place / "run", place / "copy"))
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    row = next(line for line in lines if "loss" in line)
    text = "".join(json.dumps(row | {"step": step}) + "\n" for step in range(1, 1 + rows))
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    quiet = {"TRACKIO_DIR": str(run / "trackio"), "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": ""}
    seconds = child_cpu_s([sys.executable, "-P", "-m", "dualtune.show.trackers.send", str(run), name], place, **quiet)
    shutil.rmtree(run)
    return seconds


if __name__ == "__main__":
    main()

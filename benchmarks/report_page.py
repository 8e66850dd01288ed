"""What the page of a run costs at its end: seconds and bytes, by the number of steps.

    python benchmarks/report_page.py [--rounds 5]

A run of the demo's model is made longer by repeating its rows, with steps and times that go on; then its page is made
here. Writes results/report_page.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path

import record

import dualtune
from dualtune.config import load_config
from dualtune.engine.backend import get_backend
from dualtune.show.report.run_page import run_page
from dualtune.show.run import run

DEMO = Path(dualtune.__file__).parent / "demo"
STEPS = (100, 1_000, 10_000, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        rows = _short_run(Path(folder) / "run")
        for steps in STEPS:
            (Path(folder) / "run" / "metrics.jsonl").write_text("".join(_longer(rows, steps)), encoding="utf-8")
            seconds: list[float] = []
            for _ in range(rounds):
                began = time.perf_counter()
                page = run_page([Path(folder) / "run"])
                seconds.append(time.perf_counter() - began)
            found.append({"steps": steps, "seconds": statistics.median(seconds), "page_bytes": len(page.encode())})
            print(found[-1])
    print(record.write("report_page", {"rounds": rounds, "pages": found}))


def _short_run(path: Path) -> list[dict[str, object]]:
    data = DEMO / "data"
    config = load_config(
        {
            "model": {"name": DEMO / "model"},
            "data": {"train": data / "train.jsonl", "eval": data / "heldout.jsonl", "max_length": 256},
            "train": {"steps": 10, "documents_per_step": 4, "warmup": 0},
            "run": {"dir": path, "eval_every": 5, "save_every": None},
        }
    )
    run(config, get_backend("torch", "cpu"))
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _longer(rows: list[dict[str, object]], num_steps: int) -> list[str]:
    """Return the rows of a run with this many steps, a second each."""
    start, lines = datetime.fromisoformat(str(rows[0]["time"])), list[str]()
    of_steps = [row for row in rows if "loss" in row]
    evaluation = next(row for row in rows if "eval_loss" in row)
    for step in range(1, num_steps + 1):
        when = {"time": (start + timedelta(seconds=step)).isoformat(), "step": step}
        lines.append(json.dumps(of_steps[step % len(of_steps)] | when) + "\n")
        if step % 100 == 0:
            lines.append(json.dumps(evaluation | when) + "\n")
    return lines


if __name__ == "__main__":
    main()

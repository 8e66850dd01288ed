"""The cost of starting the commands that follow a run: processor seconds of `runs`, `report` and `chat`.

    python benchmarks/startup_after.py [--rounds 5]

A run of two steps on the model that dualtune ships. Each round starts every command once, in a process of its own.
`chat` is given no input; what counts is what it takes beyond `load`, a program that only loads the same model and
adapter. Writes results/startup_after.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import record
from startup import COMMAND, child_cpu_s

import dualtune

DEMO = Path(dualtune.__file__).parent / "demo"
CONFIG = f"""
model: {{name: {DEMO / "model"}, dtype: float32}}
data: {{train: {DEMO / "data/heldout.jsonl"}, eval: 0.1, max_length: 256}}
train: {{steps: 2, documents_per_step: 4, warmup: 0}}
run: {{dir: runs/one}}
"""
LOAD = f"""
from pathlib import Path
from dualtune.train.generation.inference import load_model
from dualtune.engine.choose import choose, open_backend
load_model(open_backend(choose("cpu")), {str(DEMO / "model")!r}, Path("runs/one/adapter"))
"""
CASES = {
    "runs": (COMMAND, "runs"),
    "report": (COMMAND, "report", "runs/one"),
    "load": (LOAD,),
    "chat": (COMMAND, "chat", str(DEMO / "model"), "--adapter", "runs/one/adapter", "--platform", "cpu"),
}
GOAL_S = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "config.yaml").write_text(CONFIG, encoding="utf-8")
        child_cpu_s([sys.executable, "-c", COMMAND, "train", "config.yaml", "--platform", "cpu"], place)
        for number in range(rounds + 1):
            for case, words in CASES.items():
                seconds = round(child_cpu_s([sys.executable, "-c", *words], place), 3)
                if number:  # the first round fills the caches of the disk
                    found[case].append(seconds)
    medians = {case: statistics.median(each) for case, each in found.items()}
    beyond = {"runs": medians["runs"], "report": medians["report"], "chat": medians["chat"] - medians["load"]}
    figures = {"cpu_s": found, "beyond_loading_s": {case: round(each, 3) for case, each in beyond.items()}}
    print(record.write("startup_after", {"unit": "processor seconds", "goal": GOAL_S, **figures}))


if __name__ == "__main__":
    main()

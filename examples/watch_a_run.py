"""Watch a run from outside the loop: a hook that writes a CSV file. A tracker of your own is attached in the same way.

    python examples/watch_a_run.py

A hook gets records of plain numbers, never tensors, so it cannot change the result. One that raises does not end the
run.
"""

import argparse
import csv
from pathlib import Path

import dualtune
from dualtune.train.hooks import EvalRecord, Event, Hook, RunInfo, StepRecord

DEMO = Path(dualtune.__file__).parent / "demo"


class CsvTracker(Hook):
    """A row for each step and each evaluation, and a line on the screen for what is out of the ordinary."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_start(self, info: RunInfo) -> None:
        self.file = self.path.open("w", newline="", encoding="utf-8")
        self.rows = csv.writer(self.file)
        self.rows.writerow(["step", "loss", "eval_loss", "learning_rate", "tokens_per_s"])
        print(f"{info.backend}: {info.num_steps} steps over {info.num_train_documents} documents")

    def on_step(self, record: StepRecord) -> None:
        self.rows.writerow([record.step, record.loss, "", record.lr, round(record.tokens_per_s)])

    def on_eval(self, record: EvalRecord) -> None:
        self.rows.writerow([record.step, "", record.eval_loss, "", ""])
        print(f"step {record.step}: held-out loss {record.eval_loss:.4f}")

    def on_event(self, event: Event) -> None:
        print(f"step {event.step}: {event.event}: {event.message}")

    def on_end(self) -> None:
        self.file.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="auto", help="auto, mlx, cuda, cpu or the name of another backend")
    parser.add_argument("--model", type=Path, default=DEMO / "model", help="a model directory")
    parser.add_argument("--data", type=Path, default=DEMO / "data" / "train.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/watch_a_run"))
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    config = dualtune.load_config({
        "model": {"name": str(args.model)},
        "adapter": {"rank": 8, "alpha": 16, "dropout": 0, "targets": "all-linear"},
        "data": {"train": str(args.data), "eval": 0.1, "max_length": 256},
        "train": {"steps": args.steps, "learning_rate": 3e-3, "documents_per_step": 16, "warmup": 0},
        "run": {"dir": str(args.out / "run"), "eval_every": 5},
    })  # fmt: skip
    result = dualtune.train(config, args.platform, hooks=[CsvTracker(args.out / "losses.csv")])
    print(f"verdict: {result.verdict}\nrows: {args.out / 'losses.csv'}")


if __name__ == "__main__":
    main()

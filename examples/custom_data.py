"""Your own records as training data: write them as chat messages, look at what is trained, then train.

    python examples/custom_data.py

Any source works that can be turned into rows of JSON: a database, an export, a web service. Where your rows already
have a question and an answer column, no program is needed: `data.columns: {prompt: question, completion: answer}`.
"""

import argparse
import json
from pathlib import Path

import dualtune
from dualtune.data.documents import Data
from dualtune.data.tokens.tokenizer import Tokenizer

DEMO = Path(dualtune.__file__).parent / "demo"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
COLOURS = ("red", "green", "blue", "white")


def records():
    """Stands for your database: orders as a dictionary each."""
    for number in range(60):
        yield {
            "customer": "Ada Bell",
            "quantity": 2 + number % 7,
            "colour": COLOURS[number % 4],
            "day": DAYS[number % 5],
        }


def as_messages(record):
    """One conversation. Only the assistant's turns are trained; the user's are what the model sees."""
    question = f"{record['quantity']} {record['colour']} lamps for {record['customer']} on {record['day']}, please."
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": json.dumps(record, separators=(",", ":"))},
        ]
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="auto", help="auto, mlx, cuda, cpu or the name of another backend")
    parser.add_argument("--model", type=Path, default=DEMO / "model", help="a model directory")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/custom_data"))
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    rows = args.out / "orders.jsonl"
    rows.write_text("".join(json.dumps(as_messages(record)) + "\n" for record in records()), encoding="utf-8")
    config = dualtune.load_config({
        "model": {"name": str(args.model)},
        "adapter": {"rank": 8, "alpha": 16, "dropout": 0, "targets": "all-linear"},
        "data": {"train": str(rows), "eval": 0.1, "max_length": 256},
        "train": {"steps": args.steps, "learning_rate": 3e-3, "documents_per_step": 16, "warmup": 0},
        "run": {"dir": str(args.out / "run")},
    })  # fmt: skip

    # What is trained, before anything is trained: `dualtune preview` shows the same in colour.
    tokenizer = Tokenizer(args.model)
    train, held_out = Data(config).train_and_eval(tokenizer)
    first = train[0]
    print(f"train     {train.summary()}\nheld out  {held_out.summary()}")
    print(f"whole     {tokenizer.decode(first.tokens.tolist())!r}")
    print(f"trained   {tokenizer.decode(first.tokens[first.loss_mask].tolist())!r}")

    result = dualtune.train(config, args.platform)
    print(f"loss on held-out rows: {result.eval_loss_before:.4f} before, {result.eval_loss:.4f} after")
    print(f"adapter: {result.adapter_dir}")


if __name__ == "__main__":
    main()

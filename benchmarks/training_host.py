"""What a training host (`dualtune serve --train`, without its HTTP) costs beside a plain loop over the same engine.

    python benchmarks/training_host.py [--backend torch] [--rounds 5] [--layers 4]

A model of SmolLM2-135M's shape with random weights and few layers, on the CPU with one thread; texts of 64 to 256
tokens. The sides take turns in each round, after one that does not count, and begin in turn. A ratio is the median over
the rounds of the first side divided by the second in the same round: by the clock, and by the processor time of the
process, which a busy machine disturbs less.

cross_entropy   a step of the host beside `forward_backward` and `optim_step` of an engine with the same micro-batches;
                the host also returns the log-probabilities of all targets
two_runs        two steps of two runs that take turns beside two steps of one run: what it costs to exchange them
samples         eight samples of a prompt of 200 tokens, of 32 tokens each, with the prompt computed once beside each
                with its own
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import record
from generation import SMOLLM2, in_turn

import dualtune
from dualtune.engine.backend import Batch, get_backend, with_weights
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.train.comparison import with_slopes
from dualtune.use.tinker.gradients import ClientData
from dualtune.use.tinker.host import TrainingHost
from dualtune.use.tinker.messages import AdamSettings, Datum, LoraSettings

LORA, ADAM = LoraSettings(rank=32, seed=0, train_unembed=False), AdamSettings(1e-4)
TEXTS, LENGTHS = 8, (64, 256)
PROMPT, ANSWER, SAMPLES = 200, 32, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp())
    model = write_tiny_llama(directory / "model", **SMOLLM2 | {"num_hidden_layers": args.layers})
    for file in (Path(dualtune.__file__).parent / "demo" / "model").glob("*token*"):
        shutil.copy(file, model)
    host = TrainingHost(get_backend(args.backend, "cpu"), str(model), directory / "runs")
    for name in ("one", "other"):
        host.create_run(name, LORA)
    figures = {
        "backend": args.backend, "model": SMOLLM2 | {"num_hidden_layers": args.layers}, "rank": LORA.rank,
        "cross_entropy": cross_entropy(host, args.rounds), "two_runs": two_runs(host, args.rounds),
        "samples": samples(host, args.rounds),
    }  # fmt: skip
    host.close()
    print(json.dumps(figures, indent=2))
    print(record.write("training_host", figures))


def texts(number: int, seed: int) -> list[Datum]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, SMOLLM2["vocab_size"], length + 1) for length in rng.integers(*LENGTHS, number)]
    return [datum(row, len(row) // 2) for row in rows]


def datum(row: np.ndarray, start: int) -> Datum:
    """Return a text, of which the targets from `start` on have a weight."""
    weights = (np.arange(len(row) - 1) >= start - 1).astype(np.float32)
    return Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": weights})


def step(host: TrainingHost, run: str, data: list[Datum]) -> None:
    host.forward_backward(run, data, "cross_entropy", {})
    host.optim_step(run, ADAM)


def cross_entropy(host: TrainingHost, rounds: int) -> dict[str, object]:
    data = texts(TEXTS, 0)
    step(host, "one", data)
    engine = host._seat.train(host._runs["one"].state)
    batches = list[Batch]()
    for batch in ClientData(data, shares=False).micro_batches(host._layout):
        weights = with_slopes(batch, {i: -data[i].inputs["weights"] for row in batch.documents for i in row}).weights_BT
        batches.append(with_weights(batch, weights))

    def plain() -> None:
        for batch in batches:
            engine.forward_backward(batch, divisor=1.0)
        float(engine.optim_step(lr=1e-4, max_grad_norm=None).grad_norm)

    plain()
    return in_turn({"ours": lambda: step(host, "one", data), "theirs": plain}, rounds)


def two_runs(host: TrainingHost, rounds: int) -> dict[str, object]:
    data = texts(TEXTS, 0)

    def steps(*runs: str) -> None:
        for run in runs:
            step(host, run, data)

    steps("one", "other")
    return in_turn({"ours": lambda: steps("one", "other"), "theirs": lambda: steps("other", "other")}, rounds)


def samples(host: TrainingHost, rounds: int) -> dict[str, object]:
    rng = np.random.default_rng(1)
    prompt, *answers = (rng.integers(3, SMOLLM2["vocab_size"], n) for n in (PROMPT, *[ANSWER] * SAMPLES))
    data = [datum(np.concatenate([prompt, answer]), PROMPT) for answer in answers]

    def shared(shares: bool) -> None:
        host._shares = shares
        step(host, "one", data)

    shared(True)
    shared(False)
    return in_turn({"ours": lambda: shared(True), "theirs": lambda: shared(False)}, rounds)


if __name__ == "__main__":
    main()

"""What `dualtune serve --train` costs beside a plain loop over the same engine: its training host, and its HTTP.

    python benchmarks/training_host.py [--backend torch] [--rounds 5] [--layers 4]
    python benchmarks/training_host.py --table   # write that of docs/tinker.md, from what was measured

Needs the package of Tinker's client: pip install 'dualtune[tinker]'.

A model of SmolLM2-135M's shape with random weights and few layers, on the CPU with one thread; texts of 64 to 256
tokens. The sides take turns in each round, after one that does not count, and begin in turn. A ratio is the median over
the rounds of the first side divided by the second in the same round: by the clock, and by the processor time of the
process, which a busy machine disturbs less.

cross_entropy   a step of the host beside `forward_backward` and `optim_step` of an engine with the same micro-batches;
                half of the targets are a prompt without weight. The host returns the log-probabilities of all targets,
                so it computes the output head for the prompts too, which the plain loop leaves out
all_weighted    the same where each target has a weight, so that both compute the same
two_runs        two steps of two runs that take turns beside two steps of one run: what it costs to exchange them
samples         eight samples of a prompt of 200 tokens, of 32 tokens each, with the prompt computed once beside each
                with its own
http            a step of all_weighted through Tinker's client on loopback: what is not spent in the host, which is the
                client's work, both ends' protocol, and waiting
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import page_tables
import record
from generation import SMOLLM2, in_turn

import dualtune
from dualtune.engine.backend import Batch, get_backend, with_weights
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.train.objectives.comparison import with_slopes
from dualtune.use.tinker.gradients import ClientData
from dualtune.use.tinker.host import TrainingHost
from dualtune.use.tinker.messages import AdamSettings, Datum, LoraSettings, LossResult
from dualtune.use.tinker.server import TrainingServer
from dualtune.use.tinker.service import TrainingService

LORA, ADAM = LoraSettings(rank=32, seed=0, train_unembed=False), AdamSettings(1e-4)
TEXTS, LENGTHS = 8, (64, 256)
PROMPT, ANSWER, SAMPLES = 200, 32, 8
PAGE = Path(__file__).parents[1] / "docs" / "tinker.md"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--table", action="store_true", help="write the table of the recorded result")
    args = parser.parse_args()
    if args.table:
        result = json.loads((record.RESULTS / "training_host.json").read_text(encoding="utf-8"))
        return print(page_tables.write(PAGE, {"training_host": table(result)}))
    directory = Path(tempfile.mkdtemp())
    model = write_tiny_llama(directory / "model", **SMOLLM2 | {"num_hidden_layers": args.layers})
    for file in (Path(dualtune.__file__).parent / "demo" / "model").glob("*token*"):
        shutil.copy(file, model)
    host = TimedHost(get_backend(args.backend, "cpu"), str(model), directory / "runs")
    for name in ("one", "other"):
        host.create_run(name, LORA)
    figures = {
        "backend": args.backend, "model": SMOLLM2 | {"num_hidden_layers": args.layers}, "rank": LORA.rank,
        "cross_entropy": cross_entropy(host, args.rounds, texts(TEXTS, 0)),
        "all_weighted": cross_entropy(host, args.rounds, texts(TEXTS, 0, prompts=False)),
        "two_runs": two_runs(host, args.rounds), "samples": samples(host, args.rounds),
        "http": through_http(host, args.rounds),
    }  # fmt: skip
    host.close()
    print(json.dumps(figures, indent=2))
    return print(record.write("training_host", figures))


def texts(number: int, seed: int, *, prompts: bool = True) -> list[Datum]:
    """Return texts, of which the first half has no weight, or all has one."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, SMOLLM2["vocab_size"], length + 1) for length in rng.integers(*LENGTHS, number)]
    return [datum(row, len(row) // 2 if prompts else 1) for row in rows]


def datum(row: np.ndarray, start: int) -> Datum:
    """Return a text, of which the targets from `start` on have a weight."""
    weights = (np.arange(len(row) - 1) >= start - 1).astype(np.float32)
    return Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": weights})


def step(host: TrainingHost, run: str, data: list[Datum]) -> None:
    host.forward_backward(run, data, "cross_entropy", {})
    host.optim_step(run, ADAM)


def cross_entropy(host: TrainingHost, rounds: int, data: list[Datum]) -> dict[str, object]:
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


class TimedHost(TrainingHost):
    """A host that notes how long it computes."""

    seconds = 0.0

    def forward_backward(self, *args: Any) -> LossResult:
        return self._timed(super().forward_backward, *args)

    def optim_step(self, *args: Any) -> Any:
        return self._timed(super().optim_step, *args)

    def _timed(self, compute: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return compute(*args)
        finally:
            self.seconds += time.perf_counter() - began


def through_http(host: TimedHost, rounds: int) -> dict[str, object]:
    """Return the seconds of steps through the client, after one that does not count, and those outside of the host."""
    import tinker

    service = TrainingService(host, max_waiting=100, max_tokens=32, timeout_s=600, say=lambda text: None)
    server, ended = TrainingServer("127.0.0.1", 0, service, key=None, tell=lambda text: None), threading.Event()

    def compute() -> None:
        while not ended.is_set():
            service.run_next()

    threads = [threading.Thread(target=compute), threading.Thread(target=server.serve_forever, args=(0.05,))]
    for thread in threads:
        thread.start()
    try:
        client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{server.server_address[1]}", api_key="tml-local")
        training = client.create_lora_training_client(host.base, rank=LORA.rank, train_unembed=False).result()
        data = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(each.tokens.tolist()),
                loss_fn_inputs={name: tinker.TensorData.from_numpy(x) for name, x in each.inputs.items()},
            )
            for each in texts(TEXTS, 0, prompts=False)
        ]
        steps, outside = list[float](), list[float]()
        for _ in range(rounds + 1):
            began, host.seconds = time.perf_counter(), 0.0
            training.forward_backward(data, "cross_entropy").result()
            training.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
            steps.append(time.perf_counter() - began)
            outside.append(steps[-1] - host.seconds)
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()
    return {"seconds": steps[1:], "outside": outside[1:]}


def table(figures: Mapping[str, Any]) -> str:
    """Return the table of docs/tinker.md."""
    http = figures["http"]
    outside = statistics.median(http["outside"])
    rows = [
        ("`cross_entropy` where half of the targets are prompts, beside a plain loop", "cross_entropy"),
        ("`cross_entropy` where each target has a weight, beside a plain loop", "all_weighted"),
        ("two runs that take turns, beside two steps of one", "two_runs"),
        ("eight samples of a prompt of 200 tokens, computed once, beside each with its own", "samples"),
    ]
    cells = [[what, f"{figures[name]['cpu_ratio']:.2f}x"] for what, name in rows]
    share = outside / statistics.median(http["seconds"])
    cells.append(["a step through the client, outside of the host", f"{1000 * outside:.0f} ms, {share:.1%} of it"])
    return page_tables.table(["what", "costs"], cells)


if __name__ == "__main__":
    main()

"""`dualtune serve` with several clients at once: one batch beside one request at a time, and mlx_lm.server.

    python benchmarks/serving.py [--model DIR] [--parts torch,mlx] [--clients 1,4,16] [--rounds 3] [--tokens 32]

torch     the model in DIR, or by default four layers of SmolLM2-135M's shape with random weights, with one thread on a
          CPU in float32.
mlx       the model in DIR, or by default a tiny Llama with random weights, so that this runs on a CPU too.

batched, one_at_a_time    `dualtune serve` as it is, and with --max-num-seqs 1
mlx_lm                    `mlx_lm.server` as it is, if mlx-lm is installed

Each client streams one greedy completion of `--tokens` tokens of a prompt of its own, and all begin together. The
servers are loaded side by side and asked in turn in each round, after one that does not count, and begin in turn.
`tokens_per_s`: of all clients, until the last one has its end. `first_token_s`: until each client has its first text,
the median and the longest. `cpu_s`: processor time of the server, which a busy machine disturbs less. Medians over the
rounds; `ratio`: of the seconds of `batched` and those of another side in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import record
from generation import SMOLLM2, TINY

from dualtune.engine.testing.tiny_models import write_tiny_llama

MODELS = {"torch": SMOLLM2, "mlx": TINY}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
START_S = 300


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--parts", default="torch,mlx")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    figures: dict[str, Any] = {**vars(args), "model": args.model.name if args.model else MODELS}
    for part in args.parts.split(","):
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as running:
            model = args.model or write_model(Path(directory) / part, MODELS[part])
            servers = [running.enter_context(started(name, *words)) for name, words in commands(part, model).items()]
            figures[part] = {
                number: compare(servers, int(number), args.rounds, args.tokens) for number in args.clients.split(",")
            }
        print(part, json.dumps(figures[part], indent=2), flush=True)
    print(record.write("serving", figures))


def write_model(path: Path, shape: Mapping[str, int]) -> Path:
    """Write a model with random weights, and a tokenizer that gives each of its tokens a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    write_tiny_llama(path, **shape)
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"Ġw{number}" for number in range(shape["vocab_size"] - len(words))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.add_special_tokens(words[:3])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def commands(part: str, model: Path) -> dict[str, tuple[str, list[str]]]:
    """Return the model's name and the command of each side, but for the port."""
    ours = [sys.executable, "-m", "dualtune", "serve", str(model), "--platform", part, "--quiet"]
    sides = {"batched": ("base", ours), "one_at_a_time": ("base", [*ours, "--max-num-seqs", "1"])}
    if part == "mlx" and find_spec("mlx_lm"):
        theirs = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--log-level", "WARNING"]
        sides["mlx_lm"] = "default_model", theirs
    return sides


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    model: str
    port: int
    process: psutil.Process

    def ask(self, prompt: str, tokens: int) -> tuple[float, int]:
        """Stream a completion. Return the seconds until its first text, and how many tokens it has."""
        asked = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        began = time.perf_counter()
        while True:
            try:
                return self._streamed(asked, began)
            except ConnectionResetError:  # mlx_lm.server lets five connections wait: a client asks again
                time.sleep(0.05)

    def _streamed(self, asked: Mapping[str, Any], began: float) -> tuple[float, int]:
        first, count = None, 0
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{self.name}: {answer.status} {answer.read()[:300]!r}")
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if first is None and event["choices"] and event["choices"][0]["text"]:
                    first = time.perf_counter() - began
                count = (event.get("usage") or {}).get("completion_tokens", count)
        assert first is not None, f"{self.name} has said nothing"
        return first, count


@contextlib.contextmanager
def started(name: str, model: str, command: Sequence[str]) -> Iterator[Server]:
    """Start a server, wait until it answers, and stop it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words, quiet = [*command, "--port", str(port)], subprocess.DEVNULL
    with subprocess.Popen(words, env=os.environ | ENVIRONMENT, stdout=quiet, stderr=quiet) as process:
        try:
            server, ends = Server(name, model, port, psutil.Process(process.pid)), time.monotonic() + START_S
            while True:
                try:
                    server.ask("Hello", 2)
                    break
                except OSError:  # it does not listen yet
                    if process.poll() is not None or time.monotonic() > ends:
                        raise
                    time.sleep(0.5)
            yield server
        finally:
            process.terminate()


def measure(server: Server, number: int, tokens: int) -> dict[str, float]:
    """Let so many clients ask at once."""
    prompts = [f"Client {i} asks: {'what is it, and why? ' * (1 + i % 4)}" for i in range(number)]
    answers, together = list[tuple[float, int]](), threading.Barrier(number + 1)

    def client(prompt: str) -> None:
        together.wait()
        answers.append(server.ask(prompt, tokens))

    threads = [threading.Thread(target=client, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    together.wait()
    began, cpu_began = time.perf_counter(), sum(server.process.cpu_times()[:2])
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if len(answers) < number:
        raise RuntimeError(f"{server.name}: {number - len(answers)} clients have no answer")
    firsts, counts = zip(*answers, strict=True)
    return {
        "seconds": seconds, "tokens": sum(counts), "tokens_per_s": sum(counts) / seconds,
        "first_token_s": median(firsts), "longest_first_token_s": max(firsts),
        "cpu_s": sum(server.process.cpu_times()[:2]) - cpu_began,
    }  # fmt: skip


def compare(servers: Sequence[Server], number: int, rounds: int, tokens: int) -> dict[str, Any]:
    measured: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    for i in range(rounds + 1):
        for server in [*servers[i % len(servers) :], *servers[: i % len(servers)]]:
            found = measure(server, number, tokens)
            if i:
                measured[server.name].append(found)
    ours = measured["batched"]
    return {
        name: {key: round(median(each[key] for each in of), 4) for key in of[0]}
        | {
            f"{key}_ratio": round(median(a[key] / b[key] for a, b in zip(ours, of, strict=True)), 3)
            for key in ("seconds", "cpu_s")
        }
        for name, of in measured.items()
    }


if __name__ == "__main__":
    main()

"""Rows of several adapters in one batch beside one adapter after another, and beside as many rows of one adapter.

    python benchmarks/adapter_bank.py [--parts torch,mlx] [--adapters 4] [--rounds 5] [--tokens 32]

torch     four layers of SmolLM2-135M's shape with random weights, on the CPU in float32 with one thread
mlx       a tiny Llama with random weights on MLX's device in float32, so that this runs on a CPU too

The adapters have rank 32 (8 on the tiny model) on all linear layers, one of them a quarter of it on attention alone.
Each continues 1, 4 and 16 prompts of 8 to 64 tokens by exactly `--tokens` tokens, sampled at temperature 1 with their
log-probabilities.

one_after_another   a batch for each adapter, which is loaded into the engine before, as a server has to do it
one_adapter         as many rows in one batch with the engine's own adapter: what the bank itself costs

The sides take turns in each round, after one that does not count. A ratio is the median over the rounds of the bank's
seconds divided by the other's in the same round: `ratio` by the clock, `cpu_ratio` by the processor time of the
process. `equal_rows`: rows with the same tokens as one after another; others differ after a tie of rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of MLX on a CPU

import numpy as np
import record
from generation import ALL, LENGTHS, SMOLLM2, TINY, in_turn

from dualtune.engine.adapter_bank import AdapterBank
from dualtune.engine.backend import Engine, LoadRequest, get_backend
from dualtune.engine.testing.conformance_case import random_adapter
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.adapter import AdapterSpec, Tensors
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.generation.batched import PromptedRow, ended_rows, prompted_row
from dualtune.train.generation.inference import LoadedModel
from dualtune.train.generation.sampling import Sampling

MODELS = {"torch": SMOLLM2, "mlx": TINY}
RANKS = {"torch": 32, "mlx": 8}
PROMPTS = (1, 4, 16)  # of each adapter


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="torch,mlx")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    figures: dict[str, Any] = {**vars(args), "models": MODELS, "ranks": RANKS}
    for part in args.parts.split(","):
        with tempfile.TemporaryDirectory() as directory:
            sides = Sides(part, write_tiny_llama(Path(directory) / part, **MODELS[part]), args)
            figures[part] = {str(number): sides.compare(number) for number in PROMPTS}
        print(part, json.dumps(figures[part], indent=2), flush=True)
    print(record.write("adapter_bank", figures))


class Sides:
    """An engine with an adapter of its own, and a bank of those that rows have."""

    def __init__(self, part: str, model: Path, args: argparse.Namespace) -> None:
        if part == "torch":
            import torch

            torch.set_num_threads(1)
        backend = get_backend(part, "cpu" if part == "torch" else "auto")
        large = AdapterSpec(RANKS[part], 32.0, 0.0, ("all-linear",))
        small = AdapterSpec(RANKS[part] // 4, 16.0, 0.0, ("q_proj", "v_proj"))
        engines = {spec: backend.load(request(model, spec)) for spec in (small, large)}
        specs = [small, *[large] * (args.adapters - 1)]
        states = [random_adapter(engines[spec].adapter_state(), seed) for seed, spec in enumerate(specs)]
        self._adapters: Sequence[tuple[AdapterSpec, Tensors]] = [*zip(specs, states, strict=True)]
        self._engines, self._engine = engines, engines[large]
        self._args, self._vocab = args, MODELS[part]["vocab_size"]
        self._bank = AdapterBank(self._adapters)
        tokenizer: Any = SimpleNamespace(stop_ids=frozenset(), stop_text=None, decode=tuple)
        self._model = LoadedModel(self._engine, tokenizer)

    def compare(self, number: int) -> dict[str, Any]:
        rng = np.random.default_rng(number)
        lengths = rng.integers(*LENGTHS, number, endpoint=True)
        prompts = [rng.integers(3, self._vocab, length).astype(np.int32) for length in lengths]
        together, apart = self._together(prompts), self._apart(prompts)
        self._one_adapter(prompts)
        equal = sum(together[key] == apart[key] for key in apart)
        ratios: dict[str, Any] = {
            name: in_turn(
                {"ours": lambda: self._together(prompts), "theirs": lambda other=other: other(prompts)},
                self._args.rounds,
            )
            for name, other in (("one_after_another", self._apart), ("one_adapter", self._one_adapter))
        }
        return ratios | {"rows": len(apart), "equal_rows": equal}

    def _together(self, prompts: list[np.ndarray]) -> dict[tuple[int, int], list[int]]:
        rows = [row for adapter in range(len(self._bank)) for row in self._rows(prompts, adapter)]
        return self._drawn(self._engine, rows, self._bank)

    def _apart(self, prompts: list[np.ndarray]) -> dict[tuple[int, int], list[int]]:
        drawn = dict[tuple[int, int], list[int]]()
        for number, (spec, state) in enumerate(self._adapters):
            engine = self._engines[spec]
            engine.load_adapter_state(state)
            drawn |= self._drawn(engine, self._rows(prompts, number))
        return drawn

    def _one_adapter(self, prompts: list[np.ndarray]) -> dict[tuple[int, int], list[int]]:
        rows = [row for adapter in range(len(self._bank)) for row in self._rows(prompts, adapter)]
        return self._drawn(self._engine, rows)

    def _rows(self, prompts: list[np.ndarray], adapter: int) -> list[PromptedRow]:
        sampling = Sampling(self._args.tokens, temperature=1.0)
        rows = [
            prompted_row(self._model, number, prompt, sampling, sample=adapter, keeps_logprobs=True)
            for number, prompt in enumerate(prompts)
        ]
        for row in rows:
            row.adapter = adapter
        return rows

    def _drawn(
        self, engine: Engine, rows: list[PromptedRow], bank: AdapterBank | None = None
    ) -> dict[tuple[int, int], list[int]]:
        ended = ended_rows(engine, rows, ALL, lambda error: False, print, bank)
        return {(row.adapter, row.number): row.tokens for row in ended}


def request(model: Path, spec: AdapterSpec) -> LoadRequest:
    pieces = frozenset({"lora"})  # all that generation has of a training's fast code, and nothing is compiled for it
    return LoadRequest(model, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=0, pieces=pieces)


if __name__ == "__main__":
    main()

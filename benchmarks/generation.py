"""Generation in batches beside transformers' `generate` on torch and mlx-lm's `batch_generate` on MLX.

    python benchmarks/generation.py [--model DIR] [--parts torch,mlx,torch_samples,mlx_samples] [--rounds 3]
                                    [--tokens 32] [--answers DIR]

torch     the model in DIR, or by default four layers of SmolLM2-135M's shape with random weights, on the CPU in float32
          with one thread; transformers continues one static batch, padded on the left.
mlx       a tiny Llama with random weights on MLX's device in float32, so that this runs on a CPU too.

torch_samples, mlx_samples
          the same models, samples at temperature 1 with their log-probabilities, as reinforcement learning needs them:
          8 of each prompt, of 64 prompts one; the peers return theirs by options of the same functions.

answers   with --answers, a real model with a chat template: 20 questions, answers of up to 32 tokens, with their end,
          on torch as above: ours, transformers in one batch, and once transformers one by one.

1, 8 and 64 prompts of 8 to 64 tokens, greedy but for the samples, exactly `--tokens` tokens each: no end token ends a
row, so that the static batch wastes nothing. The sides take turns in each round, after one round that does not count,
and begin in turn. A ratio is the median over the rounds of our seconds divided by theirs in the same round: `ratio` by
the clock, `cpu_ratio` by the processor time of the process, which a busy machine disturbs less. `equal_rows`: rows with
the same tokens on both sides; others differ after a tie of rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of MLX on a CPU

import numpy as np
import record

from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.generation.batched import Bounds, continue_all, sample_all
from dualtune.train.generation.inference import BASE_ONLY, LoadedModel, load_model
from dualtune.train.generation.sampling import Sampling

NUM_PROMPTS, LENGTHS = (1, 8, 64), (8, 64)
TINY = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 2048, "head_dim": 32,
        "max_position_embeddings": 512}  # fmt: skip
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9,
           "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 512}  # fmt: skip
Prompts = list[np.ndarray]
Side = Callable[[Prompts, int], list[list[int]]]  # prompts and a number of tokens -> the tokens of each row
ALL = Bounds(rows=64)  # at once, as the peers have them


def samples_of(prompts: Prompts) -> int:
    return min(8, ALL.rows // len(prompts))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--parts", default="torch,mlx")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--answers", type=Path)
    args = parser.parse_args()
    written = Path(tempfile.mkdtemp())
    model = args.model or write_tiny_llama(written / "smollm2", **SMOLLM2)
    tiny = write_tiny_llama(written / "tiny", **TINY)
    makers = {
        "torch": lambda: torch_sides(model), "mlx": lambda: mlx_sides(tiny),
        "torch_samples": lambda: torch_sides(model, samples=True),
        "mlx_samples": lambda: mlx_sides(tiny, samples=True),
    }  # fmt: skip
    figures: dict[str, Any] = {
        "torch_model": str(args.model.name if args.model else SMOLLM2),
        "mlx_model": TINY,
        "tokens": args.tokens,
        "rounds": args.rounds,
    }
    for part in args.parts.split(","):
        ours, theirs, vocab = makers[part]()
        figures[part] = {str(n): compare(ours, theirs, n, vocab, args) for n in NUM_PROMPTS}
        print(part, json.dumps(figures[part], indent=2), flush=True)
    if args.answers:
        figures["answers"] = {"model": args.answers.name, **answers(args.answers, args.rounds)}
        print("answers", json.dumps(figures["answers"], indent=2), flush=True)
    print(record.write("generation", figures))


def compare(ours: Side, theirs: Side, num_prompts: int, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(num_prompts)
    lengths = rng.integers(*LENGTHS, num_prompts, endpoint=True)
    prompts = [rng.integers(3, vocab, length).astype(np.int32) for length in lengths]
    rows = [side(prompts, args.tokens) for side in (ours, theirs)]  # the round that does not count
    assert all(len(row) == args.tokens for side in rows for row in side)
    timed = in_turn(
        {"ours": lambda: ours(prompts, args.tokens), "theirs": lambda: theirs(prompts, args.tokens)}, args.rounds
    )
    return {
        **timed,
        "tokens_per_second": [len(rows[0]) * args.tokens / median(took) for took in timed["seconds"].values()],
        "equal_rows": sum(a == b for a, b in zip(*rows, strict=True)),
    }


def in_turn(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    """Time `ours` and `theirs` in turn, and return seconds of each round and their ratios."""
    seconds, cpu_seconds = ({name: list[float]() for name in sides} for _ in range(2))
    for i in range(rounds):
        for name, side in [*sides.items()][:: -1 if i % 2 else 1]:
            began, cpu_began = time.perf_counter(), time.process_time()
            side()
            seconds[name].append(time.perf_counter() - began)
            cpu_seconds[name].append(time.process_time() - cpu_began)
    return {
        "seconds": seconds, "cpu_seconds": cpu_seconds, "ratio": ratio(seconds), "cpu_ratio": ratio(cpu_seconds)
    }  # fmt: skip


def answers(path: Path, rounds: int, num_questions: int = 20, tokens: int = 32) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    loaded = load_model(get_backend("torch", "cpu"), str(path), dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [
        loaded.tokenizer.encode_prompt(f"What is {i} plus {2 * i}?" + " Explain it to a child." * (i % 2))
        for i in range(num_questions)
    ]

    def ours(prompts: Prompts) -> list[str]:
        ends = continue_all(loaded, prompts, Sampling(max_tokens=tokens), bounds=ALL, tell=print)
        return [each.text for each in sorted(ends, key=lambda each: each.number)]

    def in_a_batch(prompts: Prompts) -> list[str]:
        rows = static_batch(theirs, prompts, tokens, pad_token_id=0, eos_token_id=[*loaded.tokenizer.stop_ids])
        ends = [next((i for i, token in enumerate(row) if token in loaded.tokenizer.stop_ids), None) for row in rows]
        return [loaded.tokenizer.decode(row[:end]) for row, end in zip(rows, ends, strict=True)]

    def one_by_one(prompts: Prompts) -> list[str]:
        return [text for prompt in prompts for text in in_a_batch([prompt])]

    texts = {"ours": ours(prompts), "theirs": in_a_batch(prompts)}  # the round that does not count
    timed = in_turn({"ours": lambda: ours(prompts), "theirs": lambda: in_a_batch(prompts)}, rounds)
    began, cpu_began = time.perf_counter(), time.process_time()
    texts["theirs_one_by_one"] = one_by_one(prompts)
    timed["seconds"]["theirs_one_by_one"] = time.perf_counter() - began
    timed["cpu_seconds"]["theirs_one_by_one"] = time.process_time() - cpu_began
    equal = {
        name: sum(a.strip() == b.strip() for a, b in zip(texts["ours"], found, strict=True))
        for name, found in texts.items()
    }
    return {**timed, "equal_to_ours": equal}


def static_batch(model: Any, prompts: Prompts, tokens: int, **options: Any) -> list[list[int]]:
    """Continue prompts by transformers' `generate`, padded on the left."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p.tolist() for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **{"do_sample": False, **options})
    if not options.get("return_dict_in_generate"):
        return out[:, width:].tolist()
    model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)  # the log-probabilities
    return out.sequences[:, width:].tolist()


def ratio(seconds: dict[str, list[float]]) -> float:
    return median(a / b for a, b in zip(seconds["ours"], seconds["theirs"], strict=True))


def our_side(backend: str, device: str, model: Path, samples: bool) -> Side:
    request = LoadRequest(model, "float32", "auto", "pretrained", BASE_ONLY, OptimizerSpec(), seed=0)
    tokenizer: Any = SimpleNamespace(
        stop_ids=frozenset(), stop_text=None, decode=tuple
    )  # the text of a row is its tokens
    loaded = LoadedModel(get_backend(backend, device).load(request), tokenizer)

    def side(prompts: Prompts, tokens: int) -> list[list[int]]:
        ends = sorted(
            continue_all(loaded, prompts, Sampling(max_tokens=tokens), bounds=ALL, tell=print),
            key=lambda each: each.number,
        )
        return [[*map(int, each.text)] for each in ends]

    def sampled(prompts: Prompts, tokens: int) -> list[list[int]]:
        sampling = Sampling(max_tokens=tokens, temperature=1.0)
        drawn = sample_all(loaded, prompts, sampling, samples_of(prompts), bounds=ALL)
        return [each.tokens.tolist() for each in drawn]

    return sampled if samples else side


def torch_sides(model: Path, samples: bool = False) -> tuple[Side, Side, int]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None

    options: dict[str, Any] = {"pad_token_id": 0}
    if samples:
        options |= {"do_sample": True, "top_k": 0, "output_scores": True, "return_dict_in_generate": True}

    def side(prompts: Prompts, tokens: int) -> list[list[int]]:
        number = {"num_return_sequences": samples_of(prompts)} if samples else {}
        return static_batch(theirs, prompts, tokens, **options, **number)

    return our_side("torch", "cpu", model, samples), side, theirs.config.vocab_size


def mlx_sides(path: Path, samples: bool = False) -> tuple[Side, Side, int]:
    from mlx_lm import batch_generate
    from mlx_lm.sample_utils import make_sampler
    from mlx_lm.utils import load_model

    ours = our_side("mlx", "auto", path, samples)
    theirs = load_model(path)[0]
    tokenizer = SimpleNamespace(eos_token_ids=[], decode=lambda ids: "")

    def side(prompts: Prompts, tokens: int) -> list[list[int]]:
        rows = [p.tolist() for p in prompts for _ in range(samples_of(prompts) if samples else 1)]
        options = {} if not samples else {"sampler": make_sampler(temp=1.0), "return_logprobs": True}
        made = batch_generate(theirs, tokenizer, rows, max_tokens=tokens, return_token_ids=True, **options)  # type: ignore
        return made.token_ids  # type: ignore

    return ours, side, TINY["vocab_size"]


if __name__ == "__main__":
    main()

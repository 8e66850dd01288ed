"""AdamW with its moments in 8 bits beside AdamW: bytes, the time of an update, the final loss, and the codes' quality.

    python benchmarks/optimizer_8bit.py

torch on the CPU, one thread. The final loss is that of the demo's held-out rows, over three seeds: a LoRA run of the
demo, and all weights of the demo's model trained from random ones. The codes' quality is the error of AdamW's update
over the gradients of such a run, with the state in our codes, in the same rounded to the nearest, and in the dynamic
code of Dettmers et al. (arXiv 2110.02861, section 1.3) for m and v.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import record
import torch
import yaml
from memory_storages import storages
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dualtune
from dualtune.model import eight_bit
from dualtune.model.optimizer import OPTIMIZERS, OptimizerSpec
from dualtune_torch.optimizer import flat_optimizer

DEMO = Path(dualtune.__file__).parent / "demo"
NAMES = ("adamw", "adamw_8bit")
SEEDS = (0, 1, 2)
STEPS, LR, ROWS, LENGTH = 150, 3e-3, 8, 64  # of the run that trains all weights
TIMED_VALUES, REPEATS = 1 << 22, 9
RECORDED = 32 * eight_bit.BLOCK  # weights whose gradients are recorded, in whole blocks
YES = torch.tensor(True)

Round = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]  # (m, v, step) -> as they are kept


def main() -> None:
    torch.set_num_threads(1)
    found = {"bytes_per_weight": state_bytes(), "update": update_time(), "lora": lora_losses()}
    whole = {name: [train_whole(name, seed) for seed in SEEDS] for name in NAMES}
    found["whole"] = {name: [loss for loss, _ in runs] for name, runs in whole.items()}
    gradients = [grads for _, grads in whole["adamw"]]
    found["error_of_update"] = {
        name: median(update_error(grads, keep) for grads in gradients) for name, keep in CODES.items()
    }
    print(json.dumps(found, indent=2))
    print(record.write("optimizer_8bit", {"seeds": SEEDS, "steps_whole": STEPS, **found}))


# --- bytes and time ---------------------------------------------------------------------------------------------------


def state_bytes() -> dict[str, float]:
    """Bytes of optimizer state for each weight of one large tensor, as allocated."""
    found = {}
    for name in NAMES:
        optimizer = flat_optimizer(random_flat(TIMED_VALUES), {"w": (TIMED_VALUES,)}, OptimizerSpec(name))
        found[name] = sum(storages(optimizer.tensors()).values()) / TIMED_VALUES
        assert found[name] == OPTIMIZERS[name].bytes_of("w", (1,))
    return found


def update_time() -> dict[str, Any]:
    """Processor time of an update, interleaved, and the ratio."""
    optimizers = {}
    for name in NAMES:
        flat = random_flat(TIMED_VALUES)
        optimizers[name] = flat, flat_optimizer(flat, {"w": (TIMED_VALUES,)}, OptimizerSpec(name))
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(REPEATS):
        for name, (flat, optimizer) in optimizers.items():
            flat.grad = torch.randn(TIMED_VALUES)
            begun = time.process_time()
            optimizer.step(1e-3, YES)
            seconds[name].append(time.process_time() - begun)
    each = {name: 1e9 * median(times) / TIMED_VALUES for name, times in seconds.items()}
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    return {"ns_per_weight": each, "ratio": median(ratios), "ratios": ratios}


def random_flat(size: int) -> Tensor:
    flat = torch.randn(size).requires_grad_()
    flat.grad = torch.randn(size)
    return flat


# --- the final loss ---------------------------------------------------------------------------------------------------


def lora_losses() -> dict[str, list[float]]:
    """The evaluation loss of the demo's run."""
    losses: dict[str, list[float]] = {name: [] for name in NAMES}
    demo = yaml.safe_load((DEMO / "config.yaml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DUALTUNE_CACHE"] = str(Path(folder) / "cache")
        for seed in SEEDS:
            for name in NAMES:
                config = demo | {"model": {"name": str(DEMO / "model")}}
                data = {"train": str(DEMO / "data/train.jsonl"), "eval": str(DEMO / "data/heldout.jsonl")}
                config["data"] = demo["data"] | data
                config["train"] = demo["train"] | {"optimizer": name}
                config["run"] = demo["run"] | {"dir": f"{folder}/{name}-{seed}", "seed": seed}
                loss = dualtune.train(config, "cpu").eval_loss
                assert loss is not None
                losses[name].append(loss)
    return losses


def train_whole(name: str, seed: int) -> tuple[float, list[np.ndarray]]:
    """Return the held-out loss of a model whose weights were all trained, and some gradients of each step."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(DEMO / "model")).float()
    flat, shapes = flatten(model)
    optimizer, recorded = flat_optimizer(flat, shapes, OptimizerSpec(name)), []
    tokens, half = tokens_of("train.jsonl"), torch.arange(RECORDED // 2)
    where = torch.cat([half, len(flat) // 2 + half])  # the embedding, where most gradients are 0, and a layer
    for step in range(STEPS):
        starts = torch.randint(0, len(tokens) - LENGTH, (ROWS,))
        rows = torch.stack([tokens[start : start + LENGTH] for start in starts])
        model(input_ids=rows, labels=rows).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([flat], 1.0)
        assert flat.grad is not None
        recorded.append(flat.grad[where].numpy().astype(np.float64))
        optimizer.step(LR * min(1, (step + 1) / 10) * (1 - step / STEPS), norm.isfinite())
    with torch.no_grad():
        held_out = tokens_of("heldout.jsonl")
        rows = held_out[: len(held_out) // LENGTH * LENGTH].view(-1, LENGTH)
        return float(model(input_ids=rows, labels=rows).loss), recorded


def flatten(model: torch.nn.Module) -> tuple[Tensor, dict[str, tuple[int, ...]]]:
    """Make all weights views of one flat tensor, and their gradients of its gradient."""
    weights = list(model.parameters())
    sizes = [weight.numel() for weight in weights]
    flat = torch.cat([weight.detach().view(-1) for weight in weights]).requires_grad_()
    flat.grad = torch.zeros_like(flat)
    parts = zip(weights, flat.detach().split(sizes), flat.grad.split(sizes), strict=True)
    for weight, data, grad in parts:
        weight.data, weight.grad = data.view_as(weight), grad.view_as(weight)
    return flat, {str(i): tuple(weight.shape) for i, weight in enumerate(weights)}


def tokens_of(file: str) -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    lines = (DEMO / "data" / file).read_text(encoding="utf-8")
    return torch.tensor(tokenizer(lines)["input_ids"])


# --- the codes --------------------------------------------------------------------------------------------------------


def update_error(gradients: list[np.ndarray], keep: Round) -> float:
    """Return the error of AdamW's updates by a state that is kept by `keep`, relative by norm: the mean over steps."""
    adamw, zero = OptimizerSpec("adamw", {"weight_decay": 0.0}), np.zeros(RECORDED)
    exact, kept, errors = (zero, zero), (zero, zero), []
    for step, g in enumerate(gradients, start=1):
        changes = []
        for m, v in (exact, kept):
            w, after = adamw.update(zero, g, {"m": m, "v": v}, step=step, lr=1.0)
            changes.append((w, (after["m"], after["v"])))
        (right, exact), (found, (m, v)) = changes
        kept = keep(m, v, step)
        errors.append(float(np.linalg.norm(found - right) / np.linalg.norm(right)))
    return float(np.mean(errors))


def in_our_codes(m: np.ndarray, v: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    codes = eight_bit.CODES
    root_v = eight_bit.rounded(np.sqrt(v), codes["root_v"], step).astype(np.float64)
    return eight_bit.rounded(m, codes["m"], step).astype(np.float64), root_v**2


def to_the_nearest(m: np.ndarray, v: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    def half(code: eight_bit.EightBitCode, step: int) -> np.ndarray:
        return np.full(eight_bit.BLOCK, 1 << (code.shift - 1), np.int32)

    with mock.patch.object(eight_bit, "dither", half):
        return in_our_codes(m, v, step)


def in_dynamic_codes(m: np.ndarray, v: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    return nearest_in(m, dynamic_book(is_signed=True)), nearest_in(v, dynamic_book(is_signed=False))


def nearest_in(values: np.ndarray, book: np.ndarray) -> np.ndarray:
    """Round each value to the nearest of the book times the largest of its block."""
    blocks = values.reshape(-1, eight_bit.BLOCK)
    scale = np.maximum(np.abs(blocks).max(axis=1, keepdims=True), 1e-38)
    index = np.searchsorted((book[1:] + book[:-1]) / 2, blocks / scale)
    return (book[index] * scale).ravel()


def dynamic_book(*, is_signed: bool) -> np.ndarray:
    """256 values: seven decades, each with twice as many values as the one below, evenly spaced; 0 and 1."""

    def decades() -> Iterator[np.ndarray]:
        for exponent in range(7):
            edges = np.linspace(0.1, 1, 2 ** (exponent + (0 if is_signed else 1)) + 1)
            yield 10.0 ** (exponent - 6) * (edges[1:] + edges[:-1]) / 2

    positive = np.concatenate(list(decades()))
    return np.sort(np.concatenate([[0.0, 1.0], positive, *([-positive] if is_signed else [])]))


CODES: dict[str, Round] = {
    "ours": in_our_codes, "ours, to the nearest": to_the_nearest, "dynamic": in_dynamic_codes,
}  # fmt: skip


if __name__ == "__main__":
    main()

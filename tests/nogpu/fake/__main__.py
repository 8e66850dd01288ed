"""Whole training steps of the torch engine on a GPU that is not there: `python tests/nogpu/fake --output counts.json`.

Counts are per micro-batch (forward_backward), per step (optim_step), and per evaluated micro-batch. A fault that is
put into the engine on purpose must show in them.
"""

# ruff: noqa: E402  the stand-in is loaded before torch
from __future__ import annotations

import stand_in

stand_in.load()

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401  it looks for its CUDA library, and must not find the stand-in
import compiled
import numpy as np
import pretend
import torch
from counter import LaunchCounter
from faults import FAULTS, made
from settings import AtAttention, settings
from shapes import METHODS, SHAPES, SMOLLM, StepShape
from torch._subclasses.fake_tensor import FakeTensorMode

from dualtune.engine.backend import Batch, LoadRequest
from dualtune.engine.card import ActivationCheckpointing
from dualtune.model.adapter import AdapterSpec
from dualtune.model.beside import BesideAdapter
from dualtune.model.optimizer import OptimizerSpec

ALL = SHAPES | METHODS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", help=f"allowed: {', '.join(ALL)}; default: all")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    pretend.install()
    _replace_compiler()
    counts = {name: count(ALL[name]) for name in args.shapes or ALL}
    found = {"known": [*SHAPES], "methods": [*METHODS], "shapes": counts}
    found |= {"faults": count_faults(), "settings": settings_of_a_step()}
    args.output.write_text(json.dumps(found, indent=1) + "\n")


def count(shape: StepShape) -> dict[str, Any]:
    """Count one step after a first one, which creates what stays."""
    with loaded(shape) as engine:
        batch = _batch(shape)
        work = {
            "micro_batch": lambda: engine.forward_backward(batch, divisor=batch.num_targets),
            "step": lambda: engine.optim_step(lr=1e-4, max_grad_norm=0.3),
            "evaluation": lambda: engine.evaluate(batch),
        }
        if shape.compares:
            work["logprobs"] = lambda: engine.target_logprobs(batch, dropout=True)
        for call in work.values():
            call()
        counts = {name: _counted(call) for name, call in work.items()}
        tensors = (*engine.model.parameters(), *engine.model.buffers(), engine._adapter.flat)
        devices = sorted({str(tensor.device) for tensor in tensors})
        return {"chosen": engine.description.kernels, "devices": devices, **counts}


def count_faults() -> dict[str, Any]:
    """Count a micro-batch with each fault."""
    shape, counts = StepShape(SMOLLM, changes={"num_hidden_layers": 1}), {}
    with loaded(shape) as engine:
        batch = _batch(shape)
        for name, fault in FAULTS.items():
            with made(engine, fault):
                counts[name] = _counted(lambda: engine.forward_backward(batch, divisor=batch.num_targets))
    return counts


def settings_of_a_step() -> dict[str, Any]:
    """Note torch's settings before, in and after a micro-batch, in a program that has set some of them itself."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
    found: dict[str, Any] = {"before": settings()}
    for name, deterministic in (("ordinary", False), ("deterministic", True)):
        with loaded(StepShape(SMOLLM, deterministic=deterministic)) as engine, AtAttention() as noted:
            batch = _batch(StepShape(SMOLLM))
            engine.forward_backward(batch, divisor=batch.num_targets)
        found[name] = {"in": noted.found, "after": settings()}
    return found


@contextmanager
def loaded(shape: StepShape) -> Iterator[Any]:
    """Load an engine without data, on the GPU that is not there."""
    from dualtune_torch.backend import TorchBackend

    with tempfile.TemporaryDirectory() as place, FakeTensorMode(allow_non_fake_inputs=True):
        Path(place, "config.json").write_text(json.dumps(shape.config()))
        yield TorchBackend("cuda").load(_request(shape, Path(place)))


def _counted(call: Any) -> dict[str, Any]:
    counter = compiled.counter = LaunchCounter()
    try:
        with counter:
            call()
    finally:
        compiled.counter = None
    return counter.counts.as_json()


def _request(shape: StepShape, place: Path) -> LoadRequest:
    options = {"targets": ("all-linear",)} | shape.adapter
    if beside := options.pop("beside", None):
        options["beside"] = BesideAdapter(**beside)
    adapter = AdapterSpec(rank=16, alpha=32.0, dropout=shape.dropout, **options)
    checkpointing = ActivationCheckpointing("all") if shape.checkpointing else ActivationCheckpointing()
    return LoadRequest(
        place, "bfloat16", shape.quantization, "random", adapter, OptimizerSpec(shape.optimizer), seed=0,
        kernels="auto" if shape.fused else "reference", checkpointing=checkpointing, deterministic=shape.deterministic,
    )  # fmt: skip


def _batch(shape: StepShape) -> Batch:
    """Rows of documents of equal length, a third of each a prompt; a few tokens of padding at the end."""
    random = np.random.default_rng(0)
    B, T = shape.rows, shape.tokens
    segments, positions = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    borders = np.linspace(0, T - 5, shape.documents + 1).astype(int)
    for number, (start, end) in enumerate(pairwise(borders), 1):
        segments[:, start:end], positions[:, start:end] = number, np.arange(end - start)
    tokens = random.integers(0, 100, (B, T)).astype(np.int32)
    has_target = (segments > 0) & (positions > T // shape.documents // 3)
    labels = np.where(has_target, tokens, -100).astype(np.int32)
    seeds, weights = random.integers(0, 1 << 32, (B, T), np.uint32), None
    if shape.labels > 1:
        others = np.arange(shape.labels)
        labels = np.where(has_target[..., None], labels[..., None] + others, -100).astype(np.int32)
    if shape.labels > 1 or shape.compares:
        weights = np.full(labels.shape, 0.5, np.float32)
    return Batch(tokens, labels, segments, positions, seeds, weights)


def _replace_compiler() -> None:
    import dualtune_torch.model as model
    from dualtune_torch.kernels import compiled as compiler
    from dualtune_torch.kernels.gpu import affine_dequant, lora_back_g, lora_da, lora_down, lora_dx, nf4_dequant

    pretend.accept_trials()
    pretend.read_as_zeros()
    for module in (affine_dequant, lora_back_g, lora_da, lora_down, lora_dx, nf4_dequant):
        module.kernel = compiled.TritonKernel(module.__name__.rpartition(".")[2])
    compiler.compile_function = cache(compiled.OneLaunch)
    model.nf4.linear = pretend.Nf4Layer


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

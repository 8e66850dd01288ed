"""How much memory a step of a tiny model takes on each engine, beside what was planned for it.

A step takes eight documents of 60 tokens in one packed row. On torch every storage is counted; on MLX, whose arrays are
made when they are needed, the peak of its allocator is compared with the whole plan.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualtune.engine.backend import Backend, Batch, Engine, LoadRequest
from dualtune.engine.memory.counted import shape_from
from dualtune.engine.memory.estimate import Ask, Estimate, estimate, num_trained
from dualtune.engine.testing.tiny_models import pack, random_batch
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

ASK = Ask("torch", "cpu", "none", "float32", 8, "all-linear", micro_batch_tokens=512, max_length=512, dropout=False)
SPEC = AdapterSpec(rank=8, alpha=16.0, dropout=0.0, targets=("all-linear",))
TEXT_TOKENS, LENGTHS = 256, (60,) * 8


def share_of_peak(model_dir: Path, backend: Backend) -> float:
    """Return estimated / found of the peak. ValueError if the plan counts other parameters than the engine has."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    batch = pack(random_batch(LENGTHS, TEXT_TOKENS), [range(len(LENGTHS))])
    ask = replace(ASK, backend=backend.name, micro_batch_tokens=batch.tokens_BT.size, max_length=max(LENGTHS))
    shape = shape_from(config, backend.name)
    planned = estimate(shape, ask)
    request = LoadRequest(model_dir, "float32", "none", "pretrained", SPEC, OptimizerSpec(), seed=1)
    peak, found = (on_mlx if backend.name == "mlx" else on_torch)(backend, request, batch, planned)
    expected = shape.num_parameters, num_trained(shape, ask)
    if found != expected:
        raise ValueError(f"{expected[0]:,} stored and {expected[1]:,} trained parameters are planned, not {found}")
    return peak


def on_torch(backend: Backend, request: LoadRequest, batch: Batch, planned: Estimate) -> tuple[float, tuple[int, int]]:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    found_in: Any = importlib.import_module("memory_storages").found_in
    engine = backend.load(request)
    take_step(engine, batch)  # makes the state of the optimizer
    *_, activations, moment, _reserve = planned.parts
    return (activations.bytes + moment.bytes) / found_in(engine, batch)["peak"], counts_of(engine)


def on_mlx(backend: Any, request: LoadRequest, batch: Batch, planned: Estimate) -> tuple[float, tuple[int, int]]:
    import mlx.core as mx

    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    engine = backend.load(request)
    take_step(engine, batch)  # makes the state of the optimizer
    gc.collect()
    mx.clear_cache()
    backend.reset_peak_memory()
    for _ in range(2):  # one may have an array less at its peak
        take_step(engine, batch)
    peak = backend.memory().peak_bytes - before
    return (planned.total_bytes - planned["reserve"]) / peak, counts_of(engine)


def counts_of(engine: Engine) -> tuple[int, int]:
    return engine.description.num_parameters, engine.description.trainable_parameters


def take_step(engine: Engine, batch: Batch) -> None:
    engine.forward_backward(batch, divisor=batch.num_targets)
    float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)

"""Evaluation and probes without the logits of masked tokens, on torch: what that saves, and that it changes nothing.

    python benchmarks/masked_logits.py

SmolLM2-135M's shape with random weights in float32, one document of 1,024 tokens, of which a quarter are targets, as in
a prompt with an answer. Two ways on the same engine, interleaved: the output head on the targets only, as the engine
does it, and on all tokens. Times are processor seconds of `evaluate`; memory is the most that torch's allocator hands
out during it; the losses must agree.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from statistics import median
from typing import Any

import memory_storages
import numpy as np
import record
from memory_estimate import CONFIGS, load, one_batch

from dualtune.config.schema import AdapterConfig
from dualtune.engine.backend import IGNORE_INDEX, Batch, get_backend
from dualtune.engine.memory.estimate import Ask

MODEL, TOKENS, SHARE, ROUNDS, WITHIN = "SmolLM2-135M", 1024, 0.25, 5, 1e-5


def main() -> None:
    engine, batch = ready_engine(), with_targets(one_batch([TOKENS], CONFIGS[MODEL]["vocab_size"]))
    ways = {"targets only": engine._kernels, "all tokens": replace(engine._kernels, head=None)}
    found: dict[str, dict[str, Any]] = {way: {"processor_s": []} for way in ways}
    for way, kernels in ways.items():
        engine._kernels = kernels
        found[way]["peak_bytes"] = memory_storages.peak_of(lambda: engine.evaluate(batch).loss_sum)
        found[way]["loss"] = engine.evaluate(batch).loss_sum / batch.num_targets
    for _ in range(ROUNDS):
        for way, kernels in ways.items():
            engine._kernels = kernels
            began = time.process_time()
            engine.evaluate(batch).loss_sum  # noqa: B018  (reading it ends the work)
            found[way]["processor_s"].append(time.process_time() - began)
    few, all_ = found.values()
    assert abs(few["loss"] / all_["loss"] - 1) <= WITHIN, f"{few['loss']} on the targets, {all_['loss']} on all tokens"
    ratios = [a / b for a, b in zip(few["processor_s"], all_["processor_s"], strict=True)]
    figures = {
        "model": MODEL, "tokens": TOKENS, "targets": batch.num_targets, "rounds": ROUNDS, "ways": found,
        "time_ratio": median(ratios), "peak_ratio": few["peak_bytes"] / all_["peak_bytes"],
        "loss_difference": few["loss"] / all_["loss"] - 1,
    }  # fmt: skip
    print(json.dumps(figures, indent=2), record.write("masked_logits", figures), sep="\n")


def ready_engine() -> Any:
    """Load an engine that has compiled everything."""
    config, spec = CONFIGS[MODEL], AdapterConfig()
    asked = Ask("torch", "cpu", "none", "float32", spec.rank, spec.targets, TOKENS, TOKENS)
    engine = load(get_backend("torch", "cpu"), config, asked, spec)
    for length in (64, 192):
        engine.evaluate(with_targets(one_batch([length], config["vocab_size"])))
    return engine


def with_targets(batch: Batch) -> Batch:
    """Keep the last targets of the batch only."""
    masked = int((1 - SHARE) * batch.labels_BT.shape[1])
    labels_BT = np.where(np.arange(batch.labels_BT.shape[1]) < masked, np.int32(IGNORE_INDEX), batch.labels_BT)
    return replace(batch, labels_BT=labels_BT)


if __name__ == "__main__":
    main()

"""The memory estimate compared with the memory of the torch engine on this machine's CPU, by part.

    python benchmarks/memory_estimate.py [CASE …]

A case is a model (`llama-19m`, or the end of a hub id of `dualtune.engine.memory.shapes.KNOWN`), a dtype, a
quantization and the lengths of the documents of its micro-batch, such as `SmolLM2-135M:bfloat16:none:1024`. Weights
are random; each case runs in a separate process. The script counts storages one by one, takes the peak of a step from
torch's allocator, and the physical memory of the process from the system. Writes results/memory_estimate.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import record
from peers_inputs import SHAPES

from dualtune.config.schema import AdapterConfig
from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.documents import in_memory
from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.memory.estimate import Ask, estimate
from dualtune.engine.memory.shapes import KNOWN, decoder_of
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

LLAMA_19M = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SHAPES["llama-19m"]
CONFIGS = {"llama-19m": LLAMA_19M} | {name.split("/")[1]: dict(config) for name, config in KNOWN.items()}
CASES = (
    "llama-19m:bfloat16:none:512", "llama-19m:bfloat16:none:2048", "llama-19m:float32:none:512",
    "SmolLM2-135M:bfloat16:none:256", "SmolLM2-135M:bfloat16:none:1024", "SmolLM2-135M:bfloat16:none:2048",
    "SmolLM2-135M:bfloat16:none:128,128,128,128,128,128,128,128", "SmolLM2-135M:float32:none:512",
    "SmolLM2-135M:bfloat16:nf4:1024", "Qwen3-0.6B:bfloat16:none:512",
)  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        return print(json.dumps(measure(sys.argv[2])))
    cases = {case: in_its_own_process(case) for case in sys.argv[1:] or CASES}
    return print(json.dumps(cases, indent=2), record.write("memory_estimate", {"cases": cases}), sep="\n")


def in_its_own_process(case: str) -> dict[str, Any]:
    print(case, file=sys.stderr)
    done = subprocess.run([sys.executable, __file__, "--one", case], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: str) -> dict[str, Any]:
    """Bytes: {"estimated", "measured"} by part, and what the process has in physical memory."""
    import memory_storages

    model, dtype, quantization, lengths = case.split(":")
    config, spec = CONFIGS[model], AdapterConfig()
    batch = one_batch([int(n) for n in lengths.split(",")], config["vocab_size"])
    asked = Ask(
        "torch", "cpu", quantization, dtype, spec.rank, spec.targets, batch.tokens_BT.size,
        max(int(n) for n in lengths.split(",")),
    )  # fmt: skip
    backend = get_backend("torch", "cpu")
    before = backend.memory().used_bytes
    engine = load(backend, config, asked, spec)
    loaded = backend.memory().used_bytes
    backend.reset_peak_memory()
    for _ in range(3):
        engine.forward_backward(batch, divisor=batch.num_targets)
        float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)
    peak_rss = backend.memory().peak_bytes
    found = memory_storages.found_in(engine, batch)
    parts = {part.name: part.bytes for part in estimate(decoder_of(config), asked).parts}
    *always, kept, moment, reserve = parts
    return {
        "moment": moment,
        "kernels": engine.description.kernels,
        "estimated": {name: parts[name] for name in (*always, kept)} | {"peak": parts[kept] + parts[moment]},
        "measured": found,
        "estimated_total_bytes": sum(parts.values()),
        "counted_total_bytes": sum(found[name] for name in always) + found["peak"],  # without what is no tensor
        "reserve_bytes": parts[reserve],
        "rss_bytes": {"before": before, "loaded": loaded, "peak_of_steps": peak_rss},
    }


def load(backend: Any, config: dict[str, Any], asked: Ask, spec: AdapterConfig) -> Any:
    """Return an engine with random weights and the adapter of `spec`, or with the model trained whole, as asked."""
    dropout = spec.dropout if asked.dropout else 0.0
    adapter = AdapterSpec(spec.rank, spec.alpha, dropout, tuple(spec.targets), method=asked.method)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        request = LoadRequest(
            Path(folder), asked.dtype, asked.quantization, "random", adapter, OptimizerSpec(asked.optimizer), seed=1,
            checkpointing=asked.checkpointing,
        )  # fmt: skip
        return backend.load(request)


def one_batch(lengths: list[int], vocab: int) -> Any:
    rng = np.random.default_rng(0)
    documents = in_memory([(rng.integers(0, vocab, n).astype(np.int32), np.ones(n, bool)) for n in lengths])
    (batch,) = micro_batches(documents, range(len(lengths)), SequenceLayout(sum(lengths), sum(lengths)), seed=0, step=0)
    return batch


if __name__ == "__main__":
    main()

"""The memory plan compared with the memory of the torch engine on this CPU, over formats and checkpointing.

    python benchmarks/memory_plan.py

Random weights in float32, the adapter of the default config with dropout. For every model, format of the base, value of
memory.checkpointing and length of the one document: the planned bytes of a step without the reserve, and the counted
bytes, which are the storages that exist between steps plus the most that torch's allocator hands out during a forward
and a backward pass. A process for each model and format. Writes results/memory_plan.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import record
from memory_estimate import CONFIGS, load, one_batch

from dualtune.activation_checkpointing import KEEP_ALL, ActivationCheckpointing
from dualtune.backend import get_backend
from dualtune.config.schema import AdapterConfig
from dualtune.memory.estimate import Ask, estimate
from dualtune.memory.shapes import decoder_of

FORMATS = ("none", "nf4", "int8", "affine4")
CASES = {"llama-19m": (FORMATS, (256, 1024)), "SmolLM2-135M": (("none", "nf4", "int8"), (512,)),
         "Qwen3-0.6B": (("none",), (256,))}  # fmt: skip


def dial(num_layers: int) -> dict[str, ActivationCheckpointing]:
    return {
        "none": KEEP_ALL,
        "remade": ActivationCheckpointing(remade=True),
        f"{{layers: {num_layers // 2}}}": ActivationCheckpointing(num_layers // 2),
        "full": ActivationCheckpointing("all"),
    }


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        return print(json.dumps(list(measure(*sys.argv[2:]))))
    rows = [row for model, (formats, _) in CASES.items() for name in formats for row in in_its_own_process(model, name)]
    gaps = [abs(row["planned_bytes"] / row["counted_bytes"] - 1) for row in rows]
    figures = {"rows": rows, "gap": {"median": median(gaps), "largest": max(gaps)}}
    return print(json.dumps(figures, indent=2), record.write("memory_plan", figures), sep="\n")


def in_its_own_process(model: str, name: str) -> list[dict[str, Any]]:
    print(model, name, file=sys.stderr)
    command = [sys.executable, __file__, "--one", model, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{model} {name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, name: str) -> Iterator[dict[str, Any]]:
    import memory_storages

    config, spec = CONFIGS[model], AdapterConfig()
    decoder, lengths = decoder_of(config), CASES[model][1]
    asked = Ask("torch", "cpu", name, "float32", spec.rank, spec.targets, max(lengths), max(lengths))
    engine = load(get_backend("torch", "cpu"), config, asked, spec)
    for length in lengths:
        batch = one_batch([length], config["vocab_size"])
        for value, checkpointing in dial(decoder.layers).items():
            engine.set_checkpointing(checkpointing)
            engine.forward_backward(batch, divisor=batch.num_targets)  # compiles
            engine.optim_step(lr=0.0, max_grad_norm=None)
            found = memory_storages.found_in(engine, batch)
            ask = replace(asked, micro_batch_tokens=length, max_length=length, checkpointing=checkpointing)
            *parts, _ = estimate(decoder, ask).parts
            counted = sum(found[part] for part in ("weights", "adapter", "optimizer", "peak"))
            case = {"model": model, "format": name, "tokens": length, "checkpointing": value}
            yield case | {"planned_bytes": sum(part.bytes for part in parts), "counted_bytes": counted}


if __name__ == "__main__":
    main()

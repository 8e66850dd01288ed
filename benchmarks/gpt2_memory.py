"""GPT-2 in its real sizes on this CPU: the bytes of tensors in a step, counted, beside the plan's.

    python benchmarks/gpt2_memory.py [GB]

The rows are those of results/validation_results.md: each technique alone and all together, for a step of 8 documents of
512 tokens, trained whole and with LoRA, of the sizes whose plan takes at most GB (14). Weights are random. Each row is
a process of its own that computes one forward and one backward pass after a first update, and counts the storages that
exist between steps and the most that torch's allocator hands out at once in a step. Of several micro-batches only one
is computed, because they take the same memory one after another. The process takes what it counts and its libraries.

Adds to results/gpt2_memory.json after each row, with its own origin, and skips the rows that it has: the whole takes
hours on two cores, most of them for bfloat16, which a CPU without its instructions emulates.
"""

from __future__ import annotations

import subprocess
import sys

import record
import validation_results

from dualtune.config.schema import AdapterConfig
from dualtune.engine.backend import get_backend
from dualtune.engine.memory.estimate import GRANULE, Ask

LENGTH = 512


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(count(*sys.argv[2:]))
        return
    limit = float(sys.argv[1]) * 1e9 if len(sys.argv) > 1 else 14e9
    for size, technique, planned in sorted(cases(), key=cost):
        name = f"{size}: {technique}"
        if planned > limit or name in record.runs("gpt2_memory"):
            continue
        counted = int(subprocess.check_output([sys.executable, __file__, "--one", size, technique], text=True))
        row = {"planned": planned, "counted": counted, "difference": round(planned / counted - 1, 4)}
        print(name, row, record.add_run("gpt2_memory", name, row), flush=True)


def cases() -> list[tuple[str, str, int]]:
    """Return (size, technique, planned bytes) of all rows."""
    found: list[tuple[str, str, int]] = []
    for size in ("small", "medium", "768M", "1B of 40 layers"):
        decoder = validation_results.gpt2(size)
        found += [(size, each, validation_results.total(decoder, ask)) for each, ask in asks().items()]
    return found


def cost(case: tuple[str, str, int]) -> tuple[bool, int, int]:
    """Sort by dtype, size, bytes."""
    size, technique, planned = case
    return asks()[technique].dtype != "float32", [*validation_results.SIZES].index(size), planned


def asks() -> dict[str, Ask]:
    return validation_results.asks("cpu")


def count(size: str, technique: str) -> int:
    """Return the bytes of tensors in a step."""
    import memory_estimate
    from memory_storages import always_in, peak_of

    from dualtune_torch.kernels import allocator

    asked = asks()[technique]
    spec = AdapterConfig(targets=("all-linear",))
    config = {"architectures": ["GPT2LMHeadModel"], **validation_results.config(size)}
    engine = memory_estimate.load(get_backend("torch", "cpu"), config, asked, spec)
    allocator.return_memory()  # else the process keeps blocks that are free, about as many as are in use
    few, batch = (
        memory_estimate.one_batch([length] * (asked.micro_batch_tokens // LENGTH), validation_results.VOCAB)
        for length in (GRANULE, LENGTH)
    )
    engine.optim_step(lr=0.0, max_grad_norm=None)  # creates the state
    engine.forward_backward(few, divisor=few.num_targets)  # compiles, which the profiler would record
    peak = peak_of(lambda: engine.forward_backward(batch, divisor=batch.num_targets))
    return sum(always_in(engine).values()) + peak


if __name__ == "__main__":
    main()

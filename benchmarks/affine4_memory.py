"""Memory of a base in MLX's 4 bits on torch, compared with the same base in NF4, on this machine's CPU.

    python benchmarks/affine4_memory.py [MODEL:DTYPE:LENGTHS …]

Cases are written as in memory_estimate.py, without the quantization. Weights are random; each case runs in a separate
process. It counts all bytes of the base, including embedding and output head, which NF4 leaves plain, and the peak of a
training step on top, by torch's allocator. Writes results/affine4_memory.json.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import record
from memory_estimate import in_its_own_process

CASES = (
    "llama-19m:bfloat16:512",
    "llama-19m:float32:512",
    "SmolLM2-135M:bfloat16:256",
    "TinyLlama-1.1B-Chat-v1.0:bfloat16:64",
)


def main() -> None:
    cases = {case: compare(case) for case in sys.argv[1:] or CASES}
    return print(json.dumps(cases, indent=2), record.write("affine4_memory", {"cases": cases}), sep="\n")


def compare(case: str) -> dict[str, Any]:
    """Bytes of both, and how many times NF4's the bytes of affine4 are."""
    model, dtype, lengths = case.split(":")
    found = {
        quantization: in_its_own_process(f"{model}:{dtype}:{quantization}:{lengths}")["measured"]
        for quantization in ("nf4", "affine4")
    }
    totals = {name: {"weights": m["weights"], "step": total_of(m)} for name, m in found.items()}
    ratios = {part: totals["affine4"][part] / totals["nf4"][part] for part in ("weights", "step")}
    return {"measured": found, "totals": totals, "ratio": ratios}


def total_of(measured: dict[str, int]) -> int:
    """The peak of a training step, with what is always there."""
    return sum(measured[part] for part in ("weights", "adapter", "optimizer", "peak"))


if __name__ == "__main__":
    main()

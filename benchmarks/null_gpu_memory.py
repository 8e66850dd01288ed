"""Memory, launches, copies and waits of whole training steps, counted on a null GPU with torch's own allocator.

    .venv-null/bin/python benchmarks/null_gpu_memory.py [--source OTHER_TREE] [--column NAME] [CASE …]

Nothing is measured on a GPU: tests/nogpu/null stands in for CUDA, and every allocation, launch and copy that torch asks
it for is counted. The estimate is the planner's, without its reserve, which is for what torch's allocator does not see.
`--source` counts the engine of another checkout of dualtune. Adds a column to results/null_gpu_memory.json; `--table`
prints the file as the table of docs/null_gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NULL = ROOT / "tests" / "nogpu" / "null"
RESULTS = ROOT / "benchmarks" / "results" / "null_gpu_memory.json"
CASES = {  # model, quantization, tokens
    "SmolLM2-135M bf16 2k": ("HuggingFaceTB/SmolLM2-135M", "none", 2048),
    "TinyLlama-1.1B NF4 2k": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "nf4", 2048),
    "Llama-3.1-8B bf16 4k": ("meta-llama/Llama-3.1-8B-Instruct", "none", 4096),
    "Llama-3.1-8B affine4 4k": ("meta-llama/Llama-3.1-8B-Instruct", "affine4", 4096),
    "Mistral-7B NF4 8k": ("mistralai/Mistral-7B-Instruct-v0.3", "nf4", 8192),
}
DOCUMENTS = 4
STEPS = 3  # the first two compile and create what stays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"allowed: {', '.join(CASES)}; default: all")
    parser.add_argument("--source", type=Path, default=ROOT, help="the checkout whose engine is counted")
    parser.add_argument("--column", default="now", help="under which name; default: now")
    parser.add_argument("--table", action="store_true", help="print the table of what was counted")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return print(json.dumps(count(*CASES[args.cases[0]])))
    if args.table:
        return print(table(json.loads(RESULTS.read_text())))
    for case in args.cases or CASES:
        found = _in_its_own_process(case, args.source.resolve())
        print(case, found, flush=True)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}  # another process may have added to it
        results.setdefault(case, {})[args.column] = found
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return None


def count(model: str, quantization: str, tokens: int) -> dict[str, Any]:
    """Count one micro-batch, one step, and the memory of both: bytes."""
    import null_gpu
    import torch
    from null_engines import batch, load, shape, step

    _number_the_device()
    engine = load(shape(model), quantization=quantization)
    micro_batch = batch(tokens, documents=DOCUMENTS)
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        step(engine, micro_batch)
    memory = torch.cuda.memory_stats()
    with null_gpu.counted() as counts:
        step(engine, micro_batch)
    assert not counts["not implemented"], counts["not implemented"]
    return {
        "launches": counts.total("launch"), "products": counts.total("product"),
        "copies": sum(times for kind, times in counts["copy"].items() if "the host" in kind or "to the device" in kind),
        "waits": counts.total("wait"),
        "peak_bytes": memory["allocated_bytes.all.peak"], "reserved_bytes": memory["reserved_bytes.all.peak"],
        "workspaces_bytes": _workspaces(), "estimated_bytes": _estimated(model, quantization, tokens),
        "kernels": engine.description.kernels,
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Return the results as a Markdown table: a line for each case and column."""
    head = "| case | | launches, products | copies | waits | peak, MB | estimate, MB | off by | reserved, MB |"
    lines = [head, "|---" * 9 + "|"]
    for case in filter(results.__contains__, CASES):
        for name, found in sorted(results[case].items()):
            peak, estimated = found["peak_bytes"] - found["workspaces_bytes"], found["estimated_bytes"]
            cells = (
                case, name, f"{found['launches']:,}, {found['products']:,}", found["copies"], found["waits"],
                f"{peak / 1e6:,.0f}", f"{estimated / 1e6:,.0f}", f"{estimated / peak - 1:+.1%}",
                f"{found['reserved_bytes'] / 1e6:,.0f}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _workspaces() -> int:
    """The bytes of cuBLAS's workspaces, which torch's allocator holds and the planner counts in its reserve."""
    import torch

    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def _estimated(model: str, quantization: str, tokens: int) -> int:
    from dualtune.memory.estimate import Ask, estimate
    from dualtune.memory.shapes import KNOWN, decoder_of

    asked = Ask("torch", "cuda", quantization, "bfloat16", 16, ("all-linear",), tokens, tokens // DOCUMENTS)
    found = estimate(decoder_of(KNOWN[model]), asked)
    return found.total_bytes - found["reserve"]


def _number_the_device() -> None:
    """Let older engines load: they give torch a device without a number here, which it refuses."""
    import torch

    set_fraction = torch.cuda.set_per_process_memory_fraction
    torch.cuda.set_per_process_memory_fraction = lambda share, device=None: set_fraction(share)


def _in_its_own_process(case: str, source: Path) -> dict[str, Any]:
    command = [sys.executable, str(NULL / "start.py"), __file__, "--one", case]
    path = os.pathsep.join(filter(None, (str(source), str(source / "backends"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()

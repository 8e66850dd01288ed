"""Memory, launches, copies and waits of whole training steps, counted on a null GPU with torch's own allocator.

    .venv-null/bin/python benchmarks/null_gpu_memory.py [--source OTHER_TREE] [--column NAME] [models | grid | CASE …]

Nothing is measured on a GPU: tests/nogpu/null stands in for CUDA, and every allocation, launch and copy that torch asks
it for is counted. The estimate is the planner's, without its reserve, which is for what torch's allocator does not see.
`models` are trained on documents with prompts; in `grid` every token is a target, as the planner assumes. `--source`
counts the engine of another checkout of dualtune. Adds a column to results/null_gpu_memory.json; `--table` prints the
file as the tables of results/null_gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers_inputs import SHAPES

from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.memory.estimate import Ask, estimate
from dualtune.engine.memory.shapes import KNOWN, decoder_of

ROOT = Path(__file__).parents[1]
NULL = ROOT / "tests" / "nogpu" / "null"
RESULTS = ROOT / "benchmarks" / "results" / "null_gpu_memory.json"
LLAMA_19M = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SHAPES["llama-19m"]
SMOLLM, TINY, QWEN = "HuggingFaceTB/SmolLM2-135M", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Qwen/Qwen3-0.6B"
LLAMA, MISTRAL = "meta-llama/Llama-3.1-8B-Instruct", "mistralai/Mistral-7B-Instruct-v0.3"
STEPS = 3  # the first two compile and create what stays


@dataclass(frozen=True)
class Case:
    model: str
    quantization: str
    tokens: int
    documents: int = 4  # in one row
    dtype: str = "bfloat16"
    checkpointing: ActivationCheckpointing = KEEP_ALL
    prompts: bool = False  # a third of each document; the planner takes every token as a target

    @property
    def config(self) -> dict[str, Any]:
        return LLAMA_19M if self.model == "llama-19m" else dict(KNOWN[self.model])

    def ask(self) -> Ask:
        return Ask(
            "torch", "cuda", self.quantization, self.dtype, 16, ("all-linear",), self.tokens,
            self.tokens // self.documents, checkpointing=self.checkpointing,
        )  # fmt: skip


MODELS = {
    "SmolLM2-135M bf16 2k": Case(SMOLLM, "none", 2048, prompts=True),
    "TinyLlama-1.1B NF4 2k": Case(TINY, "nf4", 2048, prompts=True),
    "Llama-3.1-8B bf16 4k": Case(LLAMA, "none", 4096, prompts=True),
    "Llama-3.1-8B affine4 4k": Case(LLAMA, "affine4", 4096, prompts=True),
    "Mistral-7B NF4 8k": Case(MISTRAL, "nf4", 8192, prompts=True),
}
GRID = {  # first the cases of results/memory_estimate.md, then its formats and ways of checkpointing
    "llama-19m bf16 512": Case("llama-19m", "none", 512, 1),
    "llama-19m bf16 2k": Case("llama-19m", "none", 2048, 1),
    "llama-19m fp32 512": Case("llama-19m", "none", 512, 1, "float32"),
    "SmolLM2-135M bf16 256": Case(SMOLLM, "none", 256, 1),
    "SmolLM2-135M bf16 1k": Case(SMOLLM, "none", 1024, 1),
    "SmolLM2-135M bf16 2k, one document": Case(SMOLLM, "none", 2048, 1),
    "SmolLM2-135M bf16 8 x 128": Case(SMOLLM, "none", 1024, 8),
    "SmolLM2-135M fp32 512": Case(SMOLLM, "none", 512, 1, "float32"),
    "SmolLM2-135M NF4 1k": Case(SMOLLM, "nf4", 1024, 1),
    "Qwen3-0.6B bf16 512": Case(QWEN, "none", 512, 1),
    "Qwen3-0.6B fp16 2k": Case(QWEN, "none", 2048, dtype="float16"),
    "SmolLM2-135M int8 1k": Case(SMOLLM, "int8", 1024),
    "SmolLM2-135M affine4 1k": Case(SMOLLM, "affine4", 1024),
    "SmolLM2-135M affine8 1k": Case(SMOLLM, "affine8", 1024),
    "SmolLM2-135M bf16 2k, remade": Case(
        SMOLLM, "none", 2048, checkpointing=ActivationCheckpointing(adapter_inputs=True)
    ),
    "SmolLM2-135M bf16 2k, {layers: 15}": Case(SMOLLM, "none", 2048, checkpointing=ActivationCheckpointing(15)),
    "SmolLM2-135M bf16 2k, full": Case(SMOLLM, "none", 2048, checkpointing=ActivationCheckpointing("all")),
    "SmolLM2-135M bf16 2k, full, every: 2": Case(
        SMOLLM, "none", 2048, checkpointing=ActivationCheckpointing("all", every=2)
    ),
    "TinyLlama-1.1B NF4 2k, full": Case(TINY, "nf4", 2048, checkpointing=ActivationCheckpointing("all")),
}
CASES = MODELS | GRID


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"models, grid, or of: {', '.join(CASES)}; default: all")
    parser.add_argument("--source", type=Path, default=ROOT, help="the checkout whose engine is counted")
    parser.add_argument("--column", default="now", help="under which name; default: now")
    parser.add_argument("--table", action="store_true", help="print the table of what was counted")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return print(json.dumps(count(CASES[args.cases[0]])))
    if args.table:
        return print(table(json.loads(RESULTS.read_text())))
    chosen = {"models": MODELS, "grid": GRID}.get(args.cases[0] if args.cases else "", args.cases or CASES)
    for case in chosen:
        found = in_its_own_process(case, args.source.resolve())
        print(case, found, flush=True)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}  # another process may have added to it
        results.setdefault(case, {})[args.column] = found
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return None


def count(case: Case) -> dict[str, Any]:
    """Count one micro-batch, one step, and the memory of both: bytes."""
    import null_gpu
    import torch
    from null_engines import batch, load, step

    _number_the_device()
    engine = load(case.config, quantization=case.quantization, dtype=case.dtype, checkpointing=case.checkpointing)
    micro_batch = batch(case.tokens, documents=case.documents, prompts=case.prompts)
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
        "workspaces_bytes": _workspaces(), "estimated_bytes": _estimated(case),
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


def _estimated(case: Case) -> int:
    found = estimate(decoder_of(case.config), case.ask())
    return found.total_bytes - found["reserve"]


def _number_the_device() -> None:
    """Let older engines load: they give torch a device without a number here, which it refuses."""
    import torch

    set_fraction = torch.cuda.set_per_process_memory_fraction
    torch.cuda.set_per_process_memory_fraction = lambda share, device=None: set_fraction(share)


def in_its_own_process(case: str, source: Path) -> dict[str, Any]:
    command = [sys.executable, str(NULL / "start.py"), __file__, "--one", case]
    path = os.pathsep.join(filter(None, (str(source), str(source / "backends"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()

"""The memory of the host that loading a base takes, sampled from outside a process that loads it.

    python benchmarks/load_memory.py [MODEL]

A model of a known shape (TinyLlama's, with 1.1 billion parameters, or that of another hub id in
`dualtune/engine/memory/shapes.py`) with random bfloat16 weights in several files is loaded in each format, to compute
in bfloat16, in one process for each backend, both at the same time. Anonymous memory (RssAnon of /proc/PID/status, on
Linux) is what a process really needs: pages of mapped files are dropped when memory is short. Before each measured
load, the process loads a tiny model in the same format. Writes results/load_memory.json.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import record

from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.memory.shapes import KNOWN
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

EVERY_S = 0.004
MODEL, FILES = "TinyLlama/TinyLlama-1.1B-Chat-v1.0", 4
Case = tuple[str, str]  # model.quantization and model.dtype
FORMATS = {"torch": ("none", "nf4", "int8", "affine8", "affine4"), "mlx": ("none", "int8", "affine8", "affine4")}


def main(name: str = MODEL) -> None:
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor() as pool:
        model_dir = Path(place) / "model"
        stored = write_in_shards(model_dir, name)
        measured = pool.map(lambda backend: loads_of(backend, model_dir, stored["largest_matrix_bytes"]), FORMATS)
        loads = [load for of_backend in measured for load in of_backend]
    print(record.write("load_memory", {"model": name, **stored, "loads": loads}))


def loads_of(backend: str, model_dir: Path, largest: int) -> list[dict[str, Any]]:
    found = measure(model_dir, backend, [(name, "bfloat16") for name in FORMATS[backend]])
    loads: list[dict[str, Any]] = []
    for name, load in zip(FORMATS[backend], found, strict=True):
        above = (load["peak_anonymous_bytes"] - load["final_anonymous_bytes"]) / largest
        each = load["adapted_bytes"] / load["adapted_parameters"]
        loads.append(
            {"backend": backend, "format": name, **load}
            | {"bytes_per_linear_parameter": each, "peak_above_final_of_largest_matrix": above}
        )
        print(loads[-1], flush=True)
    return loads


def write_in_shards(path: Path, name: str) -> dict[str, int]:
    """Write a model with random bfloat16 weights, in several files with an index, as the hub has it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**KNOWN[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    sizes = [parameter.numel() for parameter in model.parameters()]
    model.save_pretrained(path, max_shard_size=torch.bfloat16.itemsize * sum(sizes) // FILES)
    return {
        "parameters": sum(sizes),
        "largest_matrix_bytes": max(sizes) * torch.bfloat16.itemsize,
        "files": len([*path.glob("*.safetensors")]),
    }


def measure(model_dir: Path, backend: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield, for each case, the peak during the load and what stays after it, in bytes above the process before it."""
    command = [sys.executable, __file__, str(model_dir), backend]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as child:
        assert child.stdin is not None and child.stdout is not None
        for quantization, dtype in cases:
            print(quantization, dtype, file=child.stdin)
            if child.stdout.readline() != "ready\n":
                raise RuntimeError(f"{command} has failed for {quantization}, {dtype}")
            start, peak, said = resident(child.pid), resident(child.pid), _ask(child)
            while said.empty():
                peak = {kind: max(size, peak[kind]) for kind, size in resident(child.pid).items()}
                time.sleep(EVERY_S)
            end = resident(child.pid)
            yield {
                "peak_anonymous_bytes": peak["RssAnon"] - start["RssAnon"],
                "final_anonymous_bytes": end["RssAnon"] - start["RssAnon"],
                "peak_mapped_bytes": peak["RssFile"] - start["RssFile"],
                "final_mapped_bytes": end["RssFile"] - start["RssFile"],
            } | json.loads(said.get())


def _ask(child: Any) -> Queue[str]:
    """Let the process load, and return where its answer will be."""
    answers: Queue[str] = Queue()
    threading.Thread(target=lambda: answers.put(child.stdout.readline()), daemon=True).start()
    print("load", file=child.stdin)
    return answers


def has_status() -> bool:
    return Path("/proc/self/status").exists()


def resident(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process by kind, and the most since it began or its mark was set."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line[0] in ("RssAnon:", "RssFile:", "VmHWM:")}


def load_when_told(model_dir: Path, name: str) -> None:
    """The measured process: one load for each case that it reads. What it has loaded is gone before the next one."""
    backend = get_backend(name, "cpu")

    def load(path: Path, quantization: str, dtype: str) -> dict[str, int]:
        nonlocal engine
        spec = AdapterSpec(1, 1.0, 0.0, ("all-linear",))  # reports the bytes of these layers
        engine = backend.load(
            LoadRequest(path, dtype, quantization, "pretrained", spec, OptimizerSpec(), seed=1, kernels="reference")
        )
        stored = engine.description.adapted_weights
        return {"adapted_bytes": stored["bytes"], "adapted_parameters": stored["parameters"]}

    engine: Any = None
    with tempfile.TemporaryDirectory() as place:
        tiny = write_tiny_llama(Path(place) / "model")
        for line in sys.stdin:
            load(tiny, *line.split())
            engine = None
            free_memory(name)
            print("ready", flush=True)
            sys.stdin.readline()
            print(json.dumps(load(model_dir, *line.split())), flush=True)


def free_memory(backend: str) -> None:
    """Return what was freed to the system: a load that takes memory kept from the one before would not be seen."""
    gc.collect()
    if backend == "mlx":
        import mlx.core as mx

        mx.clear_cache()
    ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    if len(sys.argv) == 3:  # started by `measure`
        load_when_told(Path(sys.argv[1]), sys.argv[2])
    else:
        main(*sys.argv[1:])

"""Memory of the base in a process, on a CPU with gloo: one process, two with the whole base each, two with half each.

`python benchmarks/sharding_memory.py` writes results/sharding_memory.json. Memory is read from the kernel
(/proc/self/smaps_rollup): `own` is anonymous memory, which no other process shares; mapped files, such as weights read
straight from disk, are not in it. Figures are those of the process with the most memory. Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from record import write

SHAPE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12,
         "num_key_value_heads": 12, "head_dim": 64, "vocab_size": 8192}  # fmt: skip
# Processes, memory.sharding, model.quantization, model.dtype; stored is float32.
RUNS = [
    (1, "none", "none", "float32"),
    (2, "none", "none", "float32"),
    (2, "full", "none", "float32"),
    (2, "none", "none", "bfloat16"),
    (2, "full", "none", "bfloat16"),
    (2, "none", "affine4", "float32"),
    (2, "full", "affine4", "float32"),
]
STEPS = 2


def main() -> None:
    from dualtune.engine.testing.tiny_models import write_tiny_llama

    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_llama(Path(scratch) / "model", **SHAPE)
        found = [measured(model, Path(scratch), *run) for run in RUNS]
    print("written to", write("sharding_memory", {"shape": SHAPE, "stored": "float32", "runs": found}))


def measured(model: Path, home: Path, processes: int, sharding: str, quantization: str, dtype: str) -> dict[str, Any]:
    """The largest figures of the processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    for old in home.glob("*.json"):
        old.unlink()
    worker = [__file__, "worker", str(model), str(home), sharding, quantization, dtype]
    subprocess.run([sys.executable, *(torchrun if processes > 1 else []), *worker], check=True)
    parts = [json.loads(path.read_text()) for path in home.glob("*.json")]
    assert len(parts) == processes
    figures = {name: max(part[name] for part in parts) for name in parts[0]}
    print(processes, sharding, quantization, dtype, {name: f"{value:.3g}" for name, value in figures.items()})
    settings = {"processes": processes, "sharding": sharding, "quantization": quantization, "dtype": dtype}
    return settings | figures


def worker(model: str, home: str, sharding: str, quantization: str, dtype: str) -> None:
    """One process of a run."""
    import torch

    from dualtune.engine.backend import LoadRequest, get_backend
    from dualtune.engine.testing.tiny_models import random_batch
    from dualtune.model.adapter import AdapterSpec
    from dualtune.model.optimizer import OptimizerSpec

    torch.set_num_threads(1)
    backend = get_backend("torch", "cpu")
    world = backend.world()
    batch = random_batch([64], 8192, seed=world.rank)
    spec = AdapterSpec(rank=8, alpha=16.0, dropout=0.0, targets=("all-linear",))
    # Nothing is compiled: the compiler's own memory would be in the figures.
    request = LoadRequest(
        Path(model), dtype, quantization, "pretrained", spec, OptimizerSpec(), 0, kernels="reference", sharding=sharding
    )
    before = own_bytes()
    with Peak() as loading:
        engine: Any = backend.load(request)
        after = own_bytes()
    base = sum(held(tensor) for name, tensor in all_tensors(engine.model) if ".lora_" not in name)
    with Peak() as training:
        for _ in range(STEPS):
            engine.forward_backward(batch, divisor=batch.num_targets * world.size)
            float(engine.optim_step(lr=1e-4, max_grad_norm=None).loss)
    figures = {
        "base_bytes": base,
        "own_bytes_of_load": after - before,
        "own_bytes_of_load_peak": loading.bytes - before,
        "own_bytes_of_training_peak": training.bytes - before,
    }
    (Path(home) / f"{world.rank}.json").write_text(json.dumps(figures))


def all_tensors(model: Any) -> list[tuple[str, Any]]:
    return [*model.named_parameters(), *model.named_buffers()]


def held(tensor: Any) -> int:
    """The bytes of a tensor's storage in this process."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.untyped_storage().nbytes()


def own_bytes() -> int:
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("Anonymous:"))


class Peak:
    """The most own memory during a block, sampled every 5 ms."""

    def __enter__(self) -> Peak:
        self.bytes, self._done = own_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self.bytes, own_bytes())

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.bytes = max(self.bytes, own_bytes())


if __name__ == "__main__":
    worker(*sys.argv[2:]) if sys.argv[1:2] == ["worker"] else main()

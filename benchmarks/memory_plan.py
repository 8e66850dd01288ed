"""The memory plan compared with the memory of the engines on this CPU: shapes, formats, checkpointing, micro-batches.

    python benchmarks/memory_plan.py [CASE …]

A case is a backend, a model, a format of the base, a value of memory.checkpointing (`half`: the first half of the
layers) and the documents of a micro-batch, such as `torch:llama-19m:nf4:half:4x256`: four of 256 tokens. Weights are
random, in float32; the adapter is that of the default config. Each case is a process of its own, which takes
two steps. Compared are

counted   torch: the storages that exist between steps, and the most that its allocator hands out at once during a
          forward and a backward pass. MLX: the peak of its allocator. The plan without its reserve.
process   the most anonymous memory of the process during the steps: VmHWM of /proc/PID/status without RssFile, the
          mapped files. The whole plan. Loading has returned what it needed to the system.

The plan has the packages that were installed where a case was measured. Adds to results/memory_plan.json after each
case, with its own origin, and skips the cases that it has: the whole takes an hour or more. Remove the file to measure
all again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import memory_estimate
import record
from load_memory import resident

from dualtune.config.schema import AdapterConfig
from dualtune.engine.backend import Backend, get_backend
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.memory.estimate import Ask, estimate
from dualtune.engine.memory.shapes import Decoder, decoder_of

STEPS = 2


def llama(kind: str, hidden: int, inner: int, layers: int, heads: int, vocab: int, *, tied: bool) -> dict[str, Any]:
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    return {
        "architectures": [f"{name}ForCausalLM"], "model_type": kind, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": 64,
        "vocab_size": vocab, "max_position_embeddings": 4096, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


CONFIGS = memory_estimate.CONFIGS | {
    "llama-2m": llama("llama", 128, 352, 4, 2, 8192, tied=True),
    "qwen3-29m": llama("qwen3", 384, 1024, 8, 6, 49152, tied=True),
    "qwen2-58m": llama("qwen2", 384, 2048, 12, 6, 65536, tied=True),
    "llama-55m": llama("llama", 512, 1408, 10, 8, 24576, tied=False),
    "llama-wide": llama("llama", 1024, 10240, 4, 16, 8192, tied=True),  # an unpacked matrix takes 42 MB
    "gpt2-124m": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "vocab_size": 50257, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
SHAPES = ("llama-19m", "qwen3-29m", "llama-55m", "qwen2-58m", "SmolLM2-135M")
FORMATS, VALUES = ("none", "nf4", "int8", "affine4"), ("none", "remade", "half", "full")
FEW, MANY = ("256", "512"), ("1024", "4x256")


def cases() -> list[str]:
    """Each shape in each format; the values of memory.checkpointing and the micro-batches take turns."""
    found = ["torch:llama-2m:none:none:512", "torch:llama-2m:nf4:full:4x256"]
    for s, shape in enumerate(SHAPES):
        for f, name in enumerate(FORMATS):
            found.append(f"torch:{shape}:{name}:{VALUES[(s + f) % 4]}:{FEW[(s + f) % 2]}")
            if s < len(FORMATS) - 1:
                found.append(f"torch:{shape}:{name}:{VALUES[(s + f + 2) % 4]}:{MANY[f % 2]}")
    found += ["torch:llama-wide:nf4:none:64", "torch:llama-wide:int8:full:64"]
    found += ["torch:SmolLM2-135M:none:none:1024", "torch:gpt2-124m:none:none:256", "torch:gpt2-124m:nf4:full:512"]
    found += [f"mlx:llama-2m:{name}:{value}:256" for name in ("none", "int8", "affine4") for value in ("none", "full")]
    found += ["mlx:llama-55m:none:none:256", "mlx:llama-55m:int8:full:512", "mlx:qwen3-29m:affine4:full:512"]
    return [*found, "torch:TinyLlama-1.1B-Chat-v1.0:nf4:full:128"]


@dataclass(frozen=True, slots=True)
class Case:
    backend: str
    model: str
    format: str
    value: str
    documents: str

    @property
    def lengths(self) -> list[int]:
        number, _, length = self.documents.rpartition("x")
        return [int(length)] * int(number or 1)

    @property
    def decoder(self) -> Decoder:
        return decoder_of(CONFIGS[self.model])

    @property
    def ask(self) -> Ask:
        spec = AdapterConfig()
        targets = "all-linear" if self.decoder.is_gpt2 else spec.targets
        half = ActivationCheckpointing(self.decoder.layers // 2)
        dial = {
            "none": KEEP_ALL, "remade": ActivationCheckpointing(adapter_inputs=True), "half": half,
            "full": ActivationCheckpointing("all"),
        }  # fmt: skip
        return Ask(
            self.backend, "cpu", self.format, "float32", spec.rank, targets, sum(self.lengths), max(self.lengths),
            checkpointing=dial[self.value],
        )  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(work(Case(*sys.argv[2].split(":")))))
        return
    runs = record.runs("memory_plan")
    for name in sys.argv[1:] or cases():
        if name not in runs:
            runs[name] = record.origin() | {"measured": measure(name)}
            print(name, runs[name]["measured"], plan_of(name), file=sys.stderr, flush=True)
            write(runs)
    print(json.dumps(compared(runs), indent=2), write(runs), sep="\n")


def write(runs: dict[str, dict[str, Any]]) -> Path:
    return record.write("memory_plan", {"gaps": compared(runs), "runs": runs})


def compared(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how far the plan of today is from what was measured, as a share of it: in the median, and at most."""
    gaps: dict[str, list[float]] = {}
    for name, run in runs.items():
        planned = plan_of(name, frozenset(run["versions"]))
        for kind, size in run["measured"].items():
            gaps.setdefault(f"{name.split(':')[0]} {kind}", []).append(planned[kind] / size - 1)
    return {
        kind: {
            "cases": len(shares),
            "median": round(median(map(abs, shares)), 4),
            "largest": round(max(shares, key=abs), 4),
        }
        for kind, shares in gaps.items()
    }


def plan_of(name: str, packages: frozenset[str] | None = None) -> dict[str, int]:
    """Return the bytes that were planned, where these packages are installed; None: here."""
    case = Case(*name.split(":"))
    plan = estimate(case.decoder, replace(case.ask, packages=packages))
    return {"counted": plan.total_bytes - plan["reserve"], "process": plan.total_bytes}


def measure(name: str) -> dict[str, int]:
    """Return the counted bytes of a case, and the most anonymous memory of its process, in a process of its own."""
    command = [sys.executable, __file__, "--one", name]
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


def work(case: Case) -> dict[str, int]:
    """The measured process."""
    backend, spec, config = get_backend(case.backend, "cpu"), AdapterConfig(), CONFIGS[case.model]
    if case.decoder.is_gpt2:
        spec = spec.model_copy(update={"targets": ("all-linear",)})
    engine = memory_estimate.load(backend, config, case.ask, spec)
    batch = memory_estimate.one_batch(case.lengths, config["vocab_size"])
    backend.reset_peak_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    for _ in range(STEPS):
        engine.forward_backward(batch, divisor=batch.num_targets)
        backend.synchronize()
        float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)
    memory = resident(os.getpid())
    return {"counted": counted(backend, engine, batch), "process": memory["VmHWM"] - memory["RssFile"]}


def counted(backend: Backend, engine: Any, batch: Any) -> int:
    if backend.name == "mlx":
        return backend.memory().peak_bytes
    import memory_storages

    found = memory_storages.found_in(engine, batch)
    return sum(found[part] for part in ("weights", "adapter", "optimizer", "peak"))


if __name__ == "__main__":
    main()

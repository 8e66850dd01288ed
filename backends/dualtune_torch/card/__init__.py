"""The torch backend's card. Nothing here imports torch, whose import takes seconds."""

from __future__ import annotations

import sys

from dualtune.engine.card import BY_BOTH, Card, Device, Launch, MemoryFormulas, Package, Twin
from dualtune_torch.card import checks, counted, memory
from dualtune_torch.card.costs import COSTS

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "nf4", "int8", "affine4", "affine8")

CARD = Card(
    name="torch",
    devices=(
        Device(
            "cuda",
            "bfloat16",
            DTYPES,
            QUANTIZATIONS,
            four_bit="nf4",
            offloads=("activations",),
            records_graphs=True,
            pieces={
                "nf4_dequant": "nf4",
                "affine_dequant": "affine4",
                "lora_down, lora_dx, lora_da": "none",
                "lora_back_g": "none",
            },
            offloads_optimizer=True,
            enforces_limit=True,
        ),
        Device("cpu", "float32", DTYPES, QUANTIZATIONS, four_bit="nf4", enforces_limit=sys.platform == "linux"),
    ),
    platforms=("cuda", "cpu", "cuda:N"),
    preference=0,
    honoured={
        **BY_BOTH,
        "memory.sharding": ("auto", "none", "full"),
    },
    package=Package(
        framework="torch",
        extra="torch",
        recorded=("torch", "bitsandbytes", "accelerate"),
        detected=("torch", "triton", "bitsandbytes", "transformers", "peft"),
    ),
    memory=MemoryFormulas(memory.parts, count="dualtune_torch.counting:count", counted_parts=counted.parts),
    costs=COSTS,
    pieces=("lora", "attention", "loss", "norms", "mlp", "rotary"),
    launches=(
        Launch(("local", "slurm"), "torchrun", ("cuda", "cpu"), agent="dualtune_torch.torchrun", variables=("RANK",)),
    ),
    problems=checks.problems,
    environment=checks.environment,
    # torch has no memory statistics on a CPU, so the peak is the growth of the process since before the first model
    # was loaded, including the libraries that are loaded with it.
    twin=Twin(peak_bytes=256 * 10**6, divisors={"full": 5}),
    peft_trial="dualtune_torch.peft_trial:problems",
    libraries={"peft": "dualtune_torch.libraries:Peft"},
)

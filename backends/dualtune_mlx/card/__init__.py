"""The MLX backend's card. Nothing here imports MLX."""

from __future__ import annotations

from dualtune.engine.card import BY_BOTH, Card, Device, Launch, MemoryFormulas, Package, Twin
from dualtune_mlx.card import checks, counted, memory
from dualtune_mlx.card.costs import COSTS
from dualtune_mlx.card.memory import ATTENTION_CHUNK

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "affine4", "affine8")

CARD = Card(
    name="mlx",
    title="MLX",
    devices=(
        Device("metal", "bfloat16", DTYPES, QUANTIZATIONS, four_bit="affine4"),
        Device("cpu", "float32", DTYPES, QUANTIZATIONS, four_bit="affine4", remark="which is slow"),
    ),
    platforms=("mlx",),
    preference=1,
    honoured={
        **BY_BOTH,
        "memory.offload": ("auto", "none"),
        "memory.sharding": ("auto", "none"),
    },
    pieces=("lora", "loss", "attention", "compiled step"),
    package=Package(framework="mlx", extra="mlx", recorded=("mlx", "mlx-lm"), detected=("mlx", "mlx-lm")),
    # Scores of documents up to one chunk are kept, those of longer ones recomputed: above the border less is kept.
    memory=MemoryFormulas(memory.parts, (ATTENTION_CHUNK,), "dualtune_mlx.counting:count", counted.parts),
    costs=COSTS,
    launches=(Launch(("mlx",), "mlx.launch", ("mlx",), variables=("MLX_HOSTFILE",)),),
    problems=checks.problems,
    environment=checks.environment,
    twin=Twin(peak_bytes=16 * 10**6, divisors={"extended": 5, "full": 10}),
    libraries={"mlx-lm": "dualtune_mlx.libraries:MlxLm"},
)

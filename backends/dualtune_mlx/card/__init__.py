"""The MLX backend's card. Nothing here imports MLX."""

from __future__ import annotations

from dualtune.engine.card import (
    INSTALLED,
    LAYERS,
    NAMES,
    NUMBER,
    SIZE,
    Card,
    Device,
    Launch,
    MemoryFormulas,
    Package,
    Twin,
)
from dualtune.model.merge_rounding import ROUNDINGS
from dualtune.model.methods import INITS
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
        "model.init": ("pretrained", "random"),
        "model.kernels": ("auto", "fused", "reference"),
        "adapter.method": ("lora", "dora", "full"),
        "adapter.init": INITS,
        "adapter.merge_for": ("none", *ROUNDINGS),
        "adapter.master_weights": ("float32", "bfloat16"),
        "adapter.train_modules": ((), NAMES),
        "adapter.train_rows": ((), NAMES),
        "adapter.bias": ("none", "all", "lora_only"),
        "data.packing": (False, True),
        "train.optimizer": ("adamw", "adamw_8bit", "sgd", "lion", "lion_8bit", "adafactor", "muon", INSTALLED),
        "train.schedule": ("constant", "linear", "cosine", "schedule_free"),
        "train.average": ("none", "ema", "tail"),
        "train.lora_plus_ratio": (None, NUMBER),
        "train.label_smoothing": (0.0, NUMBER),
        "train.embedding_learning_rate": (None, NUMBER),
        "train.activation_cache": ("none", "disk"),
        "memory.checkpointing": ("auto", "none", "adapter_inputs", "full", LAYERS),
        "memory.offload": ("auto", "none"),
        "memory.resident_layers": ("all", NUMBER),
        "memory.sharding": ("auto", "none"),
        "memory.limit": ("auto", SIZE),
        "run.deterministic": (False, True),
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

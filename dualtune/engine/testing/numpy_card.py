"""The card of the NumPy engine: an example for a small backend."""

from __future__ import annotations

from typing import get_args

from dualtune.engine.card import INSTALLED, NAMES, NUMBER, Card, Device
from dualtune.model.methods import INITS
from dualtune.model.optimizer import OptimizerName

CARD = Card(
    name="numpy",
    title="NumPy",
    devices=(Device("cpu", auto_dtype="float64"),),
    honoured={
        "model.init": ("pretrained",),
        "adapter.method": ("lora", "dora"),
        "adapter.init": INITS,
        "adapter.bias": ("none",),
        "adapter.train_modules": ((), NAMES),
        "adapter.train_rows": ((), NAMES),
        "data.packing": (False, True),  # no token sees another, so packing needs no mask
        "memory.offload": ("auto", "none"),
        "train.optimizer": (*get_args(OptimizerName), INSTALLED),  # it uses the formulas of the table directly
        "train.schedule": ("constant", "linear", "cosine", "schedule_free"),
        "train.average": ("none", "ema", "tail"),
        "train.lora_plus_ratio": (None, NUMBER),
        "train.label_smoothing": (0.0,),
        "train.router_aux_loss_coef": (None,),
        "train.embedding_learning_rate": (None, NUMBER),
        "train.activation_cache": ("none", "disk"),
        "run.deterministic": (False, True),  # it computes on a CPU, with one thread at a time
    },
)

"""The kernels that MLX starts for a decoder layer in a micro-batch, forward and backward, counted in its graph.

    python benchmarks/launches_mlx.py --reason "why a count has changed"

Counted without a GPU: the compiled step is traced, not computed, and `mx.export_to_dot` writes its graph after MLX has
fused it. A node is a kernel, or a view, which starts none. The count of a layer is half of what two more layers add.
The CPU build traces a norm and a rotary embedding as their parts; on Metal each is one kernel, so it starts fewer.

Writes the part "mlx" of results/launches.json: a changed count is a new line with its date and reason.
tests/nogpu/metal/test_metal_launches.py holds the counts.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx

from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.testing.tiny_models import pack, random_batch
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

RESULT = Path(__file__).parent / "results/launches.json"
FEWER, MORE = 3, 5  # layers
VOCAB = 128
# All linear layers have inputs that MLX's groups of 64 divide; two query heads share a key head.
MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
VIEWS = {
    "AsStrided", "Broadcast", "CustomTransforms", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice", "Split",
    "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """What is counted: a micro-batch of one row, and the setup that computes it."""

    documents: tuple[int, ...] = (96,)  # tokens of each document in the row
    quantization: str = "none"
    dropout: float = 0.0
    checkpointing: ActivationCheckpointing = KEEP_ALL


SHAPES = {
    "plain": Shape(),
    "packed": Shape(documents=(30, 20, 46)),
    "affine4": Shape(quantization="affine4"),
    "dropout": Shape(dropout=0.1),
    "checkpointing": Shape(checkpointing=ActivationCheckpointing("all")),
    "attention in chunks": Shape(documents=(600, 424)),
}


@dataclass(frozen=True, slots=True)
class Count:
    """Nodes of the graph that a layer adds."""

    primitives_per_layer: float  # that start a kernel
    views_per_layer: float


def count(shape: Shape) -> Count:
    """Count the nodes of a layer, in bfloat16, with an adapter on all linear layers."""
    fewer, more = (_nodes(shape, layers) for layers in (FEWER, MORE))
    added = {name: (more[name] - fewer[name]) / (MORE - FEWER) for name in more | fewer}
    views = sum(number for name, number in added.items() if name in VIEWS)
    return Count(sum(added.values()) - views, views)


def _nodes(shape: Shape, layers: int) -> Counter[str]:
    """Return how often each primitive occurs in the compiled step of a model with so many layers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))
        spec = AdapterSpec(8, 12.0, shape.dropout, ("all-linear",))
        request = LoadRequest(
            Path(folder), "bfloat16", shape.quantization, "random", spec, OptimizerSpec(), seed=1, kernels="fused",
            checkpointing=shape.checkpointing,
        )  # fmt: skip
        engine: Any = get_backend("mlx", "cpu").load(request)
    batch = random_batch([*shape.documents], VOCAB)
    if len(shape.documents) > 1:
        batch = pack(batch, [[*range(len(shape.documents))]])
    found = io.StringIO()
    mx.export_to_dot(found, *engine.traced(batch, divisor=1.0))
    return Counter(re.findall(r'label ="(\w+)", shape=rectangle', found.getvalue()))


def recorded() -> dict[str, Any]:
    """Return results/launches.json: by backend, then by shape."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def refresh(reason: str) -> None:
    """Record the counts of all shapes, with a new line for each that has changed."""
    found = recorded()
    part = found.setdefault("mlx", {})
    for name, shape in SHAPES.items():
        now = count(shape)
        entry = part.setdefault(name, {"changes": []})
        if entry.get("primitives_per_layer") != now.primitives_per_layer:
            today = datetime.now(UTC).date().isoformat()
            entry["changes"].append({"date": today, "count": now.primitives_per_layer, "reason": reason})
        entry |= {"primitives_per_layer": now.primitives_per_layer, "views_per_layer": now.views_per_layer}
        print(f"{name}: {now.primitives_per_layer:g} kernels and {now.views_per_layer:g} views a layer")
    RESULT.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reason", required=True, help="why a count has changed")
    refresh(parser.parse_args().reason)

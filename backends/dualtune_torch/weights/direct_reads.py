"""Layers whose weight a model of transformers reads itself, instead of calling the layer.

It takes what it finds for the matrix, or casts its input to the dtype of it: packed bytes are neither. So such a layer
holds the numbers of the packed weight as plain ones, and the function is that of every backend that calls the layer.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dualtune_torch.weights import nf4
from dualtune_torch.weights.frozen import shape_of, weight_of
from dualtune_torch.weights.packed import PackedLayer

_INDEXERS = (
    "AXK2Indexer", "DeepseekV32Indexer", "Dots3NoteTextIndexer", "Glm5NextTextIndexer", "GlmMoeDsaIndexer",
    "HYV4Indexer", "MistralLarge4TextIndexer",
)  # fmt: skip
# By the class that reads: its layers. What only a fused kernel of training mode reads is not here, because bases are in
# eval mode. `tests/torch/test_direct_reads.py` compares this with the source of the installed transformers.
READ: dict[str, tuple[str, ...]] = {
    "FalconMambaMixer": ("dt_proj",),
    "JambaMambaMixer": ("dt_proj",),
    "LSHSelfAttention": ("query_key", "value"),
    "LongcatFlashTopkRouter": ("classifier",),
    "MambaMixer": ("dt_proj",),
    **dict.fromkeys(_INDEXERS, ("weights_proj",)),
}


def unpack_read(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put plain layers, in the compute dtype, in the place of packed ones whose weight the model reads itself.

    RWKV divides weights in place in eval mode, so that 16 bits do not overflow, which would pass by an adapter. It
    computes here what it computes in training mode, where it divides nothing.
    """
    for module in list(model.modules()):
        if type(module).__name__ == "RwkvModel":
            cast(Any, module).config.rescale_every = 0
        for name in READ.get(type(module).__name__, ()):
            layer: Any = getattr(module, name)
            if isinstance(layer, PackedLayer) or nf4.is_nf4(layer):
                setattr(module, name, _plain(layer, dtype))


def _plain(layer: Any, dtype: torch.dtype) -> nn.Linear:
    rows, columns = shape_of(layer)
    plain = nn.Linear(columns, rows, bias=False, device="meta")
    plain.weight = nn.Parameter(weight_of(layer, dtype).contiguous(), requires_grad=False)
    plain.bias = layer.bias
    return plain

"""A model with its adapter added, written tensor by tensor: beside the base there is never more than one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualtune.io.tensors import StoredForm, write_model_weights
from dualtune_torch.methods import AdaptedLayer
from dualtune_torch.weights.frozen import as_stored

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


class MergedTensor(NamedTuple):
    """A tensor of the model, and the layer that has an adapter for it."""

    tensor: Tensor
    layer: AdaptedLayer | None = None

    def compute(self) -> Tensor:
        """Return the tensor with the adapter added in float32, in the precision of the base."""
        if self.layer is None:
            return self.tensor
        delta = as_stored(self.layer.base, self.layer.delta().to(self.tensor.device))
        return delta.add_(self.tensor).to(self.tensor.dtype)


def merged_tensors(model: PreTrainedModel, layers: Mapping[str, AdaptedLayer]) -> dict[str, MergedTensor]:
    """Return what a merged model consists of, by the names of the model without adapters. Nothing is computed yet."""
    renamed = {f"{m}.base.{part}": f"{m}.{part}" for m in layers for part in ("weight", "bias")}
    trained = {f"{m}.{n}" for m, layer in layers.items() for n, _ in layer.named_parameters(recurse=False)}
    state = {renamed.get(n, n): tensor for n, tensor in model.state_dict().items() if n not in trained}
    adapted = {f"{m}.weight": layer for m, layer in layers.items()}
    return {
        name: MergedTensor(tensor, adapted.get(name))
        for name, tensor in state.items()
        if name not in model.all_tied_weights_keys
    }


def write_merged(directory: Path, tensors: Mapping[str, MergedTensor]) -> None:
    """Write what `safetensors.torch.save_file` writes, computing one tensor after another; a large model in shards."""
    forms = {name: StoredForm(NAMES[each.tensor.dtype], tuple(each.tensor.shape)) for name, each in tensors.items()}
    write_model_weights(directory, forms, lambda name: _bytes_of(tensors[name].compute()))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data

"""Writing the weights of a model with its adapter added, one tensor after another.

Beyond the model, the device holds one matrix in float32 and in its own precision, and the host one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dualtune.io.tensors import StoredForm, write_safetensors
from dualtune_torch.methods import AdaptedLayer
from dualtune_torch.weights.frozen import as_stored

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_merged(file: Path, model: PreTrainedModel, layers: Mapping[str, AdaptedLayer]) -> None:
    """Write the weights of the base in their precision, with the adapter of `layers` (by module path) added.

    The file is that of `safetensors.torch.save_file`. Raises OSError if it cannot be written.
    """
    renamed = {f"{m}.base.{part}": f"{m}.{part}" for m in layers for part in ("weight", "bias")}
    trained = {f"{m}.{n}" for m, layer in layers.items() for n, _ in layer.named_parameters(recurse=False)}
    weights = {renamed.get(n, n): w for n, w in model.state_dict().items() if n not in trained}
    for tied in model.all_tied_weights_keys:
        weights.pop(tied, None)
    write_weights(file, model, weights, {f"{path}.weight": layer for path, layer in layers.items()})


def write_weights(
    file: Path, model: PreTrainedModel, weights: Mapping[str, Tensor], adapted: Mapping[str, AdaptedLayer]
) -> None:
    """Write weights by their names in the model; of `adapted`, by the names of their weights, with the update added."""
    # Use the names of OpenAI's own files, which both mlx-lm and transformers read.
    prefix = f"{model.base_model_prefix}." if any(isinstance(m, Conv1D) for m in model.modules()) else ""
    named = {name.removeprefix(prefix): name for name in weights}
    forms = {
        stored: StoredForm(NAMES[weights[name].dtype], tuple(weights[name].shape)) for stored, name in named.items()
    }

    def read(stored: str) -> memoryview:
        name = named[stored]
        return _bytes_of(_merged(adapted[name]) if name in adapted else weights[name])

    write_safetensors(file, forms, read, {"format": "pt"})


def _form(weight: Tensor) -> StoredForm:
    return StoredForm(NAMES[weight.dtype], tuple(weight.shape))


def _merged(layer: AdaptedLayer) -> Tensor:
    """Return W + ΔW, added in float32, in the orientation and precision of W."""
    weight = layer.base.weight
    return as_stored(layer.base, layer.delta().to(weight.device)).add_(weight).to(weight.dtype)


def _bytes_of(weight: Tensor) -> memoryview:
    return weight.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data

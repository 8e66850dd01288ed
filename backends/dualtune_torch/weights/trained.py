"""The parameters of a model that was trained whole, written tensor by tensor under the names of its base's files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from dualtune.base_model import BaseWeights, copy_without_weights
from dualtune.base_model.merging import stored_bytes
from dualtune.io.tensors import StoredForm, write_model_weights

FORMATS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_trained(
    directory: Path, source: Path, base: BaseWeights | None, model: PreTrainedModel, masters: Mapping[str, Tensor]
) -> None:
    """Write the float32 masters of a model's parameters; what else its base's files hold is copied from them.

    A large model is written in shards. Names are those of the base's files, or without one those that transformers
    writes. An output head that is the embedding is not written twice.
    """
    stored = base.tensors if base else {}
    trained = {
        _name_in(stored, name, model.base_model_prefix): tensor
        for name, tensor in revert_weight_conversion(model, dict(masters)).items()
    }
    left_out = trained.keys() | {*model.all_tied_weights_keys}
    copied = {name: tensor for name, tensor in stored.items() if name not in left_out}
    forms = {name: StoredForm(FORMATS[tensor.dtype], tuple(tensor.shape)) for name, tensor in trained.items()}
    forms |= {name: StoredForm(tensor.dtype, tensor.shape) for name, tensor in copied.items()}
    copy_without_weights(source, directory)
    write_model_weights(
        directory, forms, lambda n: _bytes_of(trained[n]) if n in trained else stored_bytes(copied[n]).data
    )


def _name_in(stored: Collection[str], name: str, prefix: str) -> str:
    """Return the name in the base's files, which may leave out the prefix of the model without its head, as GPT-2's."""
    bare = name.removeprefix(f"{prefix}.")
    return bare if name not in stored and bare in stored else name


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data

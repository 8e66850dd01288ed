"""Where the linear layers of a transformers model lie in the files of its base, by transformers' own conversion tables.

transformers renames the tensors of files on loading, and converts some: those tables are followed from each tensor of
the files to the parameters that it becomes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.pytorch_utils import Conv1D

from dualtune.base.tensors import StoredForm, write_model_weights
from dualtune.model.copies import copy_without_weights
from dualtune.model.merging import stored_bytes
from dualtune.model.places import FilePlace
from dualtune.model.weight_files import BaseWeights


def find_places(
    model: PreTrainedModel, base: BaseWeights, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, FilePlace]:
    """Return the place of each linear layer that is one matrix of the files, or a part. `shapes`: path -> (out, in).

    A layer that transformers makes in another way, such as from several tensors, has none.
    """
    places: dict[str, FilePlace] = {}
    for parameter, place in _parameters(model, base, shapes).items():
        module = parameter.removesuffix(".weight")
        if module in shapes and parameter != module:
            if isinstance(model.get_submodule(module), Conv1D):
                place = place._replace(transposed=not place.transposed)
            places[module] = place
    return places


def stored_names(model: PreTrainedModel, base: BaseWeights) -> dict[str, str]:
    """Return the tensor of the files that each parameter is, for those that are one tensor as it is."""
    places = _parameters(model, base, {}).items()
    return {parameter: place.tensor for parameter, place in places if place == FilePlace(place.tensor)}


def _parameters(
    model: PreTrainedModel, base: BaseWeights, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, FilePlace]:
    """Return the place of each parameter that a tensor of the files becomes, as it is, transposed or in parts."""
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: conversion for conversion in converters for pattern in conversion.source_patterns}
    parameters = dict.fromkeys((*model.state_dict(), *(f"{module}.weight" for module in shapes)), True)
    places: dict[str, FilePlace] = {}
    for name in base.tensors:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if pattern is None:
            places[target] = FilePlace(name)
        else:
            places |= _converted(name, target, by_pattern[pattern], shapes)
    return places


def _converted(
    name: str, target: str, converter: WeightConverter, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, FilePlace]:
    """Return the places of the parameters that one tensor is converted to; none if it takes more than cutting rows."""
    if len(converter.source_patterns) != 1 or len(converter.operations) != 1:
        return {}
    operation: Any = converter.operations[0]
    if isinstance(operation, Transpose) and not operation.check_dims:
        return {target: FilePlace(name, transposed=True)}
    if not isinstance(operation, (Chunk, Split)) or operation.dim != 0:
        return {}
    first, places, begin = converter.target_patterns[0], dict[str, FilePlace](), 0
    for pattern in converter.target_patterns:
        parameter = target.replace(first, pattern)
        if parameter.removesuffix(".weight") not in shapes:
            return {}
        end = begin + shapes[parameter.removesuffix(".weight")][0]
        places[parameter] = FilePlace(name, rows=(begin, end))
        begin = end
    return places


# ----------------------------------------------------------------------------------------------------------------------
# Full fine-tuning: all parameters, written tensor by tensor under the names of the base's files.

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

"""Where the linear layers of a transformers model lie in the files of its base, by transformers' own conversion tables.

transformers renames the tensors of files on loading, and converts some: those tables are followed from each tensor of
the files to the parameters that it becomes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    MergeModulelist,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.pytorch_utils import Conv1D

from dualtune.base.tensors import StoredForm, write_model_weights
from dualtune.model.copies import copy_without_weights
from dualtune.model.experts import UP
from dualtune.model.merging import stored_bytes
from dualtune.model.places import FilePlace
from dualtune.model.weight_files import BaseWeights
from dualtune_torch.experts import projections
from dualtune_torch.mixture import GATE_UP, Projection


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
    parameters = dict.fromkeys((*model.state_dict(), *(f"{module}.weight" for module in shapes)), True)
    places: dict[str, FilePlace] = {}
    for name, target, _, converter in _targets(model, base, parameters):
        places |= {target: FilePlace(name)} if converter is None else _converted(name, target, converter, shapes)
    return places


def _targets(
    model: PreTrainedModel, base: BaseWeights, parameters: dict[str, bool]
) -> Iterator[tuple[str, str, str | None, WeightConverter | None]]:
    """Yield each tensor of the files, the parameter that it becomes, and by which pattern of what conversion."""
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: conversion for conversion in converters for pattern in conversion.source_patterns}
    for name in base.tensors:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        yield name, target, pattern, None if pattern is None else by_pattern[pattern]


def trained_parts(model: PreTrainedModel, base: BaseWeights) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the tensors of the files that each parameter consists of, in the order of its memory, with their shapes.

    A parameter that is made of them in another way is left out.
    """
    stored, joined = stored_names(model, base), joined_experts(model, base)
    parts = joined_rows(model, base)
    for name, parameter in model.named_parameters():
        if name in joined:
            ordered = sorted(joined[name], key=lambda part: part[0].start or 0)
            by_expert = zip(*(tensors for _, tensors in ordered), strict=True)
            parts[name] = {tensor: base.tensors[tensor].shape for tensor in chain(*by_expert)}
        elif name in stored:
            parts[name] = {stored[name]: tuple(parameter.shape)}
    return parts


def joined_rows(model: PreTrainedModel, base: BaseWeights) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the tensors that follow each other in a parameter along its first axis, with their shapes."""
    rows: dict[str, list[tuple[int, list[int | str], str]]] = defaultdict(list)
    for name, target, pattern, converter in _targets(model, base, dict.fromkeys(model.state_dict(), True)):
        operation: Any = converter.operations[0] if converter and len(converter.operations) == 1 else None
        if converter and pattern and isinstance(operation, Concatenate) and operation.dim == 0:
            rows[target].append((converter.source_patterns.index(pattern), dot_natural_key(name), name))
    return {target: {name: base.tensors[name].shape for *_, name in sorted(own)} for target, own in rows.items()}


def expert_places(model: PreTrainedModel, base: BaseWeights, *, strict: bool = True) -> dict[str, list[FilePlace]]:
    """Return where the matrix of each expert lies, by the paths of `experts.projections`.

    Files hold them one by one, which transformers stacks, gate before up, or as the stacks of transformers' module. A
    projection that is made in another way has none; nor have those of code of a family's own, or `strict`, ConfigError.
    """
    all_projections = projections(model, strict=strict)
    stacks = dict.fromkeys(f"{path.rpartition('.')[0]}.{p.parameter}" for path, p in all_projections.items())
    sources: dict[str, dict[str | None, list[str]]] = {stack: defaultdict(list) for stack in stacks}
    converters: dict[str, WeightConverter | None] = {}
    for name, target, pattern, converter in _targets(model, base, dict.fromkeys(model.state_dict(), True)):
        if target in sources:
            sources[target][pattern].append(name)
            converters[target] = converter
    places: dict[str, list[FilePlace]] = {}
    for path, projection in all_projections.items():
        parameter = f"{path.rpartition('.')[0]}.{projection.parameter}"
        if parameter in converters:
            matrices = _of_experts(base, projection, converters[parameter], sources[parameter])
            places |= {path: matrices} if matrices else {}
    return places


def joined_experts(
    model: PreTrainedModel, base: BaseWeights, *, whole: bool = True
) -> dict[str, list[tuple[slice, list[str]]]]:
    """Return the parameters of experts that files hold one by one: for each, which of its rows are which tensors.

    `whole`: a parameter with more matrices, which belong to no expert, is left out.
    """
    parts: dict[str, list[tuple[slice, list[str]]]] = defaultdict(list)
    all_projections = projections(model, strict=False)
    for path, places in expert_places(model, base, strict=False).items():
        projection = all_projections[path]
        is_all = projection.count == getattr(projection.experts, projection.parameter).shape[0]
        if (is_all or not whole) and all(place == FilePlace(place.tensor) for place in places):
            rows = slice(*projection.rows) if projection.rows is not None else slice(None)
            parts[f"{path.rpartition('.')[0]}.{projection.parameter}"].append((rows, [p.tensor for p in places]))
    return {name: own for name, own in parts.items() if len(own) == (2 if name.endswith(GATE_UP) else 1)}


def _of_experts(
    base: BaseWeights,
    projection: Projection,
    converter: WeightConverter | None,
    sources: Mapping[str | None, list[str]],
) -> list[FilePlace]:
    """Return the places of the matrices of a projection; none if they are made in a way that is not known."""
    operations = [] if converter is None else [type(operation) for operation in converter.operations]
    numbers = range(projection.count)
    if not operations or operations == [Transpose]:
        names = [name for names in sources.values() for name in names]
        if len(names) != 1:
            return []
        stored, weight = base.tensors[names[0]].shape, getattr(projection.experts, projection.parameter)
        operation: Any = converter.operations[0] if converter else None
        turned = operation is not None and (not operation.check_dims or stored != tuple(weight.shape))
        transposed = projection.experts.is_transposed != turned
        return [FilePlace(names[0], transposed, projection.rows, number) for number in numbers]
    assert converter is not None
    patterns = converter.source_patterns
    joined = [MergeModulelist, Concatenate] if projection.is_half else [MergeModulelist]
    # Experts for images come after as many for text in one list: the conversion's first target.
    is_split = operations == [ErnieFuseAndSplitTextVisionExperts] and len(converter.target_patterns) == 2
    is_known = is_split or operations == joined
    if not is_known or len(patterns) != 1 + projection.is_half or projection.experts.is_transposed:
        return []
    names = sorted(sources[patterns[projection.role == UP and projection.is_half]], key=dot_natural_key)
    stacked = getattr(projection.experts, projection.parameter).shape[0]  # with matrices that no expert has
    allowed = {2 * projection.count} if is_split else {projection.count, stacked}
    return [FilePlace(name) for name in names[: projection.count]] if len(names) in allowed else []


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
    """Write the masters of a model's parameters in float32; what else its base's files hold is copied from them.

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
    forms = {name: StoredForm(FORMATS[torch.float32], tuple(tensor.shape)) for name, tensor in trained.items()}
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
    return tensor.detach().cpu().float().contiguous().flatten().view(torch.uint8).numpy().data

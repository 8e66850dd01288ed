"""Where the linear layers of a transformers model lie in the files of its base, by transformers' own conversion tables.

transformers renames the tensors of files on loading, and converts some: those tables are followed from each tensor of
the files to the parameters that it becomes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Chunk, Split, Transpose, WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from dualtune.base_model.places import FilePlace
from dualtune.base_model.weights import BaseWeights


def find_places(
    model: PreTrainedModel, base: BaseWeights, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, FilePlace]:
    """Return the place of each linear layer that is one matrix of the files, or a part. `shapes`: path -> (out, in).

    A layer that transformers makes in another way, such as from several tensors, has none.
    """
    found: dict[str, FilePlace] = {}
    for parameter, place in _parameters(model, base, shapes).items():
        module = parameter.removesuffix(".weight")
        if module in shapes and parameter != module:
            if isinstance(model.get_submodule(module), Conv1D):
                place = place._replace(transposed=not place.transposed)
            found[module] = place
    return found


def stored_names(model: PreTrainedModel, base: BaseWeights) -> dict[str, str]:
    """Return the tensor of the files that each parameter is, for those that are one tensor as it is."""
    places = _parameters(model, base, {}).items()
    return {parameter: place.tensor for parameter, place in places if place == FilePlace(place.tensor)}


def _parameters(
    model: PreTrainedModel, base: BaseWeights, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, FilePlace]:
    """Return the place of each parameter that a tensor of the files becomes, as it is, transposed or in parts."""
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = dict.fromkeys((*model.state_dict(), *(f"{module}.weight" for module in shapes)), True)
    found: dict[str, FilePlace] = {}
    for name in base.tensors:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if pattern is None:
            found[target] = FilePlace(name)
        else:
            found |= _converted(name, target, by_pattern[pattern], shapes)
    return found


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

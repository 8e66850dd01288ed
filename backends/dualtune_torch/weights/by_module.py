"""Loading a model module by module: each is read, prepared and put in place before the next one.

The plain model is never in memory, only one of its matrices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from dualtune.base.errors import EnvironmentFault
from dualtune.model.weight_files import BaseWeights
from dualtune_torch.weights import nf4
from dualtune_torch.weights.affine import GROUP_SIZE, AffineLayer, AffineLinear
from dualtune_torch.weights.packed import PackedLayer
from dualtune_torch.weights.places import joined_experts, joined_rows, stored_names

# ----------------------------------------------------------------------------------------------------------------------
# Published formats that are computed in the plain dtype: transformers dequantizes each tensor as it is read.
#
# MXFP4 (gpt-oss): 4-bit codes with a shared exponent for 32 weights, of experts alone. FP8 (DeepSeek): 8-bit floats
# with a scale for each block of 128 x 128 weights.

CONFIGS = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
# On a CPU it warns that the weights are dequantized, although that was asked for.
getLogger("transformers.quantizers.quantizer_mxfp4").setLevel("ERROR")


def stored_format(config: Mapping[str, Any]) -> str | None:
    """Return the name of the format in a config.json if it is one of these."""
    name = (config.get("quantization_config") or {}).get("quant_method")
    return name if name in CONFIGS else None


def loading_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `from_pretrained`; none for a model in another format."""
    name = stored_format(config)
    return {} if name is None else {"quantization_config": CONFIGS[name](dequantize=True)}


# ----------------------------------------------------------------------------------------------------------------------
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
PLAIN_NAMES = ("F32", "BF16", "F16")  # in the headers of files
# Tensors of older files that no model reads.
IGNORED = (".rotary_emb.inv_freq",)
# From a module's path, and the module with its weights in the stored precision, to the module that computes with them.
Finish = Callable[[str, nn.Module], nn.Module]


class TensorReader:
    """The tensors of a model directory by name, read on demand.

    Each is mapped on its own: a tensor that stays in the model would keep the mapping of its whole file, and with it
    all pages that were read, in the memory of the process.
    """

    def __init__(self, stored: BaseWeights, model: PreTrainedModel) -> None:
        self.model_dir = stored.directory
        self._tensors = stored.tensors
        self._unread = set(stored.tensors)
        self._prefix = f"{model.base_model_prefix}."  # files of a model without a head lack it
        self._names = stored_names(model, stored)
        self._joined = joined_experts(model, stored, whole=False)
        self._rows = {to: parts for to, parts in joined_rows(model, stored).items() if to not in self._joined}
        absent = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]  # such as towers
        self._unread -= {name for to, name in self._names.items() if any(pattern.search(to) for pattern in absent)}

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._tensors

    def _stored_name(self, name: str) -> str:
        if name in self._tensors:
            return name
        module, _, part = name.rpartition(".")
        if (weight := self._names.get(f"{module}.weight")) is not None:  # beside it lie a bias, scales and biases
            return f"{weight.removesuffix('weight')}{part}"
        return self._names.get(name, name.removeprefix(self._prefix))

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = PLAIN) -> Tensor:
        """Read a tensor. Raises EnvironmentFault if it is missing or has another shape or dtype."""
        own_name, name = name, self._stored_name(name)
        if name not in self._tensors:
            raise EnvironmentFault(
                f"model.name: the weights in {self.model_dir} have no tensor '{own_name}', which transformers' model "
                "needs: the directory is incomplete, or mlx-lm has other names for its tensors. Load it with "
                "--platform mlx, or use the plain model"
            )
        with safe_open(self._tensors[name].file, framework="pt") as file:
            tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise EnvironmentFault(
                f"model.name: {self.model_dir}: '{name}' is {str(tensor.dtype).removeprefix('torch.')} "
                f"{list(tensor.shape)}, must be {allowed} {list(shape)} (packed: 4 or 8 bits in groups of "
                f"{GROUP_SIZE}). Load it with --platform mlx, or use the plain model"
            )
        self._unread.discard(name)
        return tensor

    def fill(self, path: str, module: nn.Module, device: torch.device) -> nn.Module:
        """Give a module its own weights in the stored precision."""
        for name, parameter in own(module).items():
            whole, shape = f"{path}.{name}", tuple(parameter.shape)
            if whole in self._joined:
                tensor = self._join(whole, shape)
            elif whole in self._rows:  # such as the convolutions of queries, keys and values
                tensor = torch.cat([self.read(*part) for part in self._rows[whole].items()])
            else:
                tensor = self.read(whole, shape)
            setattr(module, name, frozen(tensor.to(device)))
        return module

    def _join(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a parameter [experts, out, in] whose matrices are tensors of their own, or the rows of these are."""
        (_, out, in_), parts = shape, self._joined[name]
        joined: Tensor | None = None
        for rows, tensors in parts:
            for i, tensor in enumerate(tensors):
                matrix = self.read(tensor, (len(range(*rows.indices(out))), in_))
                # Matrices that no expert has are zeros.
                joined = matrix.new_zeros(shape) if joined is None else joined
                joined[i, rows] = matrix
        assert joined is not None
        return joined

    def can_fill(self, name: str) -> bool:
        return name in self._joined or name in self._rows or name in self

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._tensors[self._stored_name(name)].shape if name in self else None

    def has_plain(self, name: str, shape: tuple[int, ...]) -> bool:
        if name in self._joined:
            return all(self._tensors[t].dtype in PLAIN_NAMES for _, tensors in self._joined[name] for t in tensors)
        if name in self._rows:
            return all(self._tensors[t].dtype in PLAIN_NAMES for t in self._rows[name])
        return self.shape(name) == shape and self._tensors[self._stored_name(name)].dtype in PLAIN_NAMES

    def check_all_read(self, unused: set[str]) -> None:
        """Raise EnvironmentFault if a tensor was not read: the model would not be the stored one."""
        unread = sorted(name for name in self._unread - unused if not name.endswith(IGNORED))
        if unread:
            raise EnvironmentFault(
                f"model.name: the weights in {self.model_dir} have {len(unread)} tensors that transformers' model does "
                f"not have, such as '{unread[0]}'. Load it with --platform mlx, or use the plain model"
            )


def can_load(model: PreTrainedModel, stored: BaseWeights) -> bool:
    """Return whether an empty model's own tensors are in the files: `load` then reads all that the model needs.

    For some families transformers renames, joins or splits what is stored, which only its own loader can do.
    """
    needed = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    reader, parameters = TensorReader(stored, model), dict(model.named_parameters())
    return needed.keys() <= parameters.keys() and all(
        reader.has_plain(name, tuple(tensor.shape)) for name, tensor in needed.items()
    )  # a buffer that is stored is not a parameter


def made_otherwise(model: PreTrainedModel, stored: BaseWeights) -> str | None:
    """Return a parameter that transformers makes of the tensors of the files in a way that `load` does not know."""
    reader, tied = TensorReader(stored, model), model.all_tied_weights_keys
    return next((name for name, _ in model.named_parameters() if name not in tied and not reader.can_fill(name)), None)


def load(model: PreTrainedModel, stored: BaseWeights, finish: Finish, device: torch.device) -> None:
    """Load the plain weights of a directory into an empty model."""
    weights = TensorReader(stored, model)
    replace_modules(model, lambda path, module: finish(path, weights.fill(path, module, device)))


def replace_modules(model: PreTrainedModel, replacement: Finish) -> None:
    """Replace each module that directly holds weights by its `replacement`, one by one; then tie tied weights."""
    tied, replaced = model.all_tied_weights_keys, None
    for path in [path for path, _ in model.named_modules()]:  # not the modules: a list would keep all of them alive
        if replaced is not None and path.startswith(f"{replaced}."):
            continue  # a part of what was there
        module = model.get_submodule(path)
        if any(f"{path}.{name}" not in tied for name in own(module)):
            new = replacement(path, module)
            if new is not module:
                model.set_submodule(path, new)
                replaced = path
    for target, source in tied.items():
        if not source.endswith(".weight"):
            continue
        path, layer = target.removesuffix(".weight"), model.get_submodule(source.removesuffix(".weight"))
        if isinstance(layer, AffineLayer):
            model.set_submodule(path, AffineLinear(layer.packed, cast(nn.Linear, model.get_submodule(path)).bias))
        elif isinstance(layer, PackedLayer) or nf4.is_nf4(layer):  # of a block that several layers share
            model.set_submodule(path, layer)
    model.tie_weights(recompute_mapping=False)  # by names, which modules that were replaced do not all have


def finished(
    module: nn.Module, dtype: torch.dtype, quantized: Callable[[Tensor, nn.Parameter | None], nn.Module] | None
) -> nn.Module:
    """Prepare a module with its stored weights for computing: a plain linear layer quantized, else cast.

    `quantized`: the layer for a weight [out, in] in the stored precision and a bias in the compute dtype; None: cast.
    """
    plain, kind = own(module), type(module)
    weight = plain.pop("weight").data if quantized and kind in (nn.Linear, Conv1D) else None
    for name, parameter in plain.items():
        setattr(module, name, frozen(parameter.to(dtype)))
    if quantized is None or weight is None:
        return module
    return quantized(weight.T if kind is Conv1D else weight, cast(nn.Linear, module).bias)


def own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)

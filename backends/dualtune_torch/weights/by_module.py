"""Loading a model module by module: each is read, prepared and put in place before the next one.

The plain model is never in memory, only one of its matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.base_model import BaseWeights
from dualtune.errors import EnvironmentFault
from dualtune_torch.weights.affine import GROUP_SIZE, AffineLayer, AffineLinear

PLAIN = (torch.float32, torch.bfloat16, torch.float16)
# Tensors of older files that no model reads.
IGNORED = (".rotary_emb.inv_freq",)
# From a module's path, and the module with its weights in the stored precision, to the module that computes with them.
Finish = Callable[[str, nn.Module], nn.Module]


class TensorReader:
    """The tensors of a model directory by name, read on demand."""

    def __init__(self, model_dir: Path, files: Mapping[str, Any], prefix: str) -> None:
        """`prefix` is that of the names in a model with a head. Files of a model without a head lack it."""
        self.model_dir = model_dir
        self._prefix = f"{prefix}."
        self._files = files
        self._unread = set(files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = PLAIN) -> Tensor:
        """Read a tensor. Raises EnvironmentFault if it is missing or has another shape or dtype."""
        wanted, name = name, name if name in self._files else name.removeprefix(self._prefix)
        if name not in self._files:
            raise EnvironmentFault(
                f"model.name: the weights in {self.model_dir} have no tensor '{wanted}', which transformers' model "
                "needs: the directory is incomplete, or mlx-lm has other names for its tensors. Load it with "
                "--platform mlx, or use the plain model"
            )
        tensor = self._files[name].get_tensor(name)
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
            setattr(module, name, frozen(self.read(f"{path}.{name}", tuple(parameter.shape)).to(device)))
        return module

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._files[name].get_slice(name).get_shape()) if name in self._files else None

    def check_all_read(self, unused: set[str]) -> None:
        """Raise EnvironmentFault if a tensor was not read: the model would not be the stored one."""
        left = sorted(name for name in self._unread - unused if not name.endswith(IGNORED))
        if left:
            raise EnvironmentFault(
                f"model.name: the weights in {self.model_dir} have {len(left)} tensors that transformers' model does "
                f"not have, such as '{left[0]}'. Load it with --platform mlx, or use the plain model"
            )


@contextmanager
def open_weights(weights: BaseWeights, model: PreTrainedModel) -> Iterator[TensorReader]:
    with ExitStack() as opened:
        files = {path: opened.enter_context(safe_open(path, framework="pt")) for path in weights.files}
        by_name = {name: files[tensor.file] for name, tensor in weights.tensors.items()}
        yield TensorReader(weights.directory, by_name, model.base_model_prefix)


def load(model: PreTrainedModel, stored: BaseWeights, finish: Finish, device: torch.device) -> None:
    """Load the plain weights of a directory into an empty model."""
    with open_weights(stored, model) as weights:
        replace_modules(model, lambda path, module: finish(path, weights.fill(path, module, device)))


def replace_modules(model: PreTrainedModel, replacement: Finish) -> None:
    """Replace each module that directly holds weights by its `replacement`, one by one; then tie tied weights."""
    tied = model.all_tied_weights_keys
    for path in [path for path, _ in model.named_modules()]:  # not the modules: a list would keep all of them alive
        module = model.get_submodule(path)
        if any(f"{path}.{name}" not in tied for name in own(module)):
            new = replacement(path, module)
            if new is not module:
                model.set_submodule(path, new)
    for target, source in tied.items():
        path, layer = target.removesuffix(".weight"), model.get_submodule(source.removesuffix(".weight"))
        if isinstance(layer, AffineLayer):
            model.set_submodule(path, AffineLinear(layer.packed, cast(nn.Linear, model.get_submodule(path)).bias))
        else:
            model.tie_weights()


def own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)

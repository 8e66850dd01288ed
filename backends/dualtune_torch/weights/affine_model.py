"""Models in MLX's affine quantization: read from a directory that mlx-lm wrote, or quantized from a plain one.

Each tensor is read and quantized before the next one, so the plain model is never in memory. Quantization produces the
bytes that `mlx_lm.convert` produces from the stored precision; the bytes of a quantized directory do not change.
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
from dualtune.errors import ConfigError, EnvironmentFault
from dualtune_torch.weights.affine import BITS, GROUP_SIZE, AffineEmbedding, AffineLayer, AffineLinear, Packed, quantize

PLAIN = (torch.float32, torch.bfloat16, torch.float16)
# Model families that are quantized here layer by layer, exactly as in mlx-lm. It has special rules for others, such as
# 8 bits for some layers of Granite. A family is listed once all its bytes were compared with mlx-lm's:
# `pytest tests/parity/test_affine4.py`.
FAMILIES = ("gemma", "gemma2", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
# Tensors of older files that no model reads.
IGNORED = (".rotary_emb.inv_freq",)


class TensorReader:
    """The tensors of a model directory by name, read on demand."""

    def __init__(self, model_dir: Path, files: Mapping[str, Any]) -> None:
        self.model_dir = model_dir
        self._files = files
        self._unread = set(files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = PLAIN) -> Tensor:
        """Read a tensor. Raises EnvironmentFault if it is missing or has another shape or dtype."""
        if name not in self._files:
            raise EnvironmentFault(
                f"model.name: the weights in {self.model_dir} have no tensor '{name}', which transformers' model "
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
def open_weights(weights: BaseWeights) -> Iterator[TensorReader]:
    with ExitStack() as opened:
        files = {path: opened.enter_context(safe_open(path, framework="pt")) for path in weights.files}
        yield TensorReader(weights.directory, {name: files[tensor.file] for name, tensor in weights.tensors.items()})


def load(
    model: PreTrainedModel, stored: BaseWeights, quantization: str | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Load the weights of a directory into an empty model. With `quantization`, plain weights are quantized."""

    def replacement(path: str, module: nn.Module) -> nn.Module:
        if f"{path}.scales" in weights:
            return _packed(weights, path, module, dtype, device)
        for name, parameter in _own(module).items():  # in the stored precision
            setattr(module, name, _frozen(weights.read(f"{path}.{name}", tuple(parameter.shape)).to(device)))
        return finished(module, quantization, dtype)

    with open_weights(stored) as weights:
        replace_modules(model, replacement)
        weights.check_all_read(unused={*model.all_tied_weights_keys})


def replace_modules(model: PreTrainedModel, replacement: Callable[[str, nn.Module], nn.Module]) -> None:
    """Replace each module that directly holds weights by its `replacement`, one by one; then tie tied weights."""
    tied = model.all_tied_weights_keys
    for path in [path for path, _ in model.named_modules()]:  # not the modules: a list would keep all of them alive
        module = model.get_submodule(path)
        if any(f"{path}.{name}" not in tied for name in _own(module)):
            new = replacement(path, module)
            if new is not module:
                model.set_submodule(path, new)
    for target, source in tied.items():
        path, layer = target.removesuffix(".weight"), model.get_submodule(source.removesuffix(".weight"))
        if isinstance(layer, AffineLayer):
            model.set_submodule(path, AffineLinear(layer.packed, cast(nn.Linear, model.get_submodule(path)).bias))
        else:
            model.tie_weights()


def _packed(
    weights: TensorReader, path: str, module: nn.Module, dtype: torch.dtype, device: torch.device
) -> AffineLayer:
    """Read a layer with its packed bytes from a directory in MLX format."""
    rows, columns = cast(Tensor, module.weight).shape
    words = [(rows, columns * bits // 32) for bits in BITS.values()]
    shape = next((shape for shape in words if weights.shape(f"{path}.weight") == shape), words[0])
    packed = Packed(
        weights.read(f"{path}.weight", shape, (torch.uint32,)).view(torch.uint8).to(device),
        *(weights.read(f"{path}.{part}", (rows, columns // GROUP_SIZE)).to(device) for part in ("scales", "biases")),
    )
    if "bias" in _own(module):
        module.bias = _frozen(weights.read(f"{path}.bias", (rows,)).to(device, dtype))
    return in_place_of(module, packed.cast(dtype))


def finished(module: nn.Module, quantization: str | None, dtype: torch.dtype) -> nn.Module:
    """Prepare a module with its stored weights for computing: quantized where mlx-lm does so, else cast.

    mlx-lm quantizes the weight of every linear layer and embedding if its rows consist of whole groups.
    """
    own, packed = _own(module), None
    if quantization is not None and isinstance(module, nn.Linear | nn.Embedding):
        weight_OI = own["weight"].data
        if weight_OI.shape[1] % GROUP_SIZE == 0:
            packed = quantize(weight_OI, BITS[quantization]).cast(dtype)
            del own["weight"]
    for name, parameter in own.items():
        setattr(module, name, _frozen(parameter.to(dtype)))
    return module if packed is None else in_place_of(module, packed)


def in_place_of(module: nn.Module, packed: Packed) -> AffineLayer:
    """Return the packed layer for a module. Raises ConfigError for a module that is more than a plain matrix."""
    kind, factor = type(module), getattr(module, "embed_scale", None)
    if kind is nn.Linear:
        return AffineLinear(packed, cast(nn.Linear, module).bias)
    if kind is nn.Embedding:
        return AffineEmbedding(packed)
    if kind.__name__.endswith("ScaledWordEmbedding") and isinstance(factor, Tensor):  # Gemma's: rows times a number
        return AffineEmbedding(packed, factor)
    raise ConfigError(
        f"model.quantization: transformers' {kind.__name__} is not a plain matrix, and the backend 'torch' "
        "cannot quantize it. Use model.quantization: none or nf4, or --platform mlx"
    )


def check_family(model_dir: Path, family: str) -> None:
    """Raise ConfigError for a model family that mlx-lm may quantize differently."""
    if family not in FAMILIES:
        raise ConfigError(
            f"model.quantization: the backend 'torch' does not know which layers of a {family} model mlx-lm quantizes; "
            f"it knows {', '.join(FAMILIES)}. Quantize with mlx-lm, which runs on Linux too: "
            f"mlx_lm.convert --hf-path {model_dir} -q, and train on its output; or use model.quantization: nf4"
        )


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)

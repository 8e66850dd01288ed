"""Load a stored model onto a GPU that is not there: `python tests/nogpu/fake/loading.py none nf4`.

Prints, for each quantization, where the model is, the bytes copied to the device straight from the mapped file, and
which tensors of more than a row were made on the host.
"""

# ruff: noqa: E402  the stand-in is loaded before torch
from __future__ import annotations

import stand_in

stand_in.load()

import os

os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # fake tensors know only the thread that made them

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401  it looks for its CUDA library, and must not find the stand-in
import pretend
import torch
import transformers.modeling_utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

ROW = 256  # numbers: smaller tensors are tables, not weights


def main(quantizations: list[str]) -> None:
    from dualtune_torch import model
    from dualtune_torch.weights import by_module

    pretend.install()
    model.nf4.linear = pretend.Nf4Layer
    for library in (by_module, transformers.modeling_utils):
        library.safe_open = RealFile  # type: ignore[attr-defined]
    print(json.dumps({name: load(name) for name in quantizations}))


def load(quantization: str) -> dict[str, Any]:
    """Load a tiny model with bfloat16 weights, and say what was copied."""
    from dualtune_torch.model import load_base

    with tempfile.TemporaryDirectory() as place:
        directory = write_tiny_llama(Path(place) / "model", hidden_size=64)
        store_in_bfloat16(directory / "model.safetensors")
        spec = AdapterSpec(rank=4, alpha=8.0, dropout=0.0, targets=("all-linear",))
        request = LoadRequest(directory, "bfloat16", quantization, "pretrained", spec, OptimizerSpec(), seed=0)
        with FakeTensorMode(allow_non_fake_inputs=True), HostCopies() as copies:
            loaded, _ = load_base(request, torch.device("cuda"))
        stored = (directory / "model.safetensors").stat().st_size
    on = {str(tensor.device) for tensor in (*loaded.parameters(), *loaded.buffers())}
    return {"model_on": sorted(on), "file_bytes": stored, "mapped_bytes": copies.mapped_bytes, "made": copies.made}


def store_in_bfloat16(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, {"format": "pt"})


class RealFile:
    """safetensors' `safe_open`, whose tensors are real: fake ones have no file."""

    def __init__(self, *args: Any, **options: Any) -> None:
        from safetensors import safe_open

        self._file = safe_open(*args, **options)

    def __enter__(self) -> RealFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return self._file.keys()

    def metadata(self) -> Any:
        return self._file.metadata()

    def get_slice(self, name: str) -> RealSlice:
        return RealSlice(self._file.get_slice(name))

    def get_tensor(self, name: str) -> Tensor:
        with _disable_current_modes():
            return self._file.get_tensor(name)


class RealSlice:
    def __init__(self, found: Any) -> None:
        self._found = found
        self.get_shape, self.get_dtype = found.get_shape, found.get_dtype

    def __getitem__(self, place: Any) -> Tensor:
        with _disable_current_modes():
            return self._found[place]


class HostCopies(TorchDispatchMode):
    """Watch what goes to the device, and what is made on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped_bytes = 0
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs, outputs = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), out))
        sources = [x for x in inputs if x.device.type == "cpu" and x.numel() > ROW]
        if any(x.is_cuda for x in outputs):
            for source in sources:
                if not is_mapped(source):
                    self.made.append(f"{func}: a source of {list(source.shape)} that is not in the file")
                self.mapped_bytes += source.nbytes
        elif not func.is_view:
            self.made += [f"{func}: {list(x.shape)}" for x in outputs if x.device.type == "cpu" and x.numel() > ROW]
        return out


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor lies in a safetensors file that is mapped into this process."""
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return False
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.endswith(".safetensors")
    return False


if __name__ == "__main__":
    main(sys.argv[1:])

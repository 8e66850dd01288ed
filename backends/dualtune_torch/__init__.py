"""The torch backend: NVIDIA GPUs and CPUs, transformers models, NF4 through bitsandbytes."""

from dualtune_torch.backend import TorchBackend as backend

__all__ = ["backend"]

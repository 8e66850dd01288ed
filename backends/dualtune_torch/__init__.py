"""The torch backend: NVIDIA GPUs and CPUs, transformers models, NF4 through bitsandbytes.

Nothing is imported here, so that `card/` can be read without torch.
"""

"""Triton kernels for NVIDIA GPUs, one a file, each beside the plain torch code that says what it computes.

Only `select.py` may be imported where Triton is not installed; it says which kernels a model gets and why."""

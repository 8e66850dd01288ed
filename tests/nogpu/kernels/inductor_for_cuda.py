"""A program: Inductor's code for an H100 of the functions that dualtune compiles, made without a GPU and without CUDA.

It prints a JSON table for `test_inductor.py`: function -> pass -> names of the kernels, and the number of new matrices
with as many rows as there are tokens.

Each function is traced on the CPU, forward and backward. Before Inductor chooses its loops, every tensor of the graph
is said to be on a GPU, and Inductor and Triton are told what the GPU is. The code is read and thrown away, and nothing
runs on a GPU. So the CPU build of torch is enough, with Triton.
"""

import contextlib
import copy
import json
import os
import re
import sys
from types import SimpleNamespace

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CAPABILITY = (9, 0)
H100 = {  # what Inductor asks of a GPU; NVIDIA H100 data sheet and CUDA C++ programming guide
    "name": "H100", "major": 9, "minor": 0, "total_memory": 80 << 30, "multi_processor_count": 132, "warp_size": 32,
    "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536, "L2_cache_size": 50 << 20,
    "shared_memory_per_block": 48 << 10, "shared_memory_per_block_optin": 227 << 10, "gcnArchName": "",
}  # fmt: skip
GPU = torch.device("cuda", 0)
KERNEL = re.compile(r"async_compile\.triton\('triton_([a-z]+)_fused")
MATRIX = re.compile(r"empty_strided_cuda\(\(s\d+, (?!1\b)")

found: dict[str, dict[str, list[str | int]]] = {}
now = ""  # the function that is being compiled


class WrittenCode(BaseException):
    """Ends a compilation when its code is written. Not an Exception: Inductor would treat it as its own."""


class AbsentDriver:
    """Triton's driver for a GPU that is not there."""

    is_active = staticmethod(lambda: True)
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)
    get_active_torch_device = staticmethod(lambda: GPU)
    get_device_interface = staticmethod(lambda: torch.cuda)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32))
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32}
    )


def pretend():
    """Let torch, Triton and Inductor believe in one H100."""
    for name, value in {
        "is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": 1, "current_device": 0,
        "_exchange_device": 0, "_maybe_exchange_device": 0, "_lazy_init": None, "set_rng_state": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "get_device_capability": CAPABILITY,
        "_get_device_properties": SimpleNamespace(**H100),
    }.items():  # fmt: skip
        setattr(torch.cuda, name, lambda *args, value=value, **options: value)
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    driver.set_active(AbsentDriver())
    GraphLowering._compile_to_module_lines = keep_code
    torch.compile = lambda function, real=torch.compile, **options: real(
        function, **options, backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=compile_for_gpu)
    )


def keep_code(graph, code):
    kernels, matrices = KERNEL.findall(code.value), len(MATRIX.findall(code.value))
    found[now]["backward" if graph.is_backward else "forward"] = [*kernels, matrices]
    raise WrittenCode


def compile_for_gpu(graph, inputs, **options):
    """Inductor's inner compiler: it writes code for the GPU, and returns the graph as it was, for the CPU."""
    plain = copy.deepcopy(graph)
    for node in graph.graph.nodes:
        move(node.meta.get("val"))
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": GPU}
    move(list(inputs))
    with contextlib.suppress(WrittenCode):
        compile_fx_inner(graph, inputs, **options)

    def call(arguments):
        return plain(*arguments)

    call._boxed_call = True
    return call


def move(values):
    for value in _pytree.tree_leaves(values):
        if isinstance(value, FakeTensor):
            value.fake_device = GPU


def main():
    global now
    pretend()
    from dualtune_torch.kernels import blocks, compiled, cross_entropy, lora

    def new(*shape, needs_grad=False):
        return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_(needs_grad)

    norm = LlamaRMSNorm(256).bfloat16().requires_grad_(False)
    mask = torch.zeros(70, dtype=torch.int32), torch.zeros(256, dtype=torch.int32), 5, 1.1
    pieces = {
        "norm": (LlamaRMSNorm.forward, norm, new(70, 256, needs_grad=True)),
        "gated": (blocks.gated, torch.nn.SiLU(), new(70, 256, needs_grad=True), new(70, 256, needs_grad=True)),
        "rotated": (blocks.rotated, new(70, 4, 64), new(70, 64), new(70, 64)),
        "add_after_dropout": (lora.add_after_dropout, new(70, 256), new(70, 256), *mask),
        "loss_and_gradient_in_place": (
            cross_entropy.loss_and_gradient_in_place, new(70, 512), torch.zeros(70, dtype=torch.int64),
            cross_entropy.Scaling(),
        ),
    }  # fmt: skip
    for now, (function, *arguments) in pieces.items():
        found[now] = {}
        result = compiled.compile_function(function)(*arguments)
        if result.requires_grad:
            result.backward(torch.empty_like(result))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

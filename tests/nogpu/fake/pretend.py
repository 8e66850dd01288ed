"""Let `torch.cuda` of a CPU build answer for the stand-in, and replace what needs numbers or a real driver.

Only what asks the driver is replaced. The engine, its autograd functions and transformers' models are the real ones.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PROPERTIES = types.SimpleNamespace(
    name="stand-in", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32,
    L2_cache_size=50 << 20, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
)  # fmt: skip


class StandInStream:
    """A CUDA stream or event on which nothing happens."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self) -> StandInStream:
        return self

    def wait_event(self, _: Any) -> None: ...


def install(capability: tuple[int, int] = (9, 0)) -> None:
    """Answer for one GPU of a compute capability."""
    PROPERTIES.major, PROPERTIES.minor = capability
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "set_device": None, "_lazy_init": None,
        "is_initialized": True, "get_device_properties": PROPERTIES, "get_device_capability": capability,
        "is_bf16_supported": capability >= (8, 0), "mem_get_info": (79 << 30, 80 << 30), "empty_cache": None,
        "is_current_stream_capturing": False, "current_stream": StandInStream(), "stream": nullcontext(),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    torch.cuda.set_per_process_memory_fraction = _set_memory_fraction
    torch.cuda.Stream = StandInStream
    Tensor.record_stream = _always(None)
    # A tensor made from a number for the device starts on the host, as on a real one.
    FakeTensorMode.avoid_device_init = property(lambda self: True)


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _set_memory_fraction(fraction: float, device: Any = None) -> None:
    """Refuse what torch refuses, such as a device without a number."""
    if device is not None:
        torch.cuda._utils._get_device_index(device)


def accept_trials() -> None:
    """Let every kernel pass its trial on the model: a trial compares numbers, and there are none."""
    from dualtune_torch import beside
    from dualtune_torch.kernels import blocks, choose, compiled
    from dualtune_torch.kernels.gpu import select

    choose.compare = lambda model, run, expected: run()
    select._compare = select._compare_bits = lambda *_: None
    blocks._rotates_alike = lambda _: True
    compiled.why_not = lambda _: None
    beside._check_embedding = lambda *_: None


def read_as_zeros() -> None:
    """Let what is read on the host be zeros. The copy to the host before is counted."""
    FakeTensor.numpy = lambda self, **_: np.zeros(self.shape, np.float32)


class Nf4Layer(nn.Linear):
    """bitsandbytes' Linear4bit without its Params4bit, which cannot hold a fake tensor; the operators are the same."""

    def __init__(self, weight_OI: Tensor, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        from bitsandbytes.functional import QuantState

        nn.Module.__init__(self)
        device = weight_OI.device
        self.out_features, self.in_features = weight_OI.shape
        blocks = weight_OI.numel() // 64
        nested = QuantState(
            absmax=torch.empty(-(-blocks // 256), device=device), code=torch.empty(256, device=device), blocksize=256,
            dtype=torch.float32,
        )  # fmt: skip
        state = QuantState(
            absmax=torch.empty(blocks, dtype=torch.uint8, device=device), shape=weight_OI.shape, dtype=dtype,
            blocksize=64, quant_type="nf4", code=torch.empty(16, device=device),
            offset=torch.empty((), device=device), state2=nested,
        )  # fmt: skip
        codes = torch.empty(weight_OI.numel() // 2, 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight.quant_state = self.quant_state = state
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit

        return matmul_4bit(x, self.weight.t(), quant_state=self.quant_state, bias=self.bias).to(x.dtype)

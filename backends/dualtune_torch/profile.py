"""Where torch's time goes: its profiler's trace, and the seconds by kind of operation."""

from __future__ import annotations

import gc
import os
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from dualtune.engine.backend import Profile

# Kinds of operation, by the names of ATen operators and CUDA kernels. The first match counts.
KINDS = {
    "attention kernels": r"scaled_dot_product|flash|fmha|efficient_attention|varlen",
    "matrix products": (
        r"::_*((int|scaled|grouped)_)?(add|b|addb|baddb)?mm_?\b|gemm|gemv|cutlass|nvjet|splitk|mkldnn\W*\w*linear"
    ),
    "dequantization": r"dequant",
    "softmax and loss": r"softmax|logsumexp|nll_loss|cross_entropy",
    # Inductor names a kernel after all its operators, and a cast is seldom the only one: triton_poi_fused__to_copy_mul.
    "copies and casts": r"(?<!to_)copy|memcpy|memset|fillfunctor|catarray|::(cat|clone|fill_|zero_)\b",
    "elementwise and reductions": (
        r"elementwise|reduce|triton|fused|compiled|foreach|multi_tensor|norm|"
        r"::_*(add|r?sub|mul|div|neg|abs|pow|r?sqrt|exp|log|cos|sin|reciprocal|silu|gelu|sigmoid|tanh|relu|"
        r"where|masked_fill|clamp|(bitwise_)?(and|or|xor|not)|[lr]shift|eq|ne|[gl][te]|any|all|isfinite|"
        r"sum|mean|a?max|a?min|cumsum|random|bernoulli)(_*|_backward)\b"
    ),
}
OTHER = "other"  # the dispatcher, views, memory, indexing, Python inside of autograd functions


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), OTHER)


def profile(work: Callable[[], object], trace: Path, device: torch.device) -> Profile:
    """Call `work` under torch.profiler. Writes a trace in Chrome's format and returns the device time by kind.

    On a GPU this is the time of the kernels; on a CPU, of each operator without the operators that it calls. There the
    allocator keeps no statistics, so the profiler counts its allocations.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes its start and stop to standard error
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with torch.profiler.profile(activities=activities):
        pass  # the first use sets up the profiler, which must not be counted
    before = None if is_cuda else bytes_held()
    with torch.profiler.profile(activities=activities, profile_memory=not is_cuda) as profiler:
        work()
    profiler.export_chrome_trace(str(trace))
    seconds: dict[str, float] = defaultdict(float)
    for row in profiler.key_averages():
        is_range = is_cuda and row.is_user_annotation  # of kernels, which are counted one by one
        if (row.device_type == DeviceType.CUDA) == is_cuda and not is_range:
            spent = row.self_device_time_total if is_cuda else row.self_cpu_time_total
            seconds[kind_of(row.key)] += spent / 1e6
    peak = None if before is None else before + _most_allocated(profiler)
    return Profile(trace, "open it at https://ui.perfetto.dev", dict(seconds), peak)


def bytes_held() -> int:
    """Return the bytes of all tensors of this process on the CPU, each byte once: views share theirs.

    Found among Python's objects, so memory that only C++ knows is not counted. A tensor that is a part of a mapped file
    counts with its own bytes.
    """
    gc.collect()
    objects: list[Any] = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    tensors: list[Tensor] = [t for t in objects if type(t) is not FakeTensor and t.device.type == "cpu"]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    total = end = 0
    for first, last in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.layout == torch.strided):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def _most_allocated(profiler: torch.profiler.profile) -> int:
    """Return the most bytes that torch's allocator on the CPU has handed out at once since the profiler began."""
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    events: list[Any] = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    most = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def peak_of(work: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that torch's allocator of the device has handed out at a time since the work began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # as above
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    return _most_allocated(profiler)

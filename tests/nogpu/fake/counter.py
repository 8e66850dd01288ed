"""Count what a GPU would be asked to do: operators that launch kernels, copies from the host, and waits.

An operator counts as one launch, though some launch two or three kernels (the backward pass of attention, reductions
over all elements). Views and uninitialized tensors launch nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAUNCH_NOTHING = {
    "_unsafe_view", "_reshape_alias", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "resize_", "set_", "device", "sym_size", "sym_numel", "sym_stride", "is_same_size",
}  # fmt: skip
COPIES = {"_to_copy", "copy_", "_copy_from"}
# Their result, or the shape of it, is needed on the host.
SYNCHRONIZE = {
    "_local_scalar_dense", "item", "nonzero", "_unique2", "unique_dim", "masked_select", "is_nonzero", "equal",
    "repeat_interleave",
}  # fmt: skip
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "_varlen_attn", "_varlen_attn_backward", "gemm_4bit"}


@dataclass
class Counts:
    """What one piece of work does."""

    launches: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)  # from the host, pinned and asynchronous: place in our code
    waits: Counter[str] = field(default_factory=Counter)  # for what, and the place
    product_dtypes: Counter[str] = field(default_factory=Counter)  # of the operands of matrix products
    doubles: Counter[str] = field(default_factory=Counter)  # operators with a float64 tensor on the device

    def as_json(self) -> dict[str, Any]:
        products = sum(self.product_dtypes.values())
        return {
            "kernels": sum(self.launches.values()) - products, "products": products,
            "copies": dict(self.copies), "waits": dict(self.waits), "by_operator": dict(self.launches.most_common()),
            "product_dtypes": dict(self.product_dtypes), "doubles": dict(self.doubles),
        }  # fmt: skip


class LaunchCounter(TorchDispatchMode):
    """Count the operators inside its context into `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self._pinned: list[Any] = []  # storages; kept, so that no other one gets the address of one of them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, inputs = func._schema.name.split("::")[-1], _tensors((args, kwargs))
        if name in SYNCHRONIZE and inputs and inputs[0].is_cuda:
            self.counts.waits[f"{name} at {_place()}"] += 1
            if name == "_local_scalar_dense":
                return 0  # there is no number
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        devices = {tensor.device.type for tensor in (*inputs, *outputs)}
        if "cuda" not in devices:
            if kwargs.get("pin_memory"):
                self._pinned += [tensor.untyped_storage() for tensor in outputs]
            return out
        if name in COPIES and "cpu" in devices:
            self._copy(inputs if name == "_to_copy" else inputs[1:], bool(kwargs.get("non_blocking") or args[2:3]))
        elif name not in LAUNCH_NOTHING and not _is_view(func) and any(t.numel() for t in outputs or inputs):
            self._launch(name, [*inputs, *outputs])
        return out

    @contextmanager
    def one_launch(self, name: str) -> Iterator[None]:
        """Count what happens inside as one launch."""
        counts, self.counts = self.counts, Counts()
        try:
            yield
        finally:
            inner, self.counts = self.counts, counts
        if inner.launches:
            self.counts.launches[name] += 1
        self.counts.waits.update(inner.waits)
        self.counts.copies.update(inner.copies)
        self.counts.doubles.update(inner.doubles)

    def _copy(self, sources: list[Tensor], asynchronous: bool) -> None:
        source = sources[0]
        if source.device.type == "cuda":
            self.counts.waits[f"copy to the host at {_place()}"] += 1
        elif asynchronous and self._is_pinned(source):
            self.counts.copies[_place()] += 1
        else:
            self.counts.waits[f"pageable copy at {_place()}"] += 1

    def _is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage()._cdata
        return any(storage._cdata == address for storage in self._pinned)

    def _launch(self, name: str, tensors: list[Tensor]) -> None:
        self.counts.launches[name] += 1
        if any(tensor.dtype == torch.float64 for tensor in tensors):
            self.counts.doubles[f"{name} at {_place()}"] += 1
        if name in PRODUCTS:
            dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()}
            self.counts.product_dtypes[" ".join(sorted(dtypes))] += 1


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def _place() -> str:
    """Name the line of dualtune_torch, or else of another package, that called the operator."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "dualtune_torch" in path.parts:
            return f"{path.name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"

"""A bank of adapters on MLX: what takes the place of a model's layers while rows of unlike adapters are computed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from dualtune.engine.adapter_bank import AdapterBank, Layout
from dualtune.engine.once_per_input import OncePerInput
from dualtune_mlx.methods import LINEAR, linear_shape


class BankRows:
    """Which products the rows of the current forward pass keep."""

    masks: Mapping[Layout, mx.array]  # bool [B, 1, S]


class BankInput:
    """A of the layers that read the same x, of all adapters."""

    def __init__(self, A_SI: mx.array, layout: Layout, rows: BankRows) -> None:
        self._A_SI, self._layout, self._rows = A_SI, layout, rows
        self._ends = np.cumsum([sum(ranks) for ranks in layout])[:-1].tolist()
        self._products = OncePerInput[int, mx.array]()

    def product(self, layer: int, x: mx.array) -> mx.array:
        """Return keep · A x for a layer, [M, S], in the dtype of x."""
        return self._products.fetch(layer, x, self._compute)

    def _compute(self, x: mx.array) -> dict[int, mx.array]:
        mask_B1S = self._rows.masks[self._layout]
        u_BTS = (x.flatten(0, -2) @ self._A_SI.astype(x.dtype).T).reshape(len(mask_B1S), -1, len(self._A_SI))
        kept_MS = mx.where(mask_B1S, u_BTS, mx.array(0, x.dtype)).flatten(0, 1)
        return dict(enumerate(mx.split(kept_MS, self._ends, axis=1)))


class BankedLinear(nn.Module):
    """A frozen linear layer, with what each row's own adapter adds.

    It has no weight: a model that reads one instead of calling the layer fails, and its rows are computed apart.
    """

    def __init__(self, base: nn.Module, shared: BankInput, number: int, B_OS: mx.array) -> None:
        super().__init__()
        self.base = base
        self._shared, self._number, self._B_OS = shared, number, B_OS

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.base(x)
        u_MS = self._shared.product(self._number, x)
        return mx.addmm(y.flatten(0, -2), u_MS, self._B_OS.astype(x.dtype).T).reshape(y.shape)


class BankedModel:
    """A model whose layers compute with a bank, in forward passes within `rows`."""

    def __init__(
        self, model: nn.Module, paths: Mapping[str, str], adapted: Collection[str], bank: AdapterBank, dtype: mx.Dtype
    ) -> None:
        """`paths`: of the linear layers, by canonical name; `adapted`: those with an adapter of the engine's.

        CannotBatch if they are not those of the bank.
        """
        self._places = {name: _place(model, path) for name, path in paths.items()}
        layers = {name: parent[key] for name, (parent, key) in self._places.items()}
        self._bases = {name: layer.base if name in adapted else layer for name, layer in layers.items()}
        bank.check_fits({name: linear_shape(base) for name, base in self._bases.items() if isinstance(base, LINEAR)})
        self._bank, self._adapted, self._dtype = bank, adapted, dtype
        self._rows, self._adapters_B = BankRows(), np.zeros(0, np.int32)
        self._replaced: dict[str, nn.Module] = {}

    def adapts(self, layer: object) -> bool:
        """Return whether an adapter of the bank is on this layer of the base."""
        return any(self._bases[module] is layer for module in self._bank.ranks)

    @contextmanager
    def rows(self, adapters_B: np.ndarray) -> Iterator[None]:
        """Compute rows with these adapters, by their numbers in the bank."""
        if not self._replaced:
            # Without an adapter in the bank, a layer that the engine adapts computes as its base.
            self._replaced = {name: self._bases[name] for name in self._adapted}
            for group in self._bank.groups:
                self._replaced |= self._banked(group)
        if not np.array_equal(adapters_B, self._adapters_B):
            masks = self._bank.masks(adapters_B)
            self._rows.masks = {layout: mx.array(mask[:, None]) for layout, mask in masks.items()}
            self._adapters_B = adapters_B
        own = {name: parent[key] for name in self._replaced for parent, key in [self._places[name]]}
        try:
            self._put(self._replaced)
            yield
        finally:
            self._put(own)

    def _put(self, layers: Mapping[str, nn.Module]) -> None:
        for name, layer in layers.items():
            parent, key = self._places[name]
            parent[key] = layer

    def _banked(self, group: Sequence[str]) -> dict[str, nn.Module]:
        factors = [[mx.array(factor).astype(self._dtype) for factor in self._bank.factors(module)] for module in group]
        A_SI = mx.concatenate([A_SI for A_SI, _ in factors])
        mx.eval(A_SI, [B_OS for _, B_OS in factors])  # MLX is lazy, and would keep what they are made of
        shared = BankInput(A_SI, self._bank.layout(group), self._rows)
        return {
            module: BankedLinear(self._bases[module], shared, number, B_OS)
            for number, (module, (_, B_OS)) in enumerate(zip(group, factors, strict=True))
        }


def _place(model: nn.Module, path: str) -> tuple[Any, str | int]:
    """Return what holds the module at a path, a module or a list, and under which key."""
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    holder: Any = model
    for part in parents:
        holder = holder[part]
    return holder, last

"""A bank of adapters on torch: what takes the place of a model's layers while rows of unlike adapters are computed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.engine.adapter_bank import AdapterBank, Layout
from dualtune.engine.once_per_input import OncePerInput
from dualtune_torch.host.inputs import to_device
from dualtune_torch.weights.frozen import compute_dtype, is_linear, shape_of


class BankRows:
    """Which products the rows of the current forward pass keep."""

    masks: Mapping[Layout, Tensor]  # bool [B, 1, S]


class BankInput:
    """A of the layers that read the same x, of all adapters."""

    def __init__(self, A_SI: Tensor, layout: Layout, rows: BankRows) -> None:
        self._A_SI, self._layout, self._rows = A_SI, layout, rows
        self._widths = [sum(ranks) for ranks in layout]
        self._products = OncePerInput[int, Tensor]()

    def product(self, layer: int, x: Tensor) -> Tensor:
        """Return keep · A x for a layer, [M, S], in the dtype of x."""
        return self._products.fetch(layer, x, self._compute)

    def _compute(self, x: Tensor) -> dict[int, Tensor]:
        mask_B1S = self._rows.masks[self._layout]
        if x.shape[:-1].numel() % len(mask_B1S):
            raise ValueError(f"a layer computes {x.shape[:-1].numel()} tokens of {len(mask_B1S)} rows")
        u_BTS = (x.flatten(0, -2) @ self._A_SI.to(x.dtype).T).view(len(mask_B1S), -1, len(self._A_SI))
        kept_MS = torch.where(mask_B1S, u_BTS, 0.0).flatten(0, 1)
        return dict(enumerate(kept_MS.split(self._widths, dim=1)))


class BankedLinear(nn.Module):
    """A frozen linear layer, with what each row's own adapter adds.

    It has no weight: a model that reads one instead of calling the layer fails, and its rows are computed apart.
    """

    def __init__(self, base: nn.Module, shared: BankInput, number: int, B_OS: Tensor) -> None:
        super().__init__()
        self.base, self._shared, self._number, self._B_OS = base, shared, number, B_OS

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        u_MS = self._shared.product(self._number, x)
        return torch.addmm(y.flatten(0, -2), u_MS, self._B_OS.to(x.dtype).T).view(y.shape)


class BankedModel:
    """A model whose layers compute with a bank, in forward passes within `rows`."""

    def __init__(
        self, model: PreTrainedModel, paths: Mapping[str, str], adapted: Collection[str], bank: AdapterBank
    ) -> None:
        """`paths`: of the linear layers, by canonical name; `adapted`: those with an adapter of the engine's.

        CannotBatch if they are not those of the bank.
        """
        layers: dict[str, Any] = {name: model.get_submodule(path) for name, path in paths.items()}
        self._bases = {name: layer.base if name in adapted else layer for name, layer in layers.items()}
        bank.check_fits({name: shape_of(base) for name, base in self._bases.items() if is_linear(base)})
        self._model, self._paths, self._bank, self._adapted = model, paths, bank, adapted
        self._rows, self._adapters_B = BankRows(), np.zeros(0, np.int32)
        self._places: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []

    def adapts(self, layer: object) -> bool:
        """Return whether an adapter of the bank is on this layer of the base."""
        return any(self._bases[module] is layer for module in self._bank.ranks)

    @contextmanager
    def rows(self, adapters_B: np.ndarray) -> Iterator[None]:
        """Compute rows with these adapters, by their numbers in the bank."""
        if not self._places:
            self._places = [*self._replacements()]
        if not np.array_equal(adapters_B, self._adapters_B):
            masks = self._bank.masks(adapters_B)
            sent = to_device([*masks.values()], self._model.device)
            self._rows.masks = {layout: mask[:, None] for layout, mask in zip(masks, sent, strict=True)}
            self._adapters_B = adapters_B
        # The dictionaries of modules are written themselves: `set_submodule` would walk each path at every token.
        own = [(modules, name, modules[name]) for modules, name, _ in self._places]
        try:
            for modules, name, layer in self._places:
                modules[name] = layer
            yield
        finally:
            for modules, name, layer in own:
                modules[name] = layer

    def _replacements(self) -> Iterator[tuple[dict[str, nn.Module | None], str, nn.Module]]:
        """Yield the place of each layer that computes otherwise, in the modules of its parent, and what takes it.

        Without an adapter in the bank, a layer that the engine adapts computes as its base.
        """
        replaced = {name: self._bases[name] for name in self._adapted}
        for group in self._bank.groups:
            replaced |= self._banked(group)
        for name, layer in replaced.items():
            parent, _, child = self._paths[name].rpartition(".")
            yield self._model.get_submodule(parent)._modules, child, layer

    def _banked(self, group: Sequence[str]) -> dict[str, nn.Module]:
        dtype, device = compute_dtype(self._model), self._model.device
        As, Bs = list[Tensor](), list[Tensor]()
        for module in group:
            A_SI, B_OS = (torch.from_numpy(factor).to(device, dtype) for factor in self._bank.factors(module))
            As.append(A_SI)
            Bs.append(B_OS)
        shared = BankInput(torch.cat(As), self._bank.layout(group), self._rows)
        return {
            module: BankedLinear(self._bases[module], shared, number, B_OS)
            for number, (module, B_OS) in enumerate(zip(group, Bs, strict=True))
        }

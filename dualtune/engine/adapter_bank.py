"""Adapters over one base of which each row of a batch has one, or none: the base is read once for all of them.

The adapters of a layer lie side by side and are one of the sum of their ranks, S: A [S, in] has the rows of all, and B
[out, S] the columns, with each one's scale in it. A row keeps the products with its own adapter's rows of A:

    y = W x + B (keep · A x)        keep [rows, S]

So a row computes what it computes alone, but for rounding, whatever ranks, scales and layers the others have, and a
step launches as many products for a hundred adapters as for two. The products that are dropped cost little where few
tokens are computed at once, as in generation, which takes the time of reading the weights.

The batches of many adapters are those of Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285), whose kernels gather
each row's matrices instead. Shape suffixes: B rows, S ranks of all adapters, I input and O output features.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from dualtune.engine.decoding import CannotBatch
from dualtune.model.adapter import AdapterSpec, Tensors, modules_of, owner_of, parse_name, tensor_name
from dualtune.model.dropout import input_of
from dualtune.model.targets import Shapes, is_expert, is_in_router

Layout = tuple[tuple[int, ...], ...]  # the rank of each adapter, for each layer of a group

NO_ADAPTER = -1  # the number of a row that computes with the base alone
MOST_RANKS = 1024  # of a bank: where many tokens are computed at once, as of prompts, each takes time
TRIAL_SIZE = 0.3  # of what the adapters of a trial add to a layer, beside its input
LARGEST = 6e4  # a number of A or of scale · B: one that float16 does not hold would reach the rows of others


def why_not_bankable(spec: AdapterSpec, tensors: Tensors) -> str | None:
    """Return why an adapter cannot be one of several in a batch; None: it can.

    It adds a product to each of its layers, and nothing else; none of them is an expert or a router, which sees the
    tokens of a batch in another order; and its numbers can be in the products of other rows, which are dropped.
    """
    if spec.layer != "lora":
        return f"its layers ({spec.layer}) add more than a product"
    for name, tensor in tensors.items():
        parsed = parse_name(name)
        if parsed is None:
            return f"it trains {owner_of(name)} of the base itself"
        if is_expert(parsed[0]) or is_in_router(parsed[0]):
            return f"it adapts {parsed[0]}, an expert or a router"
        scale = abs(spec.scale_of(parsed[0])) if parsed[1] == "B" else 1.0
        if not max(tensor.max(), -tensor.min()) * scale <= LARGEST:  # it may be NaN
            return f"{parsed[0]} has numbers that float16 does not hold"
    return None


def bank_batches(
    adapters: Sequence[tuple[AdapterSpec, Tensors] | None], most_numbers: int
) -> list[tuple[list[int], bool]]:
    """Return the adapters of each batch by index, and whether they can be a bank, of about so many numbers at most.

    None is the base, which joins a bank if there is one.
    """
    banks, alone, ranks, numbers = list[list[int]](), list[int](), 0, 0
    for i, adapter in enumerate(adapters):
        if adapter is None or why_not_bankable(*adapter):
            alone.append(i)
            continue
        own_rank = max(max(AdapterBank([adapter]).ranks.values(), default=(0,)))
        own_numbers = sum(tensor.size for tensor in adapter[1].values())
        ranks, numbers = ranks + own_rank, numbers + own_numbers
        if not banks or ranks > MOST_RANKS or numbers > most_numbers:
            banks.append([])
            ranks, numbers = own_rank, own_numbers
        banks[-1].append(i)
    joining = [i for i in alone if adapters[i] is None and banks]
    if joining:
        banks[0] += joining
    return [*((bank, True) for bank in banks), *(([i], False) for i in alone if i not in joining)]


class AdapterBank:
    """Plain LoRA adapters of one base by number, in the form of files; copied only where it is read."""

    def __init__(self, adapters: Sequence[tuple[AdapterSpec, Tensors]]) -> None:
        """Each with its tensors by canonical names, which nothing keeps out of a bank."""
        self._adapters = adapters

    @classmethod
    def random(cls, shapes: Shapes) -> AdapterBank:
        """Return two adapters of these layers, to try an engine: real ones may be new, and change nothing yet."""
        rng, adapters = np.random.default_rng(0), list[tuple[AdapterSpec, Tensors]]()
        for _ in range(2):
            tensors: Tensors = {}
            for module, (rows, columns) in shapes.items():
                tensors[tensor_name(module, "A")] = rng.normal(0, columns**-0.5, (1, columns)).astype(np.float32)
                tensors[tensor_name(module, "B")] = rng.normal(0, TRIAL_SIZE, (rows, 1)).astype(np.float32)
            adapters.append((AdapterSpec(1, 1.0, 0.0, tuple(shapes)), tensors))
        return cls(adapters)

    def __len__(self) -> int:
        return len(self._adapters)

    @cached_property
    def ranks(self) -> Mapping[str, tuple[int, ...]]:
        """The rank of each adapter in each layer that any of them adapts; 0: it leaves it as it is."""
        modules = sorted({module for _, tensors in self._adapters for module in modules_of(tensors)})
        names = {module: tensor_name(module, "A") for module in modules}
        return {
            module: tuple(len(tensors[name]) if name in tensors else 0 for _, tensors in self._adapters)
            for module, name in names.items()
        }

    @cached_property
    def shapes(self) -> Shapes:
        """The layers by name, [out, in]. Those of two adapters are alike, or one does not fit: see `check_fits`."""
        return {
            module: (len(tensors[tensor_name(module, "B")]), tensors[tensor_name(module, "A")].shape[1])
            for _, tensors in self._adapters for module in modules_of(tensors)
        }  # fmt: skip

    def factors(self, module: str) -> tuple[np.ndarray, np.ndarray]:
        """Return A [S, I] and B [O, S] of a layer, with the scales in B; float32."""
        pairs = [
            (tensors[tensor_name(module, "A")], tensors[tensor_name(module, "B")] * np.float32(spec.scale_of(module)))
            for (spec, tensors), rank in zip(self._adapters, self.ranks[module], strict=True) if rank
        ]  # fmt: skip
        As, Bs = zip(*pairs, strict=True)
        return np.concatenate(As), np.concatenate(Bs, axis=1)

    @cached_property
    def groups(self) -> Sequence[Sequence[str]]:
        """The layers, those with the same input together: one product by all their A serves them."""
        groups = defaultdict[tuple[str, int], list[str]](list)
        for module in self.ranks:
            groups[input_of(module), self.shapes[module][1]].append(module)
        return [*groups.values()]

    def layout(self, group: Sequence[str]) -> Layout:
        """Return the ranks of these layers, by which the masks of two groups are the same ones."""
        return tuple(self.ranks[module] for module in group)

    def masks(self, adapters_B: np.ndarray) -> dict[Layout, np.ndarray]:
        """Return which products with the A of a group each row keeps, bool [B, S], by the layout of the group."""
        return {layout: kept_ranks(layout, adapters_B) for layout in {*map(self.layout, self.groups)}}

    def check_fits(self, shapes: Shapes) -> None:
        """Raise CannotBatch unless the layers [out, in] of a model are those of the adapters."""
        for _, tensors in self._adapters:
            for module in modules_of(tensors):
                A, B = (tensors[tensor_name(module, part)] for part in ("A", "B"))
                if (len(B), A.shape[1]) != shapes.get(module):
                    raise CannotBatch(f"{module} is not a linear layer of this model of [{len(B)}, {A.shape[1]}]")


def check_base_alone(own: AdapterSpec, adapted: Iterable[str], *, moves_weights: bool = False) -> None:
    """Raise CannotBatch if an engine with this adapter, on these layers, cannot compute with the base's weights alone.

    `moves_weights`: they come to the device as they are needed.
    """
    if own.trains_base:
        raise CannotBatch("the engine trains parameters of the base itself")
    if moves_weights:
        raise CannotBatch("the base's weights move while the model computes (memory.resident_layers, memory.sharding)")
    for module in adapted:
        if is_expert(module) or is_in_router(module):
            raise CannotBatch(f"the engine adapts {module}, an expert or a router, for all rows alike")


def kept_ranks(layout: Layout, adapters_B: np.ndarray) -> np.ndarray:
    """Return which products each row keeps, bool [B, S]: those of its own adapter."""
    owners = [np.repeat(np.arange(len(ranks)), ranks) for ranks in layout]
    return np.concatenate(owners) == adapters_B[:, None]


def adapters_of(texts: Sequence[object], adapters: Sequence[int] | None) -> np.ndarray:
    """Return the number of each text's adapter, int32 [B]; by default none has one."""
    return np.full(len(texts), NO_ADAPTER, np.int32) if adapters is None else np.array(adapters, np.int32)

"""Parameters of the base that are trained beside the adapted layers: whole modules, and rows of embedding and head.

A module that is trained whole gets its parameters in the compute dtype from the arrays by which the current function is
differentiated. Rows leave the base as it is: a wrapper takes their tokens' outputs from the trained rows, so that the
table may be packed, and only their gradient is computed. A token has its row by a product with ones and zeros, whose
backward pass adds up in a fixed order.

Legend: V rows of the table, H hidden size, n trained rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from dualtune.base.errors import ConfigError
from dualtune.model.adapter import Tensors
from dualtune.model.beside import (
    BesideAdapter,
    Table,
    parameter_name,
    rows_name,
    trained_biases,
    trained_parameters,
    trained_rows,
)
from dualtune.model.formats.naming import canonical_parameter, stored_bias
from dualtune.model.targets import is_embedding, is_head
from dualtune.model.weight_files import BaseWeights
from dualtune_mlx.host.places import stored_names
from dualtune_mlx.int8 import Int8Linear

PACKED = (nn.QuantizedLinear, nn.QuantizedEmbedding, Int8Linear)
HEADS = (nn.Linear, nn.QuantizedLinear)
TIED_HEAD = "lm_head.weight"  # what the files call an output head, which no model has that uses its embedding


class Rows:
    """The trained rows of a table. Not a Module, so that the model's parameters are only the base's. They are bound to
    the array by which the current function is differentiated."""

    values_nH: mx.array

    def __init__(self, ids: Collection[int]) -> None:
        self.ids_n = mx.array([*ids], mx.int32)

    def replaced(self, logits: mx.array, hidden: mx.array, values_nH: mx.array, bias: mx.array | None) -> mx.array:
        """Return logits [..., V] with those of these rows in place of the table's."""
        own = hidden @ values_nH.astype(hidden.dtype).T
        own = own if bias is None else own + bias[self.ids_n]
        return self.put(logits, own.astype(logits.dtype))

    def put(self, logits: mx.array, own: mx.array) -> mx.array:
        """Return an array [..., V] with these values [..., n] at the rows."""
        return mx.put_along_axis(logits, mx.broadcast_to(self.ids_n, own.shape), own, axis=-1)


class TableWithRows(nn.Module):
    """An embedding or an output head with trained rows."""

    def __init__(self, base: nn.Module, rows: Rows) -> None:
        super().__init__()
        self.base = base
        self._rows = rows

    @property
    def rows(self) -> Rows:
        return self._rows


class RowsEmbedding(TableWithRows):
    def __call__(self, tokens: mx.array) -> mx.array:
        y = self.base(tokens)
        is_row = tokens[..., None] == self.rows.ids_n
        own = is_row.astype(y.dtype) @ self.rows.values_nH.astype(y.dtype)
        return mx.where(is_row.any(axis=-1, keepdims=True), own, y)

    def as_linear(self, x: mx.array) -> mx.array:
        """The logits of a model whose output head is its embedding."""
        return self.rows.replaced(cast(Any, self.base).as_linear(x), x, self.rows.values_nH, None)


class RowsHead(TableWithRows):
    def __call__(self, x: mx.array) -> mx.array:
        return self.rows.replaced(self.base(x), x, self.rows.values_nH, self.base.get("bias"))


@dataclass(frozen=True)
class Trained:
    """One of the arrays that are trained beside an adapter."""

    modules: tuple[nn.Module, ...]  # that compute with it
    bind: Callable[[mx.array], None]


@dataclass
class TrainedBeside:
    """What is trained beside an adapter, by the names in a state."""

    parts: dict[str, Trained] = field(default_factory=dict[str, Trained])
    ids: tuple[int, ...] = ()
    start: dict[str, mx.array] = field(default_factory=dict[str, mx.array])  # the numbers of the base
    tensors: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # of the base's files, which they are

    @property
    def modules(self) -> list[nn.Module]:
        return [module for part in self.parts.values() for module in part.modules]

    def add(self, name: str, part: Trained, start: mx.array, tensors: list[str]) -> None:
        self.parts[name], self.start[name], self.tensors[name] = part, start, tensors

    def neutral(self) -> Tensors:
        return {name: np.array(values.astype(mx.float32)) for name, values in self.start.items()}

    def edits(self, state: Tensors) -> dict[str, Callable[[np.ndarray], None]]:
        """Return what a merge does to the tensors of the base's files."""

        def replaced(name: str) -> Callable[[np.ndarray], None]:
            where: Any = slice(None) if name not in self._rows else [*self.ids]
            return lambda stored: stored.__setitem__(where, state[name])

        return {tensor: replaced(name) for name, tensors in self.tensors.items() for tensor in tensors}

    @property
    def _rows(self) -> set[str]:
        return {name for name, part in self.parts.items() if isinstance(part.modules[0], TableWithRows)}


def train_beside(
    model: nn.Module, beside: BesideAdapter, base: BaseWeights | None, adapted: Mapping[str, nn.Module]
) -> TrainedBeside:
    """Return what is trained beside an adapter, and wrap tables with trained rows.

    `adapted`: the layers by canonical path. ConfigError for what cannot be trained.
    """
    trained = TrainedBeside(ids=beside.rows)
    if not beside:
        return trained
    stored = stored_names(model, base) if base else {}
    names = {path: canonical_parameter(stored.get(path, path)) for path in (stored if base else _parameters(model))}
    embedding, head = _tables(model)
    tied = {TIED_HEAD: names[f"{embedding}.weight"]} if head is None and f"{embedding}.weight" in names else {}
    # Files may hold an output head that the config ties: a merge would leave it as it was.
    copies = {of: [alias] for alias, of in tied.items() if base and alias in base.tensors}
    paths = {names[path]: path for path in _parameters(model) if path in names}
    modules = dict(model.named_modules())

    def tensors_of(path: str, canonical: str) -> list[str]:
        return [*([stored[path]] if path in stored else []), *copies.get(canonical, ())]

    chosen = trained_parameters(beside, [*paths, *tied], adapted)
    for canonical in dict.fromkeys(tied.get(name, name) for name in chosen):
        path = paths[canonical]
        module_path, _, key = path.rpartition(".")
        module = cast(nn.Module, modules[module_path])
        part = Trained((module,), _binding(module, key))
        trained.add(parameter_name(canonical), part, cast(mx.array, module[key]), tensors_of(path, canonical))
    # The bias of an adapted layer is inside of it, and of a packed one too.
    inside: dict[str, Any] = {f"{path}.bias": layer.base for path, layer in adapted.items() if layer.count is None}
    inside = {name: layer for name, layer in inside.items() if "bias" in layer}
    for canonical in trained_biases(beside, [*paths, *inside], adapted):
        if canonical in inside:
            module, tensors = inside[canonical], [stored_bias(canonical, base.tensors)] if base else []
        else:
            path = paths[canonical]
            module, tensors = modules[path.rpartition(".")[0]], [stored[path]] if path in stored else []
        part = Trained((module,), _binding(module, "bias"))
        trained.add(parameter_name(canonical), part, cast(mx.array, module["bias"]), tensors)
    if beside.rows:
        _add_rows(trained, model, beside, names, tensors_of)
    mx.eval(trained.start)
    return trained


def _add_rows(
    trained: TrainedBeside, model: nn.Module, beside: BesideAdapter, names: Mapping[str, str],
    tensors_of: Callable[[str, str], list[str]],
) -> None:  # fmt: skip
    """Train rows of the embedding and the output head. ConfigError if the model does not have them as such.

    `names`: the canonical names of parameters by path. `tensors_of`: those of the files, by path and canonical name.
    """
    embedding, head = _tables(model)
    if embedding is None:
        raise ConfigError("adapter.train_rows: the embedding of this model was not found. Use the other backend")
    modules = dict(model.named_modules())
    weights = {path: f"{path}.weight" for path in (embedding, head) if path}
    tables = {names.get(weight, weight).removesuffix(".weight"): path for path, weight in weights.items()}
    sizes = [Table(name, cast(Any, modules[path]).weight.shape[0]) for name, path in tables.items()]
    whole = [name.removeprefix(parameter_name("")).removesuffix(".weight") for name in trained.parts]
    wrappers: list[tuple[str, nn.Module]] = []
    for canonical in trained_rows(beside, sizes[0], sizes[1] if head else None, whole):
        path = tables[canonical]
        table = cast(nn.Module, modules[path])
        if path == head and not isinstance(table, HEADS):
            raise ConfigError(
                f"adapter.train_rows: the output head of this model ({canonical}) has an adapter, or is not a plain "
                "linear layer. Take it out of adapter.targets"
            )
        rows = Rows(beside.rows)
        wrapper = (RowsHead if path == head else RowsEmbedding)(table, rows)
        wrappers.append((path, wrapper))
        part = Trained((wrapper,), lambda values, rows=rows: setattr(rows, "values_nH", values))
        tensors = tensors_of(f"{path}.weight", f"{canonical}.weight")
        trained.add(rows_name(canonical), part, _rows_of(table, rows.ids_n), tensors)
    model.update_modules(tree_unflatten(wrappers))


def _binding(module: nn.Module, key: str) -> Callable[[mx.array], None]:
    dtype = cast(mx.array, module[key]).dtype

    def bind(values: mx.array) -> None:
        module[key] = values.astype(dtype)

    return bind


def _parameters(model: nn.Module) -> list[str]:
    """Return the paths of the parameters in floating point, without those of packed layers."""
    packed = [path for path, module in model.named_modules() if isinstance(module, PACKED)]
    arrays: Any = tree_flatten(model.parameters())
    return [
        path
        for path, array in arrays
        if mx.issubdtype(array.dtype, mx.floating) and path.rpartition(".")[0] not in packed
    ]


def _tables(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the paths of the embedding and of the output head; None for one that the model does not have."""
    paths = [path for path, _ in model.named_modules()]
    embedding = next((path for path in paths if is_embedding(f"{path}.weight")), None)
    return embedding, next((path for path in paths if is_head(f"{path}.weight")), None)


def _rows_of(table: nn.Module, ids_n: mx.array) -> mx.array:
    """Return rows of an embedding or a head, plain or quantized."""
    if isinstance(table, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        biases = table.get("biases")
        rows = (table.weight[ids_n], table.scales[ids_n], None if biases is None else biases[ids_n])
        return mx.dequantize(*rows, group_size=table.group_size, bits=table.bits, mode=table.mode)
    return cast(mx.array, table.weight)[ids_n]

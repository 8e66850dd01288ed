"""Parameters of the base that are trained beside the adapted layers: whole modules, and rows of embedding and head.

A module that is trained whole computes with its parameters in the compute dtype, as in full fine-tuning. Rows leave the
base as it is: a wrapper takes their tokens' outputs from the trained rows, so that the table may be packed, and only
their gradient is computed. A token has its row by a product with ones and zeros, whose backward pass adds up in a fixed
order.

Legend: V rows of the table, D hidden size, n trained rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.base.errors import ConfigError
from dualtune.model.adapter import Tensors
from dualtune.model.beside import (
    BesideAdapter,
    Table,
    parameter_name,
    rows_name,
    shifts_choice,
    trained_biases,
    trained_parameters,
    trained_rows,
)
from dualtune.model.formats.naming import canonical_parameter, stored_bias
from dualtune.model.weight_files import BaseWeights
from dualtune_torch.methods import AdaptedLayer
from dualtune_torch.weights.frozen import is_linear, weight_of
from dualtune_torch.weights.places import stored_names


class Rows(NamedTuple):
    """The trained rows of a table: token ids [n], values [n, D] in float32."""

    ids_n: Tensor
    values_nD: Tensor

    def slopes_of(self, slopes_RV: Tensor) -> Tensor:
        """Cut the slopes of these rows' logits out of those of all, and leave zeros there."""
        slopes_Rn = slopes_RV.index_select(1, self.ids_n)
        slopes_RV.index_fill_(1, self.ids_n, 0)
        return slopes_Rn

    def write_logits(self, logits_RV: Tensor, hidden_RD: Tensor, bias_V: Tensor | None) -> None:
        """Replace the logits of these rows."""
        logits_RV.index_copy_(1, self.ids_n, self.logits(hidden_RD, bias_V))

    def logits(self, hidden: Tensor, bias_V: Tensor | None) -> Tensor:
        bias_n = None if bias_V is None else bias_V.index_select(0, self.ids_n)
        return F.linear(hidden, self.values_nD.to(hidden.dtype), bias_n)


class _Rows(nn.Module):
    """A table with trained rows."""

    ids_n: Tensor

    def __init__(self, base: nn.Module, ids: Collection[int], values_nD: nn.Parameter) -> None:
        super().__init__()
        self.base, self.values_nD = base, values_nD
        self.register_buffer("ids_n", torch.tensor([*ids], device=values_nD.device), persistent=False)

    @property
    def rows(self) -> Rows:
        return Rows(self.ids_n, self.values_nD)

    @property
    def weight(self) -> Any:
        return self.base.weight


class RowsEmbedding(_Rows):
    """An embedding. Some families multiply what it returns by a factor, which trained rows are too."""

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.base(tokens)
        is_row = tokens[..., None] == self.ids_n
        own = is_row.to(y.dtype) @ self.values_nD.to(y.dtype)
        factor = factor_of(self.base)
        own = own if factor is None else own * factor.to(y.dtype)
        return torch.where(is_row.any(-1, keepdim=True), own, y)


class RowsHead(_Rows):
    """An output head where the loss does not compute it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y.index_copy(-1, self.ids_n, self.rows.logits(x, self.bias).to(y.dtype))

    @property
    def bias(self) -> Any:
        return self.base.bias


def factor_of(embedding: nn.Module) -> Tensor | None:
    """Return what a scaled embedding multiplies its rows by: transformers' `embed_scale`, `factor` of a packed one."""
    factor = getattr(embedding, "embed_scale", getattr(embedding, "factor", None))
    return factor if factor is None or isinstance(factor, Tensor) else torch.tensor(float(factor))


@dataclass
class TrainedBeside:
    """The parameters that are trained beside an adapter, by their names in a state."""

    whole: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    rows: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])  # float32
    ids: tuple[int, ...] = ()
    modules: list[nn.Module] = field(default_factory=list[nn.Module])
    start: Tensors = field(default_factory=Tensors)  # those of the base
    tensors: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # of the base's files, which they are

    def edits(self, values: Callable[[str], np.ndarray]) -> dict[str, Callable[[np.ndarray], None]]:
        """Return what a merge does to the tensors of the base's files, for the trained values by name."""

        def replace_all(name: str) -> Callable[[np.ndarray], None]:
            return lambda stored: np.copyto(stored, values(name))

        def replace_rows(name: str) -> Callable[[np.ndarray], None]:
            return lambda stored: stored.__setitem__([*self.ids], values(name))

        return {
            tensor: (replace_rows if name in self.rows else replace_all)(name)
            for name, tensors in self.tensors.items()
            for tensor in tensors
        }


def train_beside(
    model: PreTrainedModel, beside: BesideAdapter, base: BaseWeights | None, adapted: Mapping[str, AdaptedLayer]
) -> TrainedBeside:
    """Make the parameters trainable, and wrap tables with trained rows. `adapted`: the layers by canonical path.

    ConfigError for what cannot be trained.
    """
    if not beside:
        return TrainedBeside()
    names = _canonical(model, base)
    parameters = {names[path]: p for path, p in model.named_parameters() if path in names and p.is_floating_point()}
    tied = {name: names[of] for name, of in _tied(model, names).items()}
    available = [
        *parameters,
        *tied,
        *(name for name in names.values() if name not in parameters and shifts_choice(name)),
    ]
    chosen = dict.fromkeys(tied.get(n, n) for n in trained_parameters(beside, available, adapted))
    trained = TrainedBeside(ids=beside.rows)
    files: Mapping[str, str] = stored_names(model, base) if base else {}
    stored = {names[path]: tensor for path, tensor in files.items() if path in names}
    # Files may hold an output head that the config ties: a merge would leave it as it was.
    in_files = base.tensors if base else {}
    copies = {of: [alias for alias in tied if tied[alias] == of and alias in in_files] for of in tied.values()}
    # The bias of an adapted layer is inside of it, under another path than in the files.
    inside = {f"{m}.bias": getattr(layer.base, "bias", None) for m, layer in adapted.items() if layer.count is None}
    biases = {name: bias for name, bias in inside.items() if isinstance(bias, nn.Parameter)}
    parameters, stored = (
        parameters | biases,
        stored | {name: stored_bias(name, base.tensors) for name in biases if base},
    )
    chosen |= dict.fromkeys(trained_biases(beside, parameters, adapted))
    _check_head(model, chosen, names)
    for name in chosen:
        parameter = parameters[name]
        state_name = parameter_name(name)
        parameter.requires_grad_(True)
        trained.whole[state_name] = parameter
        trained.start[state_name] = np.array(parameter.detach().float().cpu())
        trained.tensors[state_name] = [*([stored[name]] if name in stored else []), *copies.get(name, ())]
    paths = {id(module): path for path, module in model.named_modules()}
    inverse = {name: path for path, name in names.items()}
    trained.modules += [model.get_submodule(inverse[name].rpartition(".")[0]) for name in chosen if name not in biases]
    if beside.rows:
        _train_rows(model, beside, trained, names, paths, stored, copies)
    return trained


def _check_head(model: PreTrainedModel, chosen: Collection[str], names: Mapping[str, str]) -> None:
    head = model.get_output_embeddings()
    path = next((path for path, module in model.named_modules() if module is head), None)
    if head is not None and names.get(f"{path}.bias") in chosen:
        raise ConfigError(
            "adapter.bias: got all, but this model's output head has a bias, which is computed together with the loss. "
            "Set adapter.bias: lora_only"
        )


def _train_rows(
    model: PreTrainedModel, beside: BesideAdapter, trained: TrainedBeside, names: Mapping[str, str],
    paths: Mapping[int, str], stored: Mapping[str, str], copies: Mapping[str, list[str]],
) -> None:  # fmt: skip
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is None or f"{paths[id(head)]}.weight" in model.all_tied_weights_keys
    tables = {names.get(f"{paths[id(m)]}.weight", "").removesuffix(".weight"): m for m in (embedding, head) if m}
    sizes = [Table(name, _weight(m).shape[0]) for name, m in tables.items()]
    whole = [name.removeprefix(parameter_name("")).removesuffix(".weight") for name in trained.whole]
    chosen = trained_rows(beside, sizes[0], None if is_tied else sizes[1], whole)
    for module in chosen:
        base = tables[module]
        if base is head and not is_linear(base):
            raise ConfigError(
                f"adapter.train_rows: the output head of this model ({module}) has an adapter, or is not a plain "
                "linear layer. Take it out of adapter.targets"
            )
        values_nD = _weight(base)[[*beside.rows]].detach().float()
        if base is embedding:
            _check_embedding(base, beside.rows, values_nD)
        parameter = nn.Parameter(values_nD.clone())
        name = rows_name(module)
        trained.rows[name], trained.start[name] = parameter, np.array(values_nD.cpu())
        weight = f"{module}.weight"
        trained.tensors[name] = [*([stored[weight]] if weight in stored else []), *copies.get(weight, ())]
        wrapped = [(base, RowsEmbedding if base is embedding else RowsHead)]
        if is_tied and head is not None:
            wrapped.append((head, RowsHead))
        for table, make in wrapped:
            wrapper = make(table, beside.rows, parameter)
            model.set_submodule(paths[id(table)], wrapper)
            trained.modules.append(wrapper)


def _weight(table: nn.Module) -> Tensor:
    """Return the numbers of an embedding or a head, [V, D]."""
    stored: Any = getattr(table, "scales", table.weight)
    return weight_of(table, stored.dtype)


def _check_embedding(embedding: nn.Module, ids: Collection[int], values_nD: Tensor) -> None:
    factor = factor_of(embedding)
    with torch.no_grad():
        actual_nD = embedding(torch.tensor([*ids], device=values_nD.device))
        expected_nD = values_nD.to(actual_nD.dtype)
        expected_nD = expected_nD if factor is None else expected_nD * factor.to(actual_nD)
    if actual_nD.shape != expected_nD.shape or not torch.equal(actual_nD, expected_nD):
        raise ConfigError(
            f"adapter.train_rows: the embedding of this model ({type(embedding).__name__}) computes more than its "
            "rows. Use adapter.train_modules"
        )


def _canonical(model: PreTrainedModel, base: BaseWeights | None) -> dict[str, str]:
    """Return the canonical name of each parameter by its path in the model: that in the files, where it is as there."""
    if base is None:
        return {path: canonical_parameter(path) for path in model.state_dict()}
    return {path: canonical_parameter(tensor) for path, tensor in stored_names(model, base).items()}


def _tied(model: PreTrainedModel, names: Mapping[str, str]) -> dict[str, str]:
    """Return the path of the parameter that each tied one is, by the canonical name of the latter."""
    tied = {str(alias): str(of) for alias, of in model.all_tied_weights_keys.items()}
    return {names.get(alias, alias): of for alias, of in tied.items() if of in names}

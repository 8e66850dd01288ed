"""A micro-batch on the device: all its numbers arrive in one copy, and the host does not wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualtune.backend import IGNORE_INDEX, Batch
from dualtune_torch.host.transfers import flat_size, views
from dualtune_torch.kernels.attention import DocumentBorders, borders_in


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a micro-batch of B rows with T tokens, M of which are targets."""

    tokens_BT: Tensor  # int64, as all that are indices
    labels_BT: Tensor
    positions_BT: Tensor | None  # None: each row counts from 0
    where_M: Tensor  # of the targets, in the concatenated rows
    seeds_BT: Tensor  # of the tokens' dropout, int32
    weights_BT: Tensor | None  # float32, 0 where there is no target; None: all are 1
    documents: DocumentBorders

    @classmethod
    def of(cls, batch: Batch, device: torch.device, maybe_compile: Callable[[Any], Any], *, positions: bool) -> Inputs:
        """Start the copy of a micro-batch. What is derived from it is derived on the host: nothing synchronizes."""
        indices = {"tokens": batch.tokens_BT, "labels": batch.labels_BT, "where": targets_in(batch)}
        if positions:
            indices["positions"] = batch.positions_BT
        arrays = {name: array.astype(np.int64) for name, array in indices.items()}
        arrays |= {"seeds": batch.dropout_seeds_BT.view(np.int32), "borders": borders_in(batch.segments_BT)}
        if (weights_BT := batch.target_weights_BT) is not None:
            arrays["weights"] = weights_BT
        sent = dict(zip(arrays, to_device([*arrays.values()], device), strict=True))
        documents = DocumentBorders.of(batch.segments_BT, sent["borders"], maybe_compile)
        return cls(
            sent["tokens"], sent["labels"], sent.get("positions"), sent["where"], sent["seeds"], sent.get("weights"),
            documents,
        )  # fmt: skip

    @property
    def labels_M(self) -> Tensor:
        return self.labels_BT.flatten().index_select(0, self.where_M)

    @property
    def weights_M(self) -> Tensor | None:
        return None if self.weights_BT is None else self.weights_BT.flatten().index_select(0, self.where_M)


def targets_in(batch: Batch) -> np.ndarray:
    """Return the indices of the targets in the concatenated rows, [M]."""
    return np.flatnonzero(batch.labels_BT != IGNORE_INDEX)


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device, all at once and asynchronously. On a CPU the tensors share their memory.

    The pinned memory is torch's: it is used again as soon as the copy is done.
    """
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type == "cpu":
        return tensors
    flat = torch.empty(flat_size(tensors), dtype=torch.uint8, pin_memory=True)
    for to, tensor in zip(views(flat, tensors), tensors, strict=True):
        to.copy_(tensor)
    return views(flat.to(device, non_blocking=True), tensors)

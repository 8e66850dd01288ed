"""A micro-batch on the device: all its numbers arrive in one copy, and the host does not wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualtune.engine.backend import IGNORE_INDEX, Batch
from dualtune.engine.documents import branches_of
from dualtune_torch.host.transfers import flat_size, views
from dualtune_torch.kernels.attention import DocumentBorders, borders_in, gathered

TARGET_SIZES = 8  # of micro-batches that are padded, for each number of tokens


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a micro-batch of B rows with T tokens, M of which are targets."""

    tokens_BT: Tensor  # int64, as all that are indices
    labels_BT: Tensor  # or [B, T, K], and so the weights
    positions_BT: Tensor | None  # None: each row counts from 0
    where_M: Tensor  # of the targets, in the concatenated rows
    seeds_BT: Tensor  # of the tokens' dropout, int32
    weights_BT: Tensor | None  # float32, 0 where there is no target; None: all are 1
    documents: DocumentBorders
    masks: Any = None  # transformers', for a model that does not derive them from the positions
    temperature: Tensor | None = None  # float32, a scalar; None: 1

    @classmethod
    def of(cls, sent: Mapping[str, Tensor], documents: DocumentBorders) -> Inputs:
        """Take what `to_device` returns for `arrays_of`."""
        return cls(
            sent["tokens"], sent["labels"], sent.get("positions"), sent["where"], sent["seeds"], sent.get("weights"),
            documents, temperature=sent["temperature"][0] if "temperature" in sent else None,
        )  # fmt: skip

    @property
    def labels_M(self) -> Tensor:
        return self.labels_BT.flatten(0, 1).index_select(0, self.where_M)

    @property
    def weights_M(self) -> Tensor | None:
        return None if self.weights_BT is None else self.weights_BT.flatten(0, 1).index_select(0, self.where_M)


def arrays_of(batch: Batch, *, positions: bool) -> dict[str, np.ndarray]:
    """Return what the device needs of a micro-batch. All of it is derived on the host: nothing synchronizes."""
    indices = {"tokens": batch.tokens_BT, "labels": batch.labels_BT, "where": targets_in(batch)}
    if positions:
        indices["positions"] = batch.positions_BT
    arrays = {name: array.astype(np.int64) for name, array in indices.items()}
    arrays |= {"seeds": batch.dropout_seeds_BT.view(np.int32), "borders": borders_in(batch.segments_BT)}
    if (weights_BT := batch.target_weights_BT) is not None:
        arrays["weights"] = weights_BT
    if batch.temperature != 1:
        arrays["temperature"] = np.array([batch.temperature], np.float32)
    if branches := branches_of(batch):
        arrays["keys"], arrays["key uses"], arrays["key borders"] = gathered(batch.segments_BT, branches)
    return arrays


def padded(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Round up the numbers of targets and documents, so that micro-batches of one size have few shapes.

    Targets that are added are tokens without a label, with a loss weight of 0. Documents that are added are empty.
    """
    labels_BT, where_M, borders, num_tokens = (
        arrays["labels"],
        arrays["where"],
        arrays["borders"],
        arrays["tokens"].size,
    )
    step = -(-num_tokens // TARGET_SIZES)
    missing = min(-len(where_M) % step, num_tokens - len(where_M))
    others = np.setdiff1d(np.arange(num_tokens), where_M)[:missing]
    weights_BT = arrays.get("weights", (labels_BT != IGNORE_INDEX).astype(np.float32))
    documents = 1 << (len(borders) - 2).bit_length()
    empty = np.full(documents + 1 - len(borders), num_tokens, borders.dtype)
    return {
        **arrays, "labels": np.maximum(labels_BT, 0), "where": np.append(where_M, others), "weights": weights_BT,
        "borders": np.append(borders, empty),
    }  # fmt: skip


def targets_in(batch: Batch) -> np.ndarray:
    """Return the indices of the targets in the concatenated rows, [M]."""
    return np.flatnonzero(batch.is_target_BT)


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device, all at once and asynchronously. On a CPU the tensors share their memory."""
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type == "cpu":
        return tensors
    return views(pinned(tensors).to(device, non_blocking=True), tensors)


def pinned(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors into pinned memory, flat. torch uses it again as soon as a copy to a device is done."""
    flat = torch.empty(flat_size(tensors), dtype=torch.uint8, pin_memory=True)
    for to, tensor in zip(views(flat, tensors), tensors, strict=True):
        to.copy_(tensor)
    return flat

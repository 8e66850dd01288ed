"""How evenly the routers of a mixture use its experts, and the loss that evens it out (train.router_aux_loss_coef).

Switch Transformer (Fedus et al., arXiv 2101.03961, eq. 4 to 6) multiplies, for each expert e of a layer, the share f of
the tokens that are sent to it by the mean P of its probability: E · Σ f_e · P_e. It is k, the number of experts of a
token, where all experts get the same, and f, which has no slope, is a constant in its gradient.

A step's gradient must not depend on how its documents lie in micro-batches, and f of all of them is only known after
the last one. So f and P are those of a document, as in the sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, eq. 17
to 20), and the loss of a step is their mean, over the layers and over the documents, each by the weight of its targets:

    aux = Σ_documents weight / divisor · 1/L Σ_layers E · Σ_experts f · P

The divisor is the sum of these weights over the step, as of the loss of sft. An objective that weighs targets by slopes
of its own balances the documents that have a gradient as sft would: both answers of a pair, the samples of a group that
have an advantage (`Batch.routing_weights_BT`).

Of one document and one layer it is transformers' `load_balancing_loss_func`. That pools the counts of all layers before
it multiplies, so that the excess of an expert in one layer hides the lack of the same number in another.

With p the probabilities of a token and n the tokens of its document, both engines add to the gradient at its logits

    coefficient · weight / divisor · E / (L · n) · p · (f - Σ_e p_e · f_e)

and to the loss the same with Σ_e p_e · f_e in the place of the last two factors. Padding takes no part. A token that is
computed once for several documents (`Batch.parents_BT`) is one of each: its choice counts in all of their f, and it
gets the sum of what they add, which is this with Σ_documents weight · f / n in the place of weight · f / n.

Legend: N tokens of a micro-batch with its padding, row after row; M times that a token belongs to a document of which
it is not a part; E experts, L layers with routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, SupportsFloat

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import Batch, routing_weights
from dualtune.engine.documents import branches_of
from dualtune.model.config_file import decoder_table

KEY = "train.router_aux_loss_coef"
# Families whose routers send a token to the k experts with the largest logits, or of ERNIE 4.5 with the largest sums of
# softmax and correction, and weigh them by the softmax. JetMoe's attention has a router too, which counts as a layer.
FAMILIES = frozenset(
    {
        "dbrx", "ernie4_5_moe", "ernie4_5_vl_moe_text", "flex_olmo", "gpt_oss", "granitemoe", "granitemoehybrid",
        "granitemoeshared", "jamba", "jetmoe", "mellum", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text",
        "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text",
    }
)  # fmt: skip
# The key of a config with the number of experts of a token, if another one than transformers'.
_EACH = {"ernie4_5_moe": "moe_k", "ernie4_5_vl_moe_text": "moe_k", "dbrx": "moe_top_k"}
# The keys of a step's row in metrics.jsonl: the loss without its coefficient; the share of a layer's tokens that its
# busiest expert gets, in the layer where that is largest; and how many experts of all layers get none.
LOSS, BUSIEST, IDLE = "router_aux_loss", "router_busiest_share", "router_idle_experts"


def experts_of_token(config: Mapping[str, Any], coefficient: float) -> int:
    """Return k of a model. ConfigError if its experts cannot be balanced by the loss above."""
    table = decoder_table(config)
    family = str(table.get("model_type"))
    sizes = table.get("ffn_config", {}) if family == "dbrx" else table
    each = sizes.get(_EACH.get(family, "num_experts_per_tok"))
    if family in FAMILIES and type(each) is int:
        return each
    is_mixture = any("experts" in key and isinstance(n, int) and n > 1 for key, n in table.items())
    why = "is not a mixture of experts"
    if is_mixture:
        why = "does not choose its experts by the largest logits alone"
        if "n_group" in table or "scoring_func" in table:
            why += ": they are balanced by a correction of the choice, which fine-tuning leaves as it is"
    raise ConfigError(
        f"{KEY}: got {coefficient:g}, but this model ({family}) {why}; allowed: null, or a model of the families "
        f"{', '.join(sorted(FAMILIES))}"
    )


class DocumentShares(NamedTuple):
    """What the loss needs to know of each token of a micro-batch.

    A document is known by the place of its first token here, which is not its first one if it lacks its beginning.
    """

    first_N: np.ndarray  # int32, the place of its document's first token; of padding its own
    size_N: np.ndarray  # float32, the number of its document's tokens, shared ones included; 0: it is padding
    share_N: np.ndarray  # float32, the weight of its document's targets, by the divisor and that number of tokens
    token_M: np.ndarray  # int32, the places of tokens that documents share with their parents,
    document_M: np.ndarray  # and those of these documents


def document_shares(batch: Batch, divisor: float) -> DocumentShares:
    """Return what the loss needs to know of a micro-batch, of whose step `divisor` is the weight of all targets."""
    segments_BT = batch.segments_BT
    is_first_BT = np.diff(segments_BT, axis=1, prepend=-1) != 0
    number_N = np.cumsum(is_first_BT.ravel()) - 1  # of the document, or of the padding of a row
    is_token_N = segments_BT.ravel() > 0
    token_M, document_M = _shared(batch)
    sizes = np.bincount(number_N, is_token_N) + np.bincount(number_N[document_M], minlength=number_N[-1] + 1)
    weights = np.bincount(number_N, routing_weights(batch).ravel())
    first_N = np.where(is_token_N, np.flatnonzero(is_first_BT)[number_N], np.arange(number_N.size))
    share = weights / np.maximum(sizes, 1) / divisor
    return DocumentShares(
        first_N.astype(np.int32),
        (sizes[number_N] * is_token_N).astype(np.float32),
        (share[number_N] * is_token_N).astype(np.float32),
        token_M.astype(np.int32),
        document_M.astype(np.int32),
    )


def _shared(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return each token that a document shares with its parent, and this document's first token in its row."""
    branches, width = branches_of(batch), batch.segments_BT.shape[1]
    tokens = [branch.row * width + np.arange(branch.origin, branch.origin + branch.shared) for branch in branches]
    documents = [np.full(branch.shared, branch.row * width + branch.start) for branch in branches]
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *tokens]), np.concatenate([none, *documents])


def routing_metrics(loss: SupportsFloat, busiest: SupportsFloat, idle: SupportsFloat) -> dict[str, SupportsFloat]:
    """Return a step's metrics of its routers, which may be on the device."""
    return {LOSS: loss, BUSIEST: busiest, IDLE: idle}

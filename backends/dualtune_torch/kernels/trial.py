"""The trial of a fast kernel: logits of short documents and their gradient, against the model's own code.

Legend: B rows, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from dualtune.base.errors import ConfigError
from dualtune.base.fields import shown
from dualtune_torch.host.inputs import to_device
from dualtune_torch.kernels import allocator
from dualtune_torch.kernels.attention import DocumentBorders, NotCovered, borders_in
from dualtune_torch.sharding import is_split
from dualtune_torch.weights.frozen import compute_dtype

# How much a fast kernel may change a logit, relative to the largest one. Rounding changes logits by a tenth of that, a
# wrong computation by far more.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# How much it may change the gradient, relative to its norm. It passes through all layers twice.
ROUNDING_OF_GRADIENT = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 5e-2}
# Where the gradient is compared, too. It takes some seconds of compiling, and a CPU's code is that of our tests.
DEVICES_OF_GRADIENT = ("cuda",)
LENGTHS = (5, 3, 6)  # tokens of the documents, all in one row
HIGHEST_TOKEN = 100


@dataclass(frozen=True)
class TrialResults:
    """What the model computes of the documents."""

    logits_1TV: Tensor
    gradient_1TD: Tensor | None  # of a weighted sum of the logits by the embeddings; None: it is not compared


def own_results(model: PreTrainedModel) -> TrialResults:
    """Compute each document in a separate row, by the model's own code."""
    if model.device.type in DEVICES_OF_GRADIENT and not is_split(model):
        try:
            return _differentiated(model, lambda: _separate(model))
        except (RuntimeError, NotImplementedError) as error:  # a model that can be used, and not trained
            if allocator.is_out_of_memory(error):
                raise
    with torch.no_grad():
        return TrialResults(_separate(model), None)


def _separate(model: PreTrainedModel) -> Tensor:
    parts = _tokens(model).split(LENGTHS, dim=1)
    try:
        return torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)
    except (TypeError, ValueError) as error:  # an argument is missing
        reason = shown(" ".join(str(error).split()), 200).rstrip(".")
        raise ConfigError(
            f"model.name: this model ({type(model).__name__}) computes nothing from text alone: {reason}. Allowed: "
            "models that read text without an image or sound"
        ) from error


def packed(model: nn.Module, where: DocumentBorders | None, *, masks: bool = False) -> Tensor:
    """Return logits, or the last hidden state of a model without a head, of all documents in one row.

    Gradients are on, so that this compiles the code that training runs.
    """
    options: dict[str, Any] = {} if where is None else {"documents": where}
    positions_1T = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(_tokens(model).device)
    if masks:
        options["attention_mask"] = document_masks(model, positions_1T)
    output = model(_tokens(model), position_ids=positions_1T, use_cache=False, **options)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def needs_masks(model: PreTrainedModel) -> bool:
    """Return whether the model, by its own code, keeps documents apart if it is given masks, and only then.

    Most classes of transformers derive the masks from the positions; some do not pass the positions on.
    """
    with torch.no_grad():
        expected_1TV = _separate(model)
        for masks in (False, True):
            try:
                gap = largest_gap(packed(model, None, masks=masks), expected_1TV)
            except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
                if allocator.is_out_of_memory(error):
                    raise
                continue
            if gap <= ROUNDING[compute_dtype(model)]:
                return masks
    return False  # `dualtune.train.model_checks` refuses a model that mixes documents


def document_masks(model: Any, positions_BT: Tensor) -> Any:
    """Return the masks by kind of layer, or the only one, by which transformers keeps the documents of a row apart."""
    like_BT1 = torch.empty(*positions_BT.shape, 1, dtype=compute_dtype(model), device=positions_BT.device)
    return create_masks_for_generate(model.config, like_BT1, None, None, position_ids=positions_BT)


def document_borders(model: PreTrainedModel, maybe_compile: Callable[[Any], Any]) -> DocumentBorders:
    """Return where the documents are, for the fast attention."""
    segments_1T = np.repeat(np.arange(1, 1 + len(LENGTHS)), LENGTHS)[None]
    (cu_seqlens,) = to_device([borders_in(segments_1T)], model.device)
    return DocumentBorders.of(segments_1T, cu_seqlens, maybe_compile)


def compare(model: PreTrainedModel, run: Callable[[], Tensor], expected: TrialResults) -> None:
    """Raise NotCovered if `run` returns other logits, or has another gradient, than the model's own code."""
    actual = TrialResults(run().detach(), None) if expected.gradient_1TD is None else _differentiated(model, run)
    dtype = compute_dtype(model)
    gap = largest_gap(actual.logits_1TV, expected.logits_1TV)
    if not gap <= ROUNDING[dtype]:  # also true for NaN
        raise NotCovered(f"computes different logits (by {gap:.1e} of the largest)")
    if actual.gradient_1TD is not None and expected.gradient_1TD is not None:
        difference = (actual.gradient_1TD.float() - expected.gradient_1TD.float()).norm()
        gap = float(difference / expected.gradient_1TD.float().norm())
        if not gap <= ROUNDING_OF_GRADIENT[dtype]:
            raise NotCovered(f"computes different gradients (by {gap:.1e} of the norm)")


def _differentiated(model: PreTrainedModel, run: Callable[[], Tensor]) -> TrialResults:
    """Return the logits that `run` returns, and the gradient of a weighted sum of them by the embeddings."""
    embeddings: list[Tensor] = []

    def begin_here(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    hook = model.get_input_embeddings().register_forward_hook(begin_here)
    try:
        with torch.enable_grad():
            logits_1TV = run()
            V = logits_1TV.shape[-1]
            weights_V = torch.linspace(-1, 1, V, device=logits_1TV.device) / V**0.5
            gradients = torch.autograd.grad((logits_1TV.float() * weights_V).sum(), embeddings)
    finally:
        hook.remove()
    return TrialResults(logits_1TV.detach(), torch.cat(gradients, dim=1))


def largest_gap(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected number."""
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


def _tokens(model: Any) -> Tensor:
    device, vocab = next(model.parameters()).device, model.config.get_text_config().vocab_size
    return (torch.arange(sum(LENGTHS), device=device) * 37 % HIGHEST_TOKEN % vocab)[None]

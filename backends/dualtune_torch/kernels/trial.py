"""The trial of a fast kernel: logits of short documents and their gradient, against the model's own code.

In 16 bits the rounding of one layer is amplified by the layers after it: with the weights of a real model, two ways to
compute the same norm can end with logits that differ by a fifth of the largest. So there every layer is given the input
that it had by the model's own code, and is compared for itself.

Legend: B rows, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from dualtune.base.errors import ConfigError
from dualtune.base.fields import shown
from dualtune_torch.checkpointing import decoder_layers
from dualtune_torch.host.inputs import to_device
from dualtune_torch.kernels import allocator
from dualtune_torch.kernels.attention import DocumentBorders, NotCovered, borders_in
from dualtune_torch.sharding import is_split
from dualtune_torch.weights.frozen import compute_dtype

# How much a fast kernel may change a logit, relative to the largest one, or what a layer adds to a token, relative to
# the largest number that it adds. Rounding changes them by a tenth of that, a wrong computation by far more.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# How much it may change the gradient, relative to its norm. It passes through all layers twice.
ROUNDING_OF_GRADIENT = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 5e-2}
# Where the gradient is compared, too. It takes some seconds of compiling, and a CPU's code is that of our tests.
DEVICES_OF_GRADIENT = ("cuda",)
LENGTHS = (5, 3, 6)  # tokens of the documents, all in one row
HIGHEST_TOKEN = 100
TINY = 1e-30


@dataclass(frozen=True)
class TrialResults:
    """What the model computes of the documents."""

    logits_1TV: Tensor
    layers: Layers
    # Of weighted sums of the logits and of layers' outputs, by the embeddings and by layers' inputs; empty:
    # they are not compared.
    gradients_1TD: Sequence[Tensor] = ()


@dataclass
class Layers:
    """The inputs and outputs of each decoder layer, [1, T, D], in a list with an entry for each of its calls."""

    modules: Sequence[nn.Module]  # none: layers are not compared
    inputs: list[list[Tensor]] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)

    @contextmanager
    def recording(self, fixed: Layers | None = None) -> Iterator[None]:
        """Record inputs and outputs in the block. `fixed`: layers get the inputs that these have recorded.

        Gradients end at the inputs.
        """
        self.inputs, self.outputs = [[] for _ in self.modules], [[] for _ in self.modules]
        with ExitStack() as undo:
            for number, module in enumerate(self.modules):
                enter, leave = self._hooks(number, fixed)
                undo.callback(module.register_forward_pre_hook(enter).remove)
                undo.callback(module.register_forward_hook(leave).remove)
            yield

    def _hooks(self, number: int, fixed: Layers | None) -> tuple[Callable[..., Any], Callable[..., None]]:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            own_1TD, *others = args
            x_1TD = own_1TD if fixed is None else torch.cat(fixed.inputs[number], dim=-2)
            # As in training, where compiled code has inputs with gradients.
            self.inputs[number].append(x_1TD.detach().requires_grad_(torch.is_grad_enabled()))
            return self.inputs[number][-1], *others

        def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.outputs[number].append(output if isinstance(output, Tensor) else output[0])

        return enter, leave

    def largest_gap(self, expected: Layers) -> float:
        """Return the largest difference of a number that a layer returns, beyond what storing that number rounds,
        relative to the largest number that it adds to the token."""
        gap = 0.0
        for actual, own, inputs in zip(self.outputs, expected.outputs, expected.inputs, strict=True):
            actual_1TD, own_1TD, input_1TD = (
                torch.cat(calls, dim=-2).detach().float() for calls in (actual, own, inputs)
            )
            rounded_1TD = 2 * torch.finfo(own[0].dtype).eps * own_1TD.abs()
            added_1T1 = (own_1TD - input_1TD).abs().amax(-1, keepdim=True).clamp(min=TINY)
            gaps_1TD = ((actual_1TD - own_1TD).abs() - rounded_1TD) / added_1T1
            gap = max(gap, float(gaps_1TD.nan_to_num(torch.inf).max()))
        return gap


def own_results(model: PreTrainedModel) -> TrialResults:
    """Compute each document in a separate row, by the model's own code."""
    if model.device.type in DEVICES_OF_GRADIENT and not is_split(model):
        try:
            return _differentiated(model, lambda: _separate(model), _layers_of(model))
        except (RuntimeError, NotImplementedError) as error:  # a model that can be used, and not trained
            if allocator.is_out_of_memory(error):
                raise
    layers = _layers_of(model)
    with torch.no_grad(), layers.recording():
        return TrialResults(_separate(model), layers)


def _layers_of(model: PreTrainedModel) -> Layers:
    """Return the layers of a model in 16 bits."""
    return Layers(list(decoder_layers(model) or ()) if compute_dtype(model) != torch.float32 else [])


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
    layers, dtype = Layers(expected.layers.modules), compute_dtype(model)
    if expected.gradients_1TD:
        actual = _differentiated(model, run, layers, expected.layers)
    else:
        with layers.recording(expected.layers):
            actual = TrialResults(run().detach(), layers)
    gap = layers.largest_gap(expected.layers)
    if layers.modules and not gap <= ROUNDING[dtype]:  # also true for NaN
        raise NotCovered(f"computes something else in a layer (by {gap:.1e} of the largest number that it adds)")
    gap = largest_gap(actual.logits_1TV, expected.logits_1TV)
    if not gap <= ROUNDING[dtype]:
        raise NotCovered(f"computes different logits (by {gap:.1e} of the largest)")
    for gradient, own in zip(actual.gradients_1TD, expected.gradients_1TD, strict=True):
        gap = float((gradient.float() - own.float()).norm() / own.float().norm())
        if not gap <= ROUNDING_OF_GRADIENT[dtype]:
            raise NotCovered(f"computes different gradients (by {gap:.1e} of the norm)")


def _differentiated(
    model: PreTrainedModel, run: Callable[[], Tensor], layers: Layers, fixed: Layers | None = None
) -> TrialResults:
    """Return the logits that `run` returns, the inputs and outputs of layers, and the gradients."""
    embeddings: list[Tensor] = []

    def begin_here(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    hook = model.get_input_embeddings().register_forward_hook(begin_here)
    try:
        with torch.enable_grad(), layers.recording(fixed):
            logits_1TV = run()
            numbers = [logits_1TV, *(y_1TD for calls in layers.outputs for y_1TD in calls)]
            total = torch.stack([_weighted(x_1TN) for x_1TN in numbers]).sum()
            leaves = [embeddings] * (not layers.modules) + layers.inputs
            gradients = torch.autograd.grad(total, [leaf for calls in leaves for leaf in calls])
    finally:
        hook.remove()
    of_calls = iter(gradients)
    return TrialResults(
        logits_1TV.detach(), layers, [torch.cat([next(of_calls) for _ in calls], dim=-2) for calls in leaves]
    )


def _weighted(x_1TN: Tensor) -> Tensor:
    N = x_1TN.shape[-1]
    return (x_1TN.float() * torch.linspace(-1, 1, N, device=x_1TN.device) / N**0.5).sum()


def largest_gap(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected number."""
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


def _tokens(model: Any) -> Tensor:
    device, vocab = next(model.parameters()).device, model.config.get_text_config().vocab_size
    return (torch.arange(sum(LENGTHS), device=device) * 37 % HIGHEST_TOKEN % vocab)[None]

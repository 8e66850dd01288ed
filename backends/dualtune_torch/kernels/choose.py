"""Choose the fast kernels for a model. Each is tested on the model itself, against the model's own code, before use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from dualtune.base.errors import ConfigError
from dualtune_torch.beside import Rows, RowsHead
from dualtune_torch.card import CARD
from dualtune_torch.card.memory import WORTH_COMPILING
from dualtune_torch.kernels import allocator, attention, blocks, compiled
from dualtune_torch.kernels.attention import DocumentBorders, NotCovered
from dualtune_torch.kernels.gpu import select
from dualtune_torch.kernels.trial import (
    TrialResults,
    compare,
    document_borders,
    needs_masks,
    own_results,
    packed,
)
from dualtune_torch.lora import LoRAPieces
from dualtune_torch.methods import AdaptedLayer
from dualtune_torch.sharding import class_of, is_split
from dualtune_torch.weights.affine import AffineLinear
from dualtune_torch.weights.frozen import FrozenLinear, num_parameters

# What a model with other code raises.
TRIAL_ERRORS = (NotCovered, TypeError, AttributeError, ValueError, LookupError, RuntimeError)
IMPLEMENTATION = "_attn_implementation_internal"  # of a config, where transformers keeps the name of the attention
BLOCKS = {"norms": blocks.compile_norms, "mlp": blocks.compile_mlps, "rotary": blocks.compile_rotary}


@dataclass
class Kernels:
    """The kernels that were chosen for a model."""

    attention: bool = False
    own_attention: str | None = None  # transformers' own choice
    head: FrozenLinear | None = None  # the output head, if it is computed together with the loss,
    rows: Rows | None = None  # with rows of it that are trained…
    cap: float | None = None  # …and the soft cap of its logits
    groups: bool = False  # of LoRA layers
    lora: LoRAPieces = field(default_factory=LoRAPieces)  # the Triton kernels of a group
    maybe_compile: Callable[[Any], Any] = lambda function: function  # or `compiled.compile_function`
    used: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)  # what stayed plain, and why
    remarks: list[str] = field(default_factory=list)  # what is not used by choice

    def __str__(self) -> str:
        """Return one line for logs."""
        return "; ".join([f"fused: {', '.join(self.used)}" if self.used else "reference", *self.plain, *self.remarks])


def choose(
    model: PreTrainedModel,
    kernels: str,
    *,
    pieces: Collection[str] | None = None,
    largest_kept: int = allocator.LARGEST_KEPT,
) -> Kernels:
    """Install the kernels that work on this model. Raises ConfigError if `kernels` is "fused" and one does not.

    `pieces`: use these of the card's alone, and compile them however small the model is. On a CPU the allocator then
    keeps freed blocks of up to `largest_kept` bytes.
    """
    chosen = Kernels()
    select.choice()  # an unknown one is an error also where it makes no difference
    if kernels == "reference":
        return chosen
    if model.device.type == "cpu" and largest_kept:
        allocator.keep_memory(largest_kept)
    # Whether anything is compiled is decided first: the pieces are tried in the form in which they will run.
    names = CARD.pieces if pieces is None else pieces
    if kernels != "fused" and pieces is None and num_parameters(model) < WORTH_COMPILING:
        chosen.plain.append("nothing is compiled for so small a model")
    elif reason := compiled.why_not(model.device):
        chosen.plain.append(f"nothing is compiled ({reason})")
    else:
        chosen.maybe_compile = compiled.compile_function
    # The model's own results come before the first change to it.
    expected = own_results(model)
    alone = [module for module in model.modules() if isinstance(module, AdaptedLayer) and not module.grouped]
    if any(layer.count is None for layer in alone):  # stacks of experts are not linear layers
        chosen.remarks.append("adapters plain: adapter.merge_for has no fast code")
    elif "lora" in names and (
        any(isinstance(module, AdaptedLayer) for module in model.modules())
        or not any(parameter.requires_grad for parameter in model.get_input_embeddings().parameters())
    ):
        chosen.groups = True
        chosen.used.append("lora")
    if "attention" in names:
        _try_attention(model, chosen, expected)
    if "loss" in names:
        _try_head(model, chosen, expected)
    # Blocks are tried last, on top of the attention and the loss that were chosen.
    if chosen.maybe_compile is compiled.compile_function:
        for name, install in BLOCKS.items():
            if name in names:
                _try_block(model, chosen, expected, name, install)
    _try_triton(model, chosen, pieces)
    if kernels == "fused" and chosen.plain:
        raise ConfigError(
            f"model.kernels: got fused, but not all fast kernels work for this model ({type(model).__name__}): "
            f"{'; '.join(chosen.plain)}. Set auto to use those that work"
        )
    return chosen


def trial_run(model: PreTrainedModel, chosen: Kernels) -> None:
    """Run the model once on the test documents by the chosen kernels, with gradients."""
    packed(model.base_model, _documents(model, chosen))


@contextmanager
def own_attention(model: PreTrainedModel, kernels: Kernels) -> Iterator[None]:
    """Run the model with transformers' own attention, masks and caches."""
    if not kernels.attention:
        yield
        return
    # The names alone are exchanged, and where the property keeps them: `set_attn_implementation` walks all modules, and
    # the property all configs, which is too slow for each token.
    names = vars(model.config.get_text_config())
    names[IMPLEMENTATION] = kernels.own_attention
    try:
        yield
    finally:
        names[IMPLEMENTATION] = attention.NAME


@contextmanager
def _tried(chosen: Kernels, name: str, errors: tuple[type[Exception], ...] = TRIAL_ERRORS) -> Iterator[None]:
    """Try a kernel in the block. If the trial fails, the model's own code stays, and the reason is noted."""
    try:
        yield
    except errors as error:
        if allocator.is_out_of_memory(error):  # the kernel is not the cause
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        chosen.plain.append(f"{name} plain: {reason}")


def _try_attention(model: PreTrainedModel, chosen: Kernels, expected: TrialResults) -> None:
    chosen.own_attention = cast(str, model.config.get_text_config()._attn_implementation)
    where = document_borders(model, chosen.maybe_compile)
    with _tried(chosen, "attention"), ExitStack() as undo:
        if not model._supports_attention_backend:
            raise NotCovered("does not use transformers' attention interface")
        undo.callback(model.set_attn_implementation, chosen.own_attention)
        model.set_attn_implementation(attention.NAME)
        compare(model, lambda: packed(model, where), expected)
        if not where.windows:
            raise NotCovered("did not call transformers' attention interface")
        if has_window(model) and where.windows == {None}:
            raise NotCovered("has a sliding window that exists only in its own masks")
        undo.pop_all()
        chosen.attention = True
        chosen.used.append("attention")


def _try_head(model: PreTrainedModel, chosen: Kernels, expected: TrialResults) -> None:
    head = model.get_output_embeddings()
    with _tried(chosen, "loss"):
        own: Any = head.base if isinstance(head, RowsHead) else head
        if head is None or class_of(own) not in (nn.Linear, AffineLinear) or model.base_model is model:
            raise NotCovered("the output head is adapted, or not a plain linear layer")
        if own.bias is not None and own.bias.requires_grad:
            raise NotCovered("the bias of the output head is trained")
        where = _documents(model, chosen)
        cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        masks = where is None and needs_masks(model)
        compare(model, lambda: attention.capped(head(packed(model.base_model, where, masks=masks)), cap), expected)
        chosen.head, chosen.cap = own, cap
        chosen.rows = head.rows if isinstance(head, RowsHead) else None
        chosen.used.append("loss")


def _try_block(
    model: PreTrainedModel,
    chosen: Kernels,
    expected: TrialResults,
    name: str,
    install: Callable[[nn.Module, Any], bool],
) -> None:
    before = {module: module.__dict__.get("forward") for module in model.modules()}
    with _tried(chosen, name), ExitStack() as undo:
        undo.callback(_restore, before)
        if not install(model, chosen.maybe_compile):
            raise NotCovered("of unknown form")
        where = _documents(model, chosen)
        compare(model, lambda: packed(model, where), expected)
        undo.pop_all()
        chosen.used.append(name)


def _restore(forwards: Mapping[nn.Module, Any]) -> None:
    for module, forward in forwards.items():
        module.__dict__.pop("forward", None)
        if forward is not None:
            module.forward = forward


def _try_triton(model: PreTrainedModel, chosen: Kernels, pieces: Collection[str] | None) -> None:
    """Use the Triton kernels, or those of `pieces`, that compute what the code computes that they replace."""
    if reason := select.why_not(model.device) or ("the base is split" if is_split(model) else None):
        chosen.remarks += [f"no Triton kernels: {reason}"] if model.device.type == "cuda" else []
        return
    from triton.errors import TritonError

    for name, install in select.KERNELS.items():
        if pieces is not None and name not in pieces:
            continue
        with _tried(chosen, name, (ValueError, RuntimeError, OSError, TritonError)):
            if (installed := install(model)) is not None:
                chosen.lora = replace(chosen.lora, **installed)
                chosen.used.append(name)


def _documents(model: PreTrainedModel, chosen: Kernels) -> DocumentBorders | None:
    return document_borders(model, chosen.maybe_compile) if chosen.attention else None


def has_window(model: PreTrainedModel) -> bool:
    """Return whether the config says that a token sees only the last ones."""
    config = model.config.get_text_config()
    chunked = getattr(config, "attention_chunk_size", None)
    return bool(chunked or (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)))

"""A forward pass on the device `meta`, and what autograd keeps of it, layer by layer.

Tensors have shapes and no numbers there, so it costs neither memory nor time. Experts are multiplied as one product
with all tokens that are sent to any of them: which expert a token goes to makes no difference to a shape.

Legend: T tokens of the row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from dualtune_torch.kernels import attention, blocks
from dualtune_torch.kernels.attention import DocumentBorders
from dualtune_torch.weights.frozen import FrozenLinear, shape_of

EXPERTS = {getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)} - {None}
# What a model may do to the hidden states and to its logits if the loss computes them in parts (`kernels.choose`).
NO_ARITHMETIC = {
    "__getitem__",
    "linear",
    "__get__",
    "__set__",
    "size",
    "dim",
    "to",
    "float",
    "numel",
    "untyped_storage",
}
SOFT_CAP = {"div", "mul", "tanh", "__mul__", "__rmul__", "__truediv__", "true_divide"}


@dataclass(slots=True)
class Trace:
    """What was seen of T tokens, by number of layer; the last number stands for what is in none."""

    T: int
    kept: list[dict[int, int]]  # storage -> bytes
    active: Counter[int] = field(default_factory=Counter)  # multiplications by layer
    reads: dict[str, int] = field(default_factory=lambda: {})  # linear layer -> storage of its input
    given: set[int] = field(default_factory=lambda: set())  # storages that all layers are given: positions, masks
    after: set[str] = field(default_factory=lambda: set())  # functions that were called after the last layer
    alive: list[Any] = field(default_factory=lambda: [])  # so that no address is used twice
    layer: int = -1
    windows: set[int | None] = field(
        default_factory=lambda: set()
    )  # with which the attention of this package was called
    unequal: Counter[int] = field(default_factory=Counter)  # bytes of scores that a CPU keeps, by layer
    masks: Counter[int] = field(default_factory=Counter)  # bytes of the masks of torch's attention, by layer


def traced(
    model: PreTrainedModel, linears: Mapping[str, nn.Module], layers: Sequence[nn.Module], T: int, *, whole: bool
) -> Trace:
    """Run the model on T tokens, by the attention of this package if it can. `whole`: with the output head."""
    found = Trace(T, [{} for _ in range(len(layers) + 1)])
    frozen = {key_of(each) for each in [*model.parameters(), *model.buffers()]}

    def note(tensor: Tensor) -> Tensor:
        if (key := key_of(tensor)) not in frozen:
            place = len(layers) if key in found.given else found.layer
            found.kept[place][key] = tensor.untyped_storage().nbytes()
            found.alive.append(tensor)
        return tensor

    with (
        _watched(model, linears, layers, found),
        _Functions(found),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        found.windows = run(model if whole else model.base_model, model, T)
    return found


def run(part: nn.Module, model: PreTrainedModel, T: int) -> set[int | None]:
    """Run a model or its base. Return the windows with which it called the attention of this package."""
    tokens = torch.zeros(1, T, dtype=torch.long, device="meta")
    options: dict[str, Any] = {"use_cache": False, "position_ids": torch.arange(T, device="meta")[None]}
    if model.config._attn_implementation == attention.NAME:
        borders = torch.tensor([0, T], dtype=torch.int32, device="meta")
        options["documents"] = DocumentBorders(((0, 0, T),), borders, T, lambda function: function)
    part(tokens, **options)
    return options["documents"].windows if "documents" in options else set()


@contextmanager
def _watched(
    model: PreTrainedModel, linears: Mapping[str, nn.Module], layers: Sequence[nn.Module], found: Trace
) -> Iterator[None]:
    """Note which layer computes, and what linear layers read."""

    def enter(number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            found.layer = number
            others = [*args[1:], *(value for name, value in options.items() if args or name != "hidden_states")]
            found.given.update(key_of(each) for each in _tensors_in(others))

        return hook

    def leave(*_: Any) -> None:
        found.layer = len(layers)

    def reads(path: str, module: nn.Module) -> Callable[..., None]:
        out, in_ = shape_of(cast(FrozenLinear, module))

        def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else next(iter(options.values()))
            found.reads[path] = key_of(x)
            found.alive.append(x)
            found.active[found.layer] += out * in_ * (x.numel() // in_)

        return hook

    def differentiable(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_().clone()  # a model may change it in place

    def ends(*_: Any) -> None:
        found.after.clear()

    hooks = [model.get_input_embeddings().register_forward_hook(differentiable)]
    hooks += [layer.register_forward_pre_hook(enter(number), with_kwargs=True) for number, layer in enumerate(layers)]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    hooks += [m.register_forward_pre_hook(reads(path, m), with_kwargs=True) for path, m in linears.items()]
    hooks.append(model.base_model.register_forward_hook(ends))
    found.layer = len(layers)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Functions(TorchFunctionMode):
    """Replaces the products of experts and torch's own attention, and notes the names of functions.

    A question about numbers is answered with no: transformers asks whether a row is all padding, or one document, and
    if it is not, builds the masks that packed rows need.
    """

    def __init__(self, found: Trace) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in EXPERTS:
            x_NI, weights_EIO = args[0], args[1]
            self._found.active[self._found.layer] += x_NI.shape[0] * weights_EIO.shape[-2] * weights_EIO.shape[-1]
            return x_NI.to(weights_EIO.dtype) @ weights_EIO[0]
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else (kwargs or {}).get("attn_mask")
            self._found.unequal[self._found.layer] += _scores(*args[:3])
            if mask is not None:
                self._found.masks[self._found.layer] += mask.numel() * args[0].element_size()
            return _Attention.apply(*args[:3], None if mask is None else mask.shape)
        if func is Tensor.__bool__ and args[0].is_meta:
            return False
        self._found.after.add(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def _scores(q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor) -> int:
    """Return the bytes of the scores where torch's attention on a CPU keeps them: of heads that are not all alike."""
    if q_BHTd.shape == k_BGTd.shape == v_BGTd.shape:
        return 0
    return q_BHTd[..., 0].numel() * k_BGTd.shape[-2] * q_BHTd.element_size()


class _Attention(torch.autograd.Function):
    """What torch's fused kernels keep: no scores, and the mask in the compute dtype.

    On `meta` torch would choose the code that keeps all scores.
    """

    @staticmethod
    def forward(ctx: Any, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor, mask: tuple[int, ...] | None) -> Tensor:
        out = q_BHTd.new_empty(*q_BHTd.shape[:-1], v_BGTd.shape[-1])
        lse_BHT = q_BHTd.new_empty(q_BHTd.shape[:-1], dtype=torch.float32)
        masks = [] if mask is None else [q_BHTd.new_empty(mask)]
        ctx.save_for_backward(q_BHTd, k_BGTd, v_BGTd, out, lse_BHT, *masks)
        return out


def has_plain_head(model: PreTrainedModel, found: Trace) -> bool:
    """Return whether the logits of a whole model are the output head's, but for a soft cap that the loss knows."""
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return model.base_model is not model and found.after <= NO_ARITHMETIC | (SOFT_CAP if cap else set())


def compile_blocks(model: PreTrainedModel) -> list[Tensor]:
    """Install the blocks that are compiled for a large model, as functions that keep their arguments alone.

    Return a list that will hold what an adapter need not keep, because it computes it again: inputs of down_proj.
    """
    remade: list[Tensor] = []

    def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            result = cast(Tensor, _Compiled.apply(function, *args))
            if function is blocks.gated:
                remade.append(result)
            return result

        return call

    for install in (blocks.compile_norms, blocks.compile_mlps, blocks.compile_rotary):
        install(model, compiled)
    return remade


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *args: Any) -> Tensor:
        ctx.save_for_backward(*(each for each in args if isinstance(each, Tensor)))
        return function(*args)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def key_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

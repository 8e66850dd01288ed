"""The shapes of a model without a memory formula, counted on its class without any weights.

The model is built on the device `meta` and reads a few tokens in three rows of different length: what autograd keeps
for any other length follows. Of equal layers only the first computes: seconds for the largest models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.utils import logging

from dualtune.base.errors import ConfigError
from dualtune.engine.memory.counted import (
    CODES,
    Counted,
    CountedLayer,
    CountedLinear,
    Matrices,
    SavedTensors,
    uncountable,
    variant,
)
from dualtune.model.experts import DOWN
from dualtune_torch.checkpointing import decoder_layers
from dualtune_torch.expert_forms import with_common_forms
from dualtune_torch.experts import expert_modules, projections
from dualtune_torch.kernels import attention, blocks
from dualtune_torch.kernels.attention import DocumentBorders
from dualtune_torch.kernels.choose import has_window
from dualtune_torch.methods import adaptable_layers, stack_path
from dualtune_torch.weights.frozen import FrozenLinear, shape_of
from dualtune_torch.weights.text_part import empty_model

# ----------------------------------------------------------------------------------------------------------------------
# A forward pass on the device `meta`, and what autograd keeps of it, layer by layer.
#
# Tensors have shapes and no numbers there, so it costs neither memory nor time. Experts are multiplied as one product
# with all tokens that are sent to any of them: which expert a token goes to makes no difference to a shape.
#
# Legend: T tokens of the row.

EXPERTS = {getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)} - {None}
PRODUCTS = {torch.nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__}
# What a model may do to the hidden states and to its logits if the loss computes them in parts (`kernels.choose`).
NO_ARITHMETIC = {
    "__getitem__", "linear", "__get__", "__set__", "size", "dim", "to", "float", "numel", "untyped_storage",
}  # fmt: skip
SOFT_CAP = {"div", "mul", "tanh", "__mul__", "__rmul__", "__truediv__", "true_divide"}


@dataclass(slots=True)
class Trace:
    """What was seen of T tokens, by number of layer; the last number stands for what is in none."""

    T: int
    kept: list[dict[int, int]]  # storage -> bytes
    active: Counter[int] = field(default_factory=Counter)  # multiplications by layer
    sent: Counter[int] = field(default_factory=Counter)  # rows of a product of experts, by layer
    reads: dict[str, int] = field(default_factory=lambda: {})  # linear layer -> storage of its input
    shared: set[int] = field(default_factory=lambda: set())  # storages that all layers are given: positions, masks
    after: set[str] = field(default_factory=lambda: set())  # functions that were called after the last layer
    alive: list[Any] = field(default_factory=lambda: [])  # so that no address is used twice
    layer: int = -1
    # With which the attention of this package was called.
    windows: set[int | None] = field(default_factory=lambda: set())
    unequal: Counter[int] = field(default_factory=Counter)  # bytes of scores that a CPU keeps, by layer
    masks: Counter[int] = field(default_factory=Counter)  # bytes of the masks of torch's attention, by layer


def traced(
    model: PreTrainedModel, linears: Mapping[str, nn.Module], layers: Sequence[nn.Module], T: int, *, whole: bool
) -> Trace:
    """Run the model on T tokens, by the attention of this package if it can. `whole`: with the output head."""
    trace = Trace(T, [{} for _ in range(len(layers) + 1)])
    frozen = {key_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    def note(tensor: Tensor) -> Tensor:
        if (key := key_of(tensor)) not in frozen:
            place = len(layers) if key in trace.shared else trace.layer
            trace.kept[place][key] = tensor.untyped_storage().nbytes()
            trace.alive.append(tensor)
        return tensor

    with (
        _watched(model, linears, layers, trace),
        _Functions(trace),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        trace.windows = run(model if whole else model.base_model, model, T)
    return trace


def run(part: nn.Module, model: PreTrainedModel, T: int) -> set[int | None]:
    """Run a model or its base. Return the windows with which it called the attention of this package."""
    tokens = torch.zeros(1, T, dtype=torch.long, device="meta")
    options: dict[str, Any] = {"use_cache": False, "position_ids": torch.arange(T, device="meta")[None]}
    if model.config.get_text_config()._attn_implementation == attention.NAME:
        borders = torch.tensor([0, T], dtype=torch.int32, device="meta")
        options["documents"] = DocumentBorders(((0, 0, T),), borders, T, lambda function: function)
    part(tokens, **options)
    return options["documents"].windows if "documents" in options else set()


@contextmanager
def _watched(
    model: PreTrainedModel, linears: Mapping[str, nn.Module], layers: Sequence[nn.Module], trace: Trace
) -> Iterator[None]:
    """Note which layer computes, and what linear layers read."""

    def enter(number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            trace.layer = number
            others = [*args[1:], *(value for name, value in options.items() if args or name != "hidden_states")]
            trace.shared.update(key_of(tensor) for tensor in _tensors_in(others))

        return hook

    def leave(*_: Any) -> None:
        trace.layer = len(layers)

    def reads(path: str, module: nn.Module) -> Callable[..., None]:
        out, in_ = shape_of(cast(FrozenLinear, module))

        def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else next(iter(options.values()))
            trace.reads[path] = key_of(x)
            trace.alive.append(x)
            trace.active[trace.layer] += out * in_ * (x.numel() // in_)

        return hook

    def differentiable(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_().clone()  # a model may change it in place

    def ends(*_: Any) -> None:
        trace.after.clear()

    # The base is frozen: without a gradient at the embedding autograd would keep nothing.
    hooks = [model.get_input_embeddings().register_forward_hook(differentiable)]
    hooks += [layer.register_forward_pre_hook(enter(number), with_kwargs=True) for number, layer in enumerate(layers)]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    hooks += [m.register_forward_pre_hook(reads(path, m), with_kwargs=True) for path, m in linears.items()]
    hooks.append(model.base_model.register_forward_hook(ends))
    trace.layer = len(layers)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Functions(TorchFunctionMode):
    """Replaces the products of experts and torch's own attention, and notes the names of functions.

    A question about numbers is answered with no: transformers asks whether a row is all padding, or one document, and
    if it is not, builds the masks that packed rows need. Where numbers decide a shape, as in families that compute
    expert by expert, nothing is zero, and the first expert gets all tokens.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        self._found: list[Tensor] = []  # places of what is not zero

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in EXPERTS:
            x_NI, weights_EIO = args[0], args[1]
            self._trace.active[self._trace.layer] += x_NI.shape[0] * weights_EIO.shape[-2] * weights_EIO.shape[-1]
            self._trace.sent[self._trace.layer] = x_NI.shape[0]
            return x_NI.to(weights_EIO.dtype) @ weights_EIO[0]
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else (kwargs or {}).get("attn_mask")
            self._trace.unequal[self._trace.layer] += _scores(*args[:3])
            if mask is not None:
                self._trace.masks[self._trace.layer] += mask.numel() * args[0].element_size()
            return _Attention.apply(*args[:3], None if mask is None else mask.shape)
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if (answer := self._answer(func, *args)) is not None:
                return answer
            if func in PRODUCTS and len(args) > 1 and _is_of_stack(args[1]):
                rows = args[0][..., 0].numel()
                self._trace.active[self._trace.layer] += rows * args[1].numel()
                self._trace.sent[self._trace.layer] = max(self._trace.sent[self._trace.layer], rows)
        self._trace.after.add(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))

    def _answer(self, func: Any, x: Tensor, *args: Any) -> Any:
        """Return the answer to a question about numbers; None for another function."""
        if func is Tensor.__bool__:
            return False
        if func in (torch.nonzero, Tensor.nonzero):
            self._found.append(_places_in(x))
            return self._found[-1]
        if func is torch.where and not args:
            return _places_in(x).unbind(1)
        if func is Tensor.unbind and any(x is places for places in self._found):
            return (torch.zeros(x.shape[1:], dtype=torch.long),)  # a number, by which a tensor can be indexed
        if func is Tensor.tolist:
            return _Sizes([0] * len(x))
        if func is Tensor.split and args and isinstance(args[0], _Sizes):
            return (x, *(x[:0] for _ in args[0][1:]))
        return None


def _places_in(x: Tensor) -> Tensor:
    return x.new_empty(x.numel(), x.dim(), dtype=torch.long)


class _Sizes(list[int]):
    """How many rows each expert gets, which only numbers tell."""


def _is_of_stack(weight: Tensor) -> bool:
    """Return whether this is the matrix of one expert, within a tensor with those of all."""
    return weight.dim() == 2 and weight.numel() * weight.element_size() < weight.untyped_storage().nbytes()


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


def has_plain_head(model: PreTrainedModel, trace: Trace) -> bool:
    """Return whether the logits of a whole model are the output head's, but for a soft cap that the loss knows."""
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return model.base_model is not model and trace.after <= NO_ARITHMETIC | (SOFT_CAP if cap else set())


def compile_blocks(model: PreTrainedModel) -> list[Tensor]:
    """Install the blocks that are compiled for a large model, as functions that keep their arguments alone.

    Return a list that will hold what an adapter need not keep, because it computes it again: inputs of down_proj.
    """
    recomputed: list[Tensor] = []

    def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            result = cast(Tensor, _Compiled.apply(function, *args))
            if function is blocks.gated:
                recomputed.append(result)
            return result

        return call

    for install in (blocks.compile_norms, blocks.compile_mlps, blocks.compile_rotary):
        install(model, compiled)
    return recomputed


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *args: Any) -> Tensor:
        ctx.save_for_backward(*(value for value in args if isinstance(value, Tensor)))
        return function(*args)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def key_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# ----------------------------------------------------------------------------------------------------------------------
LENGTHS = (64, 128, 192)  # tokens of a row: multiples of the chunks of linear attention
DTYPES = (torch.float32, torch.bfloat16)
NUMBERS_OF_LAYERS = re.compile(r"layer_?(idx|id|index|number|num)|_idx$|^training$")
# What a class raises that cannot be built, or that needs numbers to decide what to compute.
ERRORS = (
    ImportError, TypeError, AttributeError, ValueError, LookupError, RuntimeError, ArithmeticError, ConfigError,
    attention.NotCovered,
)  # fmt: skip


def count(config: Mapping[str, Any]) -> Counted:
    """Count the shapes of the model of a config.json. UnknownShape if transformers cannot build its class or run it."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return _Counting(_empty(config)).result()
    except ERRORS as error:
        raise uncountable(config, error) from error
    finally:
        logging.set_verbosity(verbosity)


def _empty(config: Mapping[str, Any]) -> PreTrainedModel:
    """Return the model that an engine would load, without numbers."""
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"transformers does not know the model_type {kind}")
    with torch.device("meta"):
        model = with_common_forms(empty_model(CONFIG_MAPPING[kind].from_dict(decoded(dict(config))), DTYPES[0]))
    model.requires_grad_(False)
    return model.eval()


def decoded(value: Any) -> Any:
    """Return a value of a config.json with the infinite numbers that transformers writes as objects."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return float(table["__float__"]) if "__float__" in table else {k: decoded(v) for k, v in table.items()}
    return [decoded(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


class _Counting:
    """A model, its layers and its linear layers. The number after that of the last layer stands for what is in none."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        stack = decoder_layers(model)
        self.layers: list[nn.Module] = list(stack._modules.values()) if stack is not None else []  # type: ignore[arg-type]
        modules = dict(model.named_modules())
        paths = {id(module): path for path, module in modules.items()}
        self.paths = tuple(paths[id(layer)] for layer in self.layers)
        self.linears = adaptable_layers(model)
        self.stacks = projections(model, strict=False)
        is_stored = getattr(model.config, "quantization_config", None) is not None
        self.packed_experts = {} if is_stored else expert_modules(model, strict=False)
        kinds = [_kind(layer) for layer in self.layers]
        self.twins = [kinds.index(kind) for kind in kinds]  # of each layer, the first one that is equal
        # Of parameters that several layers share, as in Zamba: stored once, so they count as in none.
        layers_of = Counter(id(p) for layer in self.layers for p in {*layer.parameters()})
        self.shared = {key for key, number in layers_of.items() if number > 1}
        self.whole = True
        self.own_attention = self.attention = cast(str, model.config.get_text_config()._attn_implementation)

    def result(self) -> Counted:
        text, head = self.model.config.get_text_config(), self.model.get_output_embeddings()
        embedding = cast(Tensor, self.model.get_input_embeddings().weight)
        heads = int(getattr(text, "num_attention_heads", None) or 0)
        rows, hidden = shape_of(cast(FrozenLinear, head)) if head is not None else embedding.shape
        first, kept_by_variant = self._all_kept()
        layers = [self._layer(number, first, kept_by_variant) for number in range(len(self.layers))]
        return Counted(
            model_class=type(self.model).__name__,
            hidden=int(hidden),
            vocab=int(rows),
            heads=heads,
            width=heads * int(text.to_dict().get("head_dim") or (hidden // heads if heads else 0)),
            fused_attention=self.attention == attention.NAME,
            fused_loss=not self.whole,
            paths=self.paths,
            by_layer=tuple(layers[twin] for twin in self.twins),
            outside=self._layer(len(self.layers), first, kept_by_variant),
            head=next((path for path, module in self.linears.items() if module is head), None),
        )

    def _all_kept(self) -> tuple[Trace, dict[str, list[SavedTensors]]]:
        """Return the first trace, and what each layer keeps by variant."""
        self._choose()
        first, kept_by_variant = None, dict[str, list[SavedTensors]]()
        for code in CODES:  # what is compiled stays so, and comes last
            self.model.requires_grad_(code == "trained")
            self.model.set_attn_implementation(self.own_attention if code == "plain" else self.attention)
            recomputed = compile_blocks(self.model) if code == "compiled" else list[Tensor]()
            for dtype in DTYPES:
                cast(nn.Module, self.model).to(dtype)
                try:
                    traces = [self._traced(T) for T in LENGTHS]
                except ERRORS:
                    if code != "compiled":
                        raise
                    # Nor can the engine use the compiled blocks then.
                    kept_by_variant[variant(dtype.itemsize, code)] = kept_by_variant[variant(dtype.itemsize)]
                    continue
                first = first or traces[0]
                again = {key_of(tensor) for tensor in recomputed}
                kept_by_variant[variant(dtype.itemsize, code)] = [
                    self._kept(number, first, traces, again) for number in range(len(self.layers) + 1)
                ]
                recomputed.clear()
        assert first is not None
        return first, kept_by_variant

    def _choose(self) -> None:
        """Choose the attention as an engine does, which layers compute, and whether the loss computes the logits."""
        error: BaseException | None = None
        for name in (attention.NAME, self.own_attention, "eager"):
            for twins in (self.twins, list(range(len(self.layers)))):
                try:
                    self.model.set_attn_implementation(name)
                    self.whole, self.twins = True, twins
                    trace = self._traced(LENGTHS[0])
                    if name == attention.NAME and not self._attends(trace):
                        raise attention.NotCovered("needs more than the attention of this package")
                    self.whole = not has_plain_head(self.model, trace)
                    self._traced(LENGTHS[1])
                except ERRORS as raised:
                    error = raised
                else:
                    self.attention = name
                    if name == "eager":
                        self.own_attention = name
                    return
        assert error is not None
        raise error

    def _attends(self, trace: Trace) -> bool:
        """Return whether the trial of an engine accepts the attention of this package (`kernels.choose`)."""
        hidden = has_window(self.model) and trace.windows == {None}  # it exists only in the model's own masks
        return bool(trace.windows) and bool(self.model._supports_attention_backend) and not hidden

    def _traced(self, T: int) -> Trace:
        with _passed_on(self.layers, self.twins):
            return traced(self.model, self.linears, self.layers, T, whole=self.whole)

    def _kept(self, number: int, first: Trace, traces: Sequence[Trace], recomputed: set[int]) -> SavedTensors:
        """Return what a layer keeps, by what it keeps of rows of T, 2 T and 3 T tokens: token · T + pair · T² + …"""
        long, T = traces[-1], traces[0].T
        one, two, three = (sum(trace.kept[number].values()) for trace in traces)
        pair = max(0.0, (three - 2 * two + one) / (2 * T * T))
        reads = self._reads(number, first)

        def read_from(storages: Collection[int]) -> tuple[int, ...]:
            return tuple(sorted({number for path, number in reads.items() if long.reads.get(path) in storages}))

        return SavedTensors(
            token=max(0, round((three - two) / T - 5 * pair * T)),
            pair=round(pair),
            scores=long.unequal[number] // long.T**2,
            masks=long.masks[number] // long.T**2,
            largest=max(long.kept[number].values(), default=0) // long.T,
            inputs=read_from(long.kept[number].keys() | recomputed),
            recomputed=read_from(recomputed),
        )

    def _reads(self, number: int, first: Trace) -> dict[str, int]:
        """Return for each linear layer the number of its input; one that did not compute has an input of its own."""
        paths = self._paths_in(number)
        inputs = {path: first.reads.get(path, -i) for i, path in enumerate(paths, start=1)}
        order = list(dict.fromkeys(inputs.values()))
        return {path: order.index(key) for path, key in inputs.items()}

    def _paths_in(self, number: int) -> list[str]:
        if number < len(self.layers):
            return [path for path in self.linears if path.startswith(f"{self.paths[number]}.")]
        return [path for path in self.linears if not path.startswith(tuple(f"{each}." for each in self.paths))]

    def _modules_in(self, number: int) -> Collection[nn.Module]:
        """Return the modules of a layer, each weight once. Those with weights that layers share are in none."""
        in_layers = {id(module) for layer in self.layers for module in layer.modules()}

        def is_in_none(module: nn.Module) -> bool:
            shared = any(id(weight) in self.shared for weight in module.parameters(recurse=False))
            return shared or id(module) not in in_layers

        within = number < len(self.layers)
        modules = (self.layers[number] if within else self.model).modules()
        found = [module for module in modules if is_in_none(module) != within]
        return {id(next(module.parameters(recurse=False), module)): module for module in found}.values()

    def _layer(self, number: int, first: Trace, kept_by_variant: Mapping[str, Sequence[SavedTensors]]) -> CountedLayer:
        prefix = f"{self.paths[number]}." if number < len(self.layers) else ""
        modules = self._modules_in(number)
        head, reads = self.model.get_output_embeddings(), self._reads(number, first)
        packed = Counter(
            shape_of(module) for module in modules if isinstance(module, FrozenLinear) and module is not head
        )
        for path, experts in self.packed_experts.items():
            if path.startswith(prefix) and number < len(self.layers):
                for parameter in experts.parameters(recurse=False):
                    if parameter.dim() == 3:
                        of_expert = parameter.mT if cast(Any, experts).is_transposed else parameter
                        packed[cast("tuple[int, int]", tuple(of_expert.shape[1:]))] += len(parameter)
        parameters = {id(tensor): tensor.numel() for module in modules for tensor in module.parameters(recurse=False)}
        linears = [
            CountedLinear(path.removeprefix(prefix), *shape_of(self.linears[path]), reads[path]) for path in reads
        ]
        first_of_experts = max(reads.values(), default=-1) + 1  # gate and up read the same
        linears += [
            CountedLinear(
                stack_path(path).removeprefix(prefix), *stack.shape, first_of_experts + (stack.role == DOWN),
                stack.count, first.sent[number] // first.T,
            )
            for path, stack in self.stacks.items()
            if path.startswith(prefix) and number < len(self.layers)
        ]  # fmt: skip
        return CountedLayer(
            linears=tuple(linears),
            matrices=tuple(Matrices(*shape, times) for shape, times in packed.items()),
            parameters=sum(parameters.values()),
            active=first.active[number] // first.T,
            has_state=any(isinstance(module, nn.Conv1d) for module in modules),
            kept={name: layers[number] for name, layers in kept_by_variant.items()},
        )


def _kind(layer: nn.Module) -> str:
    """Describe all that may decide what a layer computes."""
    settings = [
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and not NUMBERS_OF_LAYERS.search(name)
    ]
    shapes = [(name, tuple(tensor.shape)) for name, tensor in layer.named_parameters()]
    return f"{layer!r}{settings}{shapes}"


@contextmanager
def _passed_on(layers: Sequence[nn.Module], twins: Sequence[int]) -> Iterator[None]:
    """Let layers that are equal to an earlier one return what they get, in the form in which that one does."""
    outputs: dict[int, Any] = {}

    def note(number: int) -> Any:
        return lambda module, args, output: outputs.update({number: output})

    def instead(twin: int) -> Any:
        def forward(*args: Any, **options: Any) -> Any:
            x = args[0] if args else options["hidden_states"]
            return (x, *outputs[twin][1:]) if isinstance(outputs[twin], tuple) else x

        return forward

    hooks = [layers[twin].register_forward_hook(note(twin)) for twin in set(twins)]
    passed = [(layer, twin) for number, (layer, twin) in enumerate(zip(layers, twins, strict=True)) if twin != number]
    before = {layer: layer.__dict__.get("forward") for layer, _ in passed}
    try:
        for layer, twin in passed:
            layer.forward = instead(twin)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, forward in before.items():
            del layer.forward
            if forward is not None:
                layer.forward = forward

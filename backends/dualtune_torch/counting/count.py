"""The shapes of a model without a memory formula, counted on its class without any weights.

The model is built on the device `meta` and reads a few tokens in three rows of different length: what
autograd keeps for any other length follows. Of equal layers only the first computes, so that this takes seconds for the
largest models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.utils import logging

from dualtune.errors import ConfigError
from dualtune.memory.counted import CODES, Counted, CountedLayer, CountedLinear, Kept, Matrices, uncountable, variant
from dualtune_torch.checkpointing import decoder_layers
from dualtune_torch.counting.trace import Trace, compile_blocks, has_plain_head, key_of, traced
from dualtune_torch.kernels import attention
from dualtune_torch.kernels.choose import has_window
from dualtune_torch.methods import linear_layers
from dualtune_torch.weights.frozen import FrozenLinear, shape_of
from dualtune_torch.weights.text_part import empty_model

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
        model = empty_model(CONFIG_MAPPING[kind].from_dict(decoded(dict(config))), DTYPES[0])
    model.requires_grad_(False)
    return model.eval()


def decoded(value: Any) -> Any:
    """Return a value of a config.json with the infinite numbers that transformers writes as objects."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        return float(found["__float__"]) if "__float__" in found else {k: decoded(v) for k, v in found.items()}
    return [decoded(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


class _Counting:
    """A model, its layers and its linear layers. The number after that of the last layer stands for what is in none."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        stack = decoder_layers(model)
        self.layers: list[nn.Module] = list(stack._modules.values()) if stack is not None else []  # type: ignore[arg-type]
        modules = dict(model.named_modules())
        paths = {id(module): path for path, module in modules.items()}
        self.paths = tuple(paths[id(layer)] for layer in self.layers)
        self.linears = linear_layers(model)
        kinds = [_kind(layer) for layer in self.layers]
        self.twins = [kinds.index(kind) for kind in kinds]  # of each layer, the first one that is equal
        self.whole = True
        self.own_attention = self.attention = cast(str, model.config._attn_implementation)

    def result(self) -> Counted:
        text, head = self.model.config.get_text_config(), self.model.get_output_embeddings()
        embedding = cast(Tensor, self.model.get_input_embeddings().weight)
        heads = int(getattr(text, "num_attention_heads", None) or 0)
        rows, hidden = shape_of(cast(FrozenLinear, head)) if head is not None else embedding.shape
        first, kept = self._all_kept()
        here = [self._layer(number, first, kept) for number in range(len(self.layers))]
        return Counted(
            model_class=type(self.model).__name__,
            hidden=int(hidden),
            vocab=int(rows),
            heads=heads,
            width=heads * int(text.to_dict().get("head_dim") or (hidden // heads if heads else 0)),
            fused_attention=self.attention == attention.NAME,
            fused_loss=not self.whole,
            paths=self.paths,
            by_layer=tuple(here[twin] for twin in self.twins),
            outside=self._layer(len(self.layers), first, kept),
            head=next((path for path, module in self.linears.items() if module is head), None),
        )

    def _all_kept(self) -> tuple[Trace, dict[str, list[Kept]]]:
        """Return the first trace, and what each layer keeps by variant."""
        self._choose()
        first, found = None, dict[str, list[Kept]]()
        for code in CODES:  # what is compiled stays so, and comes last
            self.model.requires_grad_(code == "trained")
            self.model.set_attn_implementation(self.own_attention if code == "plain" else self.attention)
            remade = compile_blocks(self.model) if code == "compiled" else list[Tensor]()
            for dtype in DTYPES:
                cast(nn.Module, self.model).to(dtype)
                try:
                    traces = [self._traced(T) for T in LENGTHS]
                except ERRORS:
                    if code != "compiled":
                        raise
                    found[variant(dtype.itemsize, code)] = found[variant(dtype.itemsize)]  # nor can the engine use them
                    continue
                first = first or traces[0]
                again = {key_of(each) for each in remade}
                found[variant(dtype.itemsize, code)] = [
                    self._kept(number, first, traces, again) for number in range(len(self.layers) + 1)
                ]
                remade.clear()
        assert first is not None
        return first, found

    def _choose(self) -> None:
        """Choose the attention as an engine does, which layers compute, and whether the loss computes the logits."""
        error: BaseException | None = None
        for name in (attention.NAME, self.own_attention, "eager"):
            for twins in (self.twins, list(range(len(self.layers)))):
                try:
                    self.model.set_attn_implementation(name)
                    self.whole, self.twins = True, twins
                    found = self._traced(LENGTHS[0])
                    if name == attention.NAME and not self._attends(found):
                        raise attention.NotCovered("needs more than the attention of this package")
                    self.whole = not has_plain_head(self.model, found)
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

    def _attends(self, found: Trace) -> bool:
        """Return whether the trial of an engine accepts the attention of this package (`kernels.choose`)."""
        hidden = has_window(self.model) and found.windows == {None}  # it exists only in the model's own masks
        return bool(found.windows) and bool(self.model._supports_attention_backend) and not hidden

    def _traced(self, T: int) -> Trace:
        with _passed_on(self.layers, self.twins):
            return traced(self.model, self.linears, self.layers, T, whole=self.whole)

    def _kept(self, number: int, first: Trace, traces: Sequence[Trace], remade: set[int]) -> Kept:
        """Return what a layer keeps, by what it keeps of rows of T, 2 T and 3 T tokens: token · T + pair · T² + …"""
        long, T = traces[-1], traces[0].T
        one, two, three = (sum(trace.kept[number].values()) for trace in traces)
        pair = max(0.0, (three - 2 * two + one) / (2 * T * T))
        reads = self._reads(number, first)

        def read_from(storages: Collection[int]) -> tuple[int, ...]:
            return tuple(sorted({number for path, number in reads.items() if long.reads.get(path) in storages}))

        return Kept(
            token=max(0, round((three - two) / T - 5 * pair * T)),
            pair=round(pair),
            scores=long.unequal[number] // long.T**2,
            masks=long.masks[number] // long.T**2,
            largest=max(long.kept[number].values(), default=0) // long.T,
            inputs=read_from(long.kept[number].keys() | remade),
            remade=read_from(remade),
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

    def _layer(self, number: int, first: Trace, kept: Mapping[str, Sequence[Kept]]) -> CountedLayer:
        in_layers = {id(module) for layer in self.layers for module in layer.modules()}
        if number < len(self.layers):
            modules, prefix = list(self.layers[number].modules()), f"{self.paths[number]}."
        else:
            modules, prefix = [each for each in self.model.modules() if id(each) not in in_layers], ""
        head, reads = self.model.get_output_embeddings(), self._reads(number, first)
        packed = Counter(shape_of(each) for each in modules if isinstance(each, FrozenLinear) and each is not head)
        parameters = {id(each): each.numel() for module in modules for each in module.parameters(recurse=False)}
        return CountedLayer(
            linears=tuple(
                CountedLinear(path.removeprefix(prefix), *shape_of(self.linears[path]), reads[path]) for path in reads
            ),
            matrices=tuple(Matrices(*shape, times) for shape, times in packed.items()),
            parameters=sum(parameters.values()),
            active=first.active[number] // first.T,
            has_state=any(isinstance(each, nn.Conv1d) for each in modules),
            kept={name: layers[number] for name, layers in kept.items()},
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

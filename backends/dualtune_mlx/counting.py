"""The shapes of a model without a memory formula, counted on mlx-lm's class without any weights.

MLX computes nothing before it is asked for numbers, so that a model of any size is built at once, and only its shapes
are read. What a layer keeps follows from the widths of its products, as in the models that have formulas.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from dualtune.base.errors import DualtuneError
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
from dualtune.model.dropout import input_of
from dualtune.model.experts import DOWN
from dualtune.model.spellings import complete
from dualtune_mlx.experts import NAMES, role_of, stack_path
from dualtune_mlx.families.classes import classes
from dualtune_mlx.kernels import attention
from dualtune_mlx.methods import DropoutSeeds, linear_layers, linear_shape
from dualtune_mlx.packing import accept_positions, packed_cache, separate_documents
from dualtune_mlx.routers import is_own_router

# ----------------------------------------------------------------------------------------------------------------------
# Which layers attend document by document, and which keep the scores of whole rows.
#
# The model reads a packed row of a few tokens. MLX evaluates nothing of it, so that neither weights nor time are
# needed.

LENGTHS = (8, 8)  # tokens of the documents
OUTSIDE = -1  # the number of the layer before any is called
UNREADABLE = (TypeError, AttributeError, ValueError, LookupError, RuntimeError)  # of a model that reads no packed rows


@dataclass(slots=True)
class Heads:
    """How many heads attend, by number of layer."""

    by_document: Counter[int] = field(default_factory=Counter)
    whole: Counter[int] = field(default_factory=Counter)


class _Noted(attention.Attention):
    """The attention of an engine, which notes how each call is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.layer = Heads(), OUTSIDE
        starts = accumulate(LENGTHS, initial=0)
        self.pieces = [
            attention.DocumentPiece(start, length, True) for start, length in zip(starts, LENGTHS, strict=False)
        ]

    def replaces(self, plain: Any) -> Any:
        def noted(queries: mx.array, *args: Any, **options: Any) -> mx.array:
            self.found.whole[self.layer] += queries.shape[1]
            return plain(queries, *args, **options)

        attend = super().replaces(noted)

        def call(queries: mx.array, *args: Any, **options: Any) -> mx.array:
            before = self.found.whole[self.layer]
            result = attend(queries, *args, **options)
            if self.found.whole[self.layer] == before:
                self.found.by_document[self.layer] += queries.shape[1]
            return result

        return call


def heads_of(model: nn.Module, layers: Sequence[nn.Module]) -> Heads | None:
    """Return the heads that attend in each layer; None for a model that does not read packed rows."""
    noted = _Noted()
    accept_positions(model)
    separate_documents(model, DropoutSeeds())
    attention.install(model, noted)
    segments = mx.array([[i for i, length in enumerate(LENGTHS, start=1) for _ in range(length)]])
    positions = mx.array([[i for length in LENGTHS for i in range(length)]])
    try:
        with _watched(layers, noted):
            model(mx.zeros(segments.shape, mx.int32), cache=packed_cache(model, segments, positions))
    except UNREADABLE:
        return None
    # A model may call the parts of its layers, and not the layers.
    for counts in (noted.found.by_document, noted.found.whole):
        own = -(-counts.pop(OUTSIDE, 0) // len(layers))
        counts.update(dict.fromkeys(range(len(layers)), own))
    return noted.found


@contextlib.contextmanager
def _watched(layers: Sequence[nn.Module], noted: _Noted) -> Iterator[None]:
    """Note which layer computes, in the block."""
    kinds = [type(layer) for layer in layers]

    def watching(kind: type[nn.Module], number: int) -> type[nn.Module]:
        def call(self: nn.Module, *args: Any, **options: Any) -> Any:
            noted.layer = number
            return kind.__call__(self, *args, **options)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]

        return type(kind.__name__, (kind,), {"__call__": call})

    try:
        for number, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            layer.__class__ = watching(kind, number)
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind


# ----------------------------------------------------------------------------------------------------------------------
ERRORS = (ImportError, TypeError, AttributeError, ValueError, LookupError, ArithmeticError, DualtuneError)
# How many experts a token is sent to, as modules and configs call it.
EXPERTS_OF_A_TOKEN = (
    "num_experts_per_tok", "top_k", "top_k_experts", "moe_topk", "moe_k", "moe_top_k", "num_experts_per_token",
)  # fmt: skip
# Measured on the CPU, with documents in rows of their own: how often what its products show is what a layer with a
# decaying state keeps (the gated delta rule less, which is computed in chunks), and how many numbers for each score an
# attention with a soft cap or sinks.
DECAY, WITH_DECAY, DELTA_RULE, WITH_DELTA_RULE = "A_log", 6, "linear_key_head_dim", 5
SOFT_CAP, SINKS, CHANGED_SCORES = "attn_logit_softcapping", "sinks", 2
PASSES = "loop_num"  # how often each layer computes (IQuest-LoopCoder)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


def count(config: Mapping[str, Any]) -> Counted:
    """Count the shapes of the model of a config.json. UnknownShape if mlx-lm cannot build its class."""
    try:
        return _count({**config, **complete(config, {})})
    except ERRORS as error:
        raise uncountable(config, error) from error


def _count(keys: dict[str, Any]) -> Counted:
    model_class, args_class = classes(keys)
    model: nn.Module = cast(Any, model_class)(cast(Any, args_class).from_dict(keys))
    text = keys["text_config"] if isinstance(keys.get("text_config"), dict) else keys
    if keys.get("tie_word_embeddings", text.get("tie_word_embeddings", True)):
        for module in cast(list[nn.Module], model.modules()):
            with contextlib.suppress(*ERRORS):  # Gemma 3 takes its head away when it is given files without one
                cast(Any, module).sanitize({})
    modules = dict(model.named_modules())
    paths = {id(module): path for path, module in modules.items()}
    layers = [layer for layer in cast(Any, model).layers if layer is not None]
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    outside = {path: module for path, module in modules.items() if id(module) not in in_layers}
    head = next((path for path in linear_layers(model) if path in outside and path.endswith("lm_head")), None)
    embedding = next(module for module in outside.values() if isinstance(module, nn.Embedding))
    vocab, hidden = embedding.weight.shape
    heads = _heads(text)
    kinds: dict[str, CountedLayer] = {}
    attending = heads_of(model, layers)
    counted = [
        _layer(dict(layer.named_modules()), text, hidden, heads=_attending(attending, number, text))
        for number, layer in enumerate(layers)
    ]
    return Counted(
        model_class=f"{type(model).__module__.rsplit('.', 1)[-1]}.{type(model).__name__}",
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        width=heads * int(text.get("head_dim") or (hidden // heads if heads else 0)),
        fused_attention=True,
        fused_loss=True,
        paths=tuple(paths[id(layer)] for layer in layers),
        by_layer=tuple(kinds.setdefault(repr(layer), layer) for layer in counted),
        outside=_layer(outside, text, hidden, head),
        head=head,
    )


def _layer(
    modules: Mapping[str, nn.Module], text: Mapping[str, Any], hidden: int, head: str | None = None,
    heads: tuple[int, int] = (0, 0),
) -> CountedLayer:  # fmt: skip
    """Return what there is in a layer, or with its `head` in what is in none.

    `heads`: those whose scores of whole rows are kept, and those of documents.
    """
    linears = {path: linear_shape(m) for path, m in modules.items() if type(m) is nn.Linear}
    experts = [cast(mx.array, m.weight).shape for m in modules.values() if isinstance(m, SwitchLinear)]
    sent = _experts_of_a_token(modules, text)
    groups = list(dict.fromkeys((input_of(path), in_) for path, (_, in_) in linears.items()))
    plain = [shape for path, shape in linears.items() if path != head]
    routed = [shape[1:] for shape in experts for _ in range(sent)]
    used = [*plain, *routed]
    numbers = max(0, 2 * sum(out for out, _ in plain) - 2 * hidden) * int(text.get(PASSES, 1))
    if any(DECAY in module for module in modules.values()):
        numbers *= WITH_DELTA_RULE if DELTA_RULE in text else WITH_DECAY
    numbers += 2 * sum(out for out, _ in routed)
    numbers += sent * hidden * bool(experts)  # a token's copy for each of its experts
    widest = max((out for out, _ in used), default=0) * (sent if experts else 1)
    packed = Counter(shape for path, shape in linears.items() if path != head)
    for number, out, in_ in experts:
        packed[out, in_] += number
    # Attention keeps scores of whole rows, or those of documents that are no longer than a chunk.
    whole, by_document = heads
    changes = bool(text.get(SOFT_CAP)) or any(SINKS in module for module in modules.values())
    scores = whole * (CHANGED_SCORES if changes else 1)
    kept_by_variant = {
        variant(c, code): SavedTensors(
            c * numbers, c * scores, c * widest, (), (), c * by_document, c * (scores - whole)
        )
        for c in (4, 2)
        for code in CODES
    }
    own = [array for module in modules.values() for _, array in _own_arrays(module)]
    adaptable = [
        CountedLinear(path, out, in_, groups.index((input_of(path), in_))) for path, (out, in_) in linears.items()
    ]
    adaptable += [
        CountedLinear(stack_path(path), out, in_, len(groups) + (role_of(path) == DOWN), number, sent)
        for path, module in modules.items()
        if isinstance(module, SwitchLinear) and path.rpartition(".")[2] in NAMES
        for number, out, in_ in [cast(mx.array, module.weight).shape]
    ]
    # Their input is that of the experts, of which each adapter of a router keeps one more here: too much, but little.
    adaptable += [
        CountedLinear(path, *linear_shape(m), len(groups) + 2) for path, m in modules.items() if is_own_router(path, m)
    ]
    return CountedLayer(
        linears=tuple(adaptable),
        matrices=tuple(Matrices(out, in_, number) for (out, in_), number in packed.items()),
        parameters=sum(array.size for array in own),
        active=sum(out * in_ for out, in_ in used),
        has_state=any(isinstance(module, nn.Conv1d) for module in modules.values()),
        kept=kept_by_variant,
    )


def _attending(attended: Heads | None, number: int, text: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many heads of a layer keep the scores of whole rows, and how many those of documents."""
    if attended is None:
        return (0, _heads(text))
    if text.get(SOFT_CAP) and not attended.whole[number]:  # in code of its own
        return (_heads(text), 0)
    return (attended.whole[number], attended.by_document[number])


def _heads(text: Mapping[str, Any]) -> int:
    return next((int(text[name]) for name in HEADS if isinstance(text.get(name), int)), 0)


def _own_arrays(module: nn.Module) -> list[tuple[str, mx.array]]:
    own = {name: value for name, value in module.items() if isinstance(value, mx.array) and not name.startswith("_")}
    return cast(list[tuple[str, mx.array]], tree_flatten(own))


def _experts_of_a_token(modules: Mapping[str, nn.Module], text: Mapping[str, Any]) -> int:
    for name in EXPERTS_OF_A_TOKEN:
        numbers = [text.get(name), *(getattr(module, name, None) for module in modules.values())]
        if number := next((value for value in numbers if type(value) is int and value > 0), 0):
            return number
    return 1

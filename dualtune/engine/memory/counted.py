"""The shapes of models without a formula: counted by a backend on the model that it would load, without its weights.

`shape_from` takes the formula where there is one. What a backend has counted is kept in the cache, so that only the
first question about a model imports a framework.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple

from dualtune.base.errors import DualtuneError
from dualtune.base.files import cache_dir, write_file
from dualtune.base.versions import versions_of
from dualtune.engine.card import card_of
from dualtune.engine.memory.shapes import Decoder, UnknownShape, decoder_of
from dualtune.model.experts import is_stack, members

FORMAT = 8  # of the files in the cache


class CountedLinear(NamedTuple):
    """A linear layer that can be adapted, or a stack of those of experts."""

    name: str  # its path in the layer, or in the model if it is in none
    out: int
    in_: int
    reads: int  # which input it reads: those with the same number read the same tensor
    number: int = 1  # of experts in the stack
    sent: int = 1  # how many of them a token is sent to

    def paths(self, prefix: str) -> list[str]:
        """Return the module paths of the layers, in a layer of the model with this path and a dot."""
        path = f"{prefix}{self.name}"
        return members(path, self.number) if is_stack(path) else [path]


class Matrices(NamedTuple):
    """Matrices of one shape, which a quantized base packs."""

    out: int
    in_: int
    number: int


class SavedTensors(NamedTuple):
    """What a layer keeps for the backward pass besides what its adapters keep, in bytes."""

    token: int  # for each token
    pair: int  # for each token and each token of its row: plain attention
    largest: int  # the largest single tensor, for each token
    inputs: tuple[int, ...]  # of linear layers (`CountedLinear.reads`) that are kept anyway
    recomputed: tuple[int, ...]  # …and those of them that are not, because they are computed again
    # Scores for each pair: what torch on a CPU keeps in the place of `pair`, of heads that are not all alike; what MLX
    # keeps of each document that is no longer than a chunk.
    scores: int = 0
    masks: int = 0  # of `pair`: what has no gradient of its own


@dataclass(frozen=True, eq=False)
class CountedLayer:
    """A decoder layer as a backend has counted it."""

    linears: tuple[CountedLinear, ...]
    matrices: tuple[Matrices, ...]
    parameters: int  # stored
    active: int  # weights that a token is multiplied with: of experts only those that it is sent to
    has_state: bool  # whether documents in a packed row are computed in rows of their own
    kept: Mapping[str, SavedTensors]  # by `variant`

    @property
    def widest(self) -> int:
        return max((linear.out for linear in self.linears), default=0)

    @property
    def experts(self) -> int:
        """The number of its experts, if they are a stack; 0: it has none."""
        return max((linear.number for linear in self.linears if is_stack(linear.name)), default=0)


@dataclass(frozen=True, eq=False)
class Counted:
    """A model whose shapes are counted. The names are those of `Decoder`."""

    model_class: str
    hidden: int
    vocab: int
    heads: int
    width: int  # of all query heads together
    fused_attention: bool  # whether the backend's own attention computes it, which keeps no scores
    fused_loss: bool  # whether the logits are the output head's: they are then never in memory at once
    paths: tuple[str, ...]  # of the layers
    by_layer: tuple[CountedLayer, ...]  # equal layers are one object
    outside: CountedLayer  # embedding, output head and whatever else is in no layer
    head: str | None  # the path of an output head of its own

    @property
    def layers(self) -> int:
        return len(self.by_layer)

    @cached_property
    def num_parameters(self) -> int:
        """What is stored."""
        return self.outside.parameters + sum(layer.parameters for layer in self.by_layer)

    @cached_property
    def active_parameters(self) -> int:
        """The weights of all layers that a token is multiplied with."""
        return sum(layer.active for layer in self.by_layer)

    def linears(self) -> dict[str, CountedLinear]:
        """Return the linear layers of all layers by their path in it: of those with one path, any."""
        return {linear.name: linear for layer in dict.fromkeys(self.by_layer) for linear in layer.linears}

    def places(self) -> dict[str, tuple[int, str]]:
        """Return the number of the layer of each linear layer, and its path in it, by module path."""
        layers = enumerate(zip(self.paths, self.by_layer, strict=True))
        return {
            module: (i, linear.name)
            for i, (path, layer) in layers
            for linear in layer.linears
            for module in linear.paths(f"{path}.")
        }

    def modules(self) -> dict[str, tuple[int, int]]:
        """Return the linear layers that can be adapted: module path -> (out, in)."""
        shapes = {linear.name: (linear.out, linear.in_) for linear in self.outside.linears}
        for path, layer in zip(self.paths, self.by_layer, strict=True):
            for linear in layer.linears:
                shapes |= dict.fromkeys(linear.paths(f"{path}."), (linear.out, linear.in_))
        return shapes


Shape = Decoder | Counted


# Which code computes a layer: the backend's pieces, nothing but the framework's own code, the pieces where the model's
# own weights are trained, or the pieces compiled.
Code = Literal["", "plain", "trained", "compiled"]
CODES: tuple[Code, ...] = ("", "plain", "trained", "compiled")


def stored_bytes(layer: CountedLayer, item_bytes: int, matrix_bytes: Callable[[int, int], int] | None) -> int:
    """Return the bytes of a layer's weights. `matrix_bytes`: of a packed matrix (out, in); None: all are plain."""
    if matrix_bytes is None:
        return item_bytes * layer.parameters
    plain = layer.parameters - sum(m.out * m.in_ * m.number for m in layer.matrices)
    return item_bytes * plain + sum(m.number * matrix_bytes(m.out, m.in_) for m in layer.matrices)


def uncountable(config: Mapping[str, Any], error: Exception) -> UnknownShape:
    """Return the error for a model whose class a backend cannot build or run."""
    reason = (str(error).strip().splitlines() or [""])[0][:200]
    return UnknownShape(
        f"its model_type is {config.get('model_type')}, for which there is no formula, and its shapes cannot be "
        f"counted ({type(error).__name__}: {reason})"
    )


def variant(item_bytes: int, code: Code = "") -> str:
    """Return the key of `CountedLayer.kept`."""
    return f"{8 * item_bytes} bits {code}".strip()


def shape_from(config: Mapping[str, Any], backend: str) -> Shape:
    """Return the shape of the model of a config.json: by formula, or as the backend counts it.

    UnknownShape if there is no formula, and the backend cannot count it or is not installed.
    """
    try:
        decoder = decoder_of(config)
    except UnknownShape as error:
        return _counted(config, backend, error)
    if "text_config" not in config:
        return decoder
    # The class around a text model may tie its head, and need other code than the text model alone.
    with contextlib.suppress(UnknownShape):
        return _counted(config, backend, UnknownShape("it is part of a model with other parts"))
    return decoder


def _counted(config: Mapping[str, Any], backend: str, why: UnknownShape) -> Counted:
    card = card_of(backend)
    if card.memory is None or not card.memory.count:
        raise why
    if not card.package.is_installed:
        raise UnknownShape(
            f"{why}; {card} counts the shapes of any other model, but is not installed: {card.package.command}"
        )
    file = _file(config, backend)
    if (cached := _read(file)) is not None:
        return cached
    try:
        counted: Counted = resolve_name(card.memory.count)(config)
    except ImportError as error:
        raise UnknownShape(f"{why}, and its shapes cannot be counted: {error}. Run: {card.package.command}") from error
    _write(file, counted)
    return counted


# --- the cache --------------------------------------------------------------------------------------------------------


def _file(config: Mapping[str, Any], backend: str) -> Path:
    """Return the file for what this version of the backend, and of its packages, counts for a config."""
    package = card_of(backend).package
    versions = versions_of(("dualtune", *package.recorded, *package.detected))
    key = json.dumps([FORMAT, backend, versions, dict(config)], sort_keys=True, default=str)
    return cache_dir() / "shapes" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _write(file: Path, counted: Counted) -> None:
    with contextlib.suppress(OSError, DualtuneError):  # a cache that cannot be written
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(_as_json(counted)))


def _as_json(counted: Counted) -> dict[str, Any]:
    kinds = list(dict.fromkeys(counted.by_layer))
    own = {field.name: getattr(counted, field.name) for field in fields(counted) if field.name != "by_layer"}
    layers = {"kinds": [asdict(kind) for kind in kinds], "order": [kinds.index(layer) for layer in counted.by_layer]}
    return own | {"outside": asdict(counted.outside)} | layers


def _read(file: Path) -> Counted | None:
    """Return what the file says; None if it is not there or damaged."""
    try:
        table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kinds: list[CountedLayer] = [_layer(kind) for kind in table.pop("kinds")]
        order: list[int] = table.pop("order")
        outside, paths = _layer(table.pop("outside")), tuple(table.pop("paths"))
        return Counted(by_layer=tuple(kinds[i] for i in order), outside=outside, paths=paths, **table)
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _layer(table: Mapping[str, Any]) -> CountedLayer:
    kept_by_variant = {
        name: SavedTensors(token, pair, largest, tuple(inputs), tuple(recomputed), *optional)
        for name, (token, pair, largest, inputs, recomputed, *optional) in table["kept"].items()
    }
    return CountedLayer(
        linears=tuple(CountedLinear(*values) for values in table["linears"]),
        matrices=tuple(Matrices(*values) for values in table["matrices"]),
        parameters=table["parameters"],
        active=table["active"],
        has_state=table["has_state"],
        kept=kept_by_variant,
    )

"""Several adapters on one loaded base: which one answers is which tensors the engine holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.adapter.formats.directory import Adapter, adapter_directory, read_adapter
from dualtune.adapter.spec import AdapterSpec, Tensors, modules_of, parse_name
from dualtune.backend import Backend
from dualtune.backend.generation_cache import GenerationCache
from dualtune.errors import ConfigError
from dualtune.evaluate.inference import LoadedModel, inference_spec, load_adapter, load_model

BASE = "base"  # the name of the model without an adapter


class AdapterSet:
    """One model with any number of adapters, by name, and a cache of what each has read.

    `names` begins with "base". Adapters of different ranks, modules and scales share one engine: see `common_spec`.
    """

    def __init__(self, model: LoadedModel, adapters: Mapping[str, Adapter], spec: AdapterSpec | None = None) -> None:
        self.model = model
        self.names = (BASE, *adapters)
        self._caches = {name: GenerationCache() for name in self.names}
        self._tensors: dict[str, Tensors] = {}
        if spec is not None:
            empty = {name: np.zeros_like(value) for name, value in model.engine.adapter_state().items()}
            fitted = {name: fit(adapter, spec, empty) for name, adapter in adapters.items()}
            self._tensors = {BASE: model.engine.neutral_state()} | fitted
        self._current: str | None = None

    def use(self, name: str) -> GenerationCache:
        """Let the model compute with an adapter, or "base" without one. Return the cache of what it has read.

        ConfigError for an unknown name.
        """
        if name not in self.names:
            raise ConfigError(f"adapter: got '{name}', allowed: {', '.join(self.names)}")
        if self._tensors and name != self._current:
            self.model.engine.load_adapter_state(self._tensors[name])
        self._current = name
        return self._caches[name]


def load_adapter_set(backend: Backend, name: str, directories: Mapping[str, Path], **options: Any) -> AdapterSet:
    """Load a model once, with the adapters in these directories by name. `options` are those of `load_model`.

    The chat template is that of the first adapter. ConfigError for an adapter that does not fit the model.
    """
    if not directories:
        return AdapterSet(load_model(backend, name, **options), {})
    adapters = {label: read_adapter(adapter_directory(path)) for label, path in directories.items()}
    spec = common_spec([*adapters.values()])
    model = load_model(backend, name, next(iter(directories.values())), spec=spec, **options)
    state = model.engine.adapter_state()
    for adapter in adapters.values():
        if not all(_fits(tensor, state.get(tensor_name), spec.rank) for tensor_name, tensor in adapter.tensors.items()):
            load_adapter(model.engine, adapter, name)  # says which tensors do not fit
    return AdapterSet(model, adapters, spec)


def _fits(tensor: np.ndarray, into: np.ndarray | None, rank: int) -> bool:
    if into is None or tensor.ndim != into.ndim:
        return False
    sizes = zip(tensor.shape, into.shape, strict=True)
    return all(mine == its or (its == rank and mine < rank) for mine, its in sizes)


def common_spec(adapters: Sequence[Adapter]) -> AdapterSpec:
    """Return a spec that all adapters fit in: the largest rank, and the modules of all.

    The scale is that of the adapters if they agree; otherwise it is 1, and `fit` multiplies B by each one's own.
    """
    first = inference_spec(adapters[0])
    rank = max(adapter.spec.rank for adapter in adapters)
    scales = {adapter.spec.scale for adapter in adapters}
    scale = scales.pop() if len(scales) == 1 else 1.0
    modules = sorted({module for adapter in adapters for module in modules_of(adapter.tensors)})
    return AdapterSpec(rank, scale * rank, 0.0, tuple(modules), method=first.method)


def fit(adapter: Adapter, spec: AdapterSpec, empty: Tensors) -> Tensors:
    """Return the tensors of an adapter as those of a spec with at least its rank and modules: the same function.

    Rows of A and columns of B beyond its rank are 0, and so are the modules that it does not adapt. `empty`: zeros in
    the shapes of the spec. Where the scales differ, scale · B A changes by the rounding of B.
    """
    factor = np.float32(adapter.spec.scale / spec.scale)
    fitted = dict(empty)
    for name, tensor in adapter.tensors.items():
        target = np.zeros_like(empty[name])
        parsed = parse_name(name)
        scaled = tensor * factor if parsed and parsed[1] == "B" else tensor
        target[tuple(slice(size) for size in tensor.shape)] = scaled
        fitted[name] = target
    return fitted

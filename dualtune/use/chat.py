"""Chat with a model: adapters that share one loaded base, and conversations whose answers compute only what is new."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dualtune.base.errors import ConfigError, DataError
from dualtune.data.chat.conversations import Message
from dualtune.data.sources.rows import RowError
from dualtune.data.tokens.new_tokens import with_new_tokens
from dualtune.engine.backend import Backend
from dualtune.model.adapter import AdapterSpec, Tensors, modules_of
from dualtune.model.base_model import resolve_model
from dualtune.model.beside import BesideAdapter
from dualtune.model.formats.chat_template import mismatch
from dualtune.model.formats.directory import Adapter, adapter_directory, read_adapter
from dualtune.model.places import in_names_of
from dualtune.train.generation.caches import TextCaches
from dualtune.train.generation.inference import (
    LoadedModel,
    fit,
    fits_in,
    inference_spec,
    load_adapter,
    load_model,
    load_tokenizer,
    stream_text,
)
from dualtune.train.generation.sampling import Sampling

# ----------------------------------------------------------------------------------------------------------------------
# Several adapters on one loaded base: which one answers is which tensors the engine holds.

BASE = "base"  # the name of the model without an adapter


class AdapterSet:
    """One engine with any number of adapters, by name, each with its chat template; `caches`: of texts they have read.

    `names` begins with "base". Adapters of different ranks, modules and scales share one engine: see `common_spec`.
    """

    def __init__(
        self, models: Mapping[str, LoadedModel], adapters: Mapping[str, Adapter], spec: AdapterSpec | None = None
    ) -> None:
        """`models`, by name: one engine, and the tokenizer of each."""
        self.models, self.adapters, self.engine = models, adapters, models[BASE].engine
        self.names = (BASE, *adapters)
        self.caches = TextCaches()
        self._tensors: dict[str, Tensors] = {}
        if spec is not None:
            neutral = self.engine.neutral_state()
            fitted = {name: fit(adapter, spec, neutral) for name, adapter in adapters.items()}
            self._tensors = {BASE: neutral} | fitted
        self._current: str | None = None

    def use(self, name: str) -> None:
        """Let the engine compute with an adapter, or "base" without one. ConfigError for an unknown name."""
        if name not in self.names:
            raise ConfigError(f"adapter: got '{name}', allowed: {', '.join(self.names)}")
        if self._tensors and name != self._current:
            self.engine.load_adapter_state(self._tensors[name])
        self._current = name


def load_adapter_set(
    backend: Backend, name: str, directories: Mapping[str, Path], *,
    dtype: str = "auto", quantization: str = "auto", template: str = "auto",
) -> AdapterSet:  # fmt: skip
    """Load a model once, with the adapters in these directories by name. The options are those of `load_model`.

    With the template "auto", each adapter has that of its training, and the base its own, or the first one of the
    adapters' if it has none. ConfigError for an adapter that does not fit the model.
    """
    directories = {label: adapter_directory(path) for label, path in directories.items()}
    adapters = {label: read_adapter(path) for label, path in directories.items()}
    tokens = {adapter.new_tokens for adapter in adapters.values()}
    if len(tokens) > 1:
        raise ConfigError("the adapters were trained with different data.new_tokens: load them one at a time")
    new_tokens = next(iter(tokens), ())
    model_dir = with_new_tokens(resolve_model(name), new_tokens)
    adapters = {label: in_names_of(adapter, model_dir) for label, adapter in adapters.items()}
    spec = common_spec([*adapters.values()]) if adapters else None
    base = load_model(
        backend, name, dtype=dtype, quantization=quantization, template=template, spec=spec, new_tokens=new_tokens
    )
    if spec is None:
        return AdapterSet({BASE: base}, {})
    shapes = base.engine.adapter_shapes
    models: dict[str, LoadedModel] = {}
    for label, adapter in adapters.items():
        if not all(fits_in(tensor.shape, shapes.get(key), spec.rank) for key, tensor in adapter.tensors.items()):
            load_adapter(base.engine, adapter, name)  # says which tensors do not fit
        models[label] = _with_template(base, model_dir, adapter, directories[label], template)
    if base.tokenizer.template is None and template == "auto":
        first = next((model for model in models.values() if model.tokenizer.template is not None), base)
        base = replace(base, tokenizer=first.tokenizer)
    return AdapterSet({BASE: base} | models, adapters, spec)


def _with_template(base: LoadedModel, model_dir: Path, adapter: Adapter, directory: Path, template: str) -> LoadedModel:
    """Return the model with the tokenizer of an adapter, which is the base's if they have the same template."""
    if template != "auto" or adapter.template_hash in (None, base.tokenizer.template_hash):
        return replace(base, note=mismatch(adapter.template_hash, base.tokenizer.template_hash))
    tokenizer, note = load_tokenizer(model_dir, adapter, directory, template)
    return replace(base, tokenizer=tokenizer, note=note)


def common_spec(adapters: Sequence[Adapter]) -> AdapterSpec:
    """Return a spec that all adapters fit in: the largest rank, the modules of all, and what is trained beside any.

    The scale is that of the adapters if they agree; otherwise it is 1, and `fit` multiplies B by each one's own.
    ConfigError if they were trained by different methods, or with rows of different tokens.
    """
    specs = [*map(inference_spec, adapters)]
    if len(methods := sorted({adapter.spec.method for adapter in adapters})) > 1:
        raise ConfigError(
            f"adapter: got adapters of {' and '.join(methods)}, but one loaded model has adapters of one method. Load "
            "them one after another, or merge one: dualtune adapter merge"
        )
    each = [(adapter.spec, module) for adapter in adapters for module in modules_of(adapter.tensors)]
    rank = max(spec.rank_of(module) for spec, module in each)
    scales = {spec.scale_of(module) for spec, module in each}
    scale = scales.pop() if len(scales) == 1 else 1.0
    modules = sorted({module for _, module in each})
    return AdapterSpec(
        rank, scale * rank, 0.0, tuple(modules), method=specs[0].method, beside=_common([s.beside for s in specs])
    )


def _common(each: Sequence[BesideAdapter]) -> BesideAdapter:
    rows = {beside.rows for beside in each if beside.rows}
    if len(rows) > 1:
        raise ConfigError(
            "adapter: got adapters with trained rows of different tokens, but one loaded model has those of one list. "
            "Load them one after another, or merge one: dualtune adapter merge"
        )
    modules = sorted({module for beside in each for module in beside.modules})
    tables = sorted({table for beside in each for table in beside.row_modules})
    return BesideAdapter(tuple(modules), rows.pop() if rows else (), tuple(tables))


# ----------------------------------------------------------------------------------------------------------------------
# A conversation.


class Chat:
    """A conversation with one adapter of a set, or with the base."""

    def __init__(self, adapters: AdapterSet, name: str, sampling: Sampling, system: str | None = None) -> None:
        self.messages: list[Message] = []
        self._adapters, self._sampling, self._system = adapters, sampling, system
        self.switch(name)
        self.reset()

    def switch(self, name: str) -> None:
        """Let another adapter of the set answer from now on. ConfigError if it has no chat template."""
        if self._adapters.models[name].tokenizer.template is None:
            subject = "the model" if name == BASE else f"the adapter '{name}'"
            raise ConfigError(
                f"{subject} has no chat template, so it was not trained to chat. Give --template FILE, or continue "
                "a text: dualtune generate --prompt TEXT"
            )
        self.name = name

    def reset(self) -> None:
        """Forget the conversation, but not the system message."""
        self.messages = [] if self._system is None else [Message("system", self._system)]

    def ask(self, text: str) -> Generator[str]:
        """Yield the answer to a user's message piece by piece, and remember both.

        An answer that is not read to its end is remembered as far as it was read. DataError, and nothing is remembered,
        if the template refuses the conversation.
        """
        model, sampling = self._adapters.models[self.name], self._sampling
        messages = [*self.messages, Message("user", text)]
        try:
            prompt = model.tokenizer.encode_chat(messages)
        except RowError as error:
            raise DataError(f"the conversation: {error}") from error
        self._adapters.use(self.name)
        pieces = stream_text(model, prompt, sampling, cache=self._adapters.caches.cache_for(self.name, prompt))
        answer = ""
        try:
            for piece in pieces:
                answer += piece
                yield piece
        finally:
            if answer:
                self.messages = [*messages, Message("assistant", answer)]

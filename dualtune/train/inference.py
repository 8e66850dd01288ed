"""Using a model with its adapter: loading it, and generating text.

Which token comes next is decided here, in NumPy, so that both backends sample alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualtune import interrupt
from dualtune.adapter.directory import Adapter, read_adapter
from dualtune.adapter.spec import LoraSpec, modules_of
from dualtune.backend import Backend, Engine, LoadRequest
from dualtune.base_model import resolve_model
from dualtune.data.formats import Example
from dualtune.data.tokenizer import Tokenizer
from dualtune.errors import ConfigError

BASE_ONLY = LoraSpec(rank=1, alpha=1.0, dropout=0.0, targets=())


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model, with an adapter or without."""

    engine: Engine
    tokenizer: Tokenizer


def load_model(
    backend: Backend,
    name: str,
    adapter: Path | None = None,
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    template: str = "auto",
    kernels: str = "auto",
) -> Model:
    """Load a model by directory or hub id, with the adapter of a directory in any layout, if one is given.

    An adapter that was trained without the chat template is used without it, unless `template` says otherwise.
    """
    start = read_adapter(adapter) if adapter else None
    spec = BASE_ONLY
    if start is not None:
        spec = LoraSpec(start.spec.rank, start.spec.alpha, 0.0, tuple(modules_of(start.tensors)))
        if template == "auto" and _training(start.metadata).get("template") == "none":
            template = "none"
    model_dir = resolve_model(name)
    tokenizer = Tokenizer(model_dir, template)
    engine = backend.load(LoadRequest(model_dir, dtype, quantization, "pretrained", spec, 0.0, seed=0, kernels=kernels))
    if start is not None:
        load_adapter(engine, start, name)
    return Model(engine, tokenizer)


def load_adapter(engine: Engine, adapter: Adapter, model_name: str) -> None:
    """Put an adapter into an engine that was loaded for its modules. ConfigError if it does not fit the model."""
    try:
        engine.load_adapter_state(adapter.tensors)
    except ValueError as error:
        raise ConfigError(f"the adapter does not fit the model {model_name}: {error}") from error


def _training(metadata: dict[str, Any]) -> dict[str, Any]:
    return metadata.get("training") or {}


def stream_text(
    model: Model, prompt: np.ndarray, *, max_tokens: int, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
) -> Iterator[str]:
    """Yield the continuation of a prompt (token ids [T]) piece by piece. Temperature 0 is greedy."""
    choose = chooser(max_tokens, model.tokenizer.stop_ids, temperature=temperature, top_p=top_p, seed=seed)
    ids: list[int] = prompt[-1:].tolist()  # a SentencePiece tokenizer drops the space that begins a text
    shown = model.tokenizer.decode(ids)
    for token in model.engine.generate(prompt, choose=choose):
        interrupt.poll()
        ids.append(token)
        text = model.tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may be spread over several tokens
            yield text[len(shown) :]
            shown = text
    yield model.tokenizer.decode(ids)[len(shown) :]


def chooser(
    max_tokens: int, stop_ids: frozenset[int], *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
) -> Callable[[np.ndarray], int | None]:
    """A function from logits float32 [V] to the next token id, or None to stop.

    Nucleus sampling as in Holtzman et al., arXiv 1904.09751: the smallest set of tokens whose probability reaches
    `top_p`.
    """
    rng = np.random.default_rng([seed, 3])
    produced = 0

    def choose(logits_V: np.ndarray) -> int | None:
        nonlocal produced
        if produced == max_tokens:
            return None
        produced += 1
        token = int(np.argmax(logits_V)) if temperature == 0 else _sample(logits_V, temperature, top_p, rng)
        return None if token in stop_ids else token

    return choose


def _sample(logits_V: np.ndarray, temperature: float, top_p: float, rng: np.random.Generator) -> int:
    scaled = logits_V.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    kept = order[: int(np.searchsorted(np.cumsum(probs[order]), top_p)) + 1]
    cumulative = np.cumsum(probs[kept])
    return int(kept[np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")])


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: str
    expected: str
    got: str


def answer(model: Model, example: Example, max_tokens: int = 256) -> Answer:
    """Generate the last answer of an example greedily."""
    tokenizer = model.tokenizer
    if tokenizer.template is not None and example.messages:
        *before, last = example.messages
        rendered = tokenizer.render(before, tools=example.tools, add_generation_prompt=True)
        ids = tokenizer.encode(rendered, special=False)
        shown, expected = before[-1].content, last.content
    else:
        assert example.prompt is not None and example.completion is not None
        shown, expected = example.prompt, example.completion
        ids = tokenizer.encode(shown, special=True)
    return Answer(shown, expected, "".join(stream_text(model, ids, max_tokens=max_tokens)))

"""Inference: loading a model with its adapter, and continuing one text piece by piece."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DataError
from dualtune.base.files import expanded
from dualtune.data.chat.examples import Example
from dualtune.data.chat.template import is_name
from dualtune.data.tokens.control_tokens import Policy
from dualtune.data.tokens.new_tokens import with_new_tokens
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Backend, Engine, LoadRequest, SharedBase
from dualtune.engine.decoding import GenerationCache
from dualtune.model.adapter import AdapterSpec, Tensors, is_of_base, modules_of, parse_name
from dualtune.model.base_model import resolve_model
from dualtune.model.beside import NewToken, beside_of
from dualtune.model.config_file import position_table_size, read_config
from dualtune.model.formats.chat_template import NONE, TEMPLATE_FILE, mismatch
from dualtune.model.formats.directory import Adapter, adapter_directory, read_adapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.places import in_names_of
from dualtune.train.generation.sampling import Chooser, Penalties, Sampling

MOST_DECODED, FEWEST_DECODED = 64, 16  # tokens, of which the last ones are new
BASE_ONLY = AdapterSpec(rank=1, alpha=1.0, dropout=0.0, targets=())


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model, with an adapter or without."""

    engine: Engine
    tokenizer: Tokenizer
    note: str | None = None  # if the chat template differs from the training's
    positions: int | None = None  # the size of the position table, if it has one


def load_model(
    backend: Backend,
    name: str,
    adapter: Path | None = None,
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    template: str = "auto",
    special_tokens_in_text: Policy = "text",
    template_variables: Mapping[str, Any] | None = None,
    system: Literal["fold", "refuse"] = "fold",
    kernels: str = "auto",
    init: str = "pretrained",
    seed: int = 0,
    spec: AdapterSpec | None = None,
    new_tokens: Sequence[NewToken] = (),
    shared_base: SharedBase | None = None,
) -> LoadedModel:
    """Load a model by directory or hub id, with an adapter directory of any layout if one is given.

    `template` is as in data.template, but "auto" is the template of the adapter's training, if known. With `init`
    "random", the weights are those that training with the same seed starts from on this backend. With a `spec` and no
    adapter, the engine is made for it, and the caller loads the tensors. `new_tokens`: those that the training added;
    an adapter says them itself. `shared_base`: where the base model stays for
    the next engine.
    """
    # The adapter is read first: a damaged one is an error before a model is downloaded for it.
    adapter = adapter_directory(adapter) if adapter else None
    start = read_adapter(adapter) if adapter else None
    new_tokens = new_tokens or (start.new_tokens if start else ())
    model_dir = with_new_tokens(resolve_model(name, weights=init == "pretrained"), new_tokens)
    if start is not None and init == "pretrained":
        start = in_names_of(start, model_dir)
    spec = spec or (inference_spec(start) if start else BASE_ONLY)
    tokenizer, note = load_tokenizer(
        model_dir, start, adapter, template, special_tokens_in_text, template_variables or {}, system
    )
    engine = backend.load(
        LoadRequest(
            model_dir, dtype, quantization, init, spec, OptimizerSpec(), seed=seed, kernels=kernels,
            shared_base=shared_base,
        )
    )  # fmt: skip
    if start is not None:
        load_adapter(engine, start, name)
    return LoadedModel(engine, tokenizer, note, position_table_size(read_config(model_dir)))


def load_tokenizer(
    model_dir: Path,
    adapter: Adapter | None,
    directory: Path | None,
    template: str,
    policy: Policy = "text",
    variables: Mapping[str, Any] = MappingProxyType({}),
    system: Literal["fold", "refuse"] = "fold",
) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer of a model for an adapter and its directory, and a note if its template is another one."""
    if adapter is None or directory is None:
        return Tokenizer(model_dir, template, policy, variables, system), None
    template = _template_for(adapter, directory, template)
    is_own = template == str(directory / TEMPLATE_FILE)
    variables = {} if is_own else variables  # its own has those of the training
    tokenizer = Tokenizer(model_dir, template, policy, variables, system)
    return tokenizer, None if is_own else mismatch(adapter.template_hash, tokenizer.template_hash)


def inference_spec(adapter: Adapter) -> AdapterSpec:
    """Return what an engine needs to know of an adapter that is not trained."""
    beside = beside_of(filter(is_of_base, adapter.tensors), adapter.spec.beside)
    return replace(adapter.spec, dropout=0.0, targets=tuple(modules_of(adapter.tensors)), beside=beside)


def load_adapter(engine: Engine, adapter: Adapter, model_name: str) -> None:
    """Load an adapter into an engine that was created for its modules. ConfigError if it does not fit the model."""
    try:
        engine.load_adapter_state(adapter.tensors)
    except ValueError as error:
        raise ConfigError(f"the adapter does not fit the model {model_name}: {error}") from error


def fits_in(shape: tuple[int, ...], into: tuple[int, ...] | None, rank: int) -> bool:
    """Return whether a tensor of an adapter is one of a spec of this rank, or a part of it: see `fit`."""
    if into is None or len(shape) != len(into):
        return False
    sizes = zip(shape, into, strict=True)
    return all(mine == its or (its == rank and mine < rank) for mine, its in sizes)


def fit(adapter: Adapter, spec: AdapterSpec, neutral: Tensors) -> Tensors:
    """Return the tensors of an adapter as those of a spec with at least its rank and modules: the same function.

    Rows of A and columns of B beyond its rank are 0, and modules that it does not adapt are as in `neutral`, the
    tensors that change nothing. Where the scales differ, scale · B A changes by the rounding of B.
    """
    fitted = dict(neutral)
    for name, tensor in adapter.tensors.items():
        target = np.zeros_like(neutral[name])
        parsed = parse_name(name)
        scaled = tensor
        if parsed and parsed[1] == "B":
            scaled = tensor * np.float32(adapter.spec.scale_of(parsed[0]) / spec.scale)
        target[tuple(slice(size) for size in tensor.shape)] = scaled
        fitted[name] = target
    return fitted


def _template_for(adapter: Adapter, directory: Path, choice: str) -> str:
    """Return the template for the tokenizer; if a file is missing, the adapter's own template."""
    if adapter.template is not None:
        is_here = choice == NONE or is_name(choice) or expanded(choice).is_file()
        return choice if is_here else str(directory / TEMPLATE_FILE)
    return NONE if choice == "auto" and adapter.template_hash == NONE else choice


@dataclass(slots=True)
class GenerationProgress:
    """How far a generation is. After its end, fewer tokens than allowed mean that the model stopped by itself."""

    num_tokens: int = 0
    max_tokens: int = 0
    is_ended: bool = False  # by the text with which the chat template ends a turn


def stream_text(
    model: LoadedModel,
    prompt: np.ndarray,
    sampling: Sampling,
    *,
    penalties: Penalties | None = None,
    cache: GenerationCache | None = None,
    progress: GenerationProgress | None = None,
    shown: frozenset[int] = frozenset(),
    first: Sequence[Sequence[int]] = (),
) -> Generator[str]:
    """Yield the continuation of a prompt (token ids [T]) piece by piece, one a token.

    `shown`: special tokens that are written, not left out. `first`: texts as token ids, with one of which it begins.
    `cache`: of the text before this prompt, by the same model and adapter; it is updated. Generation ends at the text
    with which the chat template ends a turn, or where a table of positions ends; ConfigError for a longer prompt, and
    for one without tokens.
    """
    sampling = replace(sampling, max_tokens=allowed_tokens(model, prompt, sampling.max_tokens))
    progress = progress or GenerationProgress()
    progress.max_tokens = sampling.max_tokens
    choose = Chooser(sampling, model.tokenizer.stop_ids, penalties=penalties, first=first)
    shown_text = TokenText(model.tokenizer, prompt, shown)
    # Ask for no more than are allowed: each answer of `choose`, also None, takes a forward pass.
    for token in islice(model.engine.generate(prompt, choose=choose, cache=cache), sampling.max_tokens):
        interrupt.poll()
        progress.num_tokens += 1
        yield shown_text.feed(token)
        if shown_text.is_ended:
            progress.is_ended = True
            return
    yield shown_text.rest()


class TokenText:
    """The text of tokens as they come, which ends before that with which the chat template ends a turn.

    Each token is decoded with a few before it, not with all: a long answer takes no longer for each.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, shown: frozenset[int] = frozenset()) -> None:
        """`prompt`: token ids [T] before the text. `shown`: special tokens that are written, not left out."""
        self._decode = partial(tokenizer.decode, shown=shown) if shown else tokenizer.decode
        self._ids: list[int] = prompt[-1:].tolist()  # a SentencePiece tokenizer drops the space at the start of a text
        self._before = self._decode(self._ids)
        self._cut = StopTexts((tokenizer.stop_text,) if tokenizer.stop_text else ())

    @property
    def is_ended(self) -> bool:
        return self._cut.found

    def feed(self, token: int) -> str:
        """Return what of the text can be passed on with this token."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may need several tokens
            return ""
        piece, self._before = text[len(self._before) :], text
        if len(self._ids) > MOST_DECODED:
            self._ids = self._ids[-FEWEST_DECODED:]
            self._before = self._decode(self._ids)
        return self._cut.feed(piece)

    def rest(self) -> str:
        """Return what is left at the end of the tokens."""
        return self._cut.feed(self._decode(self._ids)[len(self._before) :]) + self._cut.rest()


class StopTexts:
    """Ends a text before the stop text that is complete first. What may be the beginning of one is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held, self.found = stops, "", False

    def feed(self, piece: str) -> str:
        """Return what of the text so far can be passed on."""
        text = self._held + piece
        # The one that ends first, as if the text came character by character.
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        longest = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]

    def rest(self) -> str:
        """Return what was held back at the end of the text."""
        text, self._held = self._held, ""
        return text


def allowed_tokens(model: LoadedModel, prompt: np.ndarray, max_tokens: int) -> int:
    """Return how many tokens may follow a prompt. ConfigError for one that cannot be continued."""
    if not len(prompt):
        raise ConfigError("the prompt has no tokens, so there is nothing to continue. Give a text")
    if model.positions is None:
        return max_tokens
    if len(prompt) > model.positions:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens, but this model has positions up to {model.positions}. Shorten it"
        )
    return min(max_tokens, model.positions - len(prompt))


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """What an example asks for its last answer."""

    prompt: str  # as people read it: the last message before the answer, or the plain prompt
    expected: str
    ids: np.ndarray  # int32 [T]: what the model continues


def question(model: LoadedModel, example: Example) -> AskedQuestion:
    """Return the question of an example. DataError for a conversation without a chat template, which it needs."""
    tokenizer = model.tokenizer
    if tokenizer.template is not None and example.messages:
        *before, last = example.messages
        shown = before[-1].content if before else ""
        return AskedQuestion(shown, last.content, tokenizer.encode_chat(before, tools=example.tools))
    if example.completion is None:
        raise DataError(f"{example.where}: a conversation needs a chat template. Set data.template to a Jinja file")
    prompt = example.prompt or ""
    return AskedQuestion(prompt, example.completion, tokenizer.encode_text(prompt))


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: str
    expected: str
    got: str


def answer(model: LoadedModel, example: Example, max_tokens: int = 256) -> Answer:
    """Generate the last answer of an example greedily."""
    example_question = question(model, example)
    text = "".join(stream_text(model, example_question.ids, Sampling(max_tokens)))
    return Answer(example_question.prompt, example_question.expected, text)

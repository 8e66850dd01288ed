"""What a request asks in tokens, and what the tokens of its answer say: text, calls, the scores of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.data.chat.call_notations import WrittenCall, parameters_of
from dualtune.data.chat.call_reader import CallReader, TemplateCalls
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.template import WITH_TOOLS
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.train.generation.batched import PromptedRow
from dualtune.train.generation.token_logprobs import TokenLogprobs
from dualtune.use.serve.requests import CompletionRequest

Pairs = Sequence[tuple[int, float]]  # tokens and their log-probabilities


def encoded(request: CompletionRequest, tokenizer: Tokenizer, system: str | None) -> np.ndarray:
    """Return the tokens of a request's prompt, int32 [T]. ConfigError if it cannot be encoded."""
    if isinstance(request.prompt, str):
        return tokenizer.encode_text(request.prompt)
    if isinstance(request.prompt, list):
        if max(request.prompt) > (largest := tokenizer.largest_id):
            raise ConfigError(f"prompt: got the token {max(request.prompt)}, the largest of this model is {largest}")
        return np.array(request.prompt, np.int32)
    if tokenizer.template is None:
        raise ConfigError(
            f"'{request.model}' has no chat template. Ask /v1/completions, or serve it with --template FILE"
        )
    messages = request.prompt
    if system is not None and all(message.role != "system" for message in messages):
        messages = (Message("system", system), *messages)
    return tokenizer.encode_chat(messages, tools=request.tools)


def calls_of(request: CompletionRequest, tokenizer: Tokenizer) -> TemplateCalls:
    """Return how the model of a request writes calls. ConfigError if it is not told of tools."""
    if tokenizer.calls is None:
        raise ConfigError(
            f"tools: the chat template of '{request.model}' writes no tools. Serve it with --template: "
            f"{', '.join(WITH_TOOLS)}, or a Jinja file, if it was trained with that"
        )
    return tokenizer.calls


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """An answer that begins with a call: its tokens, their text, and those from which the model chooses the name."""

    ids: Sequence[int] = ()
    text: str = ""
    choices: Sequence[Sequence[int]] = ()


def begun_answer(request: CompletionRequest, tokenizer: Tokenizer) -> BegunAnswer:
    """Begin an answer up to the arguments of its call, or up to where the functions differ that may be called."""
    calls, names = calls_of(request, tokenizer), [request.function] if request.function else request.names
    heads = [calls.forced(name) for name in names]
    if None in heads:
        raise ConfigError(
            f"tool_choice: an answer of '{request.model}' cannot be made to begin with a call: its chat template "
            "writes none that can be read back, or another text before an answer than it asks with. tool_choice: auto"
        )
    texts: list[list[int]] = [tokenizer.encode(head or "", special=False).tolist() for head in heads]
    same = next((i for i, tokens in enumerate(zip(*texts, strict=False)) if len({*tokens}) > 1), len(texts[0]))
    text = tokenizer.decode(texts[0][:same], tokenizer.call_marks)
    while text.endswith("\N{REPLACEMENT CHARACTER}"):  # a name has a character of several tokens
        same -= 1
        text = tokenizer.decode(texts[0][:same], tokenizer.call_marks)
    return BegunAnswer(texts[0][:same], text, [whole[same:] for whole in texts] if len(texts) > 1 else ())


class AnswerText:
    """The text of an answer: what the client sees of it, and the calls in it."""

    def __init__(self, request: CompletionRequest, calls: TemplateCalls | None, begun: str) -> None:
        """`begun`: how the answer begins with a call."""
        self._reader = CallReader(calls.notations, parameters_of(request.tools)) if calls else None
        self._takes_one = not request.is_parallel or request.must_call
        self.num_calls = 0
        if self._reader and calls:
            self._reader.feed(begun[calls.num_common :])

    @property
    def is_complete(self) -> bool:
        """Whether it has the only call that it may have."""
        return self._takes_one and self.num_calls > 0

    def feed(self, text: str) -> list[str | WrittenCall]:
        """Return what can be passed on when this text is added."""
        if self._reader is None:
            return [text] if text else []
        return self._allowed(self._reader.feed(text))

    def end(self, text: str) -> list[str | WrittenCall]:
        """Add the end of the text. Return what is still to be passed on."""
        return [*self.feed(text), *(self._allowed(self._reader.end()) if self._reader else [])]

    def _allowed(self, pieces: list[str | WrittenCall]) -> list[str | WrittenCall]:
        allowed: list[str | WrittenCall] = []
        for piece in pieces:
            if self.is_complete:
                break
            self.num_calls += isinstance(piece, WrittenCall)
            allowed.append(piece)
        return allowed


def prompt_scores(
    tokenizer: Tokenizer, prompt: np.ndarray, said: TokenLogprobs, top: int, *, as_ids: bool
) -> dict[str, Any]:
    """Return the table `logprobs` of a prompt (int32 [T]) in the form of OpenAI's older completions.

    `top`: how many of the most probable tokens that are `said` it has in each place.
    """
    tokens, logprobs = prompt.tolist(), [None, *said.logprobs[1:].tolist()]
    tops: list[Pairs | None] | None = None
    if said.top is not None and top:
        places = zip(said.top.tokens_Tk[1:, :top].tolist(), said.top.logprobs_Tk[1:, :top].tolist(), strict=True)
        own = zip(tokens[1:], said.logprobs[1:].tolist(), strict=True)
        tops = [None, *([mine, *reversed([*zip(*top, strict=True)])] for top, mine in zip(places, own, strict=True))]
    return _table(tokenizer, tokens, logprobs, tops, as_ids=as_ids)


class AnswerScores:
    """The tables `logprobs` of an answer, in the form of OpenAI's chats or of its older completions.

    One of all tokens, or one after another as they come: joined, the lists of these are those of the one.
    """

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._count = self._offset = 0  # of the tokens in tables so far; of the next one's text, in characters

    def has_new(self, row: PromptedRow) -> bool:
        """Return whether there are tokens that no table has."""
        return len(row.tokens) > self._count

    def table(self, row: PromptedRow) -> dict[str, Any]:
        """Return the table of the row's tokens that no table has yet."""
        new = slice(self._count, len(row.tokens))  # without the token that ended it, which is not part of the answer
        tokens, logprobs = row.tokens[new], (row.choose.logprobs or [])[new]
        tops = [zip(ids.tolist(), values.tolist(), strict=True) for ids, values in row.choose.top[new]]
        places = [*zip(tokens, logprobs, map(list[tuple[int, float]], tops or [()] * len(tokens)), strict=True)]
        self._count = len(row.tokens)
        if self._request.is_chat:
            scored = partial(_scored_token, self._tokenizer)
            return {"content": [
                scored(token, logprob) | {"top_logprobs": [scored(*each) for each in top]}
                for token, logprob, top in places
            ]}  # fmt: skip
        named = [[(token, logprob), *reversed(top)] for token, logprob, top in places]
        begin, self._offset = self._offset, self._offset + sum(len(self._tokenizer.decode_all([id])) for id in tokens)
        return _table(
            self._tokenizer, tokens, logprobs, named if self._request.logprobs else None,
            as_ids=self._request.as_ids, begin=begin,
        )  # fmt: skip


def _scored_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.decode_all([token])
    is_part = "\N{REPLACEMENT CHARACTER}" in text  # of a character
    return {"token": text, "logprob": logprob, "bytes": None if is_part else [*text.encode()]}


def _table(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[float | None],
    tops: Sequence[Pairs | None] | None, *, as_ids: bool, begin: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Return tokens, what they are worth, and others in their place, in the form of OpenAI's older completions.

    `tops`: of each place its own token and the most probable ones, the least probable first: of texts that are alike
    the last one's is kept. `as_ids`: in place of their texts, which different tokens may share. `begin`: the offset of
    the first one's text.
    """
    texts = [tokenizer.decode_all([token]) for token in tokens]
    name: Callable[[int], str] = "token_id:{}".format if as_ids else lambda token: tokenizer.decode_all([token])
    return {
        "tokens": [*map(name, tokens)], "token_logprobs": logprobs,
        "top_logprobs": tops and [pairs and {name(token): value for token, value in pairs} for pairs in tops],
        "text_offset": [*accumulate(map(len, texts), initial=begin)][:-1],
    }  # fmt: skip

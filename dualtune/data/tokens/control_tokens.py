"""Control tokens in what people wrote: `<|im_end|>` in a user's message is text, not the end of a turn.

A rendered chat holds control tokens of two origins: those that the template writes are meant, those in the content are
not. Which is which shows when the conversation is rendered once more with the content's hidden behind placeholders of
the same length. Where the two renderings differ in anything else, the template treats such content in a way of its
own, and the row is refused. The text is then encoded by a copy of the tokenizer that takes control tokens for text and
placeholders for the control tokens that they stand for; all else is tokenized as always.

A control token that a template puts together itself, as in `<|{{ role }}|>`, counts as the template's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from dualtune.data.sources.rows import RowError

Policy = Literal["error", "text", "allow"]
FIRST_PLACEHOLDER = 0xF0000  # private use, and room for more tokens than any tokenizer has
ADVICE = "Remove it, or set data.special_tokens_in_text"


class ControlTokens:
    """The special tokens of a Rust tokenizer as texts, and what is to be done with them in content."""

    def __init__(self, rust: Any, special_ids: Iterable[int], policy: Policy) -> None:
        self._rust, self._policy = rust, policy
        self._added: dict[int, Any] = rust.get_added_tokens_decoder()
        self._ids = {self._added[id].content: id for id in sorted(special_ids) if id in self._added}
        self._hidden = {token: chr(FIRST_PLACEHOLDER + n) * len(token) for n, token in enumerate(self._ids)}
        self._shown = {hidden: token for token, hidden in self._hidden.items()}
        folds = any(self._added[id].normalized for id in self._ids.values())  # then other texts become it too
        self._normalize: Callable[[str], str] | None = (
            getattr(rust.normalizer, "normalize_str", None) if folds else None
        )

    def first_in(self, value: Any) -> str | None:
        """The first control token in the strings of a JSON value."""
        for text in _texts(value):
            for form in (text, self._normalize(text)) if self._normalize else (text,):
                for _, token in self._tokens.matches(form):
                    return token
        return None

    def masked(self, content: Any, text: str, render: Callable[[Any], str]) -> tuple[str | None, str | None]:
        """The first control token in `content`, and `text`, which is `render(content)`, for `encode_batch`.

        Each is None where there is none; without the second the text is encoded as it is. RowError by the policy.
        """
        try:
            token = self.first_in(content)
        except RecursionError:
            raise RowError("is nested too deeply") from None
        if token is None or self._policy == "allow":
            return token, None
        if self._policy == "error":
            raise RowError(
                f"its text holds the control token {token!r}. {ADVICE}: text reads it as characters, allow as the token"
            )
        try:
            source = self._swapped(render(self._hide(content)), text)
            self.encode_batch([source], special=False)
        except (RowError, RecursionError) as reason:
            raise RowError(f"its text holds the control token {token!r}, and {reason}. {ADVICE}: allow") from reason
        return token, source

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """(token ids int32 [T], character offsets int32 [T, 2]) of each text.

        A placeholder becomes its control token, all else is text. RowError where the tokenizer has no other way to
        write a control token.
        """
        return list(map(self._checked, self._literal.encode_batch([*texts], add_special_tokens=special)))

    def _hide(self, value: Any) -> Any:
        """A JSON value with a placeholder for each control token in its strings."""
        if isinstance(value, str):
            if next(self._placeholders.matches(value), None):
                raise RowError("has characters of the private-use plane 15 too, which stand for control tokens here")
            return self._tokens.replaced(value, self._hidden)
        if isinstance(value, Mapping):
            return {self._hide(key): self._hide(item) for key, item in cast(Mapping[Any, Any], value).items()}
        if isinstance(value, list | tuple):
            return [self._hide(item) for item in cast(Sequence[Any], value)]
        return value

    def _swapped(self, hidden: str, text: str) -> str:
        """The text with a placeholder for each control token of the template, and for none of the content."""
        if self._placeholders.replaced(hidden, self._shown) != text:
            raise RowError("the chat template changes it, so that its origin cannot be told")
        return self._either.replaced(hidden, self._hidden | self._shown)

    def _checked(self, encoding: Any) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array(encoding.ids, np.int32)
        offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
        written = ids[offsets[:, 0] < offsets[:, 1]]  # what the tokenizer adds around a text has no characters
        if np.isin(written, [*self._ids.values()]).any():
            raise RowError("the tokenizer has no other way to write it")
        return np.array([self._meant.get(id, id) for id in ids.tolist()], np.int32), offsets

    @cached_property
    def _literal(self) -> Any:
        """The tokenizer with placeholders that match as their tokens do, and tokens that match nothing."""
        from tokenizers import AddedToken, Tokenizer

        copy = cast(Any, Tokenizer).from_str(self._rust.to_str())
        flags = ("lstrip", "rstrip", "single_word", "normalized")
        for token, hidden in self._hidden.items():
            like = self._added[self._ids[token]]
            copy.add_tokens([AddedToken(hidden, special=False, **{flag: getattr(like, flag) for flag in flags})])
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def _meant(self) -> dict[int, int]:
        """The id of a placeholder -> that of its control token."""
        return {self._literal.token_to_id(hidden): self._ids[token] for token, hidden in self._hidden.items()}

    @cached_property
    def _tokens(self) -> _Finder:
        return _Finder(self._hidden)

    @cached_property
    def _placeholders(self) -> _Finder:
        return _Finder(self._shown)

    @cached_property
    def _either(self) -> _Finder:
        return _Finder([*self._hidden, *self._shown])


def about_rows(number: int, first: str, policy: Policy) -> str:
    """A warning: a row that was formatted by hand means what it says, and any other does not."""
    became = {
        "text": "it is plain text; if the rows were formatted by hand, set data.special_tokens_in_text: allow",
        "allow": "it is taken for the control token (data.special_tokens_in_text: allow)",
        "error": "it is an error",
    }
    return f"rows with a control token in their own text: {number}, the first: {first}; {became[policy]}"


class _Finder:
    """Finds the longest of many texts at each place, from the left on, as a tokenizer finds its added tokens."""

    def __init__(self, wanted: Iterable[str]) -> None:
        self._wanted = {text for text in wanted if text}
        self._firsts = {text[0] for text in self._wanted}
        self._lengths = sorted({len(text) for text in self._wanted}, reverse=True)
        starts = sorted({re.escape(text[:2]) for text in self._wanted})
        self._start = re.compile("|".join(starts) or r"(?!)")  # of nothing: what never matches

    def matches(self, text: str) -> Iterator[tuple[int, str]]:
        if not any(map(text.__contains__, self._firsts)):  # most texts, and far faster than to search them
            return
        at = 0
        while found := self._start.search(text, at):
            at = found.start()
            match = next((part for n in self._lengths if (part := text[at : at + n]) in self._wanted), None)
            if match is not None:
                yield at, match
            at += len(match or " ")

    def replaced(self, text: str, table: Mapping[str, str]) -> str:
        pieces: list[str] = []
        done = 0
        for at, match in self.matches(text):
            pieces += text[done:at], table[match]
            done = at + len(match)
        return "".join([*pieces, text[done:]])


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in cast(Mapping[Any, Any], value).items():
            yield from _texts(pair)
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[Any], value):
            yield from _texts(item)

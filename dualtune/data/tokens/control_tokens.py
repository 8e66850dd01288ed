"""Control tokens in content: `<|im_end|>` in a user's message is text, not the end of a turn.

A rendered chat contains control tokens from the template, which are intended, and from the content, which are not. To
tell them apart, the conversation is rendered again with those of the content replaced by placeholders of the same
length. If the two renderings differ in anything else, the template handles such content specially, and the row is
refused. Then the template's control tokens are replaced by their placeholders, and a copy of the tokenizer encodes the
text: it treats control tokens as text and placeholders as the control tokens they stand for. All else is tokenized as
usual.

A control token that a template composes itself, as in `<|{{ role }}|>`, counts as the template's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from dualtune.data.chat.row_values import strings_in
from dualtune.data.sources.rows import RowError

Policy = Literal["error", "text", "allow"]
FIRST_PLACEHOLDER = 0xF0000  # private use area, larger than the number of control tokens of any tokenizer
ADVICE = "Remove it, or set data.special_tokens_in_text"


class ControlTokens:
    """The special tokens of a Rust tokenizer as strings, and the policy for them in content."""

    def __init__(self, rust: Any, special_ids: Iterable[int], policy: Policy) -> None:
        self._rust, self._policy = rust, policy
        self._added: dict[int, Any] = rust.get_added_tokens_decoder()
        self._ids = {self._added[id].content: id for id in sorted(special_ids) if id in self._added}
        self._hidden = {token: chr(FIRST_PLACEHOLDER + n) * len(token) for n, token in enumerate(self._ids)}
        self._shown = {hidden: token for token, hidden in self._hidden.items()}
        self._tokens, self._placeholders = _Finder(self._hidden), _Finder(self._shown)
        self._either = _Finder([*self._hidden, *self._shown])
        folds = any(self._added[id].normalized for id in self._ids.values())  # then other strings match a token too
        self._normalize: Callable[[str], str] | None = (
            getattr(rust.normalizer, "normalize_str", None) if folds else None
        )

    def first_in(self, value: Any) -> str | None:
        """Return the first control token in the strings of a JSON value."""
        for text in strings_in(value):
            for form in (text, self._normalize(text)) if self._normalize else (text,):
                for _, token in self._tokens.matches(form):
                    return token
        return None

    def masked(self, content: Any, text: str, render: Callable[[Any], str]) -> tuple[str | None, str | None]:
        """Return the first control token in `content`, and the masked `text` (= `render(content)`) for `encode_batch`.

        Each is None if there is none; without a masked text, encode `text` itself. Raises RowError if the policy
        forbids control tokens in content, or if they cannot be masked.
        """
        try:
            token = self.first_in(content)
        except RecursionError:
            raise RowError("is nested too deeply") from None
        if token is None or self._policy == "allow":
            return token, None
        if self._policy == "error":
            raise RowError(
                f"its text holds the control token {token!r}. {ADVICE}: text reads it as plain text, allow as the token"
            )
        try:
            source = self._swapped(render(self._hide(content)), text)
            self.encode_batch([source], special=False)
        except (RowError, RecursionError) as reason:
            raise RowError(f"its text holds the control token {token!r}, and {reason}. {ADVICE}: allow") from reason
        return token, source

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (token ids int32 [T], character offsets int32 [T, 2]) of each text.

        A placeholder becomes its control token, all else is text. Raises RowError if the tokenizer cannot encode a
        control token as text.
        """
        return list(map(self._checked, self._literal.encode_batch([*texts], add_special_tokens=special)))

    def _hide(self, value: Any) -> Any:
        """Replace each control token in the strings of a JSON value by its placeholder."""
        if isinstance(value, str):
            if next(self._placeholders.matches(value), None):
                raise RowError("it has private-use characters of plane 15, which dualtune needs as placeholders")
            return self._tokens.replaced(value, self._hidden)
        if isinstance(value, Mapping):
            return {self._hide(key): self._hide(item) for key, item in cast(Mapping[Any, Any], value).items()}
        if isinstance(value, list | tuple):
            return [self._hide(item) for item in cast(Sequence[Any], value)]
        return value

    def _swapped(self, hidden: str, text: str) -> str:
        """Replace each control token of the template by its placeholder, and restore those of the content."""
        if self._placeholders.replaced(hidden, self._shown) != text:
            raise RowError("the chat template changes it, so its origin is not known")
        return self._either.replaced(hidden, self._hidden | self._shown)

    def _checked(self, encoding: Any) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array(encoding.ids, np.int32)
        offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
        written = ids[offsets[:, 0] < offsets[:, 1]]  # tokens that the tokenizer adds (BOS) cover no characters
        if np.isin(written, [*self._ids.values()]).any():
            raise RowError("the tokenizer cannot encode it as plain text")
        return np.array([self._meant.get(id, id) for id in ids.tolist()], np.int32), offsets

    @cached_property
    def _literal(self) -> Any:
        """A copy of the tokenizer in which placeholders match instead of their control tokens."""
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
        """The id of each placeholder -> the id of its control token."""
        return {self._literal.token_to_id(hidden): self._ids[token] for token, hidden in self._hidden.items()}


def control_token_warning(number: int, first: str, policy: Policy) -> str:
    """Return a warning about control tokens in content: they are intended only in rows formatted by hand."""
    effects = {
        "text": "it is plain text; if the rows were formatted by hand, set data.special_tokens_in_text: allow",
        "allow": "it is read as the control token (data.special_tokens_in_text: allow)",
        "error": "it is an error",
    }
    return f"rows with a control token in their text: {number}, the first: {first}; {effects[policy]}"


class _Finder:
    """Finds the longest of many strings at each position, from left to right, like a tokenizer its added tokens."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = {text for text in strings if text}
        self._firsts = {text[0] for text in self._strings}
        self._lengths = sorted({len(text) for text in self._strings}, reverse=True)
        starts = sorted({re.escape(text[:2]) for text in self._strings})
        self._start = re.compile("|".join(starts) or r"(?!)")  # if there are none: a pattern that never matches

    def matches(self, text: str) -> Iterator[tuple[int, str]]:
        if not any(map(text.__contains__, self._firsts)):  # true for most texts, and far faster than the search
            return
        at = 0
        while candidate := self._start.search(text, at):
            at = candidate.start()
            match = next((part for n in self._lengths if (part := text[at : at + n]) in self._strings), None)
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

"""The tokenizer and chat template of a base model, with the few methods that dualtune needs.

`tokenizer_files.py` loads the tokenizer. The Rust library encodes texts directly, on all cores; chats are rendered by
our own template code first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from dualtune.base_model import vocabulary_size
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.conversations import text as valid_text
from dualtune.data.chat.named import is_name, named_template, unknown
from dualtune.data.chat.template import ChatTemplate, Ranges
from dualtune.data.sources.rows import RowError
from dualtune.data.tokens.control_tokens import ControlTokens, Policy
from dualtune.data.tokens.tokenizer_files import MAX_TEMPLATE_BYTES, Loaded, load
from dualtune.errors import ConfigError, DataError, FormatError
from dualtune.io.untrusted import open_file, read_json, sha256_of

_MARK = re.compile(r"<[^\s<>]{2,40}>|\[[^\s\[\]]{2,40}\]")  # text that looks like a special token
# The files that determine the ids of a text, if the model has them.
MAX_GENERATION_CONFIG_BYTES = 1 << 20
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "tokenizer.model",
    "vocab.json", "merges.txt",
)  # fmt: skip


class Tokenizer:
    """Encodes text with character offsets, decodes tokens, and renders chats.

    `template` is "auto" (the model's template, if it has one), "none", a name in NAMES, or a path to a Jinja file. A
    chat contains only the special tokens that its template writes: if the tokenizer adds BOS to plain text but the
    template writes none, the chat has none, as in the model's original training. `special_tokens_in_text` sets what a
    control token in content becomes: an error, text, or (allow) the control token.
    """

    def __init__(self, model_dir: Path, template: str = "auto", special_tokens_in_text: Policy = "text") -> None:
        self._policy: Policy = special_tokens_in_text
        self._loaded = load(model_dir)
        self._rust = self._loaded.rust
        # Some tokenizer.json files contain the truncation and padding settings of a training.
        self._rust.no_truncation()
        self._rust.no_padding()
        self._rust.encode_special_tokens = False
        self._files = _hashes(model_dir)
        self._model_dir = model_dir
        self.vocabulary_size = vocabulary_size(model_dir)  # of the model, not the tokenizer
        self.special_tokens = self._loaded.named  # role -> text, such as "bos_token": "<s>"
        self.template = _template(self._loaded, template)
        self.template_hash = self.template.hash if self.template else "none"
        self.bos_id = self._loaded.id_of("bos_token")
        self.eos_id = self._loaded.id_of("eos_token")
        # A turn may end with a special token other than EOS (Llama 3: <|eot_id|>).
        self.special_ids = self._loaded.special_ids
        closing = self._text_after_answer()
        end_token = self.encode(closing, special=False)[:1].tolist()  # ends a turn, if it is a single token
        ends = {self.eos_id, *_generation_ends(model_dir), *(self.special_ids & {*end_token})}
        self.stop_ids = frozenset(id for id in ends if id is not None)  # tokens that end an answer
        self.warning = self._template_warning(closing)

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the ids of a text or a chat."""
        template = self.template.source if self.template else None
        decisive = json.dumps([self._files, template, self.vocabulary_size])
        return f"sha256 {hashlib.sha256(decisive.encode()).hexdigest()[:16]}"

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (token ids int32 [T], character offsets int32 [T, 2]) of each text. Other threads run meanwhile.

        `special` adds the tokenizer's special tokens for plain text (BOS, unless the text already begins with it); a
        rendered chat contains its own. Raises FormatError for a token without an embedding in the model.
        """
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for encoding in self._loaded.encode_batch(texts, special=special):
            ids = np.array(encoding.ids, np.int32)
            flat = itertools.chain.from_iterable(encoding.offsets)
            offsets = np.fromiter(flat, np.int32, 2 * len(ids)).reshape(-1, 2)
            if len(ids) > 1 and ids[0] == ids[1] == self.bos_id and offsets[0, 1] == 0:  # the first covers no character
                ids, offsets = ids[1:], offsets[1:]
            self._check(ids)
            found.append((ids, offsets))
        return found

    def _check(self, ids: np.ndarray) -> None:
        largest, size = int(ids.max(initial=0)), self.vocabulary_size
        if size is not None and largest >= size:
            token = self._rust.id_to_token(largest)
            raise FormatError(
                f"{self._model_dir}: the tokenizer gives {token!r} the id {largest}, but the model has embeddings for "
                f"{size} tokens, 0 to {size - 1}. Use the tokenizer.json and the weights of the same model"
            )

    @property
    def largest_id(self) -> int:
        return max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, *, special: bool) -> np.ndarray:
        return self.encode_batch([text], special=special)[0][0]

    def decode(self, ids: Sequence[int]) -> str:
        return self._loaded.decode(ids)

    def stop_texts(self) -> list[str]:
        """Return the texts of the tokens that end an answer."""
        return sorted(text for id in self.stop_ids if (text := self._rust.id_to_token(id)))

    def decode_all(self, ids: Sequence[int]) -> str:
        """Decode ids to text, including special tokens."""
        return self._rust.decode(list(ids), skip_special_tokens=False)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        """Render the chat as text. Raises RowError if the template rejects the conversation."""
        return self.render_marked(messages, tools=tools, add_generation_prompt=add_generation_prompt)[0]

    def render_marked(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> tuple[str, Ranges]:
        """Return the chat as text and the character ranges of the template's generation blocks."""
        assert self.template is not None
        turns = [message.as_dict() for message in messages]
        return self.template.render_marked(turns, tools=tools, add_generation_prompt=add_generation_prompt)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        return ControlTokens(self._rust, self.special_ids, self._policy)

    def masked_chat(
        self,
        messages: Sequence[Message],
        text: str,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> tuple[str | None, str | None]:
        """Call `ControlTokens.masked` for the text of a rendered chat."""

        def render(content: Mapping[str, Any]) -> str:
            assert self.template is not None
            return self.template.render(
                content["messages"], tools=content["tools"], add_generation_prompt=add_generation_prompt
            )

        turns = [message.as_dict() for message in messages]
        return self.control_tokens.masked({"messages": turns, "tools": tools}, text, render)

    def masked_text(self, text: str) -> tuple[str | None, str | None]:
        """Call `ControlTokens.masked` for a plain text, all of which is content."""
        return self.control_tokens.masked(text, text, lambda hidden: hidden)

    def encode_chat(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Encode a chat for the model to answer. Raises RowError if the template or the policy rejects it."""
        text = valid_text(self.render(messages, tools=tools, add_generation_prompt=True), "the text")
        _, masked = self.masked_chat(messages, text, tools=tools, add_generation_prompt=True)
        return self._encode_masked(masked, special=False) if masked else self.encode(text, special=False)

    def encode_text(self, text: str) -> np.ndarray:
        """Encode a plain text for the model to continue. Raises RowError if the policy rejects it."""
        _, masked = self.masked_text(valid_text(text, "the text"))
        return self._encode_masked(masked, special=True) if masked else self.encode(text, special=True)

    def encode_prompt(self, prompt: str) -> np.ndarray:
        """Encode a user's prompt as in training: with the chat template, if there is one."""
        try:
            return self.encode_chat([Message("user", prompt)]) if self.template else self.encode_text(prompt)
        except RowError as error:
            raise DataError(f"the prompt: {error}. Use another data.template, or none") from error

    def _encode_masked(self, masked: str, *, special: bool) -> np.ndarray:
        return self.control_tokens.encode_batch([masked], special=special)[0][0]

    def _template_warning(self, closing: str) -> str | None:
        """Return why this template may not match this tokenizer, or None."""
        mark = _MARK.match(closing)
        if mark is None or len(self.encode(mark[0], special=False)) == 1:
            return None
        return (
            f"the chat template ends a turn with {mark[0]}, which this tokenizer splits into several tokens: the model "
            "was trained with another template. Set data.template"
        )

    def _text_after_answer(self) -> str:
        """Return what the template writes after an assistant message."""
        if self.template is None:
            return ""
        question, answer = Message("user", "?"), Message("assistant", "!")
        try:
            before = self.render([question], add_generation_prompt=True)
            through = self.render([question, answer])
        except RowError:
            return ""
        _, found, rest = through[len(before) :].rpartition(answer.content)
        return rest if found else ""


def _generation_ends(model_dir: Path) -> list[int]:
    """Return the ids in `eos_token_id` of generation_config.json, which may be one id or a list."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return []
    found = read_json(path, max_bytes=MAX_GENERATION_CONFIG_BYTES, strict=False).get("eos_token_id")
    listed = cast("list[Any]", found) if isinstance(found, list) else [found]
    return [token for token in listed if type(token) is int]


def _hashes(model_dir: Path) -> dict[str, str]:
    paths = [model_dir / name for name in TOKENIZER_FILES if (model_dir / name).is_file()]
    return {path.name: sha256_of(path) for path in paths}


def _template(loaded: Loaded, choice: str) -> ChatTemplate | None:
    if choice == "none":
        return None
    if choice == "auto":
        if not loaded.templates:
            return None
        named = loaded.templates
        if not isinstance(named, str) and "default" not in named:
            raise ConfigError(
                f"data.template: the model has several chat templates ({', '.join(named)}) and none is its default. "
                "Save the right one to a file and name that file"
            )
        source = named if isinstance(named, str) else named["default"]
    elif is_name(choice):
        source = named_template(choice)
    else:
        path = Path(choice).expanduser()
        if not path.is_file():
            raise ConfigError(unknown(choice))
        try:
            with open_file(path, max_bytes=MAX_TEMPLATE_BYTES) as file:
                source = file.read(MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.template: {path} is not UTF-8 (byte {error.start})") from error
        except FormatError as error:
            raise ConfigError(f"data.template: {error}") from error
    return ChatTemplate(source, loaded.named)

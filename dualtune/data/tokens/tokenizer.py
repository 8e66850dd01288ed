"""The tokenizer and chat template of a base model, with the few methods that dualtune needs.

`tokenizer_files.py` loads the tokenizer. The Rust library encodes texts directly, on all cores; chats are rendered by
our own template code first.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np

from dualtune.base.errors import ConfigError, DataError, FormatError
from dualtune.base.untrusted import read_json, sha256_of
from dualtune.config.data_section import DataConfig
from dualtune.config.values import RESERVED_VARIABLES
from dualtune.data.chat.call_notations import IN_TEXT, common_prefix
from dualtune.data.chat.call_reader import TemplateCalls, template_calls
from dualtune.data.chat.conversations import Message, fold_system
from dualtune.data.chat.row_values import text as valid_text
from dualtune.data.chat.template import ChatTemplate, Ranges, chosen_template, with_variables
from dualtune.data.sources.rows import RowError
from dualtune.data.tokens.control_tokens import ControlTokens, Policy
from dualtune.data.tokens.new_tokens import with_new_tokens
from dualtune.data.tokens.tokenizer_files import Loaded, load
from dualtune.data.tokens.tokenizer_vetting import rust_errors
from dualtune.model.config_file import vocabulary_size

LEAST_STOP = 3  # characters of a text that stops an answer
PROBE = "\ue000?\ue001"  # an answer that is found in a rendered turn: private-use characters, which nothing else has
_MARK = re.compile(r"<[^\s<>]{2,40}>|\[[^\s\[\]]{2,40}\]")  # text that looks like a special token
# With which the turns of usual chat templates begin or end.
CHAT_MARKS = (
    "<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|user|>", "<|assistant|>",
    "<|START_OF_TURN_TOKEN|>",
)  # fmt: skip
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
    control token in content becomes: an error, text, or (allow) the control token. `template_variables` are values for
    variables of the template, and become a part of it. `system` says what becomes of a system message that the template
    does not write: it is put before the question, or the conversation is refused.
    """

    def __init__(
        self,
        model_dir: Path,
        template: str = "auto",
        special_tokens_in_text: Policy = "text",
        template_variables: Mapping[str, Any] = MappingProxyType({}),
        system: Literal["fold", "refuse"] = "fold",
    ) -> None:
        self._policy: Policy = special_tokens_in_text
        self._folds_system = system == "fold"
        self._loaded = load(model_dir)
        self._rust = self._loaded.rust
        self._rust.encode_special_tokens = False
        paths = [model_dir / name for name in TOKENIZER_FILES if (model_dir / name).is_file()]
        self._files = {path.name: sha256_of(path) for path in paths}
        self._model_dir = model_dir
        self.vocabulary_size = vocabulary_size(model_dir)  # of the model, not the tokenizer
        self.special_tokens = self._loaded.named  # role -> text, such as "bos_token": "<s>"
        self.template = _template(self._loaded, template, template_variables)
        self.template_hash = self.template.hash if self.template else "none"
        self.bos_id = self._loaded.id_of("bos_token")
        self.eos_id = self._loaded.id_of("eos_token")
        # A turn may end with a special token other than EOS (Llama 3: <|eot_id|>).
        self.special_ids = self._loaded.special_ids
        self._closing = self._after(Message("assistant", PROBE)) if self.template else ""
        self._model_ends = {id for id in (self.eos_id, *_generation_ends(model_dir)) if id is not None}
        self.end_id, ends = self._turn_ends()
        self.stop_ids = frozenset(ends)  # tokens that end an answer
        self.warning = self._template_warning()

    @classmethod
    def of(cls, model_dir: Path, data: DataConfig, template: str | None = None) -> Tokenizer:
        """Return the tokenizer that a config asks for, with its new tokens. `template` replaces data.template."""
        chosen = template or data.template
        model_dir = with_new_tokens(model_dir, data.added_tokens)
        return cls(model_dir, chosen, data.special_tokens_in_text, data.template_variables, data.system)

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
        encodings: list[tuple[np.ndarray, np.ndarray]] = []
        for encoding in self._loaded.encode_batch(texts, special=special):
            ids = np.array(encoding.ids, np.int32)
            flat = itertools.chain.from_iterable(encoding.offsets)
            offsets = np.fromiter(flat, np.int32, 2 * len(ids)).reshape(-1, 2)
            if len(ids) > 1 and ids[0] == ids[1] == self.bos_id and offsets[0, 1] == 0:  # the first covers no character
                ids, offsets = ids[1:], offsets[1:]
            self._check(ids)
            encodings.append((ids, offsets))
        return encodings

    def _check(self, ids: np.ndarray) -> None:
        largest, size = int(ids.max(initial=0)), self.vocabulary_size
        if size is not None and largest >= size:
            token = self._rust.id_to_token(largest)
            raise FormatError(
                f"{self._model_dir}: the tokenizer gives {token!r} the id {largest}, but the model has embeddings for "
                f"{size} tokens, 0 to {size - 1}. Use the tokenizer.json and the weights of the same model"
            )

    def first_difference(self, other: Tokenizer) -> str | None:
        """Return the first token to which another tokenizer gives another id, in words; None if it has all of them."""
        mine, theirs = (one._rust.get_vocab(with_added_tokens=True) for one in (self, other))
        different = ((id, token) for token, id in mine.items() if theirs.get(token) != id)
        if (first := min(different, default=None)) is None:
            return None
        id, token = first
        return f"{token!r} is {id} here, and {theirs.get(token, 'no token')} there"

    @cached_property
    def foreign_marks(self) -> tuple[str, ...]:
        """The marks of usual chat templates that are no token here, and not in the model's own template either."""
        source = self.template.source if self.template else ""
        return tuple(mark for mark in CHAT_MARKS if self.id_of(mark) is None and mark not in source)

    @property
    def largest_id(self) -> int:
        return max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text in the vocabulary; None if there is none."""
        return self._rust.token_to_id(token)

    def encode(self, text: str, *, special: bool) -> np.ndarray:
        return self.encode_batch([text], special=special)[0][0]

    def decode(self, ids: Sequence[int], shown: frozenset[int] = frozenset()) -> str:
        """Decode ids to text without special tokens, but with those in `shown`."""
        if not shown.intersection(ids):
            return self._loaded.decode(ids)
        runs = [(is_shown, [*run]) for is_shown, run in itertools.groupby(ids, key=shown.__contains__)]
        return "".join(self.decode_all(run) if is_shown else self._loaded.decode(run) for is_shown, run in runs)

    @cached_property
    def calls(self) -> TemplateCalls | None:
        """How answers with tool calls are written; None if the template does not write tools."""
        return template_calls(self.template.render, self.template.call_form) if self.template else None

    @cached_property
    def call_marks(self) -> frozenset[int]:
        """The special tokens that are a part of a written call."""
        if self.calls is None:
            return frozenset()
        texts = (self.calls.written, *(mark for notation in IN_TEXT for mark in notation.texts))
        return frozenset(id for text in texts for id in self._specials_in(text)) - self.stop_ids

    @cached_property
    def stop_text(self) -> str:
        """The text with which the template ends a turn, such as a line, if no token does; "" otherwise.

        One or two characters, such as a bracket, are none: answers have them too.
        """
        closing = self._closing.rstrip()
        has_token = {*self._rust.encode(closing, add_special_tokens=False).ids} & (self.special_ids | self._model_ends)
        return "" if has_token or len(closing.strip()) < LEAST_STOP else closing

    def decode_all(self, ids: Sequence[int]) -> str:
        """Decode ids to text, including special tokens."""
        with rust_errors(self._model_dir):
            return self._rust.decode(list(ids), skip_special_tokens=False)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        """Render the chat as text. Raises RowError if the template rejects the conversation."""
        assert self.template is not None
        return self.template.render(self._turns(messages), tools=tools, add_generation_prompt=add_generation_prompt)

    def _turns(self, messages: Sequence[Message]) -> list[Mapping[str, Any]]:
        """Return the messages in the form that the template takes."""
        turns = [message.as_dict() for message in messages]
        has_calls = any("tool_calls" in turn or turn["role"] == "tool" for turn in turns)
        return self.template.call_form.applied(turns) if has_calls and self.template else [*turns]

    def render_folded(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> tuple[Sequence[Message], str, Ranges]:
        """Return the messages that were rendered, the text, and the character ranges of its generation blocks.

        The messages are others if the template refuses system messages or leaves one out: each is put before the user
        message that follows. Raises RowError if that does not help, or if `system` is refuse.
        """
        template = self.template
        assert template is not None

        def rendered(turns: Sequence[Message]) -> tuple[str, Ranges]:
            return template.render_marked(self._turns(turns), tools=tools, add_generation_prompt=add_generation_prompt)

        # As it is first: folding is only for a template that would lose the system message.
        folded = fold_system(messages)
        try:
            text, marked = rendered(messages)
            if folded is messages or not self._leaves_out_system(messages, text, rendered):
                return messages, text, marked
            refusal = RowError("the chat template leaves out a system message")
        except RowError as error:
            if folded is messages:
                raise
            refusal = error
        # If folding does not help, the system message was not the reason, and the first refusal names it.
        try:
            text, marked = rendered(folded)
        except RowError:
            raise refusal from None
        if not self._folds_system:
            raise RowError(f"{refusal}. data.system: fold puts it before the question")
        return folded, text, marked

    def _leaves_out_system(
        self, messages: Sequence[Message], text: str, rendered: Callable[[Sequence[Message]], tuple[str, Ranges]]
    ) -> bool:
        """Return whether a system message is not in the text, not even in another form (upper case, quoted …)."""
        missing = [
            i for i, message in enumerate(messages) if message.role == "system" and message.content.strip() not in text
        ]
        if not missing:
            return False
        probed = [replace(message, content=PROBE) if i in missing else message for i, message in enumerate(messages)]
        with contextlib.suppress(RowError):
            return rendered(probed)[0].count(PROBE) < len(missing)
        return True

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

        turns = self._turns(messages)
        return self.control_tokens.masked({"messages": turns, "tools": tools}, text, render)

    def masked_text(self, text: str) -> tuple[str | None, str | None]:
        """Call `ControlTokens.masked` for a plain text, all of which is content."""
        return self.control_tokens.masked(text, text, lambda hidden: hidden)

    def encode_chat(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Encode a chat for the model to answer. Raises RowError if the template or the policy rejects it."""
        messages, text, _ = self.render_folded(messages, tools=tools, add_generation_prompt=True)
        text = valid_text(text, "the text")
        _, masked = self.masked_chat(messages, text, tools=tools, add_generation_prompt=True)
        encode = self.control_tokens.encode_batch if masked else self.encode_batch
        return encode([masked or text], special=False)[0][0]

    def encode_after_answer(self, turns: Sequence[Message]) -> np.ndarray:
        """Encode turns that follow an answer, from its end to where the next answer begins.

        Raises RowError if the template or the policy rejects them.
        """
        if self.template is None:
            text = valid_text("".join(turn.content for turn in turns), "the text")
            _, masked = self.masked_text(text)
        else:
            messages = [Message("user", "?"), Message("assistant", PROBE), *turns]
            text = valid_text(self.render(messages, add_generation_prompt=True), "the text")
            _, masked = self.masked_chat(messages, text, add_generation_prompt=True)
        encode = self.control_tokens.encode_batch if masked else self.encode_batch
        after = (masked or text).partition(PROBE)[2] if self.template else masked or text
        return encode([after], special=False)[0][0]

    def encode_continuation(
        self, messages: Sequence[Message], number: int, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray | None:
        """Encode what follows an answer, as `encode_after_answer`, in the conversation that it is a part of.

        `number`: of the answer, counted from 0. None if the template writes something else before the end of the answer
        than what it asked with, such as an earlier answer without its thoughts, or if no token ends an answer.
        """

        def rendered(turns: Sequence[Message], *, asks: bool = True) -> tuple[Sequence[Message], str]:
            return self.render_folded(turns, tools=tools, add_generation_prompt=asks)[:2]

        asked, (turns, text) = rendered(messages[:number])[1], rendered(messages)
        answered = rendered(messages[: number + 1], asks=False)[1]
        ends = [answered.rfind(token) for id in self.stop_ids if (token := self._rust.id_to_token(id))]
        end = max(ends, default=-1)
        if end < len(asked) or not answered.startswith(asked) or not text.startswith(answered[:end]):
            return None
        # A masked text has its placeholders at the same characters.
        _, masked = self.masked_chat(turns, valid_text(text, "the text"), tools=tools, add_generation_prompt=True)
        encode = self.control_tokens.encode_batch if masked else self.encode_batch
        return encode([(masked or text)[end:]], special=False)[0][0]

    def encode_text(self, text: str) -> np.ndarray:
        """Encode a plain text for the model to continue. Raises RowError if the policy rejects it."""
        _, masked = self.masked_text(valid_text(text, "the text"))
        encode = self.control_tokens.encode_batch if masked else self.encode_batch
        return encode([masked or text], special=True)[0][0]

    def encode_prompt(self, prompt: str, system: str | None = None) -> np.ndarray:
        """Encode a user's prompt as in training: with the chat template, if there is one, and a system message."""
        messages = [*([] if system is None else [Message("system", system)]), Message("user", prompt)]
        try:
            return self.encode_chat(messages) if self.template else self.encode_text(prompt)
        except RowError as error:
            raise DataError(f"the prompt: {error}. Use another data.template, or none") from error

    def _template_warning(self) -> str | None:
        """Return why this template may not match this tokenizer, or None."""
        mark = _MARK.match(self._closing)
        if mark is None or len(self.encode(mark[0], special=False)) == 1:
            return None
        return (
            f"the chat template ends a turn with {mark[0]}, which this tokenizer splits into several tokens: the model "
            "was trained with another template. Set data.template"
        )

    def _turn_ends(self) -> tuple[int | None, set[int]]:
        """Return the id that ends the last answer, and the ids that end any turn.

        They are read from rendered turns alone: a generation prompt may be longer than the head of a turn.
        """
        ends = {*self._model_ends}
        if self.template is None:
            return self.eos_id, ends
        last, earlier = (self._specials_in(end) for end in self.turn_ends)
        written = last or earlier  # some templates end an answer only if another turn follows
        ends.update(written[:1])
        # gpt-oss ends an earlier turn with another token, which would cut an answer behind its thought.
        ends.update({*earlier[:1]} - {*self._specials_in(self._before_answer())})
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": PROBE}}}
        after_call = self._specials_in(self._after(Message("assistant", "", extra={"tool_calls": [call]})))
        if after_call and not ends & {*after_call}:
            ends.add(after_call[-1])  # those before it may only end a call that others follow
        return written[0] if written else self.eos_id, ends

    @cached_property
    def turn_ends(self) -> tuple[str, str]:
        """What the template writes after the last answer, and after one that a question follows; "" if no end."""
        closing = self._closing.rstrip() if self._specials_in(self._closing) else self.stop_text
        after = self._after(Message("assistant", PROBE), Message("user", "?"))
        heads = {self._rust.id_to_token(id) for id in self._specials_in(self._before_question())}
        head = min((at for token in heads if (at := after.find(token)) >= 0), default=0)
        return closing, after[:head].rstrip() if self._specials_in(after[:head]) else ""

    def _after(self, answer: Message, *following: Message) -> str:
        """Return what the template writes after the last PROBE in an answer; "" if it refuses the conversation."""
        system, question = Message("system", "?"), Message("user", "?")
        tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
        tools = [tool] if "tool_calls" in answer.extra else []
        for before in ((question,), (system, question)):
            with contextlib.suppress(RowError):
                _, probe, after = self.render((*before, answer, *following), tools=tools).rpartition(PROBE)
                return after if probe else ""
        return ""

    def _before_answer(self) -> str:
        """Return what stands in a turn with a thought before its content."""
        thinking = Message("assistant", PROBE, extra={"reasoning_content": "?"})
        with contextlib.suppress(RowError):
            prompted = self.render([Message("user", "?")], add_generation_prompt=True)
            before = self.render([Message("user", "?"), thinking]).rpartition(PROBE)[0]
            return before[len(common_prefix(prompted, before)) :]
        return ""

    @cached_property
    def generation_prompt(self) -> str:
        """What the template adds to a question for the model to answer it; "" if that changes the question."""
        with contextlib.suppress(RowError):
            question = [Message("user", "?")]
            bare, prompted = self.render(question), self.render(question, add_generation_prompt=True)
            return prompted[len(bare) :] if prompted.startswith(bare) else ""
        return ""

    def _before_question(self) -> str:
        with contextlib.suppress(RowError):
            before, probe, _ = self.render([Message("user", PROBE)]).partition(PROBE)
            return before if probe else ""
        return ""

    def _specials_in(self, text: str) -> list[int]:
        return [id for id in self.encode(text, special=False).tolist() if id in self.special_ids]


def _generation_ends(model_dir: Path) -> list[int]:
    """Return the ids in `eos_token_id` of generation_config.json, which may be one id or a list."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return []
    value = read_json(path, max_bytes=MAX_GENERATION_CONFIG_BYTES, strict=False).get("eos_token_id")
    listed = cast("list[Any]", value) if isinstance(value, list) else [value]
    return [token for token in listed if type(token) is int]


def _template(loaded: Loaded, choice: str, variables: Mapping[str, Any]) -> ChatTemplate | None:
    source = chosen_template(loaded.templates, choice)
    if not variables:
        return None if source is None else ChatTemplate(source, loaded.named)
    names = ", ".join(variables)
    if source is None:
        raise ConfigError(f"data.template_variables: got {names}, but there is no chat template. Set data.template")
    if unread := sorted({*variables} - (read := ChatTemplate(source, loaded.named).variables())):
        allowed = ", ".join(sorted(read - RESERVED_VARIABLES - {*loaded.named})) or "none"
        raise ConfigError(
            f"data.template_variables: got {', '.join(unread)}, which the chat template does not read; "
            f"allowed: {allowed}"
        )
    return ChatTemplate(with_variables(source, variables), loaded.named)

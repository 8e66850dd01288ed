"""Conversations with an environment of the package `verifiers`: it asks as a client of a chat server, and gets answers.

Such an environment leads its conversations itself. In its process (`verifiers_process.py`) all of a step go on until
each has asked or ended; then those that ask get their answers, drawn together, and go on. So a batch depends only on
the conversations, never on which one is faster. Tokens stay as they were drawn: a question that continues what is there
adds to the same document, any other begins another document of the conversation. A reward comes at the end.

Whoever takes too long in company may have waited for another, so it is led there again alone, by the answers that it
got, and has the whole time. What takes too long alone, or ends the process, costs its conversation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.data.chat.call_notations import WrittenCall, parameters_of
from dualtune.data.chat.call_reader import CallReader
from dualtune.data.chat.conversations import Message, read_messages, read_tools
from dualtune.data.chat.row_values import as_list, as_object
from dualtune.data.chat.template import TEMPLATES_WITH_TOOLS
from dualtune.data.sources.rows import RowError
from dualtune.engine.backend import Engine
from dualtune.train.generation.batched import MOST_TOKENS, Completion
from dualtune.train.generation.caches import ConversationCaches
from dualtune.train.rl.drawing import Drawing
from dualtune.train.rl.environments import KEY, Dialogue, Episode, Episodes, StepPrompt
from dualtune.train.rl.isolated import Isolated

PACKAGE = "verifiers"
MODULE = "dualtune.train.rl.verifiers_process"
LOAD_S = 600.0  # until an environment is there: it may download its data
HANGS_S = 5.0  # beyond the time that the process itself allows: it no longer answers
# Keys of a request that change nothing here. Those of the sampling must be what the run draws with.
WITHOUT_EFFECT = ("model", "messages", "tools", "stream", "stream_options", "parallel_tool_calls", "user", "store")
ONLY: Mapping[str, Sequence[Any]] = {
    "n": (1,), "tool_choice": ("auto",), "logprobs": (False,), "extra_body": ({},), "modalities": (["text"],),
}  # fmt: skip


def package_of(name: str) -> str | None:
    """Return the name of an environment in the package, or None if it is one of a file."""
    kind, found, rest = name.partition(":")
    return rest if found and kind == PACKAGE else None


def start_process(name: str, arguments: Mapping[str, Any], timeout_s: float) -> Isolated:
    """Start the process of an environment. ConfigError if package or environment are not there."""
    return Isolated(KEY, MODULE, package_of(name) or "", timeout_s, json.dumps(arguments), start_s=LOAD_S)


class Declined(Exception):
    """A request that gets no answer, but an error that says why."""


class TooLong(Declined):
    """One that a limit of the config ends. The package knows these words, and takes the conversation as cut."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}, which exceeds the configured limit")


@dataclass(slots=True)
class LedEpisode(Episode):
    """A conversation that the environment leads."""

    messages: tuple[Message, ...] = ()  # of the last request that was answered
    tools: tuple[Mapping[str, Any], ...] = ()
    last_answer: Message | None = None
    replies: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])  # answers and errors
    is_within: bool = True  # no limit of the config has refused a request

    @property
    def outcome(self) -> Episode:
        return Episode(**{each.name: getattr(self, each.name) for each in fields(Episode)})


class PackageEpisodes(Episodes):
    """Draws the conversations of a run with an environment of the package."""

    def _start(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Isolated:
        return start_process(name, arguments, timeout_s)

    def _converse(self, engine: Engine, prompts: Sequence[StepPrompt], drawing: Drawing) -> list[Episode]:
        episodes = [
            LedEpisode(n, sample, [Dialogue(prompt.tokens)])
            for n, prompt in enumerate(prompts)
            for sample in range(drawing.num_samples)
        ]
        caches = ConversationCaches(MOST_TOKENS)

        def answer(asking: Sequence[LedEpisode]) -> None:
            for each, drawn in self._answers(engine, drawing, asking, prompts, caches):
                self._give(each, drawn)

        while active := [each for each in episodes if not each.has_ended]:
            replies = self._ask_each("advance", {each.id: _state(each, prompts) for each in active})
            answer([each for each in active if self._asks(each, replies[each.id])])
        self._reward(episodes, prompts)
        # The row of a conversation without an answer is answered without a reward: each is a document.
        answer([each for each in episodes if not each.drawn])
        self._environment.ask({"forget": True})
        return [each.outcome for each in episodes]

    def _ask_each(self, kind: str, items: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Return a reply for each item: together where that is possible in time, else one after the other."""
        request = {"kind": kind, "items": items, "timeout_s": self._timeout_s}
        reply = self._environment.ask(request, self._timeout_s + HANGS_S)
        replies: dict[str, Any] = dict.fromkeys(items) if isinstance(reply, str) else reply
        if len(items) == 1:
            (name,) = items
            why = reply if isinstance(reply, str) else f"took longer than {self._timeout_s:g} s"
            return {name: replies[name] or {"problem": why}}
        late = [name for name, value in replies.items() if value is None]
        return replies | {name: self._ask_each(kind, {name: items[name]})[name] for name in late}

    # ------------------------------------------------------------------------------------------------------------------
    # A request.

    def _asks(self, episode: LedEpisode, state: Mapping[str, Any]) -> bool:
        """Take the state of a conversation. Return whether it asks for an answer."""
        if "problem" in state:
            episode.end(problem=state["problem"])
        elif "request" not in state:
            if not episode.drawn:
                why = episode.replies[-1]["error"] if episode.replies else "it has asked for none"
                episode.end(problem=f"ended without an answer: {why}")
                return False
            episode.end(is_whole=state["is_whole"] and episode.is_within and episode.drawn[-1].is_whole)
        else:
            try:
                self._continue(episode, state["request"])
                return True
            except (Declined, RowError) as error:
                episode.is_within = episode.is_within and not isinstance(error, TooLong)
                episode.replies.append({"error": str(error)})
                if len(episode.replies) - len(episode.drawn) > self._turns:
                    episode.end(problem=f"asks again and again, though it is told: {error}")
        return False

    def _continue(self, episode: LedEpisode, request: Mapping[str, Any]) -> None:
        """Add what a request says to the tokens of its conversation. Declined, or RowError, if it is not answered."""
        self._check_sampling(request)
        if len(episode.drawn) == self._turns:
            raise TooLong(f"this conversation has {self._turns} answers (rollouts.turns)")
        tokenizer = self._drawing.tokenizer
        messages, tools = _messages(request.get("messages")), _tools(request.get("tools") or [])
        if tools and tokenizer.calls is None:
            raise Declined(f"tools: the chat template writes none. {TEMPLATES_WITH_TOOLS}, if the model was trained so")
        between = self._between(episode, messages, tools)
        if between is None:
            start = tokenizer.encode_chat(messages, tools=tools) if tokenizer.template else _plain(messages, tokenizer)
            if not 0 < len(start) <= self._max_length:
                raise TooLong(f"the question has {len(start)} tokens (data.max_length: {self._max_length})")
            if episode.drawn:
                episode.dialogues.append(Dialogue(start))
            else:
                episode.dialogue.start = start
        elif not episode.dialogue.add_reply(between, tokenizer.stop_ids, self._max_length):
            raise TooLong(f"the conversation has more tokens than data.max_length: {self._max_length}")
        episode.messages, episode.tools = messages, tools

    def _between(
        self, episode: LedEpisode, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]
    ) -> np.ndarray | None:
        """Return the tokens between the last answer and the next one; None if the messages do not continue it."""
        tokenizer, number = self._drawing.tokenizer, len(episode.messages)
        if episode.last_answer is None or len(messages) <= number or tools != episode.tools:
            return None
        if messages[:number] != episode.messages or not _are_alike(messages[number], episode.last_answer):
            return None
        if tokenizer.template is None:
            return tokenizer.encode_after_answer(messages[number + 1 :])
        return tokenizer.encode_continuation(messages, number, tools=tools)

    def _check_sampling(self, request: Mapping[str, Any]) -> None:
        """Refuse a request that asks for another sampling than that of the run."""
        sampling = self._drawing.sampling
        own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "stop": [*self._drawing.stops]}
        for key, value in request.items():
            if value is None or key in WITHOUT_EFFECT or value in ONLY.get(key, ()):
                continue
            if key in ("max_tokens", "max_completion_tokens") and value >= sampling.max_tokens:
                continue
            if key in own and value == own[key]:
                continue
            raise Declined(f"{key}: got {str(value)[:100]}; a run draws as its section rollouts says, for all requests")

    # ------------------------------------------------------------------------------------------------------------------
    # An answer.

    def _give(self, episode: LedEpisode, answer: Completion) -> None:
        """Add what was drawn, and put it into the form of a chat server."""
        episode.dialogue.add(answer)
        tokenizer, text, calls = self._drawing.tokenizer, answer.text, list[WrittenCall]()
        if episode.tools and tokenizer.calls is not None:
            tokens = answer.tokens.tolist()
            tokens = tokens[:-1] if tokens[-1] in tokenizer.stop_ids else tokens
            reader = CallReader(tokenizer.calls.notations, parameters_of(episode.tools))
            pieces = [*reader.feed(tokenizer.decode(tokens, tokenizer.call_marks)), *reader.end()]
            text = "".join(piece for piece in pieces if isinstance(piece, str))
            calls = [piece for piece in pieces if isinstance(piece, WrittenCall)]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [_call(call, len(episode.replies), n) for n, call in enumerate(calls)]
        reason = "length" if not answer.is_whole else "tool_calls" if calls else "stop"
        (episode.last_answer,) = _messages([message])
        before = len(episode.dialogue.tokens) - len(answer.tokens)
        episode.replies.append({
            "message": message, "finish_reason": reason, "prompt_tokens": before,
            "completion_tokens": len(answer.tokens),
        })  # fmt: skip

    def _reward(self, episodes: Sequence[LedEpisode], prompts: Sequence[StepPrompt]) -> None:
        """Let the environment reward what has ended well; the conversations of a prompt, which it may compare."""
        ended = [[each for each in episodes if each.prompt == n and not each.problem] for n in range(len(prompts))]
        items = {
            str(n): {"members": {each.id: _state(each, prompts) for each in members}}
            for n, members in enumerate(ended)
            if members
        }
        if not items:
            return
        for n, reply in self._ask_each("reward", items).items():
            for each in ended[int(n)]:
                each.problem = reply.get("problem", "")
                each.reward = float(reply.get("rewards", {}).get(each.id) or 0.0)
                if not each.problem and not math.isfinite(each.reward):
                    each.problem = f"the reward is {each.reward}"


def _state(episode: LedEpisode, prompts: Sequence[StepPrompt]) -> dict[str, Any]:
    """Return all that a conversation depends on, so that its process can be another one."""
    return {"row": prompts[episode.prompt].row, "replies": episode.replies}


def _messages(value: Any) -> tuple[Message, ...]:
    """Read the messages of a request. RowError for what a chat template cannot be given."""
    messages = [as_object(item, f"message {number}") for number, item in enumerate(as_list(value, "messages"), start=1)]
    # Not trained on, so an answer may be blank.
    rows = [{**{k: v for k, v in each.items() if v is not None}, "train": False} for each in messages]
    return read_messages(rows, "messages")


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Read the tools of a request, without `strict`: nothing keeps an answer to a schema."""
    functions: list[dict[str, Any]] = [dict(tool.get("function", tool)) for tool in read_tools(value)]
    for function in functions:
        function.pop("strict", None)
    return tuple({"type": "function", "function": function} for function in functions)


def _are_alike(message: Message, other: Message) -> bool:
    calls = (each.extra.get("tool_calls") for each in (message, other))
    return (message.role, message.content) == (other.role, other.content) and len({*map(str, calls)}) == 1


def _plain(messages: Sequence[Message], tokenizer: Any) -> np.ndarray:
    return tokenizer.encode_text("".join(message.content for message in messages))


def _call(call: WrittenCall, reply: int, number: int) -> dict[str, Any]:
    """Return a call, with an id that is the same when the answer is drawn again; nine characters, as Mistral wants."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    id = call.id or f"call{reply:02d}{number:03d}"
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def environment_rows(name: str, arguments: Mapping[str, Any], *, held_out: bool) -> list[dict[str, Any]]:
    """Return the rows of an environment of the package: a `prompt`, and what the environment needs beside it.

    `held_out`: those that it evaluates with. ConfigError if it has none.
    """
    if package_of(name) is None:
        raise ConfigError(f"{KEY}: got {name}, which has no rows of its own; allowed: verifiers:NAME")
    environment = start_process(name, arguments, LOAD_S)
    try:
        reply = environment.ask({"rows": "eval" if held_out else "train"})
    finally:
        environment.close()
    if isinstance(reply, str):
        raise ConfigError(f"{KEY}: the rows of {name}: {reply}")
    return reply["rows"]

"""Conversations with an environment: the model answers, the environment rewards it and replies, several times.

An environment is a class of the user, one object for each conversation, in a process of its own (`isolated.py`):

    class Calculator:
        def reset(self, row): ...  # returns the prompt: a text, messages, or None for that of the row
        def step(self, text): ...  # returns its reply (a text or messages), the reward of the answer, whether it ends

A conversation is one document, and the model's own tokens are its targets. They stay as they were drawn; the
chat template writes the environment's replies between them.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.base.files import expanded
from dualtune.data.chat.conversations import Message
from dualtune.data.sources.rows import RowError
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Engine
from dualtune.train.generation.batched import MOST_TOKENS, Completion
from dualtune.train.generation.caches import ConversationCaches
from dualtune.train.rl.drawing import Drawing
from dualtune.train.rl.isolated import Isolated, check_defined, imported, serve

KEY = "rollouts.environment"
MOST_CHARACTERS = 1 << 22  # of a reply: more takes long to tokenize, and gives too many tokens


@dataclass(slots=True)
class Dialogue:
    """The tokens of a document: a prompt, then answers with the replies of the environment between them."""

    start: np.ndarray  # int32 [T]: the tokens before the first answer
    parts: list[tuple[np.ndarray, bool]] = field(default_factory=list[tuple[np.ndarray, bool]])  # True: of the model
    drawn: list[Completion] = field(default_factory=list[Completion])

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, int32 [T]."""
        return np.concatenate([self.start, *(tokens for tokens, _ in self.parts)])

    @property
    def document(self) -> tuple[np.ndarray, np.ndarray]:
        """All tokens, and which are the model's own."""
        own = [np.full(len(tokens), is_own) for tokens, is_own in self.parts]
        return self.tokens, np.concatenate([np.zeros(len(self.start), bool), *own])

    @property
    def logprobs(self) -> np.ndarray:
        """The log-probabilities of the model's own tokens, float32."""
        return np.concatenate([np.zeros(0, np.float32), *(each.logprobs for each in self.drawn)])

    @classmethod
    def read(cls, record: dict[str, Any]) -> Dialogue:
        """Return the dialogue of another process, from its fields."""
        parts = [(tokens, is_own) for tokens, is_own in record["parts"]]
        return cls(record["start"], parts, [Completion.read(each) for each in record["drawn"]])

    def add(self, answer: Completion) -> None:
        self.drawn.append(answer)
        self.parts.append((answer.tokens, True))

    def add_reply(self, between: np.ndarray, stop_ids: frozenset[int], most: int) -> bool:
        """Add what follows the last answer: its end, and the reply to it. Return False if it would be too long."""
        last = self.drawn[-1].tokens[-1]
        if len(between) and between[0] == last and int(last) in stop_ids:
            between = between[1:]  # the model has ended its turn itself
        if len(self.tokens) + len(between) > most:
            return False
        self.parts.append((between, False))
        return True


@dataclass(slots=True)
class Episode:
    """The answers of the model to one prompt, and the environment's replies between them."""

    prompt: int  # its index among those of the step
    number: int  # of the samples of the prompt
    dialogues: list[Dialogue]  # several only if a request did not continue the conversation so far
    reward: float = 0.0  # of all answers
    problem: str = ""  # why the reward is not known
    has_ended: bool = False
    is_whole: bool = True  # not ended by a limit

    @property
    def id(self) -> str:
        return f"{self.prompt}/{self.number}"

    @property
    def dialogue(self) -> Dialogue:
        """The last one, which the next answer continues."""
        return self.dialogues[-1]

    @property
    def drawn(self) -> list[Completion]:
        """All answers."""
        return [answer for dialogue in self.dialogues for answer in dialogue.drawn]

    @property
    def logprobs(self) -> np.ndarray:
        """The log-probabilities of the model's own tokens, float32."""
        return np.concatenate([dialogue.logprobs for dialogue in self.dialogues])

    @property
    def text(self) -> str:
        """The last answer, which is what rewards beside the environment judge."""
        return self.drawn[-1].text

    @property
    def texts(self) -> list[str]:
        """The answers of the model."""
        return [each.text for each in self.drawn]

    @classmethod
    def read(cls, record: dict[str, Any]) -> Episode:
        """Return the episode of another process, from its fields."""
        episode = cls(**record)
        episode.dialogues = [Dialogue.read(each) for each in record["dialogues"]]
        return episode

    def end(self, *, is_whole: bool = True, problem: str = "") -> None:
        self.has_ended, self.is_whole, self.problem = True, is_whole, problem


E = TypeVar("E", bound=Episode)


@dataclass(frozen=True, slots=True)
class StepPrompt:
    """A prompt of a step: that of its row, which the environment may replace, and what its random numbers depend on."""

    tokens: np.ndarray  # int32 [T]
    row: Mapping[str, Any]
    numbers: tuple[int, ...]


class Episodes:
    """Draws the conversations of a run with a class of a file."""

    def __init__(
        self, name: str, arguments: Mapping[str, Any], drawing: Drawing, *, turns: int, max_length: int,
        timeout_s: float,
    ) -> None:  # fmt: skip
        """Raise ConfigError for an environment that is not there.

        `turns`: the most answers of a conversation. `max_length`: the most tokens to which one more answer is given.
        """
        self._environment = self._start(name, arguments, timeout_s)
        self._drawing, self._turns, self._timeout_s = drawing, turns, timeout_s
        self._max_length = drawing.most_tokens(max_length)

    def _start(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Isolated:
        return Isolated(KEY, "dualtune.train.rl.environments", name, timeout_s, json.dumps(arguments))

    def close(self) -> None:
        self._environment.close()

    def draw(self, engine: Engine, prompts: Sequence[StepPrompt]) -> list[Episode]:
        """Return the conversations of each prompt, those of a prompt together."""
        return self._converse(engine, prompts, self._drawing)

    def greedy(self, engine: Engine, prompts: Sequence[StepPrompt]) -> list[Episode]:
        """Return one conversation for each prompt, in which the model takes the most probable tokens."""
        sampling = replace(self._drawing.sampling, temperature=0.0)
        return self._converse(engine, prompts, replace(self._drawing, num_samples=1, sampling=sampling))

    def _converse(self, engine: Engine, prompts: Sequence[StepPrompt], drawing: Drawing) -> list[Episode]:
        episodes = [
            Episode(n, sample, [Dialogue(prompt.tokens)])
            for n, prompt in enumerate(prompts)
            for sample in range(drawing.num_samples)
        ]
        for each in episodes:
            self._begin(each, prompts[each.prompt])
        caches = ConversationCaches(MOST_TOKENS)
        while active := [each for each in episodes if not each.has_ended]:
            for each, answer in self._answers(engine, drawing, active, prompts, caches):
                self._answer(each, prompts[each.prompt], answer)
        self._environment.ask({"forget": True})
        return episodes

    def _answers(
        self,
        engine: Engine,
        drawing: Drawing,
        asking: Sequence[E],
        prompts: Sequence[StepPrompt],
        caches: ConversationCaches,
    ) -> Iterator[tuple[E, Completion]]:
        """Yield conversations with their next answers, drawn together. `caches`: of all that go on."""
        if not asking:
            return
        numbers = [(*prompts[each.prompt].numbers, each.number, len(each.drawn)) for each in asking]
        caches.go_on({each.id: len(each.drawn) + 1 < self._turns for each in asking})
        texts = [each.dialogue.tokens for each in asking]
        yield from zip(asking, replace(drawing, num_samples=1).samples(engine, texts, numbers, caches), strict=True)

    def _begin(self, episode: Episode, prompt: StepPrompt) -> None:
        """Let the environment ask. Where that fails, the prompt of the row is answered without a reward."""
        reply = self._ask(episode, prompt)
        if isinstance(reply, str):
            episode.problem = reply
        elif reply["turns"] is not None:
            try:
                start = encoded(self._drawing.tokenizer, reply["turns"])
            except RowError as error:
                episode.problem = str(error)
                return
            if 0 < len(start) <= self._max_length:
                episode.dialogue.start = start
            else:
                allowed = f"allowed: 1 to {self._max_length} (data.max_length)"
                episode.problem = f"reset: got {len(start)} tokens, {allowed}"

    def _answer(self, episode: Episode, prompt: StepPrompt, answer: Completion) -> None:
        """Let the environment reply to an answer."""
        episode.dialogue.add(answer)
        if episode.problem:
            return episode.end(problem=episode.problem)
        reply = self._ask(episode, prompt)
        if isinstance(reply, str):
            return episode.end(problem=reply)
        episode.reward += reply["reward"]
        if reply["done"] or len(episode.drawn) == self._turns:
            return episode.end(is_whole=answer.is_whole and reply["done"])
        try:
            between = self._drawing.tokenizer.encode_after_answer(_messages(reply["turns"] or []))
        except RowError as error:
            return episode.end(problem=str(error))
        if not episode.dialogue.add_reply(between, self._drawing.tokenizer.stop_ids, self._max_length):
            return episode.end(is_whole=False)
        return None

    def _ask(self, episode: Episode, prompt: StepPrompt) -> dict[str, Any] | str:
        """Return the reply to the last answer, or the prompt if there is none yet."""
        return self._environment.ask({
            "id": episode.id, "row": prompt.row, "texts": episode.texts,
            "seed": int(np.random.default_rng([self._drawing.sampling.seed, 7, *prompt.numbers]).integers(1 << 62)),
        })  # fmt: skip


def encoded(tokenizer: Tokenizer, turns: Sequence[Mapping[str, str]]) -> np.ndarray:
    """Return the tokens of a conversation for the model to answer. RowError if the template rejects it."""
    if tokenizer.template is None:
        return tokenizer.encode_text("".join(turn["content"] for turn in turns))
    return tokenizer.encode_chat(_messages(turns))


def _messages(turns: Sequence[Mapping[str, str]]) -> list[Message]:
    return [Message(turn["role"], turn["content"]) for turn in turns]


# ----------------------------------------------------------------------------------------------------------------------
# Inside the process.


class Objects:
    """The objects of open conversations. One that was lost with its process is made again, and led there."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._live: dict[str, tuple[Any, int]] = {}  # by conversation: the object, and how many answers it has seen

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if "forget" in request:
            self._live.clear()
            return {}
        texts: list[str] = request["texts"]
        environment, seen = self._live.pop(request["id"], (None, 0))
        answer: Mapping[str, Any] = {}
        if environment is None or seen != len(texts) - 1:
            environment, seen = self._make(), 0
            has_seed = "seed" in inspect.signature(environment.reset).parameters
            options = {"seed": request["seed"]} if has_seed else {}
            answer = {"turns": turns_of(environment.reset(request["row"], **options))}
        for text in texts[seen:]:
            reply, reward, done = environment.step(text)
            if not math.isfinite(value := float(reward)):
                raise ValueError(f"step returned the reward {value}")
            answer = {"turns": turns_of(reply), "reward": value, "done": bool(done)}
        self._live[request["id"]] = environment, len(texts)
        return answer


def turns_of(reply: Any) -> list[dict[str, str]] | None:
    """Return the reply of an environment as messages. ValueError for anything but a text, messages and None."""
    if reply is None:
        return None
    listed = [{"role": "user", "content": reply}] if isinstance(reply, str) else reply
    turns = [{key: turn[key] for key in ("role", "content")} for turn in cast("list[dict[str, Any]]", listed)]
    if not all(isinstance(value, str) for turn in turns for value in turn.values()):
        raise ValueError("an environment says a text, or messages with the texts role and content")
    if (number := sum(len(turn["content"]) for turn in turns)) > MOST_CHARACTERS:
        raise ValueError(
            f"an environment says at most {MOST_CHARACTERS} characters at once, got {number}: cut the text"
        )
    return turns


def environment_of(name: str, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Return what makes an object of an environment, FILE.py:CLASS. ConfigError if it is not there, or is none."""
    factory = imported(KEY, *_file_and_class(name))
    if missing := [part for part in ("reset", "step") if not callable(getattr(factory, part, None))]:
        raise ConfigError(f"{KEY}: {name} has no method {' and no method '.join(missing)}")
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{KEY}_args: {name} does not take them: {error}") from error
    return partial(factory, **arguments)


def check_unrun(name: str) -> None:
    """Raise ConfigError as `environment_of`, as far as can be said without running the file."""
    check_defined(KEY, *_file_and_class(name))


def _file_and_class(name: str) -> tuple[Path, str]:
    file, _, made = name.rpartition(":")
    if not file.endswith(".py") or not made:
        raise ConfigError(f"{KEY}: got '{name}', allowed: a Python class as FILE.py:CLASS, or verifiers:NAME")
    return expanded(file), made


if __name__ == "__main__":
    serve(lambda: ({}, Objects(environment_of(sys.argv[1], json.loads(sys.argv[2]))).answer))

"""A conversation with a model: its history, and answers that compute only what is new."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from dualtune.data.chat.conversations import Message
from dualtune.data.sources.rows import RowError
from dualtune.errors import ConfigError, DataError
from dualtune.evaluate.adapter_set import BASE, AdapterSet
from dualtune.evaluate.inference import stream_text


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are chosen. Temperature 0 is greedy."""

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


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
            what = "the model" if name == BASE else f"the adapter '{name}'"
            raise ConfigError(
                f"{what} has no chat template, so it was not trained to chat. Give --template FILE, or continue "
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
        asked = [*self.messages, Message("user", text)]
        try:
            prompt = model.tokenizer.encode_chat(asked)
        except RowError as error:
            raise DataError(f"the conversation: {error}") from error
        pieces = stream_text(
            model, prompt, max_tokens=sampling.max_tokens, temperature=sampling.temperature, top_p=sampling.top_p,
            seed=sampling.seed, cache=self._adapters.use(self.name),
        )  # fmt: skip
        answer = ""
        try:
            for piece in pieces:
                answer += piece
                yield piece
        finally:
            if answer:
                self.messages = [*asked, Message("assistant", answer)]

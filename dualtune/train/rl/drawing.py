"""How a run draws samples of its model: to the prompts of its data, as documents that can be trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dualtune.config import Config
from dualtune.config.values import POLICY_OBJECTIVES
from dualtune.data.tokens.store import Document
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Backend, Engine
from dualtune.train.generation.batched import Completion, sample_all
from dualtune.train.generation.caches import ConversationCaches
from dualtune.train.generation.inference import LoadedModel
from dualtune.train.generation.sampling import Sampling


def question_of(document: Document) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens before the last answer of a document, and those of the answer, int32 [T] each."""
    targets = np.flatnonzero(document.loss_mask)
    start = int(targets[np.flatnonzero(np.diff(targets, prepend=-2) > 1)[-1]])
    return document.tokens[:start], document.tokens[start : int(targets[-1]) + 1]


def answered(prompt: np.ndarray, completion: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a document with a sample as its targets, and its loss mask."""
    return np.concatenate([prompt, completion]), np.arange(len(prompt) + len(completion)) >= len(prompt)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws the samples of a run, as its config says."""

    backend: Backend
    tokenizer: Tokenizer
    positions: int | None  # the size of the position table
    sampling: Sampling
    num_samples: int
    stops: tuple[str, ...]

    @classmethod
    def of(cls, config: Config, backend: Backend, tokenizer: Tokenizer, positions: int | None) -> Drawing:
        rollouts = config.rollouts
        # What learns from its samples learns the distribution that they are drawn from: that at the temperature.
        sampling = Sampling(
            rollouts.max_tokens, rollouts.temperature, rollouts.top_p, config.run.seed,
            tempered_logprobs=config.train.objective in POLICY_OBJECTIVES,
        )  # fmt: skip
        return cls(backend, tokenizer, positions, sampling, rollouts.samples, rollouts.stop)

    def most_tokens(self, max_length: int) -> int:
        """Return the most tokens of a conversation to which one more answer may be given."""
        return max_length if self.positions is None else min(max_length, self.positions - 1)

    def samples(
        self, engine: Engine, prompts: Sequence[np.ndarray], numbers: Sequence[tuple[int, ...]],
        caches: ConversationCaches | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Return the samples of each prompt (int32 [T]), those of a prompt together.

        `numbers`: of each prompt, on which its random numbers depend. `caches`: of the prompts, if each has one sample.
        """
        drawn = self._each(engine, prompts, self.sampling, self.num_samples, numbers, caches)
        return sorted(drawn, key=lambda each: (each.prompt, each.number))

    def greedy(self, engine: Engine, prompts: Sequence[np.ndarray]) -> Iterator[Completion]:
        """Yield the greedy answer to each prompt as it ends."""
        yield from self._each(engine, prompts, replace(self.sampling, temperature=0.0), 1, None)

    def _each(
        self, engine: Engine, prompts: Sequence[np.ndarray], sampling: Sampling, num_samples: int,
        numbers: Sequence[tuple[int, ...]] | None, caches: ConversationCaches | None = None,
    ) -> Iterator[Completion]:  # fmt: skip
        model = LoadedModel(engine, self.tokenizer, positions=self.positions)
        is_whole = engine.description.sharding != "full"

        def is_shortage(error: BaseException) -> bool:
            # With a sharded base the others wait for a part of it by then, and nothing can be tried again.
            return is_whole and self.backend.is_out_of_memory(error)

        return sample_all(
            model, prompts, sampling, num_samples, numbers=numbers, stops=self.stops, caches=caches,
            is_shortage=is_shortage,
        )  # fmt: skip

"""On-policy distillation: the student answers, and learns a teacher's distribution at each token of its own answers.

What the student meets in use is its own text, so it learns there where it errs (Agarwal et al., arXiv 2306.13649; Gu et
al., arXiv 2306.08543). The gradient is that of the divergence at each sampled place, not of which places are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dualtune.config import Config
from dualtune.data.documents import Documents, in_memory, units_in_memory
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Backend, Batch, Engine
from dualtune.train.generation.batched import Completion
from dualtune.train.hooks import EvalRecord
from dualtune.train.objectives.comparison import at_targets
from dualtune.train.objectives.distillation import Contribution, Distillation
from dualtune.train.objectives.policy_gradient import GAP
from dualtune.train.objectives.teachers import Teaching, evaluate_taught
from dualtune.train.recovery import Recovery
from dualtune.train.rl.drawing import Drawing, answered, question_of
from dualtune.train.rl.in_step import apart
from dualtune.train.team import Team

EVALUATIONS = 1 << 31  # in the place of a step, for the random numbers of an evaluation: no run has so many


@dataclass(frozen=True)
class TaughtSamples:
    """The samples of a step, one after another, those of a prompt together."""

    documents: Documents  # as the student reads them
    read: Documents  # as the teacher reads them
    drawn: Sequence[Completion]
    prompts: Sequence[Mapping[str, Any]]  # of each sample, what rollouts.jsonl says of where it comes from
    failures: Sequence[str] = ()
    temperature: float = 1.0  # of their log-probabilities: the divergence is one of the models as they are
    _values: dict[int, float] = field(default_factory=dict[int, float])  # the mean divergence of each sample
    _gaps: dict[int, float] = field(default_factory=dict[int, float])  # Σ |log p − log p when it was sampled|

    @property
    def trained(self) -> range:
        """The documents that add to the gradient."""
        return range(len(self.documents))

    def note(self, batch: Batch, contribution: Contribution) -> None:
        """Record the contribution of a micro-batch, for the metrics and the file."""
        assert contribution.logp_N is not None  # a run that draws samples asks first
        for document, values_T in _by_document(contribution.values_N, batch).items():
            self._values[document] = float(values_T.mean())
        for document, logp_T in _by_document(contribution.logp_N, batch).items():
            self._gaps[document] = float(np.abs(logp_T - self.drawn[document].logprobs).sum())

    def settle(self, team: Team) -> None:
        """Learn what the other processes have noted."""
        for noted in (self._values, self._gaps):
            of_all = team.totals([noted.get(n, 0.0) for n in self.trained])
            noted.update(zip(self.trained, map(float, of_all), strict=True))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the step."""
        gap = sum(self._gaps.values()) / sum(len(each.tokens) for each in self.drawn)
        return {**_of_samples(self.drawn), GAP: gap}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of rollouts.jsonl: the nearer a sample is to the teacher, the better."""
        return [
            {
                **prompt, "sample": each.number, "completion": each.text,
                "rewards": {"divergence": value}, "reward": -value, "advantage": 0.0,
                "tokens": len(each.tokens), "is_whole": each.is_whole,
            }
            for place, (prompt, each) in enumerate(zip(self.prompts, self.drawn, strict=True))
            for value in (self._values[place],)
        ]  # fmt: skip


def _by_document(values_N: np.ndarray, batch: Batch) -> dict[int, np.ndarray]:
    values_BT = np.zeros(batch.tokens_BT.shape)
    values_BT[batch.is_target_BT] = values_N
    return at_targets(values_BT, batch)


def _of_samples(drawn: Sequence[Completion]) -> dict[str, float]:
    return {
        "completion_tokens": float(np.mean([len(each.tokens) for each in drawn])),
        "cut": float(np.mean([not each.is_whole for each in drawn])),
    }


class OnPolicy:
    """Draws the samples of a run, which a teacher judges."""

    def __init__(
        self, config: Config, backend: Backend, distillation: Distillation, teaching: Teaching, tokenizer: Tokenizer,
        positions: int | None,
    ) -> None:  # fmt: skip
        self._drawing, self._tokenizer = Drawing.of(config, backend, tokenizer, positions), tokenizer
        self._distillation, self._teaching = distillation, teaching

    def close(self) -> None:
        """Nothing of it outlives a run."""

    def draw(self, engine: Engine, data: Documents, ids: Sequence[int], step: int, team: Team) -> TaughtSamples:
        """Draw the samples of a step. `ids`: its prompts, by their documents; each process has a share of them."""
        return self._drawn(engine, data, self._teaching.train, ids, step, step + 1, team)

    def _drawn(
        self, engine: Engine, data: Documents, read: Documents, ids: Sequence[int], number: int, step: int, team: Team
    ) -> TaughtSamples:
        questions = [question_of(data[i]) for i in ids]
        prompts, numbers, share = [prompt for prompt, _ in questions], [(number, i) for i in ids], team.share
        with apart(engine, team) as own:
            mine = self._drawing.samples(own, prompts[share], numbers[share])
        places = range(len(ids))[share]
        drawn = team.collect([replace(each, prompt=places[each.prompt]) for each in mine], Completion.read)
        drawn.sort(key=lambda each: (each.prompt, each.number))
        theirs = questions if read is data else [question_of(read[i]) for i in ids]
        documents = units_in_memory(
            [answered(questions[place][0], each.tokens) for each in drawn if each.prompt == place]
            for place in range(len(ids))
        )
        documents.shares = data.shares
        rows = [
            {"step": step, "row": data[i].where, "prompt": self._tokenizer.decode(prompt.tolist())}
            for i, (prompt, _) in zip(ids, questions, strict=True)
        ]
        return TaughtSamples(
            documents, in_memory([answered(theirs[each.prompt][0], each.tokens) for each in drawn]), drawn,
            [rows[each.prompt] for each in drawn],
        )  # fmt: skip

    def evaluate(
        self, engine: Engine, documents: Documents, recovery: Recovery, step: int = 0,
        show: Callable[[int, int], None] = lambda done, total: None, team: Team | None = None,
    ) -> EvalRecord:  # fmt: skip
        """Return the divergence of samples of the prompts of evaluation data; the options are those of `evaluate`.

        The same random numbers in each evaluation, so that two differ by what was learned.
        """
        team, ids = team or Team(), range(len(documents))
        samples = self._drawn(engine, documents, self._teaching.eval, ids, EVALUATIONS, step, team)
        read = self._teaching.teacher, samples.read
        record = evaluate_taught(self._distillation, *read, engine, samples.documents, recovery, step, show, team)
        metrics = {f"eval_{name}": value for name, value in _of_samples(samples.drawn).items()}
        return replace(record, eval_loss=record.metrics["eval_divergence"], metrics=metrics)

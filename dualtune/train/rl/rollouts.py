"""Training on the model's own samples: what a step draws, how it is rewarded, and what it adds to the gradient.

A row of data is a prompt with an answer, which is what rewards compare with. A step draws several samples of each of
its prompts, with the weights that it has, and each sample is a document: the prompt, and the sampled tokens as targets.
All that is random is a function of (run.seed, step, document, sample, position), so a step that is repeated after a
stop, on either backend, draws the same.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base.errors import ConfigError
from dualtune.base.files import open_own
from dualtune.config import Config
from dualtune.config.schema import RolloutsConfig
from dualtune.data.documents import Documents, units_in_memory
from dualtune.data.row_fields import RowFields
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Backend, Engine
from dualtune.train.activation_cache import each_alone
from dualtune.train.evaluation import using
from dualtune.train.generation.batched import Completion
from dualtune.train.hooks import EvalRecord
from dualtune.train.objectives.comparison import at_targets, from_all
from dualtune.train.objectives.policy_gradient import OBJECTIVES, PolicyLoss, PolicyObjective, SampledTokens
from dualtune.train.recovery import Recovery
from dualtune.train.rl.drawing import Drawing, answered, question_of
from dualtune.train.rl.environments import Episode, Episodes, StepPrompt
from dualtune.train.rl.in_step import apart
from dualtune.train.rl.package_environments import PackageEpisodes, package_of
from dualtune.train.rl.rewards import JudgedAnswer, JudgedAnswers, Rewards, short_names
from dualtune.train.samples import keep_rows
from dualtune.train.team import Team


def policy_objective(config: Config) -> PolicyObjective | None:
    """Return the objective of a config that trains on samples, with its constants; None for any other."""
    objective, rollouts = OBJECTIVES.get(config.train.objective), config.rollouts
    if objective is None:
        return None
    keys = {"advantage_scale": "scale", "clip_low": "clip_low", "clip_high": "clip_high"}
    chosen = {own: value for key, own in keys.items() if (value := getattr(rollouts, key)) != "auto"}
    return replace(objective, kl=rollouts.kl, **chosen)


# ----------------------------------------------------------------------------------------------------------------------
# What a step has drawn.


@dataclass(frozen=True)
class StepSamples:
    """The samples of a step, one after another, those of a prompt together: `documents` has them as units.

    A sample is a document, or several: then each counts as a sample does.
    """

    documents: Documents
    old: Sequence[np.ndarray]  # of each document, float32 [T]: log p of its targets when they were drawn
    advantages_N: np.ndarray  # of each document
    reference: Mapping[int, np.ndarray] | None  # by document, as `old`; None: the loss has no divergence
    reward: float  # the mean of the samples whose rewards are known
    metrics: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]  # of rollouts.jsonl
    failures: Sequence[str]  # of rewards
    temperature: float  # at which they were drawn, as their log-probabilities are

    @property
    def trained(self) -> list[int]:
        """The documents that add to the gradient. The first one if none does: there is always a gradient."""
        if self.reference is not None:
            return list(range(len(self.documents)))
        return np.flatnonzero(self.advantages_N).tolist() or [0]

    def loss(
        self, logps: Mapping[int, np.ndarray], objective: PolicyObjective, max_tokens: int
    ) -> tuple[PolicyLoss, dict[int, np.ndarray]]:
        """Return the loss of the step, and its slopes ∂loss/∂(log p) of the tokens of each trained document.

        `logps`: of the trained documents, now. The value is −reward, of which the slopes are an estimate: that of the
        objective itself is near 0 whatever the model does, and stands in the metrics as `surrogate`.
        """
        trained, lengths_N = self.trained, np.array([len(each) for each in self.old])
        tokens = SampledTokens(
            np.concatenate([logps[n] for n in trained]),
            np.concatenate([self.old[n] for n in trained]).astype(np.float64),
            lengths_N[trained],
            self.advantages_N[trained],
            None if self.reference is None else np.concatenate([self.reference[n] for n in trained]),
        )
        surrogate = objective(tokens, max_tokens, int(lengths_N.sum()), len(lengths_N))
        slopes = dict(zip(trained, np.split(surrogate.slopes_M, np.cumsum(tokens.lengths_N)[:-1]), strict=True))
        metrics = {**self.metrics, "surrogate": surrogate.value, **surrogate.metrics}
        value = objective.kl * metrics.get("kl", 0.0) - self.reward
        return replace(surrogate, value=value, metrics=metrics), slopes


# ----------------------------------------------------------------------------------------------------------------------
# Drawing.

Sample = Completion | Episode


class Rollouts:
    """Draws and rewards the samples of a run."""

    def __init__(
        self, config: Config, backend: Backend, objective: PolicyObjective, tokenizer: Tokenizer,
        positions: int | None, rows: RowFields,
    ) -> None:  # fmt: skip
        """Raise ConfigError for a reward that is not there. `positions`: the size of the position table."""
        settings = config.rollouts
        self.objective, self.max_tokens = objective, settings.max_tokens
        self.names = settings.rewards
        self._drawing, self._tokenizer = Drawing.of(config, backend, tokenizer, positions), tokenizer
        self._rewards = Rewards(settings.rewards, settings.weights, settings.reward_timeout_s)
        self._rewards.close()  # they are there; their processes start with the first answer
        self._has_answers = not rows.of_prompts
        self._rows = rows if self._rewards.ask_for_rows or settings.environment else None
        if self._rewards.ask_for_rows:
            self._rewards.check_columns(rows.columns)
        self._conversations = rows if self._rewards.ask_for_messages else None
        self._episodes: Episodes | None = None
        if settings.environment is not None:
            self._episodes = episodes_of(settings, self._drawing, config.data.max_length)
            if not isinstance(self._episodes, PackageEpisodes):  # that of a package takes long to load, and stays
                self._episodes.close()
            self.names, self.max_tokens = (*self.names, "environment"), settings.turns * settings.max_tokens
        if self._rewards.comparing and (prompts := rows.of_prompts):
            raise ConfigError(
                f"rollouts.rewards: {self._rewards.comparing[0]} compares with an answer, but {prompts[0]} has prompts "
                "alone (data.format: prompt). Use rewards that need none, such as FILE.py:FUNCTION"
            )

    def close(self) -> None:
        self._rewards.close()
        if self._rows is not None:
            self._rows.close()
        if self._episodes is not None:
            self._episodes.close()

    def draw(self, engine: Engine, data: Documents, ids: Sequence[int], step: int, team: Team) -> StepSamples:
        """Draw and reward the samples of a step. `ids`: its prompts, by their documents.

        Each process draws and rewards those of its share of the prompts, and gets those of all.
        """
        numbers, share = [(step, i) for i in ids], team.share
        with apart(engine, team) as own:
            questions = _Prompts.of(data, ids, self._tokenizer, self._rows, self._conversations)
            if self._episodes is None:
                drawn = self._drawing.samples(own, questions.prompts[share], numbers[share])
            else:
                drawn = self._episodes.draw(own, questions.with_numbers(numbers)[share])
        drawn, judged = self._judged(questions, drawn, team)
        rewards_PG = judged.totals_N.reshape(len(ids), -1)
        # A sample is a document; a conversation is several if a request did not continue it.
        parts = [_documents(questions.prompts[each.prompt], each) for each in drawn]
        of_sample_D = np.repeat(np.arange(len(drawn)), [len(part) for part in parts])
        documents = _in_units(parts, self._drawing.num_samples)
        documents.shares = data.shares
        old = [logprobs for each in drawn for logprobs in _logprobs(each)]
        reference = self._reference(engine, documents, team) if self.objective.kl else None
        metrics = self._metrics(judged, drawn, questions.expected)
        if reference is not None and self.objective.kl_in_reward:
            moved_D = [(logprobs - reference[d]).sum() for d, logprobs in enumerate(old)]
            moved_N = np.bincount(of_sample_D, moved_D, len(drawn))
            rewards_PG = rewards_PG - self.objective.kl * moved_N.reshape(rewards_PG.shape)
            metrics["kl"], reference = float(moved_N.mean()), None
        advantages_N = self.objective.advantages(rewards_PG)
        rows = [
            {
                "step": step + 1, "row": questions.wheres[each.prompt], "sample": each.number,
                **self._texts_of(questions, each),
                "rewards": dict(zip(self.names, map(_json_number, values_R), strict=True)),
                "reward": _json_number(total), "advantage": float(advantage), "tokens": len(each.logprobs),
                "is_whole": each.is_whole,
            }
            for each, values_R, total, advantage
            in zip(drawn, judged.values_NR, judged.totals_N, advantages_N, strict=True)
        ]  # fmt: skip
        return StepSamples(
            documents, old, advantages_N[of_sample_D], reference, metrics["reward"],
            {**metrics, "equal_groups": _equal_groups(judged.totals_N.reshape(len(ids), -1))}, rows,
            judged.failure_texts(), self._drawing.sampling.temperature,
        )  # fmt: skip

    def evaluate(
        self, engine: Engine, documents: Documents, recovery: Recovery, step: int = 0,
        show: Callable[[int, int], None] = lambda done, total: None, team: Team | None = None,
    ) -> EvalRecord:  # fmt: skip
        """Return −reward of greedy answers to the prompts of evaluation data; the options are those of `evaluate`."""
        team, drawn = team or Team(), list[Sample]()
        numbers = [(n,) for n in range(len(documents))]
        with apart(engine, team) as own:
            every = range(len(documents))
            questions = _Prompts.of(documents, every, self._tokenizer, self._rows, self._conversations)
            prompts = questions.prompts[team.share]
            if self._episodes is None:
                for each in self._drawing.greedy(own, prompts):
                    drawn.append(each)
                    show(len(drawn), len(prompts))
            else:
                drawn += self._episodes.greedy(own, questions.with_numbers(numbers)[team.share])
                show(len(drawn), len(prompts))
        drawn, judged = self._judged(questions, drawn, team)
        metrics = self._metrics(judged, drawn, questions.expected)
        return EvalRecord(
            step=step, eval_loss=0.0 - metrics["reward"], eval_targets=sum(len(each.logprobs) for each in drawn),
            metrics={f"eval_{name}": value for name, value in metrics.items()}, failures=judged.failure_texts(),
        )  # fmt: skip

    def _judged(self, questions: _Prompts, drawn: Sequence[Sample], team: Team) -> tuple[list[Sample], JudgedAnswers]:
        """Judge the samples of this process's share of the prompts.

        Return those of all processes, with their places among all prompts and in that order, and what they got.
        """
        places = range(len(questions.prompts))[team.share]
        mine = [replace(each, prompt=places[each.prompt]) for each in drawn]
        with team.apart():
            judged = self._rewards.judge([
                JudgedAnswer(
                    questions.texts[n], each.text, questions.expected[n], questions.rows[n], questions.messages[n]
                )
                for each in mine for n in (each.prompt,)
            ])  # fmt: skip
        if self._episodes is not None:
            episodes = [each for each in mine if isinstance(each, Episode)]
            values_N = np.array([math.nan if each.problem else each.reward for each in episodes])
            failures = [f"{self.names[-1]}: {each.problem}" for each in episodes if each.problem]
            judged = judged.beside(values_N, failures)
        every = team.collect(mine, Completion.read if self._episodes is None else Episode.read)
        order = sorted(range(len(every)), key=lambda n: (every[n].prompt, every[n].number))
        parts = team.collect([judged], JudgedAnswers.read)
        return [every[n] for n in order], JudgedAnswers.joined(parts, order)

    def _texts_of(self, questions: _Prompts, sample: Sample) -> dict[str, str]:
        """Return prompt and completion as text; the completion of a conversation is all that follows its start."""
        if not isinstance(sample, Episode):
            return {"prompt": questions.texts[sample.prompt], "completion": sample.text}
        start = sample.dialogues[0].start.tolist()
        first, *others = (dialogue.tokens.tolist() for dialogue in sample.dialogues)
        texts = [self._tokenizer.decode_all(tokens) for tokens in (first[len(start) :], *others)]
        return {"prompt": self._tokenizer.decode(start), "completion": "\n\n".join(texts)}

    def _metrics(self, judged: JudgedAnswers, drawn: Sequence[Sample], expected: Sequence[str]) -> dict[str, float]:
        """`entropy` is an estimate, that of a token: the mean of −log p of what was drawn."""
        finite_N = np.isfinite(judged.totals_N)
        metrics = {
            "reward": float(judged.totals_N[finite_N].mean()) if finite_N.any() else math.nan,
            "completion_tokens": float(np.mean([len(each.logprobs) for each in drawn])),
            "cut": float(np.mean([not each.is_whole for each in drawn])),
            "entropy": -float(np.concatenate([each.logprobs for each in drawn]).mean()),
        }
        if self._episodes is None and (share := same_answer(drawn, expected if self._has_answers else ())) is not None:
            metrics["same_answer"] = share
        if isinstance(self._episodes, PackageEpisodes):
            metrics["split"] = float(np.mean([isinstance(each, Episode) and len(each.dialogues) > 1 for each in drawn]))
        if len(self.names) > 1:
            for name, values_N in zip(short_names(self.names), judged.values_NR.T, strict=True):
                if np.isfinite(values_N).any():
                    metrics[f"reward_{name}"] = float(values_N[np.isfinite(values_N)].mean())
        return metrics if finite_N.all() else {**metrics, "failed_rewards": 1 - float(np.mean(finite_N))}

    def _reference(self, engine: Engine, documents: Documents, team: Team) -> dict[int, np.ndarray]:
        """Return log p of the tokens of each sample by the base without its adapter."""
        logps = dict[int, np.ndarray]()
        mine = np.arange(len(documents)).reshape(-1, documents.answers)[team.share].ravel().tolist()
        with using(engine, engine.neutral_state()), apart(engine, team) as own:
            for plain in each_alone(documents, mine):
                batch = replace(plain, temperature=self._drawing.sampling.temperature)
                logps |= at_targets(own.target_logprobs(batch).astype(np.float64), batch)
        return from_all(team, logps, {n: int(documents.targets[n]) for n in range(len(documents))})


def _equal_groups(totals_PG: np.ndarray) -> float:
    """Return the share of the prompts whose answers all got the same, those without a reward aside."""
    finite_PG = np.isfinite(totals_PG)
    lowest_P = np.where(finite_PG, totals_PG, math.inf).min(1)
    return float((np.where(finite_PG, totals_PG, -math.inf).max(1) <= lowest_P).mean())


LEAST_PROMPTS = 4  # whose answers may be compared


def same_answer(drawn: Sequence[Sample], expected: Sequence[str]) -> float | None:
    """Return the share of the answers that are the most common one: what answers all prompts alike ignores them.

    None for few prompts, and where more than half of the `expected` answers are one text, too.
    """
    texts = Counter(each.text.strip() for each in drawn)
    most_expected = max(Counter(expected).values(), default=0)
    if len({each.prompt for each in drawn}) < LEAST_PROMPTS or 2 * most_expected > len(expected):
        return None
    return max(texts.values()) / len(drawn)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompts of a step or an evaluation, with what rewards see of their rows."""

    wheres: list[str]  # path:line
    prompts: list[np.ndarray]  # int32 [T]
    texts: list[str]
    expected: list[str]
    rows: list[Mapping[str, Any]]
    messages: Sequence[Sequence[Mapping[str, Any]] | None]  # before the answer; None where a row has none

    @classmethod
    def of(
        cls, data: Documents, ids: Sequence[int], tokenizer: Tokenizer, rows: RowFields | None,
        conversations: RowFields | None,
    ) -> _Prompts:  # fmt: skip
        """Return the prompts of these documents. `rows`, `conversations`: their fields, messages; None: not needed."""
        documents = [data[i] for i in ids]
        parts = [question_of(document) for document in documents]
        texts, expected = ([tokenizer.decode(pair[half].tolist()) for pair in parts] for half in (0, 1))
        wheres = [document.where for document in documents]
        fields: list[Mapping[str, Any]] = [{} if rows is None else rows[where] for where in wheres]
        messages = [None if conversations is None else conversations.prompt_messages(where) for where in wheres]
        return cls(wheres, [prompt for prompt, _ in parts], texts, expected, fields, messages)

    def with_numbers(self, numbers: Sequence[tuple[int, ...]]) -> list[StepPrompt]:
        """Return the prompts of conversations. `numbers`: the random numbers of each depend on them."""
        return [StepPrompt(*each) for each in zip(self.prompts, self.rows, numbers, strict=True)]


def _documents(prompt: np.ndarray, sample: Sample) -> list[tuple[np.ndarray, np.ndarray]]:
    if isinstance(sample, Episode):
        return [dialogue.document for dialogue in sample.dialogues]
    return [answered(prompt, sample.tokens)]


def _in_units(parts: Sequence[list[tuple[np.ndarray, np.ndarray]]], num_samples: int) -> Documents:
    """Return the documents of all samples, those of a prompt in one unit if each prompt has as many."""
    units = [[*chain(*parts[first : first + num_samples])] for first in range(0, len(parts), num_samples)]
    if len({*map(len, units)}) > 1:
        units = [[document] for unit in units for document in unit]
    return units_in_memory(units)


def _logprobs(sample: Sample) -> list[np.ndarray]:
    """Return the log-probabilities of each document of a sample."""
    return [each.logprobs for each in (sample.dialogues if isinstance(sample, Episode) else [sample])]


def _json_number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def episodes_of(settings: RolloutsConfig, drawing: Drawing, max_length: int) -> Episodes:
    """Return what leads the conversations of a run. ConfigError for an environment that is not there."""
    assert settings.environment is not None
    package = package_of(settings.environment)
    return (Episodes if package is None else PackageEpisodes)(
        settings.environment, settings.environment_args, drawing, turns=settings.turns, max_length=max_length,
        timeout_s=settings.reward_timeout_s,
    )  # fmt: skip


class RolloutFile:
    """The samples of a run with their rewards, as lines of JSON. A resumed run drops those of steps that it repeats."""

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        keep_rows(path, first_step)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with os.fdopen(open_own(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())

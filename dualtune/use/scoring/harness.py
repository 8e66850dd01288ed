"""Tasks of lm-eval (EleutherAI's evaluation harness), where it is installed, on an engine.

`HarnessModel` has the three methods that lm-eval asks of an `lm_eval.api.model.LM`, and imports nothing of it: `run`
makes a subclass of both.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any, Protocol

import numpy as np

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.base.versions import import_extra
from dualtune.data.batches import SequenceLayout
from dualtune.data.documents import in_memory
from dualtune.engine.backend import Backend
from dualtune.engine.memory.estimate import AUTO_MICRO_BATCH_TOKENS
from dualtune.model.base_model import resolve_model
from dualtune.model.config_file import longest_text, read_config
from dualtune.train.evaluation import by_document, greedy, losses
from dualtune.train.generation.batched import PromptedRow, continue_rows, prompted_row
from dualtune.train.generation.inference import LoadedModel
from dualtune.train.generation.sampling import Sampling
from dualtune.train.recovery import Recovery

MOST_TOKENS, USUAL_TOKENS = 8192, 2048  # of a document: the most, and where the model does not say its own limit
DEFAULT_ANSWER = 256  # tokens, as in lm-eval

Show = Callable[[int, int], None]


class HarnessRequest(Protocol):
    """What lm-eval calls an Instance."""

    @property
    def args(self) -> tuple[Any, ...]: ...


@dataclass(frozen=True, slots=True)
class _AnswerRequest:
    """A request for an answer."""

    context: str
    sampling: Sampling
    stops: tuple[str, ...]

    @classmethod
    def of(cls, context: str, options: Mapping[str, Any]) -> _AnswerRequest:
        """Read the options that lm-eval calls `generation_kwargs`."""
        until: Any = options.get("until") or []
        stops: list[str] = [until] if isinstance(until, str) else list(until)
        longest = int(options.get("max_gen_toks", DEFAULT_ANSWER))
        samples = bool(options.get("do_sample")) and float(options.get("temperature") or 0) > 0
        sampling = Sampling(longest)
        if samples:
            sampling = Sampling(
                longest, float(options["temperature"]), float(options.get("top_p") or 1.0),
                top_k=int(options.get("top_k") or 0), min_p=float(options.get("min_p") or 0.0),
            )  # fmt: skip
        return cls(context, sampling, tuple(stop for stop in stops if stop))

    def before_stop(self, text: str) -> str:
        """Return a text up to the first of the stop texts."""
        return text[: min((text.index(stop) for stop in self.stops if stop in text), default=None)]


class HarnessModel:
    """A loaded model with its adapter, as lm-eval uses one. Contexts that are too long lose their beginning."""

    def __init__(
        self, model: LoadedModel, backend: Backend, max_tokens: int, show: Show,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:  # fmt: skip
        """`tell` hears why answers are generated one by one, or fewer at once."""
        super().__init__()
        self._model, self._backend, self._max_tokens = model, backend, max_tokens
        self._show, self._tell = show, tell
        self._recovery = Recovery(backend, model.engine, SequenceLayout(AUTO_MICRO_BATCH_TOKENS), max_tokens)

    def loglikelihood(self, requests: Sequence[HarnessRequest]) -> list[tuple[float, bool]]:
        """Return log p of each continuation after its context, and whether greedy decoding would give it."""
        pairs = [self._encoded(*request.args) for request in requests]
        scores_N2 = self._scored([(ids, len(ids) - targets) for ids, targets in pairs], with_greedy=True)
        return [(float(logprob), bool(is_greedy)) for logprob, is_greedy in scores_N2]

    def loglikelihood_rolling(self, requests: Sequence[HarnessRequest]) -> list[float]:
        """Return log p of each text after the first token of a document. Every token is predicted once.

        A longer text is cut into windows of the most tokens that fit; the last one has as much context as fits.
        """
        windows: list[tuple[np.ndarray, int]] = []
        owner: list[int] = []
        for i, request in enumerate(requests):
            ids = np.concatenate([self._prefix, self._model.tokenizer.encode(request.args[0], special=False)])
            for start in range(1, len(ids), self._max_tokens - 1):
                end = min(start + self._max_tokens - 1, len(ids))
                context = max(0, end - self._max_tokens)
                windows.append((ids[context:end], start - context))
                owner.append(i)
        sums = np.zeros(len(requests))
        if windows:  # a text may be empty
            np.add.at(sums, owner, self._scored(windows, with_greedy=False)[:, 0])
        return sums.tolist()

    def generate_until(self, requests: Sequence[HarnessRequest]) -> list[str]:
        """Continue each context up to the first of its stop texts, which is not part of the answer.

        All in one batch, long contexts first. A sampled answer depends on its own request alone; repeated ones differ.
        """
        answer_requests = [_AnswerRequest.of(*request.args) for request in requests]
        times, rows = Counter[_AnswerRequest](), list[PromptedRow]()
        for i, request in enumerate(answer_requests):
            room = max(1, self._max_tokens - request.sampling.max_tokens)
            ids = self._model.tokenizer.encode_text(request.context)[-room:]
            ids = ids if len(ids) else self._prefix
            rows.append(
                prompted_row(self._model, i, ids, request.sampling, draws=(times[request],), stops=request.stops)
            )
            times[request] += 1
        rows.sort(key=lambda row: -len(row.prompt))
        answers = [""] * len(rows)
        continuations = continue_rows(self._model, rows, is_shortage=self._backend.is_out_of_memory, tell=self._tell)
        for done, continuation in enumerate(continuations, start=1):
            answers[continuation.number] = answer_requests[continuation.number].before_stop(continuation.text)
            self._show(done, len(rows))
        return answers

    @property
    def _prefix(self) -> np.ndarray:
        """What stands before a text of its own, int32 [1]: the BOS token, or else the EOS token."""
        tokenizer = self._model.tokenizer
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if first is None:
            raise ConfigError("--harness: the tokenizer has neither a BOS nor an EOS token to begin a text with")
        return np.array([first], np.int32)

    def _encoded(self, context: str, continuation: str) -> tuple[np.ndarray, int]:
        """Return the token ids of both, int32 [T], and how many of them belong to the continuation.

        Both are encoded together, since a token may begin with the space between them, which therefore moves to the
        continuation: lm-eval does the same.
        """
        encode = self._model.tokenizer.encode
        text = context.rstrip()
        continuation, context = context[len(text) :] + continuation, text
        if not context:
            ids = encode(continuation, special=False)
            both, targets = np.concatenate([self._prefix, ids]), len(ids)
        else:
            both = encode(context + continuation, special=True)
            targets = len(both) - len(encode(context, special=True))
        targets = min(max(targets, 1), len(both) - 1, self._max_tokens - 1)
        return both[-self._max_tokens :], targets

    def _scored(self, texts: Sequence[tuple[np.ndarray, int]], *, with_greedy: bool) -> np.ndarray:
        """Return float64 [texts, 2]: log p of the tokens from the given index on, and 1 if all are the most probable.

        Without `with_greedy` the second is not computed, and 0.
        """
        documents = in_memory((ids, np.arange(len(ids)) >= start) for ids, start in texts)
        engine, scores = self._model.engine, np.zeros((len(texts), 2))
        scores[:, 0] = -by_document(documents, self._recovery, losses(engine), self._show)[:, 0]
        if with_greedy:
            scores[:, 1] = by_document(documents, self._recovery, greedy(engine))
        return scores


def check_installed() -> None:
    """Raise EnvironmentFault if lm-eval is not installed."""
    _imported("lm_eval")


def run(
    model: LoadedModel,
    name: str,
    backend: Backend,
    tasks: Sequence[str],
    *,
    limit: int | None,
    show: Show,
    tell: Callable[[str], object] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Return lm-eval's results of each task, by their names there: metrics and standard errors.

    ConfigError for a task that is unknown or cannot be loaded, EnvironmentFault if lm-eval or the data of a task are
    not available.
    """
    stderr = sys.stderr

    def tell_outside(text: str) -> None:
        with redirect_stderr(stderr):
            tell(text)

    base = _imported("lm_eval.api.model").LM
    lm = type("DualtuneModel", (HarnessModel, base), {})(model, backend, _max_tokens(model, name), show, tell_outside)
    manager = _imported("lm_eval.tasks").TaskManager()
    unknown = [task for task in tasks if task not in manager.all_tasks and not Path(task).is_file()]
    if unknown:
        raise ConfigError(f"--harness: lm-eval has no task {unknown[0]!r}. To list them: lm-eval ls tasks")
    _imported("lm_eval.evaluator").get_git_commit_hash = lambda: None  # git complains outside of a repository
    try:
        with redirect_stderr(io.StringIO()):  # bars and remarks; the command line has its own line
            report = _imported("lm_eval").simple_evaluate(
                model=lm, tasks=list(tasks), limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=1000
            )
    except Exception as error:  # foreign code and foreign files
        if any(frame.f_locals.get("self") is lm for frame, _ in walk_tb(error.__traceback__)):
            raise  # it comes out of the model, not out of lm-eval and its tasks
        kind = EnvironmentFault if isinstance(error, OSError | ImportError) else ConfigError  # no network, no package
        why = next(iter(str(error).strip().splitlines()), "")[:300]
        raise kind(f"--harness {','.join(tasks)}: {type(error).__name__}: {why}") from error
    return {task: {key: value for key, value in numbers.items() if "," in key}  # "acc,none": the metric and its filter
            for task, numbers in report["results"].items()}  # fmt: skip


def _max_tokens(model: LoadedModel, name: str) -> int:
    """Return the most tokens of a document: as many as the model has positions, within reason."""
    longest = longest_text(read_config(resolve_model(name, weights=False))) or USUAL_TOKENS
    return min(model.positions or longest, longest, MOST_TOKENS)


def _imported(module: str) -> Any:
    return import_extra(module, "harness", "--harness")

"""`dualtune eval`: evaluate an adapter on held-out data."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DataError
from dualtune.base.files import expanded
from dualtune.base.text import in_columns
from dualtune.cli.options import backend_for, config_argument, json_option, platform_option, say_json, set_option
from dualtune.cli.screen import Phases, phases
from dualtune.cli.terminal import say
from dualtune.config import Config, load_config
from dualtune.data.chat.examples import Example, answers
from dualtune.data.documents import Data, Documents
from dualtune.engine.backend import Backend
from dualtune.engine.capabilities import check_capabilities
from dualtune.model.formats.directory import adapter_directory
from dualtune.train.evaluation import evaluate, exact_answers, layout_of, losses_of_examples
from dualtune.train.fingerprints import without_adapter
from dualtune.train.generation.inference import LoadedModel, load_model, question
from dualtune.train.generation.sampling import Sampling
from dualtune.train.objectives.comparison import configured_objective, evaluate_against
from dualtune.train.objectives.distillation import configured_distillation
from dualtune.train.prepare import start_of
from dualtune.train.recovery import Recovery, explained, explanation
from dualtune.train.state.metrics import perplexity
from dualtune.train.state.run_dir import PREDICTIONS
from dualtune.use.scoring import harness
from dualtune.use.scoring.answers import KeptAnswers, PredictedRow, identity, mean_loss, write_predictions
from dualtune.use.scoring.compare import PairedComparison, compare_losses, compare_scores, find_leaks
from dualtune.use.scoring.metrics import (
    LENIENT,
    RIGHT,
    TASKS,
    Metric,
    Score,
    is_right,
    json_metric,
    pattern_metrics,
    user_metric,
)

# ----------------------------------------------------------------------------------------------------------------------
# The phases of `dualtune eval`, one after another, and its report.

EXACT = "exact_match"
MAX_TOKENS = 256  # of an answer
BASE, TUNED = "base", "adapter"


@dataclass(slots=True)
class Side:
    """What was measured of the base or of the adapter, by row. What was not asked for is empty or None."""

    losses: np.ndarray | None = None  # float64 [rows, 2], as `losses_of_examples` returns them
    exact: np.ndarray | None = None  # bool [rows]
    answers: list[str] = field(default_factory=lambda: [])  # of the first rows, up to --limit
    scores: list[list[Score]] = field(default_factory=lambda: [])  # of these, by metric


class EvalRun:
    """One call of the command."""

    def __init__(
        self, settings: Config, options: EvalOptions, adapter: Path | None, backend: Backend,
        metrics: Sequence[Metric], shown: Phases,
    ) -> None:  # fmt: skip
        check_capabilities(backend, settings)
        self._settings, self._options, self._adapter = settings, options, adapter
        self._backend, self._metrics, self._shown = backend, metrics, shown
        self._kept: KeptAnswers | None = None  # while answers are generated

    def report(self) -> dict[str, Any]:
        """Measure, write the predictions, and return the results by their names in the JSON."""
        with self._phase("loading", "loaded", "the model"):
            sources = None if self._options.harness else Data(self._settings, _text(self._options.data))
            model = self._load(trained=not self._options.base)
        if model.note:
            say(f"template    {model.note}", err=True)
        if sources is None:
            return {"adapter": _text(self._adapter), "harness": self._harness(model)}
        # Answers that cannot be scored are found now: the loss over all rows takes minutes.
        everything, examples = self._held_out(sources, model)
        documents = everything.desirable()
        self._check_expected(model, examples)
        with self._phase("evaluating", "evaluated", "loss"):
            result = evaluate(model.engine, documents, self._recovery(model, documents), show=self._shown.update)
        report: dict[str, Any] = {
            "adapter": _text(self._adapter),
            "loss": result.eval_loss,
            "perplexity": perplexity(result.eval_loss),
            "targets": result.eval_targets,
            "rows": len(examples),
        }
        if everything.answers > 1 and not self._options.base:
            report["preference"] = self._preference(model, everything)
        if (divergence := self._divergence(model, documents)) is not None:
            report["divergence"] = divergence
        # The base is measured by the same loaded weights, with the adapter switched off.
        main = BASE if self._options.base else TUNED
        sides = {main: self._side(main, model, documents, examples)}
        if self._options.compare:
            with self._base_of(model) as base:
                sides[BASE] = self._side(BASE, base, documents, examples)
        report |= self._means(sides.get(TUNED) or sides[BASE])
        if self._options.compare:
            report["compare"] = [asdict(row) | {"verdict": row.verdict} for row in self._compared(sides)]
        # Answers that were kept for a stopped call go only when the whole file is written.
        if (path := self._predictions_file()) is not None:
            write_predictions(path, self._predictions(model, examples, sides))
            report["predictions"] = str(path)
        if self._kept is not None:
            self._kept.finish()
        if self._options.leaks:
            report["leaks"] = self._leaks(sources, documents, examples)
        return report

    # --- models -------------------------------------------------------------------------------------------------------

    @property
    def _trained_model(self) -> Path:
        return expanded(self._settings.run.dir) / "model"

    def _load(self, *, trained: bool) -> LoadedModel:
        """Load the model with the adapter, the model of full fine-tuning, or the base."""
        model, directory = self._settings.model, self._trained_model
        is_whole = trained and self._settings.adapter.trains_model
        return load_model(
            self._backend, str(directory) if is_whole else model.name, self._adapter, dtype=model.dtype,
            quantization=model.quantization, template=self._settings.data.template,
            special_tokens_in_text=self._settings.data.special_tokens_in_text,
            template_variables=self._settings.data.template_variables, system=self._settings.data.system,
            kernels=model.kernels,
            init="pretrained" if is_whole else model.init, seed=self._settings.run.seed,
            new_tokens=self._settings.data.added_tokens,
        )  # fmt: skip

    def _base_of(self, model: LoadedModel) -> AbstractContextManager[LoadedModel]:
        """Return the base: the same model with its adapter switched off, or another model after full fine-tuning."""
        if self._settings.adapter.trains_model:
            with self._phase("loading", "loaded", "the base"):
                return contextlib.nullcontext(self._load(trained=False))

        @contextlib.contextmanager
        def switched_off() -> Generator[LoadedModel]:
            with without_adapter(model.engine):
                yield model

        return switched_off()

    def _recovery(self, model: LoadedModel, documents: Documents) -> Recovery:
        return Recovery(
            self._backend, model.engine, layout_of(self._settings), documents.longest,
            tell=lambda event: say(f"memory      ran out: {event.message}", err=True),
            explain=lambda _, reason: explanation(self._backend, self._settings, reason),
        )  # fmt: skip

    # --- measuring ----------------------------------------------------------------------------------------------------

    def _held_out(self, sources: Data, model: LoadedModel) -> tuple[Documents, list[Example]]:
        self._shown.begin("tokenizing", "the evaluation data")
        documents = sources.held_out_only(model.tokenizer)
        if not documents.num_rows:
            raise DataError("data.eval: the config has no held-out data. Give --data FILE")
        if not len(documents):
            raise DataError("the evaluation data has no target token within data.max_length")
        examples = sources.held_out_examples(documents)
        return documents, [answers(example)[0] for example in examples if example.label >= 0]

    def _preference(self, model: LoadedModel, documents: Documents) -> dict[str, float]:
        """Return the loss of the objective and its metrics, against the reference that the run had."""
        settings, objective = self._settings, configured_objective(self._settings)
        if objective is None or (objective.needs_reference and settings.adapter.trains_model):
            return {}  # the base of a full fine-tuning is another model
        start = None if settings.preference.reference == "base" else start_of(settings)
        reference = model.engine.neutral_state() if start is None else start.tensors
        with self._phase("evaluating", "evaluated", "preferences"):
            recovery = self._recovery(model, documents)
            result = evaluate_against(model.engine, documents, recovery, objective, reference, self._shown.update)
        return {
            "objective_loss": result.eval_loss,
            **{key.removeprefix("eval_"): x for key, x in result.metrics.items()},
        }

    def _divergence(self, model: LoadedModel, documents: Documents) -> float | None:
        """Return that from the teacher whose distributions were recorded; None where they are not of these rows."""
        recorded = self._settings.distill.distributions
        if recorded is None or self._options.data:
            return None
        if not expanded(recorded).is_file():
            say(f"divergence  not measured: there is no {expanded(recorded)} here", err=True)
            return None
        distillation = configured_distillation(self._settings, documents, documents, model.tokenizer)
        if distillation is None or distillation.eval is None:
            return None
        with self._phase("evaluating", "evaluated", "the divergence"):
            result = distillation.evaluate(
                model.engine, documents, self._recovery(model, documents), show=self._shown.update,
                soft_targets=distillation.eval,
            )  # fmt: skip
        return result.metrics["eval_divergence"]

    def _check_expected(self, model: LoadedModel, examples: list[Example]) -> None:
        """Raise DataError for an expected answer that cannot be scored, before anything is measured."""
        if self._metrics:
            for example in examples[: self._options.limit]:
                expected = question(model, example).expected
                for metric in self._metrics:
                    metric.check(example.where, expected)

    def _side(self, name: str, model: LoadedModel, documents: Documents, examples: list[Example]) -> Side:
        """Measure one model on every row."""
        options, side = self._options, Side()
        if options.compare or options.generates:
            with self._phase("evaluating", "evaluated", "rows"):
                recovery = self._recovery(model, documents)
                side.losses = losses_of_examples(model.engine, documents, examples, recovery, self._shown.update)
        if options.exact:
            with self._phase("evaluating", "evaluated", "exact match"):
                longest, recovery = self._settings.data.max_length, self._recovery(model, documents)
                side.exact = exact_answers(model, examples, longest, recovery, self._shown.update)
        if options.generates:
            with self._phase("generating", "generated", "answers"):
                self._answer(name, model, examples[: options.limit], side)
        return side

    def _answer(self, name: str, model: LoadedModel, examples: Sequence[Example], side: Side) -> None:
        """Generate the answers of a side and score them, as they come. Those of a call that was stopped are kept."""
        questions = [question(model, example) for example in examples]
        sampling = Sampling(max_tokens=self._options.max_tokens or MAX_TOKENS)
        if self._kept is None:
            self._kept = KeptAnswers(self._predictions_file(), self._made_by(model, sampling))
        answers, scores = dict[int, str](), dict[int, list[Score]]()
        continuations = self._kept.continued(
            name, model, [asked.ids for asked in questions], sampling, is_shortage=self._backend.is_out_of_memory,
            tell=lambda text: say(f"answers     {text}", err=True),
        )  # fmt: skip
        for continuation in continuations:
            i = continuation.number
            answers[i] = continuation.text
            scores[i] = [
                metric.score(examples[i].where, questions[i].expected, continuation.text) for metric in self._metrics
            ]
            self._shown.update(len(answers), len(examples))
        side.answers = [answers[i] for i in range(len(examples))]
        side.scores = [scores[i] for i in range(len(examples))]

    def _made_by(self, model: LoadedModel, sampling: Sampling) -> dict[str, Any]:
        settings = self._settings
        names = [settings.model.name]
        if settings.adapter.trains_model and not self._options.base:
            names.append(str(self._trained_model))
        return identity(names, model, sampling) | {"init": settings.model.init, "seed": settings.run.seed}

    def _harness(self, model: LoadedModel) -> dict[str, dict[str, Any]]:
        with self._phase("evaluating", "evaluated", "tasks of lm-eval"):
            return harness.run(
                model, self._settings.model.name, self._backend, self._options.tasks, limit=self._options.limit,
                show=self._shown.update, tell=lambda text: say(f"answers     {text}", err=True),
            )  # fmt: skip

    def _leaks(self, sources: Data, documents: Documents, examples: list[Example]) -> dict[str, Any]:
        with self._phase("comparing", "compared", "with the training data"):
            return asdict(find_leaks(examples, sources.training_examples(documents)))

    @contextlib.contextmanager
    def _phase(self, doing: str, done: str, what: str) -> Generator[None]:
        self._shown.begin(doing, what)
        yield
        self._shown.finish(done)

    # --- results ------------------------------------------------------------------------------------------------------

    def _means(self, side: Side) -> dict[str, Any]:
        """Return the mean of each metric, those of a pattern under their own keys."""
        report: dict[str, Any] = {} if side.exact is None else {EXACT: float(side.exact.mean())}
        if not self._metrics:
            return report
        means = {name: float(scores.astype(np.float64).mean()) for name, scores in self._scores(side)}
        own = {name: mean for name, mean in means.items() if name not in (RIGHT, LENIENT)}
        of_pattern = {name: means[name] for name in (RIGHT, LENIENT) if name in means}
        return report | {"answers": len(side.answers)} | of_pattern | ({"metrics": own} if own else {})

    def _scores(self, side: Side) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each metric with its scores by row: bool, or float64 if one of them is a number."""
        for metric, scores in zip(self._metrics, zip(*side.scores, strict=True), strict=True):
            yield metric.name, np.array(scores, bool if all(isinstance(x, bool) for x in scores) else np.float64)

    def _compared(self, sides: Mapping[str, Side]) -> Iterator[PairedComparison]:
        base, tuned = sides[BASE], sides[TUNED]
        if base.losses is not None and tuned.losses is not None:
            yield compare_losses(base.losses, tuned.losses)
        if base.exact is not None and tuned.exact is not None:
            yield compare_scores(EXACT, base.exact, tuned.exact)
        if self._metrics:
            for (name, before), (_, after) in zip(self._scores(base), self._scores(tuned), strict=True):
                yield compare_scores(name, before, after)

    def _predictions_file(self) -> Path | None:
        """Return where predictions are written. By default only those of the run's own adapter are kept with it."""
        options = self._options
        if options.predictions or not options.generates or options.base or options.adapter or options.data:
            return options.predictions
        return expanded(self._settings.run.dir) / PREDICTIONS

    def _predictions(
        self, model: LoadedModel, examples: Sequence[Example], sides: Mapping[str, Side]
    ) -> Iterator[PredictedRow]:
        main = sides.get(TUNED) or sides[BASE]
        assert main.losses is not None
        for i, example in enumerate(examples[: self._options.limit]):
            reply = question(model, example)
            texts = {name: side.answers[i] for name, side in sides.items()}
            right = is_right(main.scores[i])
            if main.exact is not None:
                right = bool(main.exact[i]) if right is None else right and bool(main.exact[i])
            loss = mean_loss(*main.losses[i].tolist())
            yield PredictedRow(reply.prompt, reply.expected, texts.get(BASE), texts.get(TUNED), right, loss)


LEAST_WIDTH = 13  # of the names


def as_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report for people."""
    tables = {"compare": _compare_lines, "harness": _harness_lines}
    width = max(LEAST_WIDTH, *map(len, report.get("preference", ())), 0)
    for name, value in report.items():
        if name in tables:
            yield from tables[name](value)
        elif name in ("metrics", "preference"):
            yield from (f"{key:<{width}} {_shown(mean)}" for key, mean in value.items())
        else:
            yield f"{name:<{width}} {_leaks_in_words(value) if name == 'leaks' else _shown(value)}"


def _leaks_in_words(leaks: Mapping[str, Any]) -> str:
    first = f", the first: {leaks['first'][0]} and {leaks['first'][1]}" if leaks["first"] else ""
    counted = f"{leaks['exact']} exactly and {leaks['near']} nearly of {leaks['rows']} held-out rows"
    return f"{counted} are in the training data{first}"


def _compare_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield in_columns([("", BASE, TUNED, "difference", "95 % interval", ""), *map(_compared, rows)])


def _harness_lines(tasks: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = [(task, key, _shown(number)) for task, numbers in tasks.items() for key, number in numbers.items()]
    yield in_columns([("task", "metric", "value"), *rows])


def _compared(row: Mapping[str, Any]) -> tuple[str, ...]:
    interval = "-" if row["low"] is None else f"{row['low']:+.4f} to {row['high']:+.4f}"
    numbers = (f"{row[BASE]:.4f}", f"{row[TUNED]:.4f}", f"{row['difference']:+.4f}")
    return row["metric"], *numbers, interval, row["verdict"]


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _text(path: Path | None) -> str | None:
    return str(path) if path else None


# ----------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The options of the command, as they were given."""

    adapter: Path | None
    base: bool
    data: Path | None
    exact: bool
    task: str | None
    answer_pattern: str | None
    json_fields: tuple[str, ...]
    metrics: tuple[str, ...]
    compare: bool
    predictions: Path | None
    harness: str | None
    leaks: bool
    limit: int | None
    max_tokens: int | None

    @property
    def generates(self) -> bool:
        """Whether answers are generated."""
        scored = self.task or self.answer_pattern or self.json_fields or self.metrics
        return bool(scored or self.predictions)

    @property
    def tasks(self) -> list[str]:
        """The tasks of lm-eval that are named."""
        return [task.strip() for task in (self.harness or "").split(",") if task.strip()]

    def check(self) -> None:
        """Raise UsageError for options that exclude each other, and for empty ones."""
        if self.harness is not None and not self.tasks:
            raise click.UsageError(
                f"--harness: got {self.harness!r}, which names no task. To list them: lm-eval ls tasks"
            )
        if self.answer_pattern == "":
            raise click.UsageError("--answer-pattern: got '', which matches everything. Give a regular expression.")
        if self.task and self.answer_pattern:
            raise click.UsageError("Give --task or --answer-pattern, not both.")
        if self.base and self.adapter:
            raise click.UsageError("Give --adapter or --base, not both.")
        if self.base and self.compare:
            raise click.UsageError("Give --base or --compare, not both: --compare measures the base too.")
        if self.harness and (self.generates or self.exact or self.compare or self.data):
            raise click.UsageError("--harness measures the tasks alone: give it without options for the held-out data.")
        if self.limit and not (self.generates or self.harness):
            raise click.UsageError("--limit is for generated answers and --harness: the loss is always over all rows.")
        if self.max_tokens is not None and not self.generates:
            raise click.UsageError("--max-tokens is for generated answers. Add what is to be scored, such as --task.")

    def pattern(self) -> re.Pattern[str] | None:
        """Return the pattern of answers. UsageError if it is not a regular expression."""
        text = TASKS[self.task] if self.task else self.answer_pattern
        try:
            return re.compile(text) if text else None
        except re.error as error:
            raise click.UsageError(
                f"--answer-pattern: got {text!r}, which is not a regular expression: {error}"
            ) from error


@click.command("eval")
@config_argument
@click.option(
    "--adapter", type=click.Path(path_type=Path),
    help="The adapter directory. Default: the adapter of the config's run.",
)  # fmt: skip
@click.option("--base", is_flag=True, help="Measure the base model without an adapter.")
@click.option(
    "--compare", is_flag=True, help="Measure the base and the adapter, and their differences with confidence intervals."
)
@click.option("--data", type=click.Path(path_type=Path), help="A file to evaluate on. Default: the config's data.eval.")
@click.option(
    "--exact-match", "exact", is_flag=True,
    help="Also report the share of answers that greedy decoding reproduces exactly.",
)  # fmt: skip
@click.option(
    "--task", type=click.Choice(["gsm8k"]),
    help="Also generate answers, and report the share that is correct for this task.",
)  # fmt: skip
@click.option(
    "--answer-pattern", metavar="REGEX",
    help="Also generate answers, and compare the first group of this pattern in the answer and in the expected one.",
)  # fmt: skip
@click.option(
    "--json-field", "json_fields", multiple=True, metavar="NAME",
    help="Also generate answers, and compare this field of their JSON objects; a.b is a nested field. Repeatable.",
)  # fmt: skip
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME",
    help="Also generate answers, and score them with a function: module:function, or an entry point of "
    "dualtune.metrics. Repeatable.",
)  # fmt: skip
@click.option(
    "--predictions", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="The file for prompts and answers. Default: predictions.jsonl in the run directory of the adapter.",
)  # fmt: skip
@click.option("--harness", metavar="TASKS", help="Run tasks of lm-eval instead: comma-separated names or files.")
@click.option(
    "--leaks/--no-leaks", default=True, show_default=True,
    help="Count the held-out rows that are also in the training data, exactly or nearly.",
)  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(min=1), help="Maximum number of rows to generate answers for; the first ones."
)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Maximum number of tokens per answer.  [default: 256]")
@platform_option
@set_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # Ctrl-C ends it at once: there is nothing to save
def command(config: Path, platform: str, overrides: tuple[str, ...], as_json: bool, **given: object) -> None:
    """Measure the adapter that CONFIG trained: loss and perplexity over the target tokens of the evaluation data.

    With --task, --answer-pattern, --json-field, --metric or --predictions, an answer is generated for each row, and
    prompts and answers are saved to a file. --answer-pattern takes the last match in each answer.
    """
    options = EvalOptions(**given)  # pyright: ignore[reportArgumentType]  click has checked the types
    options.check()
    with phases(err=as_json) as shown:
        shown.begin("reading", "the config")
        pattern = options.pattern()
        settings = load_config(config, overrides)
        metrics = [*(pattern_metrics(pattern) if pattern else ()), *map(json_metric, options.json_fields)]
        metrics += map(user_metric, options.metrics)
        if options.harness:
            harness.check_installed()
        adapter = _adapter_of(settings, options)
        backend = backend_for(platform, err=as_json)
        with explained(backend, settings, "while the adapter was measured"):
            report = EvalRun(settings, options, adapter, backend, metrics, shown).report()
    if as_json:
        return say_json(report)
    for line in as_lines(report):
        say(line)
    return None


def _adapter_of(settings: Config, options: EvalOptions) -> Path | None:
    """Return the adapter to measure. None for the base, and for a config of full fine-tuning."""
    if settings.adapter.trains_model:
        if options.adapter is not None:
            raise ConfigError("--adapter: a config with adapter.method: full has none. Leave it out, or give --base")
        trained = expanded(settings.run.dir) / "model"
        if not options.base and not trained.is_dir():
            raise ConfigError(f"there is no model directory {trained}. Train first, or give --base")
        return None
    if options.base:
        return None
    directory = options.adapter or expanded(settings.run.dir) / "adapter"
    if not directory.is_dir():
        raise ConfigError(f"there is no adapter directory {directory}. Train first, or give --adapter DIR, or --base")
    return adapter_directory(directory)

"""`dualtune eval`: evaluate an adapter on held-out data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune import interrupt
from dualtune.cli.options import backend_for, config_argument, json_option, platform_option, set_option, to_json
from dualtune.cli.output.terminal import say
from dualtune.io.disk import expanded

if TYPE_CHECKING:
    from dualtune.config import Config


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
        from dualtune.evaluate.scoring.metrics import TASKS

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
    "--adapter", type=click.Path(path_type=Path), help="The adapter directory. Default: that of the config's run."
)
@click.option("--base", is_flag=True, help="Measure the base model without an adapter.")
@click.option("--compare", is_flag=True, help="Measure the base and the adapter, and the differences with intervals.")
@click.option("--data", type=click.Path(path_type=Path), help="A file to evaluate on. Default: the config's data.eval.")
@click.option(
    "--exact-match",
    "exact",
    is_flag=True,
    help="Also report the share of answers that greedy decoding reproduces exactly.",
)
@click.option("--task", type=click.Choice(["gsm8k"]), help="Also generate answers, and report the share that is right.")
@click.option(
    "--answer-pattern", metavar="REGEX", help="The same with your own pattern: its first group is the answer."
)
@click.option(
    "--json-field", "json_fields", multiple=True, metavar="NAME",
    help="The same for a field of the JSON object in the answer; a.b is a field of a field. Repeatable.",
)  # fmt: skip
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME",
    help="The same with a function of your own: module:function, or an entry point of dualtune.metrics. Repeatable.",
)  # fmt: skip
@click.option(
    "--predictions", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Where prompts and answers are written. Default: predictions.jsonl in the run directory of its own adapter.",
)  # fmt: skip
@click.option("--harness", metavar="TASKS", help="Run tasks of lm-eval instead: names or files, between commas.")
@click.option(
    "--leaks/--no-leaks", default=True, show_default=True,
    help="Count the held-out rows that are in the training data too, exactly or nearly.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), help="Generate answers only for the first rows.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="The most tokens of an answer.  [default: 256]")
@platform_option
@set_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # Ctrl-C ends it at once: there is nothing to save
def command(config: Path, platform: str, overrides: tuple[str, ...], as_json: bool, **given: object) -> None:
    """Measure the adapter that CONFIG trained: loss and perplexity over the target tokens of the evaluation data.

    With --task, --answer-pattern, --json-field, --metric or --predictions it also generates an answer for each row, and
    keeps prompts and answers in a file. --answer-pattern compares the last match in the answer with the expected one's.
    """
    from dualtune.cli.output.screen import phases

    options = EvalOptions(**given)  # pyright: ignore[reportArgumentType]  click has checked the types
    options.check()
    with phases(err=as_json) as shown:
        shown.begin("reading", "the config")
        from dualtune.cli.adapters.eval_phases import EvalRun, as_lines
        from dualtune.config import load_config
        from dualtune.evaluate.scoring.harness import check_installed
        from dualtune.evaluate.scoring.metrics import json_metric, pattern_metrics, user_metric
        from dualtune.evaluate.shortage import explained

        pattern = options.pattern()
        settings = load_config(config, overrides)
        metrics = [*(pattern_metrics(pattern) if pattern else ()), *map(json_metric, options.json_fields)]
        metrics += map(user_metric, options.metrics)
        if options.harness:
            check_installed()
        adapter = _adapter_of(settings, options)
        backend = backend_for(platform, err=as_json)
        with explained(backend, settings, "while the adapter was measured"):
            report = EvalRun(settings, options, adapter, backend, metrics, shown).report()
    if as_json:
        return say(to_json(report))
    for line in as_lines(report):
        say(line)
    return None


def _adapter_of(settings: Config, options: EvalOptions) -> Path | None:
    """Return the adapter to measure. None for the base, and for a config that trains the model whole."""
    from dualtune.adapter.formats.directory import adapter_directory
    from dualtune.errors import ConfigError

    if settings.adapter.trains_model:
        if options.adapter is not None:
            raise ConfigError("--adapter: a config with adapter.method: full has none. Leave it out, or give --base")
        trained = expanded(settings.run.dir) / "model"
        if not options.base and not trained.is_dir():
            raise ConfigError(f"there is no model directory {trained}. Train first, or give --base")
        return None
    if options.base:
        return None
    chosen = options.adapter or expanded(settings.run.dir) / "adapter"
    if not chosen.is_dir():
        raise ConfigError(f"there is no adapter directory {chosen}. Train first, or give --adapter DIR, or --base")
    return adapter_directory(chosen)

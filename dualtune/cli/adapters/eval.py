"""`dualtune eval`: evaluate an adapter on held-out data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune import interrupt
from dualtune.cli.options import backend_for, config_argument, json_option, platform_option, set_option
from dualtune.cli.output.terminal import say

if TYPE_CHECKING:
    from dualtune.backend import Backend
    from dualtune.cli.output.screen import Phases
    from dualtune.config import Config


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What to measure."""

    settings: Config
    adapter: Path | None  # None: only the base model
    data: Path | None  # None: the data of the config
    exact: bool
    pattern: re.Pattern[str] | None  # of generated answers
    limit: int | None
    max_tokens: int


@click.command("eval")
@config_argument
@click.option(
    "--adapter", type=click.Path(path_type=Path), help="The adapter directory. Default: that of the config's run."
)
@click.option("--base", is_flag=True, help="Measure the base model without an adapter.")
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
@click.option("--limit", type=click.IntRange(min=1), help="Generate answers only for the first rows.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="The most tokens of an answer."
)
@platform_option
@set_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # Ctrl-C ends it at once: there is nothing to save
def command(
    config: Path, adapter: Path | None, base: bool, data: Path | None, exact: bool, task: str | None,
    answer_pattern: str | None, limit: int | None, max_tokens: int, platform: str, overrides: tuple[str, ...],
    as_json: bool,
) -> None:  # fmt: skip
    """Measure the adapter that CONFIG trained: loss and perplexity over the target tokens of the evaluation data.

    With --task or --answer-pattern it also generates an answer for each row, and compares its last match of the pattern
    with that of the expected answer.
    """
    import json

    from dualtune.cli.output.screen import phases

    if task and answer_pattern:
        raise click.UsageError("Give --task or --answer-pattern, not both.")
    if limit and not (task or answer_pattern):
        raise click.UsageError("--limit is for --task or --answer-pattern: the loss is always over all rows.")
    if base and adapter:
        raise click.UsageError("Give --adapter or --base, not both.")
    with phases(err=as_json) as shown:
        shown.begin("reading", "the config")
        from dualtune.adapter.formats.directory import adapter_directory
        from dualtune.config import load_config
        from dualtune.errors import ConfigError
        from dualtune.evaluate.shortage import explained
        from dualtune.evaluate.tasks import TASKS

        pattern = _pattern(TASKS[task] if task else answer_pattern)
        settings = load_config(config, overrides)
        if settings.adapter.trains_model:
            settings, base = _with_trained_model(settings, adapter, base), True
        chosen = None if base else adapter or Path(settings.run.dir).expanduser() / "adapter"
        if chosen is not None and not chosen.is_dir():
            raise ConfigError(f"there is no adapter directory {chosen}. Train first, or give --adapter DIR, or --base")
        request = EvalRequest(settings, chosen and adapter_directory(chosen), data, exact, pattern, limit, max_tokens)
        backend = backend_for(platform, err=as_json)
        with explained(backend, settings, "while the adapter was measured"):
            report = _measure(request, backend, shown)
    if as_json:
        return say(json.dumps(report, indent=2))
    for name, value in report.items():
        say(f"{name:<14}{f'{value:.4f}' if isinstance(value, float) else value}")
    return None


def _with_trained_model(settings: Config, adapter: Path | None, base: bool) -> Config:
    """Return a config whose model is the one that the run trained, or with --base the config itself."""
    from dualtune.errors import ConfigError

    if adapter is not None:
        raise ConfigError("--adapter: a config with adapter.method: full has none. Leave it out, or give --base")
    if base:
        return settings
    trained = Path(settings.run.dir).expanduser() / "model"
    if not trained.is_dir():
        raise ConfigError(f"there is no model directory {trained}. Train first, or give --base")
    model = settings.model.model_copy(update={"name": str(trained), "init": "pretrained"})
    return settings.model_copy(update={"model": model})


def _measure(request: EvalRequest, backend: Backend, shown: Phases) -> dict[str, object]:
    """Return the results, by their names in the JSON."""
    import math

    from dualtune.capabilities import check_capabilities
    from dualtune.data.documents import Data
    from dualtune.errors import DataError
    from dualtune.evaluate.evaluation import evaluate, exact_match, layout_of
    from dualtune.evaluate.inference import load_model
    from dualtune.evaluate.recovery import Recovery
    from dualtune.evaluate.shortage import explanation
    from dualtune.evaluate.tasks import check_answers

    settings = request.settings
    check_capabilities(backend, settings)
    sources = Data(settings, str(request.data) if request.data else None)
    shown.begin("loading", "the model")
    model = load_model(
        backend, settings.model.name, request.adapter, dtype=settings.model.dtype,
        quantization=settings.model.quantization, template=settings.data.template,
        special_tokens_in_text=settings.data.special_tokens_in_text, kernels=settings.model.kernels,
        init=settings.model.init, seed=settings.run.seed,
    )  # fmt: skip
    shown.finish("loaded")
    if model.note:
        say(f"template    {model.note}", err=True)
    shown.begin("tokenizing", "the evaluation data")
    documents = sources.held_out_only(model.tokenizer)
    if not documents.num_rows:
        raise DataError("data.eval: the config has no held-out data. Give --data FILE")
    if not len(documents):
        raise DataError("the evaluation data has no target token within data.max_length")
    shown.begin("evaluating", "loss")
    recovery = Recovery(
        backend, model.engine, layout_of(settings), documents.longest,
        tell=lambda event: say(f"memory      ran out: {event.message}", err=True),
        explain=lambda _, reason: explanation(backend, settings, reason),
    )  # fmt: skip
    result = evaluate(model.engine, documents, recovery, show=shown.update)
    shown.finish("evaluated")
    examples = sources.held_out_examples(documents)
    report: dict[str, object] = {
        "adapter": str(request.adapter) if request.adapter else None,
        "loss": result.eval_loss,
        "perplexity": math.exp(result.eval_loss),
        "targets": result.eval_targets,
        "rows": len(examples),
    }
    if request.exact:
        shown.begin("evaluating", "exact match")
        report["exact_match"] = exact_match(model, examples, settings.data.max_length, shown.update)
        shown.finish("evaluated")
    if request.pattern:
        shown.begin("generating", "answers")
        chosen = examples[: request.limit]
        answers = check_answers(model, chosen, request.pattern, max_tokens=request.max_tokens, show=shown.update)
        shown.finish("generated")
        report["answers"] = answers.num_rows
        report["right"] = answers.num_right / answers.num_rows
        report["right_lenient"] = answers.num_right_lenient / answers.num_rows
    return report


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise click.UsageError(f"--answer-pattern: got {text!r}, which is not a regular expression: {error}") from error

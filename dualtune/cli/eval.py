"""`dualtune eval`: an adapter on held-out data."""

from __future__ import annotations

import re
from pathlib import Path

import click

from dualtune import interrupt
from dualtune.cli.options import backend_for, config_argument, json_option, platform_option, set_option


@click.command("eval")
@config_argument
@click.option("--adapter", type=click.Path(path_type=Path), help="Default: the adapter in the config's run directory.")
@click.option("--base", is_flag=True, help="Measure the base model without an adapter.")
@click.option("--data", type=click.Path(path_type=Path), help="A file to measure on. Default: the config's data.eval.")
@click.option(
    "--exact-match", "exact", is_flag=True, help="Also tell how many answers greedy decoding gives token for token."
)
@click.option(
    "--task", type=click.Choice(["gsm8k"]), help="Also generate, and count the rows whose final answer is right."
)
@click.option(
    "--answer-pattern", metavar="REGEX", help="The same by your own pattern, whose first group is the answer."
)
@click.option("--limit", type=click.IntRange(min=1), help="Generate for the first rows alone.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Of an answer.")
@platform_option
@set_option
@json_option
@interrupt.handled(interrupt.TERMINATION)  # Ctrl-C ends it at once: there is nothing to save
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
    import math

    from dualtune.backend import check_capabilities
    from dualtune.config import load_config
    from dualtune.data.documents import Data
    from dualtune.errors import ConfigError, DataError
    from dualtune.train.evaluation import evaluate, exact_match, layout_of
    from dualtune.train.inference import load_model
    from dualtune.train.tasks import TASKS, check_answers

    pattern = _pattern(TASKS[task] if task else answer_pattern)
    if task and answer_pattern:
        raise click.UsageError("Give --task or --answer-pattern, not both.")
    if limit and pattern is None:
        raise click.UsageError("--limit is for --task or --answer-pattern: the loss is always over all rows.")
    settings = load_config(config, overrides)
    if base and adapter:
        raise click.UsageError("Give --adapter or --base, not both.")
    chosen = None if base else adapter or Path(settings.run.dir).expanduser() / "adapter"
    if chosen is not None and not chosen.is_dir():
        raise ConfigError(f"there is no adapter directory {chosen}. Train first, or give --adapter DIR, or --base")
    backend = backend_for(platform, err=as_json)
    check_capabilities(backend, settings)
    sources = Data(settings, str(data) if data else None)
    model = load_model(
        backend, settings.model.name, chosen, dtype=settings.model.dtype, quantization=settings.model.quantization,
        template=settings.data.template, kernels=settings.model.kernels,
    )  # fmt: skip
    documents = sources.held_out_only(model.tokenizer)
    if not documents.num_rows:
        raise DataError("data.eval: the config holds nothing out. Give --data FILE")
    if not len(documents):
        raise DataError("the evaluation data has no trainable token within data.max_length")
    result = evaluate(model.engine, documents, layout_of(settings))
    examples = sources.held_out_examples(documents)
    report: dict[str, object] = {
        "adapter": str(chosen) if chosen else None,
        "loss": result.eval_loss,
        "perplexity": math.exp(result.eval_loss),
        "targets": result.eval_targets,
        "rows": len(examples),
    }
    if exact:
        report["exact_match"] = exact_match(model, examples, settings.data.max_length)
    if pattern:
        answers = check_answers(model, examples[:limit], pattern, max_tokens=max_tokens)
        report["answers"] = answers.num_rows
        report["right"] = answers.num_right / answers.num_rows
        report["right_lenient"] = answers.num_right_lenient / answers.num_rows
    if as_json:
        return click.echo(json.dumps(report, indent=2))
    for name, value in report.items():
        click.echo(f"{name:<14}{f'{value:.4f}' if isinstance(value, float) else value}")
    return None


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise click.UsageError(f"--answer-pattern: got {text!r}, which is no regular expression: {error}") from error

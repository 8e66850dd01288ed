"""`dualtune eval`: an adapter on held-out data."""

from __future__ import annotations

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
@platform_option
@set_option
@json_option
@interrupt.handled(interrupt.TERMINATION)  # Ctrl-C ends it at once: there is nothing to save
def command(
    config: Path, adapter: Path | None, base: bool, data: Path | None, exact: bool, platform: str,
    overrides: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Measure the adapter that CONFIG trained: loss and perplexity over the target tokens of the evaluation data."""
    import json
    import math

    from dualtune.backend import check_capabilities
    from dualtune.config import load_config
    from dualtune.errors import ConfigError, DataError
    from dualtune.train.evaluation import eval_examples, exact_match, measure
    from dualtune.train.inference import load_model

    settings = load_config(config, overrides)
    if base and adapter:
        raise click.UsageError("Give --adapter or --base, not both.")
    chosen = None if base else adapter or Path(settings.run.dir).expanduser() / "adapter"
    if chosen is not None and not chosen.is_dir():
        raise ConfigError(f"there is no adapter directory {chosen}. Train first, or give --adapter DIR, or --base")
    backend = backend_for(platform, err=as_json)
    check_capabilities(backend, settings)
    examples = eval_examples(settings, data)
    if not examples:
        raise DataError("data.eval: the config holds nothing out. Give --data FILE")
    model = load_model(
        backend, settings.model.name, chosen, dtype=settings.model.dtype, quantization=settings.model.quantization,
        template=settings.data.template,
    )  # fmt: skip
    result = measure(model, examples, settings)
    report: dict[str, object] = {
        "adapter": str(chosen) if chosen else None,
        "loss": result.eval_loss,
        "perplexity": math.exp(result.eval_loss),
        "targets": result.eval_targets,
        "rows": len(examples),
    }
    if exact:
        report["exact_match"] = exact_match(model, examples, settings.data.max_length)
    if as_json:
        return click.echo(json.dumps(report, indent=2))
    for name, value in report.items():
        click.echo(f"{name:<12}{f'{value:.4f}' if isinstance(value, float) else value}")
    return None

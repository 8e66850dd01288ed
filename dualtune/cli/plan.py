"""`dualtune plan`: the memory and time of a run before it starts, and what to change if it does not fit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.base.errors import EnvironmentFault
from dualtune.base.redaction import redact
from dualtune.base.text import in_bytes, in_columns
from dualtune.cli.options import config_argument, json_option, machine_option, platform_option, say_json, set_option
from dualtune.cli.screen import phases
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.engine.detect import Load
    from dualtune.engine.machines import MachineLimits
    from dualtune.engine.memory.plan import MemoryPlan, Saving
    from dualtune.engine.step_time import StepTime
    from dualtune.train.generation.sampling_cost import SamplingCost


UNKNOWN_RATE = "no rate is known for this machine"


@click.command("plan")
@config_argument
@platform_option
@machine_option
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
    from dualtune.doctor.bench.measure import limits_here
    from dualtune.doctor.check_config import plan_config, teacher_of
    from dualtune.doctor.check_config_data import look_at_data, steps_of_run, typical_step, with_lengths_of
    from dualtune.engine.choose import choose
    from dualtune.engine.detect import detect, load_average
    from dualtune.engine.machines import named, published
    from dualtune.engine.step_time import predict
    from dualtune.train.generation.sampling_cost import samples_of, sampling_cost

    with phases(err=as_json) as shown:
        shown.begin("planning", "the memory")
        settings = _settings(config, overrides)
        machine = detect() if name == "this" else named(name)
        choice = choose(platform, machine)
        # The lengths of the data decide how large micro-batches really are, and so the memory.
        samples = look_at_data(settings)
        steps, evaluated = with_lengths_of(settings, samples)
        plan = plan_config(steps, machine, choice, evaluated)
        shown.begin("predicting", "the time of a step")
        load = load_average() if name == "this" else None  # before the CPU is measured, which is load too
        limits = limits_here(choice, machine, plan.ask.dtype) if name == "this" else published(machine)
        documents = typical_step(settings, samples)
        # The time follows from the plan, which has resolved every `auto`.
        time: StepTime | str = UNKNOWN_RATE
        if limits is not None:
            try:
                time = predict(plan.decoder, plan.ask, documents, limits, teacher_of(settings, plan))
            except EnvironmentFault as error:
                time = str(error)
    num_steps = steps_of_run(settings, samples)
    cost = sampling_cost(settings, plan, len(documents.lengths) // max(1, samples_of(settings)), limits)
    if as_json:
        say_json({**_as_json(plan, limits, time, num_steps, load), "samples": cost and asdict(cost)})
    else:
        say(_as_text(plan, limits, time, num_steps, load, f"plan of {settings.model.name}", name, cost))
    ctx.exit(0 if plan.fits else EnvironmentFault.exit_code)


def _settings(config: Path, overrides: tuple[str, ...]) -> Config:
    """Return the config in a file, or the default config of a model that is named instead of one."""
    from dualtune.config import load_config
    from dualtune.data.sources.readers import is_hub_name

    if config.exists() or config.suffix in (".yaml", ".yml", ".json") or not is_hub_name(str(config)):
        return load_config(config, overrides)
    return load_config({"model": {"name": str(config)}, "data": {"train": "(no data named)"}}, overrides)


def _as_json(
    plan: MemoryPlan, limits: MachineLimits | None, time: StepTime | str, num_steps: int | None, load: Load | None
) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "total_bytes": plan.estimate.total_bytes,
        "available_bytes": plan.budget.bytes,
        "available": plan.budget.reason,
        "parts": [asdict(part) | {"phase": _phase(part.name)} for part in plan.estimate.parts],
        "checkpointing": plan.ask.checkpointing.describe(plan.decoder.layers),
        "checkpointing_reason": plan.ask.checkpointing.reason,
        "flops_per_token": plan.flops_per_token,
        "recompute_time": plan.time,
        "flops_per_s": None if limits is None else limits.product_flops.get(plan.ask.dtype),
        "rate": UNKNOWN_RATE if limits is None else limits.source,
        "prediction": None if isinstance(time, str) else time.as_json(),
        "num_steps": num_steps,
        "run_s": None if isinstance(time, str) or num_steps is None else num_steps * time.step_s,
        "load_average": load and load.average,
        "busy": load and load.is_busy,
        "changes": [saving.as_json() for saving in plan.savings],
    }


def _as_text(
    plan: MemoryPlan, limits: MachineLimits | None, time: StepTime | str, num_steps: int | None, load: Load | None,
    title: str, machine: str, cost: SamplingCost | None,
) -> str:  # fmt: skip
    """Return the parts of the memory, facts of the run, and the changes with which it fits."""
    checkpointing = plan.ask.checkpointing
    parts = [(part.bytes, part.name, _phase(part.name), part.formula) for part in plan.estimate.parts]
    total = (plan.estimate.total_bytes, "in all", "", "an estimate; see docs/MEMORY_OPTIMIZATION_GUIDE.md")
    again = f", {plan.time:.2f} times as many as without recomputation" if plan.time > 1 else ""
    work = f"{plan.flops_per_token * plan.time / 1e9:.3g} GFLOP for each token{again}"
    if limits is None or isinstance(time, str):
        work += f"; {time}"
    else:
        work += f"; {time.describe()} ({limits.source}; documents: {time.documents})"
    rows = [
        ("machine", f"{machine}: {in_bytes(plan.budget.bytes)} ({plan.budget.reason})"),
        ("recomputed", f"{checkpointing.describe(plan.decoder.layers)} ({checkpointing.reason})"),
        ("time", work),
        *([] if isinstance(time, str) else [("run", time.of_run(num_steps))]),
        *([] if cost is None else [("samples", str(cost))]),
        *([("busy", str(load))] if load and load.is_busy else []),
        ("verdict", "it fits" if plan.fits else "it does not fit"),
    ]
    blocks = [
        title,
        in_columns([(in_bytes(size).rjust(10), *texts) for size, *texts in (*parts, total)]),
        in_columns(rows),
    ]
    if plan.savings:
        blocks.append("With all of these it fits:\n" + in_columns([_row(saving) for saving in plan.savings]))
    elif not plan.fits:
        blocks.append(str(plan.smaller))
    return redact("\n\n".join(blocks))


def _row(saving: Saving) -> tuple[str, str, str, str]:
    from dualtune.engine.memory.plan import set_options

    time = "time not known" if saving.time is None else f"{saving.time:.2f} times the time"
    return " ".join(set_options(saving.settings)), f"{in_bytes(saving.saved_bytes)} less", time, saving.remark


def _phase(part: str) -> str:
    """Say when in a step a part of the estimate is in memory."""
    from dualtune.train.memory import ALWAYS

    return "always" if part in ALWAYS else "forward to backward" if part == "activations" else "at the peak"

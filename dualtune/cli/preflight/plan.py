"""`dualtune plan`: the memory and time of a run before it starts, and what to change if it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.cli.options import config_argument, json_option, platform_option, set_option
from dualtune.cli.output.terminal import say

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.memory.plan import Saving
    from dualtune.platform.choose import PlatformChoice
    from dualtune.preflight.config_memory import MemoryNeed


@click.command("plan")
@config_argument
@platform_option
@click.option(
    "--machine", default="this", show_default=True, metavar="NAME", help="The machine to plan for, such as h100-80."
)
@set_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, config: Path, platform: str, machine: str, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Plan the memory and time of CONFIG, from the model's shape alone: nothing is downloaded or loaded.

    If it does not fit, show the cheapest changes with which it does. Exit code 0 if it fits, otherwise 4.
    """
    import json

    from dualtune.cli.output.screen import phases
    from dualtune.config import load_config
    from dualtune.errors import EnvironmentFault
    from dualtune.platform.choose import choose
    from dualtune.platform.detect import detect
    from dualtune.platform.machines import named
    from dualtune.preflight.config_memory import plan_config

    with phases(err=as_json) as shown:
        shown.begin("planning", "the memory")
        settings = load_config(config, overrides)
        found = detect() if machine == "this" else named(machine)
        choice = choose(platform, found)
        memory = plan_config(settings, found, choice)
        shown.begin("measuring", "the speed of a matrix product")
        rate = _rate(choice, machine, memory.plan.ask.dtype)
    say(json.dumps(_as_json(memory, rate), indent=2) if as_json else _as_text(settings, memory, rate, machine))
    ctx.exit(0 if memory.plan.fits else EnvironmentFault.exit_code)


def _rate(choice: PlatformChoice, machine: str, dtype: str) -> tuple[float | None, str]:
    """Return the FLOP/s of a large matrix product, or None, and where the figure comes from."""
    from dualtune.platform.rates import PEAK_TFLOPS

    if machine != "this":
        found = PEAK_TFLOPS.get(machine)
        return (None, "no rate is known for this machine") if found is None else (found * 1e12, "its data sheet")
    from dualtune.bench.measure import peak_flops
    from dualtune.platform.choose import open_backend

    return peak_flops(open_backend(choice), dtype), "measured just now"


def _as_json(memory: MemoryNeed, rate: tuple[float | None, str]) -> dict[str, Any]:
    from dataclasses import asdict

    plan = memory.plan
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
        "flops_per_s": rate[0],
        "rate": rate[1],
        "changes": [saving.as_json() for saving in plan.savings],
    }


def _as_text(config: Config, memory: MemoryNeed, rate: tuple[float | None, str], machine: str) -> str:
    from dualtune.text.redaction import redact
    from dualtune.text.show import in_bytes, in_columns

    plan, value = memory.plan, memory.plan.ask.checkpointing
    parts = [(part.bytes, part.name, _phase(part.name), part.formula) for part in plan.estimate.parts]
    total = (plan.estimate.total_bytes, "in all", "", "an estimate; see docs/memory.md")
    rows = [
        ("machine", f"{machine}: {in_bytes(plan.have_bytes)} ({memory.budget.reason})"),
        ("recomputed", f"{value.describe(plan.decoder.layers)} ({value.reason})"),
        ("time", _time(memory, rate)),
        ("verdict", "it fits" if plan.fits else "it does not fit"),
    ]
    blocks = [in_columns([(in_bytes(size).rjust(10), *rest) for size, *rest in (*parts, total)]), in_columns(rows)]
    if plan.savings:
        blocks.append("With all of these it fits:\n" + in_columns([_row(saving) for saving in plan.savings]))
    elif not plan.fits:
        blocks.append(str(plan.smaller))
    return redact(f"plan of {config.model.name}\n\n" + "\n\n".join(blocks))


def _row(saving: Saving) -> tuple[str, str, str, str]:
    from dualtune.memory.plan import set_options
    from dualtune.text.show import in_bytes

    time = "time not known" if saving.time is None else f"{saving.time:.2f} times the time"
    return " ".join(set_options(saving.settings)), f"{in_bytes(saving.saved_bytes)} less", time, saving.remark


def _phase(part: str) -> str:
    """Say when in a step a part of the estimate is in memory."""
    always = ("weights", "adapter", "optimizer", "reserve")
    return "always" if part in always else "forward to backward" if part == "activations" else "at the peak"


def _time(memory: MemoryNeed, rate: tuple[float | None, str]) -> str:
    plan = memory.plan
    flops = plan.flops_per_token * plan.time
    again = f", {plan.time:.2f} times as many as without recomputation" if plan.time > 1 else ""
    found = f"{flops / 1e9:.3g} GFLOP for each token{again}"
    if rate[0] is None:
        return f"{found}; {rate[1]}"
    most = rate[0] / flops
    return f"{found}; at most {most:.3g} tokens/s at {rate[0] / 1e12:.3g} TFLOP/s ({rate[1]})"

"""`dualtune bench --predict`: what a step of a config would take on a machine, computed and not measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dualtune.cli.output.terminal import say

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.performance.prediction import StepTime
    from dualtune.platform.rates import MachineLimits
    from dualtune.preflight.config_memory import MemoryNeed


def predict_for(path: Path, overrides: tuple[str, ...], name: str, platform: str, *, as_json: bool) -> None:
    """Print the prediction of a config for a machine by its short name."""
    import json

    from dualtune.cli.output.screen import phases
    from dualtune.config import load_config

    with phases(err=as_json) as shown:
        shown.begin("predicting", "the time of a step")
        settings = load_config(path, overrides)
        memory, found, limits = predicted_for(settings, name, platform)
    if as_json:
        needs = {"peak_bytes": memory.estimate.total_bytes, "available_bytes": memory.budget.bytes}
        return say(json.dumps({"machine": name, "limits": limits.source, **needs, **found.as_json()}, indent=2))
    return say("\n".join(_lines(settings, name, memory, found, limits)))


def predicted_for(settings: Config, name: str, platform: str) -> tuple[MemoryNeed, StepTime, MachineLimits]:
    """Return memory, time and limits of a config on a machine; `this` is the one it runs on.

    ConfigError for a machine whose limits are not known, EnvironmentFault where there is no formula.
    """
    from dualtune.bench.limits import limits_here
    from dualtune.errors import EnvironmentFault
    from dualtune.performance.prediction import predict
    from dualtune.platform.choose import choose
    from dualtune.platform.detect import detect
    from dualtune.platform.machines import limits_for, named
    from dualtune.preflight.config_data import first_step, look_at_data
    from dualtune.preflight.config_memory import plan_config

    limits = None if name == "this" else limits_for(name)
    machine = detect() if name == "this" else named(name)
    choice = choose(platform, machine)
    memory = plan_config(settings, machine, choice)
    limits = limits or limits_here(choice, machine, memory.plan.ask.dtype)
    if limits is None:
        raise EnvironmentFault("no limits are known for this machine. Name another with --predict, such as h100-80")
    time = predict(memory.plan.decoder, memory.plan.ask, first_step(settings, look_at_data(settings)), limits)
    return memory, time, limits


def _lines(settings: Config, name: str, memory: MemoryNeed, found: StepTime, limits: MachineLimits) -> Iterator[str]:
    from dualtune.performance.prediction import SAID
    from dualtune.text.redaction import redact
    from dualtune.text.show import in_bytes, in_columns, in_short_time

    yield f"{redact(settings.model.name)} on {name}: {SAID}\n"
    header = ("part", "TFLOP", "GB", "launches", "ms", "share", "bound")
    all_s = sum(part.seconds for part in found.parts)
    rows = [
        (part.name, f"{part.flops / 1e12:.3g}", f"{part.bytes / 1e9:.3g}", f"{part.launches:,.0f}",
         f"{1e3 * part.seconds:.2f}", f"{part.seconds / all_s:.1%}", part.bound)
        for part in found.parts
    ]  # fmt: skip
    yield in_columns([header, *rows])
    peak, has = in_bytes(memory.estimate.total_bytes), in_bytes(memory.budget.bytes)
    device, host, transfers, waits = map(in_short_time, (found.device_s, found.host_s, found.transfer_s, found.waits_s))
    times = f"device {device}, host {host}, transfers {transfers}; {found.waits} waits, {waits}"
    share = f"{found.utilisation:.1%} of {found.peak_flops / 1e12:.4g} TFLOP/s (MFU)"
    yield ""
    yield in_columns([
        ("step", f"{in_short_time(found.step_s)}, bound by {found.bound}: {times}"),
        ("speed", f"{found.tokens_per_s:,.0f} tokens/s, {share}"),
        ("memory", f"{peak} at the peak, has {has}" + ("" if memory.plan.fits else ": it does not fit")),
        ("step of", f"{found.tokens:,} tokens; lengths: {found.documents}"),
        ("limits", f"{limits.source}; the shares that are reached are assumptions of dualtune/platform/rates.py"),
    ])  # fmt: skip

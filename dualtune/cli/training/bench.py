"""`dualtune bench`: what a step of a config costs on this machine, and where its time goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune import interrupt
from dualtune.cli.options import backend_for, config_argument, json_option, platform_option, set_option
from dualtune.cli.output.screen import tell
from dualtune.cli.output.terminal import say
from dualtune.cli.suggest import CommandWithOthers
from dualtune.cli.training import bench_lora

if TYPE_CHECKING:
    from dualtune.backend import Backend
    from dualtune.bench.measure import BenchResult
    from dualtune.cli.output.screen import Phases
    from dualtune.config import Config
    from dualtune.train.prepare import Prepared

PHASES = {
    "data": "waiting for the batches; preparing them takes {making}, during the previous step",
    "forward": "as in evaluation: without dropout, keeping nothing for the backward pass",
    "backward": "the rest of forward and backward",
    "optimizer": "clipping and the update",
}


@click.command("bench", cls=CommandWithOthers, others=[bench_lora.command])
@config_argument
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="How many steps to measure.")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Steps to run before measuring."
)
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path, file_okay=False), default="dualtune-bench",
    show_default=True, help="Where the result and the traces are written.",
)  # fmt: skip
@click.option(
    "--predict",
    "machine",
    metavar="MACHINE",
    help="Compute what a step would take on a machine such as h100-80, or on this one: nothing is run.",
)
@platform_option
@set_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # Ctrl-C ends it at once: there is nothing to save
def command(
    config: Path,
    steps: int,
    warmup: int,
    out: Path,
    machine: str | None,
    platform: str,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure real steps of CONFIG: tokens per second, model FLOP utilisation, memory, and where the time goes.

    The run directory is not touched. With model.init=random no weights are needed: only their shapes matter.
    --predict computes the time of a step instead, from the limits of a machine, which need not be here.

    `dualtune bench lora-backward` times the backward pass of one LoRA layer instead; it has a help of its own.
    """
    if machine is not None:
        from dualtune.cli.training.bench_predict import predict_for

        return predict_for(config, overrides, machine, platform, as_json=as_json)
    import json
    from dataclasses import asdict

    from dualtune.cli.output.screen import phases

    with phases(err=as_json) as shown:
        shown.begin("reading", "the config")
        from dualtune.bench.measure import RESULT, TRACE, bench
        from dualtune.config import load_config

        settings = load_config(config, overrides)
        prepared = _prepare(settings, backend_for(platform, err=as_json), shown, quiet=as_json)
        shown.begin("loading", "the model")
        result = bench(prepared, out, steps=steps, warmup=warmup, tell=lambda text: _measuring(text, shown))
    if as_json:
        return say(json.dumps(asdict(result), indent=2))
    tell("\n".join(_lines(result)))
    tell(_beside(settings, platform, result))
    return tell(f"written     {out / RESULT}, {out / TRACE} (open it at https://ui.perfetto.dev)")


def _measuring(text: str, shown: Phases) -> None:
    shown.begin("measuring", "steps")
    shown.tell(f"measuring   {text}")


def _prepare(settings: Config, backend: Backend, shown: Phases, *, quiet: bool) -> Prepared:
    from dualtune.cli.output.progress import reading
    from dualtune.train.prepare import prepare

    if quiet:
        shown.begin("checking", "model and data")
        return prepare(settings, backend)
    with reading() as show:
        prepared = prepare(settings, backend, show=show)
    tell("\n".join(prepared.summary()))
    return prepared


def _beside(settings: Config, platform: str, result: BenchResult) -> str:
    """Say what would have been predicted for this machine."""
    from dualtune.cli.training.bench_predict import predicted_for
    from dualtune.errors import DualtuneError

    try:
        found = predicted_for(settings, "this", platform)[1]
    except DualtuneError as error:
        return f"predicted   nothing: {error}"
    ratio = found.tokens_per_s / result.tokens_per_s
    return f"predicted   {found.tokens_per_s:,.0f} tokens/s here, computed; a token took {ratio:.2f} times as long"


def _lines(result: BenchResult) -> Iterator[str]:
    from dualtune.text.show import in_bytes, in_columns, in_short_time

    engine, step_s = result.environment["engine"], result.step_s
    mean_s = sum(step_s) / len(step_s)
    yield (
        f"engine      {result.environment['backend']} on {engine['device']}, {engine['dtype']}, "
        f"quantization {engine['quantization']}, {engine['trainable_parameters']:,} of {engine['num_parameters']:,} "
        "parameters trained"
    )
    if "kernels" in engine:
        yield f"kernels     {engine['kernels']}"
    yield f"start       {in_short_time(result.load_s)} to load, {in_short_time(result.first_step_s)} for the first step"
    yield (
        f"steps       {in_short_time(mean_s)} each ({in_short_time(min(step_s))} to {in_short_time(max(step_s))}), "
        f"{len(step_s)} measured after {result.warmup} warm-up steps"
    )
    yield (
        f"speed       {result.tokens_per_s:,.0f} tokens/s, {result.target_tokens_per_s:,.0f} target tokens/s; padding, "
        f"which is not counted, is {1 - result.fill:.1%} of the rows"
    )
    if use := result.utilisation:
        yield f"model FLOPs {_flops(use.flops_per_token)} a token by the formula, {_flops(use.flops_per_s)}/s"
        yield (
            f"utilisation {use.utilisation:.1%} of the {_flops(use.peak_flops_per_s)}/s that a large {engine['dtype']} "
            "matrix product reaches here"
        )
    else:
        yield f"model FLOPs no formula for this model: {result.no_utilisation}"
    yield (
        f"memory      {in_bytes(result.peak_bytes)} at most, {in_bytes(result.loaded_bytes)} before the first step, "
        f"of {in_bytes(result.total_bytes)}"
    )
    yield "\nwhere the time of a step goes"
    making = in_short_time(result.making_data_s)
    yield in_columns([
        (f"  {name}", f"{in_short_time(s):>12}", f"{s / mean_s:6.1%}", PHASES[name].format(making=making))
        for name, s in result.phases_s.items()
    ])  # fmt: skip
    profile = result.profile
    if profile.shares and profile.step_s:
        yield (
            f"\nwhat the device does: {in_short_time(profile.operations_s)} in operations, of the "
            f"{in_short_time(profile.step_s)} that a step of one micro-batch took under the profiler"
        )
        yield in_columns([(f"  {kind}", f"{share:6.1%}") for kind, share in profile.shares.items()])
    yield f"\nprofile     {f'{profile.trace} ({profile.note})' if profile.trace else f'none: {profile.note}'}"


def _flops(number: float) -> str:
    """Return a number as text, such as 1.23 TFLOP."""
    power = next((p for p in range(4) if number < 1000 ** (p + 1)), 4)
    return f"{number / 1000**power:.3g} {('', 'k', 'M', 'G', 'T')[power]}FLOP"

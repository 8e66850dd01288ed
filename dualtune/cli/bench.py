"""`dualtune bench`: what a step of a config costs on this machine, and where its time goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DualtuneError, EnvironmentFault
from dualtune.base.redaction import redact
from dualtune.base.text import in_bytes, in_columns, in_short_time
from dualtune.cli.options import (
    backend_for,
    config_argument,
    dtype_option,
    json_option,
    platform_option,
    say_json,
    set_option,
)
from dualtune.cli.screen import Phases, phases, tell
from dualtune.cli.suggest import CommandWithOthers
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.doctor.bench.measure import BenchResult
    from dualtune.engine.backend import Backend
    from dualtune.engine.machines import MachineLimits
    from dualtune.engine.memory.plan import MemoryPlan
    from dualtune.engine.step_time import StepTime
    from dualtune.train.prepare import Prepared

# ----------------------------------------------------------------------------------------------------------------------
# `dualtune bench lora-backward`: the backward pass of one LoRA layer, timed on documented shapes.


@click.command("lora-backward")
@click.option(
    "--shapes", type=click.Choice(["seed2"]), default="seed2", show_default=True,
    help="The set of layer shapes to time.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="How many times each shape is timed."
)
@platform_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always, error=interrupt.Abandoned)  # Ctrl-C ends it at once
def lora_backward_command(shapes: str, rounds: int, platform: str, as_json: bool) -> None:
    """Time dualtune.engine.kernels.lora_backward beside autograd, in turns, in float32.

    Both compute the gradients of the two matrices and of the input; autograd makes its forward pass first, because
    lora_backward also starts from x alone. On a GPU it is also compared with autograd on the
    CPU of the same machine, which is what the documented ratios mean.
    """
    from dualtune.doctor.bench.lora_backward import SHAPES, time_lora_backward

    backend = backend_for(platform, err=as_json)
    device = backend.devices()[0]
    results = [time_lora_backward(backend, shape, rounds=rounds) for shape in SHAPES[shapes]]
    if as_json:
        return say_json({"device": device.kind, "name": device.name, "results": results})
    rows = [("shape", "ours", "autograd", "autograd / ours", "CPU / ours", "documented")]
    for shape, times in zip(SHAPES[shapes], results, strict=True):
        rows.append((
            str(shape), f"{times['ours_ms']:.3f} ms", f"{times['autograd_ms']:.3f} ms",
            f"{times['ratio_to_autograd']:.2f}",
            "-" if times["ratio_to_cpu"] is None else f"{times['ratio_to_cpu']:.1f}",
            f"CPU {shape.promised_cpu_ms:g} ms, GPU {shape.promised_gpu_ms:g} ms, "
            f"{shape.promised_cpu_ms / shape.promised_gpu_ms:.1f}",
        ))  # fmt: skip
    tell(in_columns(rows))
    if device.kind != "cuda":
        tell(
            f"\nThese are times of a {device.kind.upper()}: there is no NVIDIA GPU here, and nothing is said about one."
        )
    return None


# ----------------------------------------------------------------------------------------------------------------------
# `dualtune bench attention`: the attention of one layer at a length, forward and backward.

GPU_HEADS, CPU_HEADS = (32, 8), (4, 1)  # query heads, and those of keys and values: Mistral 7B's, and an eighth of them


@click.command("attention")
@click.option("--tokens", type=click.IntRange(min=1), default=4096, show_default=True, help="The length of the row.")
@click.option(
    "--heads", type=click.IntRange(min=1), help=f"Query heads.  [default: {GPU_HEADS[0]}; {CPU_HEADS[0]} on a CPU]"
)
@click.option(
    "--kv-heads", type=click.IntRange(min=1),
    help=f"Heads of keys and values.  [default: {GPU_HEADS[1]}; {CPU_HEADS[1]} on a CPU]",
)  # fmt: skip
@click.option("--head-size", type=click.IntRange(min=1), default=128, show_default=True, help="Features of a head.")
@dtype_option
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="How many times each is timed."
)
@platform_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always, error=interrupt.Abandoned)  # Ctrl-C ends it at once
def attention_command(
    tokens: int, heads: int | None, kv_heads: int | None, head_size: int, dtype: str, rounds: int, platform: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Time attention forward and backward, and count its memory: ours, the framework's (sdpa) and eager, in turns.

    One causal document, as one layer of a model sees it. Eager attention is what a trainer uses without FlashAttention:
    it keeps the scores of all pairs of tokens.
    """
    from dualtune.doctor.bench.attention import AttentionShape, time_attention
    from dualtune.engine.card import card_of

    backend = backend_for(platform, err=as_json)
    device = backend.devices()[0]
    default_heads = CPU_HEADS if device.kind == "cpu" else GPU_HEADS
    heads, kv_heads = heads or default_heads[0], kv_heads or default_heads[1]
    if heads % kv_heads:
        raise ConfigError(f"--kv-heads: got {kv_heads}, must divide --heads ({heads})")
    if dtype == "auto":
        dtype = next(each.auto_dtype for each in card_of(backend.name).devices if each.kind == device.kind)
    shape = AttentionShape(tokens, heads, kv_heads, head_size, dtype)
    result = time_attention(backend, shape, rounds=rounds)
    if as_json:
        return say_json({"device": device.kind, "name": device.name, "backend": backend.name, **result})
    tell(
        f"{tokens:,} tokens, {heads} heads of {head_size}, {kv_heads} of keys and values, {dtype}, forward + backward\n"
    )
    rows = [("attention", "time", "of eager", "peak memory", "of eager")]
    for name, figures in result["works"].items():
        rows.append((
            name, f"{figures['ms']:.1f} ms", f"{figures['time_ratio']:.2f}", in_bytes(figures["peak_bytes"]),
            f"{figures['memory_ratio']:.1%}",
        ))  # fmt: skip
    tell(in_columns(rows))
    if device.kind == "cpu":
        tell("\nThese are figures of a CPU, where an eighth of Mistral 7B's heads is the default. A GPU was not asked.")
    return None


# ----------------------------------------------------------------------------------------------------------------------
# `dualtune bench --predict`: what a step of a config would take on a machine, computed and not measured.


def predict_for(path: Path, overrides: tuple[str, ...], name: str, platform: str, *, as_json: bool) -> None:
    """Print the prediction of a config for a machine by its short name."""
    from dualtune.config import load_config

    with phases(err=as_json) as shown:
        shown.begin("predicting", "the time of a step")
        settings = load_config(path, overrides)
        memory, time, limits = predicted_for(settings, name, platform)
    if as_json:
        needs = {"peak_bytes": memory.estimate.total_bytes, "available_bytes": memory.budget.bytes}
        return say_json({"machine": name, "limits": limits.source, **needs, **time.as_json()})
    return say("\n".join(_predicted_lines(settings, name, memory, time, limits)))


def predicted_for(settings: Config, name: str, platform: str) -> tuple[MemoryPlan, StepTime, MachineLimits]:
    """Return memory, time and limits of a config on a machine; `this` is the one it runs on.

    ConfigError for a machine whose limits are not known, EnvironmentFault where there is no formula.
    """
    from dualtune.doctor.bench.measure import limits_here
    from dualtune.doctor.check_config import plan_config, teacher_of
    from dualtune.doctor.check_config_data import look_at_data, typical_step
    from dualtune.engine.choose import choose
    from dualtune.engine.detect import detect
    from dualtune.engine.machines import limits_for, named
    from dualtune.engine.step_time import predict

    limits = None if name == "this" else limits_for(name)
    machine = detect() if name == "this" else named(name)
    choice = choose(platform, machine)
    memory = plan_config(settings, machine, choice)
    limits = limits or limits_here(choice, machine, memory.ask.dtype)
    if limits is None:
        raise EnvironmentFault("no limits are known for this machine. Name another with --predict, such as h100-80")
    documents = typical_step(settings, look_at_data(settings))
    time = predict(memory.decoder, memory.ask, documents, limits, teacher_of(settings, memory))
    return memory, time, limits


def _predicted_lines(
    settings: Config, name: str, memory: MemoryPlan, time: StepTime, limits: MachineLimits
) -> Iterator[str]:
    from dualtune.engine.step_time import SAID

    yield f"{redact(settings.model.name)} on {name}: {SAID}\n"
    header = ("part", "TFLOP", "GB", "launches", "ms", "share", "bound")
    all_s = sum(part.seconds for part in time.parts)
    rows = [
        (part.name, f"{part.flops / 1e12:.3g}", f"{part.bytes / 1e9:.3g}", f"{part.launches:,.0f}",
         f"{1e3 * part.seconds:.2f}", f"{part.seconds / all_s:.1%}", part.bound)
        for part in time.parts
    ]  # fmt: skip
    yield in_columns([header, *rows])
    peak, has = in_bytes(memory.estimate.total_bytes), in_bytes(memory.budget.bytes)
    device, host, transfers, waits = map(in_short_time, (time.device_s, time.host_s, time.transfer_s, time.waits_s))
    times = f"device {device}, host {host}, transfers {transfers}; {time.waits} waits, {waits}"
    share = f"{time.utilisation:.1%} of {time.peak_flops / 1e12:.4g} TFLOP/s (MFU)"
    yield ""
    yield in_columns([
        ("step", f"{in_short_time(time.step_s)}, bound by {time.bound}: {times}"),
        ("speed", f"{time.tokens_per_s:,.0f} tokens/s, {share}"),
        ("memory", f"{peak} at the peak, has {has}" + ("" if memory.fits else ": it does not fit")),
        ("step of", f"{time.tokens:,} tokens; lengths: {time.documents}"),
        ("limits", f"{limits.source}; the shares that are reached are assumptions of dualtune/engine/machines.py"),
    ])  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
PHASES = {
    "data": "waiting for the batches; preparing them takes {making}, during the previous step",
    "forward": "as in evaluation: without dropout, keeping nothing for the backward pass",
    "backward": "the rest of forward and backward",
    "optimizer": "clipping and the update",
}


@click.command("bench", cls=CommandWithOthers, others=[lora_backward_command, attention_command])
@config_argument
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Number of steps to measure.")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=3, show_default=True,
    help="Number of steps to run before measuring.",
)  # fmt: skip
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path, file_okay=False), default="dualtune-bench",
    show_default=True, help="The directory for the result and the traces.",
)  # fmt: skip
@click.option(
    "--predict", "machine", metavar="MACHINE",
    help="Predict the time of a step on a machine such as h100-80, or on this one (this), without running anything.",
)  # fmt: skip
@platform_option
@set_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always, error=interrupt.Abandoned)  # Ctrl-C ends it at once
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
    --predict computes the time of a step from the limits of a machine, which need not be this one.

    `dualtune bench lora-backward` times the backward pass of one LoRA layer, `dualtune bench attention` attention at a
    length; see their own --help.
    """
    if machine is not None:
        return predict_for(config, overrides, machine, platform, as_json=as_json)

    with phases(err=as_json) as shown:
        shown.begin("reading", "the config")
        from dualtune.config import load_config
        from dualtune.doctor.bench.measure import RESULT, TRACE, bench

        settings = load_config(config, overrides)
        prepared = _prepare(settings, backend_for(platform, err=as_json), shown, quiet=as_json)
        shown.begin("loading", "the model")
        result = bench(prepared, out, steps=steps, warmup=warmup, tell=lambda text: _measuring(text, shown))
    if as_json:
        return say_json(asdict(result))
    tell("\n".join(_lines(result)))
    tell(_beside(settings, platform, result))
    return tell(f"written     {out / RESULT}, {out / TRACE} (open it at https://ui.perfetto.dev)")


def _measuring(text: str, shown: Phases) -> None:
    shown.begin("measuring", "steps")
    shown.tell(f"measuring   {text}")


def _prepare(settings: Config, backend: Backend, shown: Phases, *, quiet: bool) -> Prepared:
    from dualtune.cli.progress import reading
    from dualtune.show.run import summary
    from dualtune.train.prepare import prepare

    if quiet:
        shown.begin("checking", "model and data")
        return prepare(settings, backend)
    with reading() as show:
        prepared = prepare(settings, backend, show=show)
    tell("\n".join(summary(prepared)))
    return prepared


def _beside(settings: Config, platform: str, result: BenchResult) -> str:
    """Say what would have been predicted for this machine."""
    try:
        time = predicted_for(settings, "this", platform)[1]
    except DualtuneError as error:
        return f"predicted   nothing: {error}"
    ratio = time.tokens_per_s / result.tokens_per_s
    return f"predicted   {time.tokens_per_s:,.0f} tokens/s here, computed; a token took {ratio:.2f} times as long"


def _lines(result: BenchResult) -> Iterator[str]:
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

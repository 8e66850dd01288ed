"""`dualtune bench lora-backward`: the backward pass of one LoRA layer, timed on documented shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from dualtune import interrupt
from dualtune.cli.options import backend_for, json_option, platform_option
from dualtune.cli.output.screen import tell
from dualtune.cli.output.terminal import say

if TYPE_CHECKING:
    from dualtune.bench.lora_backward import LoRATimes


@click.command("lora-backward")
@click.option("--shapes", type=click.Choice(["seed2"]), default="seed2", show_default=True, help="Which set of shapes.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="How often each is timed.")
@platform_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # Ctrl-C ends it at once: there is nothing to save
def command(shapes: str, rounds: int, platform: str, as_json: bool) -> None:
    """Time dualtune.kernels.lora_backward beside autograd, in turns, in float32.

    Both compute the gradients of the two matrices and of the input; autograd makes its forward pass first, because
    lora_backward also starts from x alone. On a GPU it is also compared with autograd on the
    CPU of the same machine, which is what the documented ratios mean.
    """
    import json

    from dualtune.bench.lora_backward import SHAPES, time_lora_backward

    backend = backend_for(platform, err=as_json)
    device = backend.devices()[0]
    results = [time_lora_backward(backend, shape, rounds=rounds) for shape in SHAPES[shapes]]
    if as_json:
        return say(json.dumps({"device": device.kind, "name": device.name, "results": [r.as_json() for r in results]}))
    return tell("\n".join(_lines(results, device.kind)))


def _lines(results: Sequence[LoRATimes], kind: str) -> Iterator[str]:
    from dualtune.text.show import in_columns

    rows = [("shape", "ours", "autograd", "autograd / ours", "CPU / ours", "documented")]
    for times in results:
        shape = times.shape
        rows.append((
            str(shape), f"{times.ours_ms:.3f} ms", f"{times.autograd_ms:.3f} ms", f"{times.ratio_to_autograd:.2f}",
            "-" if times.ratio_to_cpu is None else f"{times.ratio_to_cpu:.1f}",
            f"CPU {shape.promised_cpu_ms:g} ms, GPU {shape.promised_gpu_ms:g} ms, "
            f"{shape.promised_cpu_ms / shape.promised_gpu_ms:.1f}",
        ))  # fmt: skip
    yield in_columns(rows)
    if kind != "cuda":
        yield f"\nThese are times of a {kind.upper()}: there is no NVIDIA GPU here, and nothing is said about one."

"""`dualtune generate`: continue a prompt."""

from __future__ import annotations

from pathlib import Path

import click

from dualtune import interrupt
from dualtune.cli.options import dtype_option, platform_option, quantization_option


@click.command("generate")
@click.argument("model")
@click.option("--adapter", type=click.Path(path_type=Path), help="An adapter directory of any layout.")
@click.option("--prompt", required=True, help="The text to answer or continue.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True), default=1.0, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@dtype_option
@quantization_option
@platform_option
@interrupt.handled(interrupt.TERMINATION)  # not Ctrl-C, which here means: enough
def command(
    model: str, adapter: Path | None, prompt: str, raw: bool, temperature: float, top_p: float, max_tokens: int,
    seed: int, dtype: str, quantization: str, platform: str,
) -> None:  # fmt: skip
    """Continue a prompt with MODEL (a directory or a hub id) and its adapter. The text goes to standard output."""
    from dualtune.backend import check_value
    from dualtune.cli.options import backend_for
    from dualtune.train.inference import load_model, stream_text

    backend = backend_for(platform, err=True)
    check_value(backend, "model.dtype", dtype)
    check_value(backend, "model.quantization", quantization)
    template = "none" if raw else "auto"
    loaded = load_model(backend, model, adapter, dtype=dtype, quantization=quantization, template=template)
    ids = loaded.tokenizer.encode_prompt(prompt)
    pieces = stream_text(loaded, ids, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    for piece in pieces:
        click.echo(piece, nl=False)
    click.echo()

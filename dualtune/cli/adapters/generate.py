"""`dualtune generate`: continue a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune import interrupt
from dualtune.cli.adapters.adapter_sets import backend_that_loads, base_of, system_messages
from dualtune.cli.options import (
    dtype_option,
    no_system_option,
    platform_option,
    quantization_option,
    seed_option,
    temperature_option,
    template_option,
    top_p_option,
)
from dualtune.cli.output.terminal import pass_on, say

if TYPE_CHECKING:
    import numpy as np

    from dualtune.data.tokens.tokenizer import Tokenizer

MOST_PROMPT = 2**22  # characters


@click.command("generate")
@click.argument("model", required=False)
@click.option("--adapter", type=click.Path(path_type=Path), help="An adapter directory of any layout.")
@click.option("--prompt", required=True, help="The text to answer or continue; - reads it from standard input.")
@click.option("--system", metavar="TEXT", help="The system message.  [default: that of the adapter's training]")
@no_system_option
@click.option(
    "--raw", is_flag=True, help="Continue the prompt as it is: without chat template, with its control tokens."
)
@template_option
@temperature_option
@top_p_option
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@seed_option
@dtype_option
@quantization_option
@platform_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # not Ctrl-C, the normal way to stop
def command(
    model: str | None, adapter: Path | None, prompt: str, system: str | None, no_system: bool, raw: bool,
    template: str, temperature: float, top_p: float, max_tokens: int, seed: int, dtype: str, quantization: str,
    platform: str,
) -> None:  # fmt: skip
    """Continue a prompt with MODEL (a directory or a hub id; default: the base that the adapter names) and its adapter.

    The text goes to standard output.

    On a terminal, control characters in it are escaped; a file or another program gets it unchanged.
    """
    from dualtune.cli.output.screen import phases

    if raw and system is not None:
        raise click.UsageError("Give --raw or --system, not both.")
    if raw and template != "auto":
        raise click.UsageError("Give --raw or --template, not both.")
    model = base_of(model, [adapter] if adapter else [])
    text = _read_prompt() if prompt == "-" else prompt
    with phases(err=True) as shown:
        backend = backend_that_loads(dtype, quantization, platform)
        from dualtune.evaluate.inference import load_model, stream_text

        shown.begin("loading", "the model")
        loaded = load_model(
            backend, model, adapter, dtype=dtype, quantization=quantization, template="none" if raw else template,
            special_tokens_in_text="allow" if raw else "text",
        )  # fmt: skip
    if loaded.note:
        say(f"template    {loaded.note}", err=True)
    trained = {"adapter": adapter} if adapter else {}
    has_template = loaded.tokenizer.template is not None
    systems = system_messages(system, trained, no_system=no_system, chats=has_template)
    ids = _encoded(loaded.tokenizer, text, systems["base"])
    pieces = stream_text(loaded, ids, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    for piece in pieces:
        pass_on(piece)
    pass_on("\n")


def _encoded(tokenizer: Tokenizer, prompt: str, system: str | None) -> np.ndarray:
    """Encode a prompt behind a system message, if there is one. ConfigError without a chat template, which it needs."""
    from dualtune.data.chat.conversations import Message
    from dualtune.data.sources.rows import RowError
    from dualtune.errors import ConfigError, DataError

    if system is None:
        return tokenizer.encode_prompt(prompt)
    if tokenizer.template is None:
        raise ConfigError("--system: the model has no chat template that could write it. Give --template FILE")
    try:
        return tokenizer.encode_chat([Message("system", system), Message("user", prompt)])
    except RowError as error:
        raise DataError(
            f"the prompt with the system message: {error}. Use another --template, or --no-system"
        ) from error


def _read_prompt() -> str:
    """Read standard input to its end, without the final line break of `echo` and editors."""
    text = sys.stdin.read(MOST_PROMPT + 1)
    if len(text) > MOST_PROMPT:
        raise click.UsageError(f"--prompt -: standard input has more than {MOST_PROMPT} characters.")
    if not text.strip():
        raise click.UsageError("--prompt -: standard input is empty; type or pipe the text to answer or continue.")
    return text.removesuffix("\n")

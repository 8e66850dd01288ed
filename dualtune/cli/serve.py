"""`dualtune serve`: answer HTTP requests in the form of OpenAI's API."""

from __future__ import annotations

import errno
import os
import threading

import click

from dualtune.base import interrupt
from dualtune.base.errors import EnvironmentFault, Preempted
from dualtune.cli.adapter_sets import base_of, load_adapters, named_directories, system_messages
from dualtune.cli.options import ModelForm, form_options, no_system_option, template_option
from dualtune.cli.terminal import say

KEY_VARIABLE = "DUALTUNE_API_KEY"
USUAL_PROMPT = 32_768  # tokens, for a model whose config states no length


@click.command("serve")
@click.argument("model", required=False)
@click.option(
    "--adapter", "adapters", multiple=True, metavar="[NAME=]DIR",
    help="An adapter directory in any layout, or a run directory. Repeatable; clients name it as their model.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True,
    help="The port to listen on; 0 is any free port.",
)  # fmt: skip
@no_system_option
@template_option
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=2048, show_default=True,
    help="Maximum number of tokens per answer.",
)  # fmt: skip
@click.option(
    "--max-prompt", type=click.IntRange(min=1),
    help="Maximum number of tokens per prompt. Default: the context length of the model.",
)  # fmt: skip
@click.option(
    "--queue", type=click.IntRange(min=1), default=128, show_default=True, help="Maximum number of waiting requests."
)
@click.option(
    "--time-limit", type=click.FloatRange(min=1), default=300.0, show_default=True,
    help="Maximum number of seconds per answer.",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="Do not print a line for each request.")
@form_options
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # not Ctrl-C, the normal way to stop
def command(
    model: str | None, adapters: tuple[str, ...], host: str, port: int, no_system: bool, template: str, max_tokens: int,
    max_prompt: int | None, queue: int, time_limit: float, quiet: bool, form: ModelForm,
) -> None:  # fmt: skip
    """Serve MODEL (a directory or a hub id) and its adapters at /v1/chat/completions, /v1/completions and /v1/models.

    The default of MODEL is the base that the adapters name. Clients that ask for the model "base" get it without an
    adapter. Requests are answered one at a time; the others wait. A --host other than the default needs a key in
    DUALTUNE_API_KEY, which clients must send; nothing is encrypted.
    """
    from dualtune.base.http_server import LOOPBACK
    from dualtune.model.base_model import resolve_model
    from dualtune.model.config_file import longest_text, read_config
    from dualtune.use.chat import BASE
    from dualtune.use.serve.answers import Answers
    from dualtune.use.serve.server import CompletionServer

    # An open port without a key is refused before anything is loaded.
    directories, key = named_directories(adapters), os.environ.get(KEY_VARIABLE)
    if host not in LOOPBACK and not key:
        raise click.UsageError(
            f"--host {host} lets other machines in. Set {KEY_VARIABLE} to a key that clients must send."
        )
    model = base_of(model, [*directories.values()])
    adapter_set, backend = load_adapters(model, directories, form, template)
    # A prompt that is longer than the model's context is refused, not cut.
    longest = max_prompt or longest_text(read_config(resolve_model(model, weights=False))) or USUAL_PROMPT
    answers = Answers(
        adapter_set, max_tokens=max_tokens, max_prompt=longest, max_waiting=queue, time_limit_s=time_limit,
        is_fatal=backend.is_device_fault,
        systems=system_messages(None, directories, no_system=no_system) | {BASE: None},
    )  # fmt: skip
    try:
        server = CompletionServer(
            host, port, answers, key=key, tell=lambda text: None if quiet else say(text, err=True)
        )
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "Choose another port" if is_port else "Give an address of this machine, such as 127.0.0.1"
        raise EnvironmentFault(f"--host {host} --port {port}: {error.strerror or error}. {remedy}") from error
    # Connections have threads of their own; the model is used by this one alone, and so are signals.
    with server:
        threading.Thread(target=server.serve_forever, name="dualtune-http", daemon=True).start()
        address = f"[{host}]" if ":" in host else host
        say(f"serving     {', '.join(answers.names)} at http://{address}:{server.server_address[1]}/v1")
        try:
            while not interrupt.requested():
                answers.answer_next()
        except (KeyboardInterrupt, Preempted):
            pass
        finally:
            server.shutdown()
    say("stopped", err=True)

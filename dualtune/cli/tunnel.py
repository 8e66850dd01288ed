"""`dualtune tunnel`: run a command on another machine, with its port here and what it saves brought home."""

from __future__ import annotations

from pathlib import Path

import click

from dualtune.cli.terminal import say

TRAINING = """\
import tinker
client = tinker.ServiceClient(base_url="{url}", api_key="tml-tunnel")"""
ANSWERING = """\
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="tunnel")"""


@click.command("tunnel")
@click.argument("host", required=False)
@click.argument("words", metavar="MODEL | -- COMMAND", nargs=-1)
@click.option(
    "--watch", "watched", default="runs", show_default=True, metavar="DIR",
    help="The directory there below which the command saves.",
)  # fmt: skip
@click.option(
    "--to", type=click.Path(file_okay=False, path_type=Path), default=Path("runs"), show_default=True, metavar="DIR",
    help="The directory here to bring it to.",
)  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port here. Default: any free port.")
@click.option(
    "--program", default="dualtune", show_default=True, metavar="PATH", help="The program dualtune of that machine."
)
@click.option(
    "--wait", "wait_s", type=click.FloatRange(min=1), default=300.0, show_default=True, metavar="SECONDS",
    help="How long a lost connection is waited for, here and there.",
)  # fmt: skip
@click.option("--there", hidden=True)
def command(
    host: str | None, words: tuple[str, ...], watched: str, to: Path, port: int, program: str, wait_s: float,
    there: str | None,
) -> None:  # fmt: skip
    """Run a command on HOST over ssh: user@host, a name of ~/.ssh/config, or ssh://user@host:port.

    With a MODEL it is `dualtune serve MODEL --train` (docs/tinker.md). In any other COMMAND, {port} stands for a port
    of the loopback address there, which is forwarded:

    \b
    dualtune tunnel me@gpu Qwen/Qwen3-8B
    dualtune tunnel me@gpu -- dualtune serve Qwen/Qwen3-8B --port {port}
    dualtune tunnel me@gpu -- dualtune train config.yaml

    Each checkpoint and adapter that it saves is fetched and verified. Ctrl-C ends the command as a scheduler would.
    When the connection is lost, both ends wait --wait seconds for the next one; then the command there is ended too.
    """
    if there is not None:
        _be_there(there)
        return
    if host is None or not words:
        raise click.UsageError("Give HOST, and a MODEL or -- COMMAND.")
    from dualtune.use.tunnel.here import PORT, Tunnel, check_port, machine, new_task, port_there

    words = ("dualtune", "serve", words[0], "--train", "--runs", watched, "--port", PORT) if len(words) == 1 else words
    store = machine(host)
    check_port(port)
    free = port_there(store, program)
    is_forwarded = any(PORT in word for word in words)
    there_words = [program if i == 0 and word == "dualtune" else word for i, word in enumerate(words)]

    def on_answer(url: str) -> None:
        say(f"ready       {url}")
        if "serve" in words:
            say((TRAINING if "--train" in words else ANSWERING).format(url=url))

    tunnel = Tunnel(
        store, program, new_task(there_words, watched, free, wait_s), to, free if is_forwarded else None, port,
        say=lambda word, line: say(f"{word:<11} {line}", err=True), show=lambda text: say(text.rstrip("\n"), err=True),
        on_answer=on_answer,
    )  # fmt: skip
    code = tunnel.run()
    say(f"ended       the command on {store.host}, with exit code {code}; {tunnel.num_saved} fetched to {to}")
    raise click.exceptions.Exit(0 if tunnel.was_stopped else code)


def _be_there(there: str) -> None:
    from dualtune.use.tunnel.there import FarTask, attach, free_port, tell

    if there == "probe":
        tell("free", free_port())
    else:
        attach(FarTask.parse(there))

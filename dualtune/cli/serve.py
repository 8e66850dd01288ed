"""`dualtune serve`: answer HTTP requests in the form of OpenAI's API, or with --train in that of Tinker's."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from click.core import ParameterSource

from dualtune.base import interrupt
from dualtune.base.errors import EnvironmentFault, Preempted
from dualtune.cli.adapter_sets import base_of, load_adapters, named_directories, system_messages
from dualtune.cli.options import ModelForm, form_options, no_system_option, template_option
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.base.http_server import LimitedServer

ServerT = TypeVar("ServerT", bound="LimitedServer")
KEY_VARIABLE = "DUALTUNE_API_KEY"
TINKER_KEY = "tml-"  # the client refuses a key that does not begin so
USUAL_PROMPT = 32_768  # tokens, for a model whose config states no length
# Options that only one of the two has.
ANSWERING = {"adapters": "--adapter", "no_system": "--no-system", "template": "--template",
             "max_prompt": "--max-prompt", "max_num_seqs": "--max-num-seqs", "time_limit": "--time-limit"}  # fmt: skip
TRAINING = {"runs_dir": "--runs", "seed": "--seed", "session_timeout": "--session-timeout"}


@click.command("serve")
@click.argument("model", required=False)
@click.option(
    "--train", is_flag=True, help="Serve Tinker's interface instead: clients train adapters of MODEL and sample."
)
@click.option(
    "--runs", "runs_dir", type=click.Path(file_okay=False, path_type=Path), default=Path("runs"), show_default=True,
    help="With --train: the directory of the clients' run directories.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(min=0),
    help="With --train: draw adapters and samples from this seed where clients give none.  [default: at random]",
)  # fmt: skip
@click.option(
    "--session-timeout", type=click.FloatRange(min=30), default=600.0, show_default=True,
    help="With --train: seconds without a sign of a client after which its runs are saved and freed.",
)  # fmt: skip
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
    "--max-tokens", type=click.IntRange(min=1),
    help="Maximum number of tokens per answer.  [default: 2048; with --train what the model allows]",
)  # fmt: skip
@click.option(
    "--max-prompt", type=click.IntRange(min=1),
    help="Maximum number of tokens per prompt. Default: the context length of the model.",
)  # fmt: skip
@click.option(
    "--max-num-seqs", type=click.IntRange(min=1), default=64, show_default=True,
    help="Maximum number of requests answered at once, fewer where memory is short; 1: one after another.",
)  # fmt: skip
@click.option(
    "--queue",
    type=click.IntRange(min=1),
    help="Maximum number of waiting requests.  [default: 128; with --train 2000]",
)
@click.option(
    "--time-limit", type=click.FloatRange(min=1), default=300.0, show_default=True,
    help="Maximum number of seconds per answer.",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="Do not print a line for each request.")
@form_options
@click.pass_context
def command(
    context: click.Context, model: str | None, train: bool, runs_dir: Path, seed: int | None, session_timeout: float,
    adapters: tuple[str, ...], host: str, port: int, no_system: bool, template: str, max_tokens: int | None,
    max_prompt: int | None, max_num_seqs: int, queue: int | None, time_limit: float, quiet: bool, form: ModelForm,
) -> None:  # fmt: skip
    """Serve MODEL (a directory or a hub id) and its adapters at /v1/chat/completions, /v1/completions and /v1/models.

    The default of MODEL is the base that the adapters name. Clients that ask for the model "base" get it without an
    adapter. Requests that come at the same time are answered in one batch, whichever adapters they name. A --host other
    than the default needs a key in DUALTUNE_API_KEY, which clients must send; nothing is encrypted.

    With --train, programs that use the package tinker train adapters of MODEL here (docs/tinker.md).
    """
    _check_options(context, train)
    key = _key(host, begins=TINKER_KEY if train else "")
    tell = _silent if quiet else _tell
    if train:
        if model is None:
            raise click.UsageError("Missing argument 'MODEL': --train needs the model that is trained.")
        _serve_training(model, runs_dir, host, port, key, tell, form, queue or 2000, max_tokens, session_timeout, seed)
    else:
        _serve_answers(
            model, adapters, host, port, key, tell, form, no_system=no_system, template=template,
            max_tokens=max_tokens or 2048, max_prompt=max_prompt, max_num_seqs=max_num_seqs,
            queue=queue or 128, time_limit=time_limit,
        )  # fmt: skip


@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # not Ctrl-C, the normal way to stop
def _serve_answers(
    model: str | None, adapters: tuple[str, ...], host: str, port: int, key: str | None, tell: Callable[[str], None],
    form: ModelForm, *, no_system: bool, template: str, max_tokens: int, max_prompt: int | None, max_num_seqs: int,
    queue: int, time_limit: float,
) -> None:  # fmt: skip
    from dualtune.engine.memory.serving import ENDED_SHARE, bank_numbers, cache_tokens
    from dualtune.model.base_model import resolve_model
    from dualtune.model.config_file import longest_text, read_config
    from dualtune.use.chat import BASE
    from dualtune.use.serve.answers import AT_ONCE, Answers
    from dualtune.use.serve.server import CompletionServer

    directories = named_directories(adapters)
    model = base_of(model, [*directories.values()])
    adapter_set, backend = load_adapters(model, directories, form, template)
    # A prompt that is longer than the model's context is refused, not cut.
    config, dtype = read_config(resolve_model(model, weights=False)), adapter_set.engine.description.dtype
    longest, memory = max_prompt or longest_text(config) or USUAL_PROMPT, backend.memory()
    tokens = cache_tokens(config, dtype, memory)
    adapter_set.caches.most_tokens = int(ENDED_SHARE * (AT_ONCE.tokens if tokens is None else tokens))
    answers = Answers(
        adapter_set, max_tokens=max_tokens, max_prompt=longest, max_waiting=queue, time_limit_s=time_limit,
        is_fatal=backend.is_device_fault, is_shortage=backend.is_out_of_memory,
        systems=system_messages(None, directories, no_system=no_system) | {BASE: None},
        bounds=replace(AT_ONCE, rows=max_num_seqs, tokens=AT_ONCE.tokens if tokens is None else tokens),
        bank_numbers=bank_numbers(dtype, memory), tell=tell,
    )  # fmt: skip
    server = _opened(host, port, lambda: CompletionServer(host, port, answers, key=key, tell=tell))
    _run(server, f"{', '.join(answers.names)} at {_address(host, server)}/v1", answers.answer_next)
    say("stopped", err=True)


def _serve_training(
    model: str, runs_dir: Path, host: str, port: int, key: str | None, tell: Callable[[str], None], form: ModelForm,
    queue: int, max_tokens: int | None, session_timeout: float, seed: int | None,
) -> None:  # fmt: skip
    from dualtune.cli.screen import phases
    from dualtune.use.tinker.host import TrainingHost
    from dualtune.use.tinker.requests import protobufs
    from dualtune.use.tinker.server import TrainingServer
    from dualtune.use.tinker.service import TrainingService

    protobufs()  # the package is there
    with interrupt.handled(interrupt.TERMINATION, interrupt.always), phases(err=True) as shown:
        backend = form.backend()
        shown.begin("loading", "the model")
        trainer = TrainingHost(backend, model, runs_dir, dtype=form.dtype, quantization=form.quantization, tell=_tell)
        interrupt.poll()
    service = TrainingService(
        trainer, max_waiting=queue, max_tokens=max_tokens, timeout_s=session_timeout, say=_tell,
        is_fatal=backend.is_device_fault, seed=seed,
    )  # fmt: skip
    server = _opened(host, port, lambda: TrainingServer(host, port, service, key=key, tell=tell))

    def end(is_cut: bool) -> None:
        service.stop(save=not is_cut)
        server.finish_answers()

    # Ctrl-C, too, lets what is computed end: a run cannot be saved in the middle of an update.
    with interrupt.handled():
        _run(server, f"{model} for training at {_address(host, server)}, runs in {runs_dir}", service.run_next, end)
    say("stopped", err=True)


def _check_options(context: click.Context, train: bool) -> None:
    """Refuse what the other kind of server honours."""
    others = ANSWERING if train else TRAINING
    named = [
        option for name, option in others.items() if context.get_parameter_source(name) == ParameterSource.COMMANDLINE
    ]
    if named:
        reason = "is not for --train: it answers as a chat" if train else "needs --train"
        raise click.UsageError(f"{', '.join(named)} {reason}.")


def _key(host: str, begins: str) -> str | None:
    """Return the key that clients must send. An open port without one is refused before anything is loaded."""
    from dualtune.base.http_server import LOOPBACK

    key = os.environ.get(KEY_VARIABLE)
    if host not in LOOPBACK and not key:
        raise click.UsageError(
            f"--host {host} lets other machines in. Set {KEY_VARIABLE} to a key that clients must send."
        )
    if key and not key.startswith(begins):
        raise click.UsageError(f"{KEY_VARIABLE}: must begin with '{begins}': Tinker's client takes no other key.")
    return key


def _tell(text: str) -> None:
    say(text, err=True)


def _silent(text: str) -> None:
    pass


def _opened(host: str, port: int, make: Callable[[], ServerT]) -> ServerT:
    try:
        return make()
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "Choose another port" if is_port else "Give an address of this machine, such as 127.0.0.1"
        raise EnvironmentFault(f"--host {host} --port {port}: {error.strerror or error}. {remedy}") from error


def _address(host: str, server: LimitedServer) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"


def _run(
    server: LimitedServer, what: str, work: Callable[[], None], end: Callable[[bool], None] = lambda is_cut: None
) -> None:  # fmt: skip
    """Serve until a signal. Connections have threads of their own; the model is used by this one, as are signals.

    `end` gets whether Ctrl-C has cut answers short.
    """
    is_cut = False
    with server:
        threading.Thread(target=server.serve_forever, name="dualtune-http", daemon=True).start()
        say(f"serving     {what}")
        try:
            while not interrupt.requested():
                work()
        except KeyboardInterrupt:
            is_cut = True
        except Preempted:
            pass
        finally:
            server.shutdown()
            end(is_cut)

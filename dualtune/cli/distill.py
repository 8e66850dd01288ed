"""`dualtune distill`: a teacher's distributions on a config's data, for a student that trains on them."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError
from dualtune.cli.options import ModelForm, config_argument, form_options, json_option, say_json, set_option
from dualtune.cli.program import program, quoted
from dualtune.cli.screen import phases
from dualtune.cli.suggest import SuggestingGroup
from dualtune.cli.terminal import say


@click.group("distill", cls=SuggestingGroup)
def command() -> None:
    """Distil a larger model into a smaller one: record its distributions, then train with train.objective: distill."""


@command.command("record")
@config_argument
@click.option("--teacher", required=True, metavar="MODEL", help="The teacher: a hub id, a directory or a GGUF file.")
@click.option(
    "--adapter", type=click.Path(path_type=Path), help="The teacher's adapter, in any layout, or a run directory."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The new file.")
@click.option(
    "--top-k", type=click.IntRange(min=1), default=32, show_default=True,
    help="How many tokens to record at each target, the most probable ones: 8 bytes for each.",
)  # fmt: skip
@set_option
@form_options
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # Ctrl-C ends it at once: there is nothing to save
def record_command(
    config: Path, teacher: str, adapter: Path | None, out: Path, top_k: int, overrides: tuple[str, ...],
    form: ModelForm, as_json: bool,
) -> None:  # fmt: skip
    """Record the teacher's distributions on the data of CONFIG, whose model is the student.

    The teacher reads the student's tokens, so both need the same tokenizer. The file may be recorded on another machine
    than the one that trains: it is found again by the documents' contents. If the recording is stopped, the same
    command continues it: what it has is in OUT.partial.
    """
    with phases(err=as_json) as shown:
        shown.begin("reading", "the config")
        from dualtune.base.files import check_writable
        from dualtune.config import load_config
        from dualtune.data.documents import Data
        from dualtune.data.tokens.tokenizer import Tokenizer
        from dualtune.model.base_model import resolve_model
        from dualtune.model.fingerprint import fingerprint
        from dualtune.train.generation.inference import load_model
        from dualtune.train.objectives.recording import record

        check_writable(out)
        settings = load_config(config, overrides)
        tokenizer = Tokenizer.of(resolve_model(settings.model.name, weights=False), settings.data)
        parts = Data(settings).train_and_eval(tokenizer)
        backend = form.backend()  # says what it chooses before the next phase begins
        shown.begin("loading", "the teacher")
        loaded = load_model(
            backend, teacher, adapter, dtype=form.dtype, quantization=form.quantization, template="none"
        )
        if (other := tokenizer.first_difference(loaded.tokenizer)) is not None:
            raise ConfigError(
                f"--teacher: {teacher} has another tokenizer than {settings.model.name}: {other}. A teacher reads the "
                "student's tokens: choose one of the same family"
            )
        if (size := loaded.tokenizer.vocabulary_size) is not None and top_k >= size:
            raise ConfigError(f"--top-k: got {top_k}, but the teacher has {size} tokens; allowed: 1 to {size - 1}")
        shown.begin("recording", "documents")
        weights = fingerprint(resolve_model(teacher))["weights_sha256"]  # of samples: that of all would take minutes
        recorded = record(out, loaded.engine, teacher, parts, top_k, shown.update, base=weights)
    result = {"file": str(out), "documents": sum(map(len, parts)), "targets": recorded.num_targets, "top_k": top_k,
              "continued": recorded.num_continued}  # fmt: skip
    if as_json:
        return say_json(result)
    if recorded.num_continued:
        say(f"continued   {recorded.num_continued} documents were recorded before")
    say(f"recorded    {recorded.num_targets} targets with {top_k} tokens each, in {out}")
    settings_options = [word for override in overrides for word in ("--set", shlex.quote(override))]
    words = [
        program(),
        "train",
        quoted(config),
        *settings_options,
        "--train.objective distill --distill.distributions",
        quoted(out),
    ]
    return say(f"next        {' '.join(words)}")

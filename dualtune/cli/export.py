"""`dualtune export`: an adapter and its base for other programs, converted by their own tools and compared."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError
from dualtune.base.text import in_columns
from dualtune.cli.adapter_sets import base_of, system_messages
from dualtune.cli.options import (
    backend_for,
    directory_name,
    json_option,
    no_system_option,
    other_base_option,
    platform_option,
)
from dualtune.cli.program import program, quoted
from dualtune.cli.screen import phases
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.use.export.request import Exported, Request

TARGETS = ("gguf", "ollama", "lmstudio", "mlx", "hf")  # also in dualtune.use.export.request, which is imported late


@click.command("export")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("out", callback=directory_name, type=click.Path(path_type=Path), required=False)
@click.option(
    "--base", metavar="MODEL",
    help="The plain base model: a directory or a hub id.  [default: the one that the adapter names]",
)  # fmt: skip
@click.option("--to", "target", type=click.Choice(TARGETS), required=True, help="The program to write the model for.")
@click.option(
    "--quantize", metavar="KIND",
    help="The format of the weights. gguf, ollama, lmstudio: f32, f16, bf16 or a type of llama.cpp such as "
    "q4_k_m; mlx: affine4, affine8, …; hf: nf4  [default: gguf bf16; ollama, lmstudio q4_k_m; mlx, hf none]",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True,
    help="The precision of the merged weights; auto is the precision of the base model's files.",
)  # fmt: skip
@click.option("--name", help="The name of the model in file names.  [default: the name of OUT, else of the run]")
@click.option(
    "--system", metavar="TEXT", help="ollama: the system message.  [default: the one that the adapter was trained with]"
)
@no_system_option
@click.option(
    "--llama-cpp", type=click.Path(path_type=Path), envvar="DUALTUNE_LLAMA_CPP", show_envvar=True,
    help="A checkout of llama.cpp, built or not, or an environment of scripts/interop_llama.sh.  [default: what is "
    "installed: pip's gguf, llama-quantize, llama-cpp-python]",
)  # fmt: skip
@click.option("--without-loss", is_flag=True, help="Skip the evaluation of the export on the held-out rows of the run.")
@click.option(
    "--without-base", is_flag=True,
    help="Skip quantizing the base model as well, which shows what the quantization alone costs.",
)  # fmt: skip
@other_base_option
@platform_option
@json_option
@interrupt.handled(interrupt.TERMINATION, error=interrupt.Abandoned)
def command(
    directory: Path, out: Path | None, base: str | None, target: str, quantize: str | None, dtype: str,
    name: str | None, system: str | None, no_system: bool, llama_cpp: Path | None, without_loss: bool,
    without_base: bool, other_base: bool, platform: str, as_json: bool,
) -> None:  # fmt: skip
    """Write MODEL with the adapter of DIRECTORY, or the model of full fine-tuning, to OUT for another program.

    The default of OUT lies beside the run and has the program in its name: runs/first-gguf for runs/first.

    The adapter is merged into the base, and the merged model is refused if it does not compute the same function. Then
    the program's own tools convert and quantize it, the result is run on fixed prompts, and a table shows what each
    step has cost. OUT/export.json records all of it.
    """
    from dualtune.use.export.export import RECORD, export
    from dualtune.use.export.llama_environment import find_llama_cpp
    from dualtune.use.export.ollama import quoted
    from dualtune.use.export.request import KINDS, Request

    # All that can be wrong with the options is reported before a model is loaded.
    kind = quantize or KINDS[target][0]
    if kind not in KINDS[target]:
        raise ConfigError(f"--quantize: got '{kind}', for {target} allowed: {', '.join(KINDS[target])}")
    if target == "ollama":
        system = system_messages(system, {"adapter": directory}, no_system=no_system)["adapter"]
        quoted(system or "", "--system")
    elif system is not None or no_system:
        option = "--system" if system is not None else "--no-system"
        raise ConfigError(f"{option}: is for --to ollama. Others take the system message in each conversation")
    tools = find_llama_cpp(llama_cpp, kind) if target in ("gguf", "ollama", "lmstudio") else None
    # A model of full fine-tuning has no base: it is exported as it is.
    run, whole_model = _run_of(directory), _whole_model(directory)
    if whole_model is None:
        base = base_of(base, [directory], option="--base MODEL", plain=True, err=as_json)
    elif base or other_base or dtype != "auto":
        raise ConfigError(f"{whole_model}: is a whole model. Leave out --base, --other-base and --dtype, which merge")
    # The name becomes part of file names, so a path cannot be one.
    name = name or (out.resolve() if out else run).name
    if Path(name).name != name:
        raise ConfigError(f"--name: got '{name}', which is a path. Give a name for files, such as {Path(name).name}")
    out = out or run.with_name(f"{run.name}-{target}")
    request = Request(
        whole_model or directory, base, out, target, kind, name, dtype, system, other_base, not without_base,
        None if without_loss else run,
    )  # fmt: skip
    with phases(err=as_json) as shown:
        backend = backend_for(platform, at_once=True)  # which of its own it brings is asked
        shown.begin("exporting", "the model")
        exported = export(request, backend, tools, shown.tell, shown.begin)
    # The record holds all that the text below says.
    if as_json:
        say((out / RECORD).read_text(encoding="utf-8").rstrip())
        return
    say(f"\n{_table(exported, target if kind == 'none' else kind)}")
    say(f"loss        {_losses(exported)}")
    for note in exported.notes:
        say(note)
    say(f"written     {out}: {', '.join(exported.files)}")
    say(f"next        {_next_command(request, exported.files)}")


def _next_command(request: Request, files: Sequence[str]) -> str:
    """Return the command with which the export is used; `files`: what was written, by its path in the directory."""
    out, target = request.out, request.target
    if target == "ollama":
        created = re.sub(r"[^\w.-]+", "-", request.name).lower()
        return shlex.join(["ollama", "create", created, "-f", str(out / "Modelfile")])
    if target == "lmstudio":  # it finds models as publisher/model/file
        return f"{shlex.join(['cp', '-r', str(out / 'dualtune')])} ~/.lmstudio/models/"
    if target == "gguf":
        return shlex.join(["llama-server", "-m", str(out / next(name for name in files if name.endswith(".gguf")))])
    return f"{program()} chat {quoted(out)}"


def _run_of(directory: Path) -> Path:
    """Return the run directory of a run's adapter or model; of another one its own directory."""
    place = directory.resolve()
    return place.parent if place.name in ("adapter", "model") else place


def _whole_model(directory: Path) -> Path | None:
    """Return the model of a run that has trained it whole, or of this directory. None for an adapter."""
    from dualtune.model.formats.directory import CONFIG_FILE, adapter_directory

    if (adapter_directory(directory) / CONFIG_FILE).exists():
        return None
    return next((place for place in (directory / "model", directory) if (place / "config.json").is_file()), None)


def _losses(exported: Exported) -> str:
    """Return the losses on the held-out rows, the run's last evaluation first."""
    loss = exported.loss
    named = (("the run's last evaluation", loss.run), ("merged", loss.merged), ("as written", loss.written))
    measured = ", ".join(f"{label} {value:.4f}" for label, value in named if value is not None)
    texts = [f"on the held-out rows: {measured}"] if measured else []
    if loss.unknown is not None:
        texts.append(f"of the export not measured: {loss.unknown}")
    return "; ".join(texts) or "not measured"


def _table(exported: Exported, kind: str) -> str:
    """Return the distances: what the adapter changes, and what each step does to that."""
    rows = [("", "mean KL, nats", "largest", "same first token")]
    tuned = "the model" if exported.effect is None else "base and adapter"
    for label, distance in (
        ("the adapter changes the base by", exported.effect),
        ("merged: from base and adapter", exported.merge),
        (f"written as {kind}: from {tuned}", exported.result),
        (f"the base as {kind}: from the base", exported.base),
    ):
        if distance is not None:
            rows.append((label, f"{distance.kl:.2e}", f"{distance.largest:.2e}", f"{distance.same_token:.0%}"))
    lines = in_columns(rows)
    if exported.result is not None and exported.effect is not None and exported.result.kl > exported.effect.kl:
        lines += "\nnote: writing it so costs more than the adapter changes. Choose a finer --quantize"
    return lines

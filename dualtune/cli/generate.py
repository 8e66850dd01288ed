"""`dualtune generate`: continue a prompt, or many together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DataError
from dualtune.base.files import write_file
from dualtune.cli.adapter_sets import base_of, system_messages
from dualtune.cli.options import (
    ModelForm,
    form_options,
    no_system_option,
    sampling_options,
    system_option,
    template_option,
)
from dualtune.cli.screen import phases
from dualtune.cli.terminal import pass_on, say

if TYPE_CHECKING:
    import numpy as np

    from dualtune.engine.backend import Backend
    from dualtune.train.generation.inference import LoadedModel
    from dualtune.train.generation.sampling import Sampling

PromptRow = tuple[str, dict[str, Any]]  # its path:line, and its fields
MOST_PROMPT = 2**22  # characters
MOST_FILE = 2**30  # bytes
ASKED = (
    "prompt",
    "messages",
    "tools",
)  # keys of a row of --prompts; others, such as an expected answer, are passed over


@click.command("generate")
@click.argument("model", required=False)
@click.option(
    "--adapter", type=click.Path(path_type=Path), help="An adapter directory in any layout, or a run directory."
)
@click.option("--prompt", help="The text to answer or continue; - reads it from standard input.")
@click.option(
    "--prompts", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="A file of prompts: .jsonl with objects that have 'prompt' or 'messages', or a text file with one per line.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="The file for the answers to --prompts. If the command is interrupted, the same command continues from the "
    "answers in it. Default: standard output.",
)  # fmt: skip
@system_option
@no_system_option
@click.option(
    "--raw", is_flag=True,
    help="Continue the prompt unchanged, without a chat template; control tokens in it are read as such.",
)  # fmt: skip
@template_option
@sampling_options(max_tokens=256)
@form_options
@interrupt.handled(interrupt.TERMINATION, interrupt.always)  # not Ctrl-C, the normal way to stop
def command(
    model: str | None, adapter: Path | None, prompt: str | None, prompts: Path | None, output: Path | None,
    system: str | None, no_system: bool, raw: bool,
    template: str, sampling: Sampling, form: ModelForm,
) -> None:  # fmt: skip
    """Continue a prompt with MODEL (a directory or a hub id; default: the base that the adapter names) and its adapter.

    The text is written to standard output. On a terminal, its control characters are escaped; a file or a pipe gets it
    unchanged. With --prompts, each answer is a JSON line with the prompt and its number, the answer, its number of
    tokens, and whether it ended by itself.
    """
    if raw and system is not None:
        raise click.UsageError("Give --raw or --system, not both.")
    if raw and template != "auto":
        raise click.UsageError("Give --raw or --template, not both.")
    if (prompt is None) == (prompts is None):
        raise click.UsageError("Give --prompt TEXT or --prompts FILE.")
    if output is not None and prompts is None:
        raise click.UsageError("--output is for the answers to --prompts FILE.")
    # Prompts are read before the model is loaded: a wrong file costs no minute.
    rows = [] if prompts is None else read_prompts(prompts)
    model = base_of(model, [adapter] if adapter else [])
    text = _read_prompt() if prompt == "-" else prompt
    with phases(err=True) as shown:
        backend = form.backend()
        from dualtune.train.generation.inference import load_model, stream_text

        shown.begin("loading", "the model")
        loaded = load_model(
            backend, model, adapter, dtype=form.dtype, quantization=form.quantization,
            template="none" if raw else template, special_tokens_in_text="allow" if raw else "text",
        )  # fmt: skip
    if loaded.note:
        say(f"template    {loaded.note}", err=True)
    # Only the loaded tokenizer knows whether there is a template for a system message.
    chats = loaded.tokenizer.template is not None
    trained = {"adapter": adapter} if adapter else {}
    system_message = system_messages(system, trained, no_system=no_system, chats=chats)["base"]
    if text is None:
        return _answer_all(backend, model, loaded, rows, system_message, sampling, output)
    ids = _encoded(loaded, "the prompt", {"prompt": text}, system_message)
    for piece in stream_text(loaded, ids, sampling):
        pass_on(piece)
    return pass_on("\n")


def _answer_all(
    backend: Backend,
    name: str,
    model: LoadedModel,
    rows: list[PromptRow],
    system: str | None,
    sampling: Sampling,
    output: Path | None,
) -> None:
    """Answer the prompts of a file together. With a file for the answers, its rows are in the order of the prompts."""
    from dualtune.use.scoring.answers import KeptAnswers, identity

    ids = [_encoded(model, where, row, system) for where, row in rows]
    kept_answers = KeptAnswers(output, identity([name], model, sampling) if output else {})
    lines = dict[int, str]()
    with phases(err=True) as shown:
        shown.begin("generating", "answers")
        continuations = kept_answers.continued(
            "answers", model, ids, sampling, is_shortage=backend.is_out_of_memory,
            tell=lambda text: say(f"answers     {text}", err=True),
        )  # fmt: skip
        for continuation in continuations:
            prompt = {key: value for key, value in rows[continuation.number][1].items() if key in ASKED}
            row = {
                "row": continuation.number + 1,
                **prompt,
                "answer": continuation.text,
                "tokens": continuation.num_tokens,
                "is_whole": continuation.is_whole,
            }
            lines[continuation.number] = json.dumps(row) + "\n"
            if output is None:
                pass_on(lines[continuation.number])
            shown.update(len(lines), len(rows))
    if output is not None:
        write_file(output, "".join(lines[number] for number in sorted(lines)))
        kept_answers.finish()
        say(f"answers     {len(lines)} in {output}", err=True)


def read_prompts(path: Path) -> list[PromptRow]:
    """Return the rows of a file, each with its path:line: a text as `prompt`, or a conversation as `messages`.

    DataError for a row that holds no prompt, and for a file without any. Blank lines are passed over.
    """
    from dualtune.base.untrusted import open_file, parse_object

    with open_file(path, max_bytes=MOST_FILE) as file:
        lines = [(f"{path}:{number}", line) for number, line in enumerate(file, start=1) if line.strip()]
    rows = list[PromptRow]()
    for where, line in lines:
        if path.suffix not in (".jsonl", ".ndjson"):
            rows.append((where, {"prompt": line.decode("utf-8", "replace").rstrip("\r\n")}))
            continue
        row = parse_object(line, where)
        if not isinstance(row.get("prompt"), str) and not isinstance(row.get("messages"), list):
            raise DataError(f"{where}: has the keys {', '.join(row)}; needed: 'prompt', a text, or 'messages', a list")
        rows.append((where, row))
    if not rows:
        raise DataError(f"{path}: holds no prompt. Write one in each line")
    return rows


def _encoded(model: LoadedModel, where: str, row: dict[str, Any], system: str | None) -> np.ndarray:
    """Return the token ids of a row, behind the system message unless a conversation has its own.

    An answer at the end of a conversation is not part of what is asked.
    """
    from dualtune.data.chat.conversations import Message, RowReading, asked_nulls, read_messages, read_tools
    from dualtune.data.sources.rows import RowError

    if model.tokenizer.template is None and ("messages" in row or system is not None):
        subject = "'messages' need" if "messages" in row else "--system needs"
        raise ConfigError(f"{where}: {subject} a chat template. Give --template FILE, or a prompt alone")
    try:
        tools = read_tools(row.get("tools") or [])
        if "messages" in row:
            messages = asked_nulls(read_messages(row["messages"], "messages"), tools, RowReading())
            messages = messages[:-1] if messages[-1].role == "assistant" else messages
        elif system is None:
            return model.tokenizer.encode_prompt(row["prompt"])
        else:
            messages = (Message("user", row["prompt"]),)
        if system is not None and (not messages or messages[0].role != "system"):
            messages = (Message("system", system), *messages)
        return model.tokenizer.encode_chat(messages, tools=tools)
    except (RowError, DataError) as error:
        advice = "" if system is None else ". The system message may be the reason: --no-system leaves it out"
        raise DataError(f"{where}: {error}{advice}") from error


def _read_prompt() -> str:
    """Read standard input to its end, without the final line break of `echo` and editors."""
    text = sys.stdin.read(MOST_PROMPT + 1)
    if len(text) > MOST_PROMPT:
        raise click.UsageError(f"--prompt -: standard input has more than {MOST_PROMPT} characters.")
    if not text.strip():
        raise click.UsageError("--prompt -: standard input is empty; type or pipe the text to answer or continue.")
    return text.removesuffix("\n")

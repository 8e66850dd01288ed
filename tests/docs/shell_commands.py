"""What is wrong with the shell commands that pages and tables name: of dualtune, of make, and files of Python."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
from pages import ROOT

from dualtune.cli.main import cli
from dualtune.cli.suggest import CommandWithOthers, with_keys_as_set
from dualtune.config.schema import sections

OURS = {f"{section}.{key}" for section, model in sections().items() for key in model.model_fields}
TARGETS = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def shell_problems(text: str) -> list[str]:
    """What is wrong with the commands of a shell block: of dualtune, of make, and Python files that do not exist."""
    found = []
    for words in commands_in(text):
        problem = None
        if "dualtune" in (names := [Path(word).name for word in words]):
            problem = problem_of_command(words[names.index("dualtune") + 1 :])
        elif words[0] == "make":
            unknown = [
                word for word in words[1:] if "=" not in word and not word.startswith("-") and word not in TARGETS
            ]
            problem = f"no target {unknown}" if unknown else None
        elif words[0].startswith("python") and len(words) > 1 and re.match(r"(scripts|examples|benchmarks)/", words[1]):
            problem = None if (ROOT / words[1]).exists() else "no such file"
        if problem:
            found.append(f"{' '.join(words)}: {problem}")
    return found


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each simple command: continued lines joined, comments and redirections left out."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word[0] in ";&|<>":
                if words:
                    yield words
                words = ["(file)"] if word[0] in "<>" else []
            else:
                words.append(word)


def problem_of_command(words: list[str]) -> str | None:
    """What click does not know about a `dualtune` command: the command itself, an option, a choice, a config key."""
    words = [word.strip("[]") for word in words if word not in ("…", "...")]
    command, name = cli, "dualtune"
    try:
        while True:
            if isinstance(command, CommandWithOthers) and words and words[0] in command.others:
                name, *words = words
                command = command.others[name]
            words = with_keys_as_set(words)
            context = click.Context(command, info_name=name, resilient_parsing=True, **cli.context_settings)
            values, rest, _ = command.make_parser(context).parse_args(list(words))
            wrong = [problem for param in command.get_params(context) if (problem := _refused(param, values, context))]
            if wrong:
                return wrong[0]
            if not isinstance(command, click.Group) or not rest:
                return f"unexpected {rest}" if rest and not command.allow_extra_args else None
            name, *words = rest
            if (inner := command.get_command(context, name)) is None:
                return f"no command {name}"
            command = inner
    except click.UsageError as error:
        return error.format_message()


def _refused(param: click.Parameter, values: dict, context: click.Context) -> str | None:
    given = values.get(param.name)
    each = given if isinstance(given, list | tuple) else [given]
    for value in (value for value in each if isinstance(value, str)):
        if isinstance(param.type, click.Choice) and not value.isupper():  # in capitals, a word for any of them
            try:
                param.type.convert(value, param, context)
            except click.BadParameter as error:
                return error.format_message()
        if "--set" in param.opts and value.partition("=")[0] not in OURS and not value.isupper():
            return f"no config key {value.partition('=')[0]}"
    return None

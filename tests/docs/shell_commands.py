"""What is wrong with the shell commands that pages and tables name: of dualtune, make, PyTest, and our own scripts."""

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
OWN = r"(scripts|examples|benchmarks|tests)/[\w/]+\.py$"  # files that are run by Python
TARGETS = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def shell_problems(text: str) -> list[str]:
    """What is wrong with the commands of a shell block: of dualtune, make, PyTest, and Python files of ours."""
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
        elif "pytest" in words[:3]:
            problem = problem_of_tests(words)
        elif Path(words[0]).name.startswith("python") and re.match(OWN, (words[1:2] or [""])[0]):
            problem = problem_of_script(ROOT / words[1], words[2:])
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


def problem_of_tests(words: list[str]) -> str | None:
    """What PyTest does not find: a file, a folder, or a test in a file."""
    for place, _, name in (word.partition("::") for word in words if word.startswith("tests/")):
        if not (path := ROOT / place).exists():
            return f"no {place}"
        if name and not re.search(
            rf"^def {re.escape(name.partition('[')[0])}\(", path.read_text(encoding="utf-8"), re.M
        ):
            return f"no {name} in {place}"
    return None


def problem_of_script(script: Path, words: list[str]) -> str | None:
    """What a script does not know: itself, or an option, which it or a module beside it names."""
    if not script.exists():
        return "no such file"
    text = script.read_text(encoding="utf-8")
    for module in re.findall(r"^(?:from|import) (\w+)", text, re.M):
        beside = script.with_name(f"{module}.py")
        text += beside.read_text(encoding="utf-8") if beside.exists() else ""
    options = [word.strip("[]").partition("=")[0] for word in words if word.strip("[").startswith("--")]
    unknown = [option for option in options if not re.search(rf"{option}\b", text)]
    return f"no option {unknown}" if unknown else None


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

"""The reference, generated from the code: commands by their help, config keys by the schema, Python by docstrings."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click

from dualtune.cli.main import cli
from dualtune.cli.suggest import CommandWithOthers
from dualtune.config.data_section import SourceConfig
from dualtune.config.render import entry
from dualtune.config.words import config_schema, describe, examples, fragment
from dualtune.engine.capabilities import BACKEND_KEYS, OF_THE_CORE
from dualtune.engine.card import Card, cards

WIDTH = 80  # columns of code: as many as the site shows of a line
# Module -> the names that are shown; all public ones if empty.
USE = {
    "dualtune": (), "dualtune.train.run": ("TrainResult",), "dualtune.train.hooks": (), "dualtune.base.errors": (),
    "dualtune.train.objective": (),
}  # fmt: skip
BACKEND = {
    "dualtune.engine.backend": (),
    "dualtune.engine.card": (),
    "dualtune.model.optimizer": (),
    "dualtune.base.world": (),
}
TESTING = {
    "dualtune.engine.testing.conformance": (), "dualtune.engine.testing.conformance_case": (),
    "dualtune.engine.testing.tiny_models": (),
    "dualtune.engine.testing.oracles": (), "dualtune.engine.testing.tolerances": (),
}  # fmt: skip


def commands() -> str:
    """Every command and its options, as `--help` prints them."""
    parts = ["# Commands", "The output of `dualtune COMMAND --help`, for every command."]
    for name, command in _walk("dualtune", cli):
        settings = {**cli.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
        context = click.Context(command, info_name=name, **settings)
        parts += [f"## {name}", f"```text\n{command.get_help(context)}\n```"]
    return "\n\n".join(parts) + "\n"


def _walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    context = click.Context(command, info_name=name, **cli.context_settings)
    inner: dict[str, click.Command | None] = {}
    if isinstance(command, CommandWithOthers):
        inner = {**command.others}
    elif isinstance(command, click.Group):
        inner = {each: command.get_command(context, each) for each in command.list_commands(context)}
    for each, below in inner.items():
        assert below is not None
        yield from _walk(f"{name} {each}", below)


def config() -> str:
    """Every key of the config: what it means, its default, what is allowed, which backends honour it."""
    parts = [
        "# Config keys",
        "`dualtune config` prints the same as a file, and `dualtune config --schema` as JSON schema.",
    ]
    by_name = {card.name: card for card in cards() if card.name != "numpy"}  # the example for authors of backends
    for section in config_schema()["properties"]:
        node = fragment((section,))
        parts += [f"## {section}", node["description"]]
        if section == "data":
            keys = (f"- `{key}`: {_text(str(field.description))}" for key, field in SourceConfig.model_fields.items())
            parts += ["Where data is a mapping, it has the keys:", "\n".join(keys)]
        for key, inner in node["properties"].items():
            name = f"{section}.{key}"
            is_required = key in examples()[section]
            rows = [f"Allowed: {describe(inner)}."]
            rows += ["Required."] if is_required else [f"Default: `{entry('', inner['default']).split(': ', 1)[1]}`."]
            if name in BACKEND_KEYS:
                rows += [f"On {each}: {_honoured(card, name, inner)}." for each, card in sorted(by_name.items())]
            parts += [f"### {name}", _text(inner["description"]), "\n".join(f"- {_text(row)}" for row in rows)]
    return "\n\n".join(parts) + "\n"


def _honoured(card: Card, name: str, node: dict[str, object]) -> str:
    values = card.capabilities().get(name) or OF_THE_CORE.get(name) or {node["default"]}
    return ", ".join(sorted(str(value).lower() if isinstance(value, bool) else str(value) for value in values))


def python(title: str, modules: dict[str, tuple[str, ...]]) -> str:
    """The public names of modules, with their signatures and docstrings, from the source: nothing is imported."""
    parts = [f"# {title}"]
    for module, names in modules.items():
        spec = find_spec(module)
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        tree = ast.parse(source)
        parts += [f"## {module}"] + ([] if names else _docstring(tree))
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                if not names or node.name in names:
                    parts += _definition(node, source)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and not names and (shown := _constant(node, source)):
                parts += [shown]
    return "\n\n".join(part for part in parts if part) + "\n"


def _definition(node: ast.ClassDef | ast.FunctionDef, source: str) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [f"### {node.name}", _code(_signature(node)), *_docstring(node)]
    parts = [f"### {node.name}", _code("\n".join(_class_lines(node, source))), *_docstring(node)]
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            parts += [_code(_signature(each)), *_docstring(each)]
    return parts


def _class_lines(node: ast.ClassDef, source: str) -> Iterator[str]:
    """The head of a class and its fields, with the comments that say what they are."""
    lines = source.splitlines()
    yield f"class {node.name}({', '.join(map(ast.unparse, node.bases))}):".replace("()", "")
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
            first = each.lineno - 1
            while lines[first - 1].strip().startswith("#"):
                first -= 1
            yield from lines[first : each.end_lineno]


def _signature(node: ast.FunctionDef) -> str:
    decorators = [f"@{ast.unparse(each)}\n" for each in node.decorator_list if "property" in ast.unparse(each)]
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"def {node.name}({ast.unparse(node.args)}){result}"
    if len(line) > WIDTH:
        arguments = "".join(f"    {each},\n" for each in _arguments(node.args))
        line = f"def {node.name}(\n{arguments}){result}"
    return "".join(decorators) + line


def _arguments(args: ast.arguments) -> list[str]:
    """The arguments of a function, each as it is written."""
    text, parts, depth = ast.unparse(args), [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _constant(node: ast.Assign | ast.AnnAssign, source: str) -> str:
    """A public constant of a module that is written on one line, with its comment."""
    line = source.splitlines()[node.lineno - 1]
    return _code(line) if node.lineno == node.end_lineno and re.match(r"[A-Z][A-Z0-9_]*\b", line) else ""


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> list[str]:
    """The paragraphs of a docstring; one that is Python is shown as code."""
    paragraphs = (ast.get_docstring(node) or "").split("\n\n")
    return [_code(each) if _is_program(each) else _text(each) for each in paragraphs]


def _is_program(text: str) -> bool:
    try:
        return all(isinstance(each, ast.ImportFrom | ast.Assign) for each in ast.parse(text).body[:1]) and bool(text)
    except SyntaxError:
        return False


def _code(text: str) -> str:
    return f"```python\n{textwrap.dedent(text)}\n```"


def _text(text: str) -> str:
    """Text of the code as Markdown: what is not code has no marks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<\[])", r"\\\1", part) for part in parts)


PAGES = {
    "commands.md": commands,
    "config.md": config,
    "python.md": lambda: python("Python", USE),
    "backend.md": lambda: python("What a backend implements", BACKEND),
    "testing.md": lambda: python("Tests for backends", TESTING),
}

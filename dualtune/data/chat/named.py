"""Chat templates by name: ours, each of which writes what the template of a model family writes.

A file in `templates` and its name in the schema make one. The test compares each with the renderings of its original.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from dualtune.adapter.formats.chat_template import MAX_TEMPLATE_BYTES
from dualtune.config.advice import unknown_value
from dualtune.config.values import NEWEST_TEMPLATES, TemplateName
from dualtune.errors import ConfigError, FormatError
from dualtune.io.disk import expanded
from dualtune.io.untrusted import open_file

NAMES: tuple[str, ...] = get_args(TemplateName)
# These write tools as their originals do. The others refuse them.
WITH_TOOLS = ("chatml", "llama-3.1", "mistral-small", "qwen-2.5", "qwen-3")
TEMPLATES_WITH_TOOLS = f"Set data.template to one that does: {', '.join(WITH_TOOLS)}, or a Jinja file"
_FOLDER = Path(__file__).parent / "templates"


def named_template(name: str) -> str:
    """Return the Jinja source of a name. One without tools refuses conversations that have some."""
    name = NEWEST_TEMPLATES.get(name, name)
    guard, source = ((_FOLDER / f"{each}.jinja").read_text(encoding="utf-8") for each in ("guard", name))
    return source if name in WITH_TOOLS else guard.replace("ADVICE", TEMPLATES_WITH_TOOLS) + source


def is_name(choice: str) -> bool:
    """Return whether a choice of a template is a name, which may be a short one such as qwen, and not a file."""
    return choice in NAMES or choice in NEWEST_TEMPLATES


def unknown(choice: str) -> str:
    """Return the message for a choice that is neither a name nor a file. Other tools write llama3 or qwen_25."""
    names = ", ".join([*NAMES, *NEWEST_TEMPLATES])
    advice = unknown_value(choice, [*NAMES])
    message = f"data.template: got '{choice}', allowed: auto, none, {names}, or an existing Jinja file"
    return f"{message}. {advice}" if advice else message


def chosen_template(own: str | Mapping[str, str] | None, choice: str) -> str | None:
    """Return the source of the template that data.template chooses, or None if there is none.

    `own`: the model's template, or several by name. ConfigError for a choice that is neither name nor usable file.
    """
    if choice == "none":
        return None
    if choice == "auto":
        if not own:
            return None
        if not isinstance(own, str) and "default" not in own:
            raise ConfigError(
                f"data.template: the model has several chat templates ({', '.join(own)}) and none is its default. "
                "Save the right one to a file and name that file"
            )
        source = own if isinstance(own, str) else own["default"]
    elif is_name(choice):
        source = named_template(choice)
    else:
        path = expanded(choice)
        if not path.is_file():
            raise ConfigError(unknown(choice))
        try:
            with open_file(path, max_bytes=MAX_TEMPLATE_BYTES) as file:
                source = file.read(MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.template: {path} is not UTF-8 (byte {error.start})") from error
        except FormatError as error:
            raise ConfigError(f"data.template: {error}") from error
    return source

"""Write a translated config as text: first what was not translated, then our keys with their origin."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from dualtune.config.importing.table import ImportedConfig, Untranslated
from dualtune.config.load import MAPPING, load_config, parse_config
from dualtune.config.render import entry
from dualtune.config.schema import sections
from dualtune.errors import ConfigError
from dualtune.text.escape import one_line


def to_text(imported: ImportedConfig) -> str:
    """Return the config as YAML with comments. Raises ConfigError, with the foreign keys, if our loader rejects it."""
    _check(imported)
    source = one_line(imported.source)
    lines = [f"# Translated from {source}, a config of {imported.trainer}, by `dualtune config import`."]
    lines += _named("Not translated; the result differs, or may differ:", imported.lost)
    lines += _named("Not needed here:", imported.needless)
    for section in sections():
        found = [setting for setting in imported.settings if setting.key.partition(".")[0] == section]
        if found:
            lines += ["", f"{section}:"]
        for setting in found:
            comment = f"  # {one_line(setting.comment)}" if setting.comment else ""
            lines.append(entry(setting.key.partition(".")[2], setting.value) + comment)
    text = "\n".join(lines) + "\n"
    parse_config(text)  # validates the final text
    return text


def _named(title: str, keys: list[Untranslated]) -> Iterator[str]:
    if keys:
        yield from ("#", f"# {title}")
    for each in keys:
        yield f"#   {one_line(each.key)}: {one_line(each.value)}"
        yield from textwrap.wrap(one_line(each.reason), 120, initial_indent="#     ", subsequent_indent="#     ")


def _check(imported: ImportedConfig) -> None:
    nested: dict[str, dict[str, object]] = {}
    for setting in imported.settings:
        section, _, key = setting.key.partition(".")
        nested.setdefault(section, {})[key] = setting.value
    try:
        load_config(nested)
    except ConfigError as error:
        origins = {setting.key: setting.comment for setting in imported.settings}
        lines = [_with_origin(line, origins) for line in str(error).splitlines()]
        problem = f"{imported.source}: as a config of {imported.trainer}, it has values that are not allowed here"
        raise ConfigError("\n".join([f"{problem}; change them in that file and import again:", *lines])) from None


def _with_origin(line: str, origins: dict[str, str]) -> str:
    message = line.removeprefix(f"{MAPPING}: ")
    key = re.match(r"\w+\.\w+", message)
    origin = origins.get(key[0]) if key else None
    return f"  {message} (from {origin})" if origin else f"  {message}"

"""What leaves the machine: without secrets, names of users and machines, and directories."""

from __future__ import annotations

import contextlib
import getpass
import math
import re
import socket
from typing import Any, cast

from dualtune.text.redaction import REDACTED, redact

_DIRECTORIES = re.compile(r"(?<![\w.:/~])~?/(?:[^/\s'\"]+/)+")  # of an absolute path; not of a URL, or of tokens/s
_LEAST_NAME = 3  # characters: a shorter name is part of too many words
_COMMON = {"root", "user", "ubuntu", "runner", "localhost"}  # that say nothing


def anonymous(value: Any) -> Any:
    """Return a JSON value with every text made anonymous, and numbers that JSON does not have as text."""
    if isinstance(value, str):
        return _text(value, _names())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): anonymous(each) for key, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [anonymous(each) for each in cast("list[Any]", value)]
    return value


def _text(text: str, names: set[str]) -> str:
    text = _DIRECTORIES.sub(".../", redact(text))
    for name in names:
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", REDACTED, text)
    return text


def _names() -> set[str]:
    found = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with contextlib.suppress(KeyError, OSError):  # a user without a name, as in some containers
        found.add(getpass.getuser())
    return {name for name in found if len(name) >= _LEAST_NAME and name not in _COMMON}

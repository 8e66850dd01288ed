"""Secrets in text: how one is found, and how a text is shown without it.

A secret is found by its form (`secret_forms`), or because an environment variable with a telling name, such as
WANDB_API_KEY, holds it. Keys without a form of their own, such as the 40 hex digits of older W&B keys, are found in the
environment or behind their name alone: they look like commits.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from urllib.parse import quote

from dualtune.text.secret_forms import FORMS, Form

BLOT = "***"
MIN_LENGTH = 8  # of a value in the environment: blotting out every `1` or `true` would help nobody
_PIECE_BYTES = 1 << 18
_LONGEST = 1 << 12  # of what a form has to see at once to be sure
_ENVIRONMENT = "the value of a secret environment variable"
# Anywhere in a name, or as its last word. Not TOKENIZERS_PARALLELISM, AUTH_METHOD, KEYBOARD, PWD.
_TELLING = re.compile(
    r"TOKEN(?!IZ)|API_?KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE_?KEY|CONNECTION_?STRING|WEBHOOK"
    r"|(?:^|_|ACCESS|MASTER|SIGNING|SSH|PG|DB)(?:KEY|AUTH|PASS|(?<=.)PWD|PAT|CREDS?|COOKIE|JWT|DSN|SAS)"
    r"(?:_(?:ID|URL|VALUE|DATA|JSON|PEM|B64|BASE64|HEX|\d+))?$",
    re.IGNORECASE,
)
_NOT_TELLING = {"OLDPWD"}


def secret_in(text: str) -> str | None:
    """What the text seems to hold by its form: `a GitHub token`, or None. Words in front make a message of it."""
    return next((form.kind for form in _candidates(text) if form.pattern.search(text)), None)


def redact(text: str) -> str:
    """The text with every secret blotted out. What can be recognized of one must not be cut before."""
    for spelling in _environment_spellings():
        text = text.replace(spelling, BLOT)
    for form in _candidates(text):
        text = form.pattern.sub(lambda match: (match[match.lastindex] if match.lastindex else "") + BLOT, text)
    return text


class SecretSearch:
    """Looks for secrets in bytes that come piece by piece, in bounded memory; `found` is the first kind."""

    def __init__(self) -> None:
        self.found: str | None = None
        self._spellings = [os.fsencode(text).decode("latin-1") for text in _environment_spellings()]
        self._carry = ""

    def feed(self, piece: bytes) -> None:
        if self.found is None:
            text = self._carry + piece.decode("latin-1")  # every byte is a character; the forms are ASCII
            held = any(spelling in text for spelling in self._spellings)
            self.found = secret_in(text) or (_ENVIRONMENT if held else None)
            self._carry = text[-_LONGEST:]


def secret_in_file(path: Path) -> str | None:
    """What the file seems to hold, by form or by the environment, read piece by piece. OSError if it cannot be read."""
    search = SecretSearch()
    with path.open("rb") as file:
        while search.found is None and (piece := file.read(_PIECE_BYTES)):
            search.feed(piece)
    return search.found


def environment_secrets() -> list[str]:
    """The values of the environment variables that are secret by their names, the longest first."""
    names = (name for name in os.environ if _TELLING.search(name) and name not in _NOT_TELLING)
    values = {os.environ[name].strip() for name in names}
    # GOOGLE_APPLICATION_CREDENTIALS and the like name a file, and a message about that file must name it too.
    secrets = [value for value in values if len(value) >= MIN_LENGTH and not os.path.exists(value)]  # noqa: PTH110
    return sorted(secrets, key=lambda value: (-len(value), value))


def _environment_spellings() -> list[str]:
    """The secrets of the environment as Python, JSON and URLs write them, the longest first."""
    found: set[str] = set()
    for secret in environment_secrets():
        raw = os.fsencode(secret)
        found |= {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(raw), quote(raw, safe="")}
    return sorted(found, key=lambda spelling: (-len(spelling), spelling))


def _candidates(text: str) -> list[Form]:
    """The forms that the text can hold at all: nearly always none, which makes a search of a large text quick."""
    lower = text.lower()
    return [form for form in FORMS if any(cue in lower for cue in form.cues)]

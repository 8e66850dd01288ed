"""Find secrets in text, and redact them.

A secret is recognized by its form (`secret_forms`), or as the value of an environment variable with a name of a secret,
such as WANDB_API_KEY. Keys without a distinctive form, such as the 40 hex digits of older W&B keys, look like commits:
they are found only through the environment or after their name.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from urllib.parse import quote

from dualtune.text.secret_forms import FORMS, Form

REDACTED = "***"
MIN_LENGTH = 8  # of a value in the environment, because redacting every `1` or `true` does not help
_PIECE_BYTES = 1 << 18
_LONGEST = 1 << 12  # the most characters that a form needs to see at once
_ENVIRONMENT = "the value of a secret environment variable"
# Matches anywhere in a name, or its last word. Not TOKENIZERS_PARALLELISM, AUTH_METHOD, KEYBOARD, PWD.
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ)|API_?KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE_?KEY|CONNECTION_?STRING|WEBHOOK"
    r"|(?:^|_|ACCESS|MASTER|SIGNING|SSH|PG|DB)(?:KEY|AUTH|PASS|(?<=.)PWD|PAT|CREDS?|COOKIE|JWT|DSN|SAS)"
    r"(?:_(?:ID|URL|VALUE|DATA|JSON|PEM|B64|BASE64|HEX|\d+))?$",
    re.IGNORECASE,
)
_NOT_SECRET = {"OLDPWD"}


def secret_in(text: str) -> str | None:
    """Return the kind of secret found by its form, such as `a GitHub token`, or None. It fits into a message."""
    return next((form.kind for form in _candidates(text) if form.pattern.search(text)), None)


def redact(text: str) -> str:
    """Replace every secret in the text. Shorten a text only afterwards: a part of a secret may not be recognized."""
    for spelling in _environment_spellings():
        text = text.replace(spelling, REDACTED)
    for form in _candidates(text):
        text = form.pattern.sub(lambda match: (match[match.lastindex] if match.lastindex else "") + REDACTED, text)
    return text


class SecretSearch:
    """Searches a stream of bytes for secrets in bounded memory; `found` is the kind of the first one."""

    def __init__(self) -> None:
        self.found: str | None = None
        self._spellings = [os.fsencode(text).decode("latin-1") for text in _environment_spellings()]
        self._carry = ""

    def feed(self, piece: bytes) -> None:
        if self.found is None:
            text = self._carry + piece.decode("latin-1")  # maps each byte to a character; the forms are ASCII
            held = any(spelling in text for spelling in self._spellings)
            self.found = secret_in(text) or (_ENVIRONMENT if held else None)
            self._carry = text[-_LONGEST:]


def secret_in_file(path: Path) -> str | None:
    """Return the kind of secret in a file, by form or environment, or None. Raises OSError if it cannot be read."""
    search = SecretSearch()
    with path.open("rb") as file:
        while search.found is None and (piece := file.read(_PIECE_BYTES)):
            search.feed(piece)
    return search.found


def environment_secrets() -> list[str]:
    """Return the values of the environment variables with names of secrets, longest first."""
    values = {os.environ[name].strip() for name in os.environ if _names_a_secret(name)}
    # GOOGLE_APPLICATION_CREDENTIALS and similar ones name a file, which messages must be able to name too.
    secrets = [value for value in values if len(value) >= MIN_LENGTH and not os.path.exists(value)]  # noqa: PTH110
    return sorted(secrets, key=lambda value: (-len(value), value))


@functools.lru_cache(maxsize=1024)  # every row of metrics asks for every variable
def _names_a_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and name not in _NOT_SECRET


def _environment_spellings() -> list[str]:
    """Return the environment's secrets as Python, JSON and URLs write them, longest first."""
    found: set[str] = set()
    for secret in environment_secrets():
        raw = os.fsencode(secret)
        found |= {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(raw), quote(raw, safe="")}
    return sorted(found, key=lambda spelling: (-len(spelling), spelling))


def _candidates(text: str) -> list[Form]:
    """Return the forms with a cue in the text. Usually there are none, which makes searching a large text fast."""
    lower = text.lower()
    return [form for form in FORMS if any(cue in lower for cue in form.cues)]

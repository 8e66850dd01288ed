"""Secrets in text: what they look like, and how a text is shown without them.

A secret is found by its form (the prefixes that services give to their keys, credentials in a URL), or because an
environment variable with a telling name, such as WANDB_API_KEY, holds it. Keys without a form of their own, such as the
40 hex digits of older W&B keys, are found in the environment alone: they look like commits.
"""

from __future__ import annotations

import json
import os
import re
from urllib.parse import quote

BLOT = "***"
_MIN_LENGTH = 8  # of a value in the environment: blotting out every `1` or `true` would help nobody
_TELLING = re.compile(r"TOKEN(?!IZ)|API_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)  # not TOKENIZERS_…

# Kind -> pattern. What a group holds remains. Each takes linear time.
_USERINFO = r'[^\s/?#"<>:@]'
FORMS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        # Also behind hf_oauth_, so it comes first.
        "a JSON web token": r"(?<![\w-])(\w{0,30}_)?eyJ[\w-]{8,}+\.eyJ[\w-]{8,}+\.[\w-]+",
        "a Hugging Face token": r"(hf_|api_org_)[A-Za-z0-9]{20,}",
        "a GitHub token": r"(?<![A-Za-z0-9])(gh[pousr]_(?=[A-Za-z0-9]{20})|github_pat_)\w{20,}",
        # Only with a known middle or without dashes: `sk-` also begins the names of Slovak models and data.
        "an API key": r"(?<![A-Za-z0-9])(sk-)(?:(?:proj|svcacct|admin|ant|or-v1)-[\w-]{20,}|[A-Za-z0-9]{20,})",
        "an AWS access key": r"(?<![A-Za-z0-9])(AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",
        "a W&B API key": r"(wandb_v\d+_)[\w-]{20,}",
        "a bearer token": r"(?i:\b(bearer[ :=]+))(?=\S{0,80}\d)[\w.~+/=-]{8,}",
        # With one slash too: that is what pathlib makes of a URL that was taken for a path.
        "a URL with credentials": rf'(?<=:/)(/?){_USERINFO}*:[^\s/?#"<>]*(?=@)|(https://?){_USERINFO}+(?=@)',
    }.items()
}


def secret_in(text: str) -> str | None:
    """What the text seems to hold: `a GitHub token`, or None. Words in front make a message of it."""
    return next((kind for kind, form in FORMS.items() if form.search(text)), None)


def environment_secrets() -> list[str]:
    """The values of the environment variables that are secret by their names, the longest first."""
    values = {value.strip() for name, value in os.environ.items() if _TELLING.search(name)}
    # GOOGLE_APPLICATION_CREDENTIALS and the like name a file, and a message about that file must name it too.
    secrets = [value for value in values if len(value) >= _MIN_LENGTH and not os.path.exists(value)]  # noqa: PTH110
    return sorted(secrets, key=lambda value: (-len(value), value))


def redact(text: str) -> str:
    """The text with every secret blotted out. What can be recognized of one must not be cut before."""
    for secret in environment_secrets():
        raw = os.fsencode(secret)
        for spelling in {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(raw), quote(raw, safe="")}:
            text = text.replace(spelling, BLOT)
    for form in FORMS.values():
        text = form.sub(lambda match: (match[match.lastindex] if match.lastindex else "") + BLOT, text)
    return text

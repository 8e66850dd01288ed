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
from typing import NamedTuple
from urllib.parse import quote

# ----------------------------------------------------------------------------------------------------------------------
# The forms of secrets: one row for each kind of key, token or password that has a recognizable form.
#
# Based on the services' documentation of their formats. A prefix that only one service uses is enough; if a prefix also
# begins ordinary words, the form requires the exact length or a known middle, because a false positive stops a bundle
# from being packed. Text in a group is kept when the rest is redacted. Every pattern runs in linear time.


class Form(NamedTuple):
    kind: str  # a phrase that fits into a message
    cues: tuple[str, ...]  # in lower case; the pattern is only used on a text with one of them
    pattern: re.Pattern[str]


_ALONE = r"(?<![A-Za-z0-9])"  # the prefix is not the end of a longer word
_END = r"(?![A-Za-z0-9])"
_USERINFO = r'[^\s/?#"<>:@]'
_WORDS = (
    "api", "access", "account", "auth", "bearer", "bot", "client", "consumer", "deploy", "encryption", "github",
    "gitlab", "hf", "hub", "master", "private", "refresh", "service", "session", "shared", "signing", "slack",
    "storage",
)  # fmt: skip
_ENDS = ("key", "token", "secret")


def _named(first: str, rest: str, before: str, least: int) -> str:
    """Return a pattern for a value with letters and digits after a name and `:` or `=`, in YAML, JSON or a shell."""
    value = rf"(?=[^\s\d]{{0,80}}\d)(?=[^\sA-Za-z]{{0,80}}[A-Za-z])[A-Za-z0-9+/=_.~!@%^-]{{{least},}}"
    assigned = r"(?:_id)?[\"']?\s{0,3}(?::|=>?)\s{0,3}[\"']?"
    return rf"({first}(?i:{rest})(?=[\"'_\s:=]){before}(?i:{assigned}))(?![./~]{{0,3}}/){value}(?![\w(\[{{/])"


# A key or a token needs a word before it, because `token: …` is common in tokenizer files.
_NAMES_BEFORE = (f"(?<={word}{between}{end})" for end in _ENDS for word in _WORDS for between in ("", "[_-]"))
_WORD_BEFORE = f"(?i:{'|'.join(_NAMES_BEFORE)})"
_KEY = _named("[kKtTsS]", "ey|oken|ecret", _WORD_BEFORE, 16)
_PASSWORD = _named("[pPsS]", "assword|asswd|assphrase|ecret", "", 8)

_ROWS: tuple[tuple[str, str, str], ...] = (
    # kind, cues, pattern. A JSON web token comes first, because one also follows hf_oauth_.
    ("a JSON web token", "eyj", r"(?<![\w-])(\w{0,30}_)?eyJ[\w-]{8,}+\.eyJ[\w-]{8,}+\.[\w-]+"),
    (
        "a private key",
        "private key",
        r"(-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----)(?=(?:[^-]|-(?!----)){32})(?:[^-]|-(?!----))*+",
    ),
    (
        "a private key",
        "putty-user-key-file",
        r"(PuTTY-User-Key-File-\d: )[^\n]++(?:\n(?:[A-Z][\w-]*+: [^\n]*+|[A-Za-z0-9+/=]{1,64}+(?=\n|$)))*+",
    ),
    ("a private key", "age-secret-key-", r"(AGE-SECRET-KEY-)1[0-9A-Z]{58}"),
    # --- models and data
    ("a Hugging Face token", "hf_ api_org_", r"(hf_|api_org_)[A-Za-z0-9]{20,}"),
    # Only with a known middle or without dashes: `sk-` also begins the names of Slovak models and data.
    (
        "an API key",
        "sk-",
        rf"{_ALONE}(sk-)(?:(?:proj|svcacct|admin|None|ant|or-v1|lf)-[\w-]{{20,}}|[A-Za-z0-9]{{20,}})",
    ),
    ("a W&B API key", "wandb_v", r"(wandb_v\d+_)[\w-]{20,}"),
    ("a Groq key", "gsk_", rf"{_ALONE}(gsk_)[A-Za-z0-9]{{48,}}"),
    ("a Replicate token", "r8_", rf"{_ALONE}(r8_)[A-Za-z0-9]{{37}}{_END}"),
    ("an xAI key", "xai-", rf"{_ALONE}(xai-)[A-Za-z0-9]{{70,}}"),
    ("a Perplexity key", "pplx-", rf"{_ALONE}(pplx-)[A-Za-z0-9]{{40,}}"),
    ("an NVIDIA key", "nvapi-", rf"{_ALONE}(nvapi-)[\w-]{{60,}}"),
    ("a LangSmith key", "lsv2_", r"(lsv2_(?:pt|sk)_)[0-9a-f]{32}_[0-9a-f]{10}"),
    ("a Pinecone key", "pcsk_", rf"{_ALONE}(pcsk_)\w{{40,}}"),
    ("a Databricks token", "dapi", rf"{_ALONE}(dapi)[0-9a-f]{{32}}{_END}"),
    ("a Kaggle token", "kgat_", rf"{_ALONE}(KGAT_)[0-9a-f]{{32}}"),
    # --- clouds
    (
        "an AWS access key",
        "akia asia abia acca",
        rf"(A(?:KIA|SIA|BIA|CCA))(?<![A-Za-z0-9][A-Z]{{4}})[A-Z0-9]{{16}}{_END}",
    ),
    ("an AWS Bedrock key", "absk", rf"{_ALONE}(ABSK)[A-Za-z0-9+/]{{100,}}=*"),
    ("a Google API key", "aiza", rf"{_ALONE}(AIza)[\w-]{{35}}(?![\w-])"),
    ("a Google client secret", "gocspx-", r"(GOCSPX-)[\w-]{28}"),
    ("a Google access token", "ya29.", rf"{_ALONE}(ya29\.)[\w-]{{20,}}"),
    ("a Google refresh token", "1//0", rf"{_ALONE}(1//0)[\w-]{{40,}}"),
    ("an Azure storage key", "accountkey=", r"(?i:(AccountKey=))[A-Za-z0-9+/]{86}=="),
    ("an Azure shared access key", "accesskey=", r"(?i:(SharedAccessKey=))[A-Za-z0-9+/]{43}="),
    ("a signed URL", "sig=", r"([?&]sig=)[A-Za-z0-9%+/]{40,}(?:%3D|=)"),
    ("a signed URL", "signature=", r"([?&]X-(?:Amz|Goog)-Signature=)[0-9a-f]{64,}"),
    ("an Azure client secret", "q~", rf"{_ALONE}(?=\w{{3}}\dQ~)()[\w.~]{{3}}\dQ~[\w.~-]{{31,34}}(?![\w.~-])"),
    ("a DigitalOcean token", "dop_v1_ doo_v1_ dor_v1_", rf"{_ALONE}(do[opr]_v1_)[0-9a-f]{{64}}"),
    ("an Alibaba access key", "ltai", rf"{_ALONE}(LTAI)(?=[A-Za-z]{{0,20}}\d)[A-Za-z0-9]{{17,21}}{_END}"),
    ("a Heroku key", "hrku-", rf"{_ALONE}(HRKU-)[\w-]{{36,}}"),
    ("a Fly token", "fm2_", rf"{_ALONE}(fm2_)[A-Za-z0-9+/=]{{40,}}"),
    # --- code and packages
    (
        "a GitHub token",
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        rf"{_ALONE}(gh[pousr]_(?=[A-Za-z0-9]{{20}})|github_pat_)\w{{20,}}",
    ),
    (
        "a GitLab token",
        "glpat- gldt- glrt- glrtr- glcbt- glptt- glft- glsoat- glagent- gloas- glimt- glffct-",
        rf"{_ALONE}(gl(?:pat|dt|rt|rtr|cbt|ptt|ft|soat|agent|oas|imt|ffct)-)[\w.-]{{20,}}",
    ),
    ("an npm token", "npm_", rf"{_ALONE}(npm_)[A-Za-z0-9]{{36}}{_END}"),
    ("a PyPI token", "pypi-", r"(pypi-)AgE[\w-]{50,}"),
    ("a RubyGems key", "rubygems_", r"(rubygems_)[0-9a-f]{48}"),
    ("a crates.io token", "cio", rf"(cio)(?<![A-Za-z0-9]cio)(?=[A-Za-z]{{0,32}}\d)[A-Za-z0-9]{{32}}{_END}"),
    ("a Docker token", "dckr_", r"(dckr_[po]at_)[\w-]{27,}"),
    ("an Artifactory key", "akcp", rf"{_ALONE}(AKCp)[A-Za-z0-9]{{60,}}"),
    ("an Atlassian token", "atatt3 atctt3", rf"{_ALONE}(AT[AC]TT3)[\w=-]{{100,}}"),
    ("a Terraform token", ".atlasv1.", rf"{_ALONE}()[A-Za-z0-9]{{14}}\.atlasv1\.[\w=-]{{60,}}"),
    ("a Vault token", "hvs. hvb. hvr.", rf"{_ALONE}(hv[sbr]\.)[\w-]{{24,}}"),
    ("a Doppler token", "dp.", rf"{_ALONE}(dp\.(?:pt|st|ct|sa|scim|audit)\.)(?:[\w-]{{2,35}}\.)?[A-Za-z0-9]{{40,44}}"),
    ("a Pulumi token", "pul-", rf"{_ALONE}(pul-)[0-9a-f]{{40}}"),
    ("a Netlify token", "nfp_", rf"{_ALONE}(nfp_)[A-Za-z0-9]{{36,}}"),
    ("a Supabase key", "sbp_ sb_secret_", rf"{_ALONE}(sbp_(?=[0-9a-f]{{40}})|sb_secret_)[\w-]{{20,}}"),
    ("a PlanetScale token", "pscale_", r"(pscale_(?:tkn|oauth|pw)_)[\w=.-]{32,}"),
    ("a Grafana token", "glsa_ glc_", rf"{_ALONE}(glsa_|glc_(?=eyJ))[\w+/=]{{32,}}"),
    ("a New Relic key", "nrak-", rf"{_ALONE}(NRAK-)[A-Z0-9]{{27}}"),
    ("a Sentry token", "sntry", r"(sntry[su]_)[\w+/=-]{40,}"),
    ("a Dynatrace token", "dt0c01.", r"(dt0c01\.)[A-Z0-9]{24}\.[A-Z0-9]{64}"),
    ("a Postman key", "pmak-", rf"{_ALONE}(PMAK-)[0-9a-f]{{24}}-[0-9a-f]{{34}}"),
    # --- messages, mail, money
    ("a Slack token", "xox xapp-", rf"{_ALONE}(xox[a-z]-|xoxe\.xox[bp]-|xapp-)(?=[\w-]{{0,20}}\d)[\w-]{{16,}}"),
    ("a Slack webhook", "hooks.slack", r"(hooks\.slack\.com/(?:services|workflows|triggers)/)[\w/+-]{20,}"),
    ("a Discord webhook", "/api/webhooks/", r"(discord(?:app)?\.com/api/webhooks/)\d{15,}/[\w-]{40,}"),
    ("a Teams webhook", "/webhookb2/", r"(\.webhook\.office\.com/webhookb2/)[\w@/-]{40,}"),
    ("a Telegram token", ":aa", rf"{_ALONE}()\d{{8,10}}:AA[\w-]{{33}}(?![\w-])"),
    ("a Stripe key", "_live_ _test_", rf"{_ALONE}([sr]k_(?:live|test)_)[A-Za-z0-9]{{16,}}"),
    ("a Stripe webhook secret", "whsec_", rf"{_ALONE}(whsec_)[A-Za-z0-9+/]{{24,}}"),
    ("a Twilio key", "sk", rf"(SK)(?<![A-Za-z0-9]SK)[0-9a-f]{{32}}{_END}"),
    ("a SendGrid key", "sg.", rf"{_ALONE}(SG\.)[\w-]{{16,32}}\.[\w-]{{16,64}}"),
    ("a Mailgun key", "key-", rf"{_ALONE}(?<!-)(key-)[0-9a-f]{{32}}{_END}"),
    ("a Mailchimp key", "-us1 -us2 -us3 -us4 -us5 -us6 -us7 -us8 -us9", rf"{_ALONE}()[0-9a-f]{{32}}-us\d{{1,2}}{_END}"),
    ("a Brevo key", "xkeysib-", r"(xkeysib-)[0-9a-f]{64}-[A-Za-z0-9]{16}"),
    ("a Square token", "sq0", rf"{_ALONE}(sq0(?:atp|csp)-)[\w-]{{22,}}"),
    ("a Shopify token", "shpat_ shpca_ shppa_ shpss_", rf"{_ALONE}(shp(?:at|ca|pa|ss)_)[0-9a-fA-F]{{32}}"),
    ("a Notion token", "ntn_", rf"{_ALONE}(ntn_)[A-Za-z0-9]{{40,}}"),
    ("a Linear key", "lin_api_", r"(lin_api_)[A-Za-z0-9]{40}"),
    ("an Airtable token", "pat", r"(pat)(?<![A-Za-z0-9]pat)[A-Za-z0-9]{14}\.[0-9a-f]{64}"),
    # --- whatever the service
    ("a bearer token", "bearer", r"(?i:\b(bearer[ :=]+))(?=\S{0,80}\d)[\w.~+/=-]{8,}"),
    ("a password", "basic", r"(?i:(authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?basic ))[A-Za-z0-9+/]{8,}={0,2}"),
    # With one slash too, because pathlib shortens a URL that is treated as a path.
    (
        "a URL with credentials",
        ":/",
        rf'(?<=:/)(/?){_USERINFO}*:[^\s/?#"<>]*(?=@)|(https://?){_USERINFO}+(?=@)',
    ),
    ("a W&B API key", "wandb", r"(?i:(wandb[_-](?:api[_-])?key[\"']?\s{0,3}[:=]\s{0,3}[\"']?))[0-9a-f]{40}"),
    ("the value of a key or password", "key token secret", _KEY),
    ("the value of a key or password", "passw passphrase secret", _PASSWORD),
)

FORMS = tuple(Form(kind, tuple(cues.split()), re.compile(pattern)) for kind, cues, pattern in _ROWS)

# ----------------------------------------------------------------------------------------------------------------------
REDACTED = "***"
MIN_LENGTH = 8  # of a value in the environment, because redacting every `1` or `true` does not help
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
            in_environment = any(spelling in text for spelling in self._spellings)
            self.found = secret_in(text) or (_ENVIRONMENT if in_environment else None)
            self._carry = text[-_LONGEST:]


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
    spellings: set[str] = set()
    for secret in environment_secrets():
        raw = os.fsencode(secret)
        spellings |= {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(raw), quote(raw, safe="")}
    return sorted(spellings, key=lambda spelling: (-len(spelling), spelling))


def _candidates(text: str) -> list[Form]:
    """Return the forms with a cue in the text. Usually there are none, which makes searching a large text fast."""
    lower = text.lower()
    return [form for form in FORMS if any(cue in lower for cue in form.cues)]

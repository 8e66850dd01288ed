"""Secrets are recognized by their form or by the environment; what only resembles one is left alone."""

import json
import os
import random
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.base.redaction import FORMS, SecretSearch, environment_secrets, redact, secret_in

REPOSITORY = Path(__file__).parent.parent
BODY = "aB3dE5fG7h" * 4
HEX = "0123456789abcdef" * 8
UPPER = "QWERTYUIOPASDF23" * 4
PEM = "\n" + f"MIIEvQIBADANBgkqhkiG9w0BAQEFAASC{BODY}\n" * 3
JWT = f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{BODY}"
SECRETS = [
    # (kind, text in front that stays, the secret, text behind that stays); joined here, so that no scanner finds them
    ("a Hugging Face token", "hf_", BODY[:34], ""),
    ("a Hugging Face token", "x" * 9 + "hf_", BODY[:34], ", said the hub"),
    ("a Hugging Face token", "api_org_", BODY[:34], ""),
    ("a JSON web token", "hf_oauth_", JWT, "!"),
    ("a JSON web token", "", JWT, ""),
    *(("a GitHub token", f"gh{letter}_", BODY[:36], "") for letter in "pousr"),
    ("a GitHub token", "clone with github_pat_", f"{BODY[:22]}_{BODY}", "."),
    ("an API key", "sk-", BODY, ""),
    ("an API key", "key=sk-", f"proj-{BODY[:12]}-_{BODY}", "\n"),
    ("an API key", "sk-", f"ant-api03-{BODY}", ""),
    ("an AWS access key", "AKIA", "QWERTYUIOPASDF23", ""),
    ("an AWS access key", "id:ASIA", "QWERTYUIOPASDF23", "'"),
    ("a W&B API key", "wandb_v1_", f"{BODY}-{BODY}", ""),
    ("a bearer token", "Authorization: Bearer ", "abc.def~12", " (401)"),
    ("a bearer token", "'authorization': 'bearer ", "c2VjcmV0MTI=", "'"),
    ("a URL with credentials", "https://", "user:p@ss!w0rd", "@host:8080/a?b"),
    ("a URL with credentials", "s3+https://", ":only-a-password", "@host"),
    ("a URL with credentials", "postgres://", "user:", "@host/db"),
    ("a URL with credentials", "https://", "only-a-token", "@host/x.git"),
    ("a URL with credentials", "no directory https:/", "user:p@ss", "@host"),  # as pathlib writes it
    ("a URL with credentials", "https:/", "only-a-token", "@host"),
    *(("a private key", f"-----BEGIN {kind}PRIVATE KEY-----", PEM, f"-----END {kind}PRIVATE KEY-----")
      for kind in ("", "RSA ", "DSA ", "EC ", "OPENSSH ", "ENCRYPTED ", "SSH2 ENCRYPTED ")),
    ("a private key", "-----BEGIN PGP PRIVATE KEY BLOCK-----", PEM, "-----END PGP PRIVATE KEY BLOCK-----"),
    ("a private key", "-----BEGIN RSA PRIVATE KEY-----", f"\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES\n{PEM}", "-----"),
    ("a private key", '{"private_key": "-----BEGIN PRIVATE KEY-----', PEM.replace("\n", "\\n"), '-----END"'),
    ("a private key", "PuTTY-User-Key-File-2: ", "ssh-rsa\nEncryption: none\n" + BODY, "\n"),
    ("a private key", "AGE-SECRET-KEY-", "1" + (UPPER + UPPER)[:58], ""),
    ("an API key", "sk-", "or-v1-" + HEX[:64], ""),
    ("a Groq key", "gsk_", (BODY * 2)[:52], ""),
    ("a Replicate token", "r8_", BODY[:37], ""),
    ("an xAI key", "xai-", (BODY * 3)[:80], ""),
    ("a Perplexity key", "pplx-", (BODY * 2)[:48], ""),
    ("an NVIDIA key", "nvapi-", (BODY * 2)[:64], ""),
    ("a LangSmith key", "lsv2_pt_", HEX[:32] + "_" + HEX[:10], ""),
    ("a Pinecone key", "pcsk_", (BODY * 2)[:60], ""),
    ("a Databricks token", "dapi", HEX[:32], ""),
    ("a Kaggle token", "KGAT_", HEX[:32], ""),
    ("an AWS Bedrock key", "ABSK", BODY * 3, ""),
    ("a Google API key", "?key=AIza", BODY[:35], "&x"),
    ("a Google client secret", "GOCSPX-", BODY[:28], ""),
    ("a Google access token", "ya29.", BODY, ""),
    ("a Google refresh token", "1//0", BODY * 2, ""),
    ("an Azure storage key", "EndpointsProtocol=https;AccountKey=", (BODY * 3)[:86] + "==", ";"),
    ("an Azure shared access key", "SharedAccessKey=", (BODY * 2)[:43] + "=", ""),
    ("a signed URL", "https://a.blob.core.windows.net/b?sv=1&sig=", (BODY * 2)[:43] + "%3D", ""),
    ("a signed URL", "https://b.s3.amazonaws.com/x?X-Amz-Signature=", HEX[:64], ""),
    ("an Azure client secret", "", "abc8Q~" + BODY[:34], ""),
    ("a DigitalOcean token", "dop_v1_", HEX[:64], ""),
    ("an Alibaba access key", "LTAI", "5tAbCdEfGhIjKlMnOpQr", ""),
    ("a Heroku key", "HRKU-", "AA" + BODY, ""),
    ("a Fly token", "FlyV1 fm2_", BODY * 2, ""),
    *(("a GitLab token", f"gl{kind}-", BODY[:20], "") for kind in ("pat", "dt", "rt", "ptt")),
    ("an npm token", "//registry/:_authToken=npm_", BODY[:36], ""),
    ("a PyPI token", "pypi-", "AgEIcHlwaS5vcmc" + BODY * 2, ""),
    ("a RubyGems key", "rubygems_", HEX[:48], ""),
    ("a crates.io token", "cio", BODY[:32], ""),
    ("a Docker token", "dckr_pat_", BODY[:27], ""),
    ("an Artifactory key", "AKCp", (BODY * 2)[:69], ""),
    ("an Atlassian token", "ATATT3", BODY * 5, ""),
    ("a Terraform token", "", BODY[:14] + ".atlasv1." + BODY * 2, ""),
    ("a Vault token", "hvs.", BODY * 3, ""),
    ("a Doppler token", "dp.pt.", BODY, ""),
    ("a Pulumi token", "pul-", HEX[:40], ""),
    ("a Netlify token", "nfp_", BODY[:36], ""),
    ("a Supabase key", "sbp_", HEX[:40], ""),
    ("a PlanetScale token", "pscale_tkn_", BODY, ""),
    ("a Grafana token", "glsa_", BODY[:32] + "_12345678", ""),
    ("a New Relic key", "NRAK-", UPPER[:27], ""),
    ("a Sentry token", "sntrys_", "eyJ" + BODY * 2, ""),
    ("a Dynatrace token", "dt0c01.", UPPER[:24] + "." + UPPER[:64], ""),
    ("a Postman key", "PMAK-", HEX[:24] + "-" + HEX[:34], ""),
    ("a Slack token", "xoxb-", "123456789012-" + BODY, ""),
    ("a Slack token", "xapp-", "1-A0123-456-" + HEX, ""),
    ("a Slack webhook", "https://hooks.slack.com/services/", f"T0001/B0002/{BODY[:24]}", ""),
    ("a Discord webhook", "https://discord.com/api/webhooks/", "123456789012345678/" + BODY * 2, ""),
    ("a Teams webhook", "https://x.webhook.office.com/webhookb2/", BODY * 2, ""),
    ("a Telegram token", "", "123456789:AA" + BODY[:33], ""),
    ("a Stripe key", "sk_live_", BODY[:24], ""),
    ("a Stripe key", "rk_test_", BODY[:24], ""),
    ("a Stripe webhook secret", "whsec_", BODY[:32], ""),
    ("a Twilio key", "SK", HEX[:32], ""),
    ("a SendGrid key", "SG.", BODY[:22] + "." + (BODY * 2)[:43], ""),
    ("a Mailgun key", "key-", HEX[:32], ""),
    ("a Mailchimp key", "", HEX[:32] + "-us12", ""),
    ("a Brevo key", "xkeysib-", HEX[:64] + "-" + BODY[:16], ""),
    ("a Square token", "sq0atp-", BODY[:22], ""),
    ("a Shopify token", "shpat_", HEX[:32], ""),
    ("a Notion token", "ntn_", BODY + BODY[:6], ""),
    ("a Linear key", "lin_api_", BODY[:40], ""),
    ("an Airtable token", "pat", BODY[:14] + "." + HEX[:64], ""),
    ("a password", "Authorization: Basic ", "dXNlcjpwYXNzd29yZA==", ""),
    ("a W&B API key", "WANDB_API_KEY=", HEX[:40], ""),
    ("a W&B API key", 'wandb_key: "', HEX[:40], '"'),
    ("the value of a key or password", "aws_secret_access_key = ", f"wJalrXUtnFEMI/K7MDENG+{BODY[:18]}", ""),
    ("the value of a key or password", '"api_key": "', BODY[:24], '"'),
    ("the value of a key or password", "export MY_AUTH_TOKEN=", BODY[:24], " && x"),
    ("the value of a key or password", "client-secret: '", BODY[:24], "'"),
    ("the value of a key or password", "PGPASSWORD=", "hunter22", " psql"),
    ("the value of a key or password", '"passphrase": "', "correct-h0rse", '"'),
]  # fmt: skip
INNOCENT = [
    "0dcfa94e1a2b3c4d5e6f708192a3b4c5d6e7f809",  # a commit
    "hf_models/tiny", "data/laughs_and_giggles_in_the_dark_2024.jsonl", "ghp_short",
    "data/sk-wikipedia-cleaned-2023-12-01.jsonl", "org/sk-mistral-7b-instruct-v02", "task-abcdefghijklmnopqrstuvwxyz",
    "AKIA", "XAKIAQWERTYUIOPASDF23", "wandb_v1_", "the bearer of bad-news-for-all", "Bearer authentication failed",
    "http://host:80/path/user@x", "ssh://git@host/x", "git@github.com:a/b.git", "s3://bucket/key",
    "-----BEGIN PRIVATE KEY-----", "a file with -----BEGIN RSA PRIVATE KEY----- in it",
    "-----BEGIN CERTIFICATE-----" + PEM,
    "-----BEGIN PUBLIC KEY-----" + PEM, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + BODY, f"sha256:{HEX[:64]}", HEX[:40],
    f'"sha256": "{HEX[:64]}"', f"tokenizer_sha256: {HEX[:64]}", f'"config_sha256": "{HEX[:64]}"', "SKU0123456789",
    '"eos_token": "<|im_end|>"', '"pad_token": "reserved_token_250_0000"', "num_tokens: 1024",
    "tokens_per_s=12345.678901234567", "token = tokens[0]", "password = os.environ['PASSWORD_1']", "api_key=API_KEY",
    "api_key: ${API_KEY_FOR_HOST1}", "private_key = /home/me/.ssh/id_ed25519", "key: adapter.rank16_alpha32_dropout",
    "password: a word of prose", "the Asian market", "basic authorization", "glc_short", "SG.pdf", "key-value store",
    "task-us1", "hvs.", "registry-us12", "patch.1", "uuid 123e4567-e89b-12d3-a456-426614174000", "step-00000012",
    "model.layers.0.self_attn.q_proj.lora_A.weight", "bearer of a key: value", "AIza", "1//0", "2025-01-01T00:00:00Z",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4//8/w38GIAXDIBKE0DHx",
    '{"url":"http://host:80","mail":"a@b.c"}', "http://host:80 and mail to a@b.c", "C:\\data\\train.jsonl",
]  # fmt: skip


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in list(os.environ):
        if "HOME" not in name and not name.startswith("PYTEST"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("kind", "front", "secret", "behind"), SECRETS)
def test_a_secret_is_named_by_its_kind_and_blotted_out(kind, front, secret, behind):
    text = front + secret + behind
    assert secret_in(text) == kind
    assert redact(text) == f"{front}***{behind}"
    assert redact(f"two: {text} {text}") == f"two: {front}***{behind} {front}***{behind}"


def test_every_form_is_tested():
    found = {form for front, secret, behind in (row[1:] for row in SECRETS) for form in FORMS
             if form.pattern.search(front + secret + behind)}  # fmt: skip
    assert [form.kind for form in FORMS if form not in found] == []


@pytest.mark.parametrize("text", INNOCENT)
def test_what_only_resembles_a_secret_is_left_alone(text):
    assert secret_in(text) is None
    assert redact(text) == text


pieces = st.sampled_from([piece for row in SECRETS for piece in row[1:]] + ["://", "@", ":", " ", "Bearer ", "***"])


@given(st.lists(pieces | st.text(max_size=5), max_size=12).map("".join))
def test_what_is_redacted_holds_nothing_more_to_redact(text):
    once = redact(text)
    assert redact(once) == once


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.kind} {form.cues[0]}")
def test_the_work_of_a_form_grows_with_the_text_and_not_with_its_square(form):
    """Its cues and the beginnings of secrets, again and again: a quadratic pattern would take minutes."""
    pieces = {*form.cues, *(cue.upper() for cue in form.cues), "eyJ.", "://:", "bearer=", "-----BEGIN PRIVATE KEY-----"}
    start = time.process_time()
    for piece in pieces:
        for tail in ("", "a", "0", "-"):
            form.pattern.search(f"{piece}{tail}" * (20_000 // (len(piece) + 1)))
    assert time.process_time() - start < 5


def secret_in_file(path) -> str | None:
    search = SecretSearch()
    with path.open("rb") as file:
        while piece := file.read(1 << 18):
            search.feed(piece)
    return search.found


def test_nothing_in_the_repository_looks_like_a_secret():
    files = [path for ending in ("md", "yaml", "toml", "cff", "sh") for path in REPOSITORY.rglob(f"*.{ending}")]
    files += [
        path for folder in ("dualtune", "backends", "configs", "scripts") for path in (REPOSITORY / folder).rglob("*")
    ]
    files = [path for path in files if path.is_file() and not {".venv", "__pycache__"} & {*path.parts}]
    assert len(files) > 100
    assert {str(path): kind for path in files if (kind := secret_in_file(path))} == {}


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1 << 18])
@pytest.mark.parametrize(("kind", "front", "secret", "behind"), SECRETS[:30])
def test_a_secret_is_found_wherever_the_pieces_of_a_file_are_cut(kind, front, secret, behind, size):
    raw = (f"x {front}{secret}{behind} y").encode()
    search = SecretSearch()
    for start in range(0, len(raw), size):
        search.feed(raw[start : start + size])
    assert search.found is not None


def test_a_file_is_searched_in_pieces_and_for_the_environment_too(tmp_path, monkeypatch):
    file = tmp_path / "weights.safetensors"
    # Not of os.urandom: once in a while, a megabyte of it has a URL with credentials.
    file.write_bytes(random.Random(0).randbytes(1 << 20) + "päss wörd!".encode() + bytes(1 << 20))
    assert secret_in_file(file) is None
    monkeypatch.setenv("MY_PASSWORD", "päss wörd!")
    assert secret_in_file(file) == "the value of a secret environment variable"


# --- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "SOME_APIKEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD",
     "MYSQL_PASSWD", "REGISTRY_CREDENTIALS", "TOKEN_OF_MINE", "hf_token", "AWS_ACCESS_KEY_ID", "STRIPE_KEY", "KEY",
     "AZURE_STORAGE_KEY", "DB_PASS", "PGPASS", "SSHPASS", "MYSQL_PWD", "GH_PAT", "REGISTRY_AUTH", "ENCRYPTION_KEY_B64",
     "SSH_PRIVATE_KEY", "KEY_PASSPHRASE", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "AZURE_STORAGE_CONNECTION_STRING",
     "GIT_CREDS", "SESSION_COOKIE", "SIGNING_KEY_2", "MASTERKEY", "privateKey", "AZURE_SAS", "SUPABASE_JWT"],
)  # fmt: skip
def test_the_value_of_a_variable_with_the_name_of_a_secret_is_redacted(monkeypatch, name):
    monkeypatch.setenv(name, "correct horse")
    assert environment_secrets() == ["correct horse"]
    assert redact("said 'correct horse', twice: correct horse") == "said '***', twice: ***"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "short"),
        ("USE_SECRETS", "true"),
        ("TOKENIZERS_PARALLELISM", "disabled"),
        ("EDITOR", "vim --clean"),
        ("AUTH_METHOD", "kerberos-5"),
        ("KEYBOARD", "dvorak-de"),
        ("OLDPWD", "/no/such/place"),
        ("PWD", "/no/such/place"),
        ("COMPASS", "north-west"),
        ("MONKEY", "chimpanzee"),
        ("KEY_VAULT_NAME", "production"),
        ("PATH", "/no/such:/place"),
        ("XAUTHORITY", "/no/such/place"),
    ],
)
def test_harmless_variables_stay_readable(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert environment_secrets() == []
    assert redact(value) == value


def test_a_variable_that_names_a_file_stays_readable(monkeypatch, tmp_path):
    file = tmp_path / "credentials.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    assert environment_secrets() == [str(file)]  # it could be anything
    file.touch()
    assert environment_secrets() == []


@pytest.mark.parametrize(
    "value", ["p'ass\"wo\\rd", "päss wörd/+%", "line 1\nline 2", b"not \xff utf-8".decode(errors="surrogateescape")]
)
def test_a_value_is_found_as_python_json_and_urls_write_it(monkeypatch, value):
    monkeypatch.setenv("MY_PASSWORD", value)
    raw = os.fsencode(value)
    for text in (value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(raw), quote(raw, safe="")):
        assert redact(f"<{text}>") == "<***>"


def test_a_secret_within_a_secret_leaves_no_rest(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh-and-more")
    assert redact("abcdefgh-and-more abcdefgh") == "*** ***"

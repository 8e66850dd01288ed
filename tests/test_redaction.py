"""Secrets are recognized by their form or by the environment; what only resembles one is left alone."""

import json
import os
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.redaction import FORMS, environment_secrets, redact, secret_in

BODY = "aB3dE5fG7h" * 4
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
]  # fmt: skip
INNOCENT = [
    "0dcfa94e1a2b3c4d5e6f708192a3b4c5d6e7f809",  # a commit
    "hf_models/tiny", "data/laughs_and_giggles_in_the_dark_2024.jsonl", "ghp_short",
    "data/sk-wikipedia-cleaned-2023-12-01.jsonl", "org/sk-mistral-7b-instruct-v02", "task-abcdefghijklmnopqrstuvwxyz",
    "AKIA", "XAKIAQWERTYUIOPASDF23", "wandb_v1_", "the bearer of bad-news-for-all", "Bearer authentication failed",
    "http://host:80/path/user@x", "ssh://git@host/x", "git@github.com:a/b.git", "s3://bucket/key",
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
    assert {kind for kind, *_ in SECRETS} == FORMS.keys()


@pytest.mark.parametrize("text", INNOCENT)
def test_what_only_resembles_a_secret_is_left_alone(text):
    assert secret_in(text) is None
    assert redact(text) == text


pieces = st.sampled_from([piece for row in SECRETS for piece in row[1:]] + ["://", "@", ":", " ", "Bearer ", "***"])


@given(st.lists(pieces | st.text(max_size=5), max_size=12).map("".join))
def test_what_is_redacted_holds_nothing_more_to_redact(text):
    once = redact(text)
    assert redact(once) == once


def test_redacting_a_long_text_is_quick():
    start = time.perf_counter()
    for piece in (
        "a",
        "eyJ",
        "_eyJ",
        "eyJ.",
        ":",
        "://",
        "://:",
        "https://",
        "sk-",
        "hf_",
        "ghp_",
        "bearer=",
        "wandb_v1",
    ):
        redact(piece * 50_000)
    assert time.perf_counter() - start < 5  # a quadratic pattern takes minutes


# --- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "SOME_APIKEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD",
     "MYSQL_PASSWD", "REGISTRY_CREDENTIALS", "TOKEN_OF_MINE", "hf_token"],
)  # fmt: skip
def test_the_value_of_a_variable_with_a_telling_name_is_blotted_out(monkeypatch, name):
    monkeypatch.setenv(name, "correct horse")
    assert environment_secrets() == ["correct horse"]
    assert redact("said 'correct horse', twice: correct horse") == "said '***', twice: ***"


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_TOKEN", "short"), ("USE_SECRETS", "true"), ("TOKENIZERS_PARALLELISM", "disabled"), ("EDITOR", "vim --clean")],
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
